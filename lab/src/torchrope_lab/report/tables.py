"""Format numbers and tables as text, for the terminal and for Markdown."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torchrope_lab.report.looks import Look, look_class

MISSING = "–"


@dataclass(frozen=True)
class Cell:
    """A formatted value of a table.

    Attributes:
        text: The text shown.
        interval: 95 % interval, shown below the value; empty without one.
        sort: Number to sort by, None if the value is not a number.
        look: CSS class of the colour of an encoding; empty for anything else.
    """

    text: str
    interval: str = ""
    sort: float | None = None
    look: str = ""


@dataclass(frozen=True)
class Shown:
    """A formatted table."""

    title: str
    headings: list[str]
    numeric: list[bool]
    rows: list[list[Cell]]
    source: str = ""
    note: str = ""

    def aligned(self) -> str:
        """Return the table as aligned text for a terminal."""
        return aligned_table(self.headings, self.texts(), self.numeric)

    def markdown(self) -> str:
        """Return the table in Markdown, without title, source and note."""
        return markdown_table(self.headings, self.texts(), self.numeric)

    def texts(self) -> list[list[str]]:
        """Return the cells as text, values with their intervals."""
        return [[f"{cell.text} [{cell.interval}]" if cell.interval else cell.text for cell in row] for row in self.rows]


def show_table(table: dict[str, Any], looks: dict[str, Look]) -> Shown:
    """Format the cells of a table."""
    columns = table["columns"]
    return Shown(
        title=table["title"],
        headings=[with_unit(column) for column in columns],
        numeric=[_is_numeric(column["key"], table["rows"]) for column in columns],
        rows=[[_cell(row, column, looks) for column in columns] for row in table["rows"]],
        source=table.get("source") or "",
        note=table.get("note") or "",
    )


def with_unit(named: dict[str, Any]) -> str:
    """Return the title of a column or an axis with its unit: "Top-1, %"."""
    return f"{named['title']}, {named['unit']}" if named.get("unit") else named["title"]


def written(value: Any, digits: int | None = None) -> str:
    """Format a value of a table: a missing one is a dash, large numbers have thousands separators."""
    if value is None:
        return MISSING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return value
    if digits is None:
        text = count(value) if float(value).is_integer() else _short_number(value)
    else:
        text = f"{value:,.{max(0, digits)}f}"
    return text.replace("-", "−") if float(text.replace(",", "")) != 0 else text.lstrip("-")


def percent(share: float) -> str:
    """Format a share of one as a percentage: 0.9612 is 96.1."""
    return f"{100 * share:.1f}"


def count(number: float) -> str:
    """Format a whole number with thousands separators: 210000 is 210,000."""
    return f"{number:,.0f}"


def significant(number: float) -> str:
    """Format three significant digits without an exponent: 0.031234 is 0.0312."""
    if number == 0:
        return "0"
    decimals = max(0, 2 - math.floor(math.log10(abs(number))))
    return f"{number:,.{decimals}f}"


def size(lengths: list[int]) -> str:
    """Format the lengths of the axes: [8, 8] is 8×8."""
    return "×".join(str(length) for length in lengths)


def duration(seconds: float) -> str:
    """Format a duration in hours, minutes or seconds: 210 is 3 min 30 s."""
    whole = round(seconds)
    hours, minutes = divmod(whole // 60, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {whole % 60} s" if minutes else f"{significant(seconds)} s"


def aligned_table(headings: list[str], rows: list[list[str]], numeric: list[bool]) -> str:
    """Align cells in columns for a terminal, without a final newline."""
    texts = [[_one_line(cell) for cell in column] for column in zip(headings, *rows, strict=True)]
    aligned = [_align(cells, is_number) for cells, is_number in zip(texts, numeric, strict=True)]
    lines = ["  ".join(cells).rstrip() for cells in zip(*aligned, strict=True)]
    rule = "  ".join("-" * len(cells[0]) for cells in aligned)
    return "\n".join([lines[0], rule, *lines[1:]])


def markdown_table(headings: list[str], rows: list[list[str]], numeric: list[bool]) -> str:
    """Format cells as a Markdown table; the text of every cell is escaped."""
    rule = ["---:" if is_number else "---" for is_number in numeric]
    escaped = [[escape_markdown(cell) for cell in cells] for cells in [headings, *rows]]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [escaped[0], rule, *escaped[1:]])


def escape_markdown(text: str) -> str:
    """Join text to one line and escape Markdown markup."""
    return "".join(f"\\{sign}" if sign in r"\`*_[]<>|#" else sign for sign in _one_line(text))


def _short_number(value: float) -> str:
    return significant(value) if 1e-4 <= abs(value) < 1e9 else f"{value:.3g}"


def _cell(row: dict[str, Any], column: dict[str, Any], looks: dict[str, Look]) -> Cell:
    value, digits = row[column["key"]], column.get("digits")
    ends = [row[column[part]] for part in ("low", "high") if column.get(part)]
    interval = ", ".join(written(end, digits) for end in ends) if any(end is not None for end in ends) else ""
    sort = float(value) if isinstance(value, int | float) else None
    return Cell(written(value, digits), interval, sort, look_class(value, looks))


def _is_numeric(key: str, rows: Sequence[dict[str, Any]]) -> bool:
    values = [row[key] for row in rows if row[key] is not None]
    return bool(rows) and all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)


def _align(cells: list[str], numeric: bool) -> list[str]:
    width = max(len(cell) for cell in cells)
    return [cell.rjust(width) if numeric else cell.ljust(width) for cell in cells]


def _one_line(text: str) -> str:
    return " ".join(text.split())
