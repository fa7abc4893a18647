"""PaPE: a sum of parabolas of the way between two tokens, added to their score by channels of queries and keys."""

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from torchrope.encodings.base import Positions
from torchrope.encodings.expanding import ExpandingEncoding
from torchrope.rotations import Expansion, combine
from torchrope.tensors import wide_dtype


class ParabolicEncoding(ExpandingEncoding):
    """What `PaPE` and `PaPERI` have in common: parabolas of projected positions, whose shape the query decides."""

    adds_to_scores: ClassVar[bool] = True

    weight: Tensor

    @property
    def relative(self) -> bool:
        return True

    @abstractmethod
    def projections(self) -> Tensor:
        """From positions to the u of each head, `(num_axes, num_heads, parabolas)`."""

    def forward(self, positions: Positions, *, backend: str = "auto") -> "Parabolas":
        """The projected positions, and what makes curvatures and slopes of tokens."""
        positions = self._check_positions(positions)
        wide = wide_dtype(positions, self.weight)
        places = combine(positions.to(wide), self.projections().to(wide))  # (*batch, heads, tokens, parabolas)
        return Parabolas(places=places, weight=self.weight, head_dim=self.head_dim, num_heads=self.num_heads)


class PaPE(ParabolicEncoding):
    """Add parabolas of the way from query to key, in the directions w_hi, of a shape that the query's token x decides:

        q^T k + sum_i -a_i (u_i - u'_i)^2 + b_i (u_i - u'_i),   u_i = <w_hi, p>,  a = softplus(A x),  b = B x

    divided by √head_dim with q^T k. In plain attention by 2 m + 1 more channels of q and k, m the number of parabolas:
    q' = (q, sum_i b_i u_i - a_i u_i^2, a, 2 a u - b) and k' = (k, 1, -u'^2, u'). w, A and B are learned.

    Args:
        num_axes: Number of axes of a position, N.
        num_heads: Attention heads; tokens have num_heads · head_dim channels.
        head_dim: Channels per head.
        num_parabolas: m, of each head.

    Raises:
        ValueError: num_parabolas below 1. In `rotate`, no tokens: attention that has none, such as linear attention,
            cannot add to scores.

    References:
        Øhrstrøm et al., Parabolic Position Encoding, arXiv:2602.01418. Starts are those of the authors' code, as is the
        division by √head_dim; the number of parabolas is a setting there.

    Example:
        >>> import torchrope as tr
        >>> encoding, x = PaPE(num_axes=2, num_heads=2, head_dim=4, num_parabolas=3), torch.randn(1, 9, 8)
        >>> q = k = torch.randn(1, 2, 9, 4)
        >>> tr.rotate(q, k, encoding(tr.grid(3, 3)), layout="bhtd", tokens=x)[0].shape
        torch.Size([1, 2, 9, 11])
    """

    title = "PaPE"
    formula = "qᵀk + Σᵢ −aᵢ (uᵢ − u′ᵢ)² + bᵢ (uᵢ − u′ᵢ),  uᵢ = ⟨wᵢ, p⟩,  a and b of the query's token"
    summary = "Parabolas of the offset, of a shape that the query decides, added to the scores by extra channels."
    source = "Øhrstrøm et al., Parabolic Position Encoding, arXiv:2602.01418"

    def __init__(self, *, num_axes: int, num_heads: int, head_dim: int, num_parabolas: int = 4) -> None:
        super().__init__(num_axes=num_axes, num_heads=num_heads, head_dim=head_dim)
        if num_parabolas < 1:
            raise ValueError(f"num_parabolas must be 1 or more, got {num_parabolas}")
        self.directions = nn.Parameter(torch.empty(num_axes, num_heads, num_parabolas))
        self.weight = nn.Parameter(torch.empty(2, num_heads, num_parabolas, num_heads * head_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all evenly from ±1 / √(numbers that are summed), as `nn.Linear`."""
        nn.init.uniform_(self.directions, -1 / math.sqrt(self.num_axes), 1 / math.sqrt(self.num_axes))
        bound = 1 / math.sqrt(self.weight.shape[-1])
        nn.init.uniform_(self.weight, -bound, bound)

    def projections(self) -> Tensor:
        return self.directions


class PaPERI(ParabolicEncoding):
    """Add one parabola of the distance, whose curvature the query's token x decides:

        q^T k - a s_h^2 |p - p'|^2,   a = softplus(A x)

    divided by √head_dim with q^T k, by 2 N + 1 more channels. Turning or moving all positions changes nothing. A is
    learned; s_h is drawn per head at the start, evenly within ±1 / √N, and fixed.

    Args:
        num_axes: Number of axes of a position, N.
        num_heads: Attention heads; tokens have num_heads · head_dim channels.
        head_dim: Channels per head.

    Raises:
        ValueError: as `PaPE`.

    References:
        Øhrstrøm et al., Parabolic Position Encoding, arXiv:2602.01418: the rotation-invariant variant.
    """

    title = "PaPE-RI"
    formula = "qᵀk − a sₕ² |p − p′|²,  a of the query's token"
    summary = "A parabola of the distance, whose curvature the query decides, added to the scores by extra channels."
    source = "Øhrstrøm et al., Parabolic Position Encoding, arXiv:2602.01418"

    scales: Tensor

    def __init__(self, *, num_axes: int, num_heads: int, head_dim: int) -> None:
        super().__init__(num_axes=num_axes, num_heads=num_heads, head_dim=head_dim)
        self.register_buffer("scales", torch.empty(num_heads))
        self.weight = nn.Parameter(torch.empty(1, num_heads, 1, num_heads * head_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the scales and the weight."""
        nn.init.uniform_(self.scales, -1 / math.sqrt(self.num_axes), 1 / math.sqrt(self.num_axes))
        bound = 1 / math.sqrt(self.weight.shape[-1])
        nn.init.uniform_(self.weight, -bound, bound)

    def projections(self) -> Tensor:
        axes = torch.eye(self.num_axes, dtype=self.scales.dtype, device=self.scales.device).unsqueeze(1)
        return axes * self.scales[:, None]


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class Parabolas(Expansion):
    """What `PaPE` and `PaPERI` return.

    Attributes:
        places: u `(*batch, heads, tokens, parabolas)`.
        weight: From tokens to curvatures and, where there are two, slopes: `(1 or 2, heads, parabolas or 1, dim)`.
    """

    places: Tensor
    weight: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.places.shape[:-1])

    def of_queries(self, q: Tensor, tokens: Tensor | None) -> Tensor:
        if tokens is None:
            raise ValueError("parabolas need the tokens that queries come from, rotate(..., tokens=x), got none")
        shapes = torch.einsum("...td,chmd->c...htm", tokens, self.weight.to(q.dtype))  # (1 or 2, ..., heads, tokens, m)
        if shapes.shape[-3:-1] != q.shape[-3:-1]:
            rule = f"tokens of queries {tuple(q.shape)} must have {self.weight.shape[-1]} channels"
            raise ValueError(f"{rule}, got {tuple(tokens.shape)}")
        u = self.places.to(q.dtype)
        a = functional.softplus(shapes[0]).expand(*q.shape[:-1], u.shape[-1])
        b = shapes[1] if len(shapes) == 2 else torch.zeros_like(a)
        own = (b * u - a * u.square()).sum(dim=-1, keepdim=True)
        return torch.cat([q, own, a, 2 * a * u - b], dim=-1)

    def of_keys(self, k: Tensor) -> Tensor:
        u = self.places.to(k.dtype).expand(*k.shape[:-1], -1)
        return torch.cat([k, torch.ones_like(k[..., :1]), -u.square(), u], dim=-1)

    def _part(self, batch: tuple[slice, ...], heads: slice, tokens: Any) -> dict[str, Tensor | None]:
        return {"places": self.places[(*batch, heads)][..., tokens, :], "weight": self.weight[:, heads]}
