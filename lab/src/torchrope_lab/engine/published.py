"""Published results of papers and their errata, from `engine/published.yaml`."""

from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Any

import yaml

from torchrope_lab.mistakes import Mistake
from torchrope_lab.recipes import Recipe
from torchrope_lab.results import Column, Table


@cache
def _file() -> dict[str, Any]:
    return yaml.safe_load(resources.files("torchrope_lab.engine").joinpath("published.yaml").read_text("utf-8"))


def cite(reference: str) -> str:
    """Write references such as "liere-2, table 1", separated by "; ", in full; papers without a key stay."""
    parts = (one.partition(",") for one in reference.split("; "))
    return "; ".join(f"{_file()['sources'].get(paper, paper)}{comma}{place}" for paper, comma, place in parts)


def published(study: str) -> list[Table]:
    """Return the published results that belong to a study."""
    return [table_of_entry(entry) for entry in _file()["tables"].get(study, [])]


def results_of(recipe: Recipe) -> dict[str, dict[str, float]]:
    """Return the published results of a recipe, by measure and name of the encoding."""
    results = {}
    for measure, reference in (recipe.published or {}).items():
        title, name, *_ = reference.split(" | ")
        tables = [entry for study in _file()["tables"].values() for entry in study if entry["title"] == title]
        if not tables:
            raise Mistake(f"{recipe.name} must name a published table, got {title!r}")
        table = table_of_entry(tables[0])
        keys = {column.title: column.key for column in table.columns}
        rows = {str(row["name"]): row for row in table.rows}
        if name not in keys and name not in rows:
            raise Mistake(f"{recipe.name} must name a column or row of {title!r}, got {name!r}")
        cells: dict[str, Any] = (
            {row: values[keys[name]] for row, values in rows.items()}
            if name in keys
            else {column: rows[name][key] for column, key in keys.items() if key != "name"}
        )
        results[measure] = {row.partition(" (")[0]: cell for row, cell in cells.items() if cell is not None}
    return results


def errata(study: str | None = None) -> list[dict[str, str]]:
    """Return errata of the tables of a study, or of all: source, what (cell or statement), printed, correct, why."""
    tables = _file()["tables"]
    entries = [entry for name in ([study] if study else tables) for entry in tables.get(name, [])]
    return [{"source": entry["source"], **erratum} for entry in entries for erratum in entry.get("errata", [])]


def claims() -> list[dict[str, str]]:
    """Return the numbers of parameters and operations in the texts of papers: what, source, printed, counted, why."""
    return [{"why": "", **claim} for claim in _file()["claims"]]


def table_of_entry(entry: Mapping[str, Any]) -> Table:
    """Build a table of published numbers from an entry of `published.yaml`."""
    # The entry has title, source, columns (that of the name first), rows (one per line, cells separated by "|": a name,
    # then numbers; "69.3 (68.9-69.7)" has an interval, "-" is missing), and optionally unit ("%"), digits (1), text
    # (true if cells are not numbers) and note (errors or omissions of the paper's table).
    cells = [[cell.strip() for cell in line.split("|")] for line in entry["rows"].strip().splitlines()]
    text, unit, digits = entry.get("text", False), entry.get("unit", "%"), entry.get("digits", 1)
    columns = [Column("name", entry["columns"][0])]
    for index, heading in enumerate(entry["columns"][1:], start=1):
        if text:
            columns.append(Column(f"value{index}", heading))
            continue
        with_interval = any("(" in line[index] for line in cells)
        ends = (f"low{index}", f"high{index}") if with_interval else (None, None)
        columns.append(Column(f"value{index}", heading, unit, digits, low=ends[0], high=ends[1]))
    rows = [_row(line, text) for line in cells]
    corrections = [f'{one["what"]}, "{one["printed"]}": {one["why"]}.' for one in entry.get("errata", [])]
    note = " ".join([*filter(None, [entry.get("note")]), *(["Errata:", *corrections] if corrections else [])])
    return Table(entry["title"], columns, rows, source=cite(entry["source"]), note=note)


def _row(cells: Sequence[str], text: bool) -> dict[str, float | str | None]:
    row: dict[str, float | str | None] = {"name": cells[0]}
    for index, cell in enumerate(cells[1:], start=1):
        if text:
            row[f"value{index}"] = cell
            continue
        value, _, rest = cell.partition("(")
        low, _, high = rest.rstrip(")").partition("-")
        row |= {f"value{index}": _number(value), f"low{index}": _number(low), f"high{index}": _number(high)}
    return row


def _number(text: str) -> float | None:
    return None if text.strip() in ("", "-") else float(text.replace(",", ""))
