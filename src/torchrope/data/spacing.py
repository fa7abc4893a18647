"""Voxels in millimetres."""

from collections.abc import Sequence

import torch
from torch import Tensor

from torchrope.positions import grid


def patch_positions(spacings: Tensor, lattice: Sequence[int], patch_size: Sequence[int]) -> Tensor:
    """Place the patches of every sample in mm: p_a = index_a · patch_a · spacing_a.

    Args:
        spacings: mm between voxels, `(batch, axes)`, as batches of `VolumeSet.with_spacing` carry them.
        lattice: Patches along each axis.
        patch_size: Voxels of a patch along each axis.

    Returns:
        Positions `(batch, tokens, axes)` for any encoding, the last axis fastest, the first patch at the origin.

    Example:
        >>> patch_positions(torch.tensor([[5.0, 0.5]]), (1, 3), (2, 16))[0, :, 1]
        tensor([ 0.,  8., 16.])
    """
    steps = spacings * torch.as_tensor(patch_size, dtype=spacings.dtype, device=spacings.device)
    return grid(*lattice).to(steps) * steps[:, None]
