"""Studies of one factor: encodings are trained at every level of it, and sections of the report compare the runs."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import log2
from typing import Any, Literal, NamedTuple

import numpy as np

from torchrope_lab.conclusion import Interval, join_names
from torchrope_lab.engine.estimates import (
    SIMULTANEOUS,
    VERDICT,
    Columns,
    about_intervals,
    best_epoch,
    cells,
    change_sentence,
    concluded,
    contrasts,
    correct,
    loss,
    name_columns,
    simultaneous_intervals,
    table_of,
    top1_cells,
    top1_columns,
    trend,
    verdict,
    verdict_of,
    with_interval,
)
from torchrope_lab.engine.figures import TOP1_AXIS, figure
from torchrope_lab.engine.reference import (
    AHEAD_OF_MIXED,
    WITH_SAME,
    all_but,
    described,
    mixed_counterparts,
    reference_of,
)
from torchrope_lab.engine.runs import MeasuresOf, Run, Trained
from torchrope_lab.engine.study import Lab, feasible
from torchrope_lab.mistakes import Mistake
from torchrope_lab.results import Axis, Column, Figure, Findings, Table
from torchrope_lab.statistics import constant_accuracy
from torchrope_lab.training.cost import count_encoding_parameters

Level = float | str
Levels = Mapping[Level, Mapping[str, Any]]
"""Settings of `Lab.run` by level, such as `{"mean": {"model": {"pool": "mean"}}}`."""
Plan = Mapping[str, Mapping[Level, Sequence[Run]]]
Grid = dict[str, dict[Level, list[Trained]]]
"""Runs over seeds, by encoding and level."""
Changes = Mapping[tuple[str, Level], Interval]
"""Differences in points by encoding and level, or slopes with the level "", at 5 % over all of them."""
ONLY: Level = ""
"""The level of a study that compares encodings alone."""


class Cell(NamedTuple):
    """Runs over seeds of an encoding at a level."""

    name: str
    level: Level
    runs: Sequence[Trained] = ()

    @property
    def right(self) -> np.ndarray:
        """Correct (1) and wrong (0) answers, `(seeds, examples)`."""
        return correct(self.runs)


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
    def columns(self) -> Columns:
        """Columns of encoding, name and level, for cells; without a level for a study that compares encodings alone."""
        level = Column(self.key, self.title, self.unit, None if self.scale == "category" else 0)
        return (*NAME_COLUMNS, (level, lambda cell: cell.level)) if self.key else NAME_COLUMNS

    @property
    def axis(self) -> Axis:
        """Axis of a figure."""
        return Axis(self.key, self.title, self.unit, self.scale)


@dataclass(frozen=True)
class Results:
    """Finished runs of a study, for its sections; `reference` is empty if the study has none."""

    lab: Lab
    grid: Grid
    factor: Factor
    reference: str = ""

    @property
    def cells(self) -> list[Cell]:
        """Cells of the grid, by encoding, then level."""
        return [Cell(*each) for each in _each(self.grid)]

    @property
    def chance(self) -> float:
        """Accuracy of the best constant prediction."""
        return constant_accuracy(self.cells[0].runs[0].labels)

    @property
    def about_top1(self) -> str:
        """A sentence on the intervals of top-1, for the note of a table."""
        return about_intervals(len(self.lab.seeds))

    def table(self, title: str, columns: Columns, note: str = "", cells: Sequence[Cell] | None = None) -> Table:
        """Build a table of cells, by default all: their encodings and levels, and more columns."""
        return table_of(title, (*self.factor.columns, *columns), self.cells if cells is None else cells, note)

    def change_table(
        self, title: str, changes: Changes, heading: str, note: str = "", key: str = "change"
    ) -> list[Table]:
        """Build a table of differences, with the heading and key of their column; none if there are none."""
        cells = [Cell(*name_and_level) for name_and_level in changes]
        columns = change_columns(changes, heading, key)
        return [self.table(title, columns, f"{SIMULTANEOUS} {note}".strip(), cells)] if changes else []

    def right_at(self, level: Level) -> dict[str, np.ndarray]:
        """Return answers at a level, `(seeds, examples)`, by encoding."""
        return {cell.name: cell.right for cell in self.cells if cell.level == level}

    def changes(self, other: Callable[[str, Level], tuple[str, Level]]) -> Changes:
        """Compute the accuracy of every cell minus that of another, if there is one, in points, paired by example."""
        right = {(cell.name, cell.level): cell.right for cell in self.cells}
        pairs = {key: other(*key) for key in right if other(*key) != key}
        return contrasts({key: (right[key], right[base]) for key, base in pairs.items() if base in right})


@dataclass(frozen=True, kw_only=True)
class Section(Findings):
    """A part of a study's findings."""

    answer: str = ""  # empty for a sentence about the changes
    changes: Changes = field(default_factory=dict)  # differences or slopes that the answer may be about


@dataclass(frozen=True, kw_only=True)
class OneFactor:
    """A study of one factor, as `Study.find`: trains every encoding at every level with every seed.

    Attributes:
        sections: Functions of the results, in the order of the report; the answer is that of the first section with
            one, otherwise a sentence about the changes of the first section.
        claim: What those changes are due to, for that sentence: "mean pooling instead of a class token".
        measure: What changes; "{reference}" is the reference in words.
        factor: The factor.
        levels: Settings by level, or a function of the lab that returns them; by default one level, the study's.
        arms: Function that returns the encodings to train; by default all are.
        runs: Function of lab, encoding, level and settings that plans runs, by default `Lab.runs`.
        measures: Returns what else is measured of a run, see `Lab.train`.
        reference: Whether the reference is trained at every level too.
        backbones: Backbones that have the factor; empty for all.
        further: Returns whether sections train further runs, see `Lab.train`.
    """

    sections: Sequence[Callable[[Results], Section]]
    claim: str = ""
    measure: str = "accuracy"
    factor: Factor = Factor("", "")
    levels: Levels | Callable[[Lab], Levels] = field(default_factory=lambda: {ONLY: {}})
    arms: Callable[[Lab], list[str]] = lambda lab: list(lab.encodings)
    runs: Callable[[Lab, str, Level, Mapping[str, Any]], Sequence[Run]] = lambda lab, name, _, settings: lab.runs(
        [name], **settings
    )
    measures: MeasuresOf = lambda _: ()
    reference: bool = False
    backbones: Sequence[str] = ()
    further: Callable[[Lab], bool] = lambda _: False

    def __call__(self, lab: Lab) -> Findings:
        """Train the runs and compare them."""
        backbone = lab.config.model.backbone
        if self.backbones and backbone not in self.backbones:
            rule = f"{self.factor.title} is a choice of {join_names(self.backbones)}"
            return Findings(answer=f"{rule}: with a {backbone} there is nothing to compare.")
        names = self.arms(lab)
        if not names:
            return Findings(answer=f"There is nothing to train. {' '.join(lab.left_out)}")
        reference = reference_of(lab) if self.reference or lab.reference else ""
        if self.reference:
            names = list(dict.fromkeys([reference, *names]))
        levels = self.levels(lab) if callable(self.levels) else self.levels
        plan = {name: {level: self.runs(lab, name, level, levels[level]) for level in levels} for name in names}
        grid = train_grid(lab, plan, self.measures, further=self.further(lab))
        results = Results(lab, grid, self.factor, reference)
        sections = [section(results) for section in self.sections]

        def joined(kind: str) -> list[Any]:
            return [part for section in sections for part in getattr(section, kind)]

        answer = next((section.answer for section in sections if section.answer), "")
        return Findings(
            answer=answer or self._sentence(sections[0].changes, results),
            **{kind: joined(kind) for kind in ("tables", "figures", "pictures")},
        )

    def _sentence(self, changes: Changes, results: Results) -> str:
        single = len({level for _, level in changes}) == 1
        moved = {name if single else f"{name} ({level})": change for (name, level), change in changes.items()}
        measure = self.measure.format(reference=described(results.reference) if results.reference else "")
        return change_sentence(self.claim, measure, moved, len(results.lab.seeds))


def train_grid(lab: Lab, plan: Plan, measures: MeasuresOf = lambda _: (), *, further: bool = False) -> Grid:
    """Train the cells of a grid, except those whose model cannot be built."""
    trainable: dict[str, dict[Level, Sequence[Run]]] = {}
    for name, level, runs in _each(plan):
        if possible := feasible(lab, runs, "" if level == ONLY else f"At {level}: "):
            trainable.setdefault(name, {})[level] = possible
    if not trainable:
        raise Mistake(f"no model of the study can be built: {' '.join(lab.left_out)}")
    trained = iter(lab.train([run for _, _, runs in _each(trainable) for run in runs], measures, further=further))
    grid: Grid = {}
    for name, level, runs in _each(trainable):
        grid.setdefault(name, {})[level] = [next(trained) for _ in runs]
    return grid


# ---- sections


@dataclass(frozen=True)
class Accuracy:
    """Shows top-1, loss and verdict of every cell; verdicts compare the encodings of one level.

    Attributes:
        note: For the table.
        best_epoch: Whether to show the best epoch of each run too.
    """

    note: str = ""
    best_epoch: bool = False

    def __call__(self, results: Results) -> Section:
        """Build the table and the figure."""
        at_level = {cell.level: concluded(results.right_at(cell.level), results.chance) for cell in results.cells}
        best = (Column("best_epoch", "Best epoch", "%", 1), lambda cell: best_epoch(cell.runs))
        columns = (
            *TOP1_COLUMNS,
            *([best] if self.best_epoch else []),
            (Column("val_loss", "Validation loss", digits=3), lambda cell: loss(cell.runs)),
            (VERDICT, lambda cell: verdict(at_level[cell.level], cell.name)),
        )
        notes = (results.about_top1, self.note, "Verdicts compare the encodings of one level.")
        by_level = top1_figure(results)
        table = results.table(by_level.title, columns, " ".join(filter(None, notes)))
        return Section(tables=[table], figures=[by_level])


@dataclass(frozen=True)
class AgainstLevel:
    """Compares every level with one level of the same encoding, on the same examples.

    Attributes:
        title: Title of the table.
        base: The level to compare with; by default the lowest of each encoding.
    """

    title: str
    base: Level | None = None

    def __call__(self, results: Results) -> Section:
        """Compare the levels."""

        def other(name: str, level: Level) -> tuple[str, Level]:
            return name, min(results.grid[name], key=float) if self.base is None else self.base

        changes = results.changes(other)
        return Section(changes=changes, tables=results.change_table(self.title, changes, "Better by"))


@dataclass(frozen=True)
class AgainstReference:
    """Compares every encoding with the reference at the same level, on the same examples.

    Attributes:
        same: What the two have in common, for the figure: "the same model".
    """

    same: str

    def __call__(self, results: Results) -> Section:
        """Compare the encodings."""
        return lead_section(results, leads(results, all_but(results.reference, results.grid)), self.same)


@dataclass(frozen=True)
class AgainstMixed:
    """Compares encodings that learn more than frequencies with RoPE-Mixed at the same level."""

    def __call__(self, results: Results) -> Section:
        """Compare the encodings; pairs with the reference are left out: another table shows them."""
        ahead = leads(results, mixed_counterparts(results.grid, results.reference))
        tables = results.change_table(AHEAD_OF_MIXED, ahead, "Ahead", WITH_SAME)
        return Section(changes=ahead, tables=tables)


@dataclass(frozen=True)
class Slope:
    """Fits the slope of top-1 over the levels."""

    title: str
    heading: str  # of the column: "Per doubling of the width"
    x: Callable[[float], float] = log2  # function of a level, by default the number of doublings
    of_lead: bool = False  # whether it is the slope of the lead over the reference

    def __call__(self, results: Results) -> Section:
        """Fit the slopes."""
        slopes = trends(results.grid, self.x, results.reference if self.of_lead else None)
        columns = (
            *NAME_COLUMNS,
            (with_interval("trend", self.heading, "points", 2), lambda cell: slopes[cell.name]),
            (VERDICT, lambda cell: verdict_of(slopes[cell.name], "rises", "falls", "not significant")),
        )
        table = table_of(self.title, columns, [Cell(name, "") for name in slopes], SIMULTANEOUS)
        return Section(changes={(name, ""): slope for name, slope in slopes.items()}, tables=[table])


def parameters(results: Results) -> Section:
    """Show the parameters of the encodings in every cell."""
    count = Column("parameters", "Parameters of the encodings", digits=0)
    columns = ((count, lambda cell: count_encoding_parameters(results.lab.blueprint(cell.runs[0].run))),)
    title, note = "Learned parameters of the encodings", "Counted over all layers and heads."
    return Section(tables=[results.table(title, columns, note)])


# ---- differences


def leads(results: Results, others: Mapping[str, str]) -> Changes:
    """Compute the accuracy of encodings minus that of others at the same level, in points, on the same examples."""
    return results.changes(lambda name, level: (others.get(name, ""), level))


def baseline_changes(results: Results, encoding: str) -> Changes:
    """Train an encoding with the study's settings; return the accuracy of every other cell minus that of its runs."""
    trained = results.lab.train(results.lab.runs([encoding]))
    others = [cell for cell in results.cells if cell.runs[0].run.key != trained[0].run.key]
    return contrasts({(cell.name, cell.level): (cell.right, correct(trained)) for cell in others})


def trends(grid: Grid, x: Callable[[float], float] = log2, reference: str | None = None) -> dict[str, Interval]:
    """Compute the slope of top-1, or of the lead over a reference, in points per unit of x, with two levels or more."""
    slopes = {}
    for name, levels in grid.items():
        shared = [level for level in levels if reference is None or level in grid[reference]]
        if name != reference and len(shared) > 1:
            rights = [correct(levels[level]) for level in shared]
            if reference is not None:
                others = [correct(grid[reference][level]) for level in shared]
                seeds = min(map(len, (*rights, *others)))
                rights = [mine[:seeds] - theirs[:seeds] for mine, theirs in zip(rights, others, strict=True)]
            slopes[name] = trend([x(float(level)) for level in shared], rights)
    return simultaneous_intervals(slopes)


# ---- tables and figures

ABOUT_TOP1 = "Intervals are 95 % over validation examples."
NAME_COLUMNS = name_columns(lambda cell: cell.name)
TOP1_COLUMNS = top1_columns(lambda cell: cell.right)


def change_columns(changes: Changes, heading: str, key: str = "change") -> Columns:
    """Return columns of the differences of cells, and of verdicts; a cell without a difference is the baseline."""

    def written(cell: Cell) -> str:
        change = changes.get((cell.name, cell.level))
        return "the baseline" if change is None else verdict_of(change)

    column = with_interval(key, heading, "points", 1)
    return (column, lambda cell: changes.get((cell.name, cell.level))), (VERDICT, written)


def top1_figure(results: Results) -> Figure:
    """Build a figure of top-1 over the factor, one line per encoding; points if levels are names."""
    factor = results.factor
    return figure(
        f"top1-by-{factor.key.replace('_', '-')}",
        f"Top-1 by {factor.title.lower()}",
        factor.axis,
        TOP1_AXIS,
        [{"name": cell.name, factor.key: cell.level, **top1_cells(cell.right)} for cell in results.cells],
        ABOUT_TOP1,
        kind="points" if factor.scale == "category" else "lines",
        low="low",
        high="high",
    )


def lead_section(results: Results, ahead: Changes, same: str) -> Section:
    """Show the lead over the reference, in points, by the levels of the factor."""
    factor, reference = results.factor, results.reference
    lead = figure(
        f"lead-by-{factor.key}",
        f"Ahead of {described(reference)}",
        factor.axis,
        Axis("lead", "Ahead", "points"),
        [{"name": name, factor.key: level, **cells("lead", change)} for (name, level), change in ahead.items()],
        f"Zero is {described(reference, 'the')} with {same}. {SIMULTANEOUS}",
        low="lead_low",
        high="lead_high",
    )
    return Section(changes=ahead, tables=results.change_table(lead.title, ahead, "Ahead"), figures=[lead])


def _each(grid: Mapping[str, Mapping[Level, Any]]) -> Iterator[tuple[str, Level, Any]]:
    """Yield encoding, level and cell of a grid."""
    for name, levels in grid.items():
        for level, cell in levels.items():
            yield name, level, cell
