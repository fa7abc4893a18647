"""Numbers with their uncertainty, from trained runs."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean, stdev
from typing import Any, Literal

import numpy as np

from torchrope.lab.conclusion import Conclusion, Interval
from torchrope.lab.results import Column
from torchrope.lab.statistics import accuracy_interval, bootstrap, conclude, difference_interval, resample
from torchrope.lab.studies.engine.runs import Trained

TOP1 = Column("top1", "Top-1", "%", 1, low="low", high="high")
OVER_SEEDS = Column("spread", "± over seeds", "%", 1)
RESAMPLES = 2000


@dataclass(frozen=True)
class Contrast:
    """How much better one is than another, on the same validation examples.

    Attributes:
        value: In points.
        low, high: Its 95 % interval over examples.
        verdict: "tied" where the interval holds 0.
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
    """Top-1 in percent with its 95 % interval, and its deviation over seeds.

    Args:
        right: Right or not, `(seeds, examples)`.

    Returns:
        top1, low, high, spread: the cells of `TOP1` and `OVER_SEEDS`; spread is None where there is one seed.
    """
    found = accuracy_interval(right)
    deviation = spread(right.mean(axis=1).tolist())
    return {
        **dict(zip(("top1", "low", "high"), (100 * value for value in found), strict=True)),
        "spread": None if deviation is None else 100 * deviation,
    }


def spread(values: Sequence[float]) -> float | None:
    """Standard deviation over seeds; None where there is one seed."""
    return stdev(values) if len(values) > 1 else None


def difference(one: np.ndarray, other: np.ndarray) -> tuple[float, float, float]:
    """How much better one is than another on the same examples, in points, with its 95 % interval.

    Args:
        one, other: Right or not, `(seeds, examples)` each, or what either has lost; numbers of seeds may differ.

    Returns:
        Difference, low, high.
    """
    shares = all(np.isin(each, (0, 1)).all() for each in (one, other))
    if one.shape == other.shape and shares:
        found = difference_interval(one, other)
    elif one.shape == other.shape:
        found = mean_interval(one - other)
    else:
        found = mean_interval((one.mean(axis=0) - other.mean(axis=0))[None])
    value, low, high = (100 * each for each in found)
    return value, low, high


def mean_interval(values: np.ndarray) -> Interval:
    """The mean of values `(seeds, examples)` with its 95 % bootstrap interval."""
    return bootstrap([partial(weighted_mean, each) for each in values], values.shape[1], draws=RESAMPLES)


def weighted_mean(values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """The mean of values `(examples,)` in each draw of weights `(draws, examples)`."""
    return weights @ values / weights.sum(axis=1)


def contrast(one: np.ndarray, other: np.ndarray) -> Contrast:
    """How much better one is than another, and whether that is measurable.

    Args:
        one, other: Right or not, `(seeds, examples)` each, as `difference` takes them.
    """
    return judge(*difference(one, other))


def judge(value: float, low: float, high: float) -> Contrast:
    """A difference with its verdict.

    Args:
        value: In points.
        low, high: Its 95 % interval.
    """
    if not (low > 0 or high < 0):  # nor a measure that is not a number
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
    value, low, high = (100 * each for each in mean_interval(slopes[None]))
    return value, low, high


def resamples(examples: int) -> np.ndarray:
    """How often a bootstrap draws each example, as shares, `(draws, examples)`: shares @ right is top-1 anew."""
    return resample(examples, draws=RESAMPLES) / examples


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


def concluded(rights: Mapping[str, np.ndarray], chance: float = 0.0) -> Conclusion:
    """What right-or-wrong arrays `(seeds, examples)` by name show; of as many seeds as all names have."""
    seeds = min(len(right) for right in rights.values())
    return conclude({name: right[:seeds] for name, right in rights.items()}, chance=chance)


def verdict(conclusion: Conclusion, name: str) -> str:
    """What the conclusion says of one encoding."""
    if name in conclusion.behind:
        return "behind"
    if conclusion.best is None:
        return "nothing learned"
    if conclusion.kind in ("cannot-tell", "position-irrelevant"):
        return "not told apart"
    if name == conclusion.cheapest:
        return "tied, costs less"
    return "best" if name == conclusion.best and not conclusion.tied else "tied"


def at_best(rights: Mapping[str, np.ndarray]) -> tuple[list[str], str]:
    """Who is best, and what the best reaches.

    Args:
        rights: Right or not, `(seeds, examples)`, by name, on the same examples.

    Returns:
        The best and those not told apart from it, and a text as "87.5 % [83.6, 90.8]".
    """
    found = concluded(rights)
    names = [name for name in (found.best, *found.tied) if name is not None]
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
    return "" if seeds > 1 else " One training each: variation between training runs is not in the intervals."


def about_intervals(seeds: int) -> str:
    """What intervals of top-1 are, for the note of a table."""
    if seeds == 1:
        return "Intervals are 95 % over validation examples, for the models that were trained."
    return (
        f"Intervals are 95 % over validation examples and {seeds} trainings, whose standard deviation is beside them."
    )
