"""Tables and figures of a leaderboard, each a short specification on the table of all answers."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from pathlib import Path

import numpy as np

from torchrope_lab.conclusion import BASELINE, STILL_RISING, Interval, signed
from torchrope_lab.files import read_mapping
from torchrope_lab.leaderboard.answers import COMMON, TITLES, Answers, Contrast, Ranking
from torchrope_lab.leaderboard.entry import Condition, DataSetResults
from torchrope_lab.results import Axis, Column, Figure, Row, Table
from torchrope_lab.schema import build
from torchrope_lab.statistics import accuracy_interval
from torchrope_lab.studies.engine.estimates import (
    VERDICT,
    Columns,
    about_intervals,
    cells,
    in_percent,
    name_columns,
    table_of,
    verdict_of,
    with_interval,
)

NAMED = name_columns()
"""Columns of a table whose items are names of encodings."""
SIMULTANEOUS = (
    "Intervals are simultaneous 95 % intervals: Bonferroni's, over all differences of the table, in which encodings "
    "that are the same function on a data set count once. A difference is significant if its interval excludes 0."
)
RULE = (
    "A mean over data sets counts every set alike; differences are paired on the same examples and seeds of each set. "
    "These data sets only: variation between data sets is not included."
)
SAME, OPPOSITE, INCONCLUSIVE = "same sign here", "opposite sign here", "inconclusive"
_SMALL = "no: small models, trained from scratch for a few epochs on small sets"


# ---- rankings


def table_of_ranks(answers: Answers, ranking: Ranking) -> Table:
    """Build the table of means, gains, gaps, numbers of better and worse encodings, and costs."""
    pairs, gained = ranking.pairs, with_interval("gain", "Gain over none", "points", 1)
    columns: Columns = [
        *NAMED,
        (Column("mean", "Mean top-1", "%", 1), lambda name: ranking.means[name]),
        *([(gained, lambda name: pairs.get((name, BASELINE)))] if BASELINE in ranking.order else []),
        (with_interval("gap", "Behind the highest", "points", 1), lambda name: pairs.get((ranking.best, name))),
        (Column("better", "Significantly better than it", digits=0), lambda name: len(ranking.better(name))),
        (Column("worse", "Significantly worse than it", digits=0), lambda name: len(ranking.worse(name))),
        (Column("step", "Step time, × none", digits=2), lambda name: step_of(answers, name)),
    ]
    note = (
        f"{RULE} {SIMULTANEOUS} Beside each encoding is how many of the {len(ranking.order)} are significantly better "
        "and worse; its order among the others is unknown. Step time: the median of the data sets' medians. Encodings "
        "that a data set cannot have, such as a learned table for points, are in the other tables."
    )
    return table_of("Means over all data sets", columns, ranking.order, note)


def figure_of_ranks(ranking: Ranking) -> Figure:
    """Build the figure of gaps to the highest mean, one row per encoding."""
    best = ranking.best
    return Figure(
        name="behind-the-highest",
        kind="points",
        title=f"Behind the highest, mean over {len(ranking.sets)} data sets",
        alt=f"Points of top-1 behind {best}, the mean over data sets, one row per encoding, with its interval.",
        x=Axis("gap", f"Behind {best}, the highest", "points"),
        y=Axis("name", "Encoding", scale="category"),
        rows=[
            {"name": name, **cells("gap", ranking.pairs.get((best, name), (0.0, 0.0, 0.0)))} for name in ranking.order
        ],
        low="gap_low",
        high="gap_high",
        caption=SIMULTANEOUS,
    )


def figure_of_costs(answers: Answers, ranking: Ranking) -> Figure:
    """Build the figure of mean top-1 by step time."""
    steps = {name: step_of(answers, name) for name in ranking.order}
    rows: list[Row] = [
        {"name": name, "step": step, "mean": ranking.means[name]} for name, step in steps.items() if step is not None
    ]
    return Figure(
        name="top1-by-cost",
        kind="points",
        title="Accuracy and cost",
        alt="Mean top-1 over data sets by the time of a training step relative to none.",
        x=Axis("step", "Step time", "× none"),
        y=Axis("mean", "Mean top-1", "%"),
        rows=rows,
        series="name",
    )


def step_of(answers: Answers, name: str) -> float | None:
    """Return the time of a training step relative to "none", the median of the data sets' medians."""
    steps = [results.encodings[name].steps for results in answers.sets.values() if name in results.encodings]
    medians = [float(np.median(each)) for each in steps if each]
    return float(np.median(medians)) if medians else None


# ---- data sets and conditions


def table_of_data(answers: Answers) -> Table:
    """Build the table of data sets: how long the models were trained, and how the learning rate was chosen."""
    columns: Columns = [
        (Column("set", "Data set"), lambda results: results.data.title),
        (Column("axes", "Axes"), axes_of),
        (Column("train", "Training examples", digits=0), lambda results: results.data.train),
        (Column("epochs", "Epochs", digits=0), lambda results: results.epochs),
        (Column("rising", "Curves that still rise"), lambda results: rising([results]) or "not recorded"),
        (Column("rate", "Learning rate", "× default", 2), lambda results: results.rate),
        (Column("tried", "Rates tried"), lambda results: ", ".join(f"{rate:g}" for rate in _tried(results))),
        (Column("edge", "At the edge of those"), edge_of),
        (Column("chance", "Best constant answer", "%", 1), lambda results: 100 * results.chance),
    ]
    note = (
        f"A curve still rises if validation accuracy, the mean over seeds, rose by more than {100 * STILL_RISING:g} "
        "point over the last fifth of epochs: the encodings are then compared before the end of training."
    )
    return table_of("Data sets and training", columns, answers.sets.values(), note)


def rising(sets: Iterable[DataSetResults]) -> str:
    """Return how many of the recorded learning curves still rise when training ends: "3 of 32"; empty for none."""
    rises = [each.rise for results in sets for each in results.encodings.values() if each.rise is not None]
    return f"{sum(rise > STILL_RISING for rise in rises)} of {len(rises)}" if rises else ""


def edge_of(results: DataSetResults) -> str:
    """Return "highest" or "lowest" if the learning rate of a data set is that of the rates tried; otherwise "no"."""
    tried = _tried(results)
    if len(tried) < 2 or results.rate not in (tried[0], tried[-1]):
        return "no"
    return "lowest" if results.rate == tried[0] else "highest"


def _tried(results: DataSetResults) -> list[float]:
    return sorted({rate for each in results.encodings.values() for rate in each.tuned})


def axes_of(results: DataSetResults) -> str:
    """Return the names of the axes of a data set, such as "height × width"."""
    return " × ".join(results.data.axes)


def table_of_sets(answers: Answers) -> Table:
    """Build the table of top-1 by encoding and data set."""

    def top1(data_set: str, name: str) -> Interval | None:
        right = answers.right[data_set, "trained"].get(name)
        return None if right is None else in_percent(accuracy_interval(right))

    def title(results: DataSetResults) -> str:
        axes = len(results.data.axes)
        return f"{results.data.title}, {axes} {'axis' if axes == 1 else 'axes'}"

    of_sets = [(with_interval(at, title(results), "%", 1), partial(top1, at)) for at, results in answers.sets.items()]
    return table_of("Top-1 on each data set", [*NAMED, *of_sets], answers.names, about_intervals(answers.seeds))


def table_of_conditions(answers: Answers, names: Sequence[str]) -> Table:
    """Build the table of validation loss, and of top-1 under other conditions than training's."""

    def loss(name: str) -> float | None:
        each_set = [results.encodings[name].losses for results in answers.sets.values() if name in results.encodings]
        losses = [loss for losses in each_set for loss in losses]
        return None if None in losses else float(np.mean(losses))  # type: ignore[arg-type]

    def mean(condition: Condition, name: str) -> float | None:
        return answers.mean(name, answers.on(condition), condition)

    others: Columns = [
        (Column(each, title, "%", 1), partial(mean, each))
        for each, title in TITLES.items()
        if each != "trained" and answers.on(each)
    ]
    columns = [*NAMED, (Column("loss", "Validation loss, as trained", digits=2), loss), *others]
    note = (
        "Means over the data sets that have it, otherwise top-1; other sizes are those of data on a lattice, without "
        "more training. Loss is cross entropy in nats."
    )
    return table_of("Under other conditions", columns, names, note)


# ---- gains over a model without positions


def table_of_gains(answers: Answers, names: Sequence[str]) -> Table:
    """Build the table of gains over "none" by the axes of the data, and with fewer examples.

    A cell is empty if the encoding was not measured on all data sets of its column; there are no rows without "none" on
    all data sets.
    """
    everywhere = [*answers.sets]
    names = names if answers.on("trained", BASELINE) == everywhere else []
    groups: dict[str, tuple[list[str], Condition]] = {
        axes: ([name for name in everywhere if axes_of(answers.sets[name]) == axes], "trained")
        for axes in map(axes_of, answers.sets.values())
    }
    if answers.on("small") == everywhere:
        groups[TITLES["small"]] = everywhere, "small"
    contrasts = {
        (title, name): Contrast(name, BASELINE, sets, condition)
        for title, (sets, condition) in groups.items()
        for name in names
        if {*sets} <= {*answers.on(condition, name, BASELINE)}
    }
    gains = dict(zip(contrasts, answers.differences(list(contrasts.values())), strict=True))

    def gain(title: str, name: str) -> Interval | None:
        return gains.get((title, name))

    of_groups: Columns = [
        (with_interval(f"gain{at}", title, "points", 1), partial(gain, title)) for at, title in enumerate(groups)
    ]
    title = "Gain over none, by the axes of the data and with fewer examples"
    return table_of(title, [*NAMED, *of_groups], names, SIMULTANEOUS)


def figure_of_gains(answers: Answers, names: Sequence[str]) -> Figure:
    """Build the map of gains over "none" by encoding and data set."""
    rows: list[Row] = [
        {"set": results.data.title, "name": name, "gain": round(lead, 2)}
        for results in answers.sets.values()
        for name in names
        if (lead := answers.lead(name, BASELINE, results.name)) is not None
    ]
    return Figure(
        name="gain-by-set",
        kind="cells",
        title="Gain over none on each data set",
        alt="Top-1 of each encoding minus that of the model without positions, rows: encodings, columns: data sets.",
        x=Axis("set", "Data set", scale="category"),
        y=Axis("name", "Encoding", scale="category"),
        colour=Axis("gain", "Gain over none", "points"),
        rows=rows,
        caption="Estimates without intervals; those are in the tables.",
    )


# ---- claims of papers


@dataclass(frozen=True)
class Claim:
    """A paper's statement that one encoding is more accurate than another; `claims.yaml` describes its fields."""

    paper: str
    table: str
    ahead: str
    behind: str
    points: float | None
    axes: tuple[int, ...] = (2,)
    condition: Condition = "trained"
    limits: str = ""


def read_claims() -> list[Claim]:
    """Read `claims.yaml`."""
    stored = read_mapping(Path(__file__).with_name("claims.yaml"), "claims")
    return [build(Claim, each, "claim") for each in stored["claims"]]


def table_of_claims(answers: Answers) -> Table:
    """Build the table of the claims that can be compared on these data sets."""
    contrasts = {}
    for claim in read_claims():
        on = answers.on(claim.condition, claim.ahead, claim.behind)
        if about := [name for name in on if len(answers.sets[name].data.axes) in claim.axes]:
            contrasts[claim] = Contrast(claim.ahead, claim.behind, about, claim.condition)
    measured = dict(zip(contrasts, answers.differences(list(contrasts.values())), strict=True))
    by_set = {
        claim: {name: answers.lead(one, other, name, condition) or 0.0 for name in sets}
        for claim, (one, other, sets, condition) in contrasts.items()
    }

    def verdict(claim: Claim) -> str:
        one_sign = len({*np.sign([*by_set[claim].values()])}) == 1
        return verdict_of(measured[claim], SAME, OPPOSITE, INCONCLUSIVE) if one_sign else INCONCLUSIVE

    def each_set(claim: Claim) -> str:
        return ", ".join(f"{name} {signed(lead)}" for name, lead in by_set[claim].items())

    columns: Columns = [
        (Column("claim", "Claim"), lambda claim: f"{claim.ahead} is ahead of {claim.behind}"),
        (Column("source", "Source"), lambda claim: f"{claim.paper}, {claim.table}"),
        (Column("condition", "Condition"), lambda claim: TITLES[claim.condition]),
        (Column("reported", "Reported", "points", 1), lambda claim: claim.points),
        (with_interval("gain", "Measured, mean over sets", "points", 1), measured.get),
        (Column("by_set", "On each data set, points"), each_set),
        (VERDICT, verdict),
        (Column("comparable", "Comparable?"), lambda claim: "; ".join(filter(None, (_SMALL, claim.limits)))),
    ]
    note = (
        f"{SIMULTANEOUS} {SAME.capitalize()}, {OPPOSITE}: the mean is significantly above or below 0, and the "
        "estimates on all data sets have one sign. No claim is confirmed or refuted by this."
    )
    return table_of("Claims of the papers", columns, contrasts, note)


# ---- learning rates of their own


def table_of_own_rates(answers: Answers) -> Table:
    """Build the table of gains at learning rates of their own, by data set."""
    contrasts = {
        (name, results.name): Contrast(name, f"{name}{COMMON}", [results.name], "own")
        for results in answers.sets.values()
        for name, each in results.encodings.items()
        if each.own
    }
    gains = dict(zip(contrasts, answers.differences(list(contrasts.values())), strict=True))
    columns: Columns = [
        *name_columns(itemgetter(0)),
        (Column("set", "Data set"), lambda item: answers.sets[item[1]].data.title),
        (Column("common", "Common rate", "×", 2), lambda item: answers.sets[item[1]].rate),
        (Column("rate", "Own rate", "×", 2), lambda item: answers.sets[item[1]].encodings[item[0]].own_rate),
        (with_interval("gain", "Gain at its own rate", "points", 1), gains.get),
        (VERDICT, lambda item: verdict_of(gains[item])),
    ]
    return table_of("A learning rate of its own", columns, gains, SIMULTANEOUS)
