"""Estimates from arrays of answers and of other values: differences, verdicts and slopes."""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import combinations
from statistics import fmean, stdev
from typing import Any, TypeVar

import numpy as np

from torchrope_lab.conclusion import NOT_DIFFERENT, Conclusion, Interval
from torchrope_lab.engine.runs import Trained
from torchrope_lab.statistics import BootstrapEstimate, conclude, differences, draw, simultaneous_level

Key = TypeVar("Key")

NOT_COMPARED = "–"
"""The verdict on a single encoding."""


def by_encoding(trained: Iterable[Trained]) -> dict[str, list[Trained]]:
    """Group runs by encoding, in order."""
    groups: dict[str, list[Trained]] = {}
    for each in trained:
        groups.setdefault(each.encoding, []).append(each)
    return groups


def correct(runs: Sequence[Trained]) -> np.ndarray:
    """Stack correct (1) and wrong (0) answers of runs, `(seeds, examples)`."""
    return np.stack([each.correct for each in runs])


def in_percent(shares: Interval) -> Interval:
    """Convert shares of 1 to percent, or differences of shares to points."""
    return Interval(*(100 * each for each in shares))


def spread(values: Sequence[float]) -> float | None:
    """Compute the standard deviation over seeds; None for one seed or none."""
    return stdev(values) if len(values) > 1 else None


def loss(runs: Sequence[Trained]) -> float:
    """Compute the mean validation loss over seeds; NaN if one is not finite."""
    return fmean(each.val_loss if each.val_loss is not None else float("nan") for each in runs)


def last_train_losses(runs: Sequence[Trained]) -> list[float]:
    """Return the training loss of each seed in the last epoch; empty if one is not finite."""
    losses = [each.curve[-1].get("train_loss", float("nan")) if each.curve else float("nan") for each in runs]
    return losses if np.isfinite(losses).all() else []


def best_epoch(runs: Sequence[Trained]) -> float | None:
    """Compute validation top-1 of each run's best epoch in percent, the mean over seeds; None if a curve is missing."""
    tops = [[row["val_top1"] for row in each.curve if np.isfinite(row.get("val_top1", np.nan))] for each in runs]
    return 100 * fmean(map(max, tops)) if all(tops) else None


# ---- differences


def contrasts(pairs: Mapping[Key, tuple[np.ndarray, np.ndarray]]) -> dict[Key, Interval]:
    """Compute accuracy of the first of each pair minus that of the second, in points, with simultaneous intervals."""
    # Arrays are right or wrong, `(seeds, examples)`, all of the same examples; seeds that not all have are left out.
    if not pairs:
        return {}
    seeds = min(len(right) for pair in pairs.values() for right in pair)
    arrays = {str(id(right)): right[:seeds] for pair in pairs.values() for right in pair}
    found = differences(arrays, [(str(id(one)), str(id(other))) for one, other in pairs.values()])
    return dict(zip(pairs, map(in_percent, found), strict=True))


def simultaneous_intervals(found: Mapping[Key, Any]) -> dict[Key, Interval]:
    """Compute simultaneous intervals of estimates from the same draws, which have `drawn` and `interval(level)`."""
    level = simultaneous_level([each.drawn for each in found.values()])
    return {name: each.interval(level) for name, each in found.items()}


def verdict_of(found: Interval, higher: str = "better", lower: str = "worse", neither: str = "not significant") -> str:
    """Return a word for an interval that is above 0, below 0, or contains it."""
    if not (found.low > 0 or found.high < 0):  # also for NaN
        return neither
    return higher if found.low > 0 else lower


def drawn_mean(values: np.ndarray) -> BootstrapEstimate:
    """Compute the mean of values `(seeds, examples)`, on all examples and on bootstrap draws; `(examples,)` of one."""
    values = np.atleast_2d(values)
    return draw([partial(weighted_mean, each) for each in values], values.shape[1])


def weighted_mean(values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Compute the mean of values `(examples,)` in each draw of weights `(draws, examples)`."""
    return weights @ values / weights.sum(axis=1)


def rank(measures: Mapping[Key, BootstrapEstimate]) -> dict[Key, str]:
    """Rank names by mean as "best", `NOT_DIFFERENT` or "behind", by intervals that are simultaneous over all pairs."""
    if len(measures) == 1:
        return dict.fromkeys(measures, NOT_COMPARED)
    ordered = sorted(measures, key=lambda name: (-measures[name].mean, name))
    gaps = simultaneous_intervals({pair: measures[pair[0]] - measures[pair[1]] for pair in combinations(ordered, 2)})
    best, *others = ordered
    verdicts = {name: "behind" if gaps[best, name].low > 0 else NOT_DIFFERENT for name in others}
    return {best: NOT_DIFFERENT if NOT_DIFFERENT in verdicts.values() else "best", **verdicts}


def trend(x: Sequence[float], rights: Sequence[np.ndarray]) -> BootstrapEstimate:
    """Fit the slope of top-1 over x by least squares, in points per unit of x; `rights[i]` are `(seeds, examples)`."""
    # The slope is the mean over examples of each example's slope, so that the bootstrap is paired.
    centred = np.subtract(x, fmean(x))
    weights = centred / np.square(centred).sum()
    seeds = min(len(right) for right in rights)
    slopes = np.sum([weight * right[:seeds] for weight, right in zip(weights, rights, strict=True)], axis=0)
    return drawn_mean(100 * slopes.round(12))  # equal accuracies have a slope of exactly 0


def first_reach(x: np.ndarray, curves: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Interpolate where curves `(draws, points)` first reach targets `(draws,)`; infinite where they do not."""
    # A curve that starts at its target or above has the first x; x increases, `(points,)`.
    reached = curves >= target[:, None]
    after = reached.argmax(axis=1)
    before = np.maximum(after - 1, 0)
    rows = np.arange(len(curves))
    rise = curves[rows, after] - curves[rows, before]
    share = np.divide(target - curves[rows, before], rise, out=np.ones_like(rise), where=after > 0)
    return np.where(reached.any(axis=1), x[before] + share * (x[after] - x[before]), np.inf)


def ends(draws: np.ndarray, level: float = 0.95) -> tuple[float, float]:
    """Return the ends of the percentile interval of draws, some of which may be infinite."""
    tail = round((1 - level) / 2, 12)  # of 1,000 draws 25, not 26
    low, high = np.quantile(draws, (tail, 1 - tail), method="inverted_cdf")
    return float(low), float(high)


# ---- conclusions


def concluded(rights: Mapping[str, np.ndarray], chance: float) -> Conclusion:
    """Conclude from answers `(seeds, examples)` by name, over the seeds that all names have."""
    seeds = min(len(right) for right in rights.values())
    return conclude({name: right[:seeds] for name, right in rights.items()}, chance=chance)


def verdict(conclusion: Conclusion, name: str) -> str:
    """Return the verdict of a conclusion on one encoding, with its condition where it is not about encodings."""
    if len(conclusion.intervals) == 1:
        return NOT_COMPARED
    if conclusion.best is None:
        return "nothing learned"
    if name in conclusion.behind:
        return f"behind{conclusion.condition}"
    if name == conclusion.cheapest:
        return f"{NOT_DIFFERENT}, costs less"
    return f"best{conclusion.condition}" if name == conclusion.best and not conclusion.tied else NOT_DIFFERENT
