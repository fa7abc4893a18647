"""Where accuracy first reaches that of a reference, over epochs or over the amount of data, with bootstrap draws."""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf, isinf

import numpy as np

from torchrope_lab.conclusion import Interval
from torchrope_lab.studies.engine.estimates import ends, first_reach


@dataclass(frozen=True)
class Reach:
    """Point at which a curve first reaches a target, or a function of it; infinite if it does not."""

    measured: np.ndarray  # `(1,)`
    draws: np.ndarray  # the point in every bootstrap draw, `(draws,)`

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
        return isinf(ends(self.draws)[0])

    def map(self, function: Callable[[np.ndarray], np.ndarray]) -> "Reach":
        """Apply a function to the measured point and to all draws."""
        return Reach(function(self.measured), function(self.draws))

    def interval(self, level: float = 0.95, least: float = -inf, most: float = inf) -> Interval:
        """Return the measured value with its percentile interval, whose ends are clipped to least and most."""
        low, high = (min(max(end, least), most) for end in ends(self.draws, level))
        return Interval(float(self.measured[0]), low, high)

    def log_ratio(self, other: "Reach", level: float = 0.95) -> Interval:
        """Return the logarithm of another's point over this one, 0 in draws in which neither reaches the target."""
        neither = np.isinf(self.draws) & np.isinf(other.draws)
        ratios = np.divide(other.draws, self.draws, out=np.ones_like(self.draws), where=~neither)
        with np.errstate(divide="ignore"):
            low, high = ends(np.log(ratios), level)
        return Interval(float(np.log(other.measured[0] / self.measured[0])), low, high)
