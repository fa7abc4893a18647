"""Attention that takes a rotation as an argument."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from torchrope.ops import rotate
from torchrope.rotations import Rotation


class Attention(nn.Module):
    """Attend among tokens whose queries and keys are rotated:  softmax(q^T R(p)^T R(p') k / √d) v.

    Args:
        dim: Channels of a token, divisible by num_heads.
        num_heads: Attention heads.
        qkv_bias: Whether queries, keys and values have a bias.
        dropout: Probability of dropping an output channel.
        attention_dropout: Probability of dropping an attention weight.

    Raises:
        ValueError: dim is not divisible by num_heads.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        qkv_bias: bool = True,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if dim % num_heads:
            raise ValueError(f"dim must be divisible by num_heads = {num_heads}, got {dim}")
        self.num_heads = num_heads
        self.attention_dropout = attention_dropout
        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias)
        self.proj = nn.Linear(dim, dim)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        x: Tensor,
        rotation: Rotation | None = None,
        *,
        bias: Tensor | Sequence[Tensor | None] | None = None,
        lengths: Sequence[int] | None = None,
    ) -> Tensor:
        """Mix tokens.

        Args:
            x: Tokens `(batch, tokens, dim)`.
            rotation: The rotation of their positions; None rotates nothing.
            bias: Added to the scores, broadcast to `(batch, heads, tokens, tokens)`; or a boolean mask. With lengths
                one for each sample, or None.
            lengths: Tokens of each sample where samples lie end to end (`torchrope.pack`) and each sees itself alone.

        Returns:
            Tokens `(batch, tokens, dim)`.

        Raises:
            ValueError: lengths that do not add up to the tokens, or not one bias for each.
        """
        q, k, v = self._rotated(x, rotation)
        dropout = self.attention_dropout if self.training else 0.0
        if lengths is None:
            assert bias is None or isinstance(bias, Tensor)
            mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=dropout)
        else:
            biases = _of_each(bias, lengths, x.shape[1])
            # One call a sample costs the sum of their squares, one call with a mask the square of their sum; a jagged
            # torch.nested tensor was slower than the loop on a CPU, forward and backward.
            qs, ks, vs = (each.split(list(lengths), dim=-2) for each in (q, k, v))
            mixed = torch.cat(
                [
                    functional.scaled_dot_product_attention(*qkv, attn_mask=own, dropout_p=dropout)
                    for qkv, own in zip(zip(qs, ks, vs, strict=True), biases, strict=True)
                ],
                dim=-2,
            )
        return self.dropout(self.proj(mixed.transpose(1, 2).flatten(2)))

    def weights(self, x: Tensor, rotation: Rotation | None = None, *, bias: Tensor | None = None) -> Tensor:
        """How much each token attends to each:  softmax(q^T R(p)^T R(p') k / √d + bias),  without dropout.

        Args:
            x: Tokens `(batch, tokens, dim)`.
            rotation: As in `forward`.
            bias: Likewise.

        Returns:
            Weights `(batch, heads, tokens, tokens)`, queries before keys; those of a query add up to 1.

        Example:
            >>> Attention(8, 2).weights(torch.randn(1, 5, 8)).sum(dim=-1).round().unique().tolist()
            [1.0]
        """
        q, k, _ = self._rotated(x, rotation)
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        if bias is not None:
            scores = scores.masked_fill(~bias, -math.inf) if bias.dtype == torch.bool else scores + bias
        return scores.softmax(dim=-1)

    def _rotated(self, x: Tensor, rotation: Rotation | None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys, rotated, and values, each `(batch, heads, tokens, head_dim)`."""
        heads = self.qkv(x).unflatten(-1, (3, self.num_heads, -1))  # (batch, tokens, 3, heads, head_dim)
        q, k, v = heads.permute(2, 0, 3, 1, 4).unbind(0)
        if rotation is not None:
            q, k = rotate(q, k, rotation, scores_only=True)
        return q, k, v


def _of_each(
    bias: Tensor | Sequence[Tensor | None] | None, lengths: Sequence[int], tokens: int
) -> Sequence[Tensor | None]:
    """The bias of each sample, of samples that lie end to end."""
    if sum(lengths) != tokens:
        raise ValueError(f"lengths must add up to the {tokens} tokens, got {sum(lengths)} of {len(lengths)} samples")
    if bias is None:
        return [None] * len(lengths)
    if isinstance(bias, Tensor) or len(bias) != len(lengths):
        came = "one for all" if isinstance(bias, Tensor) else str(len(bias))
        raise ValueError(f"samples end to end need a bias each, {len(lengths)} of them, got {came}")
    return bias
