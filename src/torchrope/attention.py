"""Scaled dot-product attention that takes a rotation as an argument, global or within windows."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from torchrope.ops import rotate
from torchrope.ops.norms import normalise
from torchrope.positions import grid, windows
from torchrope.rotations import Action, Rotation


class Attention(nn.Module):
    """Attend among tokens whose queries and keys are rotated:  softmax(q^T R(p)^T R(p') k / √d) v.

    Or from tokens to those of another set, by the same projections: queries of the one, keys and values of the other.

    Args:
        dim: Channels of a token, divisible by num_heads.
        num_heads: Attention heads.
        qkv_bias: Whether queries, keys and values have a bias.
        dropout: Probability of dropping an output channel.
        attention_dropout: Probability of dropping an attention weight.
        qk_norm: Makes a norm over head_dim, `nn.RMSNorm` or `nn.LayerNorm` for example: one for queries and one for
            keys, `q_norm` and `k_norm`, between their projection and the rotation. None, the default, for none.

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
        super().__init__()
        if dim % num_heads:
            raise ValueError(f"dim must be divisible by num_heads = {num_heads}, got {dim}")
        self.num_heads = num_heads
        self.attention_dropout = attention_dropout
        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias)
        self.q_norm = None if qk_norm is None else qk_norm(dim // num_heads)
        self.k_norm = None if qk_norm is None else qk_norm(dim // num_heads)
        self.proj = nn.Linear(dim, dim)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        x: Tensor,
        rotation: Rotation | Action | None = None,
        *,
        context: Tensor | None = None,
        key_rotation: Rotation | Action | None = None,
        bias: Tensor | Sequence[Tensor | None] | None = None,
        lengths: Sequence[int] | None = None,
        key_lengths: Sequence[int] | None = None,
        within: "Windows | None" = None,
    ) -> Tensor:
        """Mix tokens.

        Args:
            x: Tokens `(batch, tokens, dim)`.
            rotation: The rotation of their positions; None rotates nothing. An `Action`, as `PoseEncoding` returns it,
                acts on values and outputs too.
            context: Tokens `(batch, keys, dim)` of another set, which they attend to; by default to one another.
            key_rotation: The rotation of the context's positions, of the same encoding.
            bias: Added to the scores, broadcast to `(batch, heads, tokens, keys)`; or a boolean mask. With lengths
                one for each sample, or None.
            lengths: Tokens of each sample where samples lie end to end (`torchrope.pack`) and each sees itself alone.
            key_lengths: Tokens of the context's samples, likewise.
            within: Windows that the tokens, a lattice, are cut into behind their rotation, each seeing its own alone;
                a bias is then that of `(batch · windows, heads, tokens, tokens)` of a window.

        Returns:
            Tokens `(batch, tokens, dim)`.

        Raises:
            ValueError: lengths that do not add up to the tokens, or not one bias for each; tokens or context alone
                rotated, or with lengths; windows of a context.
        """
        check_context(context, rotation, key_rotation, lengths, key_lengths)
        q, k, v = self._rotated(x, rotation, context, key_rotation)
        if within is not None:
            if context is not None:
                raise ValueError("windows are for attention among the tokens of one lattice, got a context")
            q, k, v = (_cut_heads(each, within) for each in (q, k, v))
        if isinstance(rotation, Action) and isinstance(bias, Tensor):
            bias = rotation.bias(bias)
        dropout = self.attention_dropout if self.training else 0.0
        scale = None if q.shape[-1] == v.shape[-1] else 1 / math.sqrt(v.shape[-1])  # channels that came on top
        if lengths is None:
            assert bias is None or isinstance(bias, Tensor)
            mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=dropout, scale=scale)
        else:
            biases = _of_each(bias, lengths)
            # One call a sample costs the sum of their squares, one call with a mask the square of their sum; a jagged
            # torch.nested tensor was slower than the loop on a CPU, forward and backward.
            samples = split_samples([q], [k, v], lengths, key_lengths)
            mixed = torch.cat(
                [
                    functional.scaled_dot_product_attention(
                        of_q, of_k, of_v, attn_mask=own, dropout_p=dropout, scale=scale
                    )
                    for (of_q, of_k, of_v), own in zip(samples, biases, strict=True)
                ],
                dim=-2,
            )
        tokens = mixed.transpose(1, 2).flatten(2)
        if within is not None:
            tokens = within.join(tokens).flatten(1, -2)
        if isinstance(rotation, Action):
            heads = tokens.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            tokens = rotation.outputs(heads, layout="bhtd").transpose(1, 2).flatten(2)
        return self.dropout(self.proj(tokens))

    def weights(
        self,
        x: Tensor,
        rotation: Rotation | Action | None = None,
        *,
        context: Tensor | None = None,
        key_rotation: Rotation | Action | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        """How much each token attends to each:  softmax(q^T R(p)^T R(p') k / √d + bias),  without dropout.

        Args:
            x: Tokens `(batch, tokens, dim)`.
            rotation: As in `forward`.
            context: Likewise.
            key_rotation: Likewise.
            bias: Likewise.

        Returns:
            Weights `(batch, heads, tokens, keys)`, queries before keys; those of a query add up to 1.

        Example:
            >>> Attention(8, 2).weights(torch.randn(1, 5, 8)).sum(dim=-1).round().unique().tolist()
            [1.0]
        """
        check_context(context, rotation, key_rotation)
        q, k, v = self._rotated(x, rotation, context, key_rotation)
        scores = q @ k.mT / math.sqrt(v.shape[-1])
        if bias is not None:
            bias = rotation.bias(bias) if isinstance(rotation, Action) else bias
            scores = scores.masked_fill(~bias, -math.inf) if bias.dtype == torch.bool else scores + bias
        weights = scores.softmax(dim=-1)
        return rotation.join(weights) if isinstance(rotation, Action) else weights

    def _rotated(
        self,
        x: Tensor,
        rotation: Rotation | Action | None,
        context: Tensor | None,
        key_rotation: Rotation | Action | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, rotated or acted on, each `(batch, heads, tokens, head_dim)`."""
        q, k, v = project_heads(self.qkv, self.num_heads, x, context)
        norm = None if self.q_norm is None and self.k_norm is None else (self.q_norm, self.k_norm)
        if rotation is not None:
            q, k = rotate(
                q, k, rotation, key_rotation=key_rotation, norm=norm, layout="bhtd", scores_only=True, tokens=x
            )
        elif norm is not None:
            q, k = normalise("q", q, norm[0]).to(q.dtype), normalise("k", k, norm[1]).to(k.dtype)
        of_values = rotation if key_rotation is None else key_rotation
        if isinstance(of_values, Action):
            v = of_values.values(v, layout="bhtd")
        return q, k, v


def project_heads(
    qkv: nn.Linear, num_heads: int, x: Tensor, context: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries of tokens, and keys and values of them or of a context, each `(batch, heads, tokens, head_dim)`."""
    if context is None:
        heads = qkv(x).unflatten(-1, (3, num_heads, -1))  # (batch, tokens, 3, heads, head_dim)
        q, k, v = heads.permute(2, 0, 3, 1, 4).unbind(0)
        return q, k, v
    dim = x.shape[-1]
    bias, key_bias = (None, None) if qkv.bias is None else (qkv.bias[:dim], qkv.bias[dim:])
    q = functional.linear(x, qkv.weight[:dim], bias).unflatten(-1, (num_heads, -1)).transpose(1, 2)
    of_context = functional.linear(context, qkv.weight[dim:], key_bias).unflatten(-1, (2, num_heads, -1))
    k, v = of_context.permute(2, 0, 3, 1, 4).unbind(0)
    return q, k, v


def check_context(
    context: Tensor | None,
    rotation: Rotation | Action | None,
    key_rotation: Rotation | Action | None,
    lengths: Sequence[int] | None = None,
    key_lengths: Sequence[int] | None = None,
) -> None:
    """Refuse what belongs to a context without one, and a context without what its tokens' counterparts have."""
    if context is None:
        if key_rotation is not None or key_lengths is not None:
            raise ValueError("key_rotation and key_lengths are those of a context, got none")
        return
    for what, own, of_keys in (("rotation", rotation, key_rotation), ("lengths", lengths, key_lengths)):
        if (own is None) != (of_keys is None):
            raise ValueError(f"tokens and their context must both have {what}, got {what} of one")


def split_samples(
    of_queries: Sequence[Tensor],
    of_keys: Sequence[Tensor],
    lengths: Sequence[int],
    key_lengths: Sequence[int] | None = None,
) -> list[tuple[Tensor, ...]]:
    """Cut tensors `(..., tokens, channels)` of samples that lie end to end.

    Returns:
        For each sample its part of all tensors of queries, then of keys, which have the queries' lengths by default.
    """
    key_lengths = lengths if key_lengths is None else key_lengths
    if len(key_lengths) != len(lengths):
        rule = "tokens and their context must have as many samples"
        raise ValueError(f"{rule}, got {len(lengths)} and {len(key_lengths)}")
    for each, tokens in ((lengths, of_queries[0].shape[-2]), (key_lengths, of_keys[0].shape[-2])):
        if sum(each) != tokens:
            raise ValueError(f"lengths must add up to the {tokens} tokens, got {sum(each)} of {len(each)} samples")
    parts = [x.split(list(lengths), dim=-2) for x in of_queries] + [x.split(list(key_lengths), dim=-2) for x in of_keys]
    return list(zip(*parts, strict=True))


def _of_each(bias: Tensor | Sequence[Tensor | None] | None, lengths: Sequence[int]) -> Sequence[Tensor | None]:
    """The bias of each sample, of samples that lie end to end."""
    if bias is None:
        return [None] * len(lengths)
    if isinstance(bias, Tensor) or len(bias) != len(lengths):
        came = "one for all" if isinstance(bias, Tensor) else str(len(bias))
        raise ValueError(f"samples end to end need a bias each, {len(lengths)} of them, got {came}")
    return bias


def _cut_heads(x: Tensor, within: "Windows") -> Tensor:
    """A lattice `(batch, heads, prod(sizes), head_dim)` to `(batch · windows, heads, tokens of a window, head_dim)`."""
    tokens = x.transpose(1, 2).flatten(2).unflatten(1, within.sizes)
    return within.cut(tokens).unflatten(-1, (x.shape[1], -1)).transpose(1, 2)


@dataclass(frozen=True)
class Windows:
    """How a lattice is cut into windows.

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
        """Windows no larger than their lattice, not shifted."""
        return cls(tuple(sizes), fit_window(window, sizes), (0,) * len(sizes))

    def shifted(self) -> "Windows":
        """The same windows shifted by half, except along axes where one window is the whole lattice."""
        shift = (0 if size <= part else part // 2 for size, part in zip(self.sizes, self.window, strict=True))
        return Windows(self.sizes, self.window, tuple(shift))

    @property
    def counts(self) -> tuple[int, ...]:
        """Windows along each axis, the last one filled up where they do not divide the lattice."""
        return tuple(-(-size // part) for size, part in zip(self.sizes, self.window, strict=True))

    @property
    def padded(self) -> tuple[int, ...]:
        """Tokens along each axis with the last window filled up."""
        return tuple(count * part for count, part in zip(self.counts, self.window, strict=True))

    def cut(self, x: Tensor) -> Tensor:
        """A lattice `(batch, *sizes, dim)` to `(batch · windows, tokens of a window, dim)`.

        It is rolled first and filled up with zeros afterwards; those are tokens like any other, as in timm.
        """
        if any(self.shift):
            x = x.roll([-shift for shift in self.shift], self._axes)
        x = pad_ends(x, self.padded)
        return windows(x.flatten(1, -2), self.padded, self.window).flatten(0, 1)

    def join(self, x: Tensor) -> Tensor:
        """The inverse of `cut`."""
        num_axes = len(self.sizes)
        x = x.unflatten(1, self.window).unflatten(0, (-1, *self.counts))  # (batch, *windows, *window, dim)
        pairs = [axis + half for axis in self._axes for half in (0, num_axes)]
        x = x.permute(0, *pairs, -1)
        for axis in self._axes:
            x = x.flatten(axis, axis + 1).narrow(axis, 0, self.sizes[axis - 1])
        return x.roll(self.shift, self._axes) if any(self.shift) else x

    def mask(self, *, device: torch.device | None = None) -> Tensor | None:
        """Which tokens of a shifted window may attend to which: those that come from the same side of an edge.

        Where windows do not divide the lattice the edge is that of the last window filled up, as in timm: the roll
        then brings tokens before it that the mask does not tell apart.

        Returns:
            `(windows, tokens of a window, tokens of a window)`, boolean; None where nothing is shifted.
        """
        if not any(self.shift):
            return None
        index = grid(*self.padded, device=device)
        edge = index.new_tensor([padded - shift for padded, shift in zip(self.padded, self.shift, strict=True)])
        side = windows(index >= edge, self.padded, self.window)  # (windows, tokens, axes)
        return (side.unsqueeze(-2) == side.unsqueeze(-3)).all(dim=-1)

    def seen(self, valid_mask: Tensor) -> Tensor:
        """Which tokens of a window may attend to which, where some are padding: to valid tokens, and to itself.

        Args:
            valid_mask: Which tokens of the lattice are not padding, `(batch, *sizes)`; what fills up windows is.

        Returns:
            `(batch, windows, tokens of a window, tokens of a window)`, boolean.
        """
        keys = (
            self.cut(valid_mask.unsqueeze(-1)).squeeze(-1).unflatten(0, (len(valid_mask), -1))
        )  # (batch, windows, tokens)
        itself = torch.eye(keys.shape[-1], dtype=torch.bool, device=keys.device)  # a row of nothing would be NaN
        return keys.unsqueeze(-2) | itself

    @property
    def _axes(self) -> list[int]:
        return list(range(1, len(self.sizes) + 1))


def per_axis_window(window_size: int | Sequence[int], num_axes: int) -> tuple[int, ...]:
    """Repeat one window size for all axes, or check that there is one per axis."""
    window = (window_size,) * num_axes if isinstance(window_size, int) else tuple(window_size)
    if len(window) != num_axes or min(window) < 1:
        raise ValueError(f"window_size must be 1 or more, one number or {num_axes}, got {window_size}")
    return window


def fit_window(window: Sequence[int], sizes: Sequence[int]) -> tuple[int, ...]:
    """A window no larger than its lattice along any axis."""
    # Not min(): of a size that a compiler keeps symbolic it would make a symbolic window.
    return tuple(part if part <= size else size for part, size in zip(window, sizes, strict=True))


def pad_ends(x: Tensor, sizes: Sequence[int]) -> Tensor:
    """Fill `(batch, *smaller sizes, dim)` up to these sizes with zeros at the end of each axis."""
    ends = [size - own for size, own in zip(sizes, x.shape[1:-1], strict=True)]
    if not any(ends):
        return x
    return functional.pad(x, [0, 0, *(amount for end in reversed(ends) for amount in (0, end))])


def mask_bias(bias: Tensor | None, mask: Tensor | None) -> Tensor | None:
    """A bias of the scores and a boolean mask as one."""
    if mask is None or bias is None:
        return bias if mask is None else mask
    return torch.where(mask, bias, -math.inf)
