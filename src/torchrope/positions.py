"""Positions: where tokens are. Plain float tensors `(tokens, axes)` or `(batch, tokens, axes)`.

Positions are data, so everything that changes them is a function from positions to positions: shift, rescale,
jitter. Their unit is whatever the lattice says, one patch by default.
"""

import math
import operator
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

PerAxis = float | Sequence[float]


def grid(
    *sizes: int,
    spacing: PerAxis = 1.0,
    origin: PerAxis = 0.0,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Place tokens on a lattice:  p = origin + spacing * index,  row-major, the last axis fastest.

    Args:
        sizes: Number of tokens along each axis.
        spacing: Distance between neighbours, one number or one per axis. LieRE's [0, 1) at the training size is
            `spacing=1/train_size`; ComRoPE's is `spacing=1/n, origin=0.5/n`. Voxel sizes in millimetres work too.
        origin: Position of the first token, one number or one per axis.
        device: Where the positions live.
        dtype: Their floating dtype; never narrower than float32.

    Returns:
        Positions `(prod(sizes), len(sizes))`.

    Raises:
        ValueError: no sizes, a negative size, or a wrong number of spacings or origins.

    Example:
        >>> grid(2, 3).tolist()
        [[0.0, 0.0], [0.0, 1.0], [0.0, 2.0], [1.0, 0.0], [1.0, 1.0], [1.0, 2.0]]
    """
    if not sizes or any(operator.index(size) < 0 for size in sizes):
        raise ValueError(f"grid needs one size per axis, each 0 or more, got {sizes}")
    if dtype not in (torch.float32, torch.float64):
        raise ValueError(f"positions must be float32 or float64, got {dtype}")
    spacings = per_axis("spacing", spacing, len(sizes))
    origins = per_axis("origin", origin, len(sizes))
    lines = [
        start + step * torch.arange(size, device=device, dtype=dtype)
        for size, step, start in zip(sizes, spacings, origins, strict=True)
    ]
    return torch.cartesian_prod(*lines).reshape(-1, len(sizes))


def per_axis(name: str, value: PerAxis, num_axes: int) -> tuple[float, ...]:
    """Spread one number over all axes, or check that there is one number per axis."""
    values = tuple(map(float, value)) if isinstance(value, Iterable) else (float(value),) * num_axes
    if len(values) != num_axes:
        raise ValueError(f"{name} must be one number or one per axis ({num_axes}), got {len(values)}")
    return values


def prefix(positions: Tensor, count: int) -> Tensor:
    """Put `count` tokens without a place (CLS, registers) in front, at the origin, where R = I.

    Args:
        positions: `(..., tokens, axes)`.
        count: How many, 0 or more.

    Returns:
        Positions `(..., count + tokens, axes)`.

    Example:
        >>> prefix(grid(2), 1).tolist()
        [[0.0], [0.0], [1.0]]
    """
    if count < 0:
        raise ValueError(f"prefix needs a count of 0 or more, got {count}")
    origin = positions.new_zeros(*positions.shape[:-2], count, positions.shape[-1])
    return torch.cat([origin, positions], dim=-2)


def shift(positions: Tensor, offset: PerAxis | Tensor) -> Tensor:
    """Move all tokens:  p + offset.

    Args:
        positions: `(..., tokens, axes)`.
        offset: One number, one per axis, or a tensor that broadcasts, such as `(batch, 1, axes)`.

    Returns:
        Positions of the broadcast shape.
    """
    positions = _wide(positions)
    if not isinstance(offset, Tensor):
        offset = positions.new_tensor(per_axis("offset", offset, positions.shape[-1]))
    return positions + offset


def rescale(positions: Tensor, factor: PerAxis | Tensor) -> Tensor:
    """Stretch all positions about the origin:  p * factor.

    Args:
        positions: `(..., tokens, axes)`.
        factor: One number, one per axis, or a tensor that broadcasts, such as `(batch, 1, axes)`.

    Returns:
        Positions of the broadcast shape.
    """
    positions = _wide(positions)
    if not isinstance(factor, Tensor):
        factor = positions.new_tensor(per_axis("factor", factor, positions.shape[-1]))
    return positions * factor


def jitter(positions: Tensor, amount: PerAxis, *, generator: torch.Generator | None = None) -> Tensor:
    """Perturb every token on its own:  p + clip(n, -1, 1) * amount / 2  with  n ~ N(0, 1).

    With `amount` equal to the spacing no token leaves its own cell: the position perturbation of ComRoPE
    (its configuration's `perturbation_intensity`, here in the unit of the positions).

    Args:
        positions: `(..., tokens, axes)`.
        amount: Width of the cell, one number or one per axis.
        generator: Source of randomness, for reproducible draws.

    Returns:
        Positions of the same shape.
    """
    positions = _wide(positions)
    width = positions.new_tensor(per_axis("amount", amount, positions.shape[-1]))
    noise = torch.randn(positions.shape, dtype=positions.dtype, device=positions.device, generator=generator)
    return positions + noise.clamp(-1, 1) * width / 2


def windows(
    positions: Tensor, sizes: Sequence[int], window: Sequence[int], *, offset: int | Sequence[int] = 0
) -> Tensor:
    """Cut a lattice into windows that do not overlap; the first begins at `offset`, around the lattice's edges.

    What is cut need not be positions: anything with one row a token, such as the tokens themselves.

    Args:
        positions: `(..., prod(sizes), axes)`, row-major.
        sizes: Tokens of the lattice along each axis.
        window: Tokens of a window along each axis, a divisor of the lattice's.
        offset: Tokens by which the windows are shifted, one number or one per axis; the tokens before it come last
            (the cyclic shift of Swin).

    Returns:
        `(..., windows, prod(window), axes)`, windows row-major and tokens within a window row-major.

    Raises:
        ValueError: a window that does not divide its lattice, or positions that are not the lattice's.

    References:
        Liu et al., Swin Transformer, section 3.2 and figure 4.

    Example:
        >>> windows(grid(4), (4,), (2,)).squeeze(-1).tolist()
        [[0.0, 1.0], [2.0, 3.0]]
        >>> windows(grid(4), (4,), (2,), offset=1).squeeze(-1).tolist()
        [[1.0, 2.0], [3.0, 0.0]]
    """
    num_axes = len(sizes)
    if len(window) != num_axes or any(part < 1 or size % part for size, part in zip(sizes, window, strict=True)):
        raise ValueError(f"a window must divide its lattice {tuple(sizes)} along each axis, got {tuple(window)}")
    if positions.shape[-2] != math.prod(sizes):
        raise ValueError(f"a lattice {tuple(sizes)} has {math.prod(sizes)} tokens, got {positions.shape[-2]}")
    lattice = positions.unflatten(-2, tuple(sizes))  # (..., *sizes, axes)
    axes = range(-num_axes - 1, -1)
    offsets = (offset,) * num_axes if isinstance(offset, int) else tuple(offset)
    if len(offsets) != num_axes:
        raise ValueError(f"offset must be one number or one per axis ({num_axes}), got {len(offsets)}")
    if any(offsets):
        lattice = lattice.roll([-start for start in offsets], list(axes))
    leading = lattice.ndim - num_axes - 1
    for axis in reversed(range(leading, leading + num_axes)):
        part = window[axis - leading]
        lattice = lattice.unflatten(axis, (lattice.shape[axis] // part, part))
    outer = [leading + 2 * axis for axis in range(num_axes)]
    inner = [leading + 2 * axis + 1 for axis in range(num_axes)]
    cells = lattice.permute(*range(leading), *outer, *inner, -1)  # (..., *windows, *window, axes)
    return cells.flatten(-num_axes - 1, -2).flatten(leading, leading + num_axes - 1)


def _wide(positions: Tensor) -> Tensor:
    """Positions in float32 or wider: integers and half precision would lose what is done to them."""
    return positions.to(torch.promote_types(positions.dtype, torch.float32))
