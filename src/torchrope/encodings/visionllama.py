"""VisionLLaMA's RoPE as the baseline of the LieRE paper: fixed frequencies on positions in [0, 1)."""

from typing import Any

import torch
from torch import Tensor

from torchrope.encodings.fixed import OneAxisPerPair
from torchrope.encodings.liere import LieRE


class VisionLLaMARoPE(OneAxisPerPair):
    """Rotate each pair of channels along one axis:  φ_(a n + t) = p_a e^(-4 t / (n - 1)),  n = head_dim / (2 N).

    Each axis has n consecutive pairs, with frequencies from 1 to e^-4 radians per unit of position, for an image of
    length 1; a single pair has frequency 1.

    Args:
        num_axes: Number of axes of a position, N.
        num_heads: Number of attention heads.
        head_dim: Channels per head, divisible by 2 N.
        rotary_dim: Number of channels to rotate, the first ones; all by default. LieRE's code
            uses 60 of 64 for three axes.
        shared_heads: Heads share fixed frequencies in any case; True returns `generators` for one head.

    Raises:
        ValueError: head_dim is not divisible by 2 N.

    References:
        Ostmeier et al., LieRE (arXiv:2406.10322): the baseline "VisionLlama RoPE" of its tables, from its published
        code ("inverse_exp"). VisionLLaMA (Chu et al., section 3.3) has positions in patches and RoPE's base of 10,000:
        `AxialRoPE(base=10_000.0)`, at other sizes on positions of `torchrope.anchor`.

    Example:
        >>> VisionLLaMARoPE(num_axes=2, num_heads=1, head_dim=8).frequencies.round(decimals=3).tolist()
        [[1.0, 0.017999999225139618, 0.0, 0.0], [0.0, 0.0, 1.0, 0.017999999225139618]]
    """

    title = "RoPE, VisionLLaMA"
    formula = "angle of pair a·n + t = pₐ · e^(−4t/(n−1)) fixed,  p in [0, 1)"
    summary = "Fixed frequencies on positions in [0, 1), each pair of channels along one axis: LieRE's baseline."
    source = "LieRE, baseline VisionLlama RoPE; after Chu et al., VisionLLaMA"

    def __init__(
        self,
        *,
        num_axes: int,
        num_heads: int,
        head_dim: int,
        rotary_dim: int | None = None,
        shared_heads: bool = False,
    ) -> None:
        super().__init__(
            num_axes=num_axes,
            num_heads=num_heads,
            head_dim=head_dim,
            rotary_dim=rotary_dim,
            shared_heads=shared_heads,
        )
        self._require_divisible(2 * num_axes, "2·num_axes")
        self.reset_parameters()

    @classmethod
    def lattice(cls, *sizes: int) -> dict[str, Any]:
        """Patches in [0, 1) along every axis at the training size, as for LieRE."""
        return LieRE.lattice(*sizes)

    def initial_frequencies(self) -> Tensor:
        theta = torch.exp(-4 * torch.linspace(0, 1, self.num_blocks // self.num_axes, dtype=torch.float64))
        return torch.block_diag(*theta.expand(self.num_axes, 1, -1))
