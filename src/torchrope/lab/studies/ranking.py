"""Who is best, and which differences are none."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import hypot
from statistics import stdev
from typing import Any, Protocol

import numpy as np

from torchrope.lab.training.evaluate import interval


class Measured(Protocol):
    """What one encoding reaches, as a share of 1, and how much of a difference to another luck explains."""

    @property
    def name(self) -> str:
        """The encoding."""

    @property
    def measure(self) -> str:
        """What is measured, for people."""

    @property
    def mean(self) -> float:
        """Over seeds."""

    @property
    def spread(self) -> float | None:
        """Standard deviation over seeds; None where there is one seed."""

    def ahead_of(self, other: Any) -> tuple[float, float]:
        """The ends of the 95 % interval of the difference on the same validation examples."""


@dataclass(frozen=True)
class Accuracy:
    """Top-1 of one encoding over seeds.

    Attributes:
        name: The encoding.
        correct: Right or not, `(seeds, examples)`, the same examples in the same order for all encodings.
    """

    name: str
    correct: np.ndarray
    measure: str = "top-1"

    @property
    def mean(self) -> float:
        """Over seeds and examples."""
        return float(self.correct.mean())

    @property
    def spread(self) -> float | None:
        """Standard deviation over seeds; None where there is one seed."""
        return spread(self.correct.mean(axis=1).tolist())

    def ahead_of(self, other: "Accuracy") -> tuple[float, float]:
        """The ends of the 95 % interval of the difference on the same validation examples."""
        return interval(self.correct.mean(axis=0) - other.correct.mean(axis=0))


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


def rank(measured: Sequence[Measured]) -> list[Place]:
    """Order encodings by their mean; a difference that seeds or validation examples can explain is a tie.

    A difference to the best is a tie when the bootstrapped 95 % interval of the paired difference over the same
    validation examples holds zero, or when it is smaller than the two spreads over seeds together.
    """
    ordered = sorted(measured, key=lambda each: -each.mean)
    best = ordered[0]
    return [Place(best.name, 1, 0.0, "best", f"highest mean {best.measure}")] + [
        _place(other, best, position) for position, other in enumerate(ordered[1:], start=2)
    ]


def not_behind(places: Sequence[Place]) -> list[str]:
    """The best, and behind it those that cannot be told apart from it."""
    return [place.name for place in places if place.verdict != "behind"]


def _place(other: Measured, best: Measured, position: int) -> Place:
    gap = best.mean - other.mean
    points = f"{100 * gap:.1f} points behind"
    low, high = best.ahead_of(other)
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
