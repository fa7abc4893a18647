"""Write the table of the committed leaderboard into README.md and docs/results/:  python benchmarks/readme.py"""

from pathlib import Path

from markers import insert_between_markers

from torchrope.files import write_whole
from torchrope_lab.leaderboard.answers import Answers, compare_on
from torchrope_lab.leaderboard.entry import Entry
from torchrope_lab.leaderboard.findings import cost_of
from torchrope_lab.report.tables import MISSING, escape_markdown, written
from torchrope_lab.statistics import accuracy_interval
from torchrope_lab.studies.engine.estimates import in_percent

ROOT = Path(__file__).parents[1]
ENTRY = ROOT / "docs" / "results" / "leaderboard" / "entry" / "entry.json"


def table(entry: Entry) -> str:
    """Render top-1, its interval and group of each encoding on each data set in Markdown, and what was trained."""
    answers = Answers(entry.sets)
    comparisons = {name: compare_on(answers, name) for name in answers.sets}
    groups = {name: comparison.groups() for name, comparison in comparisons.items()}

    def cell(encoding: str, data_set: str) -> str:
        right = answers.right[data_set, "trained"].get(encoding)
        if right is None:
            return MISSING
        top1, low, high = (written(each, 1) for each in in_percent(accuracy_interval(right)))
        converged = "\\*" if answers.converged(encoding, data_set) else ""
        return f"{top1}{converged} \\[{low}, {high}\\] {groups[data_set][comparisons[data_set].same[encoding]]}"

    rows = [
        ("Top-1, %", *(escape_markdown(results.data.title) for results in entry.sets)),
        ("---", *("---:" for _ in entry.sets)),
        *((f"`{name}`", *(cell(name, data_set) for data_set in answers.sets)) for name in answers.names),
    ]
    trained = f"{answers.seeds} trainings of each encoding, at learning rates chosen for it"
    facts = f"{trained}. {cost_of(entry.sets)}".strip()
    return "\n".join([*(f"| {' | '.join(row)} |" for row in rows), "", facts])


def write_table(path: Path, entry: Path = ENTRY) -> None:
    """Put the table of an entry between the markers of a Markdown file.

    Raises:
        ValueError: the file lacks the markers, or the entry cannot be read.
    """
    text = insert_between_markers(path.read_text(encoding="utf-8"), "results", table(Entry.read(entry)))
    write_whole(path, text)


if __name__ == "__main__":
    for page in (ROOT / "README.md", ROOT / "docs" / "results" / "README.md"):
        write_table(page)
