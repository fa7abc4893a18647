"""Who is best, and which differences are none."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import hypot
from statistics import stdev

import numpy as np

from torchrope.training.evaluate import interval


@dataclass(frozen=True)
class Accuracy:
    """Top-1 of one encoding over seeds.

    Attributes:
        name: The encoding.
        correct: Right or not, `(seeds, examples)`, the same examples in the same order for all encodings.
    """

    name: str
    correct: np.ndarray

    @property
    def mean(self) -> float:
        """Over seeds and examples."""
        return float(self.correct.mean())

    @property
    def spread(self) -> float | None:
        """Standard deviation over seeds; None where there is one seed."""
        return spread(self.correct.mean(axis=1).tolist())


@dataclass(frozen=True)
class Place:
    """A place in the ranking: `verdict` is "best", "tied" or "behind", `gap` the distance to the best."""

    name: str
    rank: int
    gap: float
    verdict: str
    why: str


def spread(values: list[float]) -> float | None:
    """Standard deviation over seeds; None where there is one seed."""
    return stdev(values) if len(values) > 1 else None


def rank(accuracies: list[Accuracy]) -> list[Place]:
    """Order encodings by mean top-1; a difference that seeds or validation examples can explain is a tie.

    A difference to the best is a tie when the bootstrapped 95 % interval of the paired difference over the same
    validation examples holds zero, or when it is smaller than the two spreads over seeds together.
    """
    ordered = sorted(accuracies, key=lambda a: -a.mean)
    best = ordered[0]
    return [Place(best.name, 1, 0.0, "best", "highest mean top-1")] + [
        _place(other, best, position) for position, other in enumerate(ordered[1:], start=2)
    ]


def not_behind(places: Sequence[Place]) -> list[str]:
    """The best, and behind it those that cannot be told apart from it."""
    return [place.name for place in places if place.verdict != "behind"]


def _place(other: Accuracy, best: Accuracy, position: int) -> Place:
    gap = best.mean - other.mean
    points = f"{100 * gap:.1f} points behind"
    low, high = interval(best.correct.mean(axis=0) - other.correct.mean(axis=0))
    if low <= 0:
        why = f"{points}, within the sampling error of the validation set (95 % interval {_points(low, high)})"
        return Place(other.name, position, gap, "tied", why)
    together = hypot(best.spread or 0.0, other.spread or 0.0)
    if gap <= together:
        why = f"{points}, within the spread over seeds of {100 * together:.1f} points"
        return Place(other.name, position, gap, "tied", why)
    return Place(other.name, position, gap, "behind", f"{points} (95 % interval {_points(low, high)})")


def _points(low: float, high: float) -> str:
    return f"{100 * low:.1f} to {100 * high:.1f}"
