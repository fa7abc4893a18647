"""benchmarks/leaderboard.py: learning rates, doubling of epochs, and a run that is stopped and resumed."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import leaderboard
import numpy as np
import pytest
from readme import answers

from torchrope_lab.data.build import make_data
from torchrope_lab.data.data_config import data_config
from torchrope_lab.encodings import resolve_encoding

TINY = "--data digits --data.train_size 60 --data.val_size 40 --epochs 2 --model.depth 1"


def tiny(monkeypatch: pytest.MonkeyPatch, out: Path, *options: str) -> None:
    """Run the script on one small data set with two encodings and two seeds."""
    for name, value in {"SETS": {"digits": TINY}, "RATES": (0.3, 1.0, 3.0), "ENCODING_RATES": (1.0, 10.0)}.items():
        monkeypatch.setattr(leaderboard, name, value)
    monkeypatch.setattr(leaderboard, "LONGEST", 2)
    chosen = ["--encodings", "none", "mixed", "--seeds=2", f"--out={out}", *options]
    monkeypatch.setattr(sys, "argv", ["leaderboard.py", *chosen])
    leaderboard.main()


@pytest.mark.slow
def test_leaderboard_tunes_doubles_and_reads_finished_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny(monkeypatch, tmp_path)
    assert "2 trainings of each encoding" in capsys.readouterr().out
    entry = json.loads((tmp_path / "entry.json").read_text())
    [found] = entry["sets"]
    trained = sorted((tmp_path / "runs").glob("digits-*"))
    assert found["trainings"] == len(trained)
    assert found["core_seconds"] > 0
    tried = {
        name: sorted((run["rate"], run["encoding_rate"]) for run in each["tuning"])
        for name, each in found["encodings"].items()
    }
    assert tried["none"] == [(0.3, 1.0), (1.0, 1.0), (3.0, 1.0)]
    assert tried["mixed"] == sorted([*tried["none"], (found["encodings"]["mixed"]["rate"], 10.0)])
    for each in found["encodings"].values():
        assert each["epochs"] == 4
        assert answers(each["right"], 40).shape == answers(each["half"], 40).shape == (2, 40)
    results = {folder: (folder / "result.json").stat().st_mtime_ns for folder in trained}
    tiny(monkeypatch, tmp_path)  # nothing is trained again
    assert {folder: (folder / "result.json").stat().st_mtime_ns for folder in trained} == results
    assert json.loads((tmp_path / "entry.json").read_text()) == entry


@pytest.mark.slow
def test_leaderboard_that_is_killed_resumes_with_the_same_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "tiny.py"
    script.write_text(
        f"import leaderboard\nleaderboard.SETS = {{'digits': {TINY!r}}}\n"
        "leaderboard.RATES, leaderboard.ENCODING_RATES, leaderboard.LONGEST = (0.3, 1.0, 3.0), (1.0, 10.0), 2\n"
        "leaderboard.main()\n"
    )
    command = [sys.executable, script, "--encodings", "none", "mixed", "--seeds=2", f"--out={tmp_path / 'killed'}"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    while process.poll() is None and len([*(tmp_path / "killed").glob("runs/*/result.json")]) < 3:
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert not (tmp_path / "killed" / "entry.json").exists()
    tiny(monkeypatch, tmp_path / "killed")
    tiny(monkeypatch, tmp_path / "whole")

    def answered(folder: str) -> Any:
        return json.loads((tmp_path / folder / "entry.json").read_text())["sets"][0]["encodings"]

    assert answered("killed") == answered("whole")


@pytest.mark.parametrize(
    ("tuning", "best"),
    [
        ([], (1.0, 1.0)),
        ([(0.3, 0.5, 1.0), (1.0, 0.4, 1.0), (1.0, 0.6, 10.0)], (1.0, 10.0)),
        ([(0.3, 0.5, 1.0), (1.0, 0.5, 1.0), (3.0, 0.5, 1.0)], (1.0, 1.0)),  # of equal ones, nearest to 1
        ([(0.3, 0.1 + 0.2, 1.0), (1.0, 0.3, 1.0)], (1.0, 1.0)),  # equal but for a rounding error
    ],
)
def test_best_rates_have_the_highest_accuracy(
    tuning: list[tuple[float, float, float]], best: tuple[float, float]
) -> None:
    runs = [dict(zip(("rate", "top1", "encoding_rate"), each, strict=True)) for each in tuning]
    assert leaderboard.best_rates(runs) == best


def test_neighbours_of_the_best_rate_are_tried_until_the_list_ends() -> None:
    factors, tuning = (0.3, 1.0, 3.0), [{"rate": rate, "top1": rate, "encoding_rate": 1.0} for rate in (0.3, 1.0)]
    assert leaderboard._untried([], 0, factors) == [(0.3, 1.0), (1.0, 1.0), (3.0, 1.0)]
    assert leaderboard._untried(tuning, 0, factors) == [(3.0, 1.0)]
    assert leaderboard._untried(tuning, 1, (0.1, 1.0, 10.0)) == [(1.0, 0.1), (1.0, 10.0)]


def test_answers_are_packed_as_the_table_reads_them() -> None:
    right = np.array([1, 0, 0, 1, 1, 1, 0, 0, 1], dtype=float)
    assert (answers([leaderboard.pack(right)], 9) == right).all()


def test_encodings_of_the_leaderboard_exist() -> None:
    for name in leaderboard.ENCODINGS:
        resolve_encoding(name)


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
