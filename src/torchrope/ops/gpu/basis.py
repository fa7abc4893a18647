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

from torchrope.ops.gpu.block import copy_rest, multiply_back_rows
from torchrope.ops.gpu.launch import (
    VARYING,
    WIDE_WARPS,
    offsets,
    on_device_of,
    outer_strides,
    power_of_two,
    share,
    splits,
)
from torchrope.ops.gpu.products import multiply, multiply_vectors
from torchrope.tensors import contiguous_channels, empty_rows

# The largest block: wider products do not fit the shared memory of every device.
LARGEST = 64


def rotate(x: Tensor, positions: Tensor, coefficients: Tensor, basis: Tensor, angular: Tensor) -> Tensor:
    """Rotate blocks of channels:  y = U rot(s w) U^T x.

    Args:
        x: `(batch, heads, tokens, channels)`, float32, bfloat16 or float16.
        positions: `(1 or batch, tokens, axes)` float32.
        coefficients: c, `(axes, rotation heads, blocks)` float32.
        basis: U, `(rotation heads, blocks, b, b)` float32, b even and at most `LARGEST`.
        angular: w, `(rotation heads, blocks, b / 2)` float32.

    Returns:
        Rotated x, in its memory order if its channels are contiguous; channels beyond the blocks are unchanged.
    """
    x = contiguous_channels(x)
    out = empty_rows(x)
    if x.numel() == 0:
        return out
    work = _Work(x, positions, basis)
    # Tokens in the tile of a program: 32 of 64 float32 channels need 100 KiB of shared memory, many devices have 99.
    height = 16 if work.tile["WIDTH"] == 64 and x.element_size() == 4 else 32
    programs = work.groups * work.heads * triton.cdiv(work.tokens, height) * work.sets
    parts = splits(programs, work.rows)
    strides, unit = outer_strides(x, out)
    with on_device_of(x):
        _rotate_kernel[(programs * parts,)](
            x, out, positions.contiguous(), coefficients.contiguous(), basis.contiguous(), angular.contiguous(),
            *strides, *work.sizes, parts, work.blocks, UNIT=unit, TOKENS=height, **work.tile,
        )  # fmt: skip
    copy_rest(x, out, work.rotary_dim)
    return out


def rotate_backward(
    grad: Tensor,
    x: Tensor,
    positions: Tensor,
    coefficients: Tensor,
    basis: Tensor,
    angular: Tensor,
    need_positions: bool,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """Compute the gradients of `rotate`.

    With x' = U^T x, h = U^T dy, and H = sum h x'^T over the vectors that share s: a pair
    of planes (j, k) of H maps z to  α z + β conj(z);  α is multiplied by conj g(w_j, w_k) and β by conj g(w_j, -w_k),
    where g(u, v) = s exp(i s (u + v) / 2) sinc(s (u - v) / 2). Summed over tokens this is G, and
    dB = U (G - G^T) / 2 U^T.

    Args:
        grad: Gradient of the rotated x.
        x: As given to `rotate`.
        positions: As given to `rotate`.
        coefficients: c.
        basis: U.
        angular: w.
        need_positions: Whether to return the gradient of the positions.

    Returns:
        Gradients of x in its dtype, of positions (or None), of coefficients, and of the base, skew.
    """
    x, grad = contiguous_channels(x), contiguous_channels(grad)
    out = empty_rows(x)
    if x.numel() == 0:
        grad_positions = torch.zeros_like(positions) if need_positions else None
        return out, grad_positions, torch.zeros_like(coefficients), torch.zeros_like(basis)
    work = _Work(x, positions, basis)
    axes, heads, _ = coefficients.shape
    programs = work.groups * heads
    parts = splits(programs, work.sets * work.tokens)
    per_frequency, per_position, per_base = (
        positions.new_empty(shape)
        for shape in (
            (parts, axes, *angular.shape),
            (work.groups, heads, *positions.shape) if need_positions else (0,),
            (parts, *basis.shape),
        )
    )
    height = 16 if work.rows <= 16 else 64 if x.element_size() == 2 else 32
    strides, unit = outer_strides(x, out, grad)
    with on_device_of(x):
        _rotate_backward_kernel[(programs * parts,)](
            grad, x, out, positions.contiguous(), coefficients.contiguous(), basis.contiguous(), angular.contiguous(),
            per_frequency, per_position, per_base, *strides, *work.sizes, parts, work.blocks,
            UNIT=unit, NEED_POSITIONS=need_positions, AXES_TILE=power_of_two(axes), ROWS=height,
            **work.tile,
        )  # fmt: skip
    copy_rest(grad, out, work.rotary_dim)
    return (
        out,
        per_position.sum(dim=(0, 1)) if need_positions else None,
        (per_frequency.sum(dim=0) * angular).sum(dim=-1),
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

    def __init__(self, x: Tensor, positions: Tensor, basis: Tensor) -> None:
        self.heads, self.blocks, b, _ = basis.shape
        self.sets, self.tokens, axes = positions.shape
        self.rotary_dim = self.blocks * b
        samples, group = x.shape[0] // self.sets, x.shape[1] // self.heads
        self.rows = samples * group
        width = max(power_of_two(b), 32)
        together = min(width // b, self.blocks)
        self.groups = triton.cdiv(self.blocks, together)
        self.sizes = self.tokens, self.heads, self.sets, samples, group
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


@triton.jit(do_not_specialize=VARYING)
def _rotate_kernel(
    x, out, positions, coefficients, basis, angular,
    x_sample, x_head, x_token, out_sample, out_head, out_token,
    tokens, heads, sets, samples, group, splits, blocks,
    UNIT: tl.constexpr, TOKENS: tl.constexpr,
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
    split = program // tiles // sets

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
    first, last = share(split, splits, samples * group)
    for index in range(first, last):
        here = offsets(index, token, place, samples, head, group, x_sample, x_head, x_token, UNIT)
        there = offsets(index, token, place, samples, head, group, out_sample, out_head, out_token, UNIT)
        vectors = tl.load(x + here[:, None] + channel[None, :], mask=inside, other=0.0)
        rotated = cos * multiply_vectors(vectors, inward) + sin * multiply_vectors(vectors, other)
        rotated = multiply(rotated, tl.trans(inward))
        tl.store(out + there[:, None] + channel[None, :], rotated.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=VARYING)
def _rotate_backward_kernel(
    grad, x, out, positions, coefficients, basis, angular,
    per_frequency, per_position, per_base,
    x_sample, x_head, x_token, out_sample, out_head, out_token, grad_sample, grad_head, grad_token,
    tokens, heads, sets, samples, group, splits, blocks,
    UNIT: tl.constexpr, NEED_POSITIONS: tl.constexpr, AXES_TILE: tl.constexpr, ROWS: tl.constexpr,
    AXES: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    groups = tl.cdiv(blocks, TOGETHER)
    tile = program % groups
    first_block = tile * TOGETHER
    head = program // groups % heads
    split = program // groups // heads

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
    first, last = share(split, splits, sets * tokens)
    for index in range(first, last):
        place = index // tokens
        token = index % tokens
        position = tl.load(positions + index * AXES + axis, mask=axis < AXES, other=0.0)
        own_angle = tl.sum(position[:, None] * own_factor, axis=0) * own_frequency
        matrix = _matrix(basis, head, first_block, blocks, own_angle, BLOCK, WIDTH, TOGETHER)
        outer = multiply_back_rows(
            grad, x, out, 0, samples * group, place, samples, head, group, token,
            x_sample, x_head, x_token, out_sample, out_head, out_token, grad_sample, grad_head, grad_token,
            matrix, channel, is_rotated, UNIT, WIDTH, ROWS,
        )  # fmt: skip
        a_real, a_imag, b_real, b_imag = _planes(outer, basis, head, first_block, blocks, BLOCK, WIDTH, TOGETHER)
        along = tl.sum(position[:, None] * factor, axis=0)
        diagonal = pair[:, None] == pair[None, :]
        grad_angle = 2 * tl.cos(along * frequency) * tl.sum(tl.where(diagonal, a_imag, 0.0), axis=1)
        grad_angle -= 2 * tl.sin(along * frequency) * tl.sum(tl.where(diagonal, a_real, 0.0), axis=1)
        grad_frequency += position[:, None] * grad_angle[None, :]
        if NEED_POSITIONS:
            slope = tl.sum(factor * (frequency * grad_angle)[None, :], axis=1)
            cell = tl.cast(tile * heads + head, tl.int64) * sets * tokens + index
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

    cell = (tl.cast(split, tl.int64) * AXES + axis[:, None]) * heads + head
    at = per_frequency + (cell * blocks + block[None, :]) * (BLOCK // 2) + (pair % (BLOCK // 2))[None, :]
    tl.store(at, grad_frequency, mask=(axis < AXES)[:, None] & real[None, :])

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
def _matrix(
    basis, head, first_block, blocks, angle,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """Compute U rot(a) U^T of one token [WIDTH, WIDTH]."""
    row = tl.arange(0, WIDTH)[:, None]
    column = tl.arange(0, WIDTH)[None, :]
    inward = _load_basis(basis, head, first_block, blocks, column, row, BLOCK, WIDTH, TOGETHER)  # U^T
    other = _load_basis(basis, head, first_block, blocks, column, row ^ 1, BLOCK, WIDTH, TOGETHER)
    other = tl.where(row % 2 == 0, -other, other)
    rotated = tl.cos(angle)[:, None] * inward + tl.sin(angle)[:, None] * other
    return multiply(tl.trans(inward), rotated)


@triton.jit
def _planes(
    outer, basis, head, first_block, blocks,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr, TOGETHER: tl.constexpr,
):  # fmt: skip
    """Split H = sum h x'^T, from sum dy x^T, into maps  z -> α z + β conj(z)  of planes: α and β [PAIRS, PAIRS]."""
    row = tl.arange(0, WIDTH)[:, None]
    even = 2 * tl.arange(0, WIDTH // 2)[None, :]
    even_basis = _load_basis(basis, head, first_block, blocks, row, even, BLOCK, WIDTH, TOGETHER)
    odd_basis = _load_basis(basis, head, first_block, blocks, row, even + 1, BLOCK, WIDTH, TOGETHER)
    onto_even = multiply(outer, even_basis)
    onto_odd = multiply(outer, odd_basis)
    even_even = multiply(tl.trans(even_basis), onto_even)
    even_odd = multiply(tl.trans(even_basis), onto_odd)
    odd_even = multiply(tl.trans(odd_basis), onto_even)
    odd_odd = multiply(tl.trans(odd_basis), onto_odd)
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
