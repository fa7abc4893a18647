"""Rotation of channel pairs by angles that are computed in registers:  a = sum_n p_n f_n.

A program holds the angles of some tokens and one rotation head, and rotates the vectors of all samples and heads that
share them. Only vectors are read from and written to memory, once.
"""

# mypy: allow-untyped-defs

from collections.abc import Callable, Sequence
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from torchrope.ops.gpu.launch import (
    RUNTIME,
    copy_rest,
    launch,
    locate,
    offsets,
    on_sides,
    rows_of,
    share,
    splits_of,
)
from torchrope.ops.record import specialisation
from torchrope.tensors import with_batch_dim

TILE, WARPS, STAGES, PROGRAMS = 1024, 2, 3, 1056
"""Channels times tokens in the tile of a program, its warps and stages of loads, and programs, as each computes angles.

On an H200 nearly the fastest that `benchmarks/gpu.py` compares.
"""


def rotate_planar(q: Tensor, k: Tensor, *args: Any) -> tuple[Tensor, ...]:
    """Rotate channel pairs counter-clockwise by  φ_i = sum_a p_a f_ai,  other channels pass bit-identically.

    A table is read only for angles without axes: computing cos and sin is faster.
    """
    return on_sides(_on_side((False, False), *args), (q, k))


def rotate_planar_backward(grad_q: Tensor, grad_k: Tensor, q: Tensor, k: Tensor, *args: Any) -> tuple[Tensor, ...]:
    """Compute gradients to q, k, and if wanted to positions and frequencies, else empty tensors.

    With  h = R^T dy:  dx = h,  dφ_i = h_2i+1 x_2i - h_2i x_2i+1,  df = sum p dφ,  dp = sum f dφ.
    """
    *arguments, wanted = args
    return on_sides(_on_side(wanted, *arguments), (q, k), (grad_q, grad_k), [x.shape for x in arguments[:2]], wanted)


def _on_side(
    wanted: Sequence[bool], positions: Tensor, frequencies: Tensor, table: Tensor | None, interleaved: bool
) -> Callable[..., list[Tensor | None]]:
    """Return a function that rotates a side, or its gradient back, for `on_sides`."""
    positions = with_batch_dim(positions, 3)
    (sets, tokens, axes), heads = positions.shape, frequencies.shape[1]
    table = None if axes else table

    def run(source: Tensor, out: Tensor, x: Tensor | None) -> list[Tensor | None]:
        of = specialisation("rotate_planar", (source, source, positions, frequencies), not interleaved)
        width = triton.next_power_of_2(2 * of.blocks)
        height = max(TILE // width, 1)
        tiles = triton.cdiv(tokens, height)
        programs = tiles * heads * sets
        splits = splits_of(programs, rows_of(source, sets, heads), PROGRAMS)
        angle_parts = (splits * heads, *positions.shape), (splits * sets * tiles, *frequencies.shape)
        copy_rest(source, out, 2 * of.blocks)
        return launch(
            _rotate_kernel, (source, out, x if any(wanted) else None), (positions, frequencies, table), heads, sets,
            programs,
            splits, (), angle_parts, wanted,
            BACK=x is not None, HALVES=of.halves, AXES=of.axes, TOKENS=height, WIDTH=width // 2,
            PAIRS=of.blocks, STAGES=STAGES, num_warps=WARPS,
        )  # fmt: skip

    return run


@triton.jit(**RUNTIME)
def _rotate_kernel(
    source, out, x, positions, frequencies, table, per_position, per_frequency,
    source_sample, source_head, source_token, out_sample, out_head, out_token, x_sample, x_head, x_token,
    tokens, heads, sets, samples, group, splits,
    BACK: tl.constexpr, UNIT: tl.constexpr, HALVES: tl.constexpr, AXES: tl.constexpr,
    TOKENS: tl.constexpr, WIDTH: tl.constexpr, PAIRS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Rotate source; if BACK source is the gradient and x, if needed, what was rotated: tiles [TOKENS, WIDTH]."""
    _, head, tile, set_, split = locate(1, heads, tl.cdiv(tokens, TOKENS), sets)
    token = tile * TOKENS + tl.arange(0, TOKENS)
    pair = tl.arange(0, WIDTH)
    is_rotated = pair < PAIRS
    inside = (token < tokens)[:, None] & is_rotated[None, :]
    if AXES == 0:
        row = (tl.cast(set_, tl.int64) * heads + head) * tokens + token
        entry = table + 2 * PAIRS * row[:, None] + pair[None, :]
        cos = tl.load(entry, mask=inside, other=1.0)
        sin = tl.load(entry + PAIRS, mask=inside, other=0.0)
    else:
        angles = tl.zeros((TOKENS, WIDTH), tl.float32)
        for axis in tl.static_range(AXES):
            cell = tl.cast(set_, tl.int64) * tokens + token
            position = tl.load(positions + cell * AXES + axis, mask=token < tokens, other=0.0)
            frequency = tl.load(frequencies + (axis * heads + head) * PAIRS + pair, mask=is_rotated, other=0.0)
            angles += position[:, None] * frequency[None, :]
        cos = tl.cos(angles)
        sin = tl.sin(angles)
    if BACK:
        sin = -sin
    grad_angles = tl.zeros((TOKENS, WIDTH), tl.float32)
    begin, end = share(split, splits, samples * group)
    for row in tl.range(begin, end, num_stages=STAGES):
        here = offsets(row, token, 0, set_, samples, head, group, source_sample, source_head, source_token, UNIT)
        there = offsets(row, token, 0, set_, samples, head, group, out_sample, out_head, out_token, UNIT)
        u, v = _load(source + here, token, tokens, HALVES, WIDTH, PAIRS)
        turned_u = cos * u - sin * v
        turned_v = sin * u + cos * v
        _store(out + there, turned_u, turned_v, token, tokens, HALVES, WIDTH, PAIRS)
        if per_position is not None or per_frequency is not None:
            origin = offsets(row, token, 0, set_, samples, head, group, x_sample, x_head, x_token, UNIT)
            x_u, x_v = _load(x + origin, token, tokens, HALVES, WIDTH, PAIRS)
            grad_angles += turned_v * x_u - turned_u * x_v

    wide = tl.cast(split, tl.int64)
    tiles = tl.cdiv(tokens, TOKENS)
    if per_position is not None:
        for axis in tl.static_range(AXES):
            frequency = tl.load(frequencies + (axis * heads + head) * PAIRS + pair, mask=is_rotated, other=0.0)
            total = tl.sum(frequency[None, :] * grad_angles, axis=1)
            cell = ((wide * heads + head) * sets + set_) * tokens + token
            tl.store(per_position + cell * AXES + axis, total, mask=token < tokens)
    if per_frequency is not None:
        for axis in tl.static_range(AXES):
            cell = tl.cast(set_, tl.int64) * tokens + token
            position = tl.load(positions + cell * AXES + axis, mask=token < tokens, other=0.0)
            total = tl.sum(position[:, None] * grad_angles, axis=0)
            cell = (((wide * sets + set_) * tiles + tile) * AXES + axis) * heads + head
            tl.store(per_frequency + cell * PAIRS + pair, total, mask=is_rotated)


@triton.jit
def _load(vectors, token, tokens, HALVES: tl.constexpr, WIDTH: tl.constexpr, PAIRS: tl.constexpr):
    """Load the two channels u, v of each pair in float32; adjacent channels at once."""
    if HALVES:
        pair = tl.arange(0, WIDTH)[None, :]
        inside = (token < tokens)[:, None] & (pair < PAIRS)
        u = tl.load(vectors + pair, mask=inside, other=0.0)
        v = tl.load(vectors + PAIRS + pair, mask=inside, other=0.0)
    else:
        channel = tl.arange(0, 2 * WIDTH)[None, :]
        inside = (token < tokens)[:, None] & (channel < 2 * PAIRS)
        both = tl.load(vectors + channel, mask=inside, other=0.0)
        u, v = tl.split(tl.reshape(both, (token.shape[0], WIDTH, 2)))
    return u.to(tl.float32), v.to(tl.float32)


@triton.jit
def _store(vectors, u, v, token, tokens, HALVES: tl.constexpr, WIDTH: tl.constexpr, PAIRS: tl.constexpr):
    u = u.to(vectors.dtype.element_ty)
    v = v.to(vectors.dtype.element_ty)
    if HALVES:
        pair = tl.arange(0, WIDTH)[None, :]
        inside = (token < tokens)[:, None] & (pair < PAIRS)
        tl.store(vectors + pair, u, mask=inside)
        tl.store(vectors + PAIRS + pair, v, mask=inside)
    else:
        channel = tl.arange(0, 2 * WIDTH)[None, :]
        inside = (token < tokens)[:, None] & (channel < 2 * PAIRS)
        tl.store(vectors + channel, tl.reshape(tl.join(u, v), (token.shape[0], 2 * WIDTH)), mask=inside)
