"""Norm and rotation in one pass:  R(p) norm(x)  for RMSNorm and LayerNorm over all channels of a head.

Partitioned into programs as in `planar`: each holds the angles of some tokens and one rotation head, reads and writes
the vectors that share them once, and sums its share of the gradients to the weights.
"""

# mypy: allow-untyped-defs

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchrope.ops.gpu import planar
from torchrope.ops.gpu.launch import VARYING, offsets, on_device_of, outer_strides, share
from torchrope.ops.gpu.planar import (
    Work,
    angles_of,
    channels_of,
    halves_of,
    locate,
    store_angles,
    sums,
    whole_of,
    zeros_like,
)
from torchrope.tensors import contiguous_channels, empty_rows


def rotate(
    x: Tensor,
    positions: Tensor,
    frequencies: Tensor,
    halves: bool,
    weight: Tensor | None,
    bias: Tensor | None,
    kind: int,
    eps: float,
) -> Tensor:
    """Normalise x over its channels and rotate channel pairs.

    Args:
        x: As in `planar.rotate`, and so all arguments up to halves.
        weight: `(channels,)`, None for ones.
        bias: `(channels,)`, None for zeros.
        kind: 0 no norm, 1 RMSNorm, which has no bias, 2 LayerNorm.
        eps: Added to the mean of squares or the variance.

    Returns:
        Rotated x, in its dtype, rounded once.
    """
    if kind == 0:
        return planar.rotate(x, positions, frequencies, halves)
    x = contiguous_channels(x)
    out = empty_rows(x)
    if x.numel() == 0:
        return out
    work = Work(x, positions, frequencies)
    strides, unit = outer_strides(x, out)
    with on_device_of(x):
        _rotate_normed_kernel[work.grid](
            x, out, *work.angles, *_parameters(weight, bias, x), float(eps), *strides, *work.sizes,
            NORM=kind, UNIT=unit, HALVES=halves, **work.tile,
        )  # fmt: skip
    return out


def rotate_backward(
    grad: Tensor,
    x: Tensor,
    positions: Tensor,
    frequencies: Tensor,
    halves: bool,
    weight: Tensor | None,
    bias: Tensor | None,
    kind: int,
    eps: float,
    wanted: Sequence[bool],
) -> tuple[Tensor, list[Tensor | None]]:
    """Compute the gradients of `rotate`. With  h = w R^T dy,  u = (x - m) r  and  r = 1 / sqrt(mean (x - m)^2 + eps):

        dx = r (h - mean h - u mean(h u)),   dw = sum u R^T dy,   db = sum R^T dy

    Gradients of angles are those of `planar.rotate_backward` for normalised vectors. For RMSNorm m and mean h are 0.

    Args:
        grad: Gradient of the x that `rotate` returned.
        x: As given to `rotate`, and so all arguments up to eps.
        wanted: Whether to return gradients to positions, frequencies, weight and bias.

    Returns:
        Gradient of x in its dtype, and in float32 the wanted gradients, None for the others.
    """
    if kind == 0:
        dx, of_angles = planar.rotate_backward(grad, x, positions, frequencies, halves, wanted[:2])
        return dx, [*of_angles, None, None]
    x, grad = contiguous_channels(x), contiguous_channels(grad)
    out = empty_rows(x)
    parameters = _parameters(weight, bias, x)
    if x.numel() == 0:
        return out, zeros_like(wanted, positions, frequencies, *parameters)
    work = Work(x, positions, frequencies)
    need_weights = any(wanted[2:])
    partial = work.empty_partial_gradients(*wanted[:2])
    of_weights = positions.new_empty((2, work.grid[0], x.shape[-1]) if need_weights else (2, 0))
    strides, unit = outer_strides(x, out, grad)
    with on_device_of(x):
        _rotate_normed_backward_kernel[work.grid](
            grad, x, out, *work.angles, *parameters, float(eps), *partial, *of_weights, *strides, *work.sizes,
            NEED_POSITIONS=wanted[0], NEED_FREQUENCIES=wanted[1], NEED_WEIGHTS=need_weights,
            NORM=kind, UNIT=unit, HALVES=halves, **work.tile,
        )  # fmt: skip
    return out, sums(wanted, *partial, *of_weights)


def _parameters(weight: Tensor | None, bias: Tensor | None, like: Tensor) -> list[Tensor]:
    """Return weight and bias in float32, ones and zeros if None."""
    return [
        torch.full((like.shape[-1],), default, dtype=torch.float32, device=like.device)
        if given is None
        else given.to(torch.float32).contiguous()
        for given, default in ((weight, 1.0), (bias, 0.0))
    ]


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


@triton.jit
def _normed(unit, weight, bias, NORM: tl.constexpr):
    """Compute w u, or w u + b for LayerNorm."""
    result = unit * weight[None, :]
    if NORM == 2:
        result += bias[None, :]
    return result


@triton.jit(do_not_specialize=VARYING)
def _rotate_normed_kernel(
    x, out, positions, frequencies, weights, biases, eps,
    x_sample, x_head, x_token, out_sample, out_head, out_token,
    tokens, heads, sets, samples, group, splits, channels, pairs,
    NORM: tl.constexpr, UNIT: tl.constexpr, HALVES: tl.constexpr,
    AXES: tl.constexpr, TOKENS: tl.constexpr, PAIRS: tl.constexpr,
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
    weight = tl.load(weights + channel, mask=channel < channels, other=0.0)
    bias = tl.load(biases + channel, mask=channel < channels, other=0.0)
    first, last = share(split, splits, samples * group)
    for row in range(first, last):
        here = offsets(row, token, place, samples, head, group, x_sample, x_head, x_token, UNIT)
        there = offsets(row, token, place, samples, head, group, out_sample, out_head, out_token, UNIT)
        vectors = tl.load(x + here[:, None] + channel[None, :], mask=inside, other=0.0)
        unit, _ = _units(vectors, channels, inside, eps, NORM)
        normed = _normed(unit, weight, bias, NORM)
        even, odd = halves_of(normed, TOKENS, PAIRS)
        rotated = whole_of(cos * even - sin * odd, sin * even + cos * odd, TOKENS, PAIRS)
        result = tl.where(is_rotated[None, :], rotated, normed).to(vectors.dtype)
        tl.store(out + there[:, None] + channel[None, :], result, mask=inside)


@triton.jit(do_not_specialize=VARYING)
def _rotate_normed_backward_kernel(
    grad, x, out, positions, frequencies, weights, biases, eps,
    per_position, per_frequency, per_weight, per_bias,
    x_sample, x_head, x_token, out_sample, out_head, out_token, grad_sample, grad_head, grad_token,
    tokens, heads, sets, samples, group, splits, channels, pairs,
    NEED_POSITIONS: tl.constexpr, NEED_FREQUENCIES: tl.constexpr, NEED_WEIGHTS: tl.constexpr,
    NORM: tl.constexpr, UNIT: tl.constexpr, HALVES: tl.constexpr,
    AXES: tl.constexpr, TOKENS: tl.constexpr, PAIRS: tl.constexpr,
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
    weight = tl.load(weights + channel, mask=channel < channels, other=0.0)
    bias = tl.load(biases + channel, mask=channel < channels, other=0.0)
    grad_angles = tl.zeros((TOKENS, PAIRS), tl.float32)
    grad_weight = tl.zeros((2 * PAIRS,), tl.float32)
    grad_bias = tl.zeros((2 * PAIRS,), tl.float32)
    first, last = share(split, splits, samples * group)
    for row in range(first, last):
        here = offsets(row, token, place, samples, head, group, grad_sample, grad_head, grad_token, UNIT)
        origin = offsets(row, token, place, samples, head, group, x_sample, x_head, x_token, UNIT)
        there = offsets(row, token, place, samples, head, group, out_sample, out_head, out_token, UNIT)
        vectors = tl.load(grad + here[:, None] + channel[None, :], mask=inside, other=0.0)
        before = tl.load(x + origin[:, None] + channel[None, :], mask=inside, other=0.0)
        unit, inverse = _units(before, channels, inside, eps, NORM)
        even, odd = halves_of(vectors, TOKENS, PAIRS)
        grad_even = cos * even + sin * odd
        grad_odd = cos * odd - sin * even
        rotated = whole_of(grad_even, grad_odd, TOKENS, PAIRS)
        grad_normed = tl.where(is_rotated[None, :], rotated, vectors.to(tl.float32))
        if NEED_POSITIONS or NEED_FREQUENCIES:
            even, odd = halves_of(_normed(unit, weight, bias, NORM), TOKENS, PAIRS)
            grad_angles += grad_odd * even - grad_even * odd
        if NEED_WEIGHTS:
            grad_weight += tl.sum(grad_normed * unit, axis=0)
            grad_bias += tl.sum(grad_normed, axis=0)
        down = grad_normed * weight[None, :]
        along = tl.sum(down * unit, axis=1) / channels
        if NORM == 2:
            down -= (tl.sum(down, axis=1) / channels)[:, None]
        result = ((down - unit * along[:, None]) * inverse[:, None]).to(out.dtype.element_ty)
        tl.store(out + there[:, None] + channel[None, :], result, mask=inside)
    if NEED_WEIGHTS:
        cell = tl.program_id(0).to(tl.int64) * channels + channel
        tl.store(per_weight + cell, grad_weight, mask=channel < channels)
        tl.store(per_bias + cell, grad_bias, mask=channel < channels)
    store_angles(
        grad_angles, positions, frequencies, per_position, per_frequency, head, tile, place, split, token, pair,
        tokens, pairs, heads, sets, NEED_POSITIONS, NEED_FREQUENCIES, AXES, TOKENS,
    )  # fmt: skip
