"""What a leaderboard's entry shows: rankings under conditions, gains by axes, claims of papers, learning rates."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentences import is_short
from test_entry import EXAMPLES, SEEDS, of_encoding, of_set

from torchrope_lab.encodings import resolve_encoding
from torchrope_lab.leaderboard.answers import Answers, Contrast, rank
from torchrope_lab.leaderboard.entry import DataSetResults, Entry, TuningRun, pack
from torchrope_lab.leaderboard.findings import find
from torchrope_lab.leaderboard.run import ENTRY, write_results
from torchrope_lab.leaderboard.tables import (
    INCONCLUSIVE,
    OPPOSITE,
    SAME,
    read_claims,
    table_of_claims,
    table_of_gains,
)
from torchrope_lab.results import Findings, Row, StudyResult, Table
from torchrope_lab.speed.config import Setting
from torchrope_lab.speed.peers import make_encoding


def packed(accuracy: float, seed: int = 0) -> list[str]:
    """Answers of which a share is right, the same examples first for every accuracy of a seed."""
    drawn = np.random.default_rng(seed).random((SEEDS, EXAMPLES))
    return [pack(row < accuracy) for row in drawn]


def measured(shares: Mapping[str, float], **conditions: Mapping[str, float]) -> DataSetResults:
    """A data set with these accuracies, and those under other conditions ("largest" among them)."""
    encodings = {}
    for at, (name, share) in enumerate(shares.items()):
        others: dict[str, Any] = {key: packed(each[name]) for key, each in conditions.items() if key != "largest"}
        others["losses"] = [1.0 + at / 100] * SEEDS  # different functions have different losses
        if "largest" in conditions:
            others["sizes"] = {"8×8": packed(share), "16×16": packed(conditions["largest"][name])}
        encodings[name] = replace(of_encoding(0.5), right=packed(share), **others)
    return of_set(encodings=encodings)


def on_axes(found: DataSetResults, axes: Sequence[str], name: str = "digits") -> DataSetResults:
    return replace(found, name=name, data=replace(found.data, axes=axes))


def row_of(rows: Sequence[Row], **wanted: str) -> Row:
    (row,) = [each for each in rows if all(each[key] == value for key, value in wanted.items())]
    return row


def findings_of(*sets: DataSetResults) -> Findings:
    return find(Entry("plan", "me", sets))


def table(findings: Findings, title: str) -> Table:
    (found,) = [each for each in findings.tables if each.title.startswith(title)]
    return found


def test_ranking_uses_the_accuracies_of_its_condition() -> None:
    found = measured(
        {"none": 0.2, "axial": 0.9}, largest={"none": 0.6, "axial": 0.1}, small={"none": 0.1, "axial": 0.5}
    )
    answers = Answers([found])
    assert [rank(answers, each).best for each in ("trained", "small", "largest", "smallest")] == [  # type: ignore[union-attr]
        "axial",
        "axial",
        "none",
        "axial",
    ]
    assert rank(answers, "shuffled") is None
    assert answers.on("shuffled") == []


def test_ranking_counts_significantly_better_and_worse_encodings() -> None:
    findings = findings_of(measured({"none": 0.05, "axial": 0.5, "mixed": 0.52, "liere": 0.97}))
    rows = {row["name"]: (row["better"], row["worse"]) for row in findings.tables[0].rows}
    assert rows == {"liere": (0, 3), "mixed": (1, 1), "axial": (1, 1), "none": (3, 0)}


def test_gains_are_grouped_by_the_axes_of_the_data() -> None:
    images, series = ("height", "width"), ("time",)
    sets = [
        on_axes(measured({"none": 0.2, "axial": 0.9, "learned": 0.7}), images, "one"),
        on_axes(measured({"none": 0.2, "axial": 0.8, "learned": 0.7}), images, "two"),
        on_axes(measured({"none": 0.5, "axial": 0.5}), series, "three"),
    ]
    findings = findings_of(*sets)
    gains = table(findings, "Gain over none")
    assert [column.title for column in gains.columns[2:]] == ["height × width", "time"]
    axial, learned = (row_of(gains.rows, name=name) for name in ("axial", "learned"))
    means = [np.mean([each.rights()["axial"].mean() - each.rights()["none"].mean() for each in sets[:2]])]
    assert axial["gain0"] == pytest.approx(100 * means[0])
    assert axial["gain0_low"] > 0  # type: ignore[operator]
    assert axial["gain1"] == pytest.approx(0)
    assert learned["gain0"] is not None
    assert learned["gain1"] is None
    (figure,) = [each for each in findings.figures if each.name == "gain-by-set"]
    assert len(figure.rows) == 5


def test_gains_need_a_model_without_positions() -> None:
    assert table_of_gains(Answers([measured({"axial": 0.5, "mixed": 0.6})]), ["axial", "mixed"]).rows == []


# Encodings that are the same function


def equal(found: DataSetResults, *names: str) -> DataSetResults:
    """The set, with encodings of the same answers and losses as axial's."""
    return replace(found, encodings=found.encodings | dict.fromkeys(names, found.encodings["axial"]))


def test_encodings_that_are_the_same_function_count_once() -> None:
    found = measured({"none": 0.3, "axial": 0.42, "mixed": 0.7})
    with_others = equal(found, "mrope", "videorope")
    alone, together = (rank(Answers([each])) for each in (found, with_others))
    assert alone is not None
    assert together is not None
    assert together.order == alone.order
    assert together.pairs == alone.pairs
    assert together.same["mrope"] == together.same["videorope"] == "axial"
    findings = findings_of(with_others)
    assert {row["name"] for row in findings.tables[0].rows} == {"none", "axial", "mixed"}
    one, three = (table(findings_of(each), "Gain over none").rows for each in (found, with_others))
    assert row_of(three, name="mrope") == {**row_of(one, name="axial"), "name": "mrope", "encoding": "M-RoPE"}
    [note] = [note for note in findings.notes if note.startswith("The same function")]
    assert "on digits" in note
    assert "axial, mrope, videorope" in note


def test_encodings_that_differ_on_another_data_set_are_both_ranked() -> None:
    one = equal(measured({"none": 0.3, "axial": 0.42}), "mrope")
    two = on_axes(measured({"none": 0.3, "axial": 0.42, "mrope": 0.6}), ("height", "width"), "images")
    ranking = rank(Answers([one, two]))
    assert ranking is not None
    assert {*ranking.order} == {"none", "axial", "mrope"}
    [gap] = Answers([two]).differences([Contrast("mrope", "axial", ["images"])])
    assert ranking.pairs["mrope", "axial"].estimate == pytest.approx(gap.estimate / 2)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"losses": [1.0, 1.0, 1.1]}, {"losses": [1.0, 1.0, 1.2]}),
        ({"losses": [1.0, None, 1.0]}, {"losses": [1.0, None, 1.0]}),
        ({"small": packed(0.1)}, {"small": packed(0.2)}),
    ],
)
def test_equal_answers_of_other_functions_count_twice(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Also if losses are not finite, so that two that diverged may be any functions."""
    found = measured({"none": 0.3, "axial": 0.42})
    axial = found.encodings["axial"]
    both = {"axial": replace(axial, **one), "mrope": replace(axial, **other)}
    findings = findings_of(replace(found, encodings=found.encodings | both))
    assert {row["name"] for row in findings.tables[0].rows} == {"none", "axial", "mrope"}


def test_the_same_functions_of_the_published_entry_are_so_by_construction() -> None:
    """Encodings with the same answers and losses there rotate by the same angles, and on more axes they do not."""
    same = Answers(Entry.read(PUBLISHED).sets).same
    assert {name for name, groups in same.items() if len({*groups.values()}) < len(groups)} == {
        "vowels",
        "power-demand",
    }
    for data_set in ("vowels", "power-demand"):
        names = [name for name, first in same[data_set].items() if first == "axial"]
        assert {*names} == {"axial", "mrope", "mrope-interleaved", "videorope", "mhrope"}
        for axes, are_equal in ((1, True), (3, False)):
            setting = Setting(batch=1, heads=4, tokens=8, head_dim=24, axes=axes)
            generators = [make_encoding(name, setting).generators() for name in names]
            assert all(torch.equal(generators[0].expand_as(each), each) for each in generators) is are_equal


PUBLISHED = Path(__file__).parents[3] / "docs" / "results" / "leaderboard" / "entry" / "entry.json"


# Claims of papers


@pytest.mark.parametrize(
    ("ahead", "behind", "verdict"), [(0.9, 0.3, SAME), (0.3, 0.9, OPPOSITE), (0.5, 0.5, INCONCLUSIVE)]
)
def test_claims_are_judged_by_the_interval(ahead: float, behind: float, verdict: str) -> None:
    found = on_axes(measured({"mixed": ahead, "axial": behind}), ("height", "width"))
    claims = table_of_claims(Answers([found]))
    assert [row["verdict"] for row in claims.rows] == [verdict]
    assert table_of_claims(Answers([on_axes(found, ("time",))])).rows == []  # the paper is about images


def test_claim_on_which_data_sets_disagree_is_inconclusive() -> None:
    images = ("height", "width")
    one = on_axes(measured({"mixed": 0.1, "axial": 0.9}), images, "one")
    two = on_axes(measured({"mixed": 0.52, "axial": 0.5}), images, "two")
    [row] = table_of_claims(Answers([one, two])).rows
    assert row["gain_high"] < 0  # type: ignore[operator]
    assert row["verdict"] == INCONCLUSIVE
    assert re.fullmatch(r"one −\d+\.\d, two \d+\.\d", str(row["by_set"]))
    assert str(row["comparable"]).startswith("no: small models")


def test_no_claim_is_compared_with_its_own_encoding() -> None:
    assert ("liere", "mixed") not in {
        (each.ahead, each.behind) for each in read_claims()
    }  # LieRE's RoPE-Mixed is liere:2


def test_claims_name_encodings_that_exist() -> None:
    for claim in read_claims():
        assert resolve_encoding(claim.ahead).name != resolve_encoding(claim.behind).name


def tuned(found: DataSetResults, rates: Mapping[str, float], own: Mapping[str, float]) -> DataSetResults:
    """The set with tuning at 1 and 3, and answers at a rate of their own for those in `own`."""
    encodings = {
        name: replace(
            each,
            tuning=[TuningRun(1.0, 1 - rates[name]), TuningRun(3.0, rates[name])] if name in rates else [],
            own_rate=3.0 if name in own else None,
            own=packed(own[name]) if name in own else (),
        )
        for name, each in found.encodings.items()
    }
    tops = {rate: sum(each.tuned.get(rate, 0) for each in encodings.values()) for rate in (1.0, 3.0)}
    return replace(found, encodings=encodings, rate=3.0 if tops[3.0] > tops[1.0] else 1.0)


def test_tuned_rates_can_change_the_order() -> None:
    found = tuned(measured({"none": 0.1, "axial": 0.5, "mixed": 0.6}), {"axial": 0.9, "mixed": 0.1}, {"axial": 0.95})
    findings = findings_of(found)
    own = {row["name"]: row["own"] for row in table(findings, "Under other conditions").rows}
    assert own["axial"] > own["mixed"]  # type: ignore[operator]
    assert own["none"] is None  # not tuned
    [row] = table(findings, "A learning rate of its own").rows
    assert (row["name"], row["rate"], row["verdict"]) == ("axial", 3.0, "better")
    rights = found.rights(), found.rights("own")
    assert row["gain"] == pytest.approx(100 * (rights[1]["axial"].mean() - rights[0]["axial"].mean()))
    changed, kept = (
        " ".join(note for note in findings_of(each).notes if "of their own" in note and "order" in note)
        for each in (found, tuned(found, {"axial": 0.9, "mixed": 0.1}, {}))
    )
    assert 0 <= changed.find("mixed, axial") < changed.find("axial, mixed")
    assert "mixed, axial" in kept
    assert "axial, mixed" not in kept


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
    said = r"golden: \d+\.\d % on average over 2 data sets; [12] of 3 others are significantly better and [01] worse\. "
    assert re.match(said, answer)
    assert "It is significantly behind mixed, the highest: −" in answer
    assert is_short(answer)
    merged = write_results(tmp_path, None, [published], "torchrope leaderboard")
    assert "golden" not in StudyResult.read(merged).findings.answer


SERIES = on_axes(measured({"none": 0.1, "axial": 0.6, "mixed": 0.9}), ("time",), "vowels")


def test_rate_at_the_edge_of_its_grid_is_noted() -> None:
    at_edge = tuned(measured({"axial": 0.5, "mixed": 0.5}), {"axial": 0.9}, {})
    three = {
        "axial": replace(
            at_edge.encodings["axial"], tuning=[TuningRun(0.3, 0.1), TuningRun(1.0, 0.5), TuningRun(3.0, 0.1)]
        )
    }
    inside = replace(at_edge, encodings=at_edge.encodings | three, name="inside", rate=1.0)
    findings = findings_of(at_edge, inside, replace(measured({"axial": 0.5, "mixed": 0.5}), name="untuned"))
    rows = table(findings, "Data sets").rows
    assert [(row["rate"], row["tried"], row["edge"]) for row in rows] == [
        (3.0, "1, 3", "highest"),
        (1.0, "0.3, 1, 3", "no"),
        (1.0, "", "no"),
    ]
    [note] = [note for note in findings.notes if "edge" in note]
    assert "digits (highest)" in note
    assert "inside" not in note


def test_answer_and_table_say_how_long_models_were_trained() -> None:
    found = replace(measured({"none": 0.1, "axial": 0.9}), arguments="--data digits --epochs 8")
    rises = {"none": 0.005, "axial": 0.03}
    recorded = {name: replace(each, rise=rises[name]) for name, each in found.encodings.items()}
    longer = replace(found, name="other", arguments="--data digits --optim.epochs=24", encodings=recorded)
    findings = findings_of(found, longer)
    assert findings.answer.startswith("After 8 to 24 epochs (1 of 2 curves still rise), over 2 data sets ")
    assert [(row["epochs"], row["rising"]) for row in table(findings, "Data sets").rows] == [
        (8, "not recorded"),
        (24, "1 of 2"),
    ]
    assert not findings_of(measured({"none": 0.1, "axial": 0.9})).answer.startswith("After")


def test_change_of_the_order_without_a_data_set_is_noted() -> None:
    sets = [
        on_axes(measured({"none": 0.1, "axial": a, "mixed": b}), ("height", "width"), name)
        for name, a, b in (("one", 0.5, 0.6), ("two", 0.5, 0.6), ("odd", 0.95, 0.1))
    ]
    [note] = [note for note in findings_of(*sets).notes if note.startswith("The order depends on the data sets")]
    assert re.search(r"without odd, mixed is number 1, not 2|without odd, axial is number 2, not 1", note)


def test_merged_entry_is_written_with_its_answers(tmp_path: Path) -> None:
    entry = Entry("plan", "me", [measured({"none": 0.1, "axial": 0.8, "mixed": 0.9})])
    write_results(tmp_path, None, [entry], "torchrope leaderboard --entries a.json")
    (merged,) = Entry.read(tmp_path / ENTRY).sets
    assert merged.encodings["mixed"].right == entry.sets[0].encodings["mixed"].right
