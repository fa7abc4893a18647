"""benchmarks/readme.py: which comparisons are in the README's table, and what it says of them; markers of pages."""

from dataclasses import replace
from pathlib import Path

import pytest
from markers import insert_between_markers
from readme import converged, table, write_readme

from torchrope_lab.results import Axis, Column, DataFacts, Figure, Findings, RunFacts, StudyResult, Table


def drawn_curves(**by_name: list[float]) -> Figure:
    rows = [{"name": name, "epoch": at, "top1": top1} for name, each in by_name.items() for at, top1 in enumerate(each)]
    x, y = Axis("epoch", "Epoch"), Axis("top1", "Top-1", "%")
    return Figure(name="curves", kind="lines", title="Curves", alt="Curves.", x=x, y=y, rows=rows, series="name")


def comparison(**by_name: list[float]) -> StudyResult:
    """A comparison with these learning curves, in percent; the first encoding is the highest."""
    columns = [Column("name", "Name"), Column("top1", "Top-1", "%", 1, "low", "high"), Column("verdict", "Verdict")]
    words = ["highest", "not significantly different", "behind"]
    rows = [
        {"name": name, "top1": each[-1], "low": each[-1] - 2, "high": each[-1] + 2, "verdict": words[min(at, 2)]}
        for at, (name, each) in enumerate(by_name.items())
    ]
    described = {"name": "digits", "title": "digits", "description": "Pictures.", "axes": ["height", "width"],
                 "input_size": [8, 8], "num_classes": 10, "train": 1437, "val": 360, "chance": 0.1}  # fmt: skip
    run = {"command": "torchrope compare", "date": "2026-11-21", "commit": "abc1234", "torchrope": "0.2.0",
           "versions": {"torch": "2.14.1"}, "machine": {"cpu": "Fake CPU", "cores": 2},
           "config": {"seeds": 3, "model": {"depth": 4, "dim": 64}, "optim": {"epochs": 5}}}  # fmt: skip
    found = Findings(answer="An answer.", tables=[Table("Results", columns, rows)], figures=[drawn_curves(**by_name)])
    return StudyResult("compare", "Compare", "What?", ["A paper"], found, DataFacts(**described), RunFacts(**run))


def test_readme_table_has_only_converged_comparisons(tmp_path: Path) -> None:
    flat, rising = [50.0, 80.0, 90.0, 91.0, 92.0], [50.0, 60.0, 70.0, 80.0, 90.0]
    for name, last in (("a", flat), ("b", rising)):
        (tmp_path / name).mkdir()
        comparison(mixed=last, axial=[each - 1 for each in flat], none=[20.0] * 5).write(
            tmp_path / name / "results.json"
        )
    without_curves = comparison(mixed=flat)
    replace(without_curves, study="accuracy", findings=replace(without_curves.findings, figures=[])).write(
        tmp_path / "accuracy-digits.json"
    )
    replace(comparison(mixed=flat), study="capacity").write(tmp_path / "capacity.json")
    (tmp_path / "other.json").write_text("{}")
    found = converged(tmp_path)
    assert [(each.file.parent.name, each.rises) for each in found] == [("a", pytest.approx(1))]
    lines = table(found, tmp_path / "README.md").splitlines()
    assert [line for line in lines if line.startswith("| `")] == [
        r"| `none` | 20.0 \[18.0, 22.0\] |",
        r"| `axial` | **91.0** \[89.0, 93.0\] |",
        r"| `mixed` | **92.0** \[90.0, 94.0\] |",
    ]
    for fact in (
        "1,437 examples for training",
        "5 epochs, 3 trainings",
        "at most 1.0 points",
        "Fake CPU",
        "(a/results.json)",
    ):
        assert fact in lines[-1]


def test_damaged_result_is_named(tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text("{")
    with pytest.raises(ValueError, match=r"^a result must be a readable JSON file, got .*results.json: "):
        converged(tmp_path)


def test_readme_gets_no_table_of_curves_that_still_rise(tmp_path: Path) -> None:
    comparison(mixed=[10.0, 20.0, 30.0]).write(tmp_path / "results.json")
    readme = tmp_path / "README.md"
    readme.write_text("a\n<!-- results:begin -->\nOLD\n<!-- results:end -->\nb\n")
    with pytest.raises(
        ValueError, match=r"^the table needs a comparison whose curves rise by at most 1.5 points .*, got none"
    ):
        write_readme(readme, tmp_path)
    assert readme.read_text() == "a\n<!-- results:begin -->\nOLD\n<!-- results:end -->\nb\n"


def test_block_replaces_only_the_text_between_markers() -> None:
    text = "a\n<!-- results:begin -->\nold\n<!-- results:end -->\nz <!-- other:begin --><!-- other:end -->\n"
    once = insert_between_markers(text, "results", "| new |\n")
    assert once == text.replace("old", "| new |")
    assert insert_between_markers(once, "results", "| new |\n") == once


@pytest.mark.parametrize(
    "text",
    [
        "no markers",
        "<!-- results:begin --> only",
        "<!-- results:end --> <!-- results:begin -->",
        "<!-- results:begin --> <!-- results:begin --> <!-- results:end -->",
    ],
)
def test_text_without_both_markers_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must contain <!-- results:begin -->"):
        insert_between_markers(text, "results", "block")
