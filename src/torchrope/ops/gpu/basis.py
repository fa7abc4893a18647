"""Commuting block rotations in a learned basis:  R(p) = U rot(s w) U^T  with  s = sum_a p_a c_a.

U holds a block's planes as pairs of columns and w their frequencies, so that the block's base is
B = U blockdiag([0, -w; w, 0]) U^T. No exponential is taken; the gradient to B is that of Daleckii and Krein, which is
finite and exact for equal and for zero frequencies.
"""

# mypy: allow-untyped-defs

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchrope.ops.gpu.block import copy_rest, multiply_back_rows, row_offset, share
from torchrope.ops.gpu.launch import (
    WIDE_WARPS,
    contiguous_channels,
    on_device_of,
    outer_strides,
    power_of_two,
    splits,
)
from torchrope.ops.gpu.products import multiply, multiply_vectors
from torchrope.tensors import empty_rows

# The largest block: wider products do not fit the shared memory of every device.
LARGEST = 64

# Tokens in the tile of a program that rotates.
_TOKENS = 32


def rotate(
    q: Tensor, k: Tensor, positions: Tensor, coefficients: Tensor, basis: Tensor, angular: Tensor, outer: bool
) -> tuple[Tensor, Tensor]:
    """Rotate blocks of channels:  y = U rot(s w) U^T x,  or  y = rot(s w) U^T x  if `outer` is False.

    Args:
        q: `(batch, query heads, tokens, channels)`, float32, bfloat16 or float16.
        k: `(batch, key heads, tokens, channels)`.
        positions: `(1 or batch, tokens, axes)` float32.
        coefficients: c, `(axes, rotation heads, blocks)` float32.
        basis: U, `(rotation heads, blocks, b, b)` float32, b even and at most `LARGEST`.
        angular: w, `(rotation heads, blocks, b / 2)` float32.
        outer: Whether to multiply by the outer U.

    Returns:
        Rotated q and k, contiguous, in the dtypes of the inputs; channels beyond the blocks are unchanged.
    """
    q, k = contiguous_channels(q), contiguous_channels(k)
    q_out, k_out = empty_rows(q), empty_rows(k)
    if q.numel() + k.numel() == 0:
        return q_out, k_out
    work = _Work(q, k, positions, basis)
    programs = work.groups * work.heads * triton.cdiv(work.tokens, _TOKENS) * work.sets
    parts = splits(programs, work.rows)
    with on_device_of(q):
        _rotate_kernel[(programs * parts,)](
            q, k, q_out, k_out,
            positions.contiguous(), coefficients.contiguous(), basis.contiguous(), angular.contiguous(),
            *outer_strides(q), *outer_strides(k), *outer_strides(q_out), *outer_strides(k_out),
            *work.sizes, parts, OUTER=outer, TOKENS=_TOKENS, **work.tile,
        )  # fmt: skip
    copy_rest(q, q_out, work.rotary_dim)
    copy_rest(k, k_out, work.rotary_dim)
    return q_out, k_out


def rotate_backward(
    grad_q: Tensor,
    grad_k: Tensor,
    q: Tensor,
    k: Tensor,
    positions: Tensor,
    coefficients: Tensor,
    basis: Tensor,
    angular: Tensor,
    outer: bool,
    need_positions: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
    """Compute the gradients of `rotate`.

    With x' = U^T x, h = U^T dy (or dy without the outer U), and H = sum h x'^T over the vectors that share s: a pair
    of planes (j, k) of H maps z to  α z + β conj(z);  α is multiplied by conj g(w_j, w_k) and β by conj g(w_j, -w_k),
    where g(u, v) = s exp(i s (u + v) / 2) sinc(s (u - v) / 2). Summed over tokens this is G, and
    dB = U (G - G^T) / 2 U^T.

    Args:
        grad_q: Gradient of the rotated q.
        grad_k: Gradient of the rotated k.
        q: As given to `rotate`.
        k: As given to `rotate`.
        positions: As given to `rotate`.
        coefficients: c.
        basis: U.
        angular: w.
        outer: As given to `rotate`. If False, the gradient of the base is valid only for losses that depend on q and k
            through their scores.
        need_positions: Whether to return the gradient of the positions.

    Returns:
        Gradients of q and k in their dtypes, of coefficients, positions (or None), and of the base, skew.
    """
    q, k, grad_q, grad_k = map(contiguous_channels, (q, k, grad_q, grad_k))
    q_out, k_out = empty_rows(q), empty_rows(k)
    if q.numel() + k.numel() == 0:
        grad_positions = torch.zeros_like(positions) if need_positions else None
        return q_out, k_out, torch.zeros_like(coefficients), grad_positions, torch.zeros_like(basis)
    work = _Work(q, k, positions, basis)
    axes, heads, _ = coefficients.shape
    programs = work.groups * heads
    parts = splits(programs, work.sets * work.tokens)
    per_frequency, per_position, per_base = (
        torch.empty(shape, dtype=torch.float32, device=q.device)
        for shape in (
            (parts, axes, *angular.shape),
            (work.groups, heads, *positions.shape) if need_positions else (0,),
            (parts, *basis.shape),
        )
    )
    height = 16 if work.rows <= 16 else 64 if q.element_size() == 2 else 32
    with on_device_of(q):
        _rotate_backward_kernel[(programs * parts,)](
            grad_q, grad_k, q, k, q_out, k_out,
            positions.contiguous(), coefficients.contiguous(), basis.contiguous(), angular.contiguous(),
            per_frequency, per_position, per_base,
            *outer_strides(grad_q), *outer_strides(grad_k), *outer_strides(q), *outer_strides(k),
            *outer_strides(q_out), *outer_strides(k_out),
            *work.sizes, parts, OUTER=outer, NEED_POSITIONS=need_positions, AXES_TILE=power_of_two(axes), ROWS=height,
            **work.tile,
        )  # fmt: skip
    copy_rest(grad_q, q_out, work.rotary_dim)
    copy_rest(grad_k, k_out, work.rotary_dim)
    return (
        q_out,
        k_out,
        (per_frequency.sum(dim=0) * angular).sum(dim=-1),
        per_position.sum(dim=(0, 1)) if need_positions else None,
        _to_base(per_base.sum(dim=0), basis),
    )


def _to_base(gradient: Tensor, basis: Tensor) -> Tensor:
    """Compute U (G - G^T) / 2 U^T as sums of products: a matmul might round to TensorFloat-32."""
    skew = (gradient - gradient.mT) / 2
    half = (basis.unsqueeze(-1) * skew.unsqueeze(-3)).sum(dim=-2)  # (heads, blocks, b, b)
    return (half.unsqueeze(-2) * basis.unsqueeze(-3)).sum(dim=-1)


class _Work:
    """Partition of a rotation into programs: groups of blocks that fill a tile, rotation heads, tokens.

    Rows are the samples and heads that share a rotation.
    """

    def __init__(self, q: Tensor, k: Tensor, positions: Tensor, basis: Tensor) -> None:
        self.heads, blocks, b, _ = basis.shape
        self.sets, self.tokens, axes = positions.shape
        self.rotary_dim = blocks * b
        samples = q.shape[0] // self.sets
        per_head = q.shape[1] // self.heads, k.shape[1] // self.heads
        self.rows = samples * max(per_head)
        width = max(power_of_two(b), 32)
        together = min(width // b, blocks)
        self.groups = triton.cdiv(blocks, together)
        self.sizes = self.tokens, blocks, self.heads, self.sets, samples, *per_head
        self.tile = dict(AXES=axes, BLOCK=b, WIDTH=width, TOGETHER=together, num_warps=4 if width == 32 else WIDE_WARPS)


@triton.jit
def _load_basis(
    basis, head, first_block, blocks, row, column, BLOCK: tl.constexpr, WIDTH: tl.constexpr, TOGETHER: tl.constexpr
):  # fmt: skip
    """Load entries of U for local channels `row` and basis coordinates `column` of a tile, zeros between blocks."""
    slot = row // BLOCK
    own = (slot == column // BLOCK) & (slot < TOGETHER) & (first_block + slot < blocks)
    cell = (head * blocks + first_block + slot) * BLOCK + row % BLOCK
    return tl.load(basis + cell * BLOCK + column % BLOCK, mask=own, other=0.0)


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


@triton.jit
def _rotate_kernel(
    q, k, q_out, k_out, positions, coefficients, basis, angular,
    q_sample, q_head, q_token, k_sample, k_head, k_token,
    q_out_sample, q_out_head, q_out_token, k_out_sample, k_out_head, k_out_token,
    tokens, blocks, heads, sets, samples, q_group, k_group, parts,
    OUTER: tl.constexpr, TOKENS: tl.constexpr,
    AXES: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    groups = tl.cdiv(blocks, TOGETHER)
    first_block = program % groups * TOGETHER
    program = program // groups
    head = program % heads
    program = program // heads
    tiles = tl.cdiv(tokens, TOKENS)
    token = program % tiles * TOKENS + tl.arange(0, TOKENS)
    place = program // tiles % sets
    part = program // tiles // sets

    local = tl.arange(0, WIDTH)
    row, column = local[:, None], local[None, :]
    inward = _load_basis(basis, head, first_block, blocks, row, column, BLOCK, WIDTH, TOGETHER)
    # The other coordinate of each plane, signed:  rot(a) x' = cos a x' + sin a (U~^T x).
    other = _load_basis(basis, head, first_block, blocks, row, column ^ 1, BLOCK, WIDTH, TOGETHER)
    other = tl.where(column % 2 == 0, -other, other)
    block, real, frequency = _load_frequencies(angular, head, first_block, blocks, local // 2, BLOCK, TOGETHER)
    along = tl.zeros((TOKENS, WIDTH), tl.float32)
    for axis in tl.static_range(AXES):
        position = tl.load(positions + (place * tokens + token) * AXES + axis, mask=token < tokens, other=0.0)
        factor = tl.load(coefficients + (axis * heads + head) * blocks + block, mask=real, other=0.0)
        along += position[:, None] * factor[None, :]
    angles = along * frequency[None, :]
    cos = tl.cos(angles)
    sin = tl.sin(angles)
    inside = (token < tokens)[:, None] & real[None, :]
    channel = first_block * BLOCK + local
    start = place * samples
    token = token.to(tl.int64)
    first, last = share(part, parts, samples * q_group)
    _rotate_rows(
        q, q_out, first, last, start, q_group, head, token, channel, inside, inward, other, cos, sin,
        q_sample, q_head, q_token, q_out_sample, q_out_head, q_out_token, OUTER,
    )  # fmt: skip
    first, last = share(part, parts, samples * k_group)
    _rotate_rows(
        k, k_out, first, last, start, k_group, head, token, channel, inside, inward, other, cos, sin,
        k_sample, k_head, k_token, k_out_sample, k_out_head, k_out_token, OUTER,
    )  # fmt: skip


@triton.jit
def _rotate_rows(
    x, out, first, last, start, group, head, token, channel, inside, inward, other, cos, sin,
    x_sample, x_head, x_token, out_sample, out_head, out_token, OUTER: tl.constexpr,
):  # fmt: skip
    for row in range(first, last):
        here = row_offset(start, row, group, head, x_sample, x_head)
        there = row_offset(start, row, group, head, out_sample, out_head)
        vectors = tl.load(x + here + token[:, None] * x_token + channel[None, :], mask=inside, other=0.0)
        rotated = cos * multiply_vectors(vectors, inward) + sin * multiply_vectors(vectors, other)
        if OUTER:
            rotated = multiply(rotated, tl.trans(inward))
        at = out + there + token[:, None] * out_token + channel[None, :]
        tl.store(at, rotated.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _rotate_backward_kernel(
    grad_q, grad_k, q, k, q_out, k_out, positions, coefficients, basis, angular,
    per_frequency, per_position, per_base,
    gq_sample, gq_head, gq_token, gk_sample, gk_head, gk_token,
    q_sample, q_head, q_token, k_sample, k_head, k_token,
    q_out_sample, q_out_head, q_out_token, k_out_sample, k_out_head, k_out_token,
    tokens, blocks, heads, sets, samples, q_group, k_group, parts,
    OUTER: tl.constexpr, NEED_POSITIONS: tl.constexpr, AXES_TILE: tl.constexpr, ROWS: tl.constexpr,
    AXES: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    groups = tl.cdiv(blocks, TOGETHER)
    group = program % groups
    first_block = group * TOGETHER
    head = program // groups % heads
    part = program // groups // heads

    PAIRS: tl.constexpr = WIDTH // 2
    local = tl.arange(0, WIDTH)
    pair = tl.arange(0, PAIRS)
    axis = tl.arange(0, AXES_TILE)
    channel = first_block * BLOCK + local
    own_block, is_rotated, own_frequency = _load_frequencies(
        angular, head, first_block, blocks, local // 2, BLOCK, TOGETHER
    )
    block, real, frequency = _load_frequencies(angular, head, first_block, blocks, pair, BLOCK, TOGETHER)
    factor_row = (axis * heads + head)[:, None] * blocks
    own_factor = tl.load(
        coefficients + factor_row + own_block[None, :], mask=(axis < AXES)[:, None] & is_rotated[None, :], other=0.0
    )
    factor = tl.load(coefficients + factor_row + block[None, :], mask=(axis < AXES)[:, None] & real[None, :], other=0.0)

    grad_frequency = tl.zeros((AXES_TILE, PAIRS), tl.float32)
    linear_real = tl.zeros((PAIRS, PAIRS), tl.float32)
    linear_imag = tl.zeros((PAIRS, PAIRS), tl.float32)
    mirror_real = tl.zeros((PAIRS, PAIRS), tl.float32)
    mirror_imag = tl.zeros((PAIRS, PAIRS), tl.float32)
    first, last = share(part, parts, sets * tokens)
    for index in range(first, last):
        place = index // tokens
        token = index % tokens
        position = tl.load(positions + index * AXES + axis, mask=axis < AXES, other=0.0)
        own_angle = tl.sum(position[:, None] * own_factor, axis=0) * own_frequency
        matrix = _matrix(basis, head, first_block, blocks, own_angle, OUTER, BLOCK, WIDTH, TOGETHER)
        outer = tl.zeros((WIDTH, WIDTH), tl.float32)  # sum dy x^T
        outer = multiply_back_rows(
            grad_q, q, q_out, 0, samples * q_group, place * samples, q_group, head, token,
            gq_sample, gq_head, gq_token, q_sample, q_head, q_token, q_out_sample, q_out_head, q_out_token,
            matrix, outer, channel, is_rotated, ROWS,
        )  # fmt: skip
        outer = multiply_back_rows(
            grad_k, k, k_out, 0, samples * k_group, place * samples, k_group, head, token,
            gk_sample, gk_head, gk_token, k_sample, k_head, k_token, k_out_sample, k_out_head, k_out_token,
            matrix, outer, channel, is_rotated, ROWS,
        )  # fmt: skip
        a_real, a_imag, b_real, b_imag = _planes(outer, basis, head, first_block, blocks, OUTER, BLOCK, WIDTH, TOGETHER)
        along = tl.sum(position[:, None] * factor, axis=0)
        diagonal = pair[:, None] == pair[None, :]
        grad_angle = 2 * tl.cos(along * frequency) * tl.sum(tl.where(diagonal, a_imag, 0.0), axis=1)
        grad_angle -= 2 * tl.sin(along * frequency) * tl.sum(tl.where(diagonal, a_real, 0.0), axis=1)
        grad_frequency += position[:, None] * grad_angle[None, :]
        if NEED_POSITIONS:
            slope = tl.sum(factor * (frequency * grad_angle)[None, :], axis=1)
            cell = tl.cast(group * heads + head, tl.int64) * sets * tokens + index
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

    cell = (tl.cast(part, tl.int64) * AXES + axis[:, None]) * heads + head
    at = per_frequency + (cell * blocks + block[None, :]) * (BLOCK // 2) + (pair % (BLOCK // 2))[None, :]
    tl.store(at, grad_frequency, mask=(axis < AXES)[:, None] & real[None, :])

    kept = (block[:, None] == block[None, :]) & real[:, None]
    cell = (tl.cast(part, tl.int64) * heads + head) * blocks + block[:, None]
    row = 2 * (pair % (BLOCK // 2))[:, None]
    column = 2 * (pair % (BLOCK // 2))[None, :]
    at = per_base + (cell * BLOCK + row) * BLOCK + column
    tl.store(at, linear_real + mirror_real, mask=kept)
    tl.store(at + 1, mirror_imag - linear_imag, mask=kept)
    tl.store(at + BLOCK, mirror_imag + linear_imag, mask=kept)
    tl.store(at + BLOCK + 1, linear_real - mirror_real, mask=kept)


@triton.jit
def _matrix(
    basis, head, first_block, blocks, angle,
    OUTER: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """Compute U rot(a) U^T, or rot(a) U^T without the outer U, of one token [WIDTH, WIDTH]."""
    row = tl.arange(0, WIDTH)[:, None]
    column = tl.arange(0, WIDTH)[None, :]
    inward = _load_basis(basis, head, first_block, blocks, column, row, BLOCK, WIDTH, TOGETHER)  # U^T
    other = _load_basis(basis, head, first_block, blocks, column, row ^ 1, BLOCK, WIDTH, TOGETHER)
    other = tl.where(row % 2 == 0, -other, other)
    rotated = tl.cos(angle)[:, None] * inward + tl.sin(angle)[:, None] * other
    if OUTER:
        rotated = multiply(tl.trans(inward), rotated)
    return rotated


@triton.jit
def _planes(
    outer, basis, head, first_block, blocks,
    OUTER: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """Split H = sum h x'^T, from sum dy x^T, into maps  z -> α z + β conj(z)  of planes: α and β [PAIRS, PAIRS]."""
    row = tl.arange(0, WIDTH)[:, None]
    even = 2 * tl.arange(0, WIDTH // 2)[None, :]
    right_even = _load_basis(basis, head, first_block, blocks, row, even, BLOCK, WIDTH, TOGETHER)
    right_odd = _load_basis(basis, head, first_block, blocks, row, even + 1, BLOCK, WIDTH, TOGETHER)
    if OUTER:
        left_even = right_even
        left_odd = right_odd
    else:
        left_even = (row == even).to(tl.float32)
        left_odd = (row == even + 1).to(tl.float32)
    onto_even = multiply(outer, right_even)
    onto_odd = multiply(outer, right_odd)
    even_even = multiply(tl.trans(left_even), onto_even)
    even_odd = multiply(tl.trans(left_even), onto_odd)
    odd_even = multiply(tl.trans(left_odd), onto_even)
    odd_odd = multiply(tl.trans(left_odd), onto_odd)
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
