"""ComRoPE: learned commuting generators, for scores that depend on relative positions only."""

import math
from abc import abstractmethod

import torch
from torch import Tensor, nn
from typing_extensions import NotRequired, Self, Unpack

from torchrope.encodings.base import Encoding, HeadShape, check_scale, rounding, skew, upper_triangle, widened
from torchrope.lattice import Lattice

CENTRES = Lattice(offset=0.5, per="size")
"""Centres of patches, in units of the training image: [0, 1]."""
# P is standard normal by default in the published code, so P - P^T has this standard deviation above the diagonal; the
# supplement gives only deviations after training, 0.17 to 0.38 (table 8).
_STD = math.sqrt(2)


class BlockShape(HeadShape):
    """Arguments of `ComRoPE`."""

    block_size: NotRequired[int]
    init_scale: NotRequired[float]


class ComRoPE(Encoding):
    """Base class of `ComRoPEAP` and `ComRoPELD`: blocks P - P^T; their strict upper triangles are `upper`.

    Args:
        block_size: b.
        init_scale: Factor on the initial generators: the standard deviation of P per unit of position, for an image of
            length 1. N(0, 1) is the default of the published code (`init_std`); the supplement does not give it.
        shape: Arguments of `Encoding`; head_dim divisible by block_size.

    Raises:
        ValueError: head_dim is not divisible by block_size; init_scale is not above 0.
    """

    lattice = CENTRES
    relative = True

    def __init__(self, *, block_size: int = 8, init_scale: float = 1.0, **shape: Unpack[HeadShape]) -> None:
        super().__init__(block_size=block_size, **shape)
        self.init_scale = check_scale(init_scale)
        entries = self.block_size * (self.block_size - 1) // 2
        self.upper = nn.Parameter(torch.empty(self.parameter_heads, self.num_blocks, entries))

    def reset_parameters(self) -> None:
        """Draw P from N(0, init_scale²)."""
        with torch.no_grad():
            self.upper.normal_(0, self.init_scale * _STD)

    @abstractmethod
    def factors_and_base(self) -> tuple[Tensor, Tensor]:
        """Return factors `(num_axes, heads, blocks)` and P - P^T `(heads, blocks, b, b)`:  A_a = c_a (P - P^T)."""

    def generators(self) -> Tensor:
        factors, base = widened(*self.factors_and_base())  # a product in half precision would be rounded
        return factors[..., None, None] * base


class ComRoPEAP(ComRoPE):
    """Assign each block to one axis:  A_a = diag over blocks j of (P_j - P_j^T if j mod N = a else 0).

    Blocks of different axes never overlap, so the generators commute. Parameters are the strict upper triangles
    of P_j - P_j^T.

    Args:
        settings: Arguments of `ComRoPE`; head_dim divisible by N block_size.

    Raises:
        ValueError: head_dim is not divisible by N block_size; init_scale is not above 0.

    References:
        ComRoPE (CVPR 2025, arXiv:2506.03737), section on axial partition (AP); supplement E.2.3.

    Example:
        >>> ComRoPEAP(num_axes=2, num_heads=12, head_dim=64, block_size=8).generators().shape
        torch.Size([2, 12, 8, 8, 8])
    """

    def __init__(self, **settings: Unpack[BlockShape]) -> None:
        super().__init__(**settings)
        self.require_divisible(self.num_axes * self.block_size, "num_axes·block_size")
        self.reset_parameters()

    def factors_and_base(self) -> tuple[Tensor, Tensor]:
        axis_mask = self._axis_mask(self.upper)
        return axis_mask.expand(-1, self.parameter_heads, -1), skew(self.upper, self.block_size)

    def load_generators(self, generators: Tensor) -> None:
        off_axis = generators * (1 - self._axis_mask(generators))[..., None, None]
        if off_axis.abs().max() > rounding(generators):
            raise ValueError(
                f"ComRoPEAP rotates block j along axis j mod {self.num_axes}, got a block with another axis"
            )
        self.upper.copy_(upper_triangle((generators - off_axis).sum(dim=0)))

    def _axis_mask(self, like: Tensor) -> Tensor:
        """Return 1 where a block rotates along an axis, else 0, `(num_axes, 1, blocks)`."""
        axes = torch.eye(self.num_axes, dtype=like.dtype, device=like.device).unsqueeze(1)
        repeated = axes.expand(-1, self.num_blocks // self.num_axes, -1)
        return repeated.reshape(self.num_axes, 1, self.num_blocks)


class ComRoPELD(ComRoPE):
    """Make the generators multiples of one base:  A_a = θ_a (P - P^T) in each block, θ a factor per axis, head, block.

    Multiples of one matrix commute. Parameters are the factors and the strict upper triangle of P - P^T.

    Args:
        settings: Arguments of `ComRoPE`; init_scale is the standard deviation of P, that of θ stays 1.

    Raises:
        ValueError: head_dim is not divisible by block_size; init_scale is not above 0.

    References:
        ComRoPE (CVPR 2025, arXiv:2506.03737), section on linear dependence (LD); supplement E.2.4, with factors per
        head (the published code shares them among heads).

    Example:
        >>> encoding = ComRoPELD(num_axes=3, num_heads=2, head_dim=16)
        >>> encoding.factors.shape, encoding.upper.shape
        (torch.Size([3, 2, 2]), torch.Size([2, 2, 28]))
    """

    def __init__(self, **settings: Unpack[BlockShape]) -> None:
        super().__init__(**settings)
        self.factors = nn.Parameter(torch.empty(self.num_axes, self.parameter_heads, self.num_blocks))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw P from N(0, init_scale²) and θ from N(0, 1)."""
        super().reset_parameters()
        nn.init.normal_(self.factors)

    def zero_(self) -> Self:
        """Set θ to zero; return the encoding. If P were zero too, both would have zero gradients."""
        with torch.no_grad():
            self.factors.zero_()
        return self

    def factors_and_base(self) -> tuple[Tensor, Tensor]:
        return self.factors, skew(self.upper, self.block_size)

    def load_generators(self, generators: Tensor) -> None:
        entries = upper_triangle(generators).movedim(0, -2)  # (heads, blocks, axes, entries)
        left, scale, right = torch.linalg.svd(entries.double(), full_matrices=False)
        if scale.shape[-1] > 1 and (scale[..., 1] > rounding(generators) * len(entries)).any():
            raise ValueError("generators of ComRoPELD must be multiples of one base, got generators that are not")
        nonzero = scale[..., 0] > 0  # (heads, blocks)
        base = right[..., 0, :] * scale[..., :1]
        self.upper.copy_(torch.where(nonzero.unsqueeze(-1), base, self.upper.double()))
        self.factors.copy_((left[..., 0] * nonzero.unsqueeze(-1)).movedim(-1, 0))
