"""Decomposition of skew-symmetric blocks:  B = U diag([[0, -w], [w, 0]]) U^T,  by Jacobi's method, block by block.

As in `native/skew_eig.c`: a rotation of four coordinates x -> a x b, in quaternions, zeroes the entries between two
planes, and U is a product of such rotations whatever the rank of B. Disjoint pairs of planes are rotated at once: in
round r plane p is paired with plane p xor r. Blocks are stored in a workspace in global memory, in float64.
"""

# mypy: allow-untyped-defs

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchrope.ops.gpu.launch import on_device_of, plain

# Remaining squared entries between planes, relative to all: far below float32's resolution.
_RESIDUE = 1e-20
_SWEEPS = 60


def skew_eig(base: Tensor) -> tuple[Tensor, Tensor]:
    """Decompose skew blocks `(..., b, b)`, b even, into orthogonal U, planes in pairs of columns, and w >= 0.

    Both are NaN for blocks that are not finite.
    """
    b, count = base.shape[-1], base.shape[:-2].numel()
    basis = torch.empty(base.shape, dtype=base.dtype, device=base.device)
    angular = torch.empty(*base.shape[:-2], b // 2, dtype=base.dtype, device=base.device)
    work = torch.empty(2, count, b, b, dtype=torch.float64, device=base.device)
    planes = triton.next_power_of_2(b // 2)
    with on_device_of(base):
        _decompose_kernel[(count,)](
            plain(base), work[0], work[1], basis, angular,
            BLOCK=b, WIDTH=triton.next_power_of_2(b), PLANES=planes, PAIRS=max(planes // 2, 1),
            RESIDUE=_RESIDUE, SWEEPS=_SWEEPS, num_warps=1 if b <= 16 else 4,
        )  # fmt: skip
    return basis, angular


@triton.jit
def _decompose_kernel(
    base, inside, rotated, basis, angular,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr, PLANES: tl.constexpr, PAIRS: tl.constexpr,
    RESIDUE: tl.constexpr, SWEEPS: tl.constexpr,
):  # fmt: skip
    block = tl.cast(tl.program_id(0), tl.int64) * (BLOCK * BLOCK)
    row = tl.arange(0, WIDTH)[:, None]
    column = tl.arange(0, WIDTH)[None, :]
    in_block = (row < BLOCK) & (column < BLOCK)
    at = block + row * BLOCK + column
    entries = tl.load(base + at, mask=in_block, other=0.0).to(tl.float64)
    tl.store(inside + at, entries, mask=in_block)
    tl.store(rotated + at, (row == column).to(tl.float64), mask=in_block)
    tl.debug_barrier()
    between = row // 2 != column // 2
    size = tl.sum(tl.sum(entries * entries, axis=1), axis=0)
    left = tl.sum(tl.sum(tl.where(between, entries * entries, 0.0), axis=1), axis=0)
    sweep = 0
    while (left > size * RESIDUE) & (sweep < SWEEPS):
        high = 1
        for stage in range(1, PLANES):
            high = tl.where(stage >= 2 * high, 2 * high, high)
            _rotate_pairs(inside + block, rotated + block, stage, high, BLOCK, WIDTH, PAIRS)
        entries = tl.load(inside + at, mask=in_block, other=0.0)
        left = tl.sum(tl.sum(tl.where(between, entries * entries, 0.0), axis=1), axis=0)
        sweep += 1

    finite = size < float("inf")
    # A plane with negative w is the same plane with its two vectors swapped and w positive.
    frequency = tl.load(
        inside + block + (column // 2 * 2 + 1) * BLOCK + column // 2 * 2, mask=column < BLOCK, other=0.0
    )
    source = tl.where(frequency < 0, column ^ 1, column)
    vectors = tl.load(rotated + block + row * BLOCK + source, mask=in_block, other=0.0)
    tl.store(basis + at, tl.where(finite, vectors, float("nan")).to(tl.float32), mask=in_block)
    plane = tl.arange(0, PLANES)
    real = plane < BLOCK // 2
    frequency = tl.abs(tl.load(inside + block + (2 * plane + 1) * BLOCK + 2 * plane, mask=real, other=0.0))
    cell = tl.cast(tl.program_id(0), tl.int64) * (BLOCK // 2) + plane
    tl.store(angular + cell, tl.where(finite, frequency, float("nan")).to(tl.float32), mask=real)


@triton.jit
def _rotate_pairs(
    inside, rotated, stage, high, BLOCK: tl.constexpr, WIDTH: tl.constexpr, PAIRS: tl.constexpr
):  # fmt: skip
    """Rotate planes p and p xor stage among themselves, for every p without the highest bit of stage."""
    pair = tl.arange(0, PAIRS)
    first = pair % high + pair // high * (2 * high)
    second = first ^ stage
    real = second < BLOCK // 2
    first = 2 * first
    second = 2 * second
    k01 = tl.load(inside + first * BLOCK + first + 1, mask=real, other=0.0)
    k23 = tl.load(inside + second * BLOCK + second + 1, mask=real, other=0.0)
    k02 = tl.load(inside + first * BLOCK + second, mask=real, other=0.0)
    k03 = tl.load(inside + first * BLOCK + second + 1, mask=real, other=0.0)
    k12 = tl.load(inside + (first + 1) * BLOCK + second, mask=real, other=0.0)
    k13 = tl.load(inside + (first + 1) * BLOCK + second + 1, mask=real, other=0.0)
    a0, a2, a3 = _quaternion(-(k01 + k23), k13 - k02, -(k03 + k12), -1.0)
    b0, b2, b3 = _quaternion(k23 - k01, -(k02 + k13), k12 - k03, 1.0)
    k = tl.arange(0, WIDTH)[None, :]
    mask = real[:, None] & (k < BLOCK)
    first = first[:, None]
    second = second[:, None]
    _rotate_four(inside, k * BLOCK + first, k * BLOCK + second, 1, mask, a0, a2, a3, b0, b2, b3)
    _rotate_four(rotated, k * BLOCK + first, k * BLOCK + second, 1, mask, a0, a2, a3, b0, b2, b3)
    _rotate_four(inside, first * BLOCK + k, second * BLOCK + k, BLOCK, mask, a0, a2, a3, b0, b2, b3)


@triton.jit
def _quaternion(first, second, third, sign: tl.constexpr):
    """Compute parts 0, 2 and 3 of the unit quaternion that rotates a vector onto the nearer end of the first axis."""
    across = second * second + third * third
    whole = tl.sqrt(first * first + across) + tl.abs(first)
    length = tl.sqrt(whole * whole + across)
    nonzero = length > 0
    scale = 1.0 / tl.where(nonzero, length, 1.0)
    near = tl.where(first < 0, -sign, sign)
    return tl.where(nonzero, whole * scale, 1.0), near * third * scale, -near * second * scale


@triton.jit
def _rotate_four(matrix, first, second, apart, mask, a0, a2, a3, b0, b2, b3):
    """Rotate coordinates x -> a x b of two planes [PAIRS, WIDTH]; all threads read before any writes."""
    x0 = tl.load(matrix + first, mask=mask, other=0.0)
    x1 = tl.load(matrix + first + apart, mask=mask, other=0.0)
    x2 = tl.load(matrix + second, mask=mask, other=0.0)
    x3 = tl.load(matrix + second + apart, mask=mask, other=0.0)
    tl.debug_barrier()
    a0, a2, a3 = a0[:, None], a2[:, None], a3[:, None]
    b0, b2, b3 = b0[:, None], b2[:, None], b3[:, None]
    # multiply by conj(a) from the left; L(a), R(b) are the matrices of x -> a x, x -> x b; rows are x^T L(a) R(b)
    y0 = a0 * x0 + a2 * x2 + a3 * x3
    y1 = a0 * x1 + a3 * x2 - a2 * x3
    y2 = a0 * x2 - a2 * x0 - a3 * x1
    y3 = a0 * x3 - a3 * x0 + a2 * x1
    tl.store(matrix + first, b0 * y0 + b2 * y2 + b3 * y3, mask=mask)
    tl.store(matrix + first + apart, b0 * y1 - b3 * y2 + b2 * y3, mask=mask)
    tl.store(matrix + second, b0 * y2 - b2 * y0 + b3 * y1, mask=mask)
    tl.store(matrix + second + apart, b0 * y3 - b3 * y0 - b2 * y1, mask=mask)
    tl.debug_barrier()
