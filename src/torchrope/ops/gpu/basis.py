"""Commuting block rotations in a learned basis:  R(p) = U rot(s w) U^T  with  s = sum_a p_a c_a.

U holds a block's planes as pairs of columns and w their frequencies, so that the block's base is
B = U blockdiag([0, -w; w, 0]) U^T. No exponential is taken; the gradient to B is that of Daleckii and Krein, which is
finite and exact for equal and for zero frequencies.
"""

# mypy: allow-untyped-defs

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchrope.ops.gpu.block import multiply_rows
from torchrope.ops.gpu.launch import MANY, VARYING, Sides, launch, locate, rows_of, share, splits_of
from torchrope.ops.gpu.products import multiply
from torchrope.ops.record import specialisation
from torchrope.tensors import exact_matmul, with_batch_dim

# Triton 3.2 aborts on products of 64 rows with 8 warps on Hopper; 3.6 and 3.8 compile them.
_WIDE_WARPS = 8 if tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 6) else 4


def rotate_basis(
    q: Tensor, k: Tensor, positions: Tensor, factors: Tensor, base: Tensor, basis: Tensor, angular: Tensor, outer: bool
) -> tuple[Tensor, ...]:
    """Rotate blocks of channels:  y = U rot(s w) U^T x,  b at most 64: wider products need more shared memory.

    `outer` is ignored: the kernel is memory-bound, so omitting U saves no time. Blocks that never rotate get the
    identity as their basis, so that they pass bit-identically, as channels beyond the blocks do.
    """
    unrotated = (factors == 0).all(dim=0) | (angular == 0).all(dim=-1)  # (heads, blocks)
    identity = torch.eye(basis.shape[-1], dtype=basis.dtype, device=basis.device)
    exact_basis = torch.where(unrotated[..., None, None], identity, basis)
    arguments = with_batch_dim(positions, 3), factors, exact_basis, angular
    return _run((q, k), arguments)[:2]


def rotate_basis_backward(
    grad_q: Tensor,
    grad_k: Tensor,
    q: Tensor,
    k: Tensor,
    positions: Tensor,
    factors: Tensor,
    basis: Tensor,
    angular: Tensor,
    outer: bool,
    wanted: Sequence[bool],
) -> tuple[Tensor, ...]:
    """Compute gradients to q, k, and if wanted to positions, factors and the base, else empty tensors.

    With x' = U^T x, h = U^T dy, and H = sum h x'^T over the vectors that share s: a pair
    of planes (j, k) of H maps z to  α z + β conj(z);  α is multiplied by conj g(w_j, w_k) and β by conj g(w_j, -w_k),
    where g(u, v) = s exp(i s (u + v) / 2) sinc(s (u - v) / 2). Summed over tokens this is G, and
    dB = U (G - G^T) / 2 U^T.
    """
    arguments = with_batch_dim(positions, 3), factors, basis, angular
    sides = grad_q, grad_k, q, k
    dq, dk, d_positions, per_frequency, gradient = _run(sides, arguments, (wanted[0], True, True))
    d_factors = (per_frequency * angular).sum(dim=-1)
    d_base = exact_matmul(exact_matmul(basis, (gradient - gradient.mT) / 2), basis.mT)
    computed_anyway = zip((d_factors, d_base), wanted[1:], strict=True)
    return (
        dq,
        dk,
        d_positions.view(positions.shape if wanted[0] else 0),
        *(x if needed else x.new_empty(0) for x, needed in computed_anyway),
    )


def _run(sides: Sides, parameters: Sequence[Tensor], wanted: Sequence[bool] = (False,) * 3) -> tuple[Tensor, ...]:
    """Rotate tiles of blocks by a matrix for each token, computed in registers."""
    positions, factors, basis, angular = parameters
    (sets, tokens, _), heads = positions.shape, len(basis)
    of = specialisation("rotate_basis", (*sides[:2], positions, factors, basis))
    rows, back = rows_of(sides, sets, heads), len(sides) == 4
    width = max(triton.next_power_of_2(of.b), 32)
    together = min(width // of.b, of.blocks)
    programs = triton.cdiv(of.blocks, together) * heads
    height = 16 if max(rows) < MANY else 64 if sides[0].dtype != torch.float32 else 32
    matrices = sets * tokens
    row_splits = 1 if back else splits_of(programs * matrices, triton.cdiv(sum(rows), height))
    splits = splits_of(programs, matrices) if back else matrices * row_splits
    parts = (programs, positions.shape), (splits, (of.axes, *angular.shape)), (splits, basis.shape)
    return launch(
        _rotate_kernel, of, sides, parameters, heads, sets, programs, splits, [of.blocks, row_splits], parts, wanted,
        AXES=of.axes, AXES_TILE=triton.next_power_of_2(of.axes), BLOCK=of.b, WIDTH=width,
        TOGETHER=together, ROWS=height, num_warps=4 if width == 32 else _WIDE_WARPS,
    )  # fmt: skip


@triton.jit
def _load_basis(
    basis, head, first_block, blocks, BLOCK: tl.constexpr, WIDTH: tl.constexpr, TOGETHER: tl.constexpr
):  # fmt: skip
    """Load U, and U~ with the other vector of each plane, signed:  U^T x  is turned to  cos a U^T x + sin a U~^T x."""
    row = tl.arange(0, WIDTH)[:, None]
    column = tl.arange(0, WIDTH)[None, :]
    slot = row // BLOCK
    in_block = (slot == column // BLOCK) & (slot < TOGETHER) & (first_block + slot < blocks)
    at = basis + ((head * blocks + first_block + slot) * BLOCK + row % BLOCK) * BLOCK
    inward = tl.load(at + column % BLOCK, mask=in_block, other=0.0)
    partner = tl.load(at + (column ^ 1) % BLOCK, mask=in_block, other=0.0)
    return inward, tl.where(column % 2 == 0, -partner, partner)


@triton.jit
def _load_frequencies(
    angular, head, first_block, blocks, pair, BLOCK: tl.constexpr, TOGETHER: tl.constexpr
):  # fmt: skip
    """Load the block of each pair of a tile, whether it exists, and its frequency."""
    slot = pair // (BLOCK // 2)
    block = first_block + slot
    real = (slot < TOGETHER) & (block < blocks)
    cell = (head * blocks + block) * (BLOCK // 2) + pair % (BLOCK // 2)
    return block, real, tl.load(angular + cell, mask=real, other=0.0)


@triton.jit(do_not_specialize=VARYING)
def _rotate_kernel(
    q, q_out, q_x, k, k_out, k_x, positions, coefficients, basis, angular, per_position, per_frequency, per_base,
    q_sample, q_head, q_token, q_out_sample, q_out_head, q_out_token, q_x_sample, q_x_head, q_x_token,
    k_sample, k_head, k_token, k_out_sample, k_out_head, k_out_token, k_x_sample, k_x_head, k_x_token,
    tokens, heads, sets, q_samples, q_group, k_samples, k_group, splits, blocks, row_splits,
    BACK: tl.constexpr, UNIT: tl.constexpr, GROUPED: tl.constexpr, AXES_TILE: tl.constexpr, ROWS: tl.constexpr,
    AXES: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    part, head, split, _, _ = locate(tl.cdiv(blocks, TOGETHER), heads, splits, 1)
    first_block = part * TOGETHER

    PAIRS: tl.constexpr = WIDTH // 2
    slot = tl.arange(0, WIDTH) // BLOCK
    is_rotated = (slot < TOGETHER) & (first_block + slot < blocks)
    channel = (first_block * BLOCK + tl.arange(0, WIDTH))[None, :]
    pair = tl.arange(0, PAIRS)
    axis = tl.arange(0, AXES_TILE)
    block, real, frequency = _load_frequencies(angular, head, first_block, blocks, pair, BLOCK, TOGETHER)
    in_tile = (axis < AXES)[:, None] & real[None, :]
    factor = tl.load(coefficients + (axis * heads + head)[:, None] * blocks + block[None, :], mask=in_tile, other=0.0)

    grad_frequency = tl.zeros((AXES_TILE, PAIRS), tl.float32)
    linear_real = tl.zeros((PAIRS, PAIRS), tl.float32)
    linear_imag = tl.zeros((PAIRS, PAIRS), tl.float32)
    mirror_real = tl.zeros((PAIRS, PAIRS), tl.float32)
    mirror_imag = tl.zeros((PAIRS, PAIRS), tl.float32)
    first, last = share(split // row_splits, splits // row_splits, sets * tokens)
    q_rows = q_samples * q_group
    first_row, last_row = share(split % row_splits, row_splits, q_rows + k_samples * k_group)
    for index in range(first, last):
        set_ = index // tokens
        token = index % tokens
        position = tl.load(positions + tl.cast(index, tl.int64) * AXES + axis, mask=axis < AXES, other=0.0)
        along = tl.sum(position[:, None] * factor, axis=0)
        cos = tl.cos(along * frequency)
        sin = tl.sin(along * frequency)
        inward, partner = _load_basis(basis, head, first_block, blocks, BLOCK, WIDTH, TOGETHER)
        turned = tl.interleave(cos, cos)[None, :] * inward + tl.interleave(sin, sin)[None, :] * partner
        if BACK:
            matrix = multiply(inward, tl.trans(turned))
        else:
            matrix = multiply(turned, tl.trans(inward))
        outer = tl.zeros((WIDTH, WIDTH), tl.float32)
        outer = multiply_rows(
            q, q_out, q_x, first_row, tl.minimum(last_row, q_rows), set_, q_samples, head, q_group, token,
            q_sample, q_head, q_token, q_out_sample, q_out_head, q_out_token, q_x_sample, q_x_head, q_x_token,
            matrix, outer, channel, is_rotated, UNIT, GROUPED, ROWS,
        )  # fmt: skip
        outer = multiply_rows(
            k, k_out, k_x, tl.maximum(first_row - q_rows, 0), last_row - q_rows, set_, k_samples, head, k_group, token,
            k_sample, k_head, k_token, k_out_sample, k_out_head, k_out_token, k_x_sample, k_x_head, k_x_token,
            matrix, outer, channel, is_rotated, UNIT, GROUPED, ROWS,
        )  # fmt: skip
        if BACK:
            a_real, a_imag, b_real, b_imag = _plane_maps(outer, inward, WIDTH)
            diagonal = pair[:, None] == pair[None, :]
            grad_angle = 2 * cos * tl.sum(tl.where(diagonal, a_imag, 0.0), axis=1)
            grad_angle -= 2 * sin * tl.sum(tl.where(diagonal, a_real, 0.0), axis=1)
            grad_frequency += position[:, None] * grad_angle[None, :]
            if per_position is not None:
                slope = tl.sum(factor * (frequency * grad_angle)[None, :], axis=1)
                cell = tl.cast(part * heads + head, tl.int64) * sets * tokens + index
                tl.store(per_position + cell * AXES + axis, slope, mask=axis < AXES)

            half = along * frequency * 0.5
            cos = tl.cos(half)
            sin = tl.sin(half)
            straight = cos[:, None] * cos[None, :]
            crossed = sin[:, None] * sin[None, :]
            first_turned = sin[:, None] * cos[None, :]
            second_turned = cos[:, None] * sin[None, :]
            sum_sin = first_turned + second_turned
            difference_sin = first_turned - second_turned
            # half of s (w_j - w_k) and of s (w_j + w_k)
            difference = 0.5 * along[:, None] * (frequency[:, None] - frequency[None, :])
            total = 0.5 * along[:, None] * (frequency[:, None] + frequency[None, :])
            size = along[:, None] * _sinc(difference, difference_sin)
            g_real = size * (straight - crossed)
            g_imag = size * sum_sin
            linear_real += g_real * a_real + g_imag * a_imag
            linear_imag += g_real * a_imag - g_imag * a_real
            size = along[:, None] * _sinc(total, sum_sin)
            g_real = size * (straight + crossed)
            g_imag = size * difference_sin
            mirror_real += g_real * b_real + g_imag * b_imag
            mirror_imag += g_real * b_imag - g_imag * b_real

    if BACK:
        cell = (tl.cast(split, tl.int64) * AXES + axis[:, None]) * heads + head
        at = per_frequency + (cell * blocks + block[None, :]) * (BLOCK // 2) + (pair % (BLOCK // 2))[None, :]
        tl.store(at, grad_frequency, mask=in_tile)

        kept = (block[:, None] == block[None, :]) & real[:, None]
        cell = (tl.cast(split, tl.int64) * heads + head) * blocks + block[:, None]
        row = 2 * (pair % (BLOCK // 2))[:, None]
        column = 2 * (pair % (BLOCK // 2))[None, :]
        at = per_base + (cell * BLOCK + row) * BLOCK + column
        tl.store(at, linear_real + mirror_real, mask=kept)
        tl.store(at + 1, mirror_imag - linear_imag, mask=kept)
        tl.store(at + BLOCK, mirror_imag + linear_imag, mask=kept)
        tl.store(at + BLOCK + 1, linear_real - mirror_real, mask=kept)


@triton.jit
def _plane_maps(outer, inward, WIDTH: tl.constexpr):
    """Split H = sum h x'^T, from sum dy x^T, into maps  z -> α z + β conj(z)  of planes: α and β [PAIRS, PAIRS]."""
    turned = multiply(tl.trans(multiply(outer, inward)), inward)  # H^T
    even, odd = tl.split(tl.reshape(turned, (WIDTH, WIDTH // 2, 2)))
    even_even, even_odd = tl.split(tl.reshape(tl.trans(even), (WIDTH // 2, WIDTH // 2, 2)))
    odd_even, odd_odd = tl.split(tl.reshape(tl.trans(odd), (WIDTH // 2, WIDTH // 2, 2)))
    return (
        0.5 * (even_even + odd_odd),
        0.5 * (odd_even - even_odd),
        0.5 * (even_even - odd_odd),
        0.5 * (odd_even + even_odd),
    )


@triton.jit
def _sinc(x, sine):
    """Compute sin(x) / x from x and sin(x), by its series near 0."""
    near = tl.abs(x) < 0.3
    square = x * x
    series = 1 - square * (1 / 6) * (1 - square * (1 / 20) * (1 - square * (1 / 42)))
    return tl.where(near, series, sine / tl.where(near, 1.0, x))
