"""Adapt trained models to another input size without training: scaled frequencies, positions or windows."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from torchrope import extend
from torchrope.encodings import Encoding, NoEncoding
from torchrope.lattice import Lattice
from torchrope.models import Swin, ViT
from torchrope.positions import per_axis
from torchrope_lab.data.datamodule import DataModule
from torchrope_lab.training.evaluate import predict_at, windows_at
from torchrope_lab.training.sizes import Size

Adapted = tuple[ViT | Swin, dict[str, Any]]
"""A model, and options of its calls."""

METHODS = {"ntk": "NTK", "yarn": "YaRN", "interpolate": "interpolation"}
RESCALED, GROWN = "positions in", "larger windows"
HOW_SIZED = {
    "read": "are read from their files at every size, so that larger ones have the detail of the files",
    "cropped": "are cropped from their files without resizing, so that larger ones show more of a picture",
    "resampled": "of other sizes are resampled from it, so that larger ones have no more detail, unlike in papers",
}
"""How inputs of other sizes are made, by `DataModule.other_sizes`."""
FINE = 1_000_000  # patches along an axis, so many that one patch is negligible


class Sizes(NamedTuple):
    """The input sizes that models are evaluated at."""

    all: tuple[Size, ...]  # in increasing order
    trained: Size  # one of them
    axis: int  # the axis whose size defines the scale, the first other than time and depth

    @property
    def larger(self) -> tuple[Size, ...]:
        """Sizes above the training size."""
        return tuple(size for size in self.all if size > self.trained)

    @property
    def farthest(self) -> Size:
        """The size of the answer: the largest, or the smallest if none is above the training size."""
        return self.all[-1] if self.larger else self.all[0]

    def scale(self, size: Size) -> float:
        """Return a size as a multiple of the training size."""
        return size[self.axis] / self.trained[self.axis]


class Adaptation(NamedTuple):
    """A way to evaluate a trained model at other input sizes without training. It can be pickled."""

    key: str  # identifies it in the names of stored predictions
    what: str  # name in tables; empty for the model as it was trained
    adapt: Callable[[Any, Size], Adapted]  # returns a copy for a size; raises ValueError if not supported
    sizes: Sequence[Size]


def adaptations(model: ViT | Swin, encoding: str, sizes: Sizes) -> list[Adaptation]:
    """List the adaptations of a model: first none; windows of a Swin that grow; frequencies and positions of a ViT."""
    # Heo et al., RoPE-ViT, figures 5 and 6, for windows. Yu et al., ComRoPE, table 3 of the supplement, whose code
    # divides positions by the number of patches. With an absolute encoding or bias, rotary encodings are not scaled.
    ways = [Adaptation("top1", "", unchanged, sizes.all)]
    others = [size for size in sizes.all if size != sizes.trained]
    if isinstance(model, Swin):
        return [*ways, Adaptation("windows", GROWN, with_grown_windows, others)]
    if "+" not in encoding and not isinstance(model.encodings[0], NoEncoding) and sizes.larger:
        for method in METHODS if model.encodings[0].has_frequencies else ["interpolate"]:
            adapt = partial(extended_for, trained=sizes.trained, method=method)
            ways.append(Adaptation(method, METHODS[method], adapt, sizes.larger))
    if ends := fixed_position_range(model, sizes.trained):
        ways.append(Adaptation("rescaled", f"{RESCALED} {ends}", rescaled_for, others))
    return ways


def predict_adapted(
    model: ViT | Swin, data: DataModule, *, size: Size, adapt: Callable[[Any, Size], Adapted]
) -> dict[str, Any]:
    """Return true and predicted classes of the validation set at a size, or the reason why adaptation is impossible."""
    try:
        adapted, options = adapt(model, size)
    except ValueError as error:
        return {"refused": str(error)}
    labels, logits = predict_at(adapted, data, size, **options)
    return {"labels": labels.tolist(), "predicted": logits.argmax(dim=-1).tolist()}


def unchanged(model: ViT | Swin, size: Size) -> Adapted:
    """Return a model as it was trained."""
    return model, {}


def with_grown_windows(model: Swin, size: Size) -> Adapted:
    """Return a Swin, and windows that are scaled by the input size."""
    return model, {"window_size": windows_at(model, size, "grow")}


def extended_for(model: ViT, size: Size, trained: Size, method: str) -> Adapted:
    """Copy a trained model with encodings scaled, by a key of `METHODS`, for a larger input size."""
    lattice = model.embed.lattice(trained)
    factor = [now / then for now, then in zip(model.embed.lattice(size), lattice, strict=True)]
    spacing = model.position_map.spaced(*lattice)["spacing"]
    extent = [count * step for count, step in zip(lattice, spacing, strict=True)]
    train_size = extent if method == "yarn" else None
    return extend(model, factor, method=method, train_size=train_size), {}  # type: ignore[arg-type]


def fixed_position_range(model: ViT, trained: Size) -> str | None:
    """Return the range of a model's training positions, "[0, 1]", if its encoding's paper fixes that range."""
    # None if the unit of position is a patch, or positions are set otherwise or given by voxels.
    lattice = model.embed.lattice(trained)
    encoding: Encoding = model.encodings[0]  # type: ignore[assignment]
    of_paper, fine = encoding.lattice.spaced(*lattice), encoding.lattice.spaced(*(FINE for _ in lattice))
    if of_paper == fine or replace(model.position_map, cell=0.0, intensity=1.0) != Lattice(**of_paper):
        return None
    spacing, origin = (per_axis(name, fine[name], len(lattice))[0] for name in ("spacing", "origin"))
    return f"[{round(origin, 3):g}, {round(origin + FINE * spacing, 3):g}]"


def rescaled_for(model: ViT, size: Size) -> Adapted:
    """Copy a trained model with positions that have the range of the training positions at a size."""
    rescaled = copy.deepcopy(model)
    encoding: Encoding = model.encodings[0]  # type: ignore[assignment]
    rescaled.position_map = replace(model.position_map, **encoding.lattice.spaced(*model.embed.lattice(size)))
    return rescaled, {}
