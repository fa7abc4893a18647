"""Base classes of encodings with constant frequencies: `FixedFrequencies` and `OneAxisPerPair`."""

from abc import abstractmethod

import torch
from torch import Tensor
from typing_extensions import Self

from torchrope.encodings.base import Encoding, planar, rounding


class FixedFrequencies(Encoding):
    """Rotate each pair of channels by a fixed frequency along each axis:  φ_j = sum_a p_a f_aj.

    A subclass defines `initial_frequencies` and ends its constructor with `reset_parameters()`. The frequencies are a
    buffer, which stays float32 in a model cast to bfloat16.

    Args:
        num_axes: Number of axes of a position, N.
        head_dim: Channels per head, even.
        num_heads: Number of attention heads; an encoding of 1 rotates any number of heads alike.
        rotary_dim: Rotate only the first so many channels of a head; all by default.

    Example:
        >>> class Diagonal(FixedFrequencies):  # all pairs along p_1 + ... + p_N
        ...     def __init__(self, **shape):
        ...         super().__init__(**shape)
        ...         self.reset_parameters()
        ...
        ...     def initial_frequencies(self):
        ...         return 0.5 ** torch.arange(self.num_blocks).expand(self.num_axes, self.num_heads, -1)
        >>> Diagonal(num_axes=2, head_dim=6)([[1.0, 3.0]]).matrix().shape
        torch.Size([1, 1, 6, 6])
    """

    frequencies: Tensor
    """`(axes, heads, pairs)`, or `(axes, pairs)` if all heads always rotate by the same angles."""

    def __init__(self, *, num_axes: int, head_dim: int, num_heads: int = 1, rotary_dim: int | None = None) -> None:
        super().__init__(num_axes=num_axes, num_heads=num_heads, head_dim=head_dim, block_size=2, rotary_dim=rotary_dim)
        wide = torch.promote_types(torch.get_default_dtype(), torch.float32)
        self.register_buffer("frequencies", torch.empty(self._buffer_shape, dtype=wide))

    @abstractmethod
    def initial_frequencies(self) -> Tensor:
        """Compute the frequencies, of the buffer's shape, in radians per unit of position."""

    def reset_parameters(self) -> None:
        """Write the initial frequencies."""
        with torch.no_grad(), torch.device("cpu"):  # a few numbers, computed in float64 on any default device
            self.frequencies.copy_(self.initial_frequencies())

    def zero_(self) -> Self:
        """Set the frequencies to zero; return the encoding."""
        self.frequencies.zero_()
        return self

    def generators(self) -> Tensor:
        return planar(self.frequencies_per_axis()).expand(-1, self.num_heads, -1, -1, -1)

    def frequencies_per_axis(self) -> Tensor:
        return self.frequencies

    def load_generators(self, generators: Tensor) -> None:
        self.frequencies.copy_(generators[..., 1, 0])

    @property
    def _buffer_shape(self) -> tuple[int, ...]:
        return (self.num_axes, self.num_heads, self.num_blocks)


def default_base(num_axes: int) -> float:
    """Return the base of `AxialRoPE`, 10,000^(1 / num_axes): RoFormer's for one axis, RoPE-Axial's 100 for two."""
    return 10_000.0 ** (1 / num_axes)


def geometric_sequence(count: int, base: float) -> Tensor:
    """Return the frequencies  base^(-t / count),  t = 0 ... count - 1,  `(count)`, float64."""
    return base ** (-torch.arange(count, dtype=torch.float64) / max(count, 1))


class OneAxisPerPair(FixedFrequencies):
    """Rotate each pair of channels along one axis by a fixed frequency, the same in all heads."""

    def frequencies_per_axis(self) -> Tensor:
        return self.frequencies.unsqueeze(1)

    def load_generators(self, generators: Tensor) -> None:
        name = type(self).__name__
        frequencies = generators[..., 1, 0]  # (axes, heads, pairs)
        tolerance = rounding(generators)
        if (frequencies - frequencies[:, :1]).abs().max() > tolerance:
            raise ValueError(f"{name} needs the same generators in all heads, got heads that differ")
        axes_used = (frequencies[:, 0].abs() > tolerance).sum(dim=0)
        if (axes_used > 1).any():
            raise ValueError(f"{name} rotates a pair along one axis, got a pair with {axes_used.max().item()} axes")
        self.frequencies.copy_(frequencies[:, 0])

    @property
    def _buffer_shape(self) -> tuple[int, ...]:
        return (self.num_axes, self.num_blocks)
