"""`Periodic`: an encoding whose frequencies on chosen axes are fixed whole numbers of turns per period."""

import copy
import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from torchrope.encodings.base import Encoding, Positions, planar, rounding
from torchrope.encodings.expanding import ExpandingEncoding
from torchrope.encodings.string import STRING, in_basis
from torchrope.positions import Periods, check_periods, wrap
from torchrope.rotations import Planar, PlanarInBasis, Rotation


class Periodic(Encoding):
    """Close axes of another encoding:  f_a -> 2π m_a / T_a,  m_a whole and fixed, so that R(p + T_a e_a) = R(p).

    For angles, times of day, longitudes. Scores of an encoding that was relative depend on the difference along the
    axis modulo T alone.

    The turns m_a come from the encoding's frequencies as they are when this is built or reset: rounded to the nearest
    whole number; of pairs that turn with this axis alone, to whole numbers of 1 or more that differ within a head,
    because two equal ones would say the same and 0 would say nothing. They are a buffer, saved and loaded, and do not
    learn: between whole numbers there is no way that keeps the axis closed. Frequencies along open axes learn as they
    did, and gradients are exact.

    Positions are wrapped into one period about the origin first, so that 0 and T are one place to the last bit.

    Args:
        encoding: Any with frequencies: blocks of 2, or `STRING`. It holds the parameters.
        periods: T of each axis in the encoding's unit of position, None where the axis does not close.

    Raises:
        ValueError: an encoding without frequencies, whose generators mix axes, and which takes positions
            `torchrope.on_circles` in its place; not one period per axis, or one that is not above 0.

    Example:
        >>> import torchrope as tr
        >>> hour = Periodic(tr.AxialRoPE(num_axes=2, num_heads=1, head_dim=16), periods=(24.0, None))
        >>> hour.turns[0, 0].tolist()  # pairs of axis 0: 24 / 2π, 24 / 2π · 100^(-1 / 4), ..., none of them twice
        [4, 0, 3, 0, 2, 0, 1, 0]
    """

    title = "periodic axes"
    formula = "fₐ = 2π mₐ / Tₐ,  mₐ whole, fixed"
    summary = "Whole turns per period in the place of another encoding's frequencies, on axes that close."
    source = "Fourier series: a function of period T has frequencies 2π m / T alone"

    turns: Tensor
    """Whole turns per period `(axes, heads or 1, pairs)`, 0 along open axes."""

    def __init__(self, encoding: Encoding, periods: Periods) -> None:
        if not has_frequencies(encoding):
            hint = "others take positions of torchrope.on_circles"
            raise ValueError(
                f"Periodic rounds frequencies, which blocks of 2 and STRING have; {hint}, got {type(encoding).__name__}"
            )
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
        self.register_buffer("turns", torch.empty_like(_frequencies(encoding), dtype=torch.int32, requires_grad=False))
        self.close()

    @property
    def relative(self) -> bool:
        return self.encoding.relative

    def lattice(self, *sizes: int) -> dict[str, Any]:  # type: ignore[override]  # its encoding's, known by the instance
        return self.encoding.lattice(*sizes)

    def reset_parameters(self) -> None:
        """Initialise the encoding, and take the turns from it."""
        self.encoding.reset_parameters()
        self.close()

    def close(self) -> None:
        """Take the turns from the frequencies that the encoding has now."""
        with torch.no_grad():
            self.turns.copy_(distinct_turns(_frequencies(self.encoding), self.periods))

    def forward(self, positions: Positions, *, backend: str = "auto") -> Rotation:
        rotation = self.encoding(wrap(self._check_positions(positions), self.periods), backend=backend)
        assert isinstance(rotation, Planar | PlanarInBasis)
        return replace(rotation, frequencies=self._closed(rotation.frequencies))

    def generators(self) -> Tensor:
        if isinstance(self.encoding, STRING):
            return in_basis(self._closed(self.encoding.frequencies), self.encoding.basis())
        return planar(self.frequencies_per_axis()).expand(-1, self.parameter_heads, -1, -1, -1)

    def frequencies_per_axis(self) -> Tensor:
        return self._closed(_frequencies(self.encoding))

    def extra_repr(self) -> str:
        """Show the periods; the encoding shows itself."""
        return f"periods={self.periods}"

    def _closed(self, frequencies: Tensor) -> Tensor:
        """Frequencies `(axes, heads or 1, pairs)` with those of axes that close in their places."""
        if not frequencies.numel():
            return frequencies
        axes = [
            own if period is None else turns.to(own) * (2 * math.pi / period)
            for own, turns, period in zip(frequencies.unbind(0), self.turns.unbind(0), self.periods, strict=True)
        ]
        return torch.stack(axes)

    def _take_generators(self, generators: Tensor) -> None:
        taken = copy.deepcopy(self.encoding)
        taken.set_generators(generators)
        frequencies = _frequencies(taken).detach()
        turns = _in_turns(frequencies, self.periods)
        off = [
            (exact - exact.round()).abs().max().item() * (2 * math.pi / period)
            for exact, period in zip(turns.unbind(0), self.periods, strict=True)
            if period is not None and exact.numel()
        ]
        if max(off, default=0.0) > rounding(generators):
            rule = "Periodic needs whole turns per period"
            raise ValueError(f"{rule}, got generators that are off by {max(off):.3g} radians per unit")
        self.encoding.set_generators(generators)
        self.turns.copy_(turns.round())


def distinct_turns(frequencies: Tensor, periods: Periods) -> Tensor:
    """Whole turns per period near given frequencies; those of pairs that turn with one axis alone differ in a head.

    In order of their size, such a pair gets the nearest whole number, or the least one that is not taken. Pairs at rest
    stay at rest.

    Args:
        frequencies: `(axes, heads or 1, pairs)`, radians per unit of position.
        periods: One per axis, None where it does not close.

    Returns:
        Whole numbers in floating point `(axes, heads or 1, pairs)`, 0 along open axes.

    Example:
        >>> distinct_turns(torch.tensor([[[0.3, -1.2, 1.4, 0.0]]]), (2 * math.pi,)).tolist()
        [[[1.0, -2.0, 3.0, 0.0]]]
    """
    exact = _in_turns(frequencies, periods)
    alone = (frequencies != 0).sum(dim=0) == 1
    turns = [
        torch.where(alone & (own != 0), _spread(own.abs().masked_fill(~alone, math.inf)), own.abs().round())
        for own in exact.unbind(0)
    ]
    return torch.where(exact < 0, -1.0, 1.0) * torch.stack(turns)


def _spread(sizes: Tensor) -> Tensor:
    """Different whole numbers of 1 or more near sizes `(heads, pairs)`; infinite ones come last and push nobody."""
    ordered, order = sizes.masked_fill(sizes == 0, math.inf).sort(dim=-1, stable=True)
    place = torch.arange(sizes.shape[-1], device=sizes.device)
    least = (ordered.round().clamp(min=1) - place).cummax(dim=-1).values + place
    return torch.empty_like(least).scatter_(-1, order, least)


def close_axes(model: nn.Module) -> None:
    """Take the turns of every `Periodic` of a model from its encoding, after encodings were reset one by one."""
    for module in model.modules():
        if isinstance(module, Periodic):
            module.close()


def _in_turns(frequencies: Tensor, periods: Periods) -> Tensor:
    """Frequencies in turns per period; along open axes 0."""
    turns = [
        torch.zeros_like(own) if period is None else own * (period / (2 * math.pi))
        for own, period in zip(frequencies.detach().unbind(0), periods, strict=True)
    ]
    return torch.stack(turns)


def has_frequencies(encoding: Encoding) -> bool:
    """Whether an encoding rotates pairs of channels, in their own basis or in another."""
    rotates = not isinstance(encoding, ExpandingEncoding)
    return isinstance(encoding, STRING) or (rotates and encoding.block_size == 2)


def _frequencies(encoding: Encoding) -> Tensor:
    """`(axes, heads or 1, pairs)`."""
    return encoding.frequencies if isinstance(encoding, STRING) else encoding.frequencies_per_axis()
