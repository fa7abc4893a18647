"""Rotation of channel pairs by angles that are given, or computed in registers:  a = sum_n p_n f_n.

A program holds the angles of some tokens and one rotation head, and rotates the vectors of all samples and heads that
share them. Only vectors are read from and written to memory, once.
"""

# mypy: allow-untyped-defs

from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from torchrope.ops.gpu.launch import VARYING, Sides, launch, locate, offsets, rows_of, share, splits_of
from torchrope.ops.record import specialisation
from torchrope.tensors import with_batch_dim

TILE, WARPS, STAGES, PROGRAMS = 1024, 2, 3, 1056
"""Channels times tokens in the tile of a program, its warps and stages of loads, and programs, as each computes angles.

On an H200 nearly the fastest that `benchmarks/gpu.py` compares.
"""


def rotate_planar(q: Tensor, k: Tensor, *args: Any) -> tuple[Tensor, ...]:
    """Rotate channel pairs counter-clockwise by  φ_i = sum_a p_a f_ai,  other channels pass bit-identically.

    A table is never read: computing cos and sin is faster.
    """
    return _run((q, k), *args)[:2]


def rotate_planar_backward(grad_q: Tensor, grad_k: Tensor, q: Tensor, k: Tensor, *args: Any) -> tuple[Tensor, ...]:
    """Compute gradients to q, k, and if wanted to positions and frequencies, else empty tensors.

    With  h = R^T dy:  dx = h,  dφ_i = h_2i+1 x_2i - h_2i x_2i+1,  df = sum p dφ,  dp = sum f dφ.
    """
    return _run((grad_q, grad_k, q, k), *args)


def _run(
    sides: Sides,
    positions: Tensor,
    frequencies: Tensor,
    table: Tensor | None,
    interleaved: bool,
    wanted: Sequence[bool] = (False, False),
) -> tuple[Tensor, ...]:
    """Rotate by programs for tiles of tokens and shares of the rows; without axes, positions are the angles."""
    of = specialisation("rotate_planar", (*sides[:2], positions, frequencies), not interleaved)
    heads, tokens = frequencies.shape[1], positions.shape[-2]
    sets = with_batch_dim(positions, 3 if of.axes else 4).shape[0]
    width = triton.next_power_of_2(of.blocks)
    height = max(TILE // (2 * width), 1)
    tiles = triton.cdiv(tokens, height)
    programs = tiles * heads * sets
    splits = splits_of(programs, sum(rows_of(sides, sets, heads)), PROGRAMS)
    parts = (splits * heads if of.axes else splits, positions.shape), (splits * sets * tiles, frequencies.shape)
    return launch(
        _rotate_kernel, of, sides, (positions, frequencies), heads, sets, programs, splits, (), parts, wanted,
        HALVES=of.halves, AXES=of.axes, TOKENS=height, WIDTH=width, PAIRS=of.blocks, STAGES=STAGES, num_warps=WARPS,
    )  # fmt: skip


@triton.jit(do_not_specialize=VARYING)
def _rotate_kernel(
    q, q_out, q_x, k, k_out, k_x, positions, frequencies, per_position, per_frequency,
    q_sample, q_head, q_token, q_out_sample, q_out_head, q_out_token, q_x_sample, q_x_head, q_x_token,
    k_sample, k_head, k_token, k_out_sample, k_out_head, k_out_token, k_x_sample, k_x_head, k_x_token,
    tokens, heads, sets, q_samples, q_group, k_samples, k_group, splits,
    BACK: tl.constexpr, UNIT: tl.constexpr, GROUPED: tl.constexpr, HALVES: tl.constexpr, AXES: tl.constexpr,
    TOKENS: tl.constexpr, WIDTH: tl.constexpr, PAIRS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Rotate q and k; if BACK they are gradients and x, if needed, what was rotated: tiles [TOKENS, WIDTH]."""
    _, head, tile, set_, split = locate(1, heads, tl.cdiv(tokens, TOKENS), sets)
    token = tile * TOKENS + tl.arange(0, TOKENS)
    pair = tl.arange(0, WIDTH)
    is_rotated = pair < PAIRS
    inside = (token < tokens)[:, None] & is_rotated[None, :]
    wide = tl.cast(set_, tl.int64)
    if AXES == 0:
        cell = ((wide * heads + head) * tokens + token)[:, None] * PAIRS + pair[None, :]
        angles = tl.load(positions + cell, mask=inside, other=0.0)
    else:
        angles = tl.zeros((TOKENS, WIDTH), tl.float32)
        for axis in tl.static_range(AXES):
            position = tl.load(positions + (wide * tokens + token) * AXES + axis, mask=token < tokens, other=0.0)
            frequency = tl.load(frequencies + (axis * heads + head) * PAIRS + pair, mask=is_rotated, other=0.0)
            angles += position[:, None] * frequency[None, :]
    cos = tl.cos(angles)
    sin = tl.sin(angles)
    if BACK:
        sin = -sin
    grad_angles = tl.zeros((TOKENS, WIDTH), tl.float32)
    q_rows = q_samples * q_group
    first, last = share(split, splits, q_rows + k_samples * k_group)
    grad_angles = _rotate_rows(
        q, q_out, q_x, first, tl.minimum(last, q_rows), set_, q_samples, head, q_group, token, tokens,
        q_sample, q_head, q_token, q_out_sample, q_out_head, q_out_token, q_x_sample, q_x_head, q_x_token,
        cos, sin, grad_angles, UNIT, GROUPED, HALVES, WIDTH, PAIRS, STAGES,
    )  # fmt: skip
    grad_angles = _rotate_rows(
        k, k_out, k_x, tl.maximum(first - q_rows, 0), last - q_rows, set_, k_samples, head, k_group, token, tokens,
        k_sample, k_head, k_token, k_out_sample, k_out_head, k_out_token, k_x_sample, k_x_head, k_x_token,
        cos, sin, grad_angles, UNIT, GROUPED, HALVES, WIDTH, PAIRS, STAGES,
    )  # fmt: skip

    wide = tl.cast(split, tl.int64)
    tiles = tl.cdiv(tokens, TOKENS)
    if per_position is not None:
        if AXES == 0:
            cell = (((wide * sets + set_) * heads + head) * tokens + token)[:, None] * PAIRS + pair[None, :]
            tl.store(per_position + cell, grad_angles, mask=inside)
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
def _rotate_rows(
    source, out, x, first, last, set_, samples, head, group, token, tokens,
    source_sample, source_head, source_token, out_sample, out_head, out_token, x_sample, x_head, x_token,
    cos, sin, grad_angles, UNIT: tl.constexpr, GROUPED: tl.constexpr, HALVES: tl.constexpr,
    WIDTH: tl.constexpr, PAIRS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Rotate rows of q or of k; add their gradients of the angles, none if x is None."""
    for row in tl.range(first, last, num_stages=STAGES):
        here = offsets(
            row, token, 0, set_, samples, head, group, source_sample, source_head, source_token, UNIT, GROUPED
        )  # fmt: skip
        there = offsets(row, token, 0, set_, samples, head, group, out_sample, out_head, out_token, UNIT, GROUPED)
        u, v = _load(source + here, token, tokens, HALVES, WIDTH, PAIRS)
        turned_u = cos * u - sin * v
        turned_v = sin * u + cos * v
        _store(out + there, turned_u, turned_v, token, tokens, HALVES, WIDTH, PAIRS)
        if x is not None:
            origin = offsets(row, token, 0, set_, samples, head, group, x_sample, x_head, x_token, UNIT, GROUPED)
            x_u, x_v = _load(x + origin, token, tokens, HALVES, WIDTH, PAIRS)
            grad_angles += turned_v * x_u - turned_u * x_v
    return grad_angles


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
