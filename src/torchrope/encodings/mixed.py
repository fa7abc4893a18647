"""RoPE-Mixed: learned frequencies, each pair of channels rotated along all axes."""

import torch
from torch import Tensor, nn

from torchrope.encodings.axial import axial_frequencies
from torchrope.encodings.base import Encoding, Init, check_init, check_scale, planar


class MixedRoPE(Encoding):
    """Rotate each pair of channels along all axes:  φ_j = sum_a p_a θ_aj,  θ learned.

    Initialised with the frequencies of RoPE-Axial, rotated by one random rotation of the axes per head, so that heads
    start with different directions.

    Args:
        num_axes: Number of axes of a position, N.
        num_heads: Number of attention heads.
        head_dim: Channels per head, even.
        rotary_dim: Number of channels to rotate, the first ones; all by default.
        shared_heads: Share one set of frequencies among all heads.
        base: Base of the geometric sequence of initial frequencies.
        init: "paper", or "zeros": zero frequencies, so that the model starts as one without encoding.
        init_scale: Factor on the initial frequencies.

    Raises:
        ValueError: head_dim is odd; init_scale is not above 0.

    References:
        Heo et al., Rotary Position Embedding for Vision Transformer (ECCV 2024, arXiv:2403.13298), equation 14.

    Example:
        >>> sum(p.numel() for p in MixedRoPE(num_axes=2, num_heads=12, head_dim=64).parameters())
        768
    """

    title = "RoPE-Mixed"
    formula = "angle of pair j = Σₐ pₐ θₐⱼ,  θ learned"
    summary = "RoPE with learned frequencies: each pair of channels rotates along its own learned direction."
    source = "Heo et al., RoPE for Vision Transformer, eq. 14"

    def __init__(
        self,
        *,
        num_axes: int,
        num_heads: int,
        head_dim: int,
        rotary_dim: int | None = None,
        shared_heads: bool = False,
        base: float = 10.0,
        init: Init = "paper",
        init_scale: float = 1.0,
    ) -> None:
        super().__init__(
            num_axes=num_axes,
            num_heads=num_heads,
            head_dim=head_dim,
            block_size=2,
            rotary_dim=rotary_dim,
            shared_heads=shared_heads,
        )
        self.base = base
        self.init = check_init(init)
        self.init_scale = check_scale(init_scale)
        self.frequencies = nn.Parameter(torch.empty(num_axes, self.parameter_heads, self.num_blocks))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw rotated axial frequencies, or set zeros."""
        with torch.no_grad():
            if self.init == "zeros":
                self.frequencies.zero_()
                return
            self.frequencies.copy_(self.init_scale * rotated_axial_frequencies(self.frequencies, self.base))

    def generators(self) -> Tensor:
        return planar(self.frequencies)

    def frequencies_per_axis(self) -> Tensor:
        return self.frequencies

    def _take_generators(self, generators: Tensor) -> None:
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
