"""Write every table of the results in a folder as CSV, with all digits, and as LaTeX."""

import csv
import io
from pathlib import Path
from typing import Any

from torchrope.files import write_whole
from torchrope_lab.report.chapters import unique
from torchrope_lab.report.plots import slug
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
        folder: Output folder of `torchrope compare`, `study`, `leaderboard` or `speed`.
        target: Folder to write to, created if missing.

    Returns:
        The files written.

    Raises:
        ValueError: no results in the folder, or a damaged file.
    """
    written: list[Path] = []
    folders: set[str] = set()
    for study in read_studies(folder):
        data = study.get("data") or {}
        inside = target / unique(slug(*filter(None, [study["study"], data.get("name")])), folders)
        stems: set[str] = set()
        for table in [*study["findings"]["tables"], *study["findings"]["published"]]:
            stem = unique(slug(table["title"]), stems)
            for suffix, text in ((".csv", _csv(table)), (".tex", _latex(show_table(table, {})))):
                written.append(inside / f"{stem}{suffix}")
                write_whole(written[-1], text)
    return written


def _csv(table: dict[str, Any]) -> str:
    keys = [column[part] for column in table["columns"] for part in ("key", "low", "high") if column.get(part)]
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
