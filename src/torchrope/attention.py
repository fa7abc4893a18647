"""Scaled dot-product attention that takes a rotation as an argument, global or within windows."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from torchrope.positions import grid, windows
from torchrope.rotating import rotate
from torchrope.rotations import Rotation


class Projections(nn.Module):
    """Projections of multi-head attention, to queries, keys and values of each head, and of the outputs.

    Raises:
        ValueError: dim is not divisible by num_heads.
    """

    def __init__(self, dim: int, num_heads: int, *, qkv_bias: bool, dropout: float) -> None:
        super().__init__()
        if dim % num_heads:
            raise ValueError(f"dim must be divisible by num_heads = {num_heads}, got {dim}")
        self.num_heads = num_heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias)
        self.proj = nn.Linear(dim, dim)
        self.dropout = nn.Dropout(dropout)

    def heads(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Project x to queries, and x or a context to keys and values, each `(batch, heads, tokens, head_dim)`."""
        if context is None:
            q, k, v = self._split(self.qkv(x), 3)
            return q, k, v
        dim, weight, bias = x.shape[-1], self.qkv.weight, self.qkv.bias
        of_q, of_kv = (None, None) if bias is None else (bias[:dim], bias[dim:])
        (q,) = self._split(functional.linear(x, weight[:dim], of_q), 1)
        k, v = self._split(functional.linear(context, weight[dim:], of_kv), 2)
        return q, k, v

    def outputs(self, mixed: Tensor) -> Tensor:
        """Project mixed values `(batch, heads, tokens, head_dim)` to tokens `(batch, tokens, dim)`."""
        return self.dropout(self.proj(mixed.transpose(1, 2).flatten(2)))

    def extra_repr(self) -> str:
        """Return the number of heads."""
        return f"num_heads={self.num_heads}"

    def _split(self, x: Tensor, parts: int) -> tuple[Tensor, ...]:
        return x.unflatten(-1, (parts, self.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)


class Attention(Projections):
    """Multi-head attention with rotated queries and keys:  softmax(q^T R(p)^T R(p') k / √d) v.

    With a context this is cross-attention by the same projections: queries of x, keys and values of the context.

    Args:
        dim: Channels of a token, divisible by num_heads.
        num_heads: Attention heads.
        qkv_bias: Whether queries, keys and values have a bias.
        dropout: Probability of dropping an output channel.
        attention_dropout: Probability of dropping an attention weight.
        qk_norm: Builds a norm over head_dim, such as `nn.RMSNorm` or `nn.LayerNorm`: `q_norm` for queries and `k_norm`
            for keys, applied between projection and rotation. None, the default, for no norms.

    Raises:
        ValueError: dim is not divisible by num_heads.

    References:
        Dehghani et al., Scaling Vision Transformers to 22 Billion Parameters (arXiv:2302.05442), section 2: norms of
        queries and keys.

    Example:
        >>> attention = Attention(8, 2, qk_norm=nn.RMSNorm)
        >>> attention.q_norm
        RMSNorm((4,), eps=None, elementwise_affine=True)
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        qkv_bias: bool = True,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        qk_norm: Callable[[int], nn.Module] | None = None,
    ) -> None:
        super().__init__(dim, num_heads, qkv_bias=qkv_bias, dropout=dropout)
        self.attention_dropout = attention_dropout
        self.q_norm = None if qk_norm is None else qk_norm(dim // num_heads)
        self.k_norm = None if qk_norm is None else qk_norm(dim // num_heads)

    def forward(
        self,
        x: Tensor,
        rotation: Rotation | None = None,
        *,
        context: Tensor | None = None,
        key_rotation: Rotation | None = None,
        bias: Tensor | Sequence[Tensor | None] | None = None,
        lengths: Sequence[int] | None = None,
        key_lengths: Sequence[int] | None = None,
        within: "Windows | None" = None,
    ) -> Tensor:
        """Map tokens `(batch, tokens, dim)` to attention outputs of the same shape.

        Args:
            x: Tokens `(batch, tokens, dim)`.
            rotation: The rotation of their positions, None for no rotation.
            context: Tokens `(batch, keys, dim)` to attend to; by default x itself.
            key_rotation: The rotation of the context's positions, of the same encoding.
            bias: Added to the scores, broadcast to `(batch, heads, tokens, keys)`; or a boolean mask. With lengths, a
                sequence of one bias or None per sample.
            lengths: Tokens of each sample if samples are packed into one sequence (`torchrope.pack`); tokens then
                attend within their sample only.
            key_lengths: Tokens of each sample of the context, if packed.
            within: Windows for attention on a lattice: tokens are rotated, cut into these windows, and attend within
                their window only. A bias is then `(batch · windows, heads, tokens of a window, tokens of a window)`.

        Returns:
            Tokens `(batch, tokens, dim)`.

        Raises:
            ValueError: lengths that do not add up to the tokens, or not one bias per sample; a rotation or lengths for
                only one of tokens and context; windows with a context or lengths.
        """
        check_context(context, rotation, key_rotation, lengths, key_lengths)
        q, k, v = self._rotated(x, rotation, context, key_rotation)
        if within is not None:
            if context is not None or lengths is not None:
                received = "lengths" if context is None else "a context"
                raise ValueError(f"window attention must be within one lattice, got {received}")
            q, k, v = (_cut_heads(x, within) for x in (q, k, v))
        dropout = self.attention_dropout if self.training else 0.0
        attend: Any = partial(functional.scaled_dot_product_attention, dropout_p=dropout)
        if lengths is None:
            mixed = attend(q, k, v, attn_mask=bias)
        else:
            # Cost: one call per sample, the sum of squared lengths; one call with a mask, the square of their sum. A
            # jagged torch.nested tensor was slower than the loop on a CPU, forward and backward.
            samples = split_samples([q], [k, v], lengths, key_lengths)
            biases = _bias_per_sample(bias, lengths)
            parts = [attend(*qkv, attn_mask=mask) for qkv, mask in zip(samples, biases, strict=True)]
            mixed = torch.cat(parts, dim=-2)
        if within is not None:
            joined = within.join(mixed.transpose(1, 2).flatten(2)).flatten(1, -2)
            mixed = joined.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        return self.outputs(mixed)

    def weights(
        self,
        x: Tensor,
        rotation: Rotation | None = None,
        *,
        context: Tensor | None = None,
        key_rotation: Rotation | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        """Return the attention weights:  softmax(q^T R(p)^T R(p') k / √d + bias),  without dropout.

        Args:
            x: Tokens `(batch, tokens, dim)`.
            rotation: As in `forward`.
            context: As in `forward`.
            key_rotation: As in `forward`.
            bias: Added to the scores, broadcast to `(batch, heads, tokens, keys)`, or a boolean mask.

        Returns:
            Weights `(batch, heads, tokens, keys)`; those of a query sum to 1, or are 0 if no key is left to it.

        Raises:
            ValueError: a rotation for only one of tokens and context.

        Example:
            >>> Attention(8, 2).weights(torch.randn(1, 5, 8)).sum(dim=-1).round().unique().tolist()
            [1.0]
        """
        check_context(context, rotation, key_rotation)
        q, k, v = self._rotated(x, rotation, context, key_rotation)
        scores = q @ k.mT / math.sqrt(v.shape[-1])
        if bias is not None:
            scores = scores.masked_fill(~bias, -math.inf) if bias.dtype == torch.bool else scores + bias
        if bias is None:
            return scores.softmax(dim=-1)
        without_keys = (scores == -math.inf).all(dim=-1, keepdim=True)  # softmax would have NaN, in gradients too
        return scores.masked_fill(without_keys, 0.0).softmax(dim=-1).masked_fill(without_keys, 0.0)

    def _rotated(
        self, x: Tensor, rotation: Rotation | None, context: Tensor | None, key_rotation: Rotation | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return rotated queries and keys, and values, each `(batch, heads, tokens, head_dim)`."""
        q, k, v = self.heads(x, context)
        q = q if self.q_norm is None else self.q_norm(q).to(q.dtype)
        k = k if self.k_norm is None else self.k_norm(k).to(k.dtype)
        if rotation is not None:
            q, k = rotate(q, k, rotation, key_rotation=key_rotation, scores_only=True)
        return q, k, v


def check_context(
    context: Tensor | None,
    rotation: Rotation | None,
    key_rotation: Rotation | None,
    lengths: Sequence[int] | None = None,
    key_lengths: Sequence[int] | None = None,
) -> None:
    """Raise ValueError unless both tokens and context, or neither, have a rotation and lengths."""
    if context is None:
        if key_rotation is not None or key_lengths is not None:
            arguments = {"key_rotation": key_rotation, "key_lengths": key_lengths}
            names = " and ".join(name for name, value in arguments.items() if value is not None)
            raise ValueError(f"key_rotation and key_lengths must be None without a context, got {names}")
        return
    for name, of_queries, of_keys in (("rotation", rotation, key_rotation), ("lengths", lengths, key_lengths)):
        if (of_queries is None) != (of_keys is None):
            which = "tokens" if of_keys is None else "context"
            raise ValueError(f"tokens and context must both have {name}, got {name} of the {which} only")


def split_samples(
    of_queries: Sequence[Tensor],
    of_keys: Sequence[Tensor],
    lengths: Sequence[int],
    key_lengths: Sequence[int] | None = None,
) -> list[tuple[Tensor, ...]]:
    """Split tensors `(..., tokens, channels)` of packed samples: for each sample its part of every tensor.

    Raises:
        ValueError: different numbers of samples; lengths that do not sum to the number of tokens.
    """
    key_lengths = lengths if key_lengths is None else key_lengths
    if len(key_lengths) != len(lengths):
        rule = "tokens and their context must have as many samples"
        raise ValueError(f"{rule}, got {len(lengths)} and {len(key_lengths)}")
    for counts, tokens in ((lengths, of_queries[0].shape[-2]), (key_lengths, of_keys[0].shape[-2])):
        if sum(counts) != tokens:
            raise ValueError(f"lengths must add up to the {tokens} tokens, got {sum(counts)} of {len(counts)} samples")
        if any(count < 0 for count in counts):
            raise ValueError(f"lengths must be 0 or more, got {[*counts]}")
    parts = [x.split(list(lengths), dim=-2) for x in of_queries] + [x.split(list(key_lengths), dim=-2) for x in of_keys]
    return list(zip(*parts, strict=True))


def _bias_per_sample(bias: Tensor | Sequence[Tensor | None] | None, lengths: Sequence[int]) -> Sequence[Tensor | None]:
    """Return one bias or None per packed sample."""
    if bias is None:
        return [None] * len(lengths)
    if isinstance(bias, Tensor) or len(bias) != len(lengths):
        received = "one for all" if isinstance(bias, Tensor) else str(len(bias))
        raise ValueError(f"packed samples need one bias each, {len(lengths)} in all, got {received}")
    return bias


def _cut_heads(x: Tensor, within: "Windows") -> Tensor:
    """Cut `(batch, heads, prod(sizes), head_dim)` to `(batch · windows, heads, tokens of a window, head_dim)`."""
    tokens = x.transpose(1, 2).flatten(2).unflatten(1, within.sizes)
    return within.cut(tokens).unflatten(-1, (x.shape[1], -1)).transpose(1, 2)


@dataclass(frozen=True)
class Windows:
    """Partition of a lattice into windows, possibly shifted as in Swin.

    Attributes:
        sizes: Tokens of the lattice along each axis.
        window: Tokens of a window along each axis.
        shift: Tokens by which the windows are shifted along each axis.
    """

    sizes: tuple[int, ...]
    window: tuple[int, ...]
    shift: tuple[int, ...]

    @classmethod
    def fit(cls, sizes: Sequence[int], window: Sequence[int]) -> "Windows":
        """Build unshifted windows, no larger than the lattice along any axis."""
        return cls(tuple(sizes), fit_window(window, sizes), (0,) * len(sizes))

    def shifted(self) -> "Windows":
        """Return these windows shifted by half a window, except along axes that one window spans."""
        shift = (0 if size <= part else part // 2 for size, part in zip(self.sizes, self.window, strict=True))
        return Windows(self.sizes, self.window, tuple(shift))

    @property
    def counts(self) -> tuple[int, ...]:
        """Windows along each axis; the last one is padded if windows do not divide the lattice."""
        return tuple(-(-size // part) for size, part in zip(self.sizes, self.window, strict=True))

    @property
    def padded(self) -> tuple[int, ...]:
        """Tokens along each axis, padding of the last window included."""
        return tuple(count * part for count, part in zip(self.counts, self.window, strict=True))

    def cut(self, x: Tensor) -> Tensor:
        """Cut a lattice `(batch, *sizes, dim)` into `(batch · windows, tokens of a window, dim)`.

        The lattice is rolled, then padded with zeros; `mask` does not mask the padding, as in timm.
        """
        if any(self.shift):
            x = x.roll([-shift for shift in self.shift], self._axes)
        x = pad_ends(x, self.padded)
        return windows(x.flatten(1, -2), self.padded, self.window).flatten(0, 1)

    def join(self, x: Tensor) -> Tensor:
        """Undo `cut`."""
        num_axes = len(self.sizes)
        x = x.unflatten(1, self.window).unflatten(0, (-1, *self.counts))  # (batch, *windows, *window, dim)
        pairs = [axis + half for axis in self._axes for half in (0, num_axes)]
        x = x.permute(0, *pairs, -1)
        for axis in self._axes:
            x = x.flatten(axis, axis + 1).narrow(axis, 0, self.sizes[axis - 1])
        return x.roll(self.shift, self._axes) if any(self.shift) else x

    def mask(self, *, device: torch.device | None = None) -> Tensor | None:
        """Return which tokens of a shifted window may attend to each other: those from the same side of an edge.

        If the windows do not divide the lattice, the mask is that of the padded lattice, as in timm: tokens that the
        cyclic shift moves from the first rows to the last ones can then attend to their new neighbours.

        Returns:
            `(windows, tokens of a window, tokens of a window)`, boolean; None if no axis is shifted.
        """
        if not any(self.shift):
            return None
        index = grid(*self.padded, device=device)
        edge = index.new_tensor([padded - shift for padded, shift in zip(self.padded, self.shift, strict=True)])
        side = windows(index >= edge, self.padded, self.window)  # (windows, tokens, axes)
        return (side.unsqueeze(-2) == side.unsqueeze(-3)).all(dim=-1)

    def seen(self, valid_mask: Tensor) -> Tensor:
        """Return a mask for each window: every token attends to itself and the valid tokens of `(batch, *sizes)`.

        `(batch, windows, tokens of a window, tokens of a window)`, boolean; padding of windows is invalid.
        """
        cut = self.cut(valid_mask.unsqueeze(-1)).squeeze(-1)
        keys = cut.unflatten(0, (len(valid_mask), -1))  # (batch, windows, tokens)
        itself = torch.eye(keys.shape[-1], dtype=torch.bool, device=keys.device)  # softmax over no keys is NaN
        return keys.unsqueeze(-2) | itself

    def attends(self, batch: int, valid_mask: Tensor | None, *, device: torch.device | None = None) -> Tensor | None:
        """Return which tokens attend to which, by `mask` and `seen`; None if all attend to all.

        `(batch · windows, 1, tokens of a window, tokens of a window)`, boolean, with a mask `(batch or 1, *sizes)`.
        """
        masks = [self.mask(device=device), None if valid_mask is None else self.seen(valid_mask)]
        kept = [mask for mask in masks if mask is not None]
        if not kept:
            return None
        mask = kept[0] if len(kept) == 1 else kept[0] & kept[1]  # (batch or 1 or nothing, windows, tokens, tokens)
        return mask.expand(batch, *mask.shape[-3:]).flatten(0, 1).unsqueeze(1)

    @property
    def _axes(self) -> list[int]:
        return list(range(1, len(self.sizes) + 1))


def fit_window(window: Sequence[int], sizes: Sequence[int]) -> tuple[int, ...]:
    """Clip a window to the size of its lattice along each axis."""
    # Not min(): of a symbolic size under torch.compile it would make a symbolic window.
    return tuple(part if part <= size else size for part, size in zip(window, sizes, strict=True))


def pad_ends(x: Tensor, sizes: Sequence[int]) -> Tensor:
    """Pad `(batch, *smaller sizes, dim)` to these sizes with zeros at the end of each axis."""
    ends = [size - current for size, current in zip(sizes, x.shape[1:-1], strict=True)]
    if not any(ends):
        return x
    return functional.pad(x, [0, 0, *(amount for end in reversed(ends) for amount in (0, end))])


def mask_bias(bias: Tensor | None, mask: Tensor | None) -> Tensor | None:
    """Combine a bias of the scores and a boolean mask: -inf if masked."""
    if mask is None or bias is None:
        return bias if mask is None else mask
    return torch.where(mask, bias, -math.inf)
