"""Trained models adapted to inputs of another size, without training: frequencies, positions, windows."""

import copy

from torch import Tensor, nn

from torchrope.encodings import STRING, Encoding, NoEncoding
from torchrope.integrations.extend import extend
from torchrope.models import Swin, ViT
from torchrope.positions import JitteredLattice, per_axis

Size = tuple[int, ...]

METHODS = {"ntk": "NTK", "yarn": "YaRN", "interpolate": "interpolation"}
FINE = 1_000_000  # patches along an axis; spacings and origins of patches are nothing then


def methods_for(model: ViT | Swin, encoding: str) -> list[str]:
    """The ways to scale a rotary encoding without an absolute one or a bias; none for others."""
    if "+" in encoding or isinstance(model, Swin) or isinstance(model.encodings[0], NoEncoding):
        return []
    with_frequencies = isinstance(model.encodings[0], STRING) or model.encodings[0].block_size == 2
    return list(METHODS) if with_frequencies else ["interpolate"]


def extended_for(model: ViT, size: Size, trained: Size, method: str) -> ViT:
    """A copy of a trained model whose encodings are scaled for inputs of a larger size.

    Args:
        model: Trained.
        size: Of the inputs.
        trained: Of those in training.
        method: A key of `METHODS`.

    Raises:
        ValueError: what `extend` refuses.
    """
    lattice = model.embed.lattice(trained)
    factor = [now / then for now, then in zip(model.embed.lattice(size), lattice, strict=True)]
    spacing = per_axis("spacing", model.spacing, len(lattice))
    extent = [count * step for count, step in zip(lattice, spacing, strict=True)]
    return extend(model, factor, method=method, train_size=extent)  # type: ignore[arg-type]


def ends_of_lattice(model: ViT, trained: Size) -> str | None:
    """The range of the positions that a model was trained with, "[0, 1]", where its encoding's paper has a fixed one.

    None where the unit is a patch, where positions were set otherwise, and where voxels place them.
    """
    lattice = model.embed.lattice(trained)
    encoding: Encoding = model.encodings[0]  # type: ignore[assignment]
    own, fine = encoding.lattice(*lattice), encoding.lattice(*(FINE for _ in lattice))
    as_in_paper = (model.spacing, model.origin) == (own["spacing"], own["origin"])
    if own == fine or not as_in_paper or not isinstance(model.place, JitteredLattice | None):
        return None
    spacing, origin = (per_axis(name, fine[name], len(lattice))[0] for name in ("spacing", "origin"))
    return f"[{round(origin, 3):g}, {round(origin + FINE * spacing, 3):g}]"


def rescaled_for(model: ViT, size: Size) -> ViT:
    """A copy of a trained model whose positions at a size have the range of those in training."""
    again = copy.deepcopy(model)
    encoding: Encoding = model.encodings[0]  # type: ignore[assignment]
    own = encoding.lattice(*model.embed.lattice(size))
    for places in (again, again.place):
        if places is not None:
            places.spacing, places.origin = own["spacing"], own["origin"]  # type: ignore[union-attr]
    return again


class InWindows(nn.Module):
    """A Swin that attends in windows of another size than in training.

    Args:
        model: Trained.
        window: Tokens of a window along each axis.
    """

    def __init__(self, model: Swin, window: tuple[int, ...]) -> None:
        super().__init__()
        self.model = model
        self.window = window

    def forward(self, x: Tensor) -> Tensor:
        """Logits `(batch, classes)`."""
        return self.model(x, window_size=self.window)


def window_at(model: Swin, size: Size, trained: Size) -> tuple[int, ...]:
    """The window that is as much larger than that of the training as the lattice of patches is."""
    lattices = zip(model.stages[0].window, model.embed.lattice(size), model.embed.lattice(trained), strict=True)  # type: ignore
    return tuple(max(1, round(part * now / then)) for part, now, then in lattices)
