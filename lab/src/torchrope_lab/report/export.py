"""Write every table of the results in a folder as CSV, with all digits, and as LaTeX."""

import csv
import io
from pathlib import Path

from torchrope.files import write_whole
from torchrope_lab.report.chapters import unique
from torchrope_lab.report.plots import slug
from torchrope_lab.report.read import read_studies
from torchrope_lab.report.tables import format_table
from torchrope_lab.results import Table


def export_tables(folder: Path, target: Path) -> list[Path]:
    """Write `<study>[-<data>]/<title>.csv` and `.tex` for every table of the results in a folder; return the files."""
    # A CSV file has a row of keys, among them the ends of intervals, and all digits of the numbers; missing values are
    # empty. A LaTeX file is a `tabular` with the rules of the package booktabs, and the report's digits.
    files: list[Path] = []
    folders: set[str] = set()
    for study in read_studies(folder):
        inside = target / unique(slug(study.study, *([study.data.name] if study.data else [])), folders)
        stems: set[str] = set()
        for table in [*study.findings.tables, *study.findings.published]:
            stem = unique(slug(table.title), stems)
            for suffix, text in ((".csv", _csv(table)), (".tex", format_table(table).latex())):
                files.append(inside / f"{stem}{suffix}")
                write_whole(files[-1], text)
    return files


def _csv(table: Table) -> str:
    keys = [key for column in table.columns for key in (column.key, column.low, column.high) if key]
    text = io.StringIO()
    writer = csv.DictWriter(text, keys, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(table.rows)
    return text.getvalue()
