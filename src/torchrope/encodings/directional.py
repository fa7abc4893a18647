"""DRoPE: RoPE for positions with a heading, whose pairs rotate by the heading angle."""

import torch
from torch import Tensor
from typing_extensions import Unpack

from torchrope.encodings.axial import axial_frequencies
from torchrope.encodings.base import FixedShape
from torchrope.encodings.fixed import OneAxisPerPair, default_base


class DRoPE(OneAxisPerPair):
    """Rotate some pairs by the heading,  a_j = ψ,  and the others by RoPE-Axial of the position.

    The last axis is the heading ψ in radians. Its pairs have frequency 1 (the paper's "uniform identity scalar"):
    ψ and ψ + 2π give the same rotation, and scores depend on the difference of headings modulo 2π.

    Args:
        heading_pairs: Number of pairs of the heading, the last ones of a head; half of all by default.
        base: Base of the frequencies of the position; 10,000^(1 / axes of the position) by default.
        shape: Arguments of `FixedFrequencies`; num_axes = 1 for a heading only.

    Raises:
        ValueError: head_dim is odd; heading_pairs out of range.

    References:
        Zhao et al., DRoPE: Directional Rotary Position Embedding for Efficient Agent Interaction Modeling,
        arXiv:2503.15029, sections III and IV: within one head. The paper does not give the number of heading pairs.

    Example:
        >>> DRoPE(num_axes=3, num_heads=1, head_dim=8).frequencies.tolist()
        [[1.0, 0.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0], [0.0, 0.0, 1.0, 1.0]]
    """

    def __init__(
        self, *, heading_pairs: int | None = None, base: float | None = None, **shape: Unpack[FixedShape]
    ) -> None:
        super().__init__(**shape)
        pairs, of_position = self.num_blocks, self.num_axes - 1
        half = pairs - pairs // 2 if of_position else pairs
        self.heading_pairs = half if heading_pairs is None else heading_pairs
        if not 0 <= self.heading_pairs <= pairs or (not of_position and self.heading_pairs != pairs):
            allowed = f"0 to {pairs}" if of_position else f"{pairs} without a position"
            raise ValueError(f"heading_pairs must be {allowed}, got {self.heading_pairs}")
        self.base = default_base(max(of_position, 1)) if base is None else base
        self.reset_parameters()

    def initial_frequencies(self) -> Tensor:
        frequencies = torch.zeros(self.num_axes, self.num_blocks, dtype=torch.float64)
        rest = self.num_blocks - self.heading_pairs
        if self.num_axes > 1:
            frequencies[:-1, :rest] = axial_frequencies(self.num_axes - 1, rest, self.base)
        frequencies[-1, rest:] = 1.0
        return frequencies
