"""LookHere: a fixed bias per head, which masks keys outside a field of view and penalises distance."""

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from torchrope.encodings.bias import OffsetBias
from torchrope.encodings.distance import offsets_of
from torchrope.tensors import exact_einsum, wide_dtype


class LookHere(OffsetBias):
    """Add -s_h |p' - p| to the scores of head h if the key at p' is in the field of view of the query at p, else -inf.

    The field of view contains the query itself and all keys within fov / 2 of the direction of the head, inclusive. One
    in three heads is undirected and attends to all keys. The directed heads come first; their directions alternate
    between both signs of each axis: for two axes up, down, left, right. Slopes s_h are 1/2, 1/4, ... for each group of
    4 directed heads, and 1/4, 1/16, 1/64, 1/256 for undirected ones. Nothing is learned; any size works.

    Args:
        sizes: As of `ScoreBias`.
        num_heads: As of `ScoreBias`.
        fov: Field of view in degrees: 180, a half space, or 90, within 45 degrees of an axis.
        slope: Factor on all slopes.

    Raises:
        ValueError: fov neither 180 nor 90; slope below 0 or not finite.

    References:
        Fuller et al., LookHere: Vision Transformers with Directed Attention Generalize and Extrapolate, NeurIPS 2024,
        arXiv:2405.13985. In the authors' code slopes also fall from layer to layer; here all layers have `slope`.

    Example:
        >>> bias = LookHere(sizes=(1, 3), num_heads=4)
        >>> (bias(1, 3)[2] + 0.0).tolist()  # to the left, in steps of 1/2
        [[0.0, -inf, -inf], [-0.5, 0.0, -inf], [-1.0, -0.5, 0.0]]
    """

    def __init__(
        self, *, sizes: Sequence[int], num_heads: int, fov: Literal[180, 90] = 180, slope: float = 1.0
    ) -> None:
        super().__init__(sizes=sizes, num_heads=num_heads)
        if fov not in (180, 90):
            raise ValueError(f"fov must be 180 or 90 degrees, got {fov}")
        if not 0 <= slope < math.inf:
            raise ValueError(f"slope must be 0 or more and finite, got {slope}")
        self.fov = fov
        self.slope = slope
        # Empty; it follows the model to its device and dtype.
        self.register_buffer("_anchor", torch.empty(0), persistent=False)

    _anchor: Tensor

    def by_offset(self, *sizes: int) -> Tensor:
        self.check_axes(sizes)
        anchor = self._anchor.to(wide_dtype(self._anchor))  # what is in view must not depend on the model's dtype
        offset = -offsets_of(sizes, anchor)  # key minus query
        distance = offset.norm(dim=-1)
        directions, slopes = self._directions_and_slopes(anchor)
        along = exact_einsum("...a,ha->h...", offset, directions)
        per_head = (-1, *(1 for _ in sizes))
        # The tolerance includes the boundary of the field of view despite rounding.
        in_view = along >= math.cos(math.radians(self.fov / 2)) * distance - 1e-4
        undirected = (directions == 0).all(dim=-1).view(per_head)
        bias = torch.where(in_view | undirected, -self.slope * slopes.view(per_head) * distance, -math.inf)
        return bias.to(self._anchor.dtype)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, fov={self.fov}, slope={self.slope}"

    def _directions_and_slopes(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return the direction `(heads, axes)`, 0 if undirected, and slope `(heads)` of each head."""
        axes = len(self.sizes)
        both_ways = torch.eye(axes).repeat_interleave(2, dim=0) * torch.tensor([-1.0, 1.0]).repeat(axes).unsqueeze(1)
        undirected = self.num_heads // 3
        directed = self.num_heads - undirected
        directions = torch.zeros(self.num_heads, axes)
        directions[:directed] = both_ways[torch.arange(directed) % len(both_ways)]
        group = torch.arange(directed) // 4
        slopes = torch.cat([0.5 ** (group + 1.0), 0.25 ** (torch.arange(undirected) % 4 + 1.0)])
        return directions.to(like), slopes.to(like)
