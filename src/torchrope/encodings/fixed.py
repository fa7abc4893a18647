"""`FixedFrequencies`, the base class of encodings whose frequencies are constants."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchrope.encodings.base import Encoding, planar, rounding


class FixedFrequencies(Encoding):
    """Turn each pair of channels by a fixed frequency along each axis:  a_j = sum_a p_a f_aj.

    A subclass defines `initial_frequencies` and ends its constructor with `reset_parameters()`. The buffer
    `frequencies` stays float32 in a model that is cast to bfloat16.
    """

    frequencies: Tensor
    """`(axes, heads or 1, pairs)`, or `(axes, pairs)` where heads always turn alike."""

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
        """The frequencies, of the buffer's shape, in radians per unit of position."""

    def reset_parameters(self) -> None:
        """Write the ladder of frequencies."""
        with torch.no_grad(), torch.device("cpu"):  # whatever the default device: a few numbers, exact in float64
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

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        exact = self.frequencies
        super()._apply(fn, recurse)
        if self.frequencies.dtype not in (torch.float32, torch.float64):
            self.frequencies = exact.to(self.frequencies.device)
        return self


class OneAxisPerPair(FixedFrequencies):
    """Fixed frequencies, the same in all heads, where each pair of channels belongs to one axis."""

    def frequencies_per_axis(self) -> Tensor:
        return self.frequencies.unsqueeze(1)

    @property
    def _buffer_shape(self) -> tuple[int, ...]:
        return (self.num_axes, self.num_blocks)

    def _take_generators(self, generators: Tensor) -> None:
        family = type(self).__name__
        frequencies = generators[..., 1, 0]  # (axes, heads, pairs)
        slack = rounding(generators)
        if (frequencies - frequencies[:, :1]).abs().max() > slack:
            raise ValueError(f"{family} turns all heads alike, got generators whose heads differ")
        axes_used = (frequencies[:, 0].abs() > slack).sum(dim=0)
        if (axes_used > 1).any():
            raise ValueError(f"{family} gives a pair to one axis, got a pair that turns with {axes_used.max().item()}")
        self.frequencies.copy_(frequencies[:, 0])


def centred_lattice(sizes: Sequence[int]) -> dict[str, Any]:
    """Spacing and origin of patch centres in [-1, 1]."""
    return {"spacing": tuple(2 / size for size in sizes), "origin": tuple(1 / size - 1 for size in sizes)}
