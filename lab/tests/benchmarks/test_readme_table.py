"""benchmarks/readme.py: what the table of README says of an entry; markers of pages."""

import json
import re
from copy import deepcopy
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from markers import insert_between_markers
from readme import ENTRY, answers_on, groups, has_converged, table, write_table

from torchrope_lab.statistics import differences


@pytest.fixture
def entry() -> Any:
    return json.loads(ENTRY.read_text())


def cells_of(text: str) -> dict[str, list[str]]:
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| `")]
    return {name.strip("`"): cells for name, *cells in rows}


def test_cells_have_accuracy_convergence_interval_and_group_of_each_set(entry: Any) -> None:
    shown = cells_of(table(entry))
    assert set(shown) == {name for results in entry["sets"] for name in results["encodings"]}
    for at, results in enumerate(entry["sets"]):
        right, half = answers_on(results), answers_on(results, "half")
        letters = groups(right)
        for name in results["encodings"]:
            found = re.fullmatch(r"([\d.]+)(\\\*)? \\\[([\d.]+), ([\d.]+)\\\] (\w+)", shown[name][at])
            assert found, shown[name][at]
            assert float(found[1]) == pytest.approx(100 * right[name].mean(), abs=0.05)
            assert bool(found[2]) == has_converged(right[name].mean() - half[name].mean())
            assert float(found[3]) <= float(found[1]) <= float(found[4])
            assert found[5] == letters[name]


def test_letters_are_shared_if_and_only_if_differences_are_not_significant(entry: Any) -> None:
    for results in entry["sets"]:
        right = answers_on(results)
        letters, pairs = groups(right), list(combinations(right, 2))
        for (one, two), gap in zip(pairs, differences(right, pairs), strict=True):
            assert bool({*letters[one]} & {*letters[two]}) == (gap.low <= 0 <= gap.high), (one, two)


def test_training_has_converged_if_twice_the_epochs_change_less_than_half_a_point() -> None:
    assert [has_converged(gain) for gain in (0.0049, 0.005, -0.0049, -0.005)] == [True, False, True, False]
    assert not has_converged(0.505 - 0.5)  # half a point but for a rounding error


def test_encoding_that_a_set_lacks_is_marked(entry: Any) -> None:
    del entry["sets"][0]["encodings"]["axial"]
    cells = cells_of(table(entry))
    assert [cell == "–" for cell in cells["axial"]] == [True, False, False, False, False]


def test_equal_answers_share_their_group(entry: Any) -> None:
    entry["sets"] = [first] = entry["sets"][:1]
    first["encodings"]["twin"] = deepcopy(first["encodings"]["none"])
    cells = cells_of(table(entry))
    assert cells["twin"] == cells["none"]
    wrong = ["A" * len(packed) for packed in first["encodings"]["none"]["right"]]
    first["encodings"]["twin"] |= {"right": wrong, "half": []}
    assert cells_of(table(entry))["twin"][0].startswith("0.0 ")


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
