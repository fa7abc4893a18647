"""Rotation of channel pairs by angles that are computed in registers:  a = sum_n p_n f_n,  also after a norm.

A program holds the angles of some tokens and one rotation head, and rotates the vectors of all samples and heads that
share them. Only vectors are read from and written to memory, once, also with RMSNorm or LayerNorm over all channels of
a head.
"""

# mypy: allow-untyped-defs

from collections.abc import Callable, Sequence
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from torchrope.ops.gpu.launch import (
    VARYING,
    launch,
    locate,
    offsets,
    on_sides,
    power_of_two,
    rows_of,
    share,
    splits_of,
    tiles_of,
    weighted_positions,
)
from torchrope.tensors import with_batch_dim

TILE, WARPS = 2048, 4
"""Channels times tokens in the tile of a program, and its warps; `benchmarks/gpu.py` compares them."""

_NO_NORMS = None, None, None, None, (0, 0), (0.0, 0.0)


def rotate_planar(q: Tensor, k: Tensor, *args: Any) -> tuple[Tensor, ...]:
    """Rotate channel pairs counter-clockwise by  φ_i = sum_a p_a f_ai,  other channels pass bit-identically.

    A table is ignored, because computing cos and sin is faster than reading them.
    """
    return rotate_planar_normed(q, k, *args, *_NO_NORMS)


def rotate_planar_backward(grad_q: Tensor, grad_k: Tensor, q: Tensor, k: Tensor, *args: Any) -> tuple[Tensor, ...]:
    """Compute gradients to q, k, and if wanted to positions and frequencies, else empty tensors."""
    *given, wanted = args
    run = _on_side([*wanted, *(False,) * 4], *given, *_NO_NORMS)
    return on_sides(run, (q, k), (grad_q, grad_k), [x.shape for x in given[:2]], wanted)


def rotate_planar_normed(q: Tensor, k: Tensor, *args: Any) -> tuple[Tensor, ...]:
    """Normalise over channels, then rotate channel pairs; rounded once."""
    return on_sides(_on_side((False,) * 6, *args), (q, k))


def rotate_planar_normed_backward(
    grad_q: Tensor, grad_k: Tensor, q: Tensor, k: Tensor, *args: Any
) -> tuple[Tensor, ...]:
    """Compute gradients to q, k, and if wanted to positions, frequencies and the four weights, else empty tensors.

    With  n = w u + b  the normalised vectors,  u = (x - m) r,  r = 1 / sqrt(mean (x - m)^2 + eps),  and  h = R^T dy:

        dφ_i = h_2i+1 n_2i - h_2i n_2i+1,   df = sum p dφ,   dp = sum f dφ,   dw = sum u h,   db = sum h
        dx = r (w h - mean w h - u mean(w h u))

    For RMSNorm m and mean w h are 0; without a norm  n = x  and  dx = h.
    """
    *given, wanted = args
    positions, frequencies, _, _, *weights, _, _ = given
    shapes = [() if x is None else x.shape for x in (positions, frequencies, *weights)]
    return on_sides(_on_side(wanted, *given), (q, k), (grad_q, grad_k), shapes, wanted)


def _on_side(wanted: Sequence[bool], *args: Any) -> Callable[..., list[Tensor | None]]:
    """Return a function that rotates a side after its norm, or its gradient back, for `on_sides`.

    Kinds of norms are 0 no norm, 1 RMSNorm and 2 LayerNorm.
    """
    positions, frequencies, _, interleaved, *weights, kinds, eps = args
    angles = positions, frequencies = with_batch_dim(positions, 3).contiguous(), frequencies.contiguous()
    (sets, tokens, axes), (_, heads, pairs) = positions.shape, frequencies.shape

    def run(side: int, source: Tensor, out: Tensor, x: Tensor | None) -> list[Tensor | None]:
        first, kind, channels = 2 * side, kinds[side], source.shape[-1]
        needed = [*wanted[:2], *wanted[first + 2 : first + 4]]
        norm = *(None if w is None else w.contiguous() for w in weights[first : first + 2]), float(eps[side])
        width = power_of_two(max(channels, 2))
        height = max(TILE // width, 1)
        tiles = tiles_of(tokens, height)
        programs = tiles * heads * sets
        splits = splits_of(programs, rows_of(source, sets, heads))
        angle_parts = (splits * heads, *positions.shape), (splits * sets * tiles, *frequencies.shape)
        weight_part = splits * programs, channels
        gradients = launch(
            _rotate_kernel, (source, out, x if kind or any(needed) else None), (*angles, *norm), heads, sets, programs,
            splits, (channels, pairs), (*angle_parts, weight_part, weight_part), needed,
            BACK=x is not None, NORM=kind, HALVES=not interleaved, AXES=axes, TOKENS=height, PAIRS=width // 2,
            num_warps=WARPS,
        )  # fmt: skip
        return [*gradients[:2], *[None] * first, *gradients[2:], *[None] * (2 - first)]

    return run


@triton.jit(do_not_specialize=VARYING)
def _rotate_kernel(
    source, out, x, positions, frequencies, weights, biases, eps, per_position, per_frequency, per_weight, per_bias,
    source_sample, source_head, source_token, out_sample, out_head, out_token, x_sample, x_head, x_token,
    tokens, heads, sets, samples, group, splits, channels, pairs,
    BACK: tl.constexpr, NORM: tl.constexpr, UNIT: tl.constexpr, HALVES: tl.constexpr,
    AXES: tl.constexpr, TOKENS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Rotate source; if BACK source is the gradient and x, if needed, what was rotated."""
    tiles = tl.cdiv(tokens, TOKENS)
    _, head, tile, place, split = locate(1, heads, tiles, sets)
    token = tile * TOKENS + tl.arange(0, TOKENS)
    pair = tl.arange(0, PAIRS)
    channel = tl.arange(0, 2 * PAIRS)[None, :]
    is_rotated = channel < 2 * pairs
    if HALVES:  # in a tile the channels of a pair are adjacent
        channel = tl.where(is_rotated, channel % 2 * pairs + channel // 2, channel)
    inside = (token < tokens)[:, None] & (channel < channels)
    angles = weighted_positions(
        positions, frequencies, place, head, heads, pairs, token, tokens, pair, pair < pairs, AXES, TOKENS, PAIRS
    )
    cos = tl.cos(angles)
    sin = tl.sin(angles)
    if BACK:
        sin = -sin
    if NORM > 0:
        weight = _load_or(weights, channel, channels, 1.0, PAIRS)
        bias = _load_or(biases, channel, channels, 0.0, PAIRS)
    grad_angles = tl.zeros((TOKENS, PAIRS), tl.float32)
    grad_weight = tl.zeros((1, 2 * PAIRS), tl.float32)
    grad_bias = tl.zeros((1, 2 * PAIRS), tl.float32)
    first, last = share(split, splits, samples * group)
    for row in range(first, last):
        here = offsets(row, token, channel, place, samples, head, group, source_sample, source_head, source_token, UNIT)
        there = offsets(row, token, channel, place, samples, head, group, out_sample, out_head, out_token, UNIT)
        vectors = tl.load(source + here, mask=inside, other=0.0)
        if NORM > 0:
            given = vectors
            if BACK:
                origin = offsets(row, token, channel, place, samples, head, group, x_sample, x_head, x_token, UNIT)
                given = tl.load(x + origin, mask=inside, other=0.0)
            unit, inverse = _units(given, channels, inside, eps, NORM)
            normed = unit * weight
            if NORM == 2:
                normed += bias
            if not BACK:
                vectors = normed
        even, odd = _halves(vectors, TOKENS, PAIRS)
        turned_even = cos * even - sin * odd
        turned_odd = sin * even + cos * odd
        rotated = tl.reshape(tl.join(turned_even, turned_odd), (TOKENS, 2 * PAIRS))
        if BACK and NORM > 0:
            result = tl.where(is_rotated, rotated, vectors.to(tl.float32))
            if per_weight is not None:
                grad_weight += tl.sum(result * unit, axis=0, keep_dims=True)
            if per_bias is not None:
                grad_bias += tl.sum(result, axis=0, keep_dims=True)
            result *= weight
            along = tl.sum(result * unit, axis=1) / channels
            if NORM == 2:
                result -= (tl.sum(result, axis=1) / channels)[:, None]
            result = ((result - unit * along[:, None]) * inverse[:, None]).to(out.dtype.element_ty)
        else:
            rotated = rotated.to(out.dtype.element_ty)
            result = tl.where(is_rotated, rotated, vectors.to(out.dtype.element_ty))
        tl.store(out + there, result, mask=inside)
        if per_position is not None or per_frequency is not None:
            if NORM == 0:
                origin = offsets(row, token, channel, place, samples, head, group, x_sample, x_head, x_token, UNIT)
                normed = tl.load(x + origin, mask=inside, other=0.0)
            even, odd = _halves(normed, TOKENS, PAIRS)
            grad_angles += turned_odd * even - turned_even * odd

    wide = tl.cast(split, tl.int64)
    if per_position is not None:
        for axis in tl.static_range(AXES):
            frequency = tl.load(frequencies + (axis * heads + head) * pairs + pair, mask=pair < pairs, other=0.0)
            total = tl.sum(frequency[None, :] * grad_angles, axis=1)
            cell = ((wide * heads + head) * sets + place) * tokens + token
            tl.store(per_position + cell * AXES + axis, total, mask=token < tokens)
    if per_frequency is not None:
        for axis in tl.static_range(AXES):
            position = tl.load(positions + (place * tokens + token) * AXES + axis, mask=token < tokens, other=0.0)
            total = tl.sum(position[:, None] * grad_angles, axis=0)
            cell = (((wide * sets + place) * tiles + tile) * AXES + axis) * heads + head
            tl.store(per_frequency + cell * pairs + pair, total, mask=pair < pairs)
    cell = tl.program_id(0).to(tl.int64) * channels + channel
    if per_weight is not None:
        tl.store(per_weight + cell, grad_weight, mask=channel < channels)
    if per_bias is not None:
        tl.store(per_bias + cell, grad_bias, mask=channel < channels)


@triton.jit
def _halves(x, TOKENS: tl.constexpr, PAIRS: tl.constexpr):
    """Split vectors into even and odd channels [TOKENS, PAIRS] in float32."""
    return tl.split(tl.reshape(x.to(tl.float32), (TOKENS, PAIRS, 2)))


@triton.jit
def _load_or(parameter, channel, channels, default: tl.constexpr, PAIRS: tl.constexpr):
    """Load the weight or bias of a norm in float32, the default for None [1, 2 PAIRS]."""
    if parameter is None:
        return tl.full((1, 2 * PAIRS), default, tl.float32)
    else:
        return tl.load(parameter + channel, mask=channel < channels, other=0.0).to(tl.float32)


@triton.jit
def _units(vectors, channels, inside, eps, NORM: tl.constexpr):
    """Compute (x - m) r in float32, zeros outside, and r. Large rows are scaled first: their squares would overflow."""
    x = vectors.to(tl.float32)
    largest = tl.max(tl.abs(x), axis=1)
    scale = 1.0 / tl.where((largest > 1e18) & (largest < 3.4e38), largest, 1.0)
    x *= scale[:, None]
    if NORM == 2:
        x -= (tl.sum(x, axis=1) / channels)[:, None]
        x = tl.where(inside, x, 0.0)
    inverse = 1.0 / tl.sqrt(tl.sum(x * x, axis=1) / channels + eps * scale * scale)
    return tl.where(inside, x * inverse[:, None], 0.0), inverse * scale
