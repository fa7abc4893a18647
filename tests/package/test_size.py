"""Lines of folders, words of documentation, names at the top: limits, lowered by what leaves and never raised."""

from pathlib import Path

import pytest

import torchrope as tr

ROOT = Path(__file__).parents[2]
CODE = {".py", ".c", ".h", ".js", ".css", ".html", ".yaml", ".svg"}

LINES = {
    "src/torchrope": 21737,
    "src/torchrope/ops": 6546,
    "src/torchrope/integrations src/torchrope/checkpoints": 5968,
    "lab/src": 23465,
    "tests": 23787,
    "lab/tests": 19712,
    "benchmarks": 4452,
    "examples": 1000,
}
WORDS = 24876
NAMES = 38


def lines_of(folders: str) -> int:
    """Count lines as `wc -l` does, docstrings and blank lines included."""
    files = [file for folder in folders.split() for file in (ROOT / folder).rglob("*") if file.suffix in CODE]
    return sum(file.read_bytes().count(b"\n") for file in files)


def words_of_documentation() -> int:
    """Count the words of README, CONTRIBUTING and docs without results."""
    pages = [page for page in (ROOT / "docs").rglob("*.md") if "results" not in page.relative_to(ROOT).parts]
    pages += [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    return sum(len(page.read_text(encoding="utf-8").split()) for page in pages)


@pytest.mark.parametrize("folders", LINES)
def test_lines_of_code(folders: str) -> None:
    lines = lines_of(folders)
    assert lines <= LINES[folders], f"{folders}: {lines} lines, the limit is {LINES[folders]}"


def test_words_of_documentation() -> None:
    assert words_of_documentation() <= WORDS


def test_names_at_the_top() -> None:
    assert len(tr.__all__) <= NAMES
