"""A study of the user's own, as docs/studies.md shows it."""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from labs import OPTIONS, Run

DOCS = Path(__file__).parents[3] / "docs" / "studies.md"


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The example of the page as a module in the working directory, which is not on the path."""
    [block] = re.findall(r"```python\n(from torchrope_lab\.engine\.grid.*?)```", DOCS.read_text(), re.DOTALL)
    (tmp_path / "own_patches.py").write_text(block)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    yield block
    sys.modules.pop("own_patches", None)


def test_example_of_the_page_trains_and_is_reported(example: str, run: Run) -> None:
    assert run("study", "own_patches:STUDY", *OPTIONS, "--encodings=axial", "--seeds=1", "--out=out")[0] == 0
    written = json.loads(Path("out/patches-digits.json").read_text())
    assert written["run"]["command"].startswith("torchrope study own_patches:STUDY")
    tables = {table["title"]: table["rows"] for table in written["findings"]["tables"]}
    against = tables["Against patches of 4"]
    assert {(row["name"], row["patch"]) for row in against} == {("learned", 2), ("axial", 2)}
    top1 = {(row["name"], row["patch"]): row["top1"] for row in tables["Top-1 by patch size"]}
    assert set(top1) == {(name, size) for name in ("learned", "axial") for size in (2, 4)}
    assert all(row["change"] == pytest.approx(top1[row["name"], 2] - top1[row["name"], 4]) for row in against)
    assert "patches of 2 instead of 4 pixels" in written["findings"]["answer"]
    assert "Patch size" in Path("out/report/index.html").read_text()
    assert len(list(Path("out/runs").glob("*/result.json"))) == 4


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("nowhere:STUDY", ("", ""), "user-defined names must be in a module that can be imported, got nowhere"),
        ("own_patches:OTHER", ("", ""), "own_patches:OTHER must be a torchrope_lab.engine.registry.Study"),
        ("own_patches:OneFactor", ("", ""), "own_patches:OneFactor must be a torchrope_lab.engine.registry.Study"),
        ("own_patches:STUDY", ('"patches"', '"accuracy"'), "that no built-in study has, got 'accuracy'"),
        ("own_patches:STUDY", ('"patches"', '"../patches"'), "of letters, digits and hyphens"),
    ],
)
def test_mistake_is_one_line(example: str, name: str, change: tuple[str, str], message: str, run: Run) -> None:
    Path("own_patches.py").write_text(example.replace(*change))
    status, _, error = run("study", name, "--out=out")
    assert (status, error.count("\n")) == (2, 1)
    assert message in error
    assert not Path("out").exists()
