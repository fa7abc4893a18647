"""Format numbers and tables for the page, the terminal, Markdown and LaTeX."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from torchrope_lab.report.looks import Look, look_class
from torchrope_lab.results import Axis, Column, Row, Table, Value

MISSING = "–"
_LATEX = {
    "\\": r"\textbackslash{}",
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "−": "$-$",
    "×": r"$\times$",
    "±": r"$\pm$",
    "–": "--",
}


@dataclass(frozen=True)
class FormattedCell:
    """A formatted value of a table."""

    text: str
    interval: str = ""  # of 95 %, shown below the value; empty without one
    sort: float | None = None  # number to sort by, None if the value is not a number
    look: str = ""  # CSS class of the colour of an encoding; empty for anything else

    def __str__(self) -> str:
        return f"{self.text} [{self.interval}]" if self.interval else self.text


@dataclass(frozen=True)
class FormattedTable:
    """A table whose numbers are formatted: cells for the page, and text in three forms."""

    title: str
    headings: list[str]
    numeric: list[bool]
    rows: list[list[FormattedCell]]
    source: str = ""
    note: str = ""

    def aligned(self) -> str:
        """Return the table as aligned text for a terminal, without a final newline."""
        texts = [[_one_line(cell) for cell in column] for column in zip(*self._lines(), strict=True)]
        widths = [max(map(len, column)) for column in texts]
        columns = [
            [cell.rjust(width) if is_number else cell.ljust(width) for cell in [column[0], "-" * width, *column[1:]]]
            for column, width, is_number in zip(texts, widths, self.numeric, strict=True)
        ]
        return "\n".join("  ".join(cells).rstrip() for cells in zip(*columns, strict=True))

    def markdown(self) -> str:
        """Return the table in Markdown, without title, source and note."""
        rule = ["---:" if is_number else "---" for is_number in self.numeric]
        heading, *rows = [[escape_markdown(cell) for cell in row] for row in self._lines()]
        return "\n".join(f"| {' | '.join(cells)} |" for cells in [heading, rule, *rows])

    def latex(self) -> str:
        """Return a LaTeX `tabular` with rules of the package booktabs; its comments have title, source and note."""
        comments = [f"% {_one_line(text)}" for text in (self.title, self.source, self.note) if text]
        heading, *rows = [
            " & ".join("".join(_LATEX.get(sign, sign) for sign in cell) for cell in row) + r" \\"
            for row in self._lines()
        ]
        columns = "".join("r" if is_number else "l" for is_number in self.numeric)
        body = [rf"\begin{{tabular}}{{{columns}}}", r"\toprule", heading, r"\midrule", *rows, r"\bottomrule"]
        return "\n".join([*comments, *body, r"\end{tabular}", ""])

    def _lines(self) -> list[list[str]]:
        return [self.headings, *([str(cell) for cell in row] for row in self.rows)]


def format_table(table: Table, looks: Mapping[str, Look] = MappingProxyType({})) -> FormattedTable:
    """Format the cells of a table; names of encodings get the colours of `looks`."""
    return FormattedTable(
        title=table.title,
        headings=[with_unit(column) for column in table.columns],
        numeric=[_is_numeric([row[column.key] for row in table.rows]) for column in table.columns],
        rows=[[_format_cell(row, column, looks) for column in table.columns] for row in table.rows],
        source=table.source,
        note=table.note,
    )


def with_unit(titled: Column | Axis) -> str:
    """Return the title of a column or an axis with its unit: "Top-1, %"."""
    return f"{titled.title}, {titled.unit}" if titled.unit else titled.title


def written(value: Value, digits: int | None = None) -> str:
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


def size(lengths: Sequence[int]) -> str:
    """Format the lengths of the axes: [8, 8] is 8×8."""
    return "×".join(str(length) for length in lengths)


def duration(seconds: float) -> str:
    """Format a duration in hours, minutes or seconds: 210 is 3 min 30 s."""
    whole = round(seconds)
    hours, minutes = divmod(whole // 60, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {whole % 60} s" if minutes else f"{significant(seconds)} s"


def escape_markdown(text: str) -> str:
    """Join text to one line and escape Markdown markup."""
    return "".join(f"\\{sign}" if sign in r"\`*_[]<>|#" else sign for sign in _one_line(text))


def _short_number(value: float) -> str:
    return significant(value) if 1e-4 <= abs(value) < 1e9 else f"{value:.3g}"


def _format_cell(row: Row, column: Column, looks: Mapping[str, Look]) -> FormattedCell:
    value = row[column.key]
    ends = [row[key] for key in (column.low, column.high) if key]
    interval = ", ".join(written(end, column.digits) for end in ends) if any(end is not None for end in ends) else ""
    sort = float(value) if isinstance(value, int | float) else None
    return FormattedCell(written(value, column.digits), interval, sort, look_class(value, looks))


def _is_numeric(values: Sequence[Value]) -> bool:
    """Return whether all values are numbers or missing."""
    return bool(values) and all(value is None or type(value) in (int, float) for value in values)


def _one_line(text: str) -> str:
    return " ".join(text.split())
