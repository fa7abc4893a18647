"""Tables and figures of a leaderboard, each a short specification on the table of all answers."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from pathlib import Path

import numpy as np

from torchrope_lab.conclusion import BASELINE, Interval
from torchrope_lab.files import read_mapping
from torchrope_lab.leaderboard.answers import MARGIN, UNKNOWN, WORTH_DOUBLING, Answers, Compared, Comparison
from torchrope_lab.leaderboard.entry import Condition, DataSetResults, EncodingResults
from torchrope_lab.results import Axis, Column, Figure, Row, Table
from torchrope_lab.schema import build
from torchrope_lab.statistics import accuracy_interval
from torchrope_lab.studies.engine.estimates import (
    VERDICT,
    Columns,
    in_percent,
    name_columns,
    table_of,
    verdict_of,
    with_interval,
)

NAMED = name_columns()
"""Columns of a table whose items are names of encodings."""
SIMULTANEOUS = (
    "Top-1 has a 95 % interval. Gaps have simultaneous ones (Bonferroni, over all pairs of a data set). Different: the "
    f"interval excludes 0. Equivalent: two one-sided tests show less than {MARGIN:g} point, at 5 % over all pairs. "
    "Encodings that share a letter are not different; the order within a group is unknown."
)
SAME, OPPOSITE, INCONCLUSIVE = "same sign", "opposite sign", "inconclusive"


# ---- differences


def table_of_set(answers: Answers, comparison: Comparison, data_set: str) -> Table:
    """Build the table of one data set: top-1 with its interval, groups, and gaps to the highest."""
    results = answers.sets[data_set]

    def top1(name: str) -> Interval:
        return in_percent(accuracy_interval(answers.right[data_set, "trained"][name]))

    largest = [
        (Column("largest", "Largest size", "%", 1), partial(answers.mean, data_set=data_set, condition="largest"))
    ]
    columns: Columns = [
        *NAMED,
        (with_interval("top1", "Top-1", "%", 1), top1),
        *_compared(comparison),
        *(largest if data_set in answers.on("largest") else []),
        (Column("step", "Step time, × none", digits=2), lambda name: step_of(results.encodings[name])),
    ]
    return table_of(title_of(results), columns, comparison.order)


def table_of_means(comparison: Comparison, sets: int) -> Table:
    """Build the table of means over data sets, which are a random sample."""

    def gain(name: str) -> Interval | None:
        return None if name == BASELINE else comparison.between(name, BASELINE).gap

    columns: Columns = [
        *NAMED,
        (Column("mean", "Mean top-1", "%", 1), lambda name: comparison.means[name]),
        *([(with_interval("gain", "Gain over none", "points", 1), gain)] if BASELINE in comparison.order else []),
        *_compared(comparison),
    ]
    note = (
        f"The {sets} data sets count as a random sample of data sets: intervals are Student's, of {sets} differences "
        f"with {sets - 1} degrees of freedom."
    )
    return table_of("Mean over data sets", columns, comparison.order, note)


def _compared(comparison: Comparison) -> Columns:
    """Return the columns of groups and of gaps to the highest, with verdicts."""
    best, groups = comparison.best, comparison.groups()
    behind = {name: comparison.between(best, name) for name in comparison.order[1:]}
    return [
        (Column("group", "Group"), groups.__getitem__),
        (
            with_interval("gap", f"Behind {best}", "points", 1),
            lambda name: behind[name].gap if name in behind else None,
        ),
        (VERDICT, lambda name: behind[name].verdict if name in behind else "highest"),
    ]


def figure_of_gaps(answers: Answers, comparisons: Sequence[Comparison]) -> Figure:
    """Build the figure of gaps to the highest on each data set, in one panel for each."""
    rows: list[Row] = []
    for results, comparison in zip(answers.sets.values(), comparisons, strict=True):
        for name in comparison.order[1:]:
            keys = ("gap", "low", "high")
            gap = dict(zip(keys, comparison.between(name, comparison.best).gap, strict=True))
            rows.append({"set": title_of(results), "name": name, **gap})
    return Figure(
        name="behind-the-highest",
        kind="points",
        title="Differences from the highest on each data set",
        alt="Top-1 of each encoding minus that of the highest, with intervals, one panel per data set.",
        x=Axis("gap", "Minus the highest", "points"),
        y=Axis("name", "Encoding", scale="category"),
        rows=rows,
        panel="set",
        low="low",
        high="high",
        caption=SIMULTANEOUS,
    )


def title_of(results: DataSetResults) -> str:
    """Return the title of a data set with the number of its axes, and its name: titles may repeat in a plan."""
    axes = len(results.data.axes)
    return f"{results.data.title}, {axes} {'axis' if axes == 1 else 'axes'} ({results.name})"


def step_of(encoding: EncodingResults) -> float | None:
    """Return the time of a training step relative to "none", the median of rounds."""
    return float(np.median(encoding.steps)) if encoding.steps else None


# ---- training


def table_of_data(answers: Answers) -> Table:
    """Build the table of data sets and what their trainings cost."""
    columns: Columns = [
        (Column("set", "Data set"), title_of),
        (Column("train", "Training examples", digits=0), lambda results: results.data.train),
        (Column("val", "Validation examples", digits=0), lambda results: results.examples),
        (Column("chance", "Best constant answer", "%", 1), lambda results: 100 * results.chance),
        (Column("trainings", "Trainings", digits=0), lambda results: results.trainings),
        (Column("hours", "Core-hours", digits=1), lambda results: results.core_seconds / 3600),
    ]
    return table_of("Data sets", columns, answers.sets.values())


def table_of_training(answers: Answers) -> Table:
    """Build the table of learning rates and convergence, by data set and encoding."""

    def of(item: tuple[str, str]) -> EncodingResults:
        return answers.sets[item[0]].encodings[item[1]]

    def tried(item: tuple[str, str], axis: int) -> str:
        chosen, rates = _tried(of(item), axis)
        if len(rates) < 2:
            return f"{chosen:g}, not tuned"
        limit = f", the {'lowest' if chosen == rates[0] else 'highest'}" if chosen in (rates[0], rates[-1]) else ""
        return f"{chosen:g}{limit} of {', '.join(f'{rate:g}' for rate in rates)}"

    def converged(item: tuple[str, str]) -> str:
        return {True: "yes", False: "no, at the limit", None: "not tested"}[answers.converged(item[1], item[0])]

    columns: Columns = [
        (Column("set", "Data set"), itemgetter(0)),
        *name_columns(itemgetter(1)),
        (Column("rate", "Learning rate, × default"), partial(tried, axis=0)),
        (Column("encoding_rate", "Rate of the encoding's parameters, × that"), partial(tried, axis=1)),
        (Column("epochs", "Epochs", digits=0), lambda item: of(item).epochs),
        (Column("gain", "Gain by the last doubling", "points", 1), lambda item: answers.gain(item[1], item[0])),
        (Column("converged", "Converged"), converged),
    ]
    items = [(data_set, name) for data_set, results in answers.sets.items() for name in results.encodings]
    note = (
        "Rates are factors, chosen on held-out training examples with one seed. The lowest or highest that was tried "
        "is the limit of the plan: a better one may lie outside. Training is repeated with twice the epochs until the "
        f"mean over seeds changes by less than {100 * WORTH_DOUBLING:g} points, which is called converged; results "
        "are those of the most epochs."
    )
    return table_of("Learning rates and convergence", columns, items, note)


def _tried(encoding: EncodingResults, axis: int) -> tuple[float, list[float]]:
    """Return the factor that was chosen and those that were tried, of the model's rate or of the encoding's."""
    runs = [(each.rate, each.encoding_rate) for each in encoding.tuning]
    return (encoding.rate, encoding.encoding_rate)[axis], sorted({run[axis] for run in runs})


# ---- claims of papers, and predictions


@dataclass(frozen=True)
class Claim:
    """A statement about two encodings; `claims.yaml` describes its fields."""

    ahead: str
    behind: str
    paper: str = ""
    table: str = ""
    points: float | None = None
    axes: tuple[int, ...] = (2,)
    condition: Condition = "trained"
    limits: str = ""
    sets: tuple[str, ...] = ()
    equivalent: bool = False
    because: str = ""

    def covers(self, results: DataSetResults) -> bool:
        """Return whether the statement is about a data set."""
        return results.name in self.sets if self.sets else len(results.data.axes) in self.axes

    def verdict(self, compared: Compared) -> str:
        """Judge the statement by a measured difference: by its sign, or a prediction of equivalence by its size."""
        if self.equivalent:
            return INCONCLUSIVE if compared.verdict == UNKNOWN else compared.verdict
        return verdict_of(compared.gap, SAME, OPPOSITE, INCONCLUSIVE)


def read_claims(kind: str) -> list[Claim]:
    """Read "claims" or "predictions" of `claims.yaml`."""
    stored = read_mapping(Path(__file__).with_name("claims.yaml"), "claims")
    return [build(Claim, each, kind, strict=True) for each in stored[kind]]


def judge(answers: Answers, kind: str) -> list[tuple[Claim, str, Compared, str]]:
    """Compare statements with what was measured on each data set that they cover, as one family.

    Returns:
        Statement, data set, difference and verdict.
    """
    items = [
        (claim, data_set)
        for claim in read_claims(kind)
        for data_set in answers.on(claim.condition, claim.ahead, claim.behind)
        if claim.covers(answers.sets[data_set])
    ]
    measured = answers.differences([(at, claim.ahead, claim.behind, claim.condition) for claim, at in items])
    return [(*item, each, item[0].verdict(each)) for item, each in zip(items, measured, strict=True)]


def table_of_claims(answers: Answers) -> Table:
    """Build the table of the papers' claims, by data set."""
    columns: Columns = [
        (Column("claim", "Claim"), lambda item: f"{item[0].ahead} > {item[0].behind}"),
        (Column("source", "Source"), lambda item: f"{item[0].paper}, {item[0].table}"),
        (Column("reported", "Reported", "points", 1), lambda item: item[0].points),
        *_JUDGED,
        (Column("comparable", "Comparable?"), lambda item: "; ".join(filter(None, ("no", item[0].limits)))),
    ]
    note = (
        "Models and data may differ from the papers': only signs are compared, and no claim is "
        "confirmed or refuted. Intervals are simultaneous over this table."
    )
    return table_of("Claims of the papers", columns, judge(answers, "claims"), note)


def table_of_predictions(answers: Answers) -> Table:
    """Build the table of predictions that were written before the runs, by data set."""
    columns: Columns = [
        (
            Column("claim", "Prediction"),
            lambda item: f"{item[0].ahead} {'≈>'[not item[0].equivalent]} {item[0].behind}",
        ),
        *_JUDGED,
        (Column("because", "Why"), lambda item: item[0].because),
    ]
    note = f"Written before the runs. ≈: the difference is less than {MARGIN:g} point. Intervals as for the claims."
    return table_of("Predictions", columns, judge(answers, "predictions"), note)


_JUDGED: Columns = [
    (Column("set", "Data set"), itemgetter(1)),
    (with_interval("gain", "Measured", "points", 1), lambda item: item[2].gap),
    (VERDICT, itemgetter(3)),
]


def limits_of_tuning(answers: Answers) -> str:
    """Say how many models have converged, and how many learning rates are at a limit."""
    items = [(name, at) for at, results in answers.sets.items() for name in results.encodings]
    known = [converged for item in items if (converged := answers.converged(*item)) is not None]
    tested = f"{sum(known)} of {len(known)} converged" if known else "convergence not tested"
    rates = [_tried(answers.sets[at].encodings[name], axis) for name, at in items for axis in (0, 1)]
    tuned = [chosen in (tried[0], tried[-1]) for chosen, tried in rates if len(tried) > 1]
    limits = f"{sum(tuned)} of {len(tuned)} learning rates at a limit" if tuned else "learning rates not tuned"
    return f"{tested}; {limits}"
