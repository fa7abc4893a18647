"""Write the README's table from the committed comparisons that converged:  python benchmarks/readme.py

A comparison counts as converged where no curve of `ENCODINGS` rises by more than `MOST_RISE` points over the last fifth
of training.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os.path import relpath
from pathlib import Path
from typing import Any

from markers import insert_between_markers

from torchrope.files import write_whole
from torchrope_lab.conclusion import rise
from torchrope_lab.files import parse_json
from torchrope_lab.report.chapters import run_facts
from torchrope_lab.report.tables import MISSING, count, escape_markdown, written
from torchrope_lab.results import Figure, StudyResult

ROOT = Path(__file__).parents[1]
ENCODINGS = ("none", "learned", "sinusoidal", "axial", "mixed", "liere:8", "liere", "comrope-ld")
"""Rows of the table."""
MOST_RISE = 1.5
"""Points by which a curve may rise over the last fifth of training in a comparison that counts as converged."""


@dataclass(frozen=True)
class Comparison:
    """A converged comparison.

    Attributes:
        file: Where it is stored.
        study: The result.
        rises: The largest rise over the last fifth of training, in points.
    """

    file: Path
    study: StudyResult
    rises: float

    def cell(self, name: str) -> str:
        """Return top-1 with its interval, in bold if it is not significantly below the highest."""
        for row in self.study.findings.tables[0].rows:
            if row["name"] == name:
                value = "**" * (not str(row["verdict"]).startswith("behind"))
                value = f"{value}{written(row['top1'], 1)}{value}"
                return f"{value} \\[{written(row['low'], 1)}, {written(row['high'], 1)}\\]"
        return MISSING

    def facts(self, number: int, beside: Path) -> str:
        """Describe data, training, model, convergence and machine, with a link to the numbers."""
        data, run = self.study.data, self.study.run
        config: Mapping[str, Any] = run.config or {}
        model, seeds = config["model"], config["seeds"]
        machine = dict(run_facts(run))["Machine"]
        link = relpath(self.file, beside.parent or ".")
        return (
            f"{number}. {escape_markdown(data.description)} {count(data.train or 0)} examples for training, "
            f"{count(data.val or 0)} for validation; {config['optim']['epochs']} epochs, "
            f"{'one training' if seeds == 1 else f'{seeds} trainings'} of each encoding; {model['depth']} layers of "
            f"{model['dim']} channels. Curves rise by at most {written(self.rises, 1)} points over the last fifth of "
            f"training. {escape_markdown(machine)}; {run.date}. [Numbers]({link}): `{run.command}`"
        )


def converged(folder: Path) -> list[Comparison]:
    """Find the converged comparisons below a folder: results of `compare` and of the study `accuracy`.

    Raises:
        ValueError: a result is damaged, or none is converged.
    """
    found = []
    for file in sorted(folder.rglob("*.json")):
        try:
            stored = parse_json(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"a result must be a readable JSON file, got {file}: {error}") from None
        if not isinstance(stored, dict) or stored.get("study") not in ("compare", "accuracy"):
            continue
        result = StudyResult.read(file)
        rises = [each for name, each in rises_of(result.findings.figures).items() if name in ENCODINGS]
        if result.data and rises and max(rises) <= MOST_RISE:
            found.append(Comparison(file, result, max(rises)))
    if not found:
        rule = f"the table needs a comparison whose curves rise by at most {MOST_RISE} points over the last fifth"
        raise ValueError(f"{rule} of training, got none below {folder}")
    return found


def rises_of(figures: Sequence[Figure]) -> dict[str, float]:
    """Compute the rise of the accuracy over the last fifth of epochs, in points, by name of a curve."""
    by_name: dict[str, list[float]] = {}
    for figure in figures:
        if figure.name == "curves":
            for row in figure.rows:
                by_name.setdefault(str(row["name"]), []).append(float(row["top1"] or 0))
    found = {name: rise(curve) for name, curve in by_name.items()}
    return {name: each for name, each in found.items() if each is not None}


def table(comparisons: Sequence[Comparison], beside: Path) -> str:
    """Render the table of encodings by comparison in Markdown, and the facts of each comparison.

    Args:
        comparisons: Comparisons, one column each.
        beside: The file that contains the table, for links.
    """
    titles = [f"{escape_markdown(each.study.data.title)} ({at})" for at, each in enumerate(comparisons, 1)]
    rows = [(f"`{name}`", *(each.cell(name) for each in comparisons)) for name in ENCODINGS]
    shown = [row for row in rows if any(cell != MISSING for cell in row[1:])]
    lines = [("Top-1, %", *titles), ("---", *("---:" for _ in titles)), *shown]
    facts = [each.facts(at, beside) for at, each in enumerate(comparisons, 1)]
    return "\n".join([*(f"| {' | '.join(line)} |" for line in lines), "", *facts])


def write_readme(path: Path, folder: Path) -> None:
    """Put the table of the converged comparisons below a folder between the markers of a Markdown file.

    Raises:
        ValueError: the file lacks the markers, or no comparison can be read.
    """
    block = table(converged(folder), path)
    write_whole(path, insert_between_markers(path.read_text(encoding="utf-8"), "results", block))


if __name__ == "__main__":
    write_readme(ROOT / "README.md", ROOT / "docs" / "results")
