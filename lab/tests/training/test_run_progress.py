"""Progress output of `torchrope train`."""

import re
from pathlib import Path

import pytest
from processes import data_of
from test_scale import small_run

from torchrope_lab.training.progress import as_clock, print_epochs
from torchrope_lab.training.run import train


def test_train_prints_lines_with_time_left_without_a_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = small_run(epochs=3)
    train(config, data_of(config), tmp_path, on_epoch=print_epochs(3))
    lines = capsys.readouterr().out.splitlines()
    assert [re.sub(r"\d+\.\d+", "N", line.partition("  (")[0]) for line in lines] == [
        f"epoch {number} of 3: loss N, top-1 N %" for number in (1, 2, 3)
    ]
    assert [bool(re.search(r"  \(about [\d:]+ left\)$", line)) for line in lines] == [True, True, False]


def test_time_left_is_that_of_the_epochs_to_come(capsys: pytest.CaptureFixture[str]) -> None:
    print_row = print_epochs(10)
    for epoch, seconds in ((4, 60.0), (5, 120.0)):  # of a run that was resumed after three epochs
        print_row({"epoch": epoch, "train_loss": 1.0, "val_miou": 0.5, "seconds": seconds})
    assert capsys.readouterr().out.splitlines() == [
        "epoch 4 of 10: loss 1.0000, mIoU 50.0 %  (about 06:00 left)",
        "epoch 5 of 10: loss 1.0000, mIoU 50.0 %  (about 07:30 left)",
    ]


def test_resumed_run_prints_its_own_epochs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = small_run(epochs=3)

    def stop(row: dict[str, float]) -> None:
        if row["epoch"] == 2:
            raise RuntimeError

    with pytest.raises(RuntimeError):
        train(config, data_of(config), tmp_path, on_epoch=stop)
    train(config, data_of(config), tmp_path, on_epoch=print_epochs(3))
    assert [line[:12] for line in capsys.readouterr().out.splitlines()] == ["epoch 2 of 3", "epoch 3 of 3"]


def test_as_clock_has_hours_only_if_needed() -> None:
    assert [as_clock(seconds) for seconds in (0.4, 59.6, 3600, 90061)] == [
        "00:00",
        "01:00",
        "1:00:00",
        "1 day, 1:01:01",
    ]
