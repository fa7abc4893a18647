"""A grid of runs: one factor at several levels, for several encodings, and what changes along it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import log2
from typing import Any, Literal

from torchrope.lab.results import Axis, Column, Figure, Table
from torchrope.lab.studies.describe import label
from torchrope.lab.studies.engine.estimates import OVER_SEEDS, TOP1, contrast, correct, loss, points, told, top1, trend
from torchrope.lab.studies.engine.feasible import feasible
from torchrope.lab.studies.engine.runs import Run, Trained
from torchrope.lab.studies.engine.study import Lab

Level = float | str
Plan = Mapping[str, Mapping[Level, Sequence[Run]]]
Cells = dict[str, dict[Level, list[Trained]]]
"""Runs over seeds, by encoding and level."""

ENCODING = (Column("encoding", "Encoding"), Column("name", "Name"))
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


def train_grid(lab: Lab, plan: Plan) -> tuple[Cells, list[str]]:
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
    cells: Cells = {}
    for name, level, runs in _each(kept):
        cells.setdefault(name, {})[level] = [next(trained) for _ in runs]
    return cells, notes


def top1_table(title: str, cells: Cells, factor: Factor, note: str) -> Table:
    """Top-1 and loss of every cell."""
    rows = [
        {**named(name), factor.key: level, **top1(correct(runs)), "val_loss": loss(runs)}
        for name, level, runs in _each(cells)
    ]
    return Table(title, (*ENCODING, factor.column, TOP1, OVER_SEEDS, LOSS), rows, note=note)


def top1_figure(cells: Cells, factor: Factor, alt: str) -> Figure:
    """Top-1 over the factor, one line an encoding; points where levels are names."""
    return Figure(
        name=f"top1-by-{factor.key.replace('_', '-')}",
        kind="points" if factor.scale == "category" else "lines",
        title=f"Top-1 by {factor.title.lower()}",
        alt=alt,
        x=factor.axis,
        y=Axis("top1", "Top-1", "%"),
        rows=[{"name": name, factor.key: level, **top1(correct(runs))} for name, level, runs in _each(cells)],
        series="name",
        low="low",
        high="high",
        caption="Intervals are 95 % over validation examples.",
    )


def leads(cells: Cells, reference: str) -> list[dict[str, Any]]:
    """How far every encoding is ahead of one of them at the same level, in points, on the same examples.

    Returns:
        Rows with encoding, name, level, lead, low, high, verdict.
    """
    return [
        {**named(name), "level": level, **_contrast("lead", runs, cells[reference][level])}
        for name, level, runs in _each(cells)
        if name != reference and level in cells.get(reference, {})
    ]


def changes(cells: Cells, base: Level | Callable[[str], Level]) -> list[dict[str, Any]]:
    """How much better every level is than the base level of the same encoding, in points, on the same examples.

    Args:
        cells: The grid.
        base: The level to compare with, the same for all or found by encoding.

    Returns:
        Rows with encoding, name, level, change, low, high, verdict.
    """
    found = []
    for name, level, runs in _each(cells):
        start = base(name) if callable(base) else base
        if level != start and start in cells[name]:
            found.append({**named(name), "level": level, **_contrast("change", runs, cells[name][start])})
    return found


def trends(cells: Cells) -> list[dict[str, Any]]:
    """The slope of top-1 for each doubling of the level, per encoding that has two levels or more.

    Returns:
        Rows with encoding, name, trend, low, high, verdict.
    """
    rows = []
    for name, levels in cells.items():
        if len(levels) > 1:
            doublings = [log2(float(level)) for level in levels]
            value, low, high = trend(doublings, [correct(runs) for runs in levels.values()])
            rows.append({**named(name), "trend": value, "low": low, "high": high, "verdict": direction(low, high)})
    return rows


def direction(low: float, high: float) -> str:
    """ "rises", "falls", or "flat" where the interval holds 0."""
    if low <= 0 <= high:
        return "flat"
    return "rises" if low > 0 else "falls"


def tell_trends(rows: Sequence[Mapping[str, Any]], doubled: str) -> str:
    """Say what a doubling does: "A doubling of the block size adds 1.0 points [0.4, 1.6] for liere."."""
    said = []
    for word, verb in (("rises", "adds"), ("falls", "costs")):
        moved = [row for row in rows if row["verdict"] == word]
        if moved:
            each = [f"{_size(row)} for {row['name']}" for row in moved]
            said.append(f"a doubling of {doubled} {verb} {told(each)}")
    flat = [f"{row['name']} ({row['trend']:+.1f} points [{row['low']:.1f}, {row['high']:.1f}])" for row in rows]
    flat = [text for text, row in zip(flat, rows, strict=True) if row["verdict"] == "flat"]
    if flat:
        first = "it makes no measurable difference for" if said else f"a doubling of {doubled} changes nothing for"
        said.append(f"{first} {told(flat)}" + ("" if said else " that can be measured"))
    return _sentence("; ".join(said))


def trend_table(title: str, rows: Sequence[Mapping[str, Any]], doubled: str) -> Table:
    """The slopes as a table."""
    slope = Column("trend", f"Per doubling of {doubled}", "points", 2, low="low", high="high")
    return Table(title, (*ENCODING, slope, Column("verdict", "Verdict")), list(rows), note=ONE_BY_ONE)


def contrast_table(
    title: str, rows: Sequence[Mapping[str, Any]], factor: Factor, key: str, heading: str, note: str = ""
) -> Table:
    """Rows of `leads` or `changes` as a table."""
    moved = [{**row, factor.key: row["level"]} for row in rows]
    column = Column(key, heading, "points", 1, low="low", high="high")
    return Table(title, (*ENCODING, factor.column, column, Column("verdict", "Verdict")), moved, note=note)


ONE_BY_ONE = "Each interval holds 95 % on its own: of twenty that should hold 0, one does not by chance."


def better_or_not(rows: Sequence[Mapping[str, Any]], key: str) -> tuple[list[str], list[str], list[str]]:
    """Contrasts in words, "liere 1.2 points [0.3, 2.1]", those that are better, worse and tied."""
    sorted_out: dict[str, list[str]] = {"better": [], "worse": [], "tied": []}
    for row in rows:
        sorted_out[row["verdict"]].append(f"{row['name']} {points(row[key], row['low'], row['high'])}")
    return sorted_out["better"], sorted_out["worse"], sorted_out["tied"]


def _each(grid: Mapping[str, Mapping[Level, Any]]) -> Iterator[tuple[str, Level, Any]]:
    """Encoding, level and cell, one by one."""
    for name, levels in grid.items():
        for level, cell in levels.items():
            yield name, level, cell


def lead_figure(factor: Factor, ahead: Sequence[Mapping[str, Any]], same: str) -> Figure:
    """Points ahead of a learned absolute encoding over a factor, from the rows of `leads`.

    Args:
        factor: What varies.
        ahead: The rows.
        same: What the two have in common: "the same model".
    """
    key = factor.axis.key
    return Figure(
        name=f"lead-by-{key}",
        kind="lines",
        title="Ahead of a learned absolute encoding",
        alt=f"Points of top-1 ahead of a learned absolute encoding with {same}, one line an encoding.",
        x=factor.axis,
        y=Axis("lead", "Ahead", "points"),
        rows=[{key: row["level"], **{name: row[name] for name in ("name", "lead", "low", "high")}} for row in ahead],
        series="name",
        low="low",
        high="high",
        caption=f"Zero is the learned absolute encoding with {same}; intervals are 95 %.",
    )


def named(name: str) -> dict[str, str]:
    """What rows say of an encoding: the cells of `ENCODING`."""
    return {"encoding": label(name), "name": name}


def _contrast(key: str, one: Sequence[Trained], other: Sequence[Trained]) -> dict[str, Any]:
    found = contrast(correct(one), correct(other))
    return {key: found.value, "low": found.low, "high": found.high, "verdict": found.verdict}


def _size(row: Mapping[str, Any]) -> str:
    value, low, high = abs(row["trend"]), *sorted((abs(row["low"]), abs(row["high"])))
    return points(value, low, high)


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}." if text else ""
