"""Shuffling and resampling of batches `(batch, channels, *sizes)` with any number of axes."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

INTERPOLATION = {1: "linear", 2: "bilinear", 3: "trilinear"}


def shuffle_patches(inputs: Tensor, patch_size: int | Sequence[int | None], generator: torch.Generator) -> Tensor:
    """Permute the patches of every sample with its own random permutation; None in `patch_size` is a whole axis."""
    # The contents of the patches are unchanged, so a model with the same accuracy on the result does not use the
    # positions of the patches. This is the test in LieRE (Ostmeier et al., arXiv:2406.10322).
    batch, channels, *sizes = inputs.shape
    if not isinstance(patch_size, int):
        patch_size = tuple(sizes[axis] if extent is None else extent for axis, extent in enumerate(patch_size))
    patch = _one_per_axis(patch_size, len(sizes))
    counts = [size // extent for size, extent in zip(sizes, patch, strict=True)]
    tokens = math.prod(counts)

    split = [number for pair in zip(counts, patch, strict=True) for number in pair]
    grid_axes = [2 + 2 * axis for axis in range(len(sizes))]
    pixel_axes = [3 + 2 * axis for axis in range(len(sizes))]
    grid = inputs.reshape(batch, channels, *split).permute(0, *grid_axes, 1, *pixel_axes)
    patches = grid.reshape(batch, tokens, -1)  # [b, tokens, channels * pixels]

    order = torch.rand(batch, tokens, generator=generator, device=generator.device).argsort(1)
    sample = torch.arange(batch, device=inputs.device)[:, None]
    shuffled = patches[sample, order.to(inputs.device)].reshape(grid.shape)

    axes = len(sizes)
    interleaved = [number for axis in range(axes) for number in (1 + axis, 2 + axes + axis)]
    return shuffled.permute(0, 1 + axes, *interleaved).reshape(inputs.shape)


def shuffle_positions(inputs: Tensor, channels: int, generator: torch.Generator) -> Tensor:
    """Permute the positions of each sample's tokens, `(batch, n, channels + axes)`; tokens and NaN padding stay."""
    tokens, positions = inputs[..., :channels], inputs[..., channels:]
    padding = positions.isnan().any(dim=-1)
    keys = torch.rand(padding.shape, generator=generator, device=generator.device).to(inputs.device)
    order = keys.masked_fill(padding, 2.0).argsort(dim=1)  # valid tokens, shuffled, then padding
    ranks = (~padding).long().cumsum(dim=1) - 1  # of each token among the valid ones
    source = torch.where(
        padding, torch.arange(padding.shape[1], device=inputs.device), order.gather(1, ranks.clamp(min=0))
    )
    moved = positions.gather(1, source.unsqueeze(-1).expand_as(positions))
    return torch.cat([tokens, moved], dim=-1)


def resize(inputs: Tensor, size: int | Sequence[int]) -> Tensor:
    """Resample the axes to `size` by linear interpolation between pixel centres."""
    # With two axes, downsampling is anti-aliased; with one or three it is not.
    axes = inputs.ndim - 2
    target = _one_per_axis(size, axes)
    if target == tuple(inputs.shape[2:]):
        return inputs
    return functional.interpolate(inputs, target, mode=INTERPOLATION[axes], align_corners=False, antialias=axes == 2)


def resize_bytes(inputs: Tensor, size: int | Sequence[int]) -> Tensor:
    """Resample uint8 inputs like `resize`, rounding to bytes, in chunks of 4096 examples."""
    if _one_per_axis(size, inputs.ndim - 2) == tuple(inputs.shape[2:]):
        return inputs
    parts = [resize(part.float(), size).round_().clamp_(0, 255).to(torch.uint8) for part in inputs.split(4096)]
    return torch.cat(parts)


def _one_per_axis(value: int | Sequence[int], axes: int) -> tuple[int, ...]:
    return (value,) * axes if isinstance(value, int) else tuple(value)
