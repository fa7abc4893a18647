"""Write every table of the results in a folder as CSV, with all digits, and as LaTeX."""

import csv
import io
import re
from pathlib import Path
from typing import Any

from torchrope.files import write_whole
from torchrope_lab.report.read import read_studies
from torchrope_lab.report.tables import Shown, show_table

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


def export_tables(folder: Path, target: Path) -> list[Path]:
    """Write `<study>[-<data>]/<title>.csv` and `.tex` for every table of the results in a folder.

    A CSV file has a row of keys, among them the ends of intervals, and all digits of the numbers; missing values are
    empty. A LaTeX file is a `tabular` with the rules of the package booktabs, and the report's digits; its comment has
    title, source and note.

    Args:
        folder: Output folder of `torchrope compare`, `study`, `benchmark` or `bench`.
        target: Folder to write to, created if missing.

    Returns:
        The files written.

    Raises:
        ValueError: no results in the folder, or a damaged file.
    """
    written = []
    studies = read_studies(folder)
    names = ["-".join(filter(None, [study["study"], (study.get("data") or {}).get("name")])) for study in studies]
    for name, study in zip(_distinct(names), studies, strict=True):
        tables = [*study["findings"]["tables"], *study["findings"]["published"]]
        for stem, table in zip(_distinct([table["title"] for table in tables]), tables, strict=True):
            for suffix, text in ((".csv", _csv(table)), (".tex", _latex(show_table(table, {})))):
                written.append(target / name / f"{stem}{suffix}")
                write_whole(written[-1], text)
    return written


def _distinct(titles: list[str]) -> list[str]:
    """Return names of files by titles; equal ones get a number."""
    stems: list[str] = []
    for title in titles:
        stem = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")[:80] or "table"
        stems.append(stem if stem not in stems else f"{stem}-{len(stems) + 1}")
    return stems


def _csv(table: dict[str, Any]) -> str:
    ends = [
        [column["key"], *(column[end] for end in ("low", "high") if column.get(end))] for column in table["columns"]
    ]
    keys = [key for of_column in ends for key in of_column]
    text = io.StringIO()
    writer = csv.DictWriter(text, keys, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(table["rows"])
    return text.getvalue()


def _latex(table: Shown) -> str:
    comments = [f"% {' '.join(text.split())}" for text in (table.title, table.source, table.note) if text]
    heading, *rows = (
        " & ".join("".join(_LATEX.get(sign, sign) for sign in cell) for cell in row) + r" \\"
        for row in (table.headings, *table.texts())
    )
    columns = "".join("r" if numeric else "l" for numeric in table.numeric)
    body = [rf"\begin{{tabular}}{{{columns}}}", r"\toprule", heading, r"\midrule", *rows, r"\bottomrule"]
    return "\n".join([*comments, *body, r"\end{tabular}", ""])
