"""benchmarks/readme.py: what the table of README says of an entry; markers of pages."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from markers import insert_between_markers
from readme import ENTRY, table, write_table

from torchrope_lab.leaderboard.answers import Answers, compare_on
from torchrope_lab.leaderboard.entry import Entry, pack


def cells_of(text: str) -> dict[str, list[str]]:
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| `")]
    return {name.strip("`"): cells for name, *cells in rows}


def test_cells_have_accuracy_convergence_interval_and_group_of_each_set() -> None:
    entry = Entry.read(ENTRY)
    answers = Answers(entry.sets)
    shown = cells_of(table(entry))
    assert set(shown) == set(answers.names)
    for at, (name, results) in enumerate(answers.sets.items()):
        groups = compare_on(answers, name).groups()
        for encoding in results.encodings:
            cells = shown[encoding]
            found = re.fullmatch(r"([\d.]+)(\\\*)? \\\[([\d.]+), ([\d.]+)\\\] (\w+)", cells[at])
            assert found, cells[at]
            assert float(found[1]) == pytest.approx(answers.mean(encoding, name), abs=0.05)
            assert bool(found[2]) == answers.converged(encoding, name)
            assert float(found[3]) <= float(found[1]) <= float(found[4])
            assert found[5] == groups[encoding]


def test_encoding_that_a_set_lacks_is_marked() -> None:
    first, *others = Entry.read(ENTRY).sets
    without = replace(first, encodings={name: each for name, each in first.encodings.items() if name != "axial"})
    cells = cells_of(table(Entry("", "", [without, others[0]])))
    assert cells["axial"][0] == "–"
    assert cells["axial"][1] != "–"


def test_equal_functions_share_their_group() -> None:
    first = Entry.read(ENTRY).sets[0]
    twin = replace(first, encodings={**first.encodings, "twin": first.encodings["none"]})
    cells = cells_of(table(Entry("", "", [twin])))
    assert cells["twin"] == cells["none"]
    wrong = replace(first.encodings["none"], right=[pack([False] * first.examples)] * 5, half=[])
    cells = cells_of(table(Entry("", "", [replace(first, encodings={**first.encodings, "wrong": wrong})])))
    assert cells["wrong"][0].startswith("0.0 ")


def test_damaged_entry_is_named_and_the_page_stays(tmp_path: Path) -> None:
    (tmp_path / "entry.json").write_text("{")
    page = tmp_path / "README.md"
    page.write_text("a\n<!-- results:begin -->\nOLD\n<!-- results:end -->\nb\n")
    with pytest.raises(ValueError, match=r"entry\.json"):
        write_table(page, tmp_path / "entry.json")
    assert page.read_text() == "a\n<!-- results:begin -->\nOLD\n<!-- results:end -->\nb\n"


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
