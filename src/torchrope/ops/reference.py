"""Reference implementations in plain PyTorch, which define the results of all kernels."""

import torch
from torch import Tensor
from torch.nn import functional

from torchrope.rotations import Planar, Rotation


def rotate_one(x: Tensor, rotation: Rotation) -> Tensor:
    """R x for x `(*batch, heads, tokens, head_dim)`, both of the same floating dtype."""
    turning, resting = x.split([rotation.rotary_dim, x.shape[-1] - rotation.rotary_dim], dim=-1)
    if isinstance(rotation, Planar):
        cos, sin = (_spread_over_heads(part, x.shape[-3], of_head=2) for part in rotation.cos_sin())
        turned = _turn_halves(turning, cos, sin) if rotation.halves else _turn_pairs(turning, cos, sin)
    else:
        turned = _turn_blocks(turning, _spread_over_heads(rotation.blocks(), x.shape[-3], of_head=4))
    return torch.cat([turned, resting], dim=-1) if resting.shape[-1] else turned


def normalise(x: Tensor, centred: bool, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """LayerNorm of x over its last dimension where `centred`, else RMSNorm, all of one floating dtype."""
    if centred:
        return functional.layer_norm(x, x.shape[-1:], weight, bias, eps)
    return functional.rms_norm(x, x.shape[-1:], weight, eps)


def into_basis(x: Tensor, basis: Tensor | None) -> Tensor:
    """P^T x for x `(*batch, heads, tokens, head_dim)` and P `(heads or 1, blocks, b, b)`; channels beyond stay."""
    if basis is None or not basis.numel():
        return x
    blocks, b = basis.shape[-3:-1]
    turning, resting = x.split([blocks * b, x.shape[-1] - blocks * b], dim=-1)
    columns = turning.unflatten(-1, (blocks, b)).transpose(-3, -2)  # (*batch, heads, blocks, tokens, b)
    inside = columns @ _spread_over_heads(basis.to(x.dtype), x.shape[-3], of_head=3)
    flat = inside.transpose(-3, -2).flatten(-2)
    return torch.cat([flat, resting], dim=-1) if resting.shape[-1] else flat


def out_of_basis(x: Tensor, basis: Tensor | None) -> Tensor:
    """P x: the way back from `into_basis`."""
    return into_basis(x, None if basis is None else basis.mT)


def _turn_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)  # (*batch, heads, tokens, pairs)
    return torch.stack([cos * even - sin * odd, sin * even + cos * odd], dim=-1).flatten(-2)


def _turn_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)  # (*batch, heads, tokens, pairs)
    return torch.cat([cos * first - sin * second, sin * first + cos * second], dim=-1)


def _turn_blocks(x: Tensor, blocks: Tensor) -> Tensor:
    columns = x.unflatten(-1, (-1, blocks.shape[-1]))  # (*batch, heads, tokens, num_blocks, b)
    turned = torch.einsum("...htnij,...htnj->...htni", blocks, columns).flatten(-2)
    return turned.contiguous()  # torch 2.6 leaves channels apart, which fused attention refuses


def _spread_over_heads(per_head: Tensor, heads: int, of_head: int) -> Tensor:
    """Give each group of heads its own of `(*batch, own heads, ...)`; one for all heads broadcasts as it is.

    `of_head` is the number of dimensions behind the heads.
    """
    own = per_head.shape[-1 - of_head]
    if own in (1, heads):
        return per_head
    return per_head.repeat_interleave(heads // own, dim=-1 - of_head)
