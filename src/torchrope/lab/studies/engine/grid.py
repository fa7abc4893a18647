"""A grid of runs: one factor at several levels, for several encodings, and what changes along it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import log2
from typing import Any, Literal

import numpy as np

from torchrope.lab.conclusion import Interval
from torchrope.lab.results import Axis, Column, Figure, Table
from torchrope.lab.studies.engine.estimates import (
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
    together,
    top1,
    trend,
    verdict,
    verdict_of,
    with_interval,
)
from torchrope.lab.studies.engine.feasible import feasible
from torchrope.lab.studies.engine.reference import (
    AHEAD_OF_MIXED,
    WITH_SAME,
    described,
    mixed_counterparts,
    mixed_notes,
)
from torchrope.lab.studies.engine.runs import Run, Trained
from torchrope.lab.studies.engine.study import Lab
from torchrope.lab.training.cost import count_encoding_parameters

Level = float | str
Plan = Mapping[str, Mapping[Level, Sequence[Run]]]
Grid = dict[str, dict[Level, list[Trained]]]
"""Runs over seeds, by encoding and level."""

LOSS = Column("val_loss", "Validation loss", digits=3)


@dataclass(frozen=True)
class Factor:
    """What differs between the runs of an encoding.

    Attributes:
        key: Where a row keeps the level.
        title: For people.
        unit: Of the levels.
        scale: "linear", "log", or "category" for names.
    """

    key: str
    title: str
    unit: str = ""
    scale: Literal["linear", "log", "category"] = "linear"

    @property
    def column(self) -> Column:
        """Of a table."""
        return Column(self.key, self.title, self.unit, None if self.scale == "category" else 0)

    @property
    def axis(self) -> Axis:
        """Of a figure."""
        return Axis(self.key, self.title, self.unit, self.scale)


def train_grid(lab: Lab, plan: Plan) -> tuple[Grid, list[str]]:
    """Train the cells of a grid, all but those whose model cannot be.

    Args:
        lab: Trains.
        plan: Runs over seeds, by encoding and level.

    Returns:
        The cells, and a note for each that was left out.

    Raises:
        ValueError: no cell is left, or a name is unknown.
    """
    kept: dict[str, dict[Level, Sequence[Run]]] = {}
    notes = []
    for name, level, runs in _each(plan):
        possible, refused = feasible(lab, runs)
        notes += [f"At {level}: {note}" for note in refused]
        if possible:
            kept.setdefault(name, {})[level] = possible
    if not kept:
        raise ValueError(f"a study needs a model that can be, got none: {notes[0]}")
    trained = iter(lab.train([run for _, _, runs in _each(kept) for run in runs]))
    grid: Grid = {}
    for name, level, runs in _each(kept):
        grid.setdefault(name, {})[level] = [next(trained) for _ in runs]
    return grid, notes


def top1_table(title: str, grid: Grid, factor: Factor, note: str) -> Table:
    """Top-1 and loss of every cell, and how it compares with the other encodings at its level."""
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
    """Right or not at a level, `(seeds, examples)`, by encoding."""
    return {name: correct(levels[level]) for name, levels in grid.items() if level in levels}


def top1_figure(grid: Grid, factor: Factor, alt: str) -> Figure:
    """Top-1 over the factor, one line per encoding; points where levels are names."""
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
    """How far encodings are ahead of others at the same level, in points, on the same examples.

    Args:
        grid: The runs.
        others: By encoding, the one to compare with.
    """
    right = {(name, level): correct(runs) for name, level, runs in _each(grid)}
    keys = [(name, level) for name, level in right if (others.get(name), level) in right]
    return dict(zip(keys, contrasts([(right[key], right[others[key[0]], key[1]]) for key in keys]), strict=True))


def changes(grid: Grid, base: Callable[[str], Level]) -> Changes:
    """How much better every level is than the base level of the same encoding, in points, on the same examples.

    Args:
        grid: The runs.
        base: From an encoding to the level to compare with.
    """
    right = {(name, level): correct(runs) for name, level, runs in _each(grid)}
    keys = [(name, level) for name, level in right if level != base(name) and (name, base(name)) in right]
    return dict(zip(keys, contrasts([(right[key], right[key[0], base(key[0])]) for key in keys]), strict=True))


def trends(grid: Grid, x: Callable[[float], float] = log2, reference: str | None = None) -> dict[str, Interval]:
    """The slope of top-1, in points for each unit of x, of encodings that have two levels or more.

    Args:
        grid: The runs.
        x: Of a level, by default the number of doublings.
        reference: Take the lead over this encoding in place of top-1.
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
    return together(slopes)


def trend_table(title: str, slopes: Mapping[str, Interval], heading: str) -> Table:
    """The slopes as a table."""
    rows = [
        {**named(name), **cells("trend", found), "verdict": verdict_of(found, "rises", "falls", "not measurable")}
        for name, found in slopes.items()
    ]
    return Table(title, (*NAMES, with_interval("trend", heading, "points", 2), VERDICT), rows, note=HOLM)


def contrast_table(title: str, moved: Changes, factor: Factor, heading: str, note: str = "") -> Table:
    """Differences as a table."""
    rows = [
        {**named(name), factor.key: level, **cells("change", found), "verdict": verdict_of(found)}
        for (name, level), found in moved.items()
    ]
    columns = (*NAMES, factor.column, with_interval("change", heading, "points", 1), VERDICT)
    return Table(title, columns, rows, note=f"{HOLM} {note}".strip())


def mixed_tables(grid: Grid, factor: Factor, reference: str) -> tuple[list[Table], list[str]]:
    """What learning more than the frequencies of RoPE-Mixed adds at each level.

    Args:
        grid: The runs.
        factor: Of the levels.
        reference: Pairs with this one are left out: another table holds them.

    Returns:
        A table of the differences and a note that counts them; nothing where the grid has no such pair.
    """
    others = {name: other for name, other in mixed_counterparts(grid).items() if other != reference}
    ahead = leads(grid, others)
    tables = [contrast_table(AHEAD_OF_MIXED, ahead, factor, "Ahead", WITH_SAME)] if ahead else []
    return tables, mixed_notes(ahead.values())


def parameter_table(lab: Lab, grid: Grid, factor: Factor) -> Table:
    """Parameters of the encodings of every cell."""
    rows = [
        {**named(name), factor.key: level, "parameters": count_encoding_parameters(lab.blueprint(runs[0].run))}
        for name, level, runs in _each(grid)
    ]
    columns = (*NAMES, factor.column, Column("parameters", "Parameters of the encodings", digits=0))
    return Table("Parameters that the encodings learn", columns, rows, note="Counted over all layers and heads.")


def _each(grid: Mapping[str, Mapping[Level, Any]]) -> Iterator[tuple[str, Level, Any]]:
    """Encoding, level and cell, one by one."""
    for name, levels in grid.items():
        for level, cell in levels.items():
            yield name, level, cell


def lead_figure(factor: Factor, ahead: Changes, reference: str, same: str) -> Figure:
    """Points ahead of a reference over a factor.

    Args:
        factor: What varies.
        ahead: From `leads`.
        reference: Its name.
        same: What the two have in common: "the same model".
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
