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

TILE, WARPS, STAGES, PROGRAMS = 1024, 2, 3, 1056
"""Channels times tokens in the tile of a program, its warps and stages of loads, and programs, as each computes angles.

On an H200 nearly the fastest that `benchmarks/gpu.py` compares.
"""

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
        splits = splits_of(programs, rows_of(source, sets, heads), PROGRAMS)
        angle_parts = (splits * heads, *positions.shape), (splits * sets * tiles, *frequencies.shape)
        weight_part = splits * programs, channels
        gradients = launch(
            _rotate_kernel, (source, out, x if kind or any(needed) else None), (*angles, *norm), heads, sets, programs,
            splits, (), (*angle_parts, weight_part, weight_part), needed,
            BACK=x is not None, NORM=kind, HALVES=not interleaved, AXES=axes, TOKENS=height, WIDTH=width // 2,
            PAIRS=pairs, CHANNELS=channels, STAGES=STAGES, num_warps=WARPS,
        )  # fmt: skip
        return [*gradients[:2], *[None] * first, *gradients[2:], *[None] * (2 - first)]

    return run


@triton.jit(do_not_specialize=VARYING)
def _rotate_kernel(
    source, out, x, positions, frequencies, weights, biases, eps, per_position, per_frequency, per_weight, per_bias,
    source_sample, source_head, source_token, out_sample, out_head, out_token, x_sample, x_head, x_token,
    tokens, heads, sets, samples, group, splits,
    BACK: tl.constexpr, NORM: tl.constexpr, UNIT: tl.constexpr, HALVES: tl.constexpr, AXES: tl.constexpr,
    TOKENS: tl.constexpr, WIDTH: tl.constexpr, PAIRS: tl.constexpr, CHANNELS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Rotate source; if BACK source is the gradient and x, if needed, what was rotated.

    A tile holds the first and the second channel of each pair [TOKENS, WIDTH], then channels that are not rotated.
    """
    _, head, tile, place, split = locate(1, heads, tl.cdiv(tokens, TOKENS), sets)
    token = tile * TOKENS + tl.arange(0, TOKENS)
    real = (token < tokens)[:, None]
    pair = tl.arange(0, WIDTH)
    is_rotated = (pair < PAIRS)[None, :]
    first, second, has_first, has_second = _channels(pair[None, :], HALVES, PAIRS, CHANNELS)
    inside_first = real & has_first
    inside_second = real & has_second
    angles = weighted_positions(
        positions, frequencies, place, head, heads, PAIRS, token, tokens, pair, pair < PAIRS, AXES, TOKENS, WIDTH
    )
    cos = tl.cos(angles)
    sin = tl.sin(angles)
    if BACK:
        sin = -sin
    if NORM > 0:
        weight_first, weight_second = _load_or(weights, first, second, has_first, has_second, 1.0, WIDTH)
        bias_first, bias_second = _load_or(biases, first, second, has_first, has_second, 0.0, WIDTH)
    grad_angles = tl.zeros((TOKENS, WIDTH), tl.float32)
    grad_weight_first = tl.zeros((1, WIDTH), tl.float32)
    grad_weight_second = tl.zeros((1, WIDTH), tl.float32)
    grad_bias_first = tl.zeros((1, WIDTH), tl.float32)
    grad_bias_second = tl.zeros((1, WIDTH), tl.float32)
    begin, end = share(split, splits, samples * group)
    for row in tl.range(begin, end, num_stages=STAGES):
        here = offsets(row, token, 0, place, samples, head, group, source_sample, source_head, source_token, UNIT)
        there = offsets(row, token, 0, place, samples, head, group, out_sample, out_head, out_token, UNIT)
        origin = offsets(row, token, 0, place, samples, head, group, x_sample, x_head, x_token, UNIT)
        one, two = _load(
            source + here, first, second, inside_first, inside_second, real, HALVES, TOKENS, WIDTH, CHANNELS
        )
        if NORM > 0:
            if BACK:
                given_one, given_two = _load(
                    x + origin, first, second, inside_first, inside_second, real, HALVES, TOKENS, WIDTH, CHANNELS
                )
            else:
                given_one, given_two = one, two
            unit_one, unit_two, inverse = _units(given_one, given_two, inside_first, inside_second, eps, NORM, CHANNELS)
            normed_one = unit_one * weight_first
            normed_two = unit_two * weight_second
            if NORM == 2:
                normed_one += bias_first
                normed_two += bias_second
            if not BACK:
                one, two = normed_one, normed_two
        turned_one = tl.where(is_rotated, cos * one - sin * two, one)
        turned_two = tl.where(is_rotated, sin * one + cos * two, two)
        result_one, result_two = turned_one, turned_two
        if BACK and NORM > 0:
            if per_weight is not None:
                grad_weight_first += tl.sum(turned_one * unit_one, axis=0, keep_dims=True)
                grad_weight_second += tl.sum(turned_two * unit_two, axis=0, keep_dims=True)
            if per_bias is not None:
                grad_bias_first += tl.sum(turned_one, axis=0, keep_dims=True)
                grad_bias_second += tl.sum(turned_two, axis=0, keep_dims=True)
            result_one *= weight_first
            result_two *= weight_second
            along = tl.sum(result_one * unit_one + result_two * unit_two, axis=1) / CHANNELS
            if NORM == 2:
                mean = tl.sum(result_one + result_two, axis=1) / CHANNELS
                result_one -= mean[:, None]
                result_two -= mean[:, None]
            result_one = (result_one - unit_one * along[:, None]) * inverse[:, None]
            result_two = (result_two - unit_two * along[:, None]) * inverse[:, None]
        _store(
            out + there, result_one, result_two, first, second, inside_first, inside_second, real,
            HALVES, TOKENS, WIDTH, CHANNELS,
        )  # fmt: skip
        if per_position is not None or per_frequency is not None:
            if NORM == 0:
                normed_one, normed_two = _load(
                    x + origin, first, second, inside_first, inside_second, real, HALVES, TOKENS, WIDTH, CHANNELS
                )
            grad_angles += turned_two * normed_one - turned_one * normed_two

    grad_angles = tl.where(is_rotated, grad_angles, 0.0)  # also of channels that are infinite or NaN
    wide = tl.cast(split, tl.int64)
    tiles = tl.cdiv(tokens, TOKENS)
    if per_position is not None:
        for axis in tl.static_range(AXES):
            frequency = tl.load(frequencies + (axis * heads + head) * PAIRS + pair, mask=pair < PAIRS, other=0.0)
            total = tl.sum(frequency[None, :] * grad_angles, axis=1)
            cell = ((wide * heads + head) * sets + place) * tokens + token
            tl.store(per_position + cell * AXES + axis, total, mask=token < tokens)
    if per_frequency is not None:
        for axis in tl.static_range(AXES):
            cell = tl.cast(place, tl.int64) * tokens + token
            position = tl.load(positions + cell * AXES + axis, mask=token < tokens, other=0.0)
            total = tl.sum(position[:, None] * grad_angles, axis=0)
            cell = (((wide * sets + place) * tiles + tile) * AXES + axis) * heads + head
            tl.store(per_frequency + cell * PAIRS + pair, total, mask=pair < PAIRS)
    cell = tl.program_id(0).to(tl.int64) * CHANNELS
    if per_weight is not None:
        tl.store(per_weight + cell + first, grad_weight_first, mask=has_first)
        tl.store(per_weight + cell + second, grad_weight_second, mask=has_second)
    if per_bias is not None:
        tl.store(per_bias + cell + first, grad_bias_first, mask=has_first)
        tl.store(per_bias + cell + second, grad_bias_second, mask=has_second)


@triton.jit
def _channels(pair, HALVES: tl.constexpr, PAIRS: tl.constexpr, CHANNELS: tl.constexpr):
    """Return the first and second channels of pairs, from PAIRS on those not rotated, and whether they exist."""
    if HALVES:
        REST: tl.constexpr = (CHANNELS - 2 * PAIRS + 1) // 2
        first = tl.where(pair < PAIRS, pair, pair + PAIRS)
        second = tl.where(pair < PAIRS, pair + PAIRS, pair + PAIRS + REST)
        return first, second, pair < PAIRS + REST, pair < CHANNELS - PAIRS - REST
    else:
        return 2 * pair, 2 * pair + 1, 2 * pair < CHANNELS, 2 * pair + 1 < CHANNELS


@triton.jit
def _load(
    vectors, first, second, inside_first, inside_second, real,
    HALVES: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Load the two channels of each pair in float32; adjacent channels at once."""
    if HALVES:
        one = tl.load(vectors + first, mask=inside_first, other=0.0)
        two = tl.load(vectors + second, mask=inside_second, other=0.0)
    else:
        channel = tl.arange(0, 2 * WIDTH)[None, :]
        inside = real & (channel < CHANNELS)
        both = tl.load(vectors + channel, mask=inside, other=0.0)
        one, two = tl.split(tl.reshape(both, (TOKENS, WIDTH, 2)))
    return one.to(tl.float32), two.to(tl.float32)


@triton.jit
def _store(
    vectors, one, two, first, second, inside_first, inside_second, real,
    HALVES: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    one = one.to(vectors.dtype.element_ty)
    two = two.to(vectors.dtype.element_ty)
    if HALVES:
        tl.store(vectors + first, one, mask=inside_first)
        tl.store(vectors + second, two, mask=inside_second)
    else:
        channel = tl.arange(0, 2 * WIDTH)[None, :]
        inside = real & (channel < CHANNELS)
        tl.store(vectors + channel, tl.reshape(tl.join(one, two), (TOKENS, 2 * WIDTH)), mask=inside)


@triton.jit
def _load_or(parameter, first, second, has_first, has_second, default: tl.constexpr, WIDTH: tl.constexpr):
    """Load the weights or biases of a norm in float32, the default for None [1, WIDTH]."""
    if parameter is None:
        one = tl.full((1, WIDTH), default, tl.float32)
        return one, one
    else:
        one = tl.load(parameter + first, mask=has_first, other=0.0)
        two = tl.load(parameter + second, mask=has_second, other=0.0)
        return one.to(tl.float32), two.to(tl.float32)


@triton.jit
def _units(one, two, inside_first, inside_second, eps, NORM: tl.constexpr, CHANNELS: tl.constexpr):
    """Compute (x - m) r in float32, zeros outside, and r. Large rows are scaled first: their squares would overflow."""
    largest = tl.max(tl.maximum(tl.abs(one), tl.abs(two)), axis=1)
    scale = 1.0 / tl.where((largest > 1e18) & (largest < 3.4e38), largest, 1.0)
    one *= scale[:, None]
    two *= scale[:, None]
    if NORM == 2:
        mean = tl.sum(one + two, axis=1) / CHANNELS
        one = tl.where(inside_first, one - mean[:, None], 0.0)
        two = tl.where(inside_second, two - mean[:, None], 0.0)
    inverse = 1.0 / tl.sqrt(tl.sum(one * one + two * two, axis=1) / CHANNELS + eps * scale * scale)
    units_one = tl.where(inside_first, one * inverse[:, None], 0.0)
    units_two = tl.where(inside_second, two * inverse[:, None], 0.0)
    return units_one, units_two, inverse * scale
