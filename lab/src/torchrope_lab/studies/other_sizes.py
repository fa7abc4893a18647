"""Adapt trained models to another input size without training: scaled frequencies, positions or windows."""

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from torchrope.encodings import Encoding, NoEncoding
from torchrope.integrations.extend import extend
from torchrope.lattice import Lattice, spaced
from torchrope.models import Swin, ViT
from torchrope.positions import per_axis
from torchrope_lab.training.evaluate import windows_at
from torchrope_lab.training.sizes import Size

Adapted = tuple[ViT | Swin, dict[str, Any]]
"""A model, and options of its calls."""

METHODS = {"ntk": "NTK", "yarn": "YaRN", "interpolate": "interpolation"}
RESCALED, GROWN = "positions in", "larger windows"
FINE = 1_000_000  # patches along an axis, so many that one patch is negligible


class Adaptation(NamedTuple):
    """A way to adapt a trained model to an input size without training.

    Attributes:
        key: Identifies it in the names of stored predictions.
        what: Name in tables.
        adapt: Adapts a model to a size; raises ValueError for models and sizes that it does not support.
        any_size: Whether it is for sizes below the training size too.
    """

    key: str
    what: str
    adapt: Callable[[Any, Size], Adapted]
    any_size: bool = True


def adaptations(model: ViT | Swin, encoding: str, trained: Size) -> list[Adaptation]:
    """List the adaptations of a model: windows of a Swin that grow; of a ViT scaled frequencies and positions.

    Args:
        model: Model, also on the meta device.
        encoding: Its encoding; those with an absolute encoding or bias beside the rotary one are not scaled.
        trained: The training size.

    References:
        Heo et al., RoPE-ViT, figures 5 and 6, for windows. Yu et al., ComRoPE, table 3 of the supplement, whose code
        divides positions by the number of patches.
    """
    if isinstance(model, Swin):
        return [Adaptation("windows", GROWN, lambda swin, at: (swin, {"window_size": windows_at(swin, at, "grow")}))]
    found = []
    if "+" not in encoding and not isinstance(model.encodings[0], NoEncoding):
        for method in METHODS if model.encodings[0].has_frequencies else ["interpolate"]:
            adapt = partial(extended_for, trained=trained, method=method)
            found.append(Adaptation(method, METHODS[method], adapt, any_size=False))
    if ends := fixed_position_range(model, trained):
        found.append(Adaptation("rescaled", f"{RESCALED} {ends}", rescaled_for))
    return found


def extended_for(model: ViT, size: Size, trained: Size, method: str) -> Adapted:
    """Copy a trained model with encodings scaled for a larger input size.

    Args:
        model: Trained model.
        size: The larger input size.
        trained: The training input size.
        method: A key of `METHODS`.

    Raises:
        ValueError: `extend` does not support the model or the size.
    """
    lattice = model.embed.lattice(trained)
    factor = [now / then for now, then in zip(model.embed.lattice(size), lattice, strict=True)]
    spacing = spaced(model.position_map, lattice)["spacing"]
    extent = [count * step for count, step in zip(lattice, spacing, strict=True)]
    return extend(model, factor, method=method, train_size=extent), {}  # type: ignore[arg-type]


def fixed_position_range(model: ViT, trained: Size) -> str | None:
    """Return the range of a model's training positions, "[0, 1]", if its encoding's paper fixes that range.

    None if the unit of position is a patch, or positions are set otherwise or given by voxels.
    """
    lattice = model.embed.lattice(trained)
    encoding: Encoding = model.encodings[0]  # type: ignore[assignment]
    of_paper, fine = encoding.lattice(*lattice), encoding.lattice(*(FINE for _ in lattice))
    position_map = model.position_map
    still = replace(position_map, cell=0.0, intensity=1.0) if isinstance(position_map, Lattice) else None
    if of_paper == fine or still != Lattice(**of_paper):
        return None
    spacing, origin = (per_axis(name, fine[name], len(lattice))[0] for name in ("spacing", "origin"))
    return f"[{round(origin, 3):g}, {round(origin + FINE * spacing, 3):g}]"


def rescaled_for(model: ViT, size: Size) -> Adapted:
    """Copy a trained model with positions that have the range of the training positions at a size."""
    rescaled = copy.deepcopy(model)
    encoding: Encoding = model.encodings[0]  # type: ignore[assignment]
    assert isinstance(model.position_map, Lattice)
    rescaled.position_map = replace(model.position_map, **encoding.lattice(*model.embed.lattice(size)))
    return rescaled, {}
