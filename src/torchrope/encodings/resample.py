"""Position tables with one entry per lattice site, interpolated to other sizes."""

import itertools

import torch
from torch import Tensor
from torch.nn import functional


def resample_axis(table: Tensor, axis: int, size: int, *, antialias: bool) -> Tensor:
    """Cubic resampling of a table along one axis; several axes in turn are bicubic, tricubic, and so on.

    Resampling is linear, so its matrix is what it does to the identity; gradients and compilers see a product.

    Args:
        table: `(..., old, ...)`.
        axis: The axis of length `old`.
        size: Its new length.
        antialias: Smooth where the table shrinks.

    Returns:
        The table with `size` entries along the axis.
    """
    old = table.shape[axis]
    wide = torch.promote_types(table.dtype, torch.float32)
    identity = torch.eye(old, device=table.device, dtype=wide).reshape(
        1, old, 1, old
    )  # the last dimension is resampled
    resampled = functional.interpolate(identity, size=(1, size), mode="bicubic", antialias=antialias)
    matrix = resampled.reshape(old, size).to(table.dtype)
    return (table.movedim(axis, -1) @ matrix).movedim(-1, axis)


def sample_table(table: Tensor, places: Tensor) -> Tensor:
    """Multilinear interpolation of a table at places between its entries; beyond its edge the last entry holds.

    Args:
        table: `(*sizes, channels)`, N sizes.
        places: Indices `(tokens, N)`, real.

    Returns:
        `(tokens, channels)`.
    """
    last = places.new_tensor(table.shape[:-1]) - 1
    inside = places.clamp(min=torch.zeros_like(last), max=last)
    below = torch.minimum(inside.floor(), (last - 1).clamp(min=0))
    share = (inside - below).to(table.dtype)
    mixed = table.new_zeros(len(places), table.shape[-1])
    for corner in itertools.product((0, 1), repeat=places.shape[-1]):
        above = torch.tensor(corner, dtype=torch.bool, device=places.device)
        weight = torch.where(above, share, 1 - share).prod(dim=-1, keepdim=True)
        index = torch.minimum(below + above, last).long()
        mixed = mixed + weight * table[index.unbind(-1)]
    return mixed
