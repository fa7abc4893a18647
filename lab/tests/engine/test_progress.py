"""The estimate of the time left, and its display with and without a terminal."""

import re
from io import StringIO

import pytest
from rich.console import Console

from torchrope_lab.data.data_config import data_config
from torchrope_lab.engine.runs import Run
from torchrope_lab.engine.study_progress import StudyProgress, Workload
from torchrope_lab.files import read_curve
from torchrope_lab.settings.compare_config import ENCODINGS
from torchrope_lab.settings.run_config import OptimConfig, RunConfig
from torchrope_lab.training.progress import Part, seconds_left


def run_of(encoding: str, seed: int = 0, epochs: int = 2) -> Run:
    return Run(RunConfig(encoding=encoding, seed=seed, data=data_config(), optim=OptimConfig(epochs=epochs)))


def row(epoch: int, seconds: float = 10.0) -> dict[str, float]:
    return {"epoch": epoch, "val_top1": 0.5, "seconds": seconds}


def test_remaining_time_uses_measured_rates_and_their_mean_for_other_work() -> None:
    fast, slow = Part(left=3, done=2, seconds=2), Part(left=5, done=2, seconds=8)
    assert seconds_left([fast, slow]) == pytest.approx(3 * 1 + 5 * 4)
    assert seconds_left([fast, slow, Part(left=4)]) == pytest.approx(23 + 4 * 10 / 4)
    assert seconds_left([Part(left=9, done=1, seconds=2, processes=3), Part(left=1)]) == pytest.approx(6 + 2)


def test_seconds_left_needs_a_timed_part() -> None:
    assert seconds_left([Part(left=4), Part(left=1)]) is None
    assert seconds_left([]) is None
    assert seconds_left([Part(left=0, done=4, seconds=3)]) == 0


def lines_of(console: Console) -> list[str]:
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


def plain_console() -> Console:
    return Console(file=StringIO(), width=200)


WORK = Workload(epoch=10, evaluation=5)


def test_progress_without_terminal_prints_one_line_per_run() -> None:
    runs, console = [run_of("mixed", seed) for seed in (0, 1)], plain_console()
    with StudyProgress([(run, 0) for run in runs], 1, WORK, console) as progress:
        assert lines_of(console) == []
        progress.epoch(runs[0], row(1))  # 10 s for 10 of work: 3 epochs and 2 evaluations
        assert progress.seconds_left() == pytest.approx(30 + 10)
        progress.epoch(runs[0], row(2))
        progress.end(runs[0], "top-1 50.0 %", 28.0)  # 8 s of them were the evaluation
        assert progress.seconds_left() == pytest.approx(20 + 8)
        for epoch in (1, 2):
            progress.epoch(runs[1], row(epoch))
        progress.end(runs[1], "top-1 50.0 %", 28.0)
        assert progress.seconds_left() == 0
    first, second, third = lines_of(console)
    assert first == "1 of 3 runs done: mixed seed 0, epoch 1/2, top-1 50.0 %  (about 00:40 to train)"
    assert second == "run 2 of 3: mixed seed 0: top-1 50.0 %  (00:00 elapsed, about 00:28 to train)"
    assert third == "run 3 of 3: mixed seed 1: top-1 50.0 %  (00:00 elapsed)"


def test_long_study_says_what_takes_less_once() -> None:
    runs, console = [run_of("mixed", seed) for seed in (0, 1)], plain_console()
    with StudyProgress([(run, 0) for run in runs], 0, WORK, console) as progress:
        for epoch in (1, 2):
            progress.epoch(runs[0], row(epoch, seconds=600))
    assert [line for line in lines_of(console) if "less takes less time" in line] == [lines_of(console)[1]]


def test_lines_of_a_cross_validation_name_the_fold() -> None:
    data, console = data_config(folds=2, fold=1), plain_console()
    run = Run(RunConfig(encoding="mixed", data=data, optim=OptimConfig(epochs=2)))
    with StudyProgress([(run, 0)], 0, WORK, console) as progress:
        progress.epoch(run, row(1))
        progress.end(run, "top-1 50.0 %", 28.0)
    first, second = lines_of(console)
    assert first.startswith("0 of 1 runs done: mixed seed 0 fold 1, epoch 1/2, ")
    assert second.startswith("run 1 of 1: mixed seed 0 fold 1: top-1 50.0 %")


def test_runs_of_a_kind_that_was_timed_take_its_rate_whatever_their_seed() -> None:
    quick, slow, again = run_of("axial"), run_of("liere"), run_of("liere", seed=1)
    progress = StudyProgress([(run, 0) for run in (quick, slow, again)], 0, Workload(epoch=1), plain_console())
    progress.epoch(quick, row(1, seconds=1))
    assert progress.seconds_left() == pytest.approx(1 + 4)  # nothing better is known of the others
    progress.epoch(slow, row(1, seconds=7))
    assert progress.seconds_left() == pytest.approx(1 + 3 * 7)


def test_epochs_before_this_start_are_neither_left_nor_timed() -> None:
    run, console = run_of("mixed", epochs=5), plain_console()
    progress = StudyProgress([(run, 3)], 0, Workload(epoch=1), console)
    assert progress.seconds_left() is None
    progress.epoch(run, row(4))
    assert progress.seconds_left() == pytest.approx(10)


def test_runs_of_other_processes_are_followed_by_their_curves_and_share_the_time() -> None:
    runs, console = [run_of("mixed", seed) for seed in range(3)], plain_console()
    work = Workload(epoch=1, processes=2, left="to train")
    with StudyProgress([(run, 0) for run in runs], 0, work, console) as progress:
        progress.follow(runs[1], [])
        progress.follow(runs[1], [row(1)])
        progress.follow(runs[1], [row(1)])
        assert progress.seconds_left() == pytest.approx(5 * 10 / 2)
        progress.follow(runs[0], [row(1), row(2)])
        progress.follow(runs[1], [row(1), row(2)])
        for run in runs[:2]:
            progress.end(run, "top-1 50.0 %", 20.0)
        assert progress.seconds_left() == pytest.approx(20)  # one run is left, for one process
    first, *others = lines_of(console)
    assert first == "0 of 3 runs done: mixed seed 1, epoch 1/2, top-1 50.0 %  (about 00:25 to train)"
    assert [line[:10] for line in others] == ["run 1 of 3", "run 2 of 3"]


def test_run_that_another_process_has_trained_meanwhile_changes_no_rate() -> None:
    runs = [run_of("mixed", seed) for seed in range(3)]
    progress = StudyProgress([(run, 0) for run in runs], 0, WORK, plain_console())
    for epoch in (1, 2):
        progress.epoch(runs[0], row(epoch))
    progress.end(runs[0], "top-1 50.0 %", 25.0)
    progress.end(runs[1], "top-1 50.0 %", 4000.0)  # spent waiting
    assert progress.seconds_left() == pytest.approx(20 + 5)


class Terminal(StringIO):
    """A file that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_bar_needs_a_terminal_even_if_colours_are_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # as notebooks do
    run, console = run_of("mixed"), Console(file=StringIO())
    with StudyProgress([(run, 0)], 0, WORK, console) as progress:
        assert not progress.display.is_bar


def test_terminal_shows_the_estimate_in_the_bar_alone() -> None:
    run, console = run_of("mixed"), Console(file=Terminal(), width=200, force_terminal=True, color_system=None)
    with StudyProgress([(run, 0)], 0, WORK, console) as progress:
        progress.epoch(run, row(1))
        progress.display.bar.refresh()
        progress.end(run, "top-1 50.0 %", 10.0)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "0/1 done mixed" in text
    assert "seed 0, epoch 1/2, top-1 50.0 % ━" in text
    assert "00:15 to train" in text
    assert "run 1 of 1: mixed seed 0: top-1 50.0 %  (00:00 elapsed)" in text


LONGEST = [
    max(ENCODINGS, key=len),
    "learned+comrope-liere:128",
    "bias+mrope-interleaved",
    "my_package.encodings:LearnedRotation",
]


@pytest.mark.parametrize("left", ["to train", "machine time"])
@pytest.mark.parametrize("encoding", LONGEST)
def test_lines_fit_a_terminal_of_80_columns(encoding: str, left: str) -> None:
    console = Console(file=Terminal(), width=80, force_terminal=True, color_system=None)
    runs = [run_of(encoding, seed, epochs=100) for seed in range(10, 130)]
    with StudyProgress([(run, 0) for run in runs], 0, Workload(epoch=1, left=left), console) as progress:
        for epoch in (1, 50, 100):
            progress.epoch(runs[0], {"epoch": epoch, "val_top1": 1.0, "seconds": 20.0})
        progress.display.bar.refresh()
        progress.end(runs[0], "top-1 100.0 %", 2000.0)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    lines = re.split(r"[\r\n]|\x1b\[[\d;?]*[A-Za-z]", text)
    assert max(map(len, lines)) <= 80
    assert sum(line.startswith("run 1 of 120: ") for line in lines) == 1
    assert any(
        "seed 10, epoch 100/100, top-1 100.0 %" in line and re.search(rf"2 days, 18:0\d:\d\d {left}", line)
        for line in lines
    )
    assert text.count("\x1b[1A") == 1  # the bar has one line, and goes up only when it ends


def test_curve_that_cannot_be_read_is_as_none(tmp_path) -> None:
    file = tmp_path / "curve.csv"
    assert read_curve(file) == []
    file.write_text("epoch,val_top1,seconds\n1,0.5,2.5\n")
    assert read_curve(file) == [{"epoch": 1.0, "val_top1": 0.5, "seconds": 2.5}]
    file.write_text("epoch,val_top1,seconds\n1,half\n")
    assert read_curve(file) == []
