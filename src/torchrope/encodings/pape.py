"""PaPE: parabolas of the offset between two tokens, added to their score by additional channels of q and k."""

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import Unpack

from torchrope.encodings.base import Positions, Shape
from torchrope.encodings.expanding import ExpandingEncoding
from torchrope.ops.reference import combine
from torchrope.rotations import FeatureMap
from torchrope.tensors import wide_dtype


class ParabolicEncoding(ExpandingEncoding):
    """Base class of `PaPE` and `PaPERI`: parabolas of projected positions, with coefficients from the query's token."""

    adds_score_bias: ClassVar[bool] = True
    relative = True
    weight: Tensor

    def reset_parameters(self) -> None:
        """Draw uniformly from ±1 / √fan_in, as `nn.Linear`; the projections have num_axes inputs."""
        for tensor in (*self.buffers(), *self.parameters()):
            bound = 1 / math.sqrt(self.weight.shape[-1] if tensor is self.weight else self.num_axes)
            nn.init.uniform_(tensor, -bound, bound)

    @abstractmethod
    def projections(self) -> Tensor:
        """Return the projections of positions to u, `(num_axes, num_heads, parabolas)`."""

    def forward(self, positions: Positions) -> "Parabolas":  # type: ignore[override]
        """Project the positions; return them with the weight that maps tokens to curvatures and slopes."""
        positions = self.check_positions(positions)
        wide = wide_dtype(positions, self.weight)
        projected = combine(positions.to(wide), self.projections().to(wide))  # (*batch, heads, tokens, parabolas)
        return Parabolas(projected=projected, weight=self.weight, **self.head_sizes)


class PaPE(ParabolicEncoding):
    """Add parabolas of the offset along directions w_hi to the scores, with coefficients from the query's token x:

        q^T k + sum_i -a_i (u_i - u'_i)^2 + b_i (u_i - u'_i),   u_i = <w_hi, p>,  a = softplus(A x),  b = B x

    divided by √head_dim together with q^T k. Computed by standard attention with 2 m + 1 additional channels, m the
    number of parabolas: q' = (q, sum_i b_i u_i - a_i u_i^2, a, 2 a u - b), k' = (k, 1, -u'^2, u'). w, A, B are learned.

    Args:
        num_parabolas: Number m of parabolas per head.
        shape: num_axes, num_heads and head_dim of `Encoding`; tokens have num_heads · head_dim channels.

    Raises:
        ValueError: num_parabolas below 1. `rotate` raises it if tokens is None, as in linear attention.

    References:
        Øhrstrøm et al., Parabolic Position Encoding, arXiv:2602.01418. The initialisation and the division by √head_dim
        are those of the authors' code; the number of parabolas is a setting there.

    Example:
        >>> import torchrope as tr
        >>> encoding, x = PaPE(num_axes=2, num_heads=2, head_dim=4, num_parabolas=3), torch.randn(1, 9, 8)
        >>> q = k = torch.randn(1, 2, 9, 4)
        >>> tr.rotate(q, k, encoding(tr.grid(3, 3)), layout="bhtd", tokens=x)[0].shape
        torch.Size([1, 2, 9, 11])
    """

    def __init__(self, *, num_parabolas: int = 4, **shape: Unpack[Shape]) -> None:
        super().__init__(**shape)
        if num_parabolas < 1:
            raise ValueError(f"num_parabolas must be 1 or more, got {num_parabolas}")
        self.directions = nn.Parameter(torch.empty(self.num_axes, self.num_heads, num_parabolas))
        self.weight = nn.Parameter(torch.empty(2, self.num_heads, num_parabolas, self.num_heads * self.head_dim))
        self.reset_parameters()

    def projections(self) -> Tensor:
        return self.directions


class PaPERI(ParabolicEncoding):
    """Add a parabola of the distance to the scores, with a curvature from the query's token x:

        q^T k - a s_h^2 |p - p'|^2,   a = softplus(A x)

    divided by √head_dim together with q^T k, computed with 2 N + 1 additional channels. Invariant to rotations and
    translations of all positions. A is learned; s_h is drawn uniformly from ±1 / √N per head, and fixed.

    Args:
        shape: num_axes, num_heads and head_dim of `Encoding`; tokens have num_heads · head_dim channels.

    Raises:
        ValueError: `rotate` raises it if tokens is None.

    References:
        Øhrstrøm et al., Parabolic Position Encoding, arXiv:2602.01418: the rotation-invariant variant.

    Example:
        >>> PaPERI(num_axes=2, num_heads=2, head_dim=4).weight.shape
        torch.Size([1, 2, 1, 8])
    """

    scales: Tensor

    def __init__(self, **shape: Unpack[Shape]) -> None:
        super().__init__(**shape)
        wide = torch.promote_types(torch.get_default_dtype(), torch.float32)
        self.register_buffer("scales", torch.empty(self.num_heads, dtype=wide))
        self.weight = nn.Parameter(torch.empty(1, self.num_heads, 1, self.num_heads * self.head_dim))
        self.reset_parameters()

    def projections(self) -> Tensor:
        axes = torch.eye(self.num_axes, dtype=self.scales.dtype, device=self.scales.device).unsqueeze(1)
        return axes * self.scales[:, None]


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class Parabolas(FeatureMap):
    """Projected positions and weights of the coefficients, as returned by `PaPE` and `PaPERI`.

    Attributes:
        projected: u `(*batch, heads, tokens, parabolas)`.
        weight: Maps tokens to curvatures and, if its first size is 2, slopes: `(1 or 2, heads, parabolas or 1, dim)`.
        tokens: Tokens that the queries were projected from, `(*batch, tokens, dim)`; `for_tokens` sets them.
    """

    projected: Tensor
    weight: Tensor
    tokens: Tensor | None = None

    def for_tokens(self, tokens: Tensor | None) -> "Parabolas":
        return self._with(tokens=tokens)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.projected.shape[:-1])

    def of_queries(self, q: Tensor) -> Tensor:
        if self.tokens is None:
            raise ValueError("parabolas need the tokens of the queries, rotate(..., tokens=x), got None")
        tokens, weight = self.tokens.to(q.dtype), self.weight.to(q.dtype)
        heads, channels = weight.shape[1], weight.shape[-1]
        if q.shape[-3] != heads:
            raise ValueError(f"queries must have {heads} heads, as their coefficients, got {tuple(q.shape)}")
        if tokens.shape[-2:] != (q.shape[-2], channels):
            rule = f"tokens of queries {tuple(q.shape)} must be (..., {q.shape[-2]}, {channels})"
            raise ValueError(f"{rule}, got {tuple(tokens.shape)}")
        coefficients = torch.einsum("...td,chmd->c...htm", tokens, weight)  # (1 or 2, ..., heads, tokens, m)
        u = self.projected.to(q.dtype)
        a = functional.softplus(coefficients[0]).expand(*q.shape[:-1], u.shape[-1])
        b = coefficients[1] if len(coefficients) == 2 else torch.zeros_like(a)
        constant = (b * u - a * u.square()).sum(dim=-1, keepdim=True)
        return torch.cat([q, constant, a, 2 * a * u - b], dim=-1)

    def of_keys(self, k: Tensor) -> Tensor:
        u = self.projected.to(k.dtype).expand(*k.shape[:-1], -1)
        return torch.cat([k, torch.ones_like(k[..., :1]), -u.square(), u], dim=-1)

    def _part(self, batch: tuple[slice, ...], heads: slice, tokens: Any) -> dict[str, Tensor | None]:
        return {"projected": self.projected[(*batch, heads)][..., tokens, :], "weight": self.weight[:, heads]}
