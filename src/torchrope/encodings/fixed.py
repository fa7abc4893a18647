"""Base classes of encodings with constant frequencies: `FixedFrequencies` and `OneAxisPerPair`."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torchrope.encodings.base import Encoding, planar, rounding


class FixedFrequencies(Encoding):
    """Rotate each pair of channels by a fixed frequency along each axis:  φ_j = sum_a p_a f_aj.

    A subclass defines `initial_frequencies` and ends its constructor with `reset_parameters()`.
    """

    frequencies: Tensor
    """`(axes, heads or 1, pairs)`, or `(axes, pairs)` if all heads always rotate by the same angles."""

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
            block_size=2,
            rotary_dim=rotary_dim,
            shared_heads=shared_heads,
        )
        wide = torch.promote_types(torch.get_default_dtype(), torch.float32)
        self.register_buffer("frequencies", torch.empty(self._buffer_shape, dtype=wide))

    @abstractmethod
    def initial_frequencies(self) -> Tensor:
        """Compute the frequencies, of the buffer's shape, in radians per unit of position."""

    def reset_parameters(self) -> None:
        """Write the initial frequencies."""
        with torch.no_grad(), torch.device("cpu"):  # a few numbers, computed in float64 on any default device
            self.frequencies.copy_(self.initial_frequencies())

    def generators(self) -> Tensor:
        return planar(self.frequencies_per_axis()).expand(-1, self.parameter_heads, -1, -1, -1)

    def frequencies_per_axis(self) -> Tensor:
        return self.frequencies

    @property
    def _buffer_shape(self) -> tuple[int, ...]:
        return (self.num_axes, self.parameter_heads, self.num_blocks)

    def _take_generators(self, generators: Tensor) -> None:
        self.frequencies.copy_(generators[..., 1, 0])


class OneAxisPerPair(FixedFrequencies):
    """Rotate each pair of channels along one axis by a fixed frequency, the same in all heads."""

    def frequencies_per_axis(self) -> Tensor:
        return self.frequencies.unsqueeze(1)

    @property
    def _buffer_shape(self) -> tuple[int, ...]:
        return (self.num_axes, self.num_blocks)

    def _take_generators(self, generators: Tensor) -> None:
        name = type(self).__name__
        frequencies = generators[..., 1, 0]  # (axes, heads, pairs)
        tolerance = rounding(generators)
        if (frequencies - frequencies[:, :1]).abs().max() > tolerance:
            raise ValueError(f"{name} needs the same generators in all heads, got heads that differ")
        axes_used = (frequencies[:, 0].abs() > tolerance).sum(dim=0)
        if (axes_used > 1).any():
            raise ValueError(f"{name} rotates a pair along one axis, got a pair with {axes_used.max().item()} axes")
        self.frequencies.copy_(frequencies[:, 0])


def centred_lattice(sizes: Sequence[int]) -> dict[str, Any]:
    """Return spacing 2 / n and origin 1 / n - 1 of n patch centres in [-1, 1], per axis, as arguments of `grid`."""
    return {"spacing": tuple(2 / size for size in sizes), "origin": tuple(1 / size - 1 for size in sizes)}
