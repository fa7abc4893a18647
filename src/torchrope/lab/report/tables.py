"""Numbers as people read them, and tables as text: for the terminal and for Markdown."""

import math

MISSING = "–"


def percent(share: float) -> str:
    """Write a share of one as a percentage: 0.9612 is 96.1."""
    return f"{100 * share:.1f}"


def count(number: float) -> str:
    """Write a whole number with thousands apart: 210000 is 210,000."""
    return f"{number:,.0f}"


def significant(number: float) -> str:
    """Write three significant digits without an exponent: 0.031234 is 0.0312."""
    if number == 0:
        return "0"
    decimals = max(0, 2 - math.floor(math.log10(abs(number))))
    return f"{number:,.{decimals}f}"


def size(lengths: list[int]) -> str:
    """Write the lengths of the axes: [8, 8] is 8×8."""
    return "×".join(str(length) for length in lengths)


def duration(seconds: float) -> str:
    """Write a time a person can judge: 210 is 3 min 30 s."""
    whole = round(seconds)
    hours, minutes = divmod(whole // 60, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {whole % 60} s" if minutes else f"{significant(seconds)} s"


def aligned_table(headings: list[str], rows: list[list[str]], numeric: list[bool]) -> str:
    """Lay cells out in columns for a terminal, without a final newline."""
    texts = [[_one_line(cell) for cell in column] for column in zip(headings, *rows, strict=True)]
    aligned = [_align(cells, is_number) for cells, is_number in zip(texts, numeric, strict=True)]
    lines = ["  ".join(cells).rstrip() for cells in zip(*aligned, strict=True)]
    rule = "  ".join("-" * len(cells[0]) for cells in aligned)
    return "\n".join([lines[0], rule, *lines[1:]])


def markdown_table(headings: list[str], rows: list[list[str]], numeric: list[bool]) -> str:
    """Lay cells out as a Markdown table; the text of every cell is escaped."""
    rule = ["---:" if is_number else "---" for is_number in numeric]
    escaped = [[escape_markdown(cell) for cell in cells] for cells in [headings, *rows]]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [escaped[0], rule, *escaped[1:]])


def escape_markdown(text: str) -> str:
    """Put text on one line and keep Markdown from reading any of it as markup."""
    return "".join(f"\\{sign}" if sign in r"\`*_[]<>|#" else sign for sign in _one_line(text))


def _align(cells: list[str], numeric: bool) -> list[str]:
    width = max(len(cell) for cell in cells)
    return [cell.rjust(width) if numeric else cell.ljust(width) for cell in cells]


def _one_line(text: str) -> str:
    return " ".join(text.split())
