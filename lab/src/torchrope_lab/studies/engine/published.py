"""Published results of papers, as tables of the report."""

from collections.abc import Sequence

from torchrope_lab.results import Column, Table

LIERE_1 = "Ostmeier et al., LieRE, first version (arXiv:2406.10322v1)"
LIERE_2 = "Ostmeier et al., LieRE, as submitted to ICLR 2025"
LIERE_REVIEWS = "Reviews and answers on LieRE at ICLR 2025"
COMROPE = "Yu et al., ComRoPE, CVPR 2025, supplement"
ROPE_VIT = "Heo et al., Rotary Position Embedding for Vision Transformer (arXiv:2403.13298)"


def published(
    title: str, source: str, rows: str, columns: Sequence[str], *, unit: str = "%", digits: int = 1, note: str = ""
) -> Table:
    """Build a table of published numbers.

    Args:
        title: Title.
        source: Paper and table.
        rows: One per line, cells separated by "|": a name, then numbers; "69.3 (68.9-69.7)" has an interval, "-" is
            missing.
        columns: Titles, that of the name first.
        unit: Unit of the numbers.
        digits: Decimals.
        note: Errors or omissions of the paper's table.
    """
    cells = [[cell.strip() for cell in line.split("|")] for line in rows.strip().splitlines()]
    named = [Column("name", columns[0])]
    for index, heading in enumerate(columns[1:], start=1):
        with_interval = any("(" in line[index] for line in cells)
        ends = (f"low{index}", f"high{index}") if with_interval else (None, None)
        named.append(Column(f"value{index}", heading, unit, digits, low=ends[0], high=ends[1]))
    return Table(title, named, [_row(line) for line in cells], source=source, note=note)


def _row(cells: Sequence[str]) -> dict[str, float | str | None]:
    row: dict[str, float | str | None] = {"name": cells[0]}
    for index, cell in enumerate(cells[1:], start=1):
        value, _, rest = cell.partition("(")
        low, _, high = rest.rstrip(")").partition("-")
        row |= {f"value{index}": _number(value), f"low{index}": _number(low), f"high{index}": _number(high)}
    return row


def _number(text: str) -> float | None:
    return None if text.strip() in ("", "-") else float(text.replace(",", ""))
