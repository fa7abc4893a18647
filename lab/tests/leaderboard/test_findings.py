"""What a leaderboard's entry shows: groups, equivalence, means over data sets, claims, predictions and training."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import leaderboard_coverage
import numpy as np
import pytest
import torch
from peers import make_encoding
from scipy import stats
from sentences import is_short
from setting import Setting
from test_entry import EXAMPLES, SEEDS, VERSION_1, of_encoding, of_set

from torchrope_lab.conclusion import Interval, one_seed
from torchrope_lab.encodings import resolve_encoding
from torchrope_lab.leaderboard.answers import (
    DIFFERENT,
    EQUIVALENT,
    UNKNOWN,
    Answers,
    Compared,
    Comparison,
    compare_on,
    compare_over,
    has_converged,
)
from torchrope_lab.leaderboard.entry import DataSetResults, Entry, TuningRun, pack
from torchrope_lab.leaderboard.findings import find
from torchrope_lab.leaderboard.plan import read_plan
from torchrope_lab.leaderboard.run import write_results
from torchrope_lab.leaderboard.tables import INCONCLUSIVE, OPPOSITE, SAME, judge, read_claims, table_of_claims
from torchrope_lab.results import Findings, Row, StudyResult, Table
from torchrope_lab.statistics import differences

PER_SEED = ("right", "losses", "seconds", "runs")


def packed(accuracy: float, seed: int = 0) -> list[str]:
    """Answers of which a share is right, the same examples first for every accuracy of a seed."""
    drawn = np.random.default_rng(seed).random((SEEDS, EXAMPLES))
    return [pack(row < accuracy) for row in drawn]


def measured(
    shares: Mapping[str, float], name: str = "digits", seed: int = 0, **conditions: Mapping[str, float]
) -> DataSetResults:
    """A data set with these accuracies, and those under other conditions ("largest" among them)."""
    encodings = {}
    for at, (encoding, share) in enumerate(shares.items()):
        others: dict[str, Any] = {
            key: packed(each[encoding], seed) for key, each in conditions.items() if key != "largest"
        }
        others["losses"] = [1.0 + at / 100] * SEEDS  # different functions have different losses
        if "largest" in conditions:
            others["sizes"] = {"8×8": packed(share, seed), "16×16": packed(conditions["largest"][encoding], seed)}
        encodings[encoding] = replace(of_encoding(0.5), right=packed(share, seed), **others)
    return of_set(name, encodings=encodings)


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


def compared(low: float, high: float, inner: float = 1.0) -> Compared:
    middle, half = (low + high) / 2, inner * (high - low) / 2
    return Compared(Interval(middle, low, high), Interval(middle, middle - half, middle + half))


# Verdicts and groups


@pytest.mark.parametrize(
    ("low", "high", "inner", "verdict"),
    [
        (0.1, 5.0, 1.0, DIFFERENT),
        (-5.0, -0.1, 1.0, DIFFERENT),
        (-0.9, 0.9, 1.0, EQUIVALENT),
        (0.1, 0.9, 1.0, EQUIVALENT),
        (-1.1, 1.1, 0.8, EQUIVALENT),  # of 90 %
        (-1.5, 0.5, 1.0, UNKNOWN),
        (-np.inf, np.inf, 1.0, UNKNOWN),
    ],
)
def test_verdicts_are_of_two_intervals(low: float, high: float, inner: float, verdict: str) -> None:
    if np.isinf(low):
        found = Compared(*[Interval(0.0, low, high)] * 2)
    else:
        found = compared(low, high, inner)
    assert found.verdict == verdict


def comparison_of(names: str, different: Sequence[str]) -> Comparison:
    pairs = {
        pair: compared(1.0, 5.0) if "".join(pair) in different else compared(-9.0, 9.0)
        for pair in combinations(names, 2)
    }
    return Comparison([*names], {name: name for name in names}, dict.fromkeys(names, 0.0), pairs)


@pytest.mark.parametrize("seed", range(30))
def test_letters_are_shared_if_and_only_if_names_do_not_differ(seed: int) -> None:
    random, names = np.random.default_rng(seed), "abcdefg"
    different = ["".join(pair) for pair in combinations(names, 2) if random.random() < 0.4]
    groups = comparison_of(names, different).groups()
    for one, other in combinations(names, 2):
        assert bool({*groups[one]} & {*groups[other]}) == (one + other not in different)


def test_letters_of_groups_in_a_row() -> None:
    assert comparison_of("abc", ["ac"]).groups() == {"a": "a", "b": "ab", "c": "b"}
    assert comparison_of("ab", []).groups() == {"a": "a", "b": "a"}


def test_table_of_a_set_has_groups_and_simultaneous_gaps() -> None:
    found = measured({"none": 0.05, "axial": 0.5, "mixed": 0.52, "liere": 0.97})
    rows = findings_of(found).tables[0].rows
    assert [row["name"] for row in rows] == ["liere", "mixed", "axial", "none"]
    assert [row["group"] for row in rows] == ["a", "b", "b", "c"]
    assert [row["verdict"] for row in rows] == ["highest", *[DIFFERENT] * 3]
    names = [row["name"] for row in rows]
    expected = differences(found.rights(), [(a, b) for a, b in combinations(names, 2)])  # type: ignore[misc]
    for row, gap in zip(rows[1:], expected, strict=False):
        assert [row["gap"], row["gap_low"], row["gap_high"]] == pytest.approx([100 * each for each in gap])


def test_intervals_of_two_errors_are_nested() -> None:
    rights = measured({"a": 0.5, "b": 0.6}).rights()
    [(_, low, high)], [(_, inner_low, inner_high)] = (differences(rights, [("b", "a")], error=e) for e in (0.05, 0.1))
    assert low < inner_low < inner_high < high


# Means over data sets


def test_means_over_sets_have_students_intervals() -> None:
    sets = [
        measured({"none": 0.3, "axial": 0.5 + shift, "mixed": 0.6}, f"set{at}", at)
        for at, shift in enumerate((0.0, 0.1, -0.1, 0.2))
    ]
    comparison = compare_over(Answers(sets))
    assert comparison is not None
    gaps = [100 * (each.rights()["axial"].mean() - each.rights()["none"].mean()) for each in sets]
    level = 1 - 0.05 / 3
    expected = stats.t.interval(level, 3, np.mean(gaps), stats.sem(gaps))
    found = comparison.between("axial", "none")
    assert (found.gap.low, found.gap.high) == pytest.approx(expected)
    inner = stats.t.interval(1 - 0.1 / 3, 3, np.mean(gaps), stats.sem(gaps))
    assert (found.inner.low, found.inner.high) == pytest.approx(inner)
    assert comparison.between("none", "axial").gap.low == pytest.approx(-expected[1])
    assert "3 degrees of freedom" in table(find(Entry("plan", "me", sets)), "Mean over").note


def test_no_mean_over_fewer_than_three_sets_or_of_encodings_that_a_set_lacks() -> None:
    two = [measured({"none": 0.3, "axial": 0.5}, name) for name in "ab"]
    assert compare_over(Answers(two)) is None
    three = [*two, measured({"none": 0.3, "axial": 0.5, "mixed": 0.7}, "c", 3)]
    comparison = compare_over(Answers(three))
    assert comparison is not None
    assert {*comparison.order} == {"none", "axial"}


# Encodings that are the same function


def equal(found: DataSetResults, *names: str) -> DataSetResults:
    """The set, with encodings of the same answers and losses as axial's."""
    return replace(found, encodings=found.encodings | dict.fromkeys(names, found.encodings["axial"]))


def test_encodings_that_are_the_same_function_count_once() -> None:
    found = measured({"none": 0.3, "axial": 0.42, "mixed": 0.7})
    with_others = equal(found, "mrope", "videorope")
    alone, together = (compare_on(Answers([each]), "digits") for each in (found, with_others))
    assert together.order == alone.order
    assert together.pairs == alone.pairs
    assert together.same["mrope"] == together.same["videorope"] == "axial"
    findings = findings_of(with_others)
    assert {row["name"] for row in findings.tables[0].rows} == {"none", "axial", "mixed"}


def test_encodings_that_differ_on_another_data_set_are_both_in_the_mean() -> None:
    sets = [equal(measured({"none": 0.3, "axial": 0.42}, name, at), "mrope") for at, name in enumerate("ab")]
    sets.append(measured({"none": 0.3, "axial": 0.42, "mrope": 0.6}, "c"))
    comparison = compare_over(Answers(sets))
    assert comparison is not None
    assert {*comparison.order} == {"none", "axial", "mrope"}


def test_answer_names_an_encoding_that_is_another_function_on_one_data_set() -> None:
    sets = [equal(measured({"none": 0.2, "axial": 0.9}, "a"), "mrope"), measured({"none": 0.2, "axial": 0.6}, "b", 1)]
    sets[1] = replace(sets[1], encodings={**sets[1].encodings, "mrope": of_encoding(0.95, 1)})
    for order in (sets, sets[::-1]):
        answer = findings_of(*order).answer
        assert "in the highest group on all 2 data sets: mrope; behind it on all 2 data sets: none." in answer


def test_data_sets_of_the_same_title_have_tables_and_panels_of_their_own() -> None:
    findings = findings_of(measured({"none": 0.2, "axial": 0.9}, "small"), measured({"none": 0.3, "axial": 0.5}, "all"))
    assert len({table.title for table in findings.tables}) == len(findings.tables)
    assert len({row["set"] for row in findings.figures[0].rows}) == 2


def test_gain_of_exactly_half_a_point_is_one_for_the_run_and_for_the_page() -> None:
    half, after = (
        [right / 600 for right in rights] for rights in ([448, 536, 553, 462, 470], [451, 539, 556, 465, 473])
    )
    assert not has_converged(np.mean(after) - np.mean(half))
    assert not has_converged((100 * np.mean(after) - 100 * np.mean(half)) / 100)
    assert has_converged(0.00499)
    assert has_converged(-0.00499)
    assert not has_converged(-0.07)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"losses": [1.0, 1.0, 1.1]}, {"losses": [1.0, 1.0, 1.2]}),
        ({"losses": [1.0, None, 1.0]}, {"losses": [1.0, None, 1.0]}),
        ({"right": packed(1.0), "losses": [0.0, 4e-8, 8e-8]}, {"right": packed(1.0), "losses": [0.0, 4e-8, 8e-8]}),
        ({"shuffled": packed(0.1)}, {"shuffled": packed(0.2)}),
    ],
)
def test_equal_answers_of_other_functions_count_twice(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Also if losses are not finite or 0 up to rounding, so that both may be any functions."""
    found = measured({"none": 0.3, "axial": 0.42})
    axial = found.encodings["axial"]
    both = {"axial": replace(axial, **one), "mrope": replace(axial, **other)}
    findings = findings_of(replace(found, encodings=found.encodings | both))
    assert {row["name"] for row in findings.tables[0].rows} == {"none", "axial", "mrope"}


def test_the_same_functions_of_an_entry_are_so_by_construction() -> None:
    """Encodings with the same answers and losses there rotate by the same angles, and on more axes they do not."""
    same = Answers(Entry.read(VERSION_1).sets).same
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


# Claims of papers, and predictions


@pytest.mark.parametrize(
    ("ahead", "behind", "verdict"), [(0.9, 0.3, SAME), (0.3, 0.9, OPPOSITE), (0.5, 0.5, INCONCLUSIVE)]
)
def test_claims_are_judged_by_the_interval(ahead: float, behind: float, verdict: str) -> None:
    found = on_axes(measured({"mixed": ahead, "axial": behind}), ("height", "width"))
    claims = table_of_claims(Answers([found]))
    assert [row["verdict"] for row in claims.rows] == [verdict]
    assert str(claims.rows[0]["comparable"]).startswith("no")
    assert table_of_claims(Answers([on_axes(found, ("time",))])).rows == []  # the paper is about images


def test_claims_are_judged_on_each_data_set() -> None:
    images = ("height", "width")
    one = on_axes(measured({"mixed": 0.1, "axial": 0.9}), images, "one")
    two = on_axes(measured({"mixed": 0.9, "axial": 0.1}), images, "two")
    rows = table_of_claims(Answers([one, two])).rows
    assert [(row["set"], row["verdict"]) for row in rows] == [("one", OPPOSITE), ("two", SAME)]


def test_claim_about_larger_inputs_uses_their_answers() -> None:
    shares = {"mixed": 0.5, "learned": 0.5}
    found = measured(shares, largest={"mixed": 0.9, "learned": 0.1})
    [row] = table_of_claims(Answers([on_axes(found, ("height", "width"))])).rows
    assert row["verdict"] == SAME
    assert row["gain"] > 70  # type: ignore[operator]


def test_predictions_of_equivalence_need_a_small_interval() -> None:
    found = measured({"mixed": 0.5, "axial": 0.5}, "kanji-layout")
    wanted = [(claim, each) for claim, _, each, _ in judge(Answers([found]), "predictions") if claim.equivalent]
    [(claim, each)] = wanted
    assert (claim.ahead, claim.behind) == ("mixed", "axial")
    assert claim.verdict(each) == INCONCLUSIVE  # the same answers, of too few examples
    assert claim.verdict(compared(-0.5, 0.5)) == EQUIVALENT
    assert claim.verdict(compared(-2.0, 2.0)) == INCONCLUSIVE
    assert claim.verdict(compared(2.0, 4.0)) == DIFFERENT


def test_statements_name_encodings_and_data_sets_that_exist() -> None:
    plan = read_plan("two-cores")
    predictions = read_claims("predictions")
    assert len(predictions) >= 10
    for claim in [*read_claims("claims"), *predictions]:
        assert resolve_encoding(claim.ahead).name != resolve_encoding(claim.behind).name
        assert bool(claim.sets) == bool(claim.because) != bool(claim.paper)
        assert {*claim.sets} <= {*plan.sets}
    assert {name for claim in predictions for name in (claim.ahead, claim.behind)} <= {*plan.encodings}


def test_no_claim_is_compared_with_its_own_encoding() -> None:
    claims = {(each.ahead, each.behind) for each in read_claims("claims")}
    assert ("liere", "mixed") not in claims  # LieRE's RoPE-Mixed is liere:2


# Training, answers and advice


def test_training_table_says_what_converged_and_what_is_at_a_limit() -> None:
    found = measured({"none": 0.3, "axial": 0.6, "mixed": 0.7}, half={"none": 0.3, "axial": 0.5, "mixed": 0.7})
    tuning = [TuningRun(1.0, 0.4), TuningRun(3.0, 0.5), TuningRun(0.3, 0.3)]
    own = [*tuning, TuningRun(3.0, 0.4, 10.0), TuningRun(3.0, 0.3, 0.1)]
    settings: dict[str, dict[str, Any]] = {
        "none": {"epochs": 8},
        "axial": {"epochs": 16, "rate": 3.0, "tuning": tuning},
        "mixed": {"epochs": 8, "rate": 3.0, "tuning": own},
    }
    encodings = {name: replace(each, **settings[name]) for name, each in found.encodings.items()}
    findings = findings_of(replace(found, encodings=encodings))
    rows = table(findings, "Learning rates").rows
    assert [row["converged"] for row in rows] == ["yes", "no, at the limit", "yes"]
    assert [row["rate"] for row in rows] == ["1, not tuned", *["3, the highest of 0.3, 1, 3"] * 2]
    assert [row["encoding_rate"] for row in rows] == [*["1, not tuned"] * 2, "1 of 0.1, 1, 10"]
    assert findings.answer.startswith("2 of 3 converged; 2 of 3 learning rates at a limit; ")
    rights = found.rights(), found.rights("half")
    assert rows[1]["gain"] == pytest.approx(100 * (rights[0]["axial"].mean() - rights[1]["axial"].mean()))


@pytest.mark.parametrize(
    ("accuracies", "said"),
    [
        ({"none": 0.5, "axial": 0.5, "mixed": 0.5}, r"group on all 3 data sets: axial, mixed and none\. With"),
        (
            {"none": 0.2, "axial": 0.5, "mixed": 0.95},
            r"group on all 3 data sets: mixed; behind it on all 3 data sets: axial and none\. With",
        ),
        (
            {"none": 0.2, "axial": 0.94, "mixed": 0.95},
            r"group on all 3 data sets: mixed and axial; behind it on all 3 data sets: none\. With",
        ),
    ],
)
def test_answer_names_the_groups(accuracies: dict[str, float], said: str) -> None:
    sets = [measured(accuracies, f"set{at}", at) for at in range(3)]
    found = findings_of(*sets)
    with pytest.raises(ValueError, match=said):
        raise ValueError(found.answer)
    assert is_short(found.answer)
    assert len(found.figures[0].rows) == 6


def test_answer_is_about_the_encoding_that_the_user_added(tmp_path: Path) -> None:
    shares = {"none": 0.1, "axial": 0.6, "mixed": 0.9}
    published = Entry("plan", "they", [measured(shares), measured(shares, "radicals", 1)])
    mine = measured({"golden": 0.5})
    path = write_results(tmp_path, Entry("plan", "me", [mine]), [published], "torchrope leaderboard")
    answer = StudyResult.read(path).findings.answer
    assert answer.startswith("golden on 1 of 2 data sets, against the highest of the others: different, −")
    assert answer.endswith("] to mixed on digits.")
    assert is_short(answer)


def test_one_encoding_alone_has_a_page() -> None:
    findings = find(Entry("plan", "me", [measured({"mixed": 0.5})]), own=["mixed"])
    assert findings.answer.endswith(": alone on digits.")


def test_answer_about_an_own_encoding_says_that_there_is_one_seed() -> None:
    of_one_seed = {
        name: replace(of_encoding(share), **{key: getattr(of_encoding(share), key)[:1] for key in PER_SEED})
        for name, share in {"axial": 0.5, "golden": 0.6}.items()
    }
    answers = [find(Entry("plan", "me", [of_set(encodings=of_one_seed)]), own=own).answer for own in ([], ["golden"])]
    assert all(answer.endswith(one_seed(1)) for answer in answers)


# Coverage


def test_simulated_intervals_cover_and_equivalence_is_rarely_false() -> None:
    """A few simulated leaderboards; the command simulates more."""
    assert leaderboard_coverage.simulate(3, 0).covered_sets > 0.8


@pytest.mark.slow
def test_coverage_and_size_are_those_that_the_page_states() -> None:
    found = leaderboard_coverage.simulate(60, 0)
    assert found.violations() == []
