"""LieRE: unconstrained skew-symmetric generators, one per axis."""

import math
from typing import Literal

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from torchrope.encodings.base import Encoding, HeadShape, check_scale, skew, upper_triangle
from torchrope.lattice import Lattice

CORNERS = Lattice(per="size")
"""First corners of patches, in units of the training image: [0, 1)."""


class LieRE(Encoding):
    """Exponentiate unconstrained generators:  R(p) = exp(sum_a p_a A_a),  A_a block diagonal, skew, learned.

    Blocks of different axes need not commute, so scores may depend on absolute positions too; blocks of 2 commute, and
    LieRE is RoPE-Mixed. Parameters are the strict upper triangles.

    Args:
        block_size: b, written LieRE_b; head_dim by default, as in the paper.
        distribution: "uniform" draws from [0, 2π), as in the paper, "normal" from N(0, 2): P - P^T with P from N(0, 1).
        lattice: Positions that the initialisation is meant for; `Lattice()` for positions in tokens.
        init_scale: Factor on the initial generators.
        shape: Arguments of `Encoding`; head_dim divisible by block_size.

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

    def __init__(
        self,
        *,
        block_size: int | None = None,
        distribution: Literal["uniform", "normal"] = "uniform",
        lattice: Lattice = CORNERS,
        init_scale: float = 1.0,
        **shape: Unpack[HeadShape],
    ) -> None:
        super().__init__(block_size=block_size, **shape)
        if distribution not in ("uniform", "normal"):
            raise ValueError(f"distribution must be 'uniform' or 'normal', got {distribution!r}")
        self.distribution = distribution
        self.lattice = lattice
        self.init_scale = check_scale(init_scale)
        entries = self.block_size * (self.block_size - 1) // 2
        self.upper = nn.Parameter(torch.empty(self.num_axes, self.parameter_heads, self.num_blocks, entries))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the initial generators."""
        with torch.no_grad():
            if self.distribution == "uniform":
                self.upper.uniform_(0, 2 * math.pi)
            else:
                self.upper.normal_(0, math.sqrt(2))
            self.upper.mul_(self.init_scale)

    def generators(self) -> Tensor:
        return skew(self.upper, self.block_size)

    def load_generators(self, generators: Tensor) -> None:
        self.upper.copy_(upper_triangle(generators))
