"""Where accuracy first reaches that of a reference, over epochs or over the amount of data, with bootstrap draws."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf, isinf

import numpy as np

from torchrope_lab.conclusion import Interval, caveat
from torchrope_lab.engine.estimates import ends, first_reach, simultaneous_intervals, verdict_of
from torchrope_lab.engine.long_table import Cell, Changes, format_interval
from torchrope_lab.engine.reference import described


@dataclass(frozen=True)
class Reach:
    """Point at which a curve first reaches a target, or a function of it; infinite if it does not."""

    measured: np.ndarray  # `(1,)`
    drawn: np.ndarray  # the point in every bootstrap draw, `(draws,)`

    @classmethod
    def of(
        cls, x: np.ndarray, curve: np.ndarray, target: float, drawn_curves: np.ndarray, drawn_targets: np.ndarray
    ) -> "Reach":
        """Interpolate the curve `(points,)`, and the curves of every draw, `(draws, points)`."""
        return cls(first_reach(x, curve[None], np.array([target])), first_reach(x, drawn_curves, drawn_targets))

    @property
    def missed(self) -> bool:
        """Whether the measured curve does not reach the target."""
        return isinf(self.measured[0])

    @property
    def never(self) -> bool:
        """Whether the curve does not reach the target in nearly all draws."""
        return isinf(ends(self.drawn)[0])

    def map(self, function: Callable[[np.ndarray], np.ndarray]) -> "Reach":
        """Apply a function to the measured point and to all draws."""
        return Reach(function(self.measured), function(self.drawn))

    def interval(self, level: float = 0.95, least: float = -inf, most: float = inf) -> Interval:
        """Return the measured value with its percentile interval, whose ends are clipped to least and most."""
        low, high = (min(max(end, least), most) for end in ends(self.drawn, level))
        return Interval(float(self.measured[0]), low, high)

    def log_ratio(self, other: "Reach") -> "Reach":
        """Return the logarithm of another's point over this one, 0 in draws in which neither reaches the target."""
        neither = np.isinf(self.drawn) & np.isinf(other.drawn)
        ratios = np.divide(other.drawn, self.drawn, out=np.ones_like(self.drawn), where=~neither)
        with np.errstate(divide="ignore"):
            return Reach(np.log(other.measured / self.measured), np.log(ratios))


def factors(reach: Mapping[str, Reach], others: Mapping[str, str]) -> Changes:
    """Compute how many times as early arms reach the target as others, of pairs that both do, as logarithms."""
    pairs = {name: other for name, other in others.items() if not (reach[name].missed or reach[other].missed)}
    return simultaneous_intervals({Cell(name): reach[name].log_ratio(reach[other]) for name, other in pairs.items()})


def times(found: Interval) -> Interval:
    """Return a factor from its logarithm."""
    return Interval(*np.exp(found).tolist())


def reach_verdict(reach: Mapping[str, Reach], found: Changes, cell: Cell, words: tuple[str, str]) -> str:
    """Return the verdict on a factor of `factors` to the reference, in words for sooner and later."""
    if cell in found:
        return verdict_of(found[cell], *words)
    if not reach[cell.arm].missed:
        return "the reference"
    return "does not reach it" if reach[cell.arm].never else "not significant"


def reach_sentence(how: str, reference: str, found: Changes, compared: int, seeds: int) -> str:
    """Say how many of the compared arms reach the accuracy of the reference in less, and which in least."""
    target = f"the final accuracy of {described(reference)} {how} than it does"
    less = {cell.arm: times(factor) for cell, factor in found.items() if factor.low > 0}
    if not less:
        return f"This run cannot tell whether any encoding reaches {target}.{caveat(seeds)}"
    first = max(less, key=lambda arm: less[arm].estimate)
    factor = f"{first} by a factor of {format_interval(less[first])}"
    return f"{len(less)} of {compared} encodings significantly reach {target}, {factor}.{caveat(seeds)}"
