"""Numbers with their uncertainty, from trained runs: cells of tables, differences, and answers in a sentence."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import combinations
from statistics import fmean, stdev
from typing import Any

import numpy as np

from torchrope.lab.conclusion import Conclusion, Interval, join_names, one_seed
from torchrope.lab.results import Column
from torchrope.lab.statistics import Drawn, accuracy_interval, conclude, differences, draw, resample, simultaneous
from torchrope.lab.studies.describe import label
from torchrope.lab.studies.engine.runs import Trained

NAMES = (Column("encoding", "Encoding"), Column("name", "Name"))
"""Cells are those of `named`."""
TOP1 = Column("top1", "Top-1", "%", 1, low="low", high="high")
OVER_SEEDS = Column("spread", "± over seeds", "%", 1)
VERDICT = Column("verdict", "Verdict")
RESAMPLES = 2000
HOLM = "An interval excludes 0 where the difference is measurable, at 5 % over all rows (Holm)."
ABOUT_TRAIN_LOSS = (
    "Training loss is the mean over the last epoch's examples as they were trained on: augmented, with dropout and "
    "smoothed or mixed labels where the run has them, before each step; so that it may lie above the validation loss."
)
NONE_POSSIBLE = "No encoding named can be trained with this model."


def by_encoding(trained: Iterable[Trained]) -> dict[str, list[Trained]]:
    """Runs of each encoding, in the order in which encodings come."""
    groups: dict[str, list[Trained]] = {}
    for each in trained:
        groups.setdefault(each.encoding, []).append(each)
    return groups


def correct(runs: Sequence[Trained]) -> np.ndarray:
    """Right or not, `(seeds, examples)`."""
    return np.stack([each.correct for each in runs])


# ---- cells of tables


def named(name: str) -> dict[str, str]:
    """The cells of `NAMES`."""
    return {"encoding": label(name), "name": name}


def with_interval(key: str, title: str, unit: str = "", digits: int | None = None) -> Column:
    """A column whose cells are those of `cells`."""
    return Column(key, title, unit, digits, low=f"{key}_low", high=f"{key}_high")


def cells(key: str, found: Sequence[float | None] | None) -> dict[str, float | None]:
    """An estimate and the ends of its interval under key, key_low and key_high; None for all where there is none."""
    return dict(zip((key, f"{key}_low", f"{key}_high"), found or (None,) * 3, strict=True))


def top1(right: np.ndarray) -> dict[str, Any]:
    """Top-1 in percent with its 95 % interval, and its deviation over seeds.

    Args:
        right: Right or not, `(seeds, examples)`.

    Returns:
        top1, low, high, spread: the cells of `TOP1` and `OVER_SEEDS`; spread is None where there is one seed.
    """
    deviation = spread(right.mean(axis=1).tolist())
    return {
        **dict(zip(("top1", "low", "high"), in_percent(accuracy_interval(right)), strict=True)),
        "spread": None if deviation is None else 100 * deviation,
    }


def in_percent(shares: Interval) -> Interval:
    """Shares of 1 in percent, or differences of shares in points."""
    return Interval(*(100 * each for each in shares))


def spread(values: Sequence[float]) -> float | None:
    """Standard deviation over seeds; None where there is one seed."""
    return stdev(values) if len(values) > 1 else None


def loss(runs: Sequence[Trained]) -> float:
    """Mean validation loss over seeds; NaN where one is not finite."""
    return fmean(each.val_loss if each.val_loss is not None else float("nan") for each in runs)


def last_train_loss(runs: Sequence[Trained]) -> dict[str, float | None]:
    """Mean training loss of the last epoch, over seeds, with its deviation; None where a run has none that is finite.

    Returns:
        train_loss, train_spread: the latter is None where there is one seed.
    """
    losses = [each.curve[-1].get("train_loss", float("nan")) if each.curve else float("nan") for each in runs]
    if not np.isfinite(losses).all():
        return {"train_loss": None, "train_spread": None}
    return {"train_loss": fmean(losses), "train_spread": spread(losses)}


# ---- differences


def contrasts(pairs: Sequence[tuple[np.ndarray, np.ndarray]]) -> list[Interval]:
    """How much more accurate the first of each pair is than the second, in points, at 5 % over all pairs (Holm).

    Args:
        pairs: Right or not, `(seeds, examples)`, all of the same examples; of as many seeds as all have.
    """
    if not pairs:
        return []
    seeds = min(len(right) for pair in pairs for right in pair)
    arrays = {str(id(right)): right[:seeds] for pair in pairs for right in pair}
    found = differences(arrays, [(str(id(one)), str(id(other))) for one, other in pairs])
    return [in_percent(each) for each in found]


def together(intervals: Mapping[str, Callable[[float], Interval]]) -> dict[str, Interval]:
    """Intervals by name, each a function of the level of confidence, at 5 % over all of them (Holm)."""
    if not intervals:
        return {}
    found = simultaneous(lambda level: [interval(level) for interval in intervals.values()])
    return dict(zip(intervals, found, strict=True))


def verdict_of(found: Interval, higher: str = "better", lower: str = "worse", neither: str = "tied") -> str:
    """A word for whether an interval lies above 0, below it, or holds it."""
    if not (found.low > 0 or found.high < 0):  # nor a measure that is not a number
        return neither
    return higher if found.low > 0 else lower


def drawn_mean(values: np.ndarray) -> Drawn:
    """The mean of values `(seeds, examples)`, on all examples and on bootstrap draws of them."""
    return draw([partial(weighted_mean, each) for each in values], values.shape[1], draws=RESAMPLES)


def weighted_mean(values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """The mean of values `(examples,)` in each draw of weights `(draws, examples)`."""
    return weights @ values / weights.sum(axis=1)


def rank(measures: Mapping[str, Drawn]) -> dict[str, str]:
    """Names with "best", "tied" or "behind", the highest mean first; all pairs are tested, at 5 % together (Holm)."""
    ordered = sorted(measures, key=lambda name: (-measures[name].mean, name))
    pairs = {f"{one} {other}": (measures[one] - measures[other]).interval for one, other in combinations(ordered, 2)}
    gaps = together(pairs)
    best = ordered[0]
    behind = {name: gaps[f"{best} {name}"].low > 0 for name in ordered[1:]}
    first = "best" if all(behind.values()) else "tied"
    return {best: first, **{name: "behind" if each else "tied" for name, each in behind.items()}}


def trend(x: Sequence[float], rights: Sequence[np.ndarray]) -> Drawn:
    """The slope of top-1 over x by least squares, in points per unit of x.

    The slope is the mean over examples of each example's own slope, so that the bootstrap keeps their pairing.

    Args:
        x: Where top-1 was measured, two different positions or more.
        rights: Right or not at each x, or differences of them, `(seeds, examples)`, the same examples for all.
    """
    centred = np.subtract(x, fmean(x))
    weights = centred / np.square(centred).sum()
    seeds = min(len(right) for right in rights)
    slopes = np.sum([weight * right[:seeds] for weight, right in zip(weights, rights, strict=True)], axis=0)
    return drawn_mean(100 * slopes.round(12))  # equal accuracies have a slope of exactly 0


def resamples(examples: int) -> np.ndarray:
    """How often a bootstrap draws each example, as shares `(draws, examples)`: shares @ right is top-1 of a draw."""
    return resample(examples, draws=RESAMPLES) / examples


def first_reach(x: np.ndarray, curves: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Where curves first reach a target, interpolated linearly between points; infinite where they never do.

    Args:
        x: Increasing, `(points,)`.
        curves: `(draws, points)`.
        target: `(draws,)`.

    Returns:
        `(draws,)`; the first x where a curve starts at its target or above.
    """
    reached = curves >= target[:, None]
    after = reached.argmax(axis=1)
    before = np.maximum(after - 1, 0)
    every = np.arange(len(curves))
    rise = curves[every, after] - curves[every, before]
    share = np.divide(target - curves[every, before], rise, out=np.ones_like(rise), where=after > 0)
    return np.where(reached.any(axis=1), x[before] + share * (x[after] - x[before]), np.inf)


def ends(draws: np.ndarray, level: float = 0.95) -> tuple[float, float]:
    """The ends of the middle 95 % of draws, or of another level, some of which may be infinite."""
    tail = round((1 - level) / 2, 12)  # of 1,000 draws 25, not 26
    low, high = np.quantile(draws, (tail, 1 - tail), method="inverted_cdf")
    return float(low), float(high)


# ---- conclusions


def concluded(rights: Mapping[str, np.ndarray], chance: float = 0.0) -> Conclusion:
    """What right-or-wrong arrays `(seeds, examples)` by name show; of as many seeds as all names have."""
    seeds = min(len(right) for right in rights.values())
    return conclude({name: right[:seeds] for name, right in rights.items()}, chance=chance)


def verdict(conclusion: Conclusion, name: str) -> str:
    """The verdict of the conclusion on one encoding."""
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
    """The best and those not told apart from it, and the top-1 of the best as "87.5 % [83.6, 90.8]".

    Args:
        rights: Right or not, `(seeds, examples)`, by name, on the same examples.
    """
    found = concluded(rights)
    names = [name for name in (found.best, *found.tied) if name is not None]
    return names, percent(in_percent(accuracy_interval(rights[names[0]])))


# ---- sentences


def percent(found: Sequence[float]) -> str:
    """ "87.5 % [83.6, 90.8]"."""
    return written(found, " %")


def points(found: Sequence[float]) -> str:
    """ "1.2 points [0.3, 2.1]"."""
    return written(found, " points")


def written(found: Sequence[float], unit: str = "", digits: int = 1) -> str:
    """An estimate with the ends of its interval: "1.2 rad [0.3, 2.1]"."""
    value, low, high = (f"{each:.{digits}f}" for each in found)
    return f"{value}{unit} [{low}, {high}]"


def tied_with(others: Sequence[str]) -> str:
    """Whom the best leads without a measurable difference: ", tied with a, b, c and 4 others"; empty for nobody."""
    return f", tied with {join_names(others)}" if others else ""


def change_sentence(
    what: str, measure: str, moved: Mapping[str, Interval], seeds: int, unit: str = " points", digits: int = 1
) -> str:
    """In how many cases something measurably raises or lowers a measure, and its largest effect.

    Args:
        what: Is done: "sharing across heads or layers".
        measure: What it changes: "accuracy".
        moved: The change by case, at 5 % over all of them.
        seeds: Trainings of each case.
        unit, digits: Of the change.
    """
    if not moved:
        return f"There is nothing to compare: {what} leaves one case alone."
    raised, lowered = (sum(each) for each in zip(*((m.low > 0, m.high < 0) for m in moved.values()), strict=True))
    measurable = {name: m for name, m in moved.items() if m.low > 0 or m.high < 0} or moved
    name = max(measurable, key=lambda name: abs(measurable[name].estimate))
    largest = f"the largest change is {written(moved[name], unit, digits)}, with {name}"
    if not raised and not lowered:
        return f"This run cannot tell whether {what} changes {measure}: {largest}.{one_seed(seeds)}"
    counts = f"raises {measure} in {raised} of {len(moved)} cases and lowers it in {lowered}"
    return f"{what[0].upper()}{what[1:]} measurably {counts}; {largest}.{one_seed(seeds)}"


def about_intervals(seeds: int) -> str:
    """What intervals of top-1 are, for the note of a table."""
    if seeds == 1:
        return "Intervals are 95 % over validation examples, for the models that were trained."
    return f"Intervals are 95 % over validation examples and {seeds} trainings; their standard deviation is given."
