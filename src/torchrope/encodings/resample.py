"""Position tables with one entry per lattice site, interpolated to other sizes."""

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
