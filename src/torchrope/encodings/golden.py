"""Golden-gate RoPE: fixed frequencies along evenly distributed directions."""

import math

import torch
from torch import Tensor
from torch.nn import functional
from typing_extensions import Unpack

from torchrope.encodings.base import FixedShape
from torchrope.encodings.fixed import FixedFrequencies
from torchrope.lattice import Lattice


class GoldenGateRoPE(FixedFrequencies):
    """Rotate pair j of head h along a fixed direction:  a_hj = ω_j <u_hj, p>,  |u_hj| = 1,  fixed.

    Directions follow a low-discrepancy sequence over all heads and pairs; ω grows geometrically from the lowest to the
    highest frequency and may be 0 for the first pairs. RoPE-Mixed with fixed instead of learned directions.

    Args:
        min_frequency: Lowest ω, radians per unit of position, for a training image that spans [-1, 1].
        max_frequency: Highest ω.
        zero_fraction: Fraction of the pairs with ω = 0.
        shape: Arguments of `FixedFrequencies`.

    Raises:
        ValueError: head_dim is odd; frequencies or fraction out of range.

    References:
        J. Xiong, On N-dimensional Rotary Positional Embeddings, 2025, jerryxio.ng/posts/nd-rope: directions at
        multiples of the golden angle for two axes, by the generalised golden ratio and the inverse error function
        for others.

    Example:
        >>> encoding = GoldenGateRoPE(num_axes=2, num_heads=2, head_dim=8, min_frequency=1.0, max_frequency=8.0)
        >>> encoding.frequencies.norm(dim=0)[0].tolist()
        [1.0, 2.0, 4.0, 8.0]
    """

    lattice = Lattice(spacing=2.0, origin=-1.0, offset=0.5, per="size")

    def __init__(
        self,
        *,
        min_frequency: float = 0.2,
        max_frequency: float = 20.0,
        zero_fraction: float = 0.0,
        **shape: Unpack[FixedShape],
    ) -> None:
        super().__init__(**shape)
        if not 0 < min_frequency <= max_frequency:
            rule = f"min_frequency must be above 0 and at most max_frequency = {max_frequency}"
            raise ValueError(f"{rule}, got {min_frequency}")
        if not 0 <= zero_fraction <= 1:
            raise ValueError(f"zero_fraction must be a fraction from 0 to 1, got {zero_fraction}")
        self.min_frequency = min_frequency
        self.max_frequency = max_frequency
        self.zero_fraction = zero_fraction
        self.reset_parameters()

    def initial_frequencies(self) -> Tensor:
        rotating = self.num_blocks - round(self.zero_fraction * self.num_blocks)
        step = torch.linspace(0, 1, rotating, dtype=torch.float64)
        omega = self.min_frequency * (self.max_frequency / self.min_frequency) ** step
        omega = functional.pad(omega, (self.num_blocks - rotating, 0))
        spread = directions(self.num_heads * self.num_blocks, self.num_axes)
        return omega * spread.T.unflatten(-1, (self.num_heads, self.num_blocks))


def directions(count: int, num_axes: int) -> Tensor:
    """Return unit vectors `(count, num_axes)`, evenly distributed up to sign for any count.

    Two axes: the angle grows by π / φ, φ the golden ratio. Otherwise: a sequence in the unit cube from the root of
    x^(N + 1) = x + 1, mapped to a normal distribution by the inverse error function, and normalised.

    Example:
        >>> directions(3, 2).round(decimals=2).tolist()
        [[1.0, 0.0], [-0.36, 0.93], [-0.74, -0.68]]
    """
    index = torch.arange(count, dtype=torch.float64)
    if num_axes == 2:
        angle = index * (math.pi / _golden_ratio(1))
        return torch.stack([angle.cos(), angle.sin()], dim=-1)
    powers = torch.arange(1, num_axes + 1, dtype=torch.float64)
    cube = torch.frac((index + 1).unsqueeze(-1) * _golden_ratio(num_axes) ** -powers)
    return functional.normalize(torch.erfinv(2 * cube - 1), dim=-1)


def _golden_ratio(num_axes: int) -> float:
    """Compute the root above 1 of  x^(N + 1) = x + 1."""
    root = 2.0
    for _ in range(64):
        root = (1 + root) ** (1 / (num_axes + 1))
    return root
