"""LieRE: unconstrained skew-symmetric generators, one per axis."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from torchrope.encodings.base import Encoding, Init, check_init, check_scale, skew, upper_triangle


class LieRE(Encoding):
    """Exponentiate unconstrained generators:  R(p) = exp(sum_a p_a A_a),  A_a block diagonal, skew, learned.

    Blocks of different axes need not commute, so scores may depend on absolute positions too; blocks of 2 commute, and
    LieRE is RoPE-Mixed. Parameters are the strict upper triangles.

    Args:
        num_axes: Number of axes of a position, N.
        num_heads: Number of attention heads.
        head_dim: Channels per head, divisible by block_size.
        block_size: b, written LieRE_b; head_dim by default, as in the paper.
        rotary_dim: Number of channels to rotate, the first ones; all by default.
        shared_heads: Share one set of generators among all heads.
        init: "paper" draws uniformly from [0, 2π) per unit of position, for an image of length 1; "zeros" starts as a
            model without encoding.
        init_scale: Factor on the initial generators, which are then drawn from [0, 2π init_scale).

    Raises:
        ValueError: head_dim is not divisible by block_size; init_scale is not above 0.

    References:
        LieRE: Generalizing Rotary Position Encodings to Higher Dimensional Inputs (ICLR 2025 submission), algorithm 1
        and listing B.5.

    Example:
        >>> vit_b = [LieRE(num_axes=2, num_heads=12, head_dim=64, block_size=8) for layer in range(12)]
        >>> sum(p.numel() for encoding in vit_b for p in encoding.parameters())
        64512
    """

    title = "LieRE"
    formula = "R(p) = exp(Σₐ pₐ Aₐ),  Aₐ = Uₐ − Uₐᵀ unconstrained, block by block"
    summary = "A learned generator per axis, unconstrained within blocks: more general than RoPE, not exactly relative."
    source = "LieRE, ICLR 2025 submission, algorithm 1"

    def __init__(
        self,
        *,
        num_axes: int,
        num_heads: int,
        head_dim: int,
        block_size: int | None = None,
        rotary_dim: int | None = None,
        shared_heads: bool = False,
        init: Init = "paper",
        init_scale: float = 1.0,
    ) -> None:
        full = head_dim if rotary_dim is None else rotary_dim
        super().__init__(
            num_axes=num_axes,
            num_heads=num_heads,
            head_dim=head_dim,
            block_size=full if block_size is None else block_size,
            rotary_dim=rotary_dim,
            shared_heads=shared_heads,
        )
        self.init = check_init(init)
        self.init_scale = check_scale(init_scale)
        entries = self.block_size * (self.block_size - 1) // 2
        self.upper = nn.Parameter(torch.empty(num_axes, self.parameter_heads, self.num_blocks, entries))
        self.reset_parameters()

    @classmethod
    def lattice(cls, *sizes: int) -> dict[str, Any]:
        """Patches in [0, 1) along every axis at the training size."""
        return {"spacing": tuple(1 / size for size in sizes), "origin": 0.0}

    def reset_parameters(self) -> None:
        """Draw the initial generators, or set zeros."""
        with torch.no_grad():
            if self.init == "zeros":
                self.upper.zero_()
            else:
                self._draw()
                self.upper.mul_(self.init_scale)

    def _draw(self) -> None:
        """Draw the entries above the diagonal as the paper does."""
        self.upper.uniform_(0, 2 * math.pi)

    def generators(self) -> Tensor:
        return skew(self.upper, self.block_size)

    def _take_generators(self, generators: Tensor) -> None:
        self.upper.copy_(upper_triangle(generators))
