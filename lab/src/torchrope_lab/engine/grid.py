"""Studies of one factor: encodings are trained at every level of it, and sections of the report compare the runs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from math import log2
from typing import Any, Literal

from torchrope_lab.conclusion import join_names
from torchrope_lab.engine.estimates import (
    best_epoch,
    concluded,
    correct,
    loss,
    simultaneous_intervals,
    trend,
    verdict,
)
from torchrope_lab.engine.figures import TOP1_AXIS, figure, marks
from torchrope_lab.engine.long_table import (
    ONLY,
    SIMULTANEOUS,
    VERDICT,
    Cell,
    Changes,
    Columns,
    Level,
    Pairs,
    RightOrWrong,
    change_columns,
    change_sentence,
    name_columns,
    table_of,
    with_interval,
)
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
from torchrope_lab.results import Axis, Column, Findings, Table
from torchrope_lab.statistics import constant_accuracy
from torchrope_lab.training.cost import count_encoding_parameters

Levels = Mapping[Level, Mapping[str, Any]]
"""Settings of `Lab.run` by level, such as `{"mean": {"model": {"pool": "mean"}}}`."""
ABOUT_TOP1 = "Intervals are 95 % over validation examples."


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
        """Columns of encoding, name and level; without a level for a study that compares encodings alone."""
        level = Column(self.key, self.title, self.unit, None if self.scale == "category" else 0)
        return (*name_columns(), (level, lambda cell: cell.level)) if self.key else name_columns()

    @property
    def axis(self) -> Axis:
        """Axis of a figure."""
        return Axis(self.key, self.title, self.unit, self.scale)


@dataclass(frozen=True)
class Results:
    """Finished runs of a study, for its sections.

    Attributes:
        lab: Settings and data.
        runs: Runs over seeds of every cell, by encoding, then level.
        factor: The factor.
        reference: The encoding to compare with; empty if the study has none.
    """

    lab: Lab
    runs: Mapping[Cell, Sequence[Trained]]
    factor: Factor
    reference: str = ""

    @cached_property
    def top1(self) -> RightOrWrong:
        """The answers of all cells."""
        return RightOrWrong({cell: correct(runs) for cell, runs in self.runs.items()})

    @property
    def arms(self) -> list[str]:
        """The encodings."""
        return list(dict.fromkeys(cell.arm for cell in self.runs))

    @property
    def chance(self) -> float:
        """Accuracy of the best constant prediction."""
        return constant_accuracy(next(iter(self.runs.values()))[0].labels)

    @property
    def about_top1(self) -> str:
        """A sentence on the intervals of top-1, for the note of a table."""
        return about_intervals(len(self.lab.seeds))

    def levels(self, arm: str) -> list[Level]:
        """Return the levels of an encoding."""
        return [cell.level for cell in self.runs if cell.arm == arm]

    def against(self, arm: str) -> Pairs:
        """Pair the cells of all other encodings with an encoding at the same level."""
        return self.top1.against_arms(all_but(arm, self.arms))

    def table(self, title: str, columns: Columns, note: str = "", cells: Sequence[Cell] | None = None) -> Table:
        """Build a table of cells, by default all: their encodings and levels, and more columns."""
        return table_of(title, (*self.factor.columns, *columns), self.runs if cells is None else cells, note)

    def change_table(self, title: str, changes: Changes, heading: str, note: str = "") -> Table:
        """Build a table of differences, with the heading of their column."""
        return self.table(title, change_columns(changes, heading), f"{SIMULTANEOUS} {note}".strip(), [*changes])


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
        plan = {Cell(name, at): self.runs(lab, name, at, levels[at]) for name in names for at in levels}
        trained = train_cells(lab, plan, self.measures, further=self.further(lab))
        results = Results(lab, trained, self.factor, reference)
        sections = [section(results) for section in self.sections]

        def joined(kind: str) -> list[Any]:
            return [part for section in sections for part in getattr(section, kind)]

        answer = next((section.answer for section in sections if section.answer), "")
        measure = self.measure.format(reference=described(reference) if reference else "")
        return Findings(
            answer=answer or change_sentence(self.claim, measure, sections[0].changes, len(lab.seeds)),
            **{kind: joined(kind) for kind in ("tables", "figures", "pictures")},
        )


def train_cells(
    lab: Lab, plan: Mapping[Cell, Sequence[Run]], measures: MeasuresOf = lambda _: (), *, further: bool = False
) -> dict[Cell, list[Trained]]:
    """Train the runs of cells, except those whose model cannot be built."""
    possible = {
        cell: feasible(lab, runs, "" if cell.level == ONLY else f"At {cell.level}: ") for cell, runs in plan.items()
    }
    if not any(possible.values()):
        raise Mistake(f"no model of the study can be built: {' '.join(lab.left_out)}")
    trained = iter(lab.train([run for runs in possible.values() for run in runs], measures, further=further))
    return {cell: [next(trained) for _ in runs] for cell, runs in possible.items() if runs}


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
        rights = results.top1.values
        at_level = {
            level: concluded({cell.arm: rights[cell] for cell in rights if cell.level == level}, results.chance)
            for level in {cell.level for cell in rights}
        }

        def best(cell: Cell) -> float | None:
            return best_epoch(results.runs[cell]) if self.best_epoch else None

        columns = (
            *results.top1.columns,
            (Column("best_epoch", "Best epoch", "%", 1), best),
            (Column("val_loss", "Validation loss", digits=3), lambda cell: loss(results.runs[cell])),
            (VERDICT, lambda cell: verdict(at_level[cell.level], cell.arm)),
        )
        notes = (results.about_top1, self.note, "Verdicts compare the encodings of one level.")
        factor = results.factor
        by_level = figure(
            f"top1-by-{factor.key.replace('_', '-')}",
            f"Top-1 by {factor.title.lower()}",
            factor.axis,
            TOP1_AXIS,
            marks(results.runs, results.top1.columns, factor.key),
            ABOUT_TOP1,
            kind="points" if factor.scale == "category" else "lines",
        )
        return Section(
            tables=[results.table(by_level.title, columns, " ".join(filter(None, notes)))], figures=[by_level]
        )


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
        lowest = {arm: min(results.levels(arm), key=float) if self.base is None else self.base for arm in results.arms}
        pairs = {cell: Cell(cell.arm, lowest[cell.arm]) for cell in results.runs if cell.level != lowest[cell.arm]}
        changes = results.top1.changes(pairs)
        return Section(changes=changes, tables=[results.change_table(self.title, changes, "Better by")])


@dataclass(frozen=True)
class AgainstReference:
    """Compares every encoding with the reference at the same level, on the same examples.

    Attributes:
        same: What the two have in common, for the figure: "the same model".
    """

    same: str

    def __call__(self, results: Results) -> Section:
        """Compare the encodings."""
        return lead_section(results, results.top1.changes(results.against(results.reference)), self.same)


@dataclass(frozen=True)
class AgainstMixed:
    """Compares encodings that learn more than frequencies with RoPE-Mixed at the same level."""

    def __call__(self, results: Results) -> Section:
        """Compare the encodings; pairs with the reference are left out: another table shows them."""
        others = mixed_counterparts(results.arms, results.reference)
        ahead = results.top1.changes(results.top1.against_arms(others))
        return Section(changes=ahead, tables=[results.change_table(AHEAD_OF_MIXED, ahead, "Ahead", WITH_SAME)])


@dataclass(frozen=True)
class Slope:
    """Fits the slope of top-1 over the levels."""

    title: str
    heading: str  # of the column: "Per doubling of the width"
    x: Callable[[float], float] = log2  # function of a level, by default the number of doublings
    of_lead: bool = False  # whether it is the slope of the lead over the reference

    def __call__(self, results: Results) -> Section:
        """Fit the slopes."""
        found = slopes(results, self.x, results.reference if self.of_lead else None)
        changed = change_columns(found, self.heading, "trend", digits=2, words=("rises", "falls"))
        return Section(changes=found, tables=[table_of(self.title, (*name_columns(), *changed), found, SIMULTANEOUS)])


def slopes(results: Results, x: Callable[[float], float] = log2, reference: str | None = None) -> Changes:
    """Compute the slope of top-1, or of the lead over a reference, in points per unit of x, with two levels or more."""
    found, rights = {}, results.top1.values
    for arm in results.arms:
        shared = [level for level in results.levels(arm) if reference is None or Cell(reference, level) in rights]
        if arm == reference or len(shared) < 2:
            continue
        of_arm = [rights[Cell(arm, level)] for level in shared]
        if reference is not None:
            others = [rights[Cell(reference, level)] for level in shared]
            seeds = min(map(len, (*of_arm, *others)))
            of_arm = [mine[:seeds] - theirs[:seeds] for mine, theirs in zip(of_arm, others, strict=True)]
        found[Cell(arm)] = trend([x(float(level)) for level in shared], of_arm)
    return simultaneous_intervals(found)


def parameters(results: Results) -> Section:
    """Show the parameters of the encodings in every cell."""
    columns = [(Column("parameters", "Parameters of the encodings", digits=0), partial(encoding_parameters, results))]
    note = "Counted over all layers and heads."
    return Section(tables=[results.table("Learned parameters of the encodings", columns, note)])


def encoding_parameters(results: Results, cell: Cell) -> int:
    """Count the parameters of the encodings of a cell's model."""
    return count_encoding_parameters(results.lab.blueprint(results.runs[cell][0].run))


def lead_section(results: Results, ahead: Changes, same: str) -> Section:
    """Show the lead over the reference, in points, by the levels of the factor."""
    factor, reference = results.factor, results.reference
    lead = figure(
        f"lead-by-{factor.key}",
        f"Ahead of {described(reference)}",
        factor.axis,
        Axis("lead", "Ahead", "points"),
        marks(ahead, [(with_interval("lead", "Ahead"), ahead.get)], factor.key),
        f"Zero is {described(reference, 'the')} with {same}. {SIMULTANEOUS}",
    )
    return Section(changes=ahead, tables=[results.change_table(lead.title, ahead, "Ahead")], figures=[lead])


def about_intervals(seeds: int) -> str:
    """Describe the intervals of top-1, for the note of a table."""
    if seeds == 1:
        return "Intervals are 95 % over validation examples, for the models that were trained."
    return f"Intervals are 95 % over validation examples and {seeds} seeds; ± is the standard deviation over seeds."
