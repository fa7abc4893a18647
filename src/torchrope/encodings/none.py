"""No position encoding: the baseline."""

import torch
from torch import Tensor

from torchrope.encodings.base import Encoding, Positions
from torchrope.rotations import Planar, Rotation


class NoEncoding(Encoding):
    """Identity:  R(p) = I,  A_a = 0.  Without another encoding outputs of tokens do not depend on their order.

    Args:
        num_axes: Number of axes of a position, N.
        head_dim: Channels per head.
        num_heads: Number of attention heads.

    Example:
        >>> import torchrope as tr
        >>> tr.NoEncoding(num_axes=2, num_heads=4, head_dim=16)(tr.grid(2, 2)).rotary_dim
        0
    """

    _anchor: Tensor

    def __init__(self, *, num_axes: int, head_dim: int, num_heads: int = 1) -> None:
        even = head_dim - head_dim % 2
        super().__init__(num_axes=num_axes, num_heads=num_heads, head_dim=head_dim, block_size=2, rotary_dim=even)
        # Empty; it follows the model to its device.
        self.register_buffer("_anchor", torch.empty(0), persistent=False)

    def generators(self) -> Tensor:
        return self._anchor.new_zeros(self.num_axes, self.num_heads, self.num_blocks, 2, 2)

    def forward(self, positions: Positions) -> Rotation:
        """Return the identity for every position: a rotation with rotary_dim 0."""
        positions = self.check_positions(positions)
        frequencies = positions.new_zeros(self.num_axes, 1, 0, dtype=torch.float32)
        positions = positions.to(torch.float32, copy=True)
        return Planar(positions=positions, frequencies=frequencies, **self.head_sizes)

    def load_generators(self, generators: Tensor) -> None:
        if generators.any():
            raise ValueError(f"generators of NoEncoding must be zero, got some of up to {generators.abs().max():.3g}")
