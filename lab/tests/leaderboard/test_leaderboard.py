"""The leaderboard: plans, and a complete run, from tuning to the page."""

import json
from pathlib import Path

import pytest
from test_entry import of_set

from torchrope_lab.cli import main
from torchrope_lab.data.build import make_data
from torchrope_lab.data.config import data_config
from torchrope_lab.encodings import resolve_encoding
from torchrope_lab.leaderboard.entry import Entry
from torchrope_lab.leaderboard.plan import Plan, plans, read_plan
from torchrope_lab.leaderboard.run import check_against_data
from torchrope_lab.results import StudyResult

TINY = """
title: two encodings
encodings: [none, mixed]
rates: [0.3, 1.0, 3.0]
encoding_rates: [1.0, 10.0]
seeds: 1
longest: 2
scales: [1.0, 2.0]
sets:
  digits: --data digits --data.train_size 60 --data.val_size 40 --epochs 2 --model.depth 1
"""
MOTION = "--data motion --data.train_size 20 --data.val_size 20"


def untuned(text: str) -> str:
    lines = [line for line in text.splitlines() if not line.startswith(("rates", "encoding_rates", "longest"))]
    return "\n".join([*lines, "rates: [1.0]", "encoding_rates: [1.0]", "longest: 1"])


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
        ("seeds: 0", "plan.seeds must be 1 or more, got 0"),
        ("rates: [3.0]", "plan.rates must be increasing numbers of which one is 1, got \\[3.0\\]"),
        ("rates: [3.0, 1.0]", "plan.rates must be increasing numbers of which one is 1, got \\[3.0, 1.0\\]"),
        ("encoding_rates: [1.0, 2000.0]", "encoding_rates\\[1\\] must be above 0 and at most 1000, got 2000.0"),
        ("encodings: [none, none]", "plan.encodings must be different values, got none,none"),
        ("tuned: [liere]", "plan.tuned must be one of title, encodings, sets, "),
        ("sets: {}", "plan.sets must be one value or more, got {}"),
        (
            "sets: {a: --data digits --seeds 3}",
            "sets.a of the plan: options of a data set must not be those of the plan, got --seeds",
        ),
        ("sets: {a: --data digots}", "sets.a of the plan: --data"),
        ("longest: 0", "plan.longest must be 1 or more, got 0"),
        ("scales: [0.5, 1.0]", "plan.scales must be 1, or numbers that end above 1, got \\[0.5, 1.0\\]"),
        ("sets: {a: --data scenes}", "sets.a of the plan must be data for the task classify, got segment"),
        ("sets: {a: --data digits --folds 2}", "sets.a of the plan must not have --data.folds, got 2"),
        ('encodings: ["liere:7"]', "no encoding fits a data set of the plan: liere:7 is left out: "),
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


def test_leaderboard_resumes_and_its_entry_is_checked_and_joined(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "plan.yaml").write_text(TINY)
    command = ["leaderboard", str(tmp_path / "plan.yaml"), "--out", str(tmp_path / "out"), "--author", "me"]
    assert main(command) == 0
    assert "core-hours." in capsys.readouterr().out
    entry = Entry.read(tmp_path / "out" / "entry" / "entry.json")
    (found,) = entry.sets
    trained = sorted((tmp_path / "out" / "runs").glob("digits-*"))
    assert {run for each in found.encodings.values() for run in each.runs} <= {folder.name for folder in trained}
    assert found.trainings == len(trained)
    assert found.core_seconds > 0
    assert found.protocol == "rates × 0.3, 1, 3; encoding rates × 1, 10; epochs up to × 2; sizes × 1, 2"
    tried = {
        name: sorted((run.rate, run.encoding_rate) for run in each.tuning) for name, each in found.encodings.items()
    }
    assert tried["none"] == [(0.3, 1.0), (1.0, 1.0), (3.0, 1.0)]
    best = found.encodings["mixed"].rate
    assert tried["mixed"] == sorted([*tried["none"], (best, 10.0)])
    assert all(each.half and each.shuffled and each.steps for each in found.encodings.values())
    assert [*found.encodings["mixed"].sizes] == ["16×16"]
    assert [each.epochs for each in found.encodings.values()] == [4, 4]
    result = StudyResult.read(tmp_path / "out" / "leaderboard.json")
    assert "2 converged" in result.findings.answer
    assert "mixed" in (tmp_path / "out" / "report" / "index.html").read_text()
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

    capsys.readouterr()
    assert main(["leaderboard", *alone, "--out", str(tmp_path / "out")]) == 2  # it would replace the plan's entry
    assert "another folder than that of a plan" in capsys.readouterr().err
    assert Entry.read(tmp_path / "out" / "entry" / "entry.json") == entry

    joined = ["--encodings", "axial", "--entries", str(tmp_path / "out" / "entry" / "entry.json")]
    assert main(["leaderboard", str(tmp_path / "plan.yaml"), *joined, "--out", str(tmp_path / "theirs")]) == 0
    (theirs,) = Entry.read(tmp_path / "theirs" / "entry" / "entry.json").sets
    assert [*theirs.encodings] == ["axial"]
    ranked = StudyResult.read(tmp_path / "theirs" / "leaderboard.json").findings.tables[0].rows
    assert {row["name"] for row in ranked} == {"none", "axial", "mixed"}


def test_core_time_counts_the_threads_that_each_run_had(tmp_path: Path) -> None:
    (tmp_path / "plan.yaml").write_text(TINY)
    command = ["leaderboard", str(tmp_path / "plan.yaml"), "--encodings=none", "--out", str(tmp_path / "out")]
    assert main(command) == 0
    (before,) = Entry.read(tmp_path / "out" / "entry" / "entry.json").sets
    file = next((tmp_path / "out" / "runs").glob("digits-none-*")) / "result.json"
    stored = json.loads(file.read_text())
    stored["provenance"]["threads"] += 3  # as if it was trained before the command was resumed on fewer
    file.write_text(json.dumps(stored))
    assert main(command) == 0
    (after,) = Entry.read(tmp_path / "out" / "entry" / "entry.json").sets
    assert after.core_seconds - before.core_seconds == pytest.approx(3 * stored["seconds"], abs=0.2)


def test_data_set_that_no_encoding_fits_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = TINY.replace("[none, mixed]", "[spiral]").replace("  digits:", f"  three: {MOTION}\n  digits:")
    (tmp_path / "plan.yaml").write_text(untuned(text))
    assert main(["leaderboard", str(tmp_path / "plan.yaml"), "--out", str(tmp_path / "out")]) == 0
    assert "three is left out. spiral is left out: " in capsys.readouterr().out
    assert [found.name for found in Entry.read(tmp_path / "out" / "entry" / "entry.json").sets] == ["digits"]


def test_other_settings_of_a_data_set_measure_the_costs_again(tmp_path: Path) -> None:
    for depth in (1, 2):
        (tmp_path / "plan.yaml").write_text(untuned(TINY.replace("depth 1", f"depth {depth}")))
        assert main(["leaderboard", str(tmp_path / "plan.yaml"), "--out", str(tmp_path / "out")]) == 0
    assert len([*(tmp_path / "out" / "runs").glob("costs-*.json")]) == 2


def test_entry_with_other_settings_is_refused_before_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "plan.yaml").write_text(TINY)
    Entry("plan", "they", [of_set(arguments="--data digits")]).write(tmp_path / "entry.json")
    options = ["--entries", str(tmp_path / "entry.json"), "--out", str(tmp_path / "out")]
    assert main(["leaderboard", str(tmp_path / "plan.yaml"), *options]) == 2
    assert "entries of set digits must have the same fingerprint" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_encodings_of_an_entry_are_refused_before_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan, out, entry = tmp_path / "plan.yaml", tmp_path / "out", tmp_path / "out" / "entry" / "entry.json"
    plan.write_text(untuned(TINY))
    assert main(["leaderboard", str(plan), "--encodings", "none", "--out", str(out)]) == 0
    capsys.readouterr()
    again = ["leaderboard", str(plan), "--encodings", "none", "--entries", str(entry)]
    assert main([*again, "--out", str(tmp_path / "other")]) == 2
    error = capsys.readouterr().err
    assert "set digits must have other encodings than --entries (leave them out by --encodings, or" in error
    assert error.endswith("got none\n")
    assert error.count("\n") == 1
    assert not (tmp_path / "other").exists()
    assert main([*again, "--out", str(out)]) == 0  # the finished runs of this folder have the answers of the entry


def test_entry_keeps_what_earlier_commands_of_the_plan_measured(tmp_path: Path) -> None:
    plan, out = tmp_path / "plan.yaml", tmp_path / "out"
    plan.write_text(untuned(TINY + TINY.splitlines()[-1].replace("digits:", "few:").replace("60", "30") + "\n"))
    for options in (
        ["--only=digits", "--encodings=none", "--author=me"],
        ["--only=few", "--encodings=mixed"],
        ["--only=digits", "--encodings=mixed"],
        ["--only=digits", "--encodings=mixed"],
    ):
        assert main(["leaderboard", str(plan), *options, "--out", str(out)]) == 0
    entry = Entry.read(out / "entry" / "entry.json")
    assert entry.author == "me"
    assert {each.name: {*each.encodings} for each in entry.sets} == {"digits": {"none", "mixed"}, "few": {"mixed"}}
    (digits,) = [each for each in entry.sets if each.name == "digits"]
    assert digits.trainings == 2
    assert [note.partition(":")[0] for note in digits.notes] == ["none"]
    tables = StudyResult.read(out / "leaderboard.json").findings.tables
    assert {row["name"] for row in tables[0].rows} == {"none", "mixed"}
    plan.write_text(plan.read_text().replace("two encodings", "another plan"))
    assert main(["leaderboard", str(plan), "--only=few", "--encodings=none", "--out", str(out)]) == 0
    (few,) = Entry.read(out / "entry" / "entry.json").sets
    assert [*few.encodings] == ["none"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--entries e.json --only digits", "--only is for a plan, got no plan"),
        ("--entries e.json --encodings axial", "--encodings is for a plan, got no plan"),
        ("--entries e.json --author me", "--author is for a plan, got no plan"),
        ("--entries e.json --slurm time=1", "--slurm is for a plan, got no plan"),
        ("--entries e.json --parallel 2", "--parallel is for a plan, got no plan"),
        ("two-cores --check e.json", "--check must be without a plan, got two-cores"),
        ("--check e.json --only digits", "--only is for training or merging, got --check"),
        ("--check e.json --entries e.json", "--entries is for training or merging, got --check"),
        ("two-cores --only=", "--only must be one value or more, got []"),
        ("two-cores --encodings=", "--encodings must be one value or more, got []"),
        ("two-cores --entries=", "--entries must be one value or more, got []"),
        ("two-cores --check=", "--check must be one value or more, got []"),
    ],
)
def test_options_that_would_be_ignored_are_refused(
    options: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Entry("a plan", "me", [of_set()]).write(Path("e.json"))
    assert main(["leaderboard", *options.split()]) == 2
    assert capsys.readouterr().err == f"torchrope leaderboard: {message}\n"
    assert [*tmp_path.iterdir()] == [tmp_path / "e.json"]


def test_entry_of_other_data_is_refused() -> None:
    with pytest.raises(ValueError, match=r"fingerprint must be .* as in the local data, got f00d"):
        check_against_data(of_set(arguments="--data digits"))
    assert "cannot be loaded here" in check_against_data(of_set(arguments="--data images --data.root /nowhere"))


@pytest.mark.parametrize("name", ["digits", "motion"])
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
