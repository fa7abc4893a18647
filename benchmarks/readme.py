"""Write the table of the committed leaderboard into README.md and docs/results/:  python benchmarks/readme.py"""

import base64
from collections.abc import Mapping
from itertools import combinations
from pathlib import Path
from string import ascii_letters
from typing import Any

import numpy as np
from markers import insert_between_markers

from torchrope.files import write_whole
from torchrope_lab.files import read_mapping
from torchrope_lab.report.tables import MISSING, escape_markdown, written
from torchrope_lab.statistics import accuracy_interval, differences

ROOT = Path(__file__).parents[1]
ENTRY = ROOT / "docs" / "results" / "leaderboard" / "entry" / "entry.json"
WORTH_DOUBLING = 0.005
"""Change of accuracy by twice the epochs, the mean over seeds, from which training has not converged."""


def answers(packed: list[str], examples: int) -> np.ndarray:
    """Unpack right (1) or wrong (0) of each seed and example, one bit each in base64, to `(seeds, examples)`."""
    held = np.array([np.frombuffer(base64.b64decode(text, validate=True), dtype=np.uint8) for text in packed])
    return np.unpackbits(held, axis=1)[:, :examples].astype(float)


def answers_on(results: Mapping[str, Any], condition: str = "right") -> dict[str, np.ndarray]:
    """Unpack the answers of each encoding on a data set; "half", after half the epochs, of those that have them."""
    examples = results["data"]["val"]
    return {name: answers(each[condition], examples) for name, each in results["encodings"].items() if each[condition]}


def has_converged(gain: float) -> bool:
    """Whether twice the epochs change accuracy by less than `WORTH_DOUBLING`; rounding errors do not count.

    A loss, as by a seed whose training fails, is no convergence either.
    """
    return abs(round(gain, 9)) < WORTH_DOUBLING


def groups(right: Mapping[str, np.ndarray]) -> dict[str, str]:
    """Assign letters, so that two encodings differ if and only if they share none (compact letter display).

    They differ if Tango's interval of the difference, simultaneous over all pairs, excludes 0. Source of the letters:
    Piepho, Journal of Computational and Graphical Statistics 13, 2004.
    """
    order = sorted(right, key=lambda name: (-right[name].mean(), name))
    found = [{*order}]
    pairs = list(combinations(order, 2))
    for pair, gap in zip(pairs, differences(right, pairs) if pairs else [], strict=True):
        if gap.low > 0 or gap.high < 0:
            split = [part for group in found for part in _apart(group, *pair)]
            found = [part for part in split if not any(part < another for another in split)]
            found = [part for at, part in enumerate(found) if part not in found[:at]]
    found.sort(key=lambda group: sorted(order.index(name) for name in group))
    return {name: "".join(ascii_letters[i] for i, group in enumerate(found) if name in group) for name in order}


def _apart(group: set[str], one: str, other: str) -> list[set[str]]:
    return [group - {one}, group - {other}] if {one, other} <= group else [group]


def table(entry: Mapping[str, Any]) -> str:
    """Render top-1, its interval and group of each encoding on each data set in Markdown, and what was trained."""
    sets = entry["sets"]
    columns = [_cells(results) for results in sets]
    names = dict.fromkeys(name for results in sets for name in results["encodings"])
    rows = [
        ("Top-1, %", *(escape_markdown(results["data"]["title"]) for results in sets)),
        ("---", *("---:" for _ in sets)),
        *((f"`{name}`", *(cells.get(name, MISSING) for cells in columns)) for name in names),
    ]
    seeds = min(len(each["right"]) for results in sets for each in results["encodings"].values())
    trainings, hours = (sum(results[what] for results in sets) for what in ("trainings", "core_seconds"))
    facts = (
        f"{seeds} trainings of each encoding, at learning rates chosen for it. "
        f"{trainings:,} trainings took {hours / 3600:.1f} core-hours."
    )
    return "\n".join([*(f"| {' | '.join(row)} |" for row in rows), "", facts])


def _cells(results: Mapping[str, Any]) -> dict[str, str]:
    """Render the cell of each encoding that a data set has."""
    right, half = answers_on(results), answers_on(results, "half")
    letters = groups(right)
    cells = {}
    for name in right:
        top1, low, high = (written(100 * share, 1) for share in accuracy_interval(right[name]))
        converged = "\\*" if name in half and has_converged(right[name].mean() - half[name].mean()) else ""
        cells[name] = f"{top1}{converged} \\[{low}, {high}\\] {letters[name]}"
    return cells


def write_table(path: Path, entry: Path = ENTRY) -> None:
    """Put the table of an entry between the markers of a Markdown file.

    Raises:
        ValueError: the file lacks the markers, or the entry cannot be read.
    """
    text = path.read_text(encoding="utf-8")
    write_whole(path, insert_between_markers(text, "results", table(read_mapping(entry, "an entry"))))


if __name__ == "__main__":
    for page in (ROOT / "README.md", ROOT / "docs" / "results" / "README.md"):
        write_table(page)
