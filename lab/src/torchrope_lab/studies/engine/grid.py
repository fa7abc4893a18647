"""Grids of runs: several encodings at several levels of one factor, with tables and figures of the changes."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import log2
from typing import Any, Literal

import numpy as np

from torchrope_lab.conclusion import Interval
from torchrope_lab.results import Axis, Column, Figure, Table
from torchrope_lab.studies.engine.estimates import (
    HOLM,
    NAMES,
    OVER_SEEDS,
    TOP1,
    VERDICT,
    cells,
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
)
from torchrope_lab.studies.engine.runs import Run, Trained
from torchrope_lab.studies.engine.study import Lab
from torchrope_lab.training.cost import count_encoding_parameters

Level = float | str
Plan = Mapping[str, Mapping[Level, Sequence[Run]]]
Grid = dict[str, dict[Level, list[Trained]]]
"""Runs over seeds, by encoding and level."""

LOSS = Column("val_loss", "Validation loss", digits=3)


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


def train_grid(lab: Lab, plan: Plan) -> tuple[Grid, list[str]]:
    """Train the cells of a grid, except those whose model cannot be built.

    Args:
        lab: Lab of the study.
        plan: Runs over seeds, by encoding and level.

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
    trained = iter(lab.train([run for _, _, runs in _each(trainable) for run in runs]))
    grid: Grid = {}
    for name, level, runs in _each(trainable):
        grid.setdefault(name, {})[level] = [next(trained) for _ in runs]
    return grid, notes


def top1_table(title: str, grid: Grid, factor: Factor, note: str) -> Table:
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
    return Table(title, columns, rows, note=f"{note} Verdicts compare the encodings of one level.")


def rights_at(grid: Grid, level: Level) -> dict[str, np.ndarray]:
    """Return correct (1) and wrong (0) answers at a level, `(seeds, examples)`, by encoding."""
    return {name: correct(levels[level]) for name, levels in grid.items() if level in levels}


def top1_figure(grid: Grid, factor: Factor, alt: str) -> Figure:
    """Build a figure of top-1 over the factor, one line per encoding; points if levels are names."""
    return Figure(
        name=f"top1-by-{factor.key.replace('_', '-')}",
        kind="points" if factor.scale == "category" else "lines",
        title=f"Top-1 by {factor.title.lower()}",
        alt=alt,
        x=factor.axis,
        y=Axis("top1", "Top-1", "%"),
        rows=[{"name": name, factor.key: level, **top1(correct(runs))} for name, level, runs in _each(grid)],
        series="name",
        low="low",
        high="high",
        caption="Intervals are 95 % over validation examples.",
    )


Changes = dict[tuple[str, Level], Interval]
"""Differences in points by encoding and level, at 5 % over all of them."""


def leads(grid: Grid, others: Mapping[str, str]) -> Changes:
    """Compute the accuracy of encodings minus that of others at the same level, in points, on the same examples.

    Args:
        grid: The runs.
        others: Encoding to compare with, by encoding.
    """
    right = {(name, level): correct(runs) for name, level, runs in _each(grid)}
    keys = [(name, level) for name, level in right if (others.get(name), level) in right]
    return dict(zip(keys, contrasts([(right[key], right[others[key[0]], key[1]]) for key in keys]), strict=True))


def changes(grid: Grid, base: Callable[[str], Level]) -> Changes:
    """Compute the accuracy at every level minus that at the base level of the same encoding, in points, paired.

    Args:
        grid: The runs.
        base: Maps an encoding to the level to compare with.
    """
    right = {(name, level): correct(runs) for name, level, runs in _each(grid)}
    keys = [(name, level) for name, level in right if level != base(name) and (name, base(name)) in right]
    return dict(zip(keys, contrasts([(right[key], right[key[0], base(key[0])]) for key in keys]), strict=True))


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


def trend_table(title: str, slopes: Mapping[str, Interval], heading: str) -> Table:
    """Build a table of slopes."""
    rows = [
        {**named(name), **cells("trend", found), "verdict": verdict_of(found, "rises", "falls", "not significant")}
        for name, found in slopes.items()
    ]
    return Table(title, (*NAMES, with_interval("trend", heading, "points", 2), VERDICT), rows, note=HOLM)


def contrast_table(title: str, moved: Changes, factor: Factor, heading: str, note: str = "") -> Table:
    """Build a table of differences."""
    rows = [
        {**named(name), factor.key: level, **cells("change", found), "verdict": verdict_of(found)}
        for (name, level), found in moved.items()
    ]
    columns = (*NAMES, factor.column, with_interval("change", heading, "points", 1), VERDICT)
    return Table(title, columns, rows, note=f"{HOLM} {note}".strip())


def mixed_tables(grid: Grid, factor: Factor, reference: str) -> tuple[list[Table], list[str]]:
    """Compare encodings that learn more than frequencies with RoPE-Mixed at each level.

    Args:
        grid: The runs.
        factor: Factor of the levels.
        reference: Pairs with this encoding are left out: another table shows them.

    Returns:
        A table of the differences and a note that counts them; empty lists if the grid has no such pair.
    """
    others = {name: other for name, other in mixed_counterparts(grid).items() if other != reference}
    ahead = leads(grid, others)
    tables = [contrast_table(AHEAD_OF_MIXED, ahead, factor, "Ahead", WITH_SAME)] if ahead else []
    return tables, mixed_notes(ahead.values())


def parameter_table(lab: Lab, grid: Grid, factor: Factor) -> Table:
    """Build a table of the encodings' parameters in every cell."""
    rows = [
        {**named(name), factor.key: level, "parameters": count_encoding_parameters(lab.blueprint(runs[0].run))}
        for name, level, runs in _each(grid)
    ]
    columns = (*NAMES, factor.column, Column("parameters", "Parameters of the encodings", digits=0))
    return Table("Learned parameters of the encodings", columns, rows, note="Counted over all layers and heads.")


def _each(grid: Mapping[str, Mapping[Level, Any]]) -> Iterator[tuple[str, Level, Any]]:
    """Yield encoding, level and cell of a grid."""
    for name, levels in grid.items():
        for level, cell in levels.items():
            yield name, level, cell


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
