"""`Periodic`: an encoding with periodic axes, whose frequencies are integer multiples of 2π / period."""

import copy
import math

import torch
from torch import Tensor, nn
from typing_extensions import Self

from torchrope.encodings.base import Encoding, Positions, in_basis, rounding
from torchrope.positions import Periods, check_periods, wrap
from torchrope.rotations import Planar, PlanarInBasis, Rotation


class Periodic(Encoding):
    """Make axes of an encoding periodic:  f_a -> 2π m_a / T_a,  m_a fixed integers, so that R(p + T_a e_a) = R(p).

    For angles, times of day, longitudes. If the encoding is relative, scores depend on the difference along the axis
    modulo T.

    The integers m_a are the encoding's frequencies, in turns per period, at construction or reset, rounded to the
    nearest integer; for pairs that rotate along this axis only, to distinct integers of at least 1 within a head, since
    equal ones would be redundant and 0 would encode nothing. They are a buffer and not learned: a continuous change
    would break the period. Frequencies along other axes are learned as before, with exact gradients.

    Positions are first wrapped into one period about the origin, so that 0 and T give bit-identical rotations.

    Args:
        encoding: An encoding with frequencies: blocks of 2, or `STRING`. It holds the parameters.
        periods: T of each axis in the encoding's unit of position, None for an axis that is not periodic.

    Raises:
        ValueError: an encoding without frequencies (use positions of `torchrope.positions.to_circle` instead); not
            one period per axis, or one that is not above 0; more turns per period than float32 holds, 2^24.

    Example:
        >>> import torchrope as tr
        >>> hour = Periodic(tr.AxialRoPE(num_axes=2, num_heads=1, head_dim=16), periods=(24.0, None))
        >>> hour.turns[0, 0].tolist()  # axis 0: 24 / 2π, 24 / 2π · 100^(-1 / 4), ..., rounded to distinct integers
        [4, 0, 3, 0, 2, 0, 1, 0]
    """

    has_frequencies = True
    turns: Tensor
    """Integer turns per period `(axes, heads or 1, pairs)`, 0 along axes that are not periodic."""

    def __init__(self, encoding: Encoding, periods: Periods) -> None:
        if not encoding.has_frequencies:
            hint = "for others use positions of torchrope.positions.to_circle"
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
        self.lattice = encoding.lattice
        self.periods = tuple(None if period is None else float(period) for period in periods)
        frequencies = encoding.frequencies_per_axis().detach()
        self.register_buffer("turns", torch.empty_like(frequencies, dtype=torch.int32))
        self.update_turns()

    @property
    def relative(self) -> bool:
        return self.encoding.relative

    def reset_parameters(self) -> None:
        """Initialise the encoding, and compute the turns from its frequencies."""
        self.encoding.reset_parameters()
        self.update_turns()

    def zero_(self) -> Self:
        """Set the encoding's generators, and the turns, to zero; return this encoding."""
        self.encoding.zero_()
        self.update_turns()
        return self

    def update_turns(self) -> None:
        """Recompute the buffer `turns` from the current frequencies of the encoding."""
        self._set_turns(distinct_turns(self.encoding.frequencies_per_axis().detach(), self.periods))

    def _set_turns(self, turns: Tensor) -> None:
        """Write the turns; ValueError where the dtype of frequencies does not hold every integer up to the largest."""
        most = min(2 / torch.finfo(turns.dtype).eps, 2**31 - 1)
        if turns.numel() and not turns.is_meta and turns.abs().max() > most:
            rule = f"turns per period must be at most {most:.0f} in {turns.dtype}: use a larger unit of position"
            raise ValueError(f"{rule}, got {turns.abs().max():.3g} for periods={self.periods}")
        self.turns.copy_(turns)

    def forward(self, positions: Positions) -> Rotation:
        rotation = self.encoding(wrap(self.check_positions(positions), self.periods))
        assert isinstance(rotation, Planar | PlanarInBasis)
        return rotation._with(frequencies=self._periodic(rotation.frequencies, self.turns))

    def generators(self) -> Tensor:
        generators = in_basis(self.frequencies_per_axis(), self.basis())
        return generators.expand(-1, self.parameter_heads, -1, -1, -1)

    def frequencies_per_axis(self) -> Tensor:
        return self._periodic(self.encoding.frequencies_per_axis(), self.turns)

    def basis(self) -> Tensor | None:
        return self.encoding.basis()

    def extra_repr(self) -> str:
        """Return the periods; the encoding is a submodule with its own repr."""
        return f"periods={self.periods}"

    def _periodic(self, frequencies: Tensor, turns: Tensor) -> Tensor:
        """Replace frequencies `(axes, heads or 1, pairs)` along periodic axes by integer turns of the same shape."""
        if not frequencies.numel():
            return frequencies
        axes = [
            of_axis if period is None else t.to(of_axis) * (2 * math.pi / period)
            for of_axis, t, period in zip(frequencies.unbind(0), turns.unbind(0), self.periods, strict=True)
        ]
        return torch.stack(axes)

    def load_generators(self, generators: Tensor) -> None:
        changed = copy.deepcopy(self.encoding)
        changed.set_generators(generators)
        frequencies = changed.frequencies_per_axis()
        turns = _in_turns(frequencies, self.periods).round()
        error = (self._periodic(frequencies, turns) - frequencies).abs()
        if error.numel() and error.max() > rounding(generators):
            rule = "generators of Periodic must have integer turns per period"
            raise ValueError(f"{rule}, got a difference of {error.max():.3g} radians per unit")
        self._set_turns(turns)
        self.encoding.set_generators(generators)


def distinct_turns(frequencies: Tensor, periods: Periods) -> Tensor:
    """Round frequencies to integer turns per period, distinct within a head for pairs that rotate along one axis only.

    In ascending order, such a pair gets the nearest integer, or the smallest larger one that is free. Zeros stay zero.

    Example:
        >>> distinct_turns(torch.tensor([[[0.3, -1.2, 1.4, 0.0]]]), (2 * math.pi,)).tolist()
        [[[1.0, -2.0, 3.0, 0.0]]]
    """
    exact = _in_turns(frequencies, periods)
    single_axis = (frequencies != 0).sum(dim=0) == 1
    turns = [
        torch.where(single_axis & (t != 0), _distinct(t.abs().masked_fill(~single_axis, math.inf)), t.abs().round())
        for t in exact.unbind(0)
    ]
    return torch.where(exact < 0, -1.0, 1.0) * torch.stack(turns)


def _distinct(turns: Tensor) -> Tensor:
    """Round turns `(heads, pairs)` to distinct integers of at least 1; infinite ones come last and shift no other."""
    ordered, order = turns.masked_fill(turns == 0, math.inf).sort(dim=-1, stable=True)
    rank = torch.arange(turns.shape[-1], device=turns.device)
    distinct = (ordered.round().clamp(min=1) - rank).cummax(dim=-1).values + rank
    return torch.empty_like(distinct).scatter_(-1, order, distinct)


def update_all_turns(model: nn.Module) -> None:
    """Recompute the turns of every `Periodic` of a model, after its encodings were reset separately."""
    for module in model.modules():
        if isinstance(module, Periodic):
            module.update_turns()


def _in_turns(frequencies: Tensor, periods: Periods) -> Tensor:
    """Convert frequencies to turns per period, 0 along axes that are not periodic."""
    factors = [0.0 if period is None else period / (2 * math.pi) for period in periods]
    return frequencies.detach() * frequencies.new_tensor(factors)[:, None, None]
