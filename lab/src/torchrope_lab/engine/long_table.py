"""The long table of a study, values by arm, level, seed and example, and the tables of the report made from it."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from math import isfinite
from typing import Any, NamedTuple

import numpy as np

from torchrope_lab.conclusion import NOT_DIFFERENT, Interval, caveat, join_names, signed
from torchrope_lab.engine.descriptions import label
from torchrope_lab.engine.estimates import (
    contrasts,
    in_percent,
    rank,
    simultaneous_intervals,
    spread,
    verdict_of,
    weighted_mean,
)
from torchrope_lab.results import Column, Row, Table
from torchrope_lab.statistics import BootstrapEstimate, accuracy_interval, draw

Level = float | str
ONLY: Level = ""
"""The level of a study that compares arms alone."""


class Cell(NamedTuple):
    """An arm, most often an encoding, at a level of the factor of a study, or a variant of that arm."""

    arm: str
    level: Level = ONLY
    variant: str = ""


Pairs = Mapping[Cell, Cell]
"""What each cell is compared with."""
Changes = Mapping[Cell, Interval]
"""Differences or slopes by cell, with intervals that are simultaneous over all of them."""
Statistic = Callable[[Any, np.ndarray], np.ndarray]
"""Maps the values of a seed and weights of examples `(draws, examples)` to values `(draws,)`."""
Columns = Sequence[tuple[Column, Callable[[Any], Any]]]
"""Columns of a table, each with the function that computes its value, or its estimate with an interval, for a row."""

TOP1 = Column("top1", "Top-1", "%", 1, low="low", high="high")
VERDICT = Column("verdict", "Verdict")
NONE_POSSIBLE = "None of the encodings can be trained with this model."
SIMULTANEOUS = (
    "Intervals are simultaneous over all rows (max-T, nominally 95 %): a difference is significant if and only if its "
    "interval excludes 0."
)


@dataclass(frozen=True)
class Quantity:
    """One measure in the long table: an array for each arm and level. Its intervals are bootstrap intervals.

    Attributes:
        values: Values of each cell, `(seeds, examples, ...)`.
        shown: Its column in tables; in percent, values are shares of 1.
        statistic: Maps the values of a seed and weights `(draws, examples)` to the values of all draws.
    """

    values: Mapping[Cell, Any]
    shown: Column
    statistic: Statistic = weighted_mean

    @cached_property
    def estimates(self) -> dict[Cell, BootstrapEstimate]:
        """The statistic of every cell, on all examples and on bootstrap draws of them."""
        return {
            cell: draw([partial(self.statistic, values) for values in seeds], len(seeds[0]))
            for cell, seeds in self.values.items()
        }

    def interval(self, cell: Cell) -> Interval:
        """Return the mean over seeds of a cell with its 95 % interval."""
        return self._scaled(self.estimates[cell].interval())

    def changes(self, pairs: Pairs) -> Changes:
        """Compute cells minus others, of pairs that have values, paired by example."""
        return self._differences({cell: pairs[cell] for cell in pairs if {cell, pairs[cell]} <= self.values.keys()})

    def _differences(self, pairs: Pairs) -> Changes:
        differences = {cell: self.estimates[cell] - self.estimates[base] for cell, base in pairs.items()}
        return {cell: self._scaled(change) for cell, change in simultaneous_intervals(differences).items()}

    def changes_by_level(self, pairs: Pairs) -> Changes:
        """Compute `changes` whose intervals are simultaneous over the cells of a level."""
        levels = dict.fromkeys(cell.level for cell in pairs)
        found = [self.changes({cell: pairs[cell] for cell in pairs if cell.level == level}) for level in levels]
        return {cell: change for of_level in found for cell, change in of_level.items()}

    def ranks(self, level: Level = ONLY, *, lowest: bool = False) -> dict[Cell, str]:
        """Rank the cells of a level by `rank`, the best first."""
        found = {cell: each for cell, each in self.estimates.items() if cell.level == level}
        if lowest:
            found = {cell: BootstrapEstimate(-at.on_all, -at.draws, at.examples) for cell, at in found.items()}
        return rank(found)

    @property
    def column(self) -> tuple[Column, Callable[[Cell], Any]]:
        """Its column for a table, empty for cells without values."""
        return self.shown, lambda cell: self.interval(cell) if cell in self.values else None

    def against_arms(self, others: Mapping[str, str]) -> Pairs:
        """Pair cells with other arms, by arm, at the same level."""
        return {cell: Cell(others[cell.arm], cell.level) for cell in self.values if cell.arm in others}

    def _scaled(self, found: Interval) -> Interval:
        return in_percent(found) if self.shown.unit == "%" else found


@dataclass(frozen=True)
class RightOrWrong(Quantity):
    """Right (1) or wrong (0) answers `(seeds, examples)`, in percent, with score intervals."""

    shown: Column = TOP1

    def interval(self, cell: Cell) -> Interval:
        """Return the accuracy of a cell in percent with its 95 % interval."""
        return in_percent(accuracy_interval(self.values[cell]))

    def _differences(self, pairs: Pairs) -> Changes:
        return contrasts({cell: (self.values[cell], self.values[base]) for cell, base in pairs.items()})

    def spread(self, cell: Cell) -> float | None:
        """Compute the standard deviation over seeds in percent; None for one seed."""
        over_seeds = spread(self.values[cell].mean(axis=1).tolist())
        return None if over_seeds is None else 100 * over_seeds

    @property
    def columns(self) -> Columns:
        """Columns of accuracy and of its standard deviation over seeds."""
        return self.column, (Column("spread", "± over seeds", "%", 1), self.spread)


# ---- tables


def with_interval(key: str, title: str, unit: str = "", digits: int | None = None) -> Column:
    """Return a column of estimates with intervals."""
    return Column(key, title, unit, digits, low=f"{key}_low", high=f"{key}_high")


def name_columns(titles: Mapping[str, str] | None = None) -> Columns:
    """Return the columns of the arms of cells: titles and names; `titles` of arms that are no encodings."""
    title = Column("encoding", "Encoding"), lambda cell: (titles or {}).get(cell.arm) or label(cell.arm)
    return title, (Column("name", "Name"), lambda cell: cell.arm)


def at_levels(
    value: Callable[[Cell], Any], titles: Mapping[Any, str], unit: str, digits: int = 1, prefix: str = "at"
) -> Columns:
    """Return a column of estimates for each level of a row's arm and variant, by their titles."""

    def at(level: Level) -> Callable[[Cell], Any]:
        return lambda cell: value(cell._replace(level=level))

    return [(with_interval(f"{prefix}{level}", title, unit, digits), at(level)) for level, title in titles.items()]


def change_columns(changes: Changes, heading: str, key: str = "change", unit: str = "points", digits: int = 1,
                   words: Sequence[str] = ()) -> Columns:  # fmt: skip
    """Return columns of differences and of verdicts on them; a cell without a difference is the baseline."""

    def written(cell: Cell) -> str:
        return verdict_of(changes[cell], *words) if cell in changes else "the baseline"

    return (with_interval(key, heading, unit, digits), changes.get), (VERDICT, written)


def table_of(
    title: str, columns: Columns, rows: Iterable[Any], note: str = "", keys: Callable[[Any], Row] = lambda _: {}
) -> Table:
    """Build a table with a row for each cell or other item; `keys` returns values of its row without a column."""
    # Columns without a value in any row are left out.
    cells = [{**keys(row), **row_of(columns, row)} for row in rows]
    shown = [column for column, _ in columns if any(row[column.key] is not None for row in cells)]
    return Table(title, shown, cells, note=note)


def row_of(columns: Columns, item: Any) -> dict[str, Any]:
    """Compute the row of one item."""
    row: dict[str, Any] = {}
    for column, value in columns:
        keys = [key for key in (column.key, column.low, column.high) if key]
        values = value(item) or (None, None, None) if column.low else [value(item)]
        row |= dict(zip(keys, values, strict=True))
    return row


# ---- sentences


def format_interval(found: Sequence[float], unit: str = "", digits: int = 1) -> str:
    """Format an estimate with its interval, if there is one: "1.2 rad [0.3, 2.1]"."""
    value, low, high = (signed(each, digits) for each in found)
    return f"{value}{unit} [{low}, {high}]" if isfinite(found[1]) or isfinite(found[2]) else f"{value}{unit}"


def not_learned(who: str, chance: float) -> str:
    """Say that an encoding, or all, learned nothing; it then says nothing when others are as accurate."""
    share = f"{100 * chance:.1f} %"
    return f"{who} is not significantly better than always predicting the most frequent class ({share})"


def ranking(
    claim: str, verdicts: Mapping[Cell, str], interval_of: Callable[[Cell], Any], unit: str = " %", digits: int = 1
) -> str:
    """Name the first of ranked cells, its estimate, and those not significantly different, without a full stop."""
    first, *others = verdicts
    tied = [cell.arm for cell in others if verdicts[cell] == NOT_DIFFERENT]
    equal = f", {NOT_DIFFERENT} from {join_names(tied)}" if tied else ""
    return f"{claim} with {first.arm}, {format_interval(interval_of(first), unit, digits)}{equal}"


def change_sentence(
    what: str, measure: str, changes: Changes, seeds: int, unit: str = " points", digits: int = 1
) -> str:
    """Describe in how many cells an intervention significantly changes a measure, and its largest effect."""
    # `what` and `measure` are words, as in "sharing across heads or layers" and "accuracy".
    if not changes:
        return f"There is nothing to compare for {what}: only one case was trained."
    raised, lowered = (sum(each) for each in zip(*((m.low > 0, m.high < 0) for m in changes.values()), strict=True))
    significant = {cell: m for cell, m in changes.items() if m.low > 0 or m.high < 0} or changes
    cell = max(significant, key=lambda cell: abs(significant[cell].estimate))
    name = cell.arm if len({cell.level for cell in changes}) == 1 else f"{cell.arm} ({cell.level})"
    largest = f"the largest change is {format_interval(changes[cell], unit, digits)}, with {name}"
    if not raised and not lowered:
        return f"This run cannot tell whether {what} changes {measure}: {largest}.{caveat(seeds)}"
    counts = f"raises {measure} in {raised} of {len(changes)} cases and lowers it in {lowered}"
    return f"{what[0].upper()}{what[1:]} significantly {counts}; {largest}.{caveat(seeds)}"
