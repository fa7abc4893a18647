"""The leaderboard: plans, a complete run, and claims about ranks."""

import json
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from sentences import is_short
from test_entry import EXAMPLES, of_encoding, of_set

from torchrope_lab.cli import main
from torchrope_lab.conclusion import Interval
from torchrope_lab.data.build import make_data
from torchrope_lab.data.config import data_config
from torchrope_lab.encodings import resolve_encoding
from torchrope_lab.leaderboard.check import check_against_data
from torchrope_lab.leaderboard.entry import DataSetResults, EncodingResults, Entry, pack
from torchrope_lab.leaderboard.findings import find
from torchrope_lab.leaderboard.plan import Plan, plans, read_plan
from torchrope_lab.results import StudyResult
from torchrope_lab.statistics import differences, differences_over_sets, ranks

TINY = """
title: two encodings
encodings: [none, axial]
tuned: [axial]
rates: [1.0, 3.0]
seeds: 1
small: 0.5
scales: [1.0, 2.0]
sets:
  digits: --data digits --data.train_size 60 --data.val_size 40 --epochs 2 --model.depth 1
"""


# Plans


@pytest.mark.parametrize("name", plans())
def test_included_plans_can_be_run(name: str) -> None:
    plan = read_plan(name)
    for encoding in plan.encodings:
        resolve_encoding(encoding)
    for part in plan.sets:
        config = plan.config(part, out=Path("out"))
        assert config.seeds == plan.seeds
        assert "none" in config.encodings


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("seeds: 0", "plan: seeds must be 1 or more, got 0"),
        ("rates: [3.0]", "rates must contain 1 and be different numbers above 0 and below 100, got \\[3.0\\]"),
        ("rates: [1.0, 100.0]", "rates must contain 1 and be different numbers above 0 and below 100, got \\[1.0, 100"),
        ("encodings: [none, none]", "one or more, each named once, got none, none"),
        ("tuned: [liere]", "tuned must be among the encodings, got liere"),
        ("sets: {}", "a plan must have a data set, got none"),
        (
            "sets: {a: --data digits --seeds 3}",
            "sets.a of the plan: options of a data set must not be those of the plan, got --seeds",
        ),
        ("sets: {a: --data digots}", "sets.a of the plan: --data"),
        ("small: 1.0", "small must be a share from 0 to below 1"),
    ],
)
def test_mistake_in_a_plan_is_one_line(
    change: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key = change.partition(":")[0]
    text = TINY[: TINY.index("sets:")] if key == "sets" else TINY
    lines = [line for line in text.splitlines() if not line.startswith(f"{key}:")]
    (tmp_path / "plan.yaml").write_text("\n".join([change, *lines]))
    assert main(["leaderboard", str(tmp_path / "plan.yaml"), "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    with pytest.raises(ValueError, match=message):
        raise ValueError(error)
    assert not (tmp_path / "out").exists()


def test_some_sets_of_a_plan() -> None:
    plan = Plan("t", ["none", "axial"], {"a": "--data digits", "b": "--data motion"})
    assert [*plan.only(["b"]).sets] == ["b"]
    with pytest.raises(ValueError, match="--only must name sets of the plan, a, b, got c"):
        plan.only(["c"])


# From start to page


def test_benchmark_resumes_and_its_entry_is_checked_and_joined(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "plan.yaml").write_text(TINY)
    command = ["leaderboard", str(tmp_path / "plan.yaml"), "--out", str(tmp_path / "out"), "--author", "me"]
    assert main(command) == 0
    entry = Entry.read(tmp_path / "out" / "entry" / "entry.json")
    (found,) = entry.sets
    trained = sorted((tmp_path / "out" / "runs").glob("digits-*"))
    assert {run for each in found.encodings.values() for run in each.runs} <= {folder.name for folder in trained}
    assert [len(each.tuning) for each in found.encodings.values()] == [0, 2]
    assert all(each.small and each.shuffled and each.steps for each in found.encodings.values())
    assert [*found.encodings["axial"].sizes] == ["16×16"]
    result = StudyResult.read(tmp_path / "out" / "leaderboard.json")
    assert "axial" in (tmp_path / "out" / "report" / "index.html").read_text()
    assert result.unfinished == []

    assert main(command) == 0  # nothing is trained again
    assert sorted((tmp_path / "out" / "runs").glob("digits-*")) == trained
    assert Entry.read(tmp_path / "out" / "entry" / "entry.json") == entry

    capsys.readouterr()
    assert main(["leaderboard", "--check", str(tmp_path / "out" / "entry" / "entry.json")]) == 0
    assert "same data as on this machine" in capsys.readouterr().out
    alone = ["--entries", str(tmp_path / "out" / "entry" / "sets" / "digits.json")]
    assert main(["leaderboard", *alone, "--out", str(tmp_path / "merged")]) == 0
    assert StudyResult.read(tmp_path / "merged" / "leaderboard.json").findings == result.findings

    joined = ["--encodings", "mixed", "--entries", str(tmp_path / "out" / "entry" / "entry.json")]
    assert main(["leaderboard", str(tmp_path / "plan.yaml"), *joined, "--out", str(tmp_path / "theirs")]) == 0
    (theirs,) = Entry.read(tmp_path / "theirs" / "entry" / "entry.json").sets
    assert [*theirs.encodings] == ["mixed"]
    assert theirs.rate == found.rate
    ranked = StudyResult.read(tmp_path / "theirs" / "leaderboard.json").findings.tables[0].rows
    assert {row["name"] for row in ranked} == {"none", "axial", "mixed"}


def test_entry_of_other_data_is_refused() -> None:
    with pytest.raises(ValueError, match=r"fingerprint must be .* as in the local data, got f00d"):
        check_against_data(of_set(arguments="--data digits"))
    assert "cannot be loaded here" in check_against_data(of_set(arguments="--data images --data.root /nowhere"))


@pytest.mark.parametrize("name", ["digits", "motion", "globe", "views"])
def test_rate_is_chosen_on_other_examples_than_results(name: str) -> None:
    settings = dict(train_size=100, val_size=20)
    usual, tuning = (make_data(data_config(name, tuning=each, **settings)) for each in (False, True))
    train, _ = usual._made_datasets()
    first, second = tuning._made_datasets()
    assert len(first) + len(second) == len(train) == 100
    assert 15 <= len(second) <= 30
    whole = {bytes(each[0].numpy()) for each in train}
    apart = [{bytes(each[0].numpy()) for each in part} for part in (first, second)]
    assert apart[0] | apart[1] == whole
    if name != "motion":  # of which two clips may be the same
        assert not apart[0] & apart[1]
    assert {*second.labels.tolist()} == {*train.labels.tolist()}


def test_tuning_of_data_in_files_is_refused(tmp_path: Path) -> None:
    from miniatures import MINIATURES

    data = make_data(data_config("images", root=str(MINIATURES["images"](tmp_path)), tuning=True))
    with pytest.raises(ValueError, match=r"--data\.tuning is for in-memory data"):
        data.setup()


# Ranks


def rights(accuracies: dict[str, float], seed: int, examples: int = 400) -> dict[str, np.ndarray]:
    drawn = np.random.default_rng(seed).random((3, examples))
    return {name: (drawn < accuracy).astype(float) for name, accuracy in accuracies.items()}


def test_mean_over_one_data_set_is_the_difference() -> None:
    found = rights({"a": 0.5, "b": 0.6, "c": 0.61}, 0)
    pairs = list(combinations(found, 2))
    once = {name: right[:1] for name, right in found.items()}  # of several seeds the variance is that of all pairs
    for pair in pairs:
        [ours], [theirs] = differences_over_sets([once], [(*pair, [0])]), differences(once, [pair])
        assert ours == pytest.approx(theirs, abs=1e-7)


def test_intervals_shrink_with_the_root_of_the_number_of_equal_sets() -> None:
    found = rights({"a": 0.5, "b": 0.55}, 0)
    (one,) = differences_over_sets([found], [("a", "b", [0])])
    (four,) = differences_over_sets([found] * 4, [("a", "b", range(4))])
    assert four.estimate == pytest.approx(one.estimate)
    assert (four.high - four.estimate) == pytest.approx((one.high - one.estimate) / 2)


def test_means_over_sets_hold_what_is_true() -> None:
    """Of 200 benchmarks of three sets, the interval misses the mean difference in at most 5 % and a margin."""
    missed = 0
    for seed in range(200):
        generator = np.random.default_rng(seed)
        sets = []
        for base in (0.3, 0.6, 0.85):
            draws = generator.random((2, 1, 300))  # one seed
            sets.append({"a": (draws[0] < base).astype(float), "b": (draws[1] < base + 0.05).astype(float)})
        (found,) = differences_over_sets(sets, [("b", "a", range(3))])
        missed += not found.low <= 0.05 <= found.high
    assert missed <= 20  # 10 expected; 20 or more in 1 of 300 such tests


def test_ranks_count_what_is_significantly_ahead_and_behind() -> None:
    ahead, equal = Interval(2.0, 1.0, 3.0), Interval(0.5, -1.0, 2.0)
    found = ranks(["a", "b", "c"], {("a", "b"): equal, ("a", "c"): ahead, ("c", "b"): Interval(-2.0, -3.0, -1.0)})
    assert found == {"a": (1, 2), "b": (1, 2), "c": (3, 3)}


def benchmark_of(accuracies: dict[str, float], sets: int = 3) -> Entry:
    def one(index: int) -> DataSetResults:
        encodings: dict[str, EncodingResults] = {}
        for name, right in rights(accuracies, index, EXAMPLES).items():
            encodings[name] = of_encoding(0.5)
            encodings[name] = EncodingResults(**{**vars(encodings[name]), "right": [pack(row) for row in right]})
        return of_set(f"set{index}", encodings=encodings)

    return Entry("a plan", "me", [one(index) for index in range(sets)])


@pytest.mark.parametrize(
    ("accuracies", "said"),
    [
        ({"none": 0.5, "axial": 0.5, "mixed": 0.5}, "the 3 encodings are not significantly different"),
        ({"none": 0.2, "axial": 0.5, "mixed": 0.95}, "mixed is significantly ahead of all others"),
        (
            {"none": 0.2, "axial": 0.94, "mixed": 0.95},
            r"2 of 3 encodings are not significantly different .*, \d+ to \d+ points over none; the order",
        ),
    ],
)
def test_answer_claims_what_is_significant(accuracies: dict[str, float], said: str) -> None:
    found = find(benchmark_of(accuracies))
    with pytest.raises(ValueError, match=said):
        raise ValueError(found.answer)
    assert is_short(found.answer)
    order = [row["name"] for row in found.tables[0].rows]
    means = [row["mean"] for row in found.tables[0].rows]
    assert means == sorted(means, reverse=True)
    assert {*order} == {*accuracies}
    json.dumps(found.plain())


def test_encoding_that_a_data_set_lacks_is_not_ranked() -> None:
    entry = benchmark_of({"none": 0.5, "axial": 0.6, "mixed": 0.7})
    fewer = dict(entry.sets[1].encodings)
    fewer.pop("mixed")
    sets = [entry.sets[0], DataSetResults(**{**vars(entry.sets[1]), "encodings": fewer})]
    found = find(Entry("a plan", "me", sets))
    assert {row["name"] for row in found.tables[0].rows} == {"none", "axial"}
    assert {row["name"] for row in found.tables[1].rows} == {"none", "axial", "mixed"}
