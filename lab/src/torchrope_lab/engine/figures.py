"""Figures of accuracy by encoding and by epoch."""

from collections.abc import Iterable, Mapping, Sequence
from math import isfinite
from statistics import fmean
from typing import Any, Literal

import numpy as np

from torchrope_lab.engine.long_table import Cell, Columns, RightOrWrong, row_of
from torchrope_lab.engine.runs import Trained
from torchrope_lab.results import Axis, Figure, Row, Value

TOP1_AXIS = Axis("top1", "Top-1", "%")
ENCODING_AXIS = Axis("name", "Encoding", scale="category")


def figure(
    name: str,
    title: str,
    x: Axis,
    y: Axis,
    rows: Sequence[Row],
    caption: str = "",
    *,
    kind: Literal["lines", "points", "bars"] = "lines",
    series: str = "name",
    panel: str | None = None,
) -> Figure:
    """Build a figure with a line, or marks, for each series and a small figure for each panel, both keys of rows."""
    # Intervals are those of rows: "low" and "high", or of the key of an axis.
    keys = {key for row in rows for key in row}
    pairs = [("low", "high"), *((f"{axis.key}_low", f"{axis.key}_high") for axis in (x, y))]
    low, high = next((pair for pair in pairs if keys.issuperset(pair)), (None, None))
    axes = (f"{axis.title.lower()}{f' in {axis.unit}' if axis.unit else ''}" for axis in (y, x))
    alt = f"{title}: {' by '.join(axes)}, {len({row[series] for row in rows})} series"
    alt += f" in {len({row[panel] for row in rows})} panels" if panel else ""
    alt += ", with intervals." if low else "."
    return Figure(name, kind, title, alt, x, y, rows, series, panel, low, high, caption=caption)


def marks(cells: Iterable[Cell], columns: Columns, level: str = "") -> list[Row]:
    """Return a row for each cell: its arm as "name", its level under a key, and columns."""
    return [{"name": cell.arm, **({level: cell.level} if level else {}), **row_of(columns, cell)} for cell in cells]


def top1_by_encoding(top1: RightOrWrong, chance: float) -> Figure:
    """Build a figure of top-1 with intervals, in decreasing order."""
    ordered = sorted(top1.values, key=lambda cell: (-top1.values[cell].mean(), cell))
    caption = f"Lines are 95 % intervals. The best constant prediction has {100 * chance:.1f} %."
    rows = marks(ordered, top1.columns)
    return figure("top1", "Accuracy", TOP1_AXIS, ENCODING_AXIS, rows, caption, kind="points")


def top1_curves(groups: Mapping[str, Sequence[Trained]]) -> Figure:
    """Build a figure of validation top-1 after every epoch."""
    rows: list[Row] = [
        {"name": name, "epoch": epoch, "top1": 100 * mean, "low": 100 * low, "high": 100 * high}
        for name, runs in groups.items()
        for epoch, mean, low, high in over_epochs(runs, "val_top1")
    ]
    caption = "Mean over training runs; bands are from the lowest to the highest."
    return figure("curves", "Accuracy while training", Axis("epoch", "Epoch"), TOP1_AXIS, rows, caption)


def over_epochs(runs: Sequence[Trained], key: str) -> list[tuple[int, float, float, float]]:
    """Return epoch, mean, lowest and highest over runs, for epochs in which all have a finite value."""
    found = []
    for epochs in zip(*(each.curve for each in runs), strict=False):
        values = [epoch.get(key) for epoch in epochs]
        finite = [value for value in values if value is not None and isfinite(value)]
        if len(finite) == len(values):
            found.append((int(epochs[0]["epoch"]), fmean(finite), min(finite), max(finite)))
    return found


Point = tuple[str, str, float, Sequence[float | None] | None]
"""Series, panel, x, and an estimate with the ends of its interval."""


def line_figure(
    x: Axis, y: Axis, points: Iterable[Point], *, panel: str | None = None, panels: bool = True, **shown: Any
) -> Figure:
    """Build a figure of lines through estimates with intervals, with a small figure by panel if `panels`."""
    rows: list[Row] = []
    for series, part, at, found in points:
        y_cells = dict(zip((y.key, f"{y.key}_low", f"{y.key}_high"), found or (None,) * 3, strict=True))
        rows.append({"name": series, **({panel: part} if panel else {}), x.key: at, **y_cells})
    return figure(x=x, y=y, rows=rows, panel=panel if panels else None, **shown)


def cells_figure(x: Axis, y: Axis, colour: Axis, cells: Iterable[Sequence[Value]], **shown: Any) -> Figure:
    """Build a figure of coloured cells, such as a matrix, from x, y, value and possibly panel of each cell."""
    keys = [x.key, y.key, colour.key, *([shown["panel"]] if "panel" in shown else [])]
    rows = [dict(zip(keys, cell, strict=True)) for cell in cells]
    alt = f"{shown['title']}: {colour.title.lower()} by {x.title.lower()} and {y.title.lower()}, as colours."
    return Figure(kind="cells", x=x, y=y, rows=rows, colour=colour, **{"alt": alt, **shown})


def map_figure(x: Axis, y: Axis, colour: Axis, maps: Mapping[str, np.ndarray], **shown: Any) -> Figure:
    """Build a figure of coloured maps `(rows, columns)`, one small figure for each."""
    alt = f"{colour.title} by {x.title.lower()} and {y.title.lower()}, {len(maps)} maps."
    cells = (
        (j, i, round(float(value), 6), panel)
        for panel, values in maps.items()
        for (i, j), value in np.ndenumerate(values)
    )
    return cells_figure(x, y, colour, cells, panel="panel", alt=alt, **shown)
