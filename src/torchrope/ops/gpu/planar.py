"""Rotation of channel pairs by angles that are computed in registers:  a = sum_n p_n f_n.

A program holds the angles of some tokens and one rotation head, and rotates the vectors of all samples and heads that
share them. Only vectors are read from and written to memory.
"""

# mypy: allow-untyped-defs

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchrope.ops.gpu.launch import (
    VARYING,
    offsets,
    on_device_of,
    outer_strides,
    power_of_two,
    share,
    splits,
)
from torchrope.tensors import contiguous_channels, empty_rows

# Channels times tokens in the tile of a program, and its warps.
_TILE, _WARPS = 2048, 4


def rotate(
    x: Tensor,
    positions: Tensor,
    frequencies: Tensor,
    halves: bool = False,
    *,
    tile: int = _TILE,
    warps: int = _WARPS,
) -> Tensor:
    """Rotate channel pairs of x counter-clockwise by  φ_i = sum_a p_a f_ai.

    Args:
        x: `(batch, heads, tokens, channels)`, float32, bfloat16 or float16.
        positions: `(1 or batch, tokens, axes)` float32.
        frequencies: `(axes, rotation heads, pairs)` float32; rotation heads divide the heads.
        halves: Whether pair i is channels (i, i + pairs) instead of (2i, 2i + 1).
        tile: Channels times tokens of a program; `benchmarks/gpu.py` compares sizes.
        warps: Warps of a program.

    Returns:
        Rotated x, in its memory order if its channels are contiguous; channels beyond the pairs are bit-identical.
    """
    x = contiguous_channels(x)
    out = empty_rows(x)
    if x.numel() == 0:
        return out
    work = Work(x, positions, frequencies, tile, warps)
    strides, unit = outer_strides(x, out)
    with on_device_of(x):
        _rotate_kernel[work.grid](x, out, *work.angles, *strides, *work.sizes, UNIT=unit, HALVES=halves, **work.tile)
    return out


def rotate_backward(
    grad: Tensor,
    x: Tensor,
    positions: Tensor,
    frequencies: Tensor,
    halves: bool,
    wanted: Sequence[bool],
    *,
    tile: int = _TILE,
    warps: int = _WARPS,
) -> tuple[Tensor, list[Tensor | None]]:
    """Gradients of `rotate`:  dx = R^T dy,  da_i = dx_2i+1 x_2i - dx_2i x_2i+1,  df = sum p da,  dp = sum f da.

    Args:
        grad: Gradient of the rotated x.
        x: As given to `rotate`, and so all arguments up to halves, tile and warps.
        wanted: Whether to return gradients to positions and to frequencies.

    Returns:
        Gradient of x in its dtype, and those of positions and frequencies in float32, None if not wanted.
    """
    x, grad = contiguous_channels(x), contiguous_channels(grad)
    out = empty_rows(x)
    if x.numel() == 0:
        return out, zeros_like(wanted, positions, frequencies)
    work = Work(x, positions, frequencies, tile, warps)
    partial = work.empty_partial_gradients(*wanted)
    strides, unit = outer_strides(x, out, grad)
    with on_device_of(x):
        _rotate_backward_kernel[work.grid](
            grad, x, out, *work.angles, *partial, *strides, *work.sizes,
            NEED_POSITIONS=wanted[0], NEED_FREQUENCIES=wanted[1], UNIT=unit, HALVES=halves, **work.tile,
        )  # fmt: skip
    return out, sums(wanted, *partial)


def zeros_like(wanted: Sequence[bool], *tensors: Tensor) -> list[Tensor | None]:
    """Return the wanted gradients of a rotation without rows."""
    return [
        torch.zeros_like(x, dtype=torch.float32) if needed else None for x, needed in zip(tensors, wanted, strict=True)
    ]


def sums(wanted: Sequence[bool], *partial: Tensor) -> list[Tensor | None]:
    """Sum the wanted gradients over programs, the first dimension."""
    return [x.sum(dim=0) if needed else None for x, needed in zip(partial, wanted, strict=True)]


class Work:
    """Partition of a rotation into programs: token tiles, rotation heads, sets of positions, and shares of the rows.

    Rows are the samples and heads that one set of angles rotates.
    """

    def __init__(
        self, x: Tensor, positions: Tensor, frequencies: Tensor, tile: int = _TILE, warps: int = _WARPS
    ) -> None:
        axes, heads, pairs = frequencies.shape
        sets, tokens, _ = positions.shape
        channels = x.shape[-1]
        width = power_of_two(max(channels, 2))
        height = max(tile // width, 1)
        samples, group = x.shape[0] // sets, x.shape[1] // heads
        token_tiles = triton.cdiv(tokens, height)
        programs = token_tiles * heads * sets
        parts = splits(programs, samples * group)
        self.grid = (programs * parts,)
        self.angles = positions.contiguous(), frequencies.contiguous()
        self.sizes = tokens, heads, sets, samples, group, parts, channels, pairs
        self.tile = dict(AXES=axes, TOKENS=height, PAIRS=width // 2, num_warps=warps)
        self._partial_shapes = (parts * heads, *positions.shape), (parts * sets * token_tiles, *frequencies.shape)

    def empty_partial_gradients(self, need_positions: bool, need_frequencies: bool) -> tuple[Tensor, Tensor]:
        """Allocate gradients to positions and frequencies of each program, without elements if not needed."""
        of_positions, of_frequencies = self._partial_shapes
        like = self.angles[0]
        return (
            like.new_empty(of_positions if need_positions else (0,)),
            like.new_empty(of_frequencies if need_frequencies else (0,)),
        )


@triton.jit
def locate(tokens, heads, sets, TOKENS: tl.constexpr):
    """Locate a program: head, token tile, set of positions, share of rows; adjacent programs read adjacent heads."""
    program = tl.program_id(0)
    tiles = tl.cdiv(tokens, TOKENS)
    return (
        program % heads,
        program // heads % tiles,
        program // (heads * tiles) % sets,
        program // (heads * tiles * sets),
    )


@triton.jit
def channels_of(pairs, HALVES: tl.constexpr, PAIRS: tl.constexpr):
    """Compute the channel of each column of a tile, in which the channels of a pair are adjacent."""
    column = tl.arange(0, 2 * PAIRS)
    if HALVES:
        column = tl.where(column < 2 * pairs, column % 2 * pairs + column // 2, column)
    return column


@triton.jit
def angles_of(
    positions, frequencies, place, head, heads, pairs, token, tokens, pair,
    AXES: tl.constexpr, TOKENS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Compute angles [TOKENS, PAIRS] of the tokens of a tile, of one rotation head and set of positions."""
    angles = tl.zeros((TOKENS, PAIRS), tl.float32)
    for axis in tl.static_range(AXES):
        position = tl.load(positions + (place * tokens + token) * AXES + axis, mask=token < tokens, other=0.0)
        frequency = tl.load(frequencies + (axis * heads + head) * pairs + pair, mask=pair < pairs, other=0.0)
        angles += position[:, None] * frequency[None, :]
    return angles


@triton.jit
def halves_of(x, TOKENS: tl.constexpr, PAIRS: tl.constexpr):
    """Split vectors into even and odd channels [TOKENS, PAIRS] in float32."""
    return tl.split(tl.reshape(x.to(tl.float32), (TOKENS, PAIRS, 2)))


@triton.jit
def whole_of(even, odd, TOKENS: tl.constexpr, PAIRS: tl.constexpr):
    """Interleave even and odd channels to vectors [TOKENS, 2 PAIRS]."""
    return tl.reshape(tl.join(even, odd), (TOKENS, 2 * PAIRS))


@triton.jit(do_not_specialize=VARYING)
def _rotate_kernel(
    x, out, positions, frequencies,
    x_sample, x_head, x_token, out_sample, out_head, out_token,
    tokens, heads, sets, samples, group, splits, channels, pairs,
    UNIT: tl.constexpr, HALVES: tl.constexpr, AXES: tl.constexpr, TOKENS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    head, tile, place, split = locate(tokens, heads, sets, TOKENS)
    token = tile * TOKENS + tl.arange(0, TOKENS)
    pair = tl.arange(0, PAIRS)
    is_rotated = tl.arange(0, 2 * PAIRS) < 2 * pairs
    channel = channels_of(pairs, HALVES, PAIRS)
    inside = (token < tokens)[:, None] & (channel < channels)[None, :]
    angles = angles_of(positions, frequencies, place, head, heads, pairs, token, tokens, pair, AXES, TOKENS, PAIRS)
    cos = tl.cos(angles)
    sin = tl.sin(angles)
    first, last = share(split, splits, samples * group)
    for row in range(first, last):
        here = offsets(row, token, place, samples, head, group, x_sample, x_head, x_token, UNIT)
        there = offsets(row, token, place, samples, head, group, out_sample, out_head, out_token, UNIT)
        vectors = tl.load(x + here[:, None] + channel[None, :], mask=inside, other=0.0)
        even, odd = halves_of(vectors, TOKENS, PAIRS)
        rotated = whole_of(cos * even - sin * odd, sin * even + cos * odd, TOKENS, PAIRS).to(vectors.dtype)
        result = tl.where(is_rotated[None, :], rotated, vectors)
        tl.store(out + there[:, None] + channel[None, :], result, mask=inside)


@triton.jit
def store_angles(
    grad_angles, positions, frequencies, per_position, per_frequency, head, tile, place, split, token, pair,
    tokens, pairs, heads, sets,
    NEED_POSITIONS: tl.constexpr, NEED_FREQUENCIES: tl.constexpr, AXES: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Store a program's contribution to the gradients of positions and frequencies."""
    wide = tl.cast(split, tl.int64)
    if NEED_POSITIONS:
        for axis in tl.static_range(AXES):
            frequency = tl.load(frequencies + (axis * heads + head) * pairs + pair, mask=pair < pairs, other=0.0)
            total = tl.sum(frequency[None, :] * grad_angles, axis=1)
            cell = ((wide * heads + head) * sets + place) * tokens + token
            tl.store(per_position + cell * AXES + axis, total, mask=token < tokens)
    if NEED_FREQUENCIES:
        part = (wide * sets + place) * tl.cdiv(tokens, TOKENS) + tile
        for axis in tl.static_range(AXES):
            position = tl.load(positions + (place * tokens + token) * AXES + axis, mask=token < tokens, other=0.0)
            total = tl.sum(position[:, None] * grad_angles, axis=0)
            cell = (part * AXES + axis) * heads + head
            tl.store(per_frequency + cell * pairs + pair, total, mask=pair < pairs)


@triton.jit(do_not_specialize=VARYING)
def _rotate_backward_kernel(
    grad, x, out, positions, frequencies, per_position, per_frequency,
    x_sample, x_head, x_token, out_sample, out_head, out_token, grad_sample, grad_head, grad_token,
    tokens, heads, sets, samples, group, splits, channels, pairs,
    NEED_POSITIONS: tl.constexpr, NEED_FREQUENCIES: tl.constexpr,
    UNIT: tl.constexpr, HALVES: tl.constexpr, AXES: tl.constexpr, TOKENS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    head, tile, place, split = locate(tokens, heads, sets, TOKENS)
    token = tile * TOKENS + tl.arange(0, TOKENS)
    pair = tl.arange(0, PAIRS)
    is_rotated = tl.arange(0, 2 * PAIRS) < 2 * pairs
    channel = channels_of(pairs, HALVES, PAIRS)
    inside = (token < tokens)[:, None] & (channel < channels)[None, :]
    angles = angles_of(positions, frequencies, place, head, heads, pairs, token, tokens, pair, AXES, TOKENS, PAIRS)
    cos = tl.cos(angles)
    sin = tl.sin(angles)
    grad_angles = tl.zeros((TOKENS, PAIRS), tl.float32)
    first, last = share(split, splits, samples * group)
    for row in range(first, last):
        here = offsets(row, token, place, samples, head, group, grad_sample, grad_head, grad_token, UNIT)
        there = offsets(row, token, place, samples, head, group, out_sample, out_head, out_token, UNIT)
        vectors = tl.load(grad + here[:, None] + channel[None, :], mask=inside, other=0.0)
        even, odd = halves_of(vectors, TOKENS, PAIRS)
        grad_even = cos * even + sin * odd
        grad_odd = cos * odd - sin * even
        rotated = whole_of(grad_even, grad_odd, TOKENS, PAIRS).to(out.dtype.element_ty)
        result = tl.where(is_rotated[None, :], rotated, vectors.to(out.dtype.element_ty))
        tl.store(out + there[:, None] + channel[None, :], result, mask=inside)
        if NEED_POSITIONS or NEED_FREQUENCIES:
            origin = offsets(row, token, place, samples, head, group, x_sample, x_head, x_token, UNIT)
            before = tl.load(x + origin[:, None] + channel[None, :], mask=inside, other=0.0)
            even, odd = halves_of(before, TOKENS, PAIRS)
            grad_angles += grad_odd * even - grad_even * odd
    store_angles(
        grad_angles, positions, frequencies, per_position, per_frequency, head, tile, place, split, token, pair,
        tokens, pairs, heads, sets, NEED_POSITIONS, NEED_FREQUENCIES, AXES, TOKENS,
    )  # fmt: skip
