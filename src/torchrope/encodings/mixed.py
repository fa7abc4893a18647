"""RoPE-Mixed: learned frequencies, each pair of channels rotated along all axes."""

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from torchrope.encodings.axial import axial_frequencies
from torchrope.encodings.base import Encoding, HeadShape, check_scale, planar


class MixedRoPE(Encoding):
    """Rotate each pair of channels along all axes:  φ_j = sum_a p_a θ_aj,  θ learned.

    Initialised with the frequencies of RoPE-Axial, rotated by one random rotation of the axes per head, so that heads
    start with different directions.

    Args:
        base: Base of the geometric sequence of initial frequencies.
        init_scale: Factor on the initial frequencies.
        shape: Arguments of `Encoding`; head_dim even.

    Raises:
        ValueError: head_dim is odd; init_scale is not above 0.

    References:
        Heo et al., Rotary Position Embedding for Vision Transformer (ECCV 2024, arXiv:2403.13298), equation 14.

    Example:
        >>> sum(p.numel() for p in MixedRoPE(num_axes=2, num_heads=12, head_dim=64).parameters())
        768
    """

    def __init__(self, *, base: float = 10.0, init_scale: float = 1.0, **shape: Unpack[HeadShape]) -> None:
        super().__init__(block_size=2, **shape)
        self.base = base
        self.init_scale = check_scale(init_scale)
        self.frequencies = nn.Parameter(torch.empty(self.num_axes, self.parameter_heads, self.num_blocks))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw rotated axial frequencies."""
        with torch.no_grad():
            self.frequencies.copy_(self.init_scale * rotated_axial_frequencies(self.frequencies, self.base))

    def generators(self) -> Tensor:
        return planar(self.frequencies)

    def frequencies_per_axis(self) -> Tensor:
        return self.frequencies

    def load_generators(self, generators: Tensor) -> None:
        self.frequencies.copy_(generators[..., 1, 0])


def rotated_axial_frequencies(like: Tensor, base: float) -> Tensor:
    """Rotate axial frequencies by one random rotation of the axes per head, `(axes, heads, pairs)` as `like`."""
    num_axes, heads, pairs = like.shape
    rotations = random_rotations(heads, num_axes)  # (heads, axes, axes)
    frequencies = axial_frequencies(num_axes, pairs, base)  # (axes, pairs)
    return (rotations @ frequencies.to(rotations)).transpose(0, 1)


def random_rotations(count: int, num_axes: int) -> Tensor:
    """Draw uniform rotations `(count, num_axes, num_axes)`: QR of a Gaussian with unique signs and determinant 1."""
    q, r = torch.linalg.qr(torch.randn(count, num_axes, num_axes, dtype=torch.float32))
    q = q * r.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)
    determinant = torch.linalg.det(q)
    return torch.cat([q[..., :1] * determinant[:, None, None], q[..., 1:]], dim=-1)
