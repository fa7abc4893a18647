"""Where accuracy first reaches that of a reference, over epochs or over the amount of data, with bootstrap draws."""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf, isinf

import numpy as np

from torchrope_lab.conclusion import Interval
from torchrope_lab.engine.estimates import ends, first_reach


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
