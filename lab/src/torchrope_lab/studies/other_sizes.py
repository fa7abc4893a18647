"""Adapt trained models to another input size without training: scaled frequencies, positions or windows."""

import copy
from dataclasses import replace

from torch import Tensor, nn

from torchrope.encodings import Encoding, NoEncoding
from torchrope.integrations.extend import extend
from torchrope.lattice import Lattice, spaced
from torchrope.models import Swin, ViT
from torchrope.positions import per_axis

Size = tuple[int, ...]

METHODS = {"ntk": "NTK", "yarn": "YaRN", "interpolate": "interpolation"}
FINE = 1_000_000  # patches along an axis, so many that one patch is negligible


def methods_for(model: ViT | Swin, encoding: str) -> list[str]:
    """Return the methods for scaling a rotary encoding without absolute encoding or bias; empty for others."""
    if "+" in encoding or isinstance(model, Swin) or isinstance(model.encodings[0], NoEncoding):
        return []
    return list(METHODS) if model.encodings[0].has_frequencies else ["interpolate"]


def extended_for(model: ViT, size: Size, trained: Size, method: str) -> ViT:
    """Return a copy of a trained model whose encodings are scaled for a larger input size.

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
    return extend(model, factor, method=method, train_size=extent)  # type: ignore[arg-type]


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


def rescaled_for(model: ViT, size: Size) -> ViT:
    """Return a copy of a trained model whose positions at a size have the range of the training positions."""
    rescaled = copy.deepcopy(model)
    encoding: Encoding = model.encodings[0]  # type: ignore[assignment]
    lattice = encoding.lattice(*model.embed.lattice(size))
    assert isinstance(model.position_map, Lattice)
    rescaled.position_map = replace(model.position_map, **lattice)
    return rescaled


class InWindows(nn.Module):
    """A Swin with another window size than in training.

    Args:
        model: Trained model.
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
    """Scale the training window size by the ratio of the patch lattices."""
    lattices = zip(model.stages[0].window, model.embed.lattice(size), model.embed.lattice(trained), strict=True)  # type: ignore
    return tuple(max(1, round(part * now / then)) for part, now, then in lattices)
