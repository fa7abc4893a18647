"""Resample and sample position tables, which have one entry per lattice point."""

import itertools

import torch
from torch import Tensor
from torch.nn import functional

from torchrope.tensors import wide_dtype


def resample_axis(table: Tensor, axis: int, size: int, *, antialias: bool) -> Tensor:
    """Resample a table along one axis by cubic interpolation; applied to several axes it is bicubic, tricubic, etc.

    Computed as a product with the resampling matrix, which is the resampled identity, with or without a filter.
    """
    old = table.shape[axis]
    wide = wide_dtype(table)
    identity = torch.eye(old, device=table.device, dtype=wide).reshape(1, old, 1, old)  # (1, channels, 1, width)
    resampled = functional.interpolate(identity, size=(1, size), mode="bicubic", antialias=antialias)
    matrix = resampled.reshape(old, size).to(table.dtype)
    return (table.movedim(axis, -1) @ matrix).movedim(-1, axis)


def sample_table(table: Tensor, indices: Tensor) -> Tensor:
    """Interpolate a table multilinearly at fractional indices, clamped to its edges.

    Of a table `(*sizes, channels)` at indices `(tokens, N)` for N sizes, `(tokens, channels)`.
    """
    last = indices.new_tensor(table.shape[:-1]) - 1
    inside = indices.clamp(min=torch.zeros_like(last), max=last)
    below = torch.minimum(inside.floor(), (last - 1).clamp(min=0))
    fraction = (inside - below).to(table.dtype)
    interpolated = table.new_zeros(len(indices), table.shape[-1])
    for corner in itertools.product((0, 1), repeat=indices.shape[-1]):
        above = torch.tensor(corner, dtype=torch.bool, device=indices.device)
        weight = torch.where(above, fraction, 1 - fraction).prod(dim=-1, keepdim=True)
        index = torch.minimum(below + above, last).long()
        interpolated = interpolated + weight * table[index.unbind(-1)]
    return interpolated
