"""Reference implementations in plain PyTorch, which define the results of all kernels."""

from collections.abc import Sequence

import torch
from torch import Tensor

from torchrope.tensors import exact_einsum


def cos_sin(positions: Tensor, frequencies: Tensor, table: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return cos and sin of the angles  φ_i = sum_a p_a f_ai,  each `(*batch, heads or 1, tokens, pairs)`.

    They are read from a table `(*batch, heads or 1, tokens, 2, pairs)` if there is one, unless positions or frequencies
    require a gradient and the table has none.
    """
    differentiable = positions.requires_grad or frequencies.requires_grad
    if table is not None and (table.requires_grad or not differentiable):
        cos, sin = table.unbind(-2)
        return cos, sin
    angles = combine(positions, frequencies)
    return angles.cos(), angles.sin()


def rotate_planar(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotate channel pairs of x `(*batch, heads, tokens, head_dim)`; cos and sin `(*batch, heads or 1, tokens, pairs)`.

    All tensors have the same floating dtype.
    """
    turned, passed = x.split([2 * cos.shape[-1], x.shape[-1] - 2 * cos.shape[-1]], dim=-1)
    cos, sin = (_repeat_heads(part, x.shape[-3], dims_after_heads=2) for part in (cos, sin))
    even, odd = turned.unflatten(-1, (-1, 2)).unbind(-1) if interleaved else turned.chunk(2, dim=-1)
    pairs = cos * even - sin * odd, sin * even + cos * odd  # each (*batch, heads, tokens, pairs)
    rotated = torch.stack(pairs, dim=-1).flatten(-2) if interleaved else torch.cat(pairs, dim=-1)
    return torch.cat([rotated, passed], dim=-1) if passed.shape[-1] else rotated


def rotate_blocks(x: Tensor, blocks: Tensor) -> Tensor:
    """Multiply channel blocks of x by matrices `(*batch, heads or 1, tokens, num_blocks, b, b)`; dtypes as above."""
    rotary_dim = blocks.shape[-3] * blocks.shape[-1]
    turned, passed = x.split([rotary_dim, x.shape[-1] - rotary_dim], dim=-1)
    rotated = _rotate_blocks(turned, _repeat_heads(blocks, x.shape[-3], dims_after_heads=4))
    return torch.cat([rotated, passed], dim=-1) if passed.shape[-1] else rotated


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


def _rotate_blocks(x: Tensor, blocks: Tensor) -> Tensor:
    columns = x.unflatten(-1, (-1, blocks.shape[-1]))  # (*batch, heads, tokens, num_blocks, b)
    rotated = exact_einsum("...htnij,...htnj->...htni", blocks, columns).flatten(-2)
    return rotated.contiguous()  # in torch 2.6 channels are strided here, which fused attention rejects


def _repeat_heads(per_head: Tensor, heads: int, dims_after_heads: int) -> Tensor:
    """Repeat `(*batch, rotation heads, ...)` for each group of heads, before `dims_after_heads` dimensions."""
    rotation_heads = per_head.shape[-1 - dims_after_heads]
    if rotation_heads in (1, heads):
        return per_head
    return per_head.repeat_interleave(heads // rotation_heads, dim=-1 - dims_after_heads)


def combine(positions: Tensor, per_axis: Tensor) -> Tensor:
    """Compute sum_a p_a X_a `(*batch, heads, tokens, ...)` for p `(*batch, tokens, axes)` and X `(axes, heads, ...)`.

    A sum of products, not a matmul: a GPU would round a matmul to TensorFloat-32.
    """
    trailing = (1,) * (per_axis.ndim - 2)
    terms: Sequence[Tensor] = [
        p.unsqueeze(-2).unflatten(-1, (-1, *trailing)) * x.unsqueeze(1)  # (*batch, 1, tokens, ...) (heads, 1, ...)
        for p, x in zip(positions.unbind(-1), per_axis.unbind(0), strict=True)
    ]
    return sum(terms[1:], start=terms[0])
