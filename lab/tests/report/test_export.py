"""Tables as CSV, which any program reads, and as LaTeX, which compiles."""

import csv
from pathlib import Path

import pytest
from labs import Run

from torchrope_lab.report.export import export_tables
from torchrope_lab.results import Column, Findings, RunFacts, StudyResult, Table

ROWS = [
    {"name": "liere:8 & 50 % _x_", "top1": 1 / 3, "low": 0.25, "high": 0.5, "verdict": None},
    {"name": "mixed", "top1": -2.0, "low": None, "high": None, "verdict": "best"},
]
TOP1 = Column("top1", "Top-1", "%", 1, low="low", high="high")
COLUMNS = (Column("name", "Name"), TOP1, Column("verdict", "Verdict"))


@pytest.fixture
def results(tmp_path: Path) -> Path:
    tables = [Table("Top-1 & more", COLUMNS, ROWS, note="A note."), Table("Top-1: more", COLUMNS, ROWS)]
    run = RunFacts("torchrope study")
    StudyResult("mine", "Mine", "What?", (), Findings("An answer.", tables), None, run).write(tmp_path / "mine.json")
    return tmp_path


def test_csv_has_all_digits_and_the_ends_of_intervals(results: Path, tmp_path: Path) -> None:
    files = export_tables(results, tmp_path / "out")
    first = next(file for file in files if file.suffix == ".csv")
    rows = list(csv.DictReader(first.read_text(encoding="utf-8").splitlines()))
    assert float(rows[0]["top1"]) == 1 / 3
    assert (rows[0]["low"], rows[1]["low"], rows[0]["verdict"]) == ("0.25", "", "")
    assert rows[0]["name"] == ROWS[0]["name"]


def test_latex_escapes_its_signs(results: Path, tmp_path: Path) -> None:
    files = export_tables(results, tmp_path / "out")
    text = next(file for file in files if file.suffix == ".tex").read_text(encoding="utf-8")
    assert r"liere:8 \& 50 \% \_x\_ & 0.3 [0.2, 0.5] & -- \\" in text
    assert r"mixed & $-$2.0 & best \\" in text
    assert r"\begin{tabular}{lrl}" in text


def test_tables_of_equal_names_are_kept_apart(results: Path, tmp_path: Path) -> None:
    assert len(set(export_tables(results, tmp_path / "out"))) == 4


def test_command_says_what_it_wrote(results: Path, tmp_path: Path, run: Run) -> None:
    status, printed, _ = run("report", results, "--export", tmp_path / "out")
    assert status == 0
    assert printed.startswith("tables: 2,")
    assert (tmp_path / "out/mine/top-1-more.csv").exists()
