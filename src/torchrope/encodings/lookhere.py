"""LookHere: each head looks into one direction, and less the farther away."""

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from torchrope.encodings.bias import ScoreBias
from torchrope.positions import grid


class LookHere(ScoreBias):
    """Add to the scores of head h  -s_h |p' - p|  where the query at p has the key at p' in sight, else -inf.

    In sight is what lies within fov / 2 of the direction of the head, its edges included, and the query itself. Of
    every three heads one sees everything. Heads that look along the axes come first, back and forth along each in turn:
    for two axes up, down, left, right. Slopes s_h are 1/2, 1/4, ... for each group of 4 of them, and 1/4, 1/16, 1/64,
    1/256 for the heads that see everything. Nothing is learned; other sizes need nothing.

    Args:
        sizes: Tokens along each axis at the training size; any other size works as well.
        num_heads: Number of attention heads.
        fov: Field of view in degrees. 180: a half space; 90: a quarter about an axis.
        slope: Factor on all slopes.

    Raises:
        ValueError: a size or num_heads below 1; another fov; slope below 0.

    References:
        Fuller et al., LookHere: Vision Transformers with Directed Attention Generalize and Extrapolate, NeurIPS 2024,
        arXiv:2405.13985. In the authors' code slopes also fall from layer to layer; here all layers have `slope`.

    Example:
        >>> bias = LookHere(sizes=(1, 3), num_heads=4)
        >>> (bias(1, 3)[2] + 0.0).tolist()  # to the left, in steps of 1/2
        [[0.0, -inf, -inf], [-0.5, 0.0, -inf], [-1.0, -0.5, 0.0]]
    """

    title = "LookHere"
    formula = "softmax(qᵀk/√d − sₕ |p − p′|), masked beyond the field of view of head h"
    summary = "Each head sees a half space or a quarter, and less the farther away; fixed."
    source = "Fuller et al., LookHere, NeurIPS 2024, arXiv:2405.13985"

    def __init__(
        self, *, sizes: Sequence[int], num_heads: int, fov: Literal[180, 90] = 180, slope: float = 1.0
    ) -> None:
        super().__init__(sizes=sizes, num_heads=num_heads)
        if fov not in (180, 90):
            raise ValueError(f"fov must be 180 or 90 degrees, got {fov}")
        if not 0 <= slope < math.inf:
            raise ValueError(f"slope must be 0 or more, got {slope}")
        self.fov = fov
        self.slope = slope
        # Empty; it follows the model to its device and dtype.
        self.register_buffer("_anchor", torch.empty(0), persistent=False)

    _anchor: Tensor

    def forward(self, *sizes: int, window: Sequence[int] | None = None) -> Tensor:
        """The numbers for all pairs of tokens of a lattice.

        Args:
            sizes: Tokens along each axis.
            window: Tokens of a part of the lattice along each axis, whose pairs alone are given; all by default.

        Returns:
            `(num_heads, prod(sizes), prod(sizes))`, queries before keys; of a window as many as it has.

        Raises:
            ValueError: not one size per axis.
        """
        if len(sizes) != len(self.sizes):
            raise ValueError(f"{type(self).__name__} needs {len(self.sizes)} sizes, one per axis, got {len(sizes)}")
        places = grid(*(sizes if window is None else window), device=self._anchor.device).to(self._anchor.dtype)
        way = places - places.unsqueeze(1)  # (queries, keys, axes)
        distance = way.norm(dim=-1)
        directions, slopes = self._looks()
        along = torch.einsum("qka,ha->hqk", way, directions)
        # An edge belongs to what is seen, whatever the rounding of a root.
        seen = along >= math.cos(math.radians(self.fov / 2)) * distance - 1e-4
        everything = (directions == 0).all(dim=-1)[:, None, None]
        return torch.where(seen | everything, -self.slope * slopes[:, None, None] * distance, -math.inf)

    def extra_repr(self) -> str:
        """Return the arguments of the module."""
        return f"{super().extra_repr()}, fov={self.fov}, slope={self.slope}"

    def _looks(self) -> tuple[Tensor, Tensor]:
        """Direction `(heads, axes)` and slope `(heads)` of each head; those that see everything have direction 0."""
        axes = len(self.sizes)
        around = torch.eye(axes).repeat_interleave(2, dim=0) * torch.tensor([-1.0, 1.0]).repeat(axes).unsqueeze(1)
        everywhere = self.num_heads // 3
        ahead = self.num_heads - everywhere
        directions = torch.zeros(self.num_heads, axes)
        directions[:ahead] = around[torch.arange(ahead) % len(around)]
        group = torch.arange(ahead) // 4
        slopes = torch.cat([0.5 ** (group + 1.0), 0.25 ** (torch.arange(everywhere) % 4 + 1.0)])
        return directions.to(self._anchor), slopes.to(self._anchor)
