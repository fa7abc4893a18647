"""HARoPE: RoPE-Axial after a learned linear map per head."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import Unpack

from torchrope.encodings.axial import AxialRoPE
from torchrope.encodings.base import Positions, Shape, skew
from torchrope.encodings.expanding import ExpandingEncoding
from torchrope.ops.skew_exp import exponential
from torchrope.rotating import apply
from torchrope.rotations import FeatureMap, Rotation
from torchrope.tensors import exact_matmul, wide_dtype, without_autocast


class HARoPE(ExpandingEncoding):
    """Rotate after a learned invertible map per head:  q' = R(p) M_h q,  k' = R(p) M_h^-T k,  M = U diag(s) V^T.

    U and V are exponentials of skew matrices, s = softplus(σ) + 1e-6, and M is initialised to I: RoPE-Axial. The score
    q^T M^T R(p' - p) M^-T k is relative, and equals q^T k at equal positions for any M. With an orthogonal M this is
    `STRING` with fixed frequencies. q' and k' keep head_dim channels.

    Args:
        base: Base of the geometric sequence of frequencies; 10,000^(1 / N) by default.
        shape: num_axes, num_heads and head_dim of `Encoding`; head_dim divisible by 2 N.

    Raises:
        ValueError: head_dim is not divisible by 2 N.

    References:
        Li et al., Head-wise Adaptive Rotary Positional Encoding for Fine-Grained Image Generation, arXiv:2510.10489: a
        map per head by its singular value decomposition. The inverse transpose for keys is from the authors' code.

    Example:
        >>> sum(p.numel() for p in HARoPE(num_axes=2, num_heads=2, head_dim=8).parameters())
        128
    """

    relative = True

    def __init__(self, *, base: float | None = None, **shape: Unpack[Shape]) -> None:
        super().__init__(**shape)
        self.rotary = AxialRoPE(base=base, **shape)
        entries = self.head_dim * (self.head_dim - 1) // 2
        self.left = nn.Parameter(torch.empty(self.num_heads, entries))
        self.right = nn.Parameter(torch.empty(self.num_heads, entries))
        self.scales = nn.Parameter(torch.empty(self.num_heads, self.head_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise M = I."""
        nn.init.zeros_(self.left)
        nn.init.zeros_(self.right)
        nn.init.constant_(self.scales, math.log(math.expm1(1.0 - _MIN_SINGULAR_VALUE)))
        self.rotary.reset_parameters()

    def maps(self) -> tuple[Tensor, Tensor]:
        """Compute M for queries and M^-T for keys, `(num_heads, head_dim, head_dim)` each, float32 at least."""
        wide = wide_dtype(self.left)
        u, v = (exponential(skew(upper.to(wide), self.head_dim)) for upper in (self.left, self.right))
        s = (functional.softplus(self.scales.to(wide)) + _MIN_SINGULAR_VALUE).unsqueeze(-2)
        with without_autocast(self.left):
            return exact_matmul(u * s, v.mT), exact_matmul(u / s, v.mT)

    def forward(self, positions: Positions) -> "Mapped":  # type: ignore[override]
        """Return M, M^-T and the rotation of RoPE-Axial at positions `([batch,] tokens, num_axes)`."""
        of_queries, of_keys = self.maps()
        rotation = self.rotary(positions)
        return Mapped(rotation=rotation, query_map=of_queries, key_map=of_keys, **self.head_sizes)


_MIN_SINGULAR_VALUE = 1e-6
"""Smallest singular value of M."""


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class Mapped(FeatureMap):
    """A linear map of queries and one of keys, each followed by a rotation, as returned by `HARoPE`.

    Attributes:
        rotation: Rotation after the maps.
        query_map: M `(heads, head_dim, head_dim)`.
        key_map: M^-T `(heads, head_dim, head_dim)`.
    """

    rotation: Rotation
    query_map: Tensor
    key_map: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        *batch, _, tokens = self.rotation.shape
        return (*batch, self.query_map.shape[0], tokens)

    def of_queries(self, q: Tensor) -> Tensor:
        return self._mapped_and_rotated(q, self.query_map)

    def of_keys(self, k: Tensor) -> Tensor:
        return self._mapped_and_rotated(k, self.key_map)

    def _mapped_and_rotated(self, x: Tensor, maps: Tensor) -> Tensor:
        maps = maps.repeat_interleave(x.shape[-3] // maps.shape[0], dim=0)  # grouped queries
        return apply(exact_matmul(x, maps.to(x.dtype).mT), self.rotation, layout="bhtd")

    def _part(self, batch: tuple[slice, ...], heads: slice, tokens: Any) -> dict[str, Any]:
        rotation = self.rotation[(*batch, heads, tokens)]
        return {"rotation": rotation, "query_map": self.query_map[heads], "key_map": self.key_map[heads]}
