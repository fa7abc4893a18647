"""Estimates with intervals from trained runs: cells of tables, differences, verdicts and answers."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import combinations
from statistics import fmean, stdev
from typing import Any, TypeVar

import numpy as np

from torchrope_lab.conclusion import NOT_DIFFERENT, Conclusion, Interval, caveat, join_names, signed
from torchrope_lab.engine.descriptions import label
from torchrope_lab.engine.runs import Trained
from torchrope_lab.results import Column, Row, Table
from torchrope_lab.statistics import (
    BootstrapEstimate,
    accuracy_interval,
    conclude,
    differences,
    draw,
    simultaneous_level,
)

Key = TypeVar("Key")

NAMES = (Column("encoding", "Encoding"), Column("name", "Name"))
"""Columns of an encoding: its title and its name."""
TOP1 = Column("top1", "Top-1", "%", 1, low="low", high="high")
OVER_SEEDS = Column("spread", "± over seeds", "%", 1)
VERDICT = Column("verdict", "Verdict")
NOT_COMPARED = "–"
"""The verdict on a single encoding."""
SIMULTANEOUS = (
    "Intervals are simultaneous over all rows (max-T, nominally 95 %): a difference is significant if and only if its "
    "interval excludes 0."
)
ABOUT_TRAIN_LOSS = (
    "Training loss is the mean over the last epoch's examples before each step, with augmentation, dropout and "
    "smoothed or mixed labels if the run has them, so that it may be above the validation loss."
)
NONE_POSSIBLE = "None of the encodings can be trained with this model."


def by_encoding(trained: Iterable[Trained]) -> dict[str, list[Trained]]:
    """Group runs by encoding, in order."""
    groups: dict[str, list[Trained]] = {}
    for each in trained:
        groups.setdefault(each.encoding, []).append(each)
    return groups


def correct(runs: Sequence[Trained]) -> np.ndarray:
    """Stack correct (1) and wrong (0) answers of runs, `(seeds, examples)`."""
    return np.stack([each.correct for each in runs])


# ---- cells of tables


def with_interval(key: str, title: str, unit: str = "", digits: int | None = None) -> Column:
    """Return a column for the cells of `cells`."""
    return Column(key, title, unit, digits, low=f"{key}_low", high=f"{key}_high")


def cells(key: str, found: Sequence[float | None] | None) -> dict[str, float | None]:
    """Return an estimate and the ends of its interval as key, key_low and key_high; all None without an estimate."""
    return dict(zip((key, f"{key}_low", f"{key}_high"), found or (None,) * 3, strict=True))


Columns = Sequence[tuple[Column, Callable[[Any], Any]]]
"""Columns of a table, each with the function that computes its value, or its estimate with an interval, for a row."""


def name_columns(name_of: Callable[[Any], str] = str) -> Columns:
    """Return the columns `NAMES` of items, from a function that returns the encoding of an item."""
    return (NAMES[0], lambda item: label(name_of(item))), (NAMES[1], name_of)


def table_of(
    title: str, columns: Columns, items: Iterable[Any], note: str = "", keys: Callable[[Any], Row] = lambda _: {}
) -> Table:
    """Build a table with a row for each item; `keys` returns values of its row without a column."""
    rows = [{**keys(item), **row_of(columns, item)} for item in items]
    return Table(title, [column for column, _ in columns], rows, note=note)


def row_of(columns: Columns, item: Any) -> dict[str, Any]:
    """Compute the row of one item."""
    row: dict[str, Any] = {}
    for column, value in columns:
        keys = [key for key in (column.key, column.low, column.high) if key]
        values = value(item) or (None, None, None) if column.low else [value(item)]
        row |= dict(zip(keys, values, strict=True))
    return row


def mean_column(
    key: str, title: str, unit: str, digits: int, values: Callable[[Any], np.ndarray]
) -> tuple[Column, Callable[[Any], Any]]:
    """Return a column of the mean of values `(seeds, examples)` or `(examples,)` of an item, with its interval."""
    return with_interval(key, title, unit, digits), lambda item: drawn_mean(values(item)).interval()


def estimate_in(row: Row, key: str) -> list[Any]:
    """Return an estimate in a row and the ends of its interval."""
    return [row[key], row[f"{key}_low"], row[f"{key}_high"]]


def top1(right: np.ndarray) -> Interval:
    """Compute top-1 in percent with its 95 % interval, from right or wrong `(seeds, examples)`."""
    return in_percent(accuracy_interval(right))


def top1_columns(right_of: Callable[[Any], np.ndarray]) -> Columns:
    """Return columns of top-1 and of its standard deviation over seeds, from a function that returns answers."""

    def deviation(item: Any) -> float | None:
        over_seeds = spread(right_of(item).mean(axis=1).tolist())
        return None if over_seeds is None else 100 * over_seeds

    return (TOP1, lambda item: top1(right_of(item))), (OVER_SEEDS, deviation)


def top1_cells(right: np.ndarray) -> dict[str, Any]:
    """Return the cells of `top1_columns`: top1, low, high and spread, which is None for one seed."""
    return row_of(top1_columns(np.asarray), right)


def in_percent(shares: Interval) -> Interval:
    """Convert shares of 1 to percent, or differences of shares to points."""
    return Interval(*(100 * each for each in shares))


def spread(values: Sequence[float]) -> float | None:
    """Compute the standard deviation over seeds; None for one seed."""
    return stdev(values) if len(values) > 1 else None


def loss(runs: Sequence[Trained]) -> float:
    """Compute the mean validation loss over seeds; NaN if one is not finite."""
    return fmean(each.val_loss if each.val_loss is not None else float("nan") for each in runs)


def last_train_loss(runs: Sequence[Trained]) -> dict[str, float | None]:
    """Return `train_loss` and `train_spread`: mean and standard deviation over seeds of the loss in the last epoch."""
    # Both are None if a loss is not finite, the spread also for one seed.
    losses = [each.curve[-1].get("train_loss", float("nan")) if each.curve else float("nan") for each in runs]
    if not np.isfinite(losses).all():
        return {"train_loss": None, "train_spread": None}
    return {"train_loss": fmean(losses), "train_spread": spread(losses)}


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


def rank(measures: Mapping[str, BootstrapEstimate]) -> dict[str, str]:
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


def drawn_means(values: Sequence[np.ndarray]) -> np.ndarray:
    """Compute means `(draws, rows)` in draws of examples and seeds, of rows `(seeds, examples)` or `(examples,)`."""
    return np.stack([drawn_mean(each).drawn for each in values], axis=1)


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


# ---- sentences


def percent(found: Sequence[float]) -> str:
    """Format an estimate in percent with its interval: "87.5 % [83.6, 90.8]"."""
    return format_interval(found, " %")


def points(found: Sequence[float]) -> str:
    """Format an estimate in points with its interval: "1.2 points [0.3, 2.1]"."""
    return format_interval(found, " points")


def format_interval(found: Sequence[float], unit: str = "", digits: int = 1) -> str:
    """Format an estimate with its interval: "1.2 rad [0.3, 2.1]"."""
    value, low, high = (signed(each, digits) for each in found)
    return f"{value}{unit} [{low}, {high}]"


def not_learned(who: str, chance: float) -> str:
    """Say that an encoding, or all, learned nothing; it then says nothing when others are as accurate."""
    share = f"{100 * chance:.1f} %"
    return f"{who} is not significantly better than always predicting the most frequent class ({share})"


def tied_with(others: Sequence[str]) -> str:
    """Return ", not significantly different from a, b, c and 4 others"; empty without others."""
    return f", {NOT_DIFFERENT} from {join_names(others)}" if others else ""


def change_sentence(
    what: str, measure: str, moved: Mapping[str, Interval], seeds: int, unit: str = " points", digits: int = 1
) -> str:
    """Describe in how many cases an intervention significantly changes a measure, and its largest effect."""
    # `what` and `measure` are words, as in "sharing across heads or layers" and "accuracy".
    if not moved:
        return f"There is nothing to compare for {what}: only one case was trained."
    raised, lowered = (sum(each) for each in zip(*((m.low > 0, m.high < 0) for m in moved.values()), strict=True))
    significant = {name: m for name, m in moved.items() if m.low > 0 or m.high < 0} or moved
    name = max(significant, key=lambda name: abs(significant[name].estimate))
    largest = f"the largest change is {format_interval(moved[name], unit, digits)}, with {name}"
    if not raised and not lowered:
        return f"This run cannot tell whether {what} changes {measure}: {largest}.{caveat(seeds)}"
    counts = f"raises {measure} in {raised} of {len(moved)} cases and lowers it in {lowered}"
    return f"{what[0].upper()}{what[1:]} significantly {counts}; {largest}.{caveat(seeds)}"


def about_intervals(seeds: int) -> str:
    """Describe the intervals of top-1, for the note of a table."""
    if seeds == 1:
        return "Intervals are 95 % over validation examples, for the models that were trained."
    return f"Intervals are 95 % over validation examples and {seeds} seeds; ± is the standard deviation over seeds."
