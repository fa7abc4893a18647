"""Linear attention with rotated feature maps: time and memory are linear in the number of tokens."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from torchrope.attention import Projections, check_context, split_samples
from torchrope.rotating import rotate
from torchrope.rotations import Rotation
from torchrope.tensors import require_counts, wide_dtype, without_autocast


def elu_plus_one(x: Tensor) -> Tensor:
    """Map channels to positive features:  φ(x) = x + 1 where x > 0, e^x elsewhere  (= elu(x) + 1).

    By the exponential, features of x below -17 stay above 0 in float32; elu(x) + 1 rounds to 0.

    References:
        Katharopoulos et al., Transformers are RNNs: Fast Autoregressive Transformers with Linear Attention, equation 7.

    Example:
        >>> elu_plus_one(torch.tensor([-1.0, 0.0, 2.0])).tolist()
        [0.3678794503211975, 1.0, 3.0]
    """
    above = x > 0
    # masked_fill avoids overflow of exp where x > 0; clamp(max=0) would give a wrong gradient at 0.
    return torch.where(above, x + 1, x.masked_fill(above, 0).exp())


def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rotation: Rotation | None = None,
    *,
    key_rotation: Rotation | None = None,
    key_mask: Tensor | None = None,
    lengths: Sequence[int] | None = None,
    key_lengths: Sequence[int] | None = None,
    causal: bool = False,
    chunk_size: int = 64,
    feature_map: Callable[[Tensor], Tensor] = elu_plus_one,
) -> Tensor:
    """Compute linear attention with the rotation in the numerator only.

        y_m = sum_n (R(p_m) φ(q_m))^T (R(p_n) φ(k_n)) v_n / sum_n φ(q_m)^T φ(k_n)

    The sum over n is one head_dim x value_dim matrix for all queries, so time and memory are linear in the tokens.
    Rotated weights may be negative and need not add up to 1; the denominator is not rotated, and positive if φ is.

    Args:
        q: Queries `(batch, heads, tokens, head_dim)`.
        k: Keys `(batch, heads, keys, head_dim)`.
        v: Values `(batch, heads, keys, value_dim)`.
        rotation: The rotation of the queries' positions, and of the keys' if key_rotation is None. None for no
            rotation, which is the attention of Katharopoulos et al.
        key_rotation: The rotation of the keys' positions, of the same encoding.
        key_mask: True for keys to attend to, `(batch, keys)`; the others are ignored, NaN included.
        lengths: Tokens of each sample if samples are packed into one sequence (`torchrope.pack`); tokens then attend
            within their sample only.
        key_lengths: Keys of each sample, those of the queries by default.
        causal: Whether tokens attend only to themselves and to earlier tokens.
        chunk_size: Tokens per chunk of causal attention, C: memory is tokens x (C + head_dim² / C) numbers per head.
        feature_map: φ, from channels to as many features.

    Returns:
        `(batch, heads, tokens, value_dim)`, in the dtype of v; 0 if all keys are masked. Sums are computed in
        float32, or in float64 for float64 inputs.

    Raises:
        ValueError: causal attention with unequal numbers of queries and keys; lengths that do not sum to the
            tokens; chunk_size below 1; other numbers of heads; a mask that is not boolean `(batch, keys)`; inputs for
            which `rotate` raises.

    References:
        Su et al., RoFormer, section 3.3, equation 19.

    Example:
        >>> import torchrope as tr
        >>> q, k, v = torch.randn(3, 1, 2, 9, 8)
        >>> rotation = tr.MixedRoPE(num_axes=2, num_heads=2, head_dim=8)(tr.grid(3, 3))
        >>> linear_attention(q, k, v, rotation).shape
        torch.Size([1, 2, 9, 8])
    """
    if causal and q.shape[-2] != k.shape[-2]:
        raise ValueError(f"causal attention needs as many keys as queries, got {k.shape[-2]} and {q.shape[-2]}")
    if causal and lengths is not None and key_lengths is not None and [*key_lengths] != [*lengths]:
        rule = "causal attention needs as many keys as queries in each sample"
        raise ValueError(f"{rule}, got {[*key_lengths]} and {[*lengths]}")
    require_counts(chunk_size=chunk_size)
    if not q.shape[1] == k.shape[1] == v.shape[1]:
        heads = f"{q.shape[1]}, {k.shape[1]} and {v.shape[1]}"
        raise ValueError(f"q, k and v must have the same number of heads, got {heads}")
    masks = (k.shape[0], k.shape[2]), (1, k.shape[2])
    if key_mask is not None and (key_mask.dtype != torch.bool or key_mask.shape not in masks):
        received = f"{key_mask.dtype} {tuple(key_mask.shape)}"
        raise ValueError(f"key_mask must be torch.bool (batch, keys) = {masks[0]}, got {received}")
    wide = wide_dtype(q, k, v)
    with without_autocast(q):
        masked_keys = None if key_mask is None else ~key_mask[:, None, :, None]
        of_q, of_k = feature_map(q.to(wide)), feature_map(_zero_masked(k.to(wide), masked_keys))
        of_k, values = _zero_masked(of_k, masked_keys), _zero_masked(v.to(wide), masked_keys)
        rotated_q, rotated_k = of_q, of_k
        if rotation is not None:
            rotated_q, rotated_k = rotate(of_q, of_k, rotation, key_rotation=key_rotation, scores_only=True)
        queries, keys = (of_q, rotated_q), (of_k, rotated_k, values)
        samples = [(*queries, *keys)] if lengths is None else split_samples(queries, keys, lengths, key_lengths)
        means = [_weighted_mean(*parts, causal=causal, chunk_size=chunk_size) for parts in samples]
        return (means[0] if lengths is None else torch.cat(means, dim=-2)).to(v.dtype)


def _weighted_mean(
    of_q: Tensor, rotated_q: Tensor, of_k: Tensor, rotated_k: Tensor, values: Tensor, *, causal: bool, chunk_size: int
) -> Tensor:
    """Divide sums of values weighted by rotated features by sums of features, `(batch, heads, tokens, value_dim)`."""
    if causal:
        numerator = _causal_sums(rotated_q, rotated_k, values, chunk_size)
        denominator = (of_q * of_k.cumsum(dim=-2)).sum(dim=-1, keepdim=True)
    else:
        numerator = rotated_q @ (rotated_k.mT @ values)
        denominator = of_q @ of_k.sum(dim=-2).unsqueeze(-1)
    return numerator / denominator.masked_fill(denominator == 0, 1)


def _causal_sums(q: Tensor, k: Tensor, v: Tensor, chunk_size: int) -> Tensor:
    """Compute sum_{n <= m} (q_m^T k_n) v_n  by pairs within chunks and sums of k v^T over earlier chunks."""
    tokens = q.shape[-2]
    size = max(min(chunk_size, tokens), 1)
    fill = -tokens % size
    q, k, v = (functional.pad(x, (0, 0, 0, fill)).unflatten(-2, (-1, size)) for x in (q, k, v))
    until = (k.mT @ v).cumsum(dim=-3)  # (batch, heads, chunks, head_dim, value_dim)
    before = functional.pad(until, (0, 0, 0, 0, 1, 0))[..., :-1, :, :]
    sums = q @ before + (q @ k.mT).tril() @ v
    return sums.flatten(-3, -2)[..., :tokens, :]


def _zero_masked(x: Tensor, mask: Tensor | None) -> Tensor:
    return x if mask is None else x.masked_fill(mask, 0)


class LinearAttention(Projections):
    """Multi-head self- or cross-attention in time and memory linear in the tokens, by `linear_attention`.

    Parameters have the names and shapes of `Attention`'s.

    Args:
        dim: Channels of a token, divisible by num_heads.
        num_heads: Attention heads.
        qkv_bias: Whether queries, keys and values have a bias.
        dropout: Probability of dropping an output channel.
        causal: Whether tokens attend only to themselves and to earlier tokens.
        chunk_size: Tokens per chunk of causal attention.
        feature_map: φ, from channels to as many features.

    Raises:
        ValueError: dim is not divisible by num_heads.

    References:
        Su et al., RoFormer, section 3.3, equation 19. Katharopoulos et al., Transformers are RNNs.

    Example:
        >>> import torchrope as tr
        >>> rotation = tr.LieRE(num_axes=3, num_heads=2, head_dim=8, block_size=4)(torch.rand(1000, 3))
        >>> LinearAttention(16, 2)(torch.randn(1, 1000, 16), rotation).shape
        torch.Size([1, 1000, 16])
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        qkv_bias: bool = True,
        dropout: float = 0.0,
        causal: bool = False,
        chunk_size: int = 64,
        feature_map: Callable[[Tensor], Tensor] = elu_plus_one,
    ) -> None:
        super().__init__(dim, num_heads, qkv_bias=qkv_bias, dropout=dropout)
        self.causal = causal
        self.chunk_size = chunk_size
        self.feature_map = feature_map

    def forward(
        self,
        x: Tensor,
        rotation: Rotation | None = None,
        *,
        context: Tensor | None = None,
        key_rotation: Rotation | None = None,
        bias: Tensor | None = None,
        lengths: Sequence[int] | None = None,
        key_lengths: Sequence[int] | None = None,
    ) -> Tensor:
        """Compute attention.

        Args:
            x: Tokens `(batch, tokens, dim)`.
            rotation: The rotation of their positions, None for no rotation.
            context: Tokens `(batch, keys, dim)` to attend to; by default x itself.
            key_rotation: The rotation of the context's positions, of the same encoding.
            bias: Boolean mask `(batch, 1, 1, keys)`, True for keys to attend to: there are no scores to add to.
            lengths: Tokens of each sample if samples are packed into one sequence (`torchrope.pack`); tokens then
                attend within their sample only.
            key_lengths: Tokens of each sample of the context, if packed.

        Returns:
            Tokens `(batch, tokens, dim)`.

        Raises:
            ValueError: a bias that is not such a mask; lengths that do not add up to the tokens; a rotation
                or lengths for only one of tokens and context; causal attention to a context.
        """
        check_context(context, rotation, key_rotation, lengths, key_lengths)
        if self.causal and context is not None:
            raise ValueError("causal attention must be self-attention, got a context")
        mixed = linear_attention(
            *self.heads(x, context),
            rotation,
            key_rotation=key_rotation,
            key_mask=_key_mask(bias),
            lengths=lengths,
            key_lengths=key_lengths,
            causal=self.causal,
            chunk_size=self.chunk_size,
            feature_map=self.feature_map,
        )
        return self.outputs(mixed)

    def extra_repr(self) -> str:
        """Return the settings that softmax attention does not have."""
        return f"causal={self.causal}, feature_map={getattr(self.feature_map, '__name__', self.feature_map)}"


def _key_mask(bias: Tensor | None) -> Tensor | None:
    """Reshape a mask of keys `(batch, 1, 1, keys)` to `(batch, keys)`."""
    if bias is None:
        return None
    if bias.dtype != torch.bool or bias.ndim != 4 or bias.shape[1:3] != (1, 1):
        rule = "bias of linear attention must be a boolean mask of keys (batch, 1, 1, keys)"
        raise ValueError(f"{rule}, got {bias.dtype} {tuple(bias.shape)}")
    return bias[:, 0, 0]
