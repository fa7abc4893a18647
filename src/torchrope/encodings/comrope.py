"""ComRoPE: learned commuting generators, for scores that depend on relative positions only."""

import math
from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor, nn

from torchrope.encodings.base import Encoding, Init, check_init, check_scale, rounding, skew, upper_triangle, widened

# P is standard normal by default in the published code, so P - P^T has this standard deviation above the diagonal; the
# supplement gives only deviations after training, 0.17 to 0.38 (table 8).
_STD = math.sqrt(2)


class ComRoPE(Encoding):
    """Base class of `ComRoPEAP` and `ComRoPELD`: blocks P - P^T; their strict upper triangles are `upper`."""

    def __init__(
        self,
        *,
        num_axes: int,
        num_heads: int,
        head_dim: int,
        block_size: int,
        rotary_dim: int | None,
        shared_heads: bool,
        init: Init,
        init_scale: float,
    ) -> None:
        super().__init__(
            num_axes=num_axes,
            num_heads=num_heads,
            head_dim=head_dim,
            block_size=block_size,
            rotary_dim=rotary_dim,
            shared_heads=shared_heads,
        )
        self.init = check_init(init)
        self.init_scale = check_scale(init_scale)
        entries = block_size * (block_size - 1) // 2
        self.upper = nn.Parameter(torch.empty(self.parameter_heads, self.num_blocks, entries))

    @property
    def relative(self) -> bool:
        return True

    @abstractmethod
    def factors_and_base(self) -> tuple[Tensor, Tensor]:
        """Return factors `(num_axes, heads, blocks)` and P - P^T `(heads, blocks, b, b)`:  A_a = c_a (P - P^T)."""

    def generators(self) -> Tensor:
        factors, base = widened(*self.factors_and_base())  # a product in half precision would be rounded
        return factors[..., None, None] * base

    @classmethod
    def lattice(cls, *sizes: int) -> dict[str, Any]:
        """Patch centres, with the training image spanning [0, 1] along every axis."""
        return {"spacing": tuple(1 / size for size in sizes), "origin": tuple(0.5 / size for size in sizes)}


class ComRoPEAP(ComRoPE):
    """Assign each block to one axis:  A_a = diag over blocks j of (P_j - P_j^T if j mod N = a else 0).

    Blocks of different axes never overlap, so the generators commute. Parameters are the strict upper triangles
    of P_j - P_j^T.

    Args:
        num_axes: Number of axes of a position, N.
        num_heads: Number of attention heads.
        head_dim: Channels per head, divisible by N block_size.
        block_size: b.
        rotary_dim: Number of channels to rotate, the first ones; all by default.
        shared_heads: Share one set of generators among all heads.
        init: "paper" draws P from N(0, 1) per unit of position, for an image of length 1; "zeros" starts as a model
            without encoding. N(0, 1) is the default of the published code (`init_std`); the supplement does not
            give the initialisation.
        init_scale: Factor on the initial generators: the standard deviation of P.

    Raises:
        ValueError: head_dim is not divisible by N block_size; init_scale is not above 0.

    References:
        ComRoPE (CVPR 2025, arXiv:2506.03737), section on axial partition (AP); supplement E.2.3.

    Example:
        >>> ComRoPEAP(num_axes=2, num_heads=12, head_dim=64, block_size=8).generators().shape
        torch.Size([2, 12, 8, 8, 8])
    """

    title = "ComRoPE-AP"
    formula = "Aₐ = diagⱼ(Pⱼ − Pⱼᵀ if j mod N = a else 0)"
    summary = "Learned blocks, each assigned to one axis, so that the generators commute and scores are relative."
    source = "ComRoPE, axial partition; supplement E.2.3"

    def __init__(
        self,
        *,
        num_axes: int,
        num_heads: int,
        head_dim: int,
        block_size: int = 8,
        rotary_dim: int | None = None,
        shared_heads: bool = False,
        init: Init = "paper",
        init_scale: float = 1.0,
    ) -> None:
        super().__init__(
            num_axes=num_axes,
            num_heads=num_heads,
            head_dim=head_dim,
            block_size=block_size,
            rotary_dim=rotary_dim,
            shared_heads=shared_heads,
            init=init,
            init_scale=init_scale,
        )
        self._require_divisible(num_axes * self.block_size, "num_axes·block_size")
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw P from N(0, init_scale²), or set zeros."""
        with torch.no_grad():
            if self.init == "zeros":
                self.upper.zero_()
            else:
                self.upper.normal_(0, self.init_scale * _STD)

    def factors_and_base(self) -> tuple[Tensor, Tensor]:
        own_axis = self._own_axis(self.upper)
        return own_axis.expand(-1, self.parameter_heads, -1), skew(self.upper, self.block_size)

    def _take_generators(self, generators: Tensor) -> None:
        other_axes = generators * (1 - self._own_axis(generators))[..., None, None]
        if other_axes.abs().max() > rounding(generators):
            raise ValueError(
                f"ComRoPEAP rotates block j along axis j mod {self.num_axes}, got a block with another axis"
            )
        self.upper.copy_(upper_triangle((generators - other_axes).sum(dim=0)))

    def _own_axis(self, like: Tensor) -> Tensor:
        """Return 1 where a block rotates along an axis, else 0, `(num_axes, 1, blocks)`."""
        own = like.new_zeros(self.num_axes, self.num_blocks // self.num_axes, self.num_axes)
        own.diagonal(dim1=0, dim2=2).fill_(1)
        return own.view(self.num_axes, 1, self.num_blocks)


class ComRoPELD(ComRoPE):
    """Make the generators multiples of one base:  A_a = θ_a (P - P^T) in each block, θ a factor per axis, head, block.

    Multiples of one matrix commute. Parameters are the factors and the strict upper triangle of P - P^T.

    Args:
        num_axes: Number of axes of a position, N.
        num_heads: Number of attention heads.
        head_dim: Channels per head, divisible by block_size.
        block_size: b.
        rotary_dim: Number of channels to rotate, the first ones; all by default.
        shared_heads: Share one set of bases and factors among all heads.
        init: "paper" draws P and θ from N(0, 1) per unit of position, for an image of length 1; "zeros" sets the
            factors to zero: the model starts as one without encoding. N(0, 1) is the default of the published code
            (`init_std`, for P only); the supplement does not give the initialisation.
        init_scale: Factor on the initial generators: the standard deviation of P; that of θ stays 1.

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

    title = "ComRoPE-LD"
    formula = "Aₐ = θₐ (P − Pᵀ) in each block,  θ and P learned"
    summary = "One learned block for all axes, times a factor per axis: the generators commute, scores are relative."
    source = "ComRoPE, linear dependence; supplement E.2.4"

    def __init__(
        self,
        *,
        num_axes: int,
        num_heads: int,
        head_dim: int,
        block_size: int = 8,
        rotary_dim: int | None = None,
        shared_heads: bool = False,
        init: Init = "paper",
        init_scale: float = 1.0,
    ) -> None:
        super().__init__(
            num_axes=num_axes,
            num_heads=num_heads,
            head_dim=head_dim,
            block_size=block_size,
            rotary_dim=rotary_dim,
            shared_heads=shared_heads,
            init=init,
            init_scale=init_scale,
        )
        self.factors = nn.Parameter(torch.empty(num_axes, self.parameter_heads, self.num_blocks))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw P from N(0, init_scale²) and θ from N(0, 1); "zeros" sets only θ to zero.

        If both were zero, both would have zero gradients.
        """
        with torch.no_grad():
            self.upper.normal_(0, self.init_scale * _STD)
            if self.init == "zeros":
                self.factors.zero_()
            else:
                self.factors.normal_()

    def factors_and_base(self) -> tuple[Tensor, Tensor]:
        return self.factors, skew(self.upper, self.block_size)

    def _take_generators(self, generators: Tensor) -> None:
        entries = upper_triangle(generators).movedim(0, -2)  # (heads, blocks, axes, entries)
        left, scale, right = torch.linalg.svd(entries.double(), full_matrices=False)
        if scale.shape[-1] > 1 and (scale[..., 1] > rounding(generators) * len(entries)).any():
            raise ValueError("generators of ComRoPELD must be multiples of one base, got generators that are not")
        nonzero = scale[..., 0] > 0  # (heads, blocks)
        base = right[..., 0, :] * scale[..., :1]
        self.upper.copy_(torch.where(nonzero.unsqueeze(-1), base, self.upper.double()))
        self.factors.copy_((left[..., 0] * nonzero.unsqueeze(-1)).movedim(-1, 0))
