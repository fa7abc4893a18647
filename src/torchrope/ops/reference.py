"""Reference implementations in plain PyTorch, which define the results of all kernels."""

import torch
from torch import Tensor
from torch.nn import functional

from torchrope.rotations import Planar, Rotation
from torchrope.tensors import exact_einsum


def rotate_one(x: Tensor, rotation: Rotation) -> Tensor:
    """Compute R x for x `(*batch, heads, tokens, head_dim)`, both of the same floating dtype."""
    rotated_part, passed_part = x.split([rotation.rotary_dim, x.shape[-1] - rotation.rotary_dim], dim=-1)
    if isinstance(rotation, Planar):
        cos, sin = (_repeat_heads(part, x.shape[-3], dims_after_heads=2) for part in rotation.cos_sin())
        rotated = _rotate_halves(rotated_part, cos, sin) if rotation.halves else _rotate_pairs(rotated_part, cos, sin)
    else:
        rotated = _rotate_blocks(rotated_part, _repeat_heads(rotation.blocks(), x.shape[-3], dims_after_heads=4))
    return torch.cat([rotated, passed_part], dim=-1) if passed_part.shape[-1] else rotated


def normalise(x: Tensor, centred: bool, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Apply LayerNorm over the last dimension if `centred`, else RMSNorm; all tensors have the same floating dtype."""
    if centred:
        return functional.layer_norm(x, x.shape[-1:], weight, bias, eps)
    return functional.rms_norm(x, x.shape[-1:], weight, eps)


def into_basis(x: Tensor, basis: Tensor | None) -> Tensor:
    """Compute P^T x for x `(*batch, heads, tokens, head_dim)`, P `(heads or 1, blocks, b, b)`; keeps other channels."""
    if basis is None or not basis.numel():
        return x
    blocks, b = basis.shape[-3:-1]
    rotated_part, passed_part = x.split([blocks * b, x.shape[-1] - blocks * b], dim=-1)
    spread = _repeat_heads(basis.to(x.dtype), x.shape[-3], dims_after_heads=3)
    # One product per head and block for all samples: the gradient of P needs no sum over samples afterwards.
    flat = exact_einsum("...htni,hnij->...htnj", rotated_part.unflatten(-1, (blocks, b)), spread).flatten(-2)
    return torch.cat([flat, passed_part], dim=-1) if passed_part.shape[-1] else flat


def out_of_basis(x: Tensor, basis: Tensor | None) -> Tensor:
    """Compute P x, the inverse of `into_basis`."""
    return into_basis(x, None if basis is None else basis.mT)


def _rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)  # (*batch, heads, tokens, pairs)
    return torch.stack([cos * even - sin * odd, sin * even + cos * odd], dim=-1).flatten(-2)


def _rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)  # (*batch, heads, tokens, pairs)
    return torch.cat([cos * first - sin * second, sin * first + cos * second], dim=-1)


def _rotate_blocks(x: Tensor, blocks: Tensor) -> Tensor:
    columns = x.unflatten(-1, (-1, blocks.shape[-1]))  # (*batch, heads, tokens, num_blocks, b)
    rotated = exact_einsum("...htnij,...htnj->...htni", blocks, columns).flatten(-2)
    return rotated.contiguous()  # in torch 2.6 channels are strided here, which fused attention rejects


def _repeat_heads(per_head: Tensor, heads: int, dims_after_heads: int) -> Tensor:
    """Repeat `(*batch, rotation heads, ...)` for each group of heads; a tensor of one head is returned unchanged.

    `dims_after_heads` is the number of dimensions after the heads.
    """
    own_heads = per_head.shape[-1 - dims_after_heads]
    if own_heads in (1, heads):
        return per_head
    return per_head.repeat_interleave(heads // own_heads, dim=-1 - dims_after_heads)
