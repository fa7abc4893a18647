"""What a leaderboard's entry shows: rankings under conditions, gains by axes, claims of papers, learning rates."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sentences import is_short
from test_entry import EXAMPLES, SEEDS, of_encoding, of_set

from torchrope_lab.encodings import resolve_encoding
from torchrope_lab.leaderboard.claims import CLAIMS, INCONCLUSIVE, OPPOSITE, SAME, table_of_claims
from torchrope_lab.leaderboard.conditions import accuracies, rank
from torchrope_lab.leaderboard.effects import by_axes, effects
from torchrope_lab.leaderboard.entry import DataSetResults, Entry, Tuned, pack
from torchrope_lab.leaderboard.findings import _same_on_one_axis, edges_of_rates, find
from torchrope_lab.leaderboard.rates import order_changes, tables_of_rates
from torchrope_lab.leaderboard.run import ENTRY, write_results
from torchrope_lab.results import Row, StudyResult
from torchrope_lab.statistics import differences_over_sets


def packed(accuracy: float, seed: int = 0) -> list[str]:
    """Answers of which a share is right, the same examples first for every accuracy of a seed."""
    drawn = np.random.default_rng(seed).random((SEEDS, EXAMPLES))
    return [pack(row < accuracy) for row in drawn]


def measured(shares: Mapping[str, float], **conditions: Mapping[str, float]) -> DataSetResults:
    """A data set with these accuracies, and those under other conditions ("largest" among them)."""
    encodings = {}
    for name, share in shares.items():
        others: dict[str, Any] = {key: packed(each[name]) for key, each in conditions.items() if key != "largest"}
        if "largest" in conditions:
            others["sizes"] = {"8×8": packed(share), "16×16": packed(conditions["largest"][name])}
        encodings[name] = replace(of_encoding(0.5), right=packed(share), **others)
    return of_set(encodings=encodings)


def on_axes(found: DataSetResults, axes: Sequence[str], name: str = "digits") -> DataSetResults:
    return replace(found, name=name, data=replace(found.data, axes=axes))


def row_of(rows: Sequence[Row], **wanted: str) -> Row:
    (row,) = [each for each in rows if all(each[key] == value for key, value in wanted.items())]
    return row


def test_ranking_uses_the_accuracies_of_its_condition() -> None:
    found = measured(
        {"none": 0.2, "axial": 0.9}, largest={"none": 0.6, "axial": 0.1}, small={"none": 0.1, "axial": 0.5}
    )
    assert [rank([found], each).best for each in ("trained", "small", "largest", "smallest")] == [  # type: ignore[union-attr]
        "axial",
        "axial",
        "none",
        "axial",
    ]
    assert rank([found], "shuffled") is None
    assert accuracies(found, "shuffled") == {}


def test_differences_are_over_the_sets_of_each_contrast() -> None:
    generator = np.random.default_rng(0)
    sets = [
        {
            name: (generator.random((3, 60)) < share).astype(float)
            for name, share in (("a", 0.5), ("b", 0.6), ("c", 0.9))
        }
        for _ in range(3)
    ]
    forward, backward, single = differences_over_sets(sets, [("a", "c", [0, 2]), ("c", "a", [0, 2]), ("b", "c", [1])])
    assert forward.estimate == pytest.approx(np.mean([sets[at]["a"].mean() - sets[at]["c"].mean() for at in (0, 2)]))
    assert (forward.low, forward.high) == pytest.approx((-backward.high, -backward.low))
    assert single.estimate == pytest.approx(sets[1]["b"].mean() - sets[1]["c"].mean())
    with pytest.raises(ValueError, match="one set at least, got none"):
        differences_over_sets(sets, [("a", "b", [])])


def test_gains_are_grouped_by_the_axes_of_the_data() -> None:
    images, series = ("height", "width"), ("time",)
    sets = [
        on_axes(measured({"none": 0.2, "axial": 0.9, "learned": 0.7}), images, "one"),
        on_axes(measured({"none": 0.2, "axial": 0.8, "learned": 0.7}), images, "two"),
        on_axes(measured({"none": 0.5, "axial": 0.5}), series, "three"),
    ]
    assert {key: len(group) for key, group in by_axes(sets).items()} == {"height × width": 2, "time": 1}
    (table,), (figure,) = effects(sets, ["axial", "none"])
    axial, learned = (row_of(table.rows, name=name) for name in ("axial", "learned"))
    means = [np.mean([each.rights()["axial"].mean() - each.rights()["none"].mean() for each in sets[:2]])]
    assert axial["gain0"] == pytest.approx(100 * means[0])
    assert axial["gain0_low"] > 0  # type: ignore[operator]
    assert axial["gain1"] == pytest.approx(0)
    assert learned["gain0"] is not None
    assert learned["gain1"] is None
    assert len(figure.rows) == 5


def test_effects_need_a_model_without_positions() -> None:
    assert effects([measured({"axial": 0.5, "mixed": 0.6})], []) == ([], [])


@pytest.mark.parametrize(
    ("ahead", "behind", "verdict"), [(0.9, 0.3, SAME), (0.3, 0.9, OPPOSITE), (0.5, 0.5, INCONCLUSIVE)]
)
def test_claims_are_judged_by_the_interval(ahead: float, behind: float, verdict: str) -> None:
    found = on_axes(measured({"mixed": ahead, "axial": behind}), ("height", "width"))
    (table,) = table_of_claims([found])
    assert [row["verdict"] for row in table.rows] == [verdict]
    assert table_of_claims([on_axes(found, ("time",))]) == []  # the paper is about images


def test_claim_on_which_data_sets_disagree_is_inconclusive() -> None:
    images = ("height", "width")
    one = on_axes(measured({"mixed": 0.1, "axial": 0.9}), images, "one")
    two = on_axes(measured({"mixed": 0.52, "axial": 0.5}), images, "two")
    [row] = table_of_claims([one, two])[0].rows
    assert row["gain_high"] < 0  # type: ignore[operator]
    assert row["verdict"] == INCONCLUSIVE
    assert re.fullmatch(r"one −\d+\.\d, two \d+\.\d", str(row["by_set"]))
    assert str(row["comparable"]).startswith("no: small models")


def test_no_claim_is_compared_with_its_own_encoding() -> None:
    assert ("liere", "mixed") not in {(each.ahead, each.behind) for each in CLAIMS}  # LieRE's RoPE-Mixed is liere:2


def test_claims_name_encodings_that_exist() -> None:
    for claim in CLAIMS:
        assert resolve_encoding(claim.ahead).name != resolve_encoding(claim.behind).name


def tuned(found: DataSetResults, rates: Mapping[str, float], own: Mapping[str, float]) -> DataSetResults:
    """The set with tuning at 1 and 3, and answers at a rate of their own for those in `own`."""
    encodings = {
        name: replace(
            each,
            tuning=[Tuned(1.0, 1 - rates[name]), Tuned(3.0, rates[name])] if name in rates else [],
            own_rate=3.0 if name in own else None,
            own=packed(own[name]) if name in own else (),
        )
        for name, each in found.encodings.items()
    }
    return replace(found, encodings=encodings)


def test_tuned_rates_can_change_the_order() -> None:
    found = tuned(measured({"none": 0.1, "axial": 0.5, "mixed": 0.6}), {"axial": 0.9, "mixed": 0.1}, {"axial": 0.95})
    order, gains = tables_of_rates([found])
    assert [(row["name"], row["common_place"], row["own_place"]) for row in order.rows] == [
        ("mixed", 1, 2),
        ("axial", 2, 1),
    ]
    assert [row["verdict"] for row in gains.rows] == ["better"]
    changed = order_changes([found]) or ""
    assert 0 <= changed.find("mixed, axial") < changed.find("axial, mixed")
    kept = order_changes([tuned(found, {"axial": 0.9, "mixed": 0.1}, {})]) or ""
    assert "mixed, axial" in kept
    assert "axial, mixed" not in kept
    assert order_changes([measured({"none": 0.1, "axial": 0.5})]) is None


def test_advice_names_the_cheapest_that_is_not_behind() -> None:
    shares = {"none": 0.1, "axial": 0.8, "mixed": 0.8, "liere": 0.8}
    found = measured(shares)
    steps = {"none": [0.5], "axial": [1.2], "mixed": [1.1], "liere": [2.0]}
    cheap = replace(found, encodings={name: replace(e, steps=steps[name]) for name, e in found.encodings.items()})
    findings = find(Entry("plan", "me", [cheap]))
    by_case = {advice.case: advice.encodings for advice in findings.advice}
    assert by_case["The least cost"] == ["mixed"]
    assert is_short(findings.answer)
    assert "none" not in next(iter(by_case.values()))


def test_answer_is_about_the_encoding_that_the_user_added(tmp_path: Path) -> None:
    published = Entry("plan", "they", [measured({"none": 0.1, "axial": 0.6, "mixed": 0.9}), SERIES])
    mine = measured({"golden": 0.5})
    everywhere = [mine, replace(SERIES, encodings=mine.encodings)]
    path = write_results(tmp_path, Entry("plan", "me", [mine]), [published], "torchrope leaderboard")
    answer = StudyResult.read(path).findings.answer
    assert answer.startswith("golden on 1 of 2 data sets, against the best of the others: −")
    assert answer.endswith("] to mixed on digits. No rank: not on vowels.")
    path = write_results(tmp_path, Entry("plan", "me", everywhere), [published], "torchrope leaderboard")
    answer = StudyResult.read(path).findings.answer
    assert re.match(r"golden: \d+\.\d % on average over 2 data sets, possible ranks [23] to [23] of 4; ", answer)
    assert "; significantly behind mixed, the highest: −" in answer
    merged = write_results(tmp_path, None, [published], "torchrope leaderboard")
    assert "golden" not in StudyResult.read(merged).findings.answer


SERIES = on_axes(measured({"none": 0.1, "axial": 0.6, "mixed": 0.9}), ("time",), "vowels")


def test_rate_at_the_edge_of_its_grid_is_noted() -> None:
    assert edges_of_rates([measured({"axial": 0.5})]) == []
    at_edge = tuned(measured({"axial": 0.5}), {"axial": 0.9}, {})
    three = {"axial": replace(at_edge.encodings["axial"], tuning=[Tuned(rate, 0.5) for rate in (0.3, 1.0, 3.0)])}
    inside = replace(at_edge, encodings=three, name="inside", rate=1.0)
    [note] = edges_of_rates([replace(at_edge, rate=3.0), inside])
    assert note.startswith(
        "On 1 of 2 tuned data sets (digits) the learning rate chosen is the lowest or highest of its grid"
    )


def test_answers_that_are_the_same_are_noted() -> None:
    [note] = _same_on_one_axis([measured({"axial": 0.5, "mrope": 0.5, "mixed": 0.7})])
    assert note == "The same answers on digits: one result that is counted once for each of axial, mrope."


def test_merged_entry_is_written_with_its_answers(tmp_path: Path) -> None:
    entry = Entry("plan", "me", [measured({"none": 0.1, "axial": 0.8, "mixed": 0.9})])
    write_results(tmp_path, None, [entry], "torchrope leaderboard --entries a.json")
    (merged,) = Entry.read(tmp_path / ENTRY).sets
    assert merged.encodings["mixed"].right == entry.sets[0].encodings["mixed"].right
