"""Numbers with their uncertainty, from trained runs."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import hypot
from statistics import fmean
from typing import Any, Literal

import numpy as np

from torchrope.lab.studies.engine.results import Column
from torchrope.lab.studies.engine.runs import Trained
from torchrope.lab.studies.ranking import Accuracy, Place, not_behind, rank, spread
from torchrope.lab.training.evaluate import interval

TOP1 = Column("top1", "Top-1", "%", 1, low="low", high="high")
OVER_SEEDS = Column("spread", "± over seeds", "%", 1)
RESAMPLES = 2000
ANOTHER_SEED = 1
"""Of draws beside those of `interval`."""


@dataclass(frozen=True)
class Contrast:
    """How much better one is than another, on the same validation examples.

    Attributes:
        value: In points.
        low, high: Its 95 % interval over examples.
        verdict: "tied" where the interval holds 0, or where the spreads over seeds explain the difference.
    """

    value: float
    low: float
    high: float
    verdict: Literal["better", "worse", "tied"]

    def __str__(self) -> str:
        return points(self.value, self.low, self.high)


def by_encoding(trained: Iterable[Trained]) -> dict[str, list[Trained]]:
    """Runs of each encoding, in the order in which encodings come."""
    groups: dict[str, list[Trained]] = {}
    for each in trained:
        groups.setdefault(each.encoding, []).append(each)
    return groups


def correct(runs: Sequence[Trained]) -> np.ndarray:
    """Right or not, `(seeds, examples)`."""
    return np.stack([each.correct for each in runs])


def top1(right: np.ndarray) -> dict[str, Any]:
    """Top-1 in percent with its 95 % interval over validation examples, and its deviation over seeds.

    Args:
        right: Right or not, `(seeds, examples)`.

    Returns:
        top1, low, high, spread: the cells of `TOP1` and `OVER_SEEDS`; spread is None where there is one seed.
    """
    low, high = interval(right.mean(axis=0))
    deviation = spread(right.mean(axis=1).tolist())
    return {
        "top1": 100 * float(right.mean()),
        "low": 100 * low,
        "high": 100 * high,
        "spread": None if deviation is None else 100 * deviation,
    }


def difference(one: np.ndarray, other: np.ndarray) -> tuple[float, float, float]:
    """How much better one is than another on the same examples, in points, with its 95 % interval.

    Args:
        one, other: Right or not, `(seeds, examples)` each; numbers of seeds may differ.

    Returns:
        Difference, low, high.
    """
    paired = one.mean(axis=0) - other.mean(axis=0)
    low, high = interval(paired)
    return 100 * float(paired.mean()), 100 * low, 100 * high


def contrast(one: np.ndarray, other: np.ndarray) -> Contrast:
    """How much better one is than another, and whether that can be told from luck.

    Args:
        one, other: Right or not, `(seeds, examples)` each, as `difference` takes them.
    """
    value, low, high = difference(one, other)
    return judge(value, low, high, [100 * (spread(each.mean(axis=1).tolist()) or 0.0) for each in (one, other)])


def judge(value: float, low: float, high: float, spreads: Sequence[float]) -> Contrast:
    """A difference with its verdict.

    Args:
        value: In points.
        low, high: Its 95 % interval.
        spreads: Deviations over seeds of both, in points.
    """
    if not (low > 0 or high < 0) or abs(value) <= hypot(*spreads):
        return Contrast(value, low, high, "tied")
    return Contrast(value, low, high, "better" if value > 0 else "worse")


def trend(x: Sequence[float], rights: Sequence[np.ndarray]) -> tuple[float, float, float]:
    """The slope of top-1 over x by least squares, in points per unit of x, with its 95 % interval over examples.

    The slope is the mean over examples of each example's own slope, so that the bootstrap keeps their pairing.

    Args:
        x: Where top-1 was measured, two different places or more.
        rights: Right or not at each x, `(seeds, examples)`, the same examples everywhere.

    Returns:
        Slope, low, high.
    """
    centred = np.subtract(x, fmean(x))
    weights = centred / np.square(centred).sum()
    terms = [weight * right.mean(axis=0) for weight, right in zip(weights, rights, strict=True)]
    slopes = np.sum(terms, axis=0).round(12)  # a level line is level
    low, high = interval(slopes)
    return 100 * float(np.mean(slopes)), 100 * low, 100 * high


def resamples(examples: int, draws: int = RESAMPLES) -> np.ndarray:
    """How often a bootstrap draws each example, as shares, `(draws, examples)`: shares @ right is top-1 anew."""
    counts = np.random.default_rng(ANOTHER_SEED).multinomial(examples, np.full(examples, 1 / examples), draws)
    return counts / examples


def first_reach(x: np.ndarray, curves: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Where curves first reach a target, straight between points; infinite where they never do.

    Args:
        x: Increasing, `(points,)`.
        curves: `(draws, points)`.
        target: `(draws,)`.

    Returns:
        `(draws,)`; the first x where a curve starts at its target or above.
    """
    there = curves >= target[:, None]
    after = there.argmax(axis=1)
    before = np.maximum(after - 1, 0)
    every = np.arange(len(curves))
    rise = curves[every, after] - curves[every, before]
    share = np.divide(target - curves[every, before], rise, out=np.ones_like(rise), where=after > 0)
    return np.where(there.any(axis=1), x[before] + share * (x[after] - x[before]), np.inf)


def ends(draws: np.ndarray) -> tuple[float, float]:
    """The ends of the middle 95 % of draws, some of which may be infinite."""
    low, high = np.quantile(draws, (0.025, 0.975), method="inverted_cdf")
    return float(low), float(high)


def loss(runs: Sequence[Trained]) -> float:
    """Mean validation loss over seeds; NaN where one is not finite."""
    return fmean(each.val_loss if each.val_loss is not None else float("nan") for each in runs)


def places(groups: dict[str, list[Trained]]) -> list[Place]:
    """Encodings from best to worst; differences that seeds or examples can explain are ties."""
    return rank([Accuracy(name, correct(runs)) for name, runs in groups.items()])


def at_best(rights: Mapping[str, np.ndarray]) -> tuple[list[str], str]:
    """Who is best, and what the best reaches.

    Args:
        rights: Right or not, `(seeds, examples)`, by name, on the same examples.

    Returns:
        The best and those not told apart from it, and a text as "87.5 % [83.6, 90.8]".
    """
    names = not_behind(rank([Accuracy(name, right) for name, right in rights.items()]))
    return names, reached(rights[names[0]])


def reached(right: np.ndarray) -> str:
    """Top-1 of `(seeds, examples)` in words: "87.5 % [83.6, 90.8]"."""
    cells = top1(right)
    return percent(cells["top1"], cells["low"], cells["high"])


def percent(value: float, low: float, high: float) -> str:
    """ "87.5 % [83.6, 90.8]"."""
    return f"{value:.1f} % [{low:.1f}, {high:.1f}]"


def points(value: float, low: float, high: float) -> str:
    """ "1.2 points [0.3, 2.1]"."""
    return f"{value:.1f} points [{low:.1f}, {high:.1f}]"


def not_told_apart(equals: Sequence[str]) -> str:
    """Which encodings the first one leads without a measurable difference, as the end of a sentence."""
    return f"; not told apart from it: {told(equals[1:])}" if equals[1:] else "; all others are measurably behind"


def told(names: Sequence[str]) -> str:
    """ "a", "a and b", "a, b and c"."""
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))


def caveat(seeds: int) -> str:
    """What intervals leave out, to end an answer with."""
    return "" if seeds > 1 else " One training each: luck of the seed is not in the intervals."


def about_intervals(seeds: int) -> str:
    """What intervals of top-1 are, for the note of a table."""
    over = "" if seeds == 1 else f", and the standard deviation over {seeds} seeds beside it"
    return f"Intervals hold 95 % of 2,000 bootstrap resamples of the validation examples{over}."
