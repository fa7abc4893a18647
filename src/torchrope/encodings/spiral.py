"""Spiral RoPE: groups of channels along evenly spaced directions in the plane, frequencies divided among them."""

import math

import torch
from torch import Tensor
from typing_extensions import Unpack

from torchrope.encodings.base import FixedShape
from torchrope.encodings.fixed import FixedFrequencies, geometric_sequence


class SpiralRoPE(FixedFrequencies):
    """Rotate the pairs of group k along direction k:  a = θ_t <(cos kπ / K, sin kπ / K), p>,  fixed.

    The K groups are equally wide. Directions k and k + K / 2 are perpendicular and have the same frequencies; the other
    directions share one sequence θ_t = base^(-t / n), n = head_dim / 4, divided among them two by two:
    pair r of group k has  t = 2 (k mod K / 2) + K (r div 2) + r mod 2.  K = 2 is RoPE-Axial.

    Args:
        num_directions: K, even.
        base: Base of the geometric sequence of frequencies.
        shape: Arguments of `FixedFrequencies`; num_axes = 2, head_dim divisible by 2 K.

    Raises:
        ValueError: num_axes is not 2; K is odd or below 2; head_dim is not divisible by 2 K.

    References:
        Liu et al., Spiral RoPE: Rotate Your Rotary Positional Embeddings in the 2D Plane, arXiv:2602.03227: groups
        along uniform directions. The division of frequencies among groups follows a third-party implementation, also in
        repeating the last frequency if there are too few.

    Example:
        >>> SpiralRoPE(num_axes=2, num_heads=1, head_dim=8).frequencies.norm(dim=0)[0].round(decimals=1).tolist()
        [1.0, 0.10000000149011612, 1.0, 0.10000000149011612]
    """

    def __init__(self, *, num_directions: int = 4, base: float = 100.0, **shape: Unpack[FixedShape]) -> None:
        super().__init__(**shape)
        if self.num_axes != 2:
            raise ValueError(f"num_axes of SpiralRoPE must be 2, got {self.num_axes}")
        if num_directions < 2 or num_directions % 2:
            raise ValueError(f"num_directions must be even and 2 or more, got {num_directions}")
        self.require_divisible(2 * num_directions, "2·num_directions")
        self.num_directions = num_directions
        self.base = base
        self.reset_parameters()

    def initial_frequencies(self) -> Tensor:
        k = torch.arange(self.num_directions)
        r = torch.arange(self.num_blocks // self.num_directions)
        n = max(self.num_blocks // 2, 1)
        t = 2 * (k % (self.num_directions // 2)).unsqueeze(1) + self.num_directions * (r // 2) + r % 2
        theta = geometric_sequence(n, self.base)[t.clamp(max=n - 1)]  # (directions, pairs of a group)
        angle = k.double() * (math.pi / self.num_directions)
        along = torch.stack([angle.cos(), angle.sin()]).unsqueeze(-1) * theta
        return along.flatten(1).unsqueeze(1).expand(-1, self.num_heads, -1)
