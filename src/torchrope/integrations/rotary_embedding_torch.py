"""`RotaryEmbedding` and the functions of the package rotary-embedding-torch, by the same names and arguments."""

from typing import Any

import torch
from torch import Tensor, nn

from torchrope.rotating import apply
from torchrope.rotations import from_angles
from torchrope.tensors import Float32Module, wide_dtype


def apply_rotary_emb(
    freqs: Tensor,
    t: Tensor,
    start_index: int = 0,
    scale: Tensor | float = 1.0,
    seq_dim: int = -2,
    freqs_seq_dim: int | None = None,
) -> Tensor:
    """Rotate adjacent pairs of channels of t by angles freqs, each twice in turn, and multiply them by a scale.

    Computed in float32 or wider and rounded once; gradients reach t, freqs and scale. ValueError for more rotated
    channels than t has behind start_index, or an odd number.
    """
    if freqs_seq_dim is None and (freqs.ndim == 2 or t.ndim == 3):
        freqs_seq_dim = 0
    if freqs_seq_dim is not None:
        length = freqs.shape[freqs_seq_dim]
        tokens = min(t.shape[seq_dim], length)
        freqs = freqs.narrow(freqs_seq_dim, length - tokens, tokens)
    channels = freqs.shape[-1]
    if channels % 2 or start_index + channels > t.shape[-1]:
        rule = f"freqs must have an even number of entries, at most {t.shape[-1] - start_index}"
        raise ValueError(f"{rule}, got {channels}")
    before, rotated, after = t.tensor_split([start_index, start_index + channels], dim=-1)
    shape = torch.broadcast_shapes(rotated.shape, freqs.shape)
    angles = freqs[..., ::2].to(torch.promote_types(wide_dtype(t), wide_dtype(freqs)))
    # One dimension of tokens: those of t that the angles depend on are all flattened into it.
    flat = rotated.expand(shape).reshape(1, -1, channels)
    angles = angles.expand(*shape[:-1], channels // 2).reshape(1, -1, channels // 2)
    result = apply(flat.to(angles.dtype), from_angles(angles))
    result = (result.view(shape) * scale).to(t.dtype)
    rest = (x.expand(*shape[:-1], -1) for x in (before, after))
    return torch.cat([next(rest), result, next(rest)], dim=-1)


def apply_learned_rotations(
    rotations: Tensor, t: Tensor, start_index: int = 0, freq_ranges: Tensor | None = None
) -> Tensor:
    """Rotate t by learned angles `(..., pairs)`, or by their products with freq_ranges `(ranges,)` in turn."""
    if freq_ranges is not None:
        rotations = (rotations.unsqueeze(-1) * freq_ranges).flatten(-2)
    return apply_rotary_emb(rotations.repeat_interleave(2, dim=-1), t, start_index=start_index)


class RotaryEmbedding(Float32Module):
    """Replacement for the class of rotary-embedding-torch, with its arguments: rotate adjacent pairs by positions.

    Angles are p f_i with f_i = theta^(-2i/dim) for "lang", float32 or wider for models of any dtype. Nothing is cached:
    the arguments of the original's cache have no effect. State dictionaries and gradients are those of the original.
    ValueError for an unknown freqs_for or an interpolate_factor below 1; in calls, for q alone with use_xpos.

    References:
        Su et al., RoFormer, equation 15; Sun et al., A Length-Extrapolatable Transformer, for xPos.
    """

    def __init__(
        self,
        dim: int,
        custom_freqs: Tensor | None = None,
        freqs_for: str = "lang",
        theta: float = 10000,
        max_freq: float = 10,
        num_freqs: int = 1,
        learned_freq: bool = False,
        use_xpos: bool = False,
        xpos_scale_base: float = 512,
        interpolate_factor: float = 1.0,
        theta_rescale_factor: float = 1.0,
        seq_before_head_dim: bool = False,
        cache_if_possible: bool = True,
        cache_max_seq_len: int = 8192,
    ) -> None:
        super().__init__()
        if interpolate_factor < 1:
            raise ValueError(f"interpolate_factor must be 1 or more, got {interpolate_factor}")
        if custom_freqs is not None:
            freqs = custom_freqs
        elif freqs_for == "lang":
            rescaled = theta * theta_rescale_factor ** (dim / (dim - 2)) if theta_rescale_factor != 1 else theta
            freqs = 1.0 / rescaled ** (torch.arange(0, dim, 2)[: dim // 2].float() / dim)
        elif freqs_for == "pixel":
            freqs = torch.linspace(1.0, max_freq / 2, dim // 2) * torch.pi
        elif freqs_for == "constant":
            freqs = torch.ones(num_freqs)
        else:
            raise ValueError(f"freqs_for must be lang, pixel or constant, got {freqs_for}")
        self.freqs_for, self.learned_freq, self.use_xpos = freqs_for, learned_freq, use_xpos
        self.freqs = nn.Parameter(freqs, requires_grad=learned_freq)
        self.seq_before_head_dim = seq_before_head_dim
        self.default_seq_dim = -3 if seq_before_head_dim else -2
        self.dim, self.interpolate_factor, self.scale_base = dim, interpolate_factor, xpos_scale_base

    apply_rotary_emb = staticmethod(apply_rotary_emb)

    @property
    def device(self) -> torch.device:
        """Device of the frequencies."""
        return self.freqs.device

    @property
    def scale(self) -> Tensor:
        """Decays of xPos `(dim / 2,)`, computed at each use, as the state dictionary does not have them."""
        index = torch.arange(0, self.dim, 2, dtype=wide_dtype(self.freqs), device=self.device)
        return (index + 0.4 * self.dim) / (1.4 * self.dim)

    def get_seq_pos(
        self, seq_len: int, device: Any = None, dtype: torch.dtype | None = None, offset: float = 0
    ) -> Tensor:
        """Return positions `(seq_len,)`, (0, 1, ... + offset) / interpolate_factor, in float32 or wider."""
        dtype = wide_dtype(self.freqs) if dtype is None or not dtype.is_floating_point else dtype
        wide = wide_dtype(torch.empty(0, dtype=dtype))
        return (torch.arange(seq_len, device=device or self.device, dtype=wide) + offset) / self.interpolate_factor

    def rotate_queries_or_keys(
        self, t: Tensor, seq_dim: int | None = None, offset: float = 0, scale: Tensor | float | None = None
    ) -> Tensor:
        """Rotate queries or keys `(..., tokens, channels)` by their positions in the sequence, from offset on."""
        if self.use_xpos and scale is None:
            raise ValueError("with use_xpos call rotate_queries_and_keys with both queries and keys, got one tensor")
        seq_dim = self.default_seq_dim if seq_dim is None else seq_dim
        freqs = self(self.get_seq_pos(t.shape[seq_dim], t.device, t.dtype, offset))
        freqs = freqs.unsqueeze(1) if seq_dim == -3 else freqs
        return apply_rotary_emb(freqs, t, scale=1.0 if scale is None else scale, seq_dim=seq_dim)

    def rotate_queries_and_keys(self, q: Tensor, k: Tensor, seq_dim: int | None = None) -> tuple[Tensor, Tensor]:
        """Rotate queries and keys of one sequence, and scale them as xPos does."""
        if not self.use_xpos:
            raise ValueError("rotate_queries_and_keys must be called with use_xpos=True, got False")
        return self.rotate_queries_with_cached_keys(q, k, seq_dim)

    def rotate_queries_with_cached_keys(
        self, q: Tensor, k: Tensor, seq_dim: int | None = None, offset: float = 0
    ) -> tuple[Tensor, Tensor]:
        """Rotate all keys, and queries of the last tokens of the sequence of the keys.

        With xPos the result is the last tokens of `rotate_queries_and_keys`; that of release 0.9.1 differs from it.
        """
        seq_dim = self.default_seq_dim if seq_dim is None else seq_dim
        q_len, k_len = q.shape[seq_dim], k.shape[seq_dim]
        if q_len > k_len:
            raise ValueError(f"queries must be at most as many as keys, got {q_len} and {k_len}")
        scale: Tensor | None = None
        if self.use_xpos:
            scale = self.get_scale(self.get_seq_pos(k_len, k.device, k.dtype))
            scale = scale.unsqueeze(1) if seq_dim == -3 else scale
        of_q, of_k = (1.0, 1.0) if scale is None else (scale[k_len - q_len :], 1 / scale)
        rotated = self.rotate_queries_or_keys(q, seq_dim, k_len - q_len + offset, of_q)
        return rotated, self.rotate_queries_or_keys(k, seq_dim, 0, of_k)

    def get_scale(self, t: Tensor, seq_len: int | None = None, offset: float = 0) -> Tensor:
        """Return the scales of xPos at positions t `(tokens,)`, each twice in turn: `(tokens, dim)`."""
        if not self.use_xpos:
            raise ValueError("get_scale must be called with use_xpos=True, got False")
        power = (t - len(t) // 2) / self.scale_base
        return (self.scale ** power.unsqueeze(-1)).repeat_interleave(2, dim=-1)

    def get_axial_freqs(self, *dims: int, offsets: Any = None) -> Tensor:
        """Return the angles of a lattice of sizes dims, in [-1, 1] for "pixel", axis by axis: `(*dims, axes * dim)`."""
        if offsets is not None and len(offsets) != len(dims):
            raise ValueError(f"offsets must be one per axis, {len(dims)}, got {len(offsets)}")
        parts = []
        for axis, size in enumerate(dims):
            if self.freqs_for == "pixel":
                positions = torch.linspace(-1, 1, size, device=self.device)
            else:
                positions = torch.arange(size, device=self.device)
            freqs = self(positions if offsets is None else positions + offsets[axis])
            parts.append(freqs.view(*(size if a == axis else 1 for a in range(len(dims))), -1))
        return torch.cat([part.expand(*dims, -1) for part in parts], dim=-1)

    def forward(self, t: Tensor, seq_len: int | None = None, offset: float = 0) -> Tensor:
        """Return the angles at positions t, each twice in turn: `(*t.shape, 2 * frequencies)`, float32 or wider."""
        wide = torch.promote_types(wide_dtype(self.freqs), torch.float64 if t.dtype == torch.float64 else torch.float32)
        with torch.autocast(t.device.type, enabled=False):
            return (t.to(wide).unsqueeze(-1) * self.freqs.to(wide)).repeat_interleave(2, dim=-1)
