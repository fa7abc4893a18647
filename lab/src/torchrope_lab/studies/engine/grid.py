"""Studies of one factor: every encoding at every level of it, and differences from a level, an encoding, or a slope."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import log2
from typing import Any, Literal

import numpy as np

from torchrope_lab.conclusion import Interval, join_names
from torchrope_lab.results import Advice, Axis, Column, Figure, Findings, Table
from torchrope_lab.studies.engine.estimates import (
    HOLM,
    NAMES,
    OVER_SEEDS,
    TOP1,
    VERDICT,
    about_intervals,
    at_best,
    cells,
    change_sentence,
    concluded,
    contrasts,
    correct,
    loss,
    named,
    named_holm_intervals,
    top1,
    trend,
    verdict,
    verdict_of,
    with_interval,
)
from torchrope_lab.studies.engine.feasible import feasible
from torchrope_lab.studies.engine.reference import (
    AHEAD_OF_MIXED,
    WITH_SAME,
    described,
    mixed_counterparts,
    mixed_notes,
    reference_of,
)
from torchrope_lab.studies.engine.runs import MeasuresOf, Run, Trained
from torchrope_lab.studies.engine.study import Lab
from torchrope_lab.training.cost import count_encoding_parameters

Level = float | str
Levels = Mapping[Level, Mapping[str, Any]]
"""Settings of `Lab.run` by level, such as `{"mean": {"model": {"pool": "mean"}}}`."""
Plan = Mapping[str, Mapping[Level, Sequence[Run]]]
Grid = dict[str, dict[Level, list[Trained]]]
"""Runs over seeds, by encoding and level."""
Changes = dict[tuple[str, Level], Interval]
"""Differences in points by encoding and level, at 5 % over all of them."""

LOSS = Column("val_loss", "Validation loss", digits=3)
PARAMETERS = Column("parameters", "Parameters of the encodings", digits=0)


@dataclass(frozen=True)
class Factor:
    """The factor that differs between the runs of an encoding.

    Attributes:
        key: Key of the level in a row.
        title: Title shown in the report.
        unit: Unit of the levels.
        scale: "linear", "log", or "category" for names.
    """

    key: str
    title: str
    unit: str = ""
    scale: Literal["linear", "log", "category"] = "linear"

    @property
    def column(self) -> Column:
        """Column of a table."""
        return Column(self.key, self.title, self.unit, None if self.scale == "category" else 0)

    @property
    def axis(self) -> Axis:
        """Axis of a figure."""
        return Axis(self.key, self.title, self.unit, self.scale)


@dataclass(frozen=True)
class Compared:
    """Results of a comparison.

    Attributes:
        changes: Differences, or slopes with the level "".
        tables, figures, notes: What the report shows of them.
    """

    changes: Changes
    tables: Sequence[Table] = ()
    figures: Sequence[Figure] = ()
    notes: Sequence[str] = ()

    @property
    def named(self) -> dict[str, Interval]:
        """Changes by encoding, or by encoding and level if there are several levels."""
        single = len({level for _, level in self.changes}) == 1
        return {name if single else f"{name} ({level})": found for (name, level), found in self.changes.items()}


@dataclass(frozen=True)
class AgainstLevel:
    """Compares every level with one level of the same encoding, on the same examples.

    Attributes:
        title: Title of the table.
        base: The level to compare with; by default the lowest of each encoding.
    """

    title: str
    base: Level | None = None

    def __call__(self, grid: Grid, factor: Factor, reference: str) -> Compared:
        """Compare the levels of a grid."""
        moved = changes(grid, lambda name: min(grid[name], key=float) if self.base is None else self.base)
        return Compared(moved, [contrast_table(self.title, moved, factor, "Better by")])


@dataclass(frozen=True)
class AgainstReference:
    """Compares every encoding with the reference at the same level, on the same examples.

    Attributes:
        same: What the two have in common, for the figure: "the same model".
    """

    same: str

    def __call__(self, grid: Grid, factor: Factor, reference: str) -> Compared:
        """Compare the encodings of a grid."""
        ahead = leads(grid, {name: reference for name in grid if name != reference})
        tables = [contrast_table(f"Ahead of {described(reference)}", ahead, factor, "Ahead")]
        return Compared(ahead, tables, [lead_figure(factor, ahead, reference, self.same)])


@dataclass(frozen=True)
class AgainstMixed:
    """Compares encodings that learn more than frequencies with RoPE-Mixed at the same level."""

    def __call__(self, grid: Grid, factor: Factor, reference: str) -> Compared:
        """Compare the encodings of a grid; pairs with the reference are left out: another table shows them."""
        ahead = leads(grid, {name: other for name, other in mixed_counterparts(grid).items() if other != reference})
        tables = [contrast_table(AHEAD_OF_MIXED, ahead, factor, "Ahead", WITH_SAME)] if ahead else []
        return Compared(ahead, tables, notes=mixed_notes(ahead.values()))


@dataclass(frozen=True)
class Slope:
    """Fits the slope of top-1 over the levels.

    Attributes:
        title: Title of the table.
        heading: Heading of its column: "Per doubling of the width".
        x: Function of a level, by default the number of doublings.
        of_lead: Whether it is the slope of the lead over the reference.
    """

    title: str
    heading: str
    x: Callable[[float], float] = log2
    of_lead: bool = False

    def __call__(self, grid: Grid, factor: Factor, reference: str) -> Compared:
        """Fit the slopes of a grid."""
        found = trends(grid, self.x, reference if self.of_lead else None)
        rows = [
            {**named(name), **cells("trend", slope), "verdict": verdict_of(slope, "rises", "falls", "not significant")}
            for name, slope in found.items()
        ]
        columns = (*NAMES, with_interval("trend", self.heading, "points", 2), VERDICT)
        slopes: Changes = {(name, ""): slope for name, slope in found.items()}
        return Compared(slopes, [Table(self.title, columns, rows, note=HOLM)])


@dataclass(frozen=True)
class Extra:
    """What a study shows beside its comparisons.

    Attributes:
        answer: In place of the sentence of the first comparison; "" for that sentence.
        tables, figures, notes, advice: Further ones; tables come first.
    """

    answer: str = ""
    tables: Sequence[Table] = ()
    figures: Sequence[Figure] = ()
    notes: Sequence[str] = ()
    advice: Sequence[Advice] = ()


@dataclass(frozen=True, kw_only=True)
class OneFactor:
    """A study of one factor, as `Study.find`: trains every encoding at every level with every seed.

    Attributes:
        factor: The factor.
        levels: Settings by level, or a function of the lab that returns them.
        compare: Comparisons in the order of the report; the answer is about the first.
        claim: What the first comparison is about, for the answer: "mean pooling instead of a class token".
        measure: What it changes; "{reference}" is the reference in words.
        arms: Function that returns the encodings to train and notes on those left out; by default all are trained.
        runs: Function of lab, encoding, level and settings that plans runs, by default `Lab.runs`.
        reference: Whether the reference is trained at every level too.
        parameters: Whether a table has the parameters of the encodings.
        backbones: Backbones that have the factor; empty for all.
        extra: Function of the lab, the grid and the first comparison that returns what else the study shows.
        note: For the table of top-1.
        notes: Remarks.
        published: Results of papers.
    """

    factor: Factor
    levels: Levels | Callable[[Lab], Levels]
    compare: Sequence[Callable[[Grid, Factor, str], Compared]]
    claim: str
    measure: str = "accuracy"
    arms: Callable[[Lab], tuple[list[str], list[str]]] = lambda lab: (list(lab.encodings), [])
    runs: Callable[[Lab, str, Level, Mapping[str, Any]], Sequence[Run]] = lambda lab, name, _, settings: lab.runs(
        [name], **settings
    )
    reference: bool = False
    parameters: bool = False
    backbones: Sequence[str] = ()
    extra: Callable[[Lab, Grid, Compared], Extra] = lambda *_: Extra()
    note: str = ""
    notes: Sequence[str] = ()
    published: Sequence[Table] = ()

    def __call__(self, lab: Lab) -> Findings:
        """Train the runs and compare them."""
        backbone = lab.config.model.backbone
        if self.backbones and backbone not in self.backbones:
            rule = f"{self.factor.title} is a choice of {join_names(self.backbones)}"
            return Findings(answer=f"{rule}: with a {backbone} there is nothing to compare.")
        names, left_out = self.arms(lab)
        reference = reference_of(lab) if self.reference or lab.reference else ""
        if self.reference:
            names = list(dict.fromkeys([reference, *names]))
        levels = self.levels(lab) if callable(self.levels) else self.levels
        plan = {name: {level: self.runs(lab, name, level, levels[level]) for level in levels} for name in names}
        grid, notes = train_grid(lab, plan)
        compared = [compare(grid, self.factor, reference) for compare in self.compare]
        extra = self.extra(lab, grid, compared[0])
        seeds = len(lab.seeds)
        measure = self.measure.format(reference=described(reference) if reference else "")
        return Findings(
            answer=extra.answer or change_sentence(self.claim, measure, compared[0].named, seeds),
            tables=[
                *extra.tables,
                *(table for each in compared for table in each.tables),
                top1_table(grid, self.factor, f"{about_intervals(seeds)} {self.note}".strip()),
                *([parameter_table(lab, grid, self.factor)] if self.parameters else []),
            ],
            figures=[
                top1_figure(grid, self.factor),
                *(figure for each in compared for figure in each.figures),
                *extra.figures,
            ],
            published=self.published,
            notes=[
                *self.notes,
                *left_out,
                *extra.notes,
                *(note for each in compared for note in each.notes),
                *notes,
            ],
            advice=extra.advice,
        )


def train_grid(lab: Lab, plan: Plan, measures: MeasuresOf = lambda _: ()) -> tuple[Grid, list[str]]:
    """Train the cells of a grid, except those whose model cannot be built.

    Args:
        lab: Lab of the study.
        plan: Runs over seeds, by encoding and level.
        measures: See `Lab.train`.

    Returns:
        The cells, and a note for each that was left out.

    Raises:
        ValueError: no cell is left, or a name is unknown.
    """
    trainable: dict[str, dict[Level, Sequence[Run]]] = {}
    notes = []
    for name, level, runs in _each(plan):
        possible, refused = feasible(lab, runs)
        notes += [f"At {level}: {note}" for note in refused]
        if possible:
            trainable.setdefault(name, {})[level] = possible
    if not trainable:
        raise ValueError(f"a study needs a model that can be built, got none: {notes[0]}")
    trained = iter(lab.train([run for _, _, runs in _each(trainable) for run in runs], measures))
    grid: Grid = {}
    for name, level, runs in _each(trainable):
        grid.setdefault(name, {})[level] = [next(trained) for _ in runs]
    return grid, notes


# ---- advice


def advise_level(what: str, base: Level, other: Level) -> Callable[[Lab, Grid, Compared], Extra]:
    """Recommend the other level if it is significantly better with more encodings than worse, else the base."""

    def advise(lab: Lab, grid: Grid, compared: Compared) -> Extra:
        better = sum(found.low > 0 for found in compared.changes.values())
        worse = sum(found.high < 0 for found in compared.changes.values())
        level = other if better > worse else base
        best, value = at_best(rights_at(grid, level))
        because = f"{other} is significantly better with {better} encodings and worse with {worse}"
        case = f"{what} on {lab.data.title}: {level}"
        return Extra(advice=[Advice(case, best, f"{because}; {best[0]} reaches {value}")])

    return advise


def advise_at(case: str, grid: Grid, level: Level) -> Advice:
    """Recommend the best encoding of a level, and those not significantly different."""
    best, value = at_best(rights_at(grid, level))
    return Advice(case, best, f"{best[0]} reaches {value}")


# ---- differences


def rights_at(grid: Grid, level: Level) -> dict[str, np.ndarray]:
    """Return correct (1) and wrong (0) answers at a level, `(seeds, examples)`, by encoding."""
    return {name: correct(levels[level]) for name, levels in grid.items() if level in levels}


def leads(grid: Grid, others: Mapping[str, str]) -> Changes:
    """Compute the accuracy of encodings minus that of others at the same level, in points, on the same examples.

    Args:
        grid: The runs.
        others: Encoding to compare with, by encoding.
    """
    return _differences(grid, lambda name, level: (others.get(name, ""), level))


def changes(grid: Grid, base: Callable[[str], Level]) -> Changes:
    """Compute the accuracy at every level minus that at the base level of the same encoding, in points, paired.

    Args:
        grid: The runs.
        base: Maps an encoding to the level to compare with.
    """
    return _differences(grid, lambda name, level: (name, base(name)))


def _differences(grid: Grid, other: Callable[[str, Level], tuple[str, Level]]) -> Changes:
    right = {(name, level): correct(runs) for name, level, runs in _each(grid)}
    keys = [key for key in right if other(*key) in right and other(*key) != key]
    return dict(zip(keys, contrasts([(right[key], right[other(*key)]) for key in keys]), strict=True))


def trends(grid: Grid, x: Callable[[float], float] = log2, reference: str | None = None) -> dict[str, Interval]:
    """Compute the slope of top-1, in points per unit of x, of encodings with two levels or more.

    Args:
        grid: The runs.
        x: Maps a level to x, by default to the number of doublings.
        reference: Fit the lead over this encoding instead of top-1.
    """
    slopes = {}
    for name, levels in grid.items():
        shared = [level for level in levels if reference is None or level in grid[reference]]
        if name != reference and len(shared) > 1:
            rights = [correct(levels[level]) for level in shared]
            if reference is not None:
                seeds = min(len(runs) for level in shared for runs in (levels[level], grid[reference][level]))
                others = [correct(grid[reference][level]) for level in shared]
                rights = [mine[:seeds] - theirs[:seeds] for mine, theirs in zip(rights, others, strict=True)]
            slopes[name] = trend([x(float(level)) for level in shared], rights).interval
    return named_holm_intervals(slopes)


# ---- tables and figures


def top1_table(grid: Grid, factor: Factor, note: str) -> Table:
    """Build a table of top-1, loss and verdict of every cell; verdicts compare the encodings of one level."""
    levels = dict.fromkeys(level for _, level, _ in _each(grid))
    at_level = {level: concluded(rights_at(grid, level)) for level in levels}
    rows = [
        {
            **named(name),
            factor.key: level,
            **top1(correct(runs)),
            "val_loss": loss(runs),
            "verdict": verdict(at_level[level], name),
        }
        for name, level, runs in _each(grid)
    ]
    columns = (*NAMES, factor.column, TOP1, OVER_SEEDS, LOSS, VERDICT)
    note = f"{note} Verdicts compare the encodings of one level."
    return Table(f"Top-1 by {factor.title.lower()}", columns, rows, note=note)


def top1_figure(grid: Grid, factor: Factor) -> Figure:
    """Build a figure of top-1 over the factor, one line per encoding; points if levels are names."""
    title = f"Top-1 by {factor.title.lower()}"
    return Figure(
        name=f"top1-by-{factor.key.replace('_', '-')}",
        kind="points" if factor.scale == "category" else "lines",
        title=title,
        alt=f"{title}, in percent with intervals, of {join_names(list(grid))}.",
        x=factor.axis,
        y=Axis("top1", "Top-1", "%"),
        rows=[{"name": name, factor.key: level, **top1(correct(runs))} for name, level, runs in _each(grid)],
        series="name",
        low="low",
        high="high",
        caption="Intervals are 95 % over validation examples.",
    )


def contrast_table(title: str, moved: Changes, factor: Factor, heading: str, note: str = "") -> Table:
    """Build a table of differences."""
    rows = [
        {**named(name), factor.key: level, **cells("change", found), "verdict": verdict_of(found)}
        for (name, level), found in moved.items()
    ]
    columns = (*NAMES, factor.column, with_interval("change", heading, "points", 1), VERDICT)
    return Table(title, columns, rows, note=f"{HOLM} {note}".strip())


def parameter_table(lab: Lab, grid: Grid, factor: Factor) -> Table:
    """Build a table of the encodings' parameters in every cell."""
    rows = [
        {**named(name), factor.key: level, "parameters": count_encoding_parameters(lab.blueprint(runs[0].run))}
        for name, level, runs in _each(grid)
    ]
    columns = (*NAMES, factor.column, PARAMETERS)
    return Table("Learned parameters of the encodings", columns, rows, note="Counted over all layers and heads.")


def lead_figure(factor: Factor, ahead: Changes, reference: str, same: str) -> Figure:
    """Build a figure of the lead over a reference, in points, by the levels of a factor.

    Args:
        factor: Factor of the levels.
        ahead: Results of `leads`.
        reference: Name of the reference.
        same: Common property of the two: "the same model".
    """
    return Figure(
        name=f"lead-by-{factor.key}",
        kind="lines",
        title=f"Ahead of {described(reference)}",
        alt=f"Points of top-1 ahead of {described(reference)} with {same}, one line per encoding.",
        x=factor.axis,
        y=Axis("lead", "Ahead", "points"),
        rows=[{"name": name, factor.key: level, **cells("lead", found)} for (name, level), found in ahead.items()],
        series="name",
        low="lead_low",
        high="lead_high",
        caption=f"Zero is {described(reference, 'the')} with {same}. {HOLM}",
    )


def _each(grid: Mapping[str, Mapping[Level, Any]]) -> Iterator[tuple[str, Level, Any]]:
    """Yield encoding, level and cell of a grid."""
    for name, levels in grid.items():
        for level, cell in levels.items():
            yield name, level, cell
