"""`Periodic`: an encoding whose frequencies on chosen axes are whole numbers of turns per period."""

import copy
import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from torchrope.encodings.base import Encoding, Positions, planar, rounding
from torchrope.encodings.string import STRING, in_basis
from torchrope.positions import Periods, check_periods, wrap
from torchrope.rotations import Planar, PlanarInBasis, Rotation


class Periodic(Encoding):
    """Close axes of another encoding:  f_a -> (2π / T_a) round(f_a T_a / 2π),  so that R(p + T_a e_a) = R(p).

    For angles, times of day, longitudes. Scores of an encoding that was relative depend on the difference along the
    axis modulo T alone. Frequencies below half a turn per period become 0: such a pair does not see the axis.

    Where frequencies are learned, gradients pass the rounding unchanged (straight-through); those of other axes are
    exact. Positions are wrapped into one period about the origin first, so that 0 and T are one place to the last bit.

    Args:
        encoding: Any with frequencies: blocks of 2, or `STRING`. It holds the parameters.
        periods: T of each axis in the encoding's unit of position, None where the axis does not close.

    Raises:
        ValueError: an encoding without frequencies, which takes positions `torchrope.on_circles` in its place; not one
            period per axis, or one that is not above 0.

    References:
        Bengio et al., Estimating or Propagating Gradients Through Stochastic Neurons for Conditional Computation: the
        straight-through estimator.

    Example:
        >>> import torchrope as tr
        >>> hour = Periodic(tr.MixedRoPE(num_axes=2, num_heads=2, head_dim=8), periods=(24.0, None))
        >>> (hour.frequencies_per_axis()[0] * 24 / (2 * math.pi)).frac().abs().max().item() < 1e-5
        True
    """

    title = "periodic axes"
    formula = "fₐ → (2π / Tₐ) round(fₐ Tₐ / 2π)"
    summary = "Frequencies of another encoding rounded to whole turns per period, on axes that close."
    source = "the gradient: Bengio et al., Estimating or Propagating Gradients Through Stochastic Neurons"

    def __init__(self, encoding: Encoding, periods: Periods) -> None:
        if not has_frequencies(encoding):
            hint = "others take positions of torchrope.on_circles"
            raise ValueError(f"Periodic rounds frequencies, which blocks of 2 and STRING have; {hint}, got {encoding}")
        check_periods(periods, encoding.num_axes)
        super().__init__(
            num_axes=encoding.num_axes,
            num_heads=encoding.num_heads,
            head_dim=encoding.head_dim,
            block_size=encoding.block_size,
            rotary_dim=encoding.rotary_dim,
            shared_heads=encoding.shared_heads,
        )
        self.encoding = encoding
        self.periods = tuple(None if period is None else float(period) for period in periods)

    @property
    def relative(self) -> bool:
        return self.encoding.relative

    def lattice(self, *sizes: int) -> dict[str, Any]:  # type: ignore[override]  # its encoding's, known by the instance
        return self.encoding.lattice(*sizes)

    def reset_parameters(self) -> None:
        """Initialise the encoding."""
        self.encoding.reset_parameters()

    def forward(self, positions: Positions, *, backend: str = "auto") -> Rotation:
        rotation = self.encoding(wrap(self._check_positions(positions), self.periods), backend=backend)
        assert isinstance(rotation, Planar | PlanarInBasis)
        return replace(rotation, frequencies=whole_turns(rotation.frequencies, self.periods))

    def generators(self) -> Tensor:
        if isinstance(self.encoding, STRING):
            return in_basis(whole_turns(self.encoding.frequencies, self.periods), self.encoding.basis())
        return planar(self.frequencies_per_axis()).expand(-1, self.parameter_heads, -1, -1, -1)

    def frequencies_per_axis(self) -> Tensor:
        return whole_turns(_frequencies(self.encoding), self.periods)

    def extra_repr(self) -> str:
        """Show the periods; the encoding shows itself."""
        return f"periods={self.periods}"

    def _take_generators(self, generators: Tensor) -> None:
        taken = copy.deepcopy(self.encoding)
        taken.set_generators(generators)
        frequencies = _frequencies(taken).detach()
        off = (whole_turns(frequencies, self.periods) - frequencies).abs()
        if frequencies.numel() and off.max() > rounding(generators):
            rule = "Periodic needs whole turns per period"
            raise ValueError(f"{rule}, got generators that are off by {off.max().item():.3g} radians per unit")
        self.encoding.set_generators(generators)


def whole_turns(frequencies: Tensor, periods: Periods) -> Tensor:
    """Round to the nearest whole number of turns per period, the gradient that of no rounding.

    Args:
        frequencies: `(axes, heads or 1, pairs)`, radians per unit of position.
        periods: One per axis, None where nothing is rounded.

    Returns:
        Frequencies of the same shape.
    """
    exact = frequencies.detach()
    rounded = [
        f if period is None else (f / (2 * math.pi / period)).round() * (2 * math.pi / period)
        for f, period in zip(exact.unbind(0), periods, strict=True)
    ]
    return torch.stack(rounded) + (frequencies - exact)


def has_frequencies(encoding: Encoding) -> bool:
    """Whether an encoding rotates pairs of channels, in their own basis or in another."""
    return encoding.block_size == 2 or isinstance(encoding, STRING)


def _frequencies(encoding: Encoding) -> Tensor:
    """`(axes, heads or 1, pairs)`."""
    return encoding.frequencies if isinstance(encoding, STRING) else encoding.frequencies_per_axis()
