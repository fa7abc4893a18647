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

from torchrope.ops.gpu.launch import contiguous_channels, on_device_of, outer_strides
from torchrope.ops.gpu.planar import (
    Work,
    angles_of,
    channels_of,
    halves_of,
    keep_angles,
    locate,
    row_start,
    share,
    whole_of,
)
from torchrope.tensors import empty_rows


def rotate(
    q: Tensor,
    k: Tensor,
    positions: Tensor,
    frequencies: Tensor,
    halves: bool,
    weights: Sequence[Tensor | None],
    kinds: Sequence[int],
    eps: Sequence[float],
) -> tuple[Tensor, Tensor]:
    """Normalise q and k over their channels and rotate channel pairs, both in one launch.

    Args:
        q: As in `planar.rotate`, and so all arguments up to halves.
        weights: Weight and bias of the norm of q, then of that of k, each `(channels,)`; None for ones and zeros.
        kinds: Of the norms of q and k: 0 no norm, 1 RMSNorm, which has no bias, 2 LayerNorm.
        eps: Of the norms of q and k: added to the mean of squares or the variance.

    Returns:
        Rotated q and k, in the dtypes of the inputs, rounded once.
    """
    q, k = contiguous_channels(q), contiguous_channels(k)
    q_out, k_out = empty_rows(q), empty_rows(k)
    work = Work(q, k, positions, frequencies)
    if work.is_empty:
        return q_out, k_out
    with on_device_of(q):
        _rotate_normed_kernel[work.grid](
            q, k, q_out, k_out, *work.angles, *_norm_parameters(weights, kinds, q),
            *outer_strides(q), *outer_strides(k), *outer_strides(q_out), *outer_strides(k_out),
            *work.sizes, HALVES=halves, **_norms(kinds, eps), **work.tile,
        )  # fmt: skip
    return q_out, k_out


def rotate_backward(
    grad_q: Tensor,
    grad_k: Tensor,
    q: Tensor,
    k: Tensor,
    positions: Tensor,
    frequencies: Tensor,
    halves: bool,
    weights: Sequence[Tensor | None],
    kinds: Sequence[int],
    eps: Sequence[float],
    wanted: Sequence[bool],
) -> tuple[Tensor, Tensor, list[Tensor | None]]:
    """Compute the gradients of `rotate`. With  h = w R^T dy,  u = (x - m) r  and  r = 1 / sqrt(mean (x - m)^2 + eps):

        dx = r (h - mean h - u mean(h u)),   dw = sum u R^T dy,   db = sum R^T dy

    Gradients of angles are those of `planar.rotate_backward` for normalised vectors. For RMSNorm m and mean h are 0.

    Args:
        grad_q: Gradient of the q that `rotate` returned.
        grad_k: Gradient of the k that `rotate` returned.
        q: As given to `rotate`, and so all arguments up to eps.
        wanted: Whether to return gradients to positions, frequencies, and the four weights.

    Returns:
        Gradients of q and k in their dtypes, and in float32 the wanted gradients, None for the others.
    """
    q, k, grad_q, grad_k = map(contiguous_channels, (q, k, grad_q, grad_k))
    q_out, k_out = empty_rows(q), empty_rows(k)
    work = Work(q, k, positions, frequencies)
    if work.is_empty:
        like = (positions, frequencies, *weights)
        return (
            q_out,
            k_out,
            [
                torch.zeros_like(x, dtype=torch.float32) if needed and x is not None else None
                for x, needed in zip(like, wanted, strict=True)
            ],
        )
    need_positions, need_frequencies, *need_weights = wanted
    axes, heads, pairs = frequencies.shape
    sets, tokens, _ = positions.shape
    per_frequency, per_position, per_weight = (
        torch.empty(shape if needed else (0,), dtype=torch.float32, device=q.device)
        for shape, needed in (
            ((work.splits * sets * work.token_tiles, axes, heads, pairs), need_frequencies),
            ((work.splits, heads, sets, tokens, axes), need_positions),
            ((work.grid[0], 4, q.shape[-1]), any(need_weights)),
        )
    )
    with on_device_of(q):
        _rotate_normed_backward_kernel[work.grid](
            grad_q, grad_k, q, k, q_out, k_out, *work.angles, *_norm_parameters(weights, kinds, q),
            per_frequency, per_position, per_weight,
            *outer_strides(grad_q), *outer_strides(grad_k), *outer_strides(q), *outer_strides(k),
            *outer_strides(q_out), *outer_strides(k_out),
            *work.sizes, NEED_FREQUENCIES=need_frequencies, NEED_POSITIONS=need_positions,
            NEED_WEIGHTS=any(need_weights), HALVES=halves, **_norms(kinds, eps), **work.tile,
        )  # fmt: skip
    of_weights = per_weight.sum(dim=0) if any(need_weights) else ()
    return (
        q_out,
        k_out,
        [
            per_position.sum(dim=(0, 1)) if need_positions else None,
            per_frequency.sum(dim=0) if need_frequencies else None,
            *(of_weights[i] if needed else None for i, needed in enumerate(need_weights)),
        ],
    )


def _norm_parameters(weights: Sequence[Tensor | None], kinds: Sequence[int], like: Tensor) -> list[Tensor]:
    """Return weight and bias of both norms in float32, ones and zeros if None; a single number if there is no norm."""
    given = []
    for index, weight in enumerate(weights):
        if weight is not None:
            given.append(weight.to(torch.float32).contiguous())
        else:
            size = like.shape[-1] if kinds[index // 2] else 1
            given.append(torch.full((size,), 1.0 - index % 2, dtype=torch.float32, device=like.device))
    return given


def _norms(kinds: Sequence[int], eps: Sequence[float]) -> dict[str, int | float]:
    return dict(Q_NORM=kinds[0], K_NORM=kinds[1], Q_EPS=float(eps[0]), K_EPS=float(eps[1]))


@triton.jit
def _channel_values(values, channel, channels, NORM: tl.constexpr):
    """Load weight or bias of the channels of a tile."""
    if NORM == 0:
        found = tl.zeros_like(channel).to(tl.float32)
    else:
        found = tl.load(values + channel, mask=channel < channels, other=0.0)
    return found


@triton.jit
def _units(vectors, channels, inside, NORM: tl.constexpr, EPS: tl.constexpr):
    """Compute (x - m) r in float32, zeros outside, and r. Large rows are scaled first: their squares would overflow."""
    x = vectors.to(tl.float32)
    largest = tl.max(tl.abs(x), axis=1)
    scale = 1.0 / tl.where((largest > 1e18) & (largest < 3.4e38), largest, 1.0)
    x *= scale[:, None]
    if NORM == 2:
        x -= (tl.sum(x, axis=1) / channels)[:, None]
        x = tl.where(inside, x, 0.0)
    inverse = 1.0 / tl.sqrt(tl.sum(x * x, axis=1) / channels + EPS * scale * scale)
    return tl.where(inside, x * inverse[:, None], 0.0), inverse * scale


@triton.jit
def _normed(vectors, weight, bias, channels, inside, NORM: tl.constexpr, EPS: tl.constexpr):
    """Compute the normalised vectors in float32."""
    result = vectors.to(tl.float32)
    if NORM != 0:
        unit, _ = _units(vectors, channels, inside, NORM, EPS)
        result = unit * weight[None, :]
    if NORM == 2:
        result += bias[None, :]
    return result


@triton.jit
def _rotate_rows(
    x, out, weight, bias, first, last, start, group, head,
    x_sample, x_head, x_token, out_sample, out_head, out_token,
    cos, sin, is_rotated, token, channel, channels, inside,
    NORM: tl.constexpr, EPS: tl.constexpr, TOKENS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    for row in range(first, last):
        here = row_start(start, row, group, head, x_sample, x_head)
        there = row_start(start, row, group, head, out_sample, out_head)
        vectors = tl.load(x + here + token[:, None] * x_token + channel[None, :], mask=inside, other=0.0)
        normed = _normed(vectors, weight, bias, channels, inside, NORM, EPS)
        even, odd = halves_of(normed, TOKENS, PAIRS)
        rotated = whole_of(cos * even - sin * odd, sin * even + cos * odd, TOKENS, PAIRS)
        result = tl.where(is_rotated[None, :], rotated, normed).to(vectors.dtype)
        tl.store(out + there + token[:, None] * out_token + channel[None, :], result, mask=inside)


@triton.jit
def _rotate_normed_kernel(
    q, k, q_out, k_out, positions, frequencies, q_weight, q_bias, k_weight, k_bias,
    q_sample, q_head, q_token, k_sample, k_head, k_token,
    q_out_sample, q_out_head, q_out_token, k_out_sample, k_out_head, k_out_token,
    tokens, channels, pairs, heads, sets, samples, q_group, k_group, splits,
    HALVES: tl.constexpr, Q_NORM: tl.constexpr, K_NORM: tl.constexpr, Q_EPS: tl.constexpr, K_EPS: tl.constexpr,
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
    start = place * samples
    token = token.to(tl.int64)
    first, last = share(split, splits, samples * q_group)
    _rotate_rows(
        q, q_out, _channel_values(q_weight, channel, channels, Q_NORM),
        _channel_values(q_bias, channel, channels, Q_NORM), first, last, start, q_group, head,
        q_sample, q_head, q_token, q_out_sample, q_out_head, q_out_token,
        cos, sin, is_rotated, token, channel, channels, inside, Q_NORM, Q_EPS, TOKENS, PAIRS,
    )  # fmt: skip
    first, last = share(split, splits, samples * k_group)
    _rotate_rows(
        k, k_out, _channel_values(k_weight, channel, channels, K_NORM),
        _channel_values(k_bias, channel, channels, K_NORM), first, last, start, k_group, head,
        k_sample, k_head, k_token, k_out_sample, k_out_head, k_out_token,
        cos, sin, is_rotated, token, channel, channels, inside, K_NORM, K_EPS, TOKENS, PAIRS,
    )  # fmt: skip


@triton.jit
def _rotate_back_rows(
    grad, x, out, weight, bias, first, last, start, group, head,
    grad_sample, grad_head, grad_token, x_sample, x_head, x_token, out_sample, out_head, out_token,
    cos, sin, is_rotated, token, channel, channels, inside,
    NORM: tl.constexpr, EPS: tl.constexpr, NEED_ANGLES: tl.constexpr, TOKENS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Store gradients of rows; return those of the angles [TOKENS, PAIRS], and of weight and bias [2 PAIRS]."""
    grad_angles = tl.zeros((TOKENS, PAIRS), tl.float32)
    grad_weight = tl.zeros((2 * PAIRS,), tl.float32)
    grad_bias = tl.zeros((2 * PAIRS,), tl.float32)
    for row in range(first, last):
        here = row_start(start, row, group, head, grad_sample, grad_head)
        there = row_start(start, row, group, head, out_sample, out_head)
        vectors = tl.load(grad + here + token[:, None] * grad_token + channel[None, :], mask=inside, other=0.0)
        even, odd = halves_of(vectors, TOKENS, PAIRS)
        grad_even = cos * even + sin * odd
        grad_odd = cos * odd - sin * even
        rotated = whole_of(grad_even, grad_odd, TOKENS, PAIRS)
        result = tl.where(is_rotated[None, :], rotated, vectors.to(tl.float32))
        if NEED_ANGLES or NORM != 0:
            origin = row_start(start, row, group, head, x_sample, x_head)
            before = tl.load(x + origin + token[:, None] * x_token + channel[None, :], mask=inside, other=0.0)
            if NEED_ANGLES:
                even, odd = halves_of(_normed(before, weight, bias, channels, inside, NORM, EPS), TOKENS, PAIRS)
                grad_angles += grad_odd * even - grad_even * odd
            if NORM != 0:
                unit, inverse = _units(before, channels, inside, NORM, EPS)
                grad_weight += tl.sum(result * unit, axis=0)
                down = result * weight[None, :]
                along = tl.sum(down * unit, axis=1) / channels
                if NORM == 2:
                    grad_bias += tl.sum(result, axis=0)
                    down -= (tl.sum(down, axis=1) / channels)[:, None]
                result = (down - unit * along[:, None]) * inverse[:, None]
        result = result.to(out.dtype.element_ty)
        tl.store(out + there + token[:, None] * out_token + channel[None, :], result, mask=inside)
    return grad_angles, grad_weight, grad_bias


@triton.jit
def _rotate_normed_backward_kernel(
    grad_q, grad_k, q, k, q_out, k_out, positions, frequencies, q_weight, q_bias, k_weight, k_bias,
    per_frequency, per_position, per_weight,
    gq_sample, gq_head, gq_token, gk_sample, gk_head, gk_token,
    q_sample, q_head, q_token, k_sample, k_head, k_token,
    q_out_sample, q_out_head, q_out_token, k_out_sample, k_out_head, k_out_token,
    tokens, channels, pairs, heads, sets, samples, q_group, k_group, splits,
    NEED_FREQUENCIES: tl.constexpr, NEED_POSITIONS: tl.constexpr, NEED_WEIGHTS: tl.constexpr,
    HALVES: tl.constexpr, Q_NORM: tl.constexpr, K_NORM: tl.constexpr, Q_EPS: tl.constexpr, K_EPS: tl.constexpr,
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
    start = place * samples
    wide = token.to(tl.int64)
    first, last = share(split, splits, samples * q_group)
    grad_angles, d_weight, d_bias = _rotate_back_rows(
        grad_q, q, q_out, _channel_values(q_weight, channel, channels, Q_NORM),
        _channel_values(q_bias, channel, channels, Q_NORM), first, last, start, q_group, head,
        gq_sample, gq_head, gq_token, q_sample, q_head, q_token, q_out_sample, q_out_head, q_out_token,
        cos, sin, is_rotated, wide, channel, channels, inside,
        Q_NORM, Q_EPS, NEED_FREQUENCIES or NEED_POSITIONS, TOKENS, PAIRS,
    )  # fmt: skip
    own = per_weight + tl.program_id(0).to(tl.int64) * 4 * channels + channel
    if NEED_WEIGHTS:
        tl.store(own, d_weight, mask=channel < channels)
        tl.store(own + channels, d_bias, mask=channel < channels)
    first, last = share(split, splits, samples * k_group)
    grad_angles_of_k, d_weight, d_bias = _rotate_back_rows(
        grad_k, k, k_out, _channel_values(k_weight, channel, channels, K_NORM),
        _channel_values(k_bias, channel, channels, K_NORM), first, last, start, k_group, head,
        gk_sample, gk_head, gk_token, k_sample, k_head, k_token, k_out_sample, k_out_head, k_out_token,
        cos, sin, is_rotated, wide, channel, channels, inside,
        K_NORM, K_EPS, NEED_FREQUENCIES or NEED_POSITIONS, TOKENS, PAIRS,
    )  # fmt: skip
    grad_angles += grad_angles_of_k
    if NEED_WEIGHTS:
        tl.store(own + 2 * channels, d_weight, mask=channel < channels)
        tl.store(own + 3 * channels, d_bias, mask=channel < channels)
    keep_angles(
        grad_angles, positions, frequencies, per_frequency, per_position, head, tile, place, split, token, pair,
        tokens, pairs, heads, sets, NEED_FREQUENCIES, NEED_POSITIONS, AXES, TOKENS,
    )  # fmt: skip
