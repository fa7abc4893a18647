"""Progress output of `torchrope train`."""

import re
from pathlib import Path

import pytest
from small_runs import small_run, trained

from torchrope_lab.training.progress import as_clock, print_epochs


def test_train_prints_lines_with_time_left_without_a_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained(small_run(epochs=3), tmp_path, on_epoch=print_epochs(3))
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


def test_as_clock_has_hours_only_if_needed() -> None:
    clocks = {0.4: "00:00", 59.6: "01:00", 3600: "1:00:00", 90061: "1 day, 1:01:01"}
    assert {seconds: as_clock(seconds) for seconds in clocks} == clocks
