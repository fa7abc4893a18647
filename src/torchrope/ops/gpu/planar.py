"""Rotation of channel pairs by angles that are computed in registers:  a = sum_n p_n f_n.

A program holds the angles of some tokens and one rotation head, and rotates the vectors of all samples and heads that
share them. Only q and k are read from and written to memory.
"""

# mypy: allow-untyped-defs

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchrope.ops.gpu.launch import contiguous_channels, on_device_of, outer_strides, power_of_two, splits
from torchrope.tensors import empty_rows

TILE = 2048
"""Channels times tokens in the tile of a program. `benchmarks/gpu.py` compares sizes."""

WARPS = 4
"""Warps of a program."""


def rotate(q: Tensor, k: Tensor, positions: Tensor, frequencies: Tensor, halves: bool = False) -> tuple[Tensor, Tensor]:
    """Rotate channel pairs of q and k counter-clockwise by  φ_i = sum_a p_a f_ai,  both in one launch.

    Args:
        q: `(batch, query heads, tokens, channels)`, float32, bfloat16 or float16.
        k: `(batch, key heads, tokens, channels)`.
        positions: `(1 or batch, tokens, axes)` float32.
        frequencies: `(axes, rotation heads, pairs)` float32; rotation heads divide query and key heads.
        halves: Whether pair i is channels (i, i + pairs) instead of (2i, 2i + 1).

    Returns:
        Rotated q and k, contiguous, in the dtypes of the inputs; channels beyond the pairs are bit-identical.
    """
    q, k = contiguous_channels(q), contiguous_channels(k)
    q_out, k_out = empty_rows(q), empty_rows(k)
    work = Work(q, k, positions, frequencies)
    if work.is_empty:
        return q_out, k_out
    with on_device_of(q):
        _rotate_kernel[work.grid](
            q, k, q_out, k_out, *work.angles,
            *outer_strides(q), *outer_strides(k), *outer_strides(q_out), *outer_strides(k_out),
            *work.sizes, HALVES=halves, **work.tile,
        )  # fmt: skip
    return q_out, k_out


def rotate_backward(
    grad_q: Tensor,
    grad_k: Tensor,
    q: Tensor,
    k: Tensor,
    positions: Tensor,
    frequencies: Tensor,
    need_frequencies: bool,
    need_positions: bool,
    halves: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Gradients of `rotate`:  dx = R^T dy,  da_i = dx_2i+1 x_2i - dx_2i x_2i+1,  df = sum p da,  dp = sum f da.

    Args:
        grad_q: Gradient of the rotated q.
        grad_k: Gradient of the rotated k.
        q: As given to `rotate`.
        k: As given to `rotate`.
        positions: As given to `rotate`.
        frequencies: As given to `rotate`.
        need_frequencies: Whether to return the gradient of the frequencies.
        need_positions: Whether to return the gradient of the positions.
        halves: As given to `rotate`.

    Returns:
        Gradients of q and k in their dtypes, of frequencies and positions in float32, or None if not needed.
    """
    q, k, grad_q, grad_k = map(contiguous_channels, (q, k, grad_q, grad_k))
    q_out, k_out = empty_rows(q), empty_rows(k)
    work = Work(q, k, positions, frequencies)
    if work.is_empty:
        return (
            q_out,
            k_out,
            torch.zeros_like(frequencies) if need_frequencies else None,
            torch.zeros_like(positions) if need_positions else None,
        )
    axes, heads, pairs = frequencies.shape
    sets, tokens, _ = positions.shape
    per_frequency, per_position = (
        torch.empty(shape if needed else (0,), dtype=torch.float32, device=q.device)
        for shape, needed in (
            ((work.splits * sets * work.token_tiles, axes, heads, pairs), need_frequencies),
            ((work.splits, heads, sets, tokens, axes), need_positions),
        )
    )
    with on_device_of(q):
        _rotate_backward_kernel[work.grid](
            grad_q, grad_k, q, k, q_out, k_out, *work.angles, per_frequency, per_position,
            *outer_strides(grad_q), *outer_strides(grad_k), *outer_strides(q), *outer_strides(k),
            *outer_strides(q_out), *outer_strides(k_out),
            *work.sizes, NEED_FREQUENCIES=need_frequencies, NEED_POSITIONS=need_positions, HALVES=halves, **work.tile,
        )  # fmt: skip
    return (
        q_out,
        k_out,
        per_frequency.sum(dim=0) if need_frequencies else None,
        per_position.sum(dim=(0, 1)) if need_positions else None,
    )


class Work:
    """Partition of a rotation into programs: token tiles, rotation heads, sets of positions, and shares of the rows.

    Rows are the samples and heads that one set of angles rotates.
    """

    def __init__(self, q: Tensor, k: Tensor, positions: Tensor, frequencies: Tensor) -> None:
        axes, heads, pairs = frequencies.shape
        sets, tokens, _ = positions.shape
        channels = q.shape[-1]
        self.is_empty = q.numel() + k.numel() == 0
        width = power_of_two(max(channels, 2))
        height = max(TILE // width, 1)
        samples = q.shape[0] // max(sets, 1)
        groups = q.shape[1] // heads, k.shape[1] // heads
        self.token_tiles = triton.cdiv(tokens, height)
        programs = self.token_tiles * heads * sets
        self.splits = splits(programs, samples * max(groups))
        self.grid = (programs * self.splits,)
        self.angles = positions.contiguous(), frequencies.contiguous()
        self.sizes = tokens, channels, pairs, heads, sets, samples, *groups, self.splits
        self.tile = dict(AXES=axes, TOKENS=height, PAIRS=width // 2, num_warps=WARPS)


@triton.jit
def share(split, splits, rows):
    """Compute the range of rows of a program."""
    each = tl.cdiv(rows, splits)
    return split * each, tl.minimum((split + 1) * each, rows)


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
def row_start(start, row, group, head, stride_sample, stride_head):
    """Compute the offset of a row: the row'th of the vectors that share angles, over samples and heads of the group."""
    sample = tl.cast(start + row // group, tl.int64)
    return sample * stride_sample + (head * group + row % group) * tl.cast(stride_head, tl.int64)


@triton.jit
def halves_of(x, TOKENS: tl.constexpr, PAIRS: tl.constexpr):
    """Split vectors into even and odd channels [TOKENS, PAIRS] in float32."""
    return tl.split(tl.reshape(x.to(tl.float32), (TOKENS, PAIRS, 2)))


@triton.jit
def whole_of(even, odd, TOKENS: tl.constexpr, PAIRS: tl.constexpr):
    """Interleave even and odd channels to vectors [TOKENS, 2 PAIRS]."""
    return tl.reshape(tl.join(even, odd), (TOKENS, 2 * PAIRS))


@triton.jit
def _rotate_rows(
    x, out, first, last, start, group, head,
    x_sample, x_head, x_token, out_sample, out_head, out_token,
    cos, sin, is_rotated, token, channel, inside, TOKENS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    for row in range(first, last):
        here = row_start(start, row, group, head, x_sample, x_head)
        there = row_start(start, row, group, head, out_sample, out_head)
        vectors = tl.load(x + here + token[:, None] * x_token + channel[None, :], mask=inside, other=0.0)
        even, odd = halves_of(vectors, TOKENS, PAIRS)
        rotated = whole_of(cos * even - sin * odd, sin * even + cos * odd, TOKENS, PAIRS).to(vectors.dtype)
        result = tl.where(is_rotated[None, :], rotated, vectors)
        tl.store(out + there + token[:, None] * out_token + channel[None, :], result, mask=inside)


@triton.jit
def _rotate_kernel(
    q, k, q_out, k_out, positions, frequencies,
    q_sample, q_head, q_token, k_sample, k_head, k_token,
    q_out_sample, q_out_head, q_out_token, k_out_sample, k_out_head, k_out_token,
    tokens, channels, pairs, heads, sets, samples, q_group, k_group, splits,
    HALVES: tl.constexpr, AXES: tl.constexpr, TOKENS: tl.constexpr, PAIRS: tl.constexpr,
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
    start = place * samples
    token = token.to(tl.int64)
    first, last = share(split, splits, samples * q_group)
    _rotate_rows(
        q, q_out, first, last, start, q_group, head,
        q_sample, q_head, q_token, q_out_sample, q_out_head, q_out_token,
        cos, sin, is_rotated, token, channel, inside, TOKENS, PAIRS,
    )  # fmt: skip
    first, last = share(split, splits, samples * k_group)
    _rotate_rows(
        k, k_out, first, last, start, k_group, head,
        k_sample, k_head, k_token, k_out_sample, k_out_head, k_out_token,
        cos, sin, is_rotated, token, channel, inside, TOKENS, PAIRS,
    )  # fmt: skip


@triton.jit
def _rotate_back_rows(
    grad, x, out, first, last, start, group, head,
    grad_sample, grad_head, grad_token, x_sample, x_head, x_token, out_sample, out_head, out_token,
    cos, sin, is_rotated, token, channel, inside, NEED_ANGLES: tl.constexpr, TOKENS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Rotate gradients back; return the gradient of the angles [TOKENS, PAIRS]."""
    grad_angles = tl.zeros((TOKENS, PAIRS), tl.float32)
    for row in range(first, last):
        here = row_start(start, row, group, head, grad_sample, grad_head)
        there = row_start(start, row, group, head, out_sample, out_head)
        vectors = tl.load(grad + here + token[:, None] * grad_token + channel[None, :], mask=inside, other=0.0)
        even, odd = halves_of(vectors, TOKENS, PAIRS)
        grad_even = cos * even + sin * odd
        grad_odd = cos * odd - sin * even
        rotated = whole_of(grad_even, grad_odd, TOKENS, PAIRS).to(out.dtype.element_ty)
        result = tl.where(is_rotated[None, :], rotated, vectors.to(out.dtype.element_ty))
        tl.store(out + there + token[:, None] * out_token + channel[None, :], result, mask=inside)
        if NEED_ANGLES:
            origin = row_start(start, row, group, head, x_sample, x_head)
            before = tl.load(x + origin + token[:, None] * x_token + channel[None, :], mask=inside, other=0.0)
            even, odd = halves_of(before, TOKENS, PAIRS)
            grad_angles += grad_odd * even - grad_even * odd
    return grad_angles


@triton.jit
def keep_angles(
    grad_angles, positions, frequencies, per_frequency, per_position, head, tile, place, split, token, pair,
    tokens, pairs, heads, sets,
    NEED_FREQUENCIES: tl.constexpr, NEED_POSITIONS: tl.constexpr, AXES: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Store a program's contribution to the gradients of frequencies and positions."""
    if NEED_FREQUENCIES:
        part = (split * sets + place) * tl.cdiv(tokens, TOKENS) + tile
        for axis in tl.static_range(AXES):
            position = tl.load(positions + (place * tokens + token) * AXES + axis, mask=token < tokens, other=0.0)
            total = tl.sum(position[:, None] * grad_angles, axis=0)
            cell = (tl.cast(part, tl.int64) * AXES + axis) * heads + head
            tl.store(per_frequency + cell * pairs + pair, total, mask=pair < pairs)
    if NEED_POSITIONS:
        for axis in tl.static_range(AXES):
            frequency = tl.load(frequencies + (axis * heads + head) * pairs + pair, mask=pair < pairs, other=0.0)
            total = tl.sum(frequency[None, :] * grad_angles, axis=1)
            cell = ((split * heads + head) * sets + place) * tokens + token.to(tl.int64)
            tl.store(per_position + cell * AXES + axis, total, mask=token < tokens)


@triton.jit
def _rotate_backward_kernel(
    grad_q, grad_k, q, k, q_out, k_out, positions, frequencies, per_frequency, per_position,
    gq_sample, gq_head, gq_token, gk_sample, gk_head, gk_token,
    q_sample, q_head, q_token, k_sample, k_head, k_token,
    q_out_sample, q_out_head, q_out_token, k_out_sample, k_out_head, k_out_token,
    tokens, channels, pairs, heads, sets, samples, q_group, k_group, splits,
    NEED_FREQUENCIES: tl.constexpr, NEED_POSITIONS: tl.constexpr,
    HALVES: tl.constexpr, AXES: tl.constexpr, TOKENS: tl.constexpr, PAIRS: tl.constexpr,
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
    start = place * samples
    wide = token.to(tl.int64)
    first, last = share(split, splits, samples * q_group)
    grad_angles = _rotate_back_rows(
        grad_q, q, q_out, first, last, start, q_group, head,
        gq_sample, gq_head, gq_token, q_sample, q_head, q_token, q_out_sample, q_out_head, q_out_token,
        cos, sin, is_rotated, wide, channel, inside, NEED_FREQUENCIES or NEED_POSITIONS, TOKENS, PAIRS,
    )  # fmt: skip
    first, last = share(split, splits, samples * k_group)
    grad_angles += _rotate_back_rows(
        grad_k, k, k_out, first, last, start, k_group, head,
        gk_sample, gk_head, gk_token, k_sample, k_head, k_token, k_out_sample, k_out_head, k_out_token,
        cos, sin, is_rotated, wide, channel, inside, NEED_FREQUENCIES or NEED_POSITIONS, TOKENS, PAIRS,
    )  # fmt: skip
    keep_angles(
        grad_angles, positions, frequencies, per_frequency, per_position, head, tile, place, split, token, pair,
        tokens, pairs, heads, sets, NEED_FREQUENCIES, NEED_POSITIONS, AXES, TOKENS,
    )  # fmt: skip
