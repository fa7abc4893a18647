"""Rotary baselines of the ComRoPE paper, as defined there: on patch centres in [0, 1]."""

import math
from typing import Any

from torchrope.encodings.axial import AxialRoPE
from torchrope.encodings.comrope import ComRoPE
from torchrope.encodings.liere import LieRE


class VanillaRoPE(AxialRoPE):
    """Rotate each pair of channels along one axis:  a_j = p_{j mod N} θ_{j div N},  θ_t = base^(-t / n),  p in [0, 1].

    RoPE-Axial with the base of text models and positions relative to the image size: with two axes and head_dim 64,
    pairs rotate by 1 to 0.0002 radians across the image; those of RoPE-Axial by 13 to 0.17 across 14 patches.

    Args:
        num_axes: Number of axes of a position, N.
        num_heads: Number of attention heads.
        head_dim: Channels per head, divisible by 2 N.
        rotary_dim: Number of channels to rotate, the first ones; all by default.
        shared_heads: Heads share fixed frequencies in any case; True returns `generators` for one head.
        base: Base of the geometric sequence of frequencies.

    Raises:
        ValueError: head_dim is not divisible by 2 N.

    References:
        ComRoPE (CVPR 2025, arXiv:2506.03737), supplement D.1, equation 33: the baseline "vanilla RoPE" of tables 3 and
        4, a ComRoPE-AP with blocks of 2, so that the axes are interleaved. The published code groups the pairs by axis;
        the scores are the same if the channels of q and k are permuted accordingly.

    Example:
        >>> VanillaRoPE(num_axes=2, num_heads=1, head_dim=8).frequencies.tolist()
        [[1.0, 0.0, 0.009999999776482582, 0.0], [0.0, 1.0, 0.0, 0.009999999776482582]]
    """

    title = "RoPE, ComRoPE's baseline"
    formula = "angle of pair j = p_{j mod N} · 10000^(−(j div N)/n) fixed,  p in [0, 1]"
    summary = "RoPE-Axial with base 10,000 on positions in [0, 1], the baseline of ComRoPE's tables; fixed frequencies."
    source = "ComRoPE, supplement D.1"

    def __init__(
        self,
        *,
        num_axes: int,
        num_heads: int,
        head_dim: int,
        rotary_dim: int | None = None,
        shared_heads: bool = False,
        base: float = 10_000.0,
    ) -> None:
        super().__init__(
            num_axes=num_axes,
            num_heads=num_heads,
            head_dim=head_dim,
            rotary_dim=rotary_dim,
            shared_heads=shared_heads,
            base=base,
        )

    @classmethod
    def lattice(cls, *sizes: int) -> dict[str, Any]:
        """Patch centres, with the training image spanning [0, 1] along every axis."""
        return ComRoPE.lattice(*sizes)


class NormalLieRE(LieRE):
    """LieRE with generators initialised as P - P^T,  P normal instead of uniform:  R(p) = exp(sum_a p_a A_a).

    Arguments as of `LieRE`; with init="paper" entries above the diagonal are drawn from N(0, 2 init_scale²).

    References:
        ComRoPE (CVPR 2025, arXiv:2506.03737), supplement D.2, equation 34: the baseline "LieRE" of tables 3 and 4.
        N(0, 1) for P is the default of the published code (`init_std`); the supplement does not give it.

    Example:
        >>> NormalLieRE(num_axes=2, num_heads=12, head_dim=64, block_size=8).upper.shape
        torch.Size([2, 12, 8, 28])
    """

    title = "LieRE, ComRoPE's baseline"
    formula = "R(p) = exp(Σₐ pₐ Aₐ),  Aₐ = Pₐ − Pₐᵀ free, block by block,  P from N(0, 1)"
    summary = "LieRE initialised from a normal distribution on positions in [0, 1], the baseline of ComRoPE's tables."
    source = "ComRoPE, supplement D.2"

    @classmethod
    def lattice(cls, *sizes: int) -> dict[str, Any]:
        """Patch centres, with the training image spanning [0, 1] along every axis."""
        return ComRoPE.lattice(*sizes)

    def _draw(self) -> None:
        self.upper.normal_(0, math.sqrt(2))
