"""Progress output of `torchrope train`."""

import re
from pathlib import Path

import pytest
from processes import data_of
from test_scale import small_run

from torchrope_lab.training.progress import RunProgress, as_clock
from torchrope_lab.training.run import train


def test_progress_prints_lines_with_time_left_without_a_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = small_run(epochs=3)
    left = []

    class Watched(RunProgress):
        def on_train_epoch_end(self, trainer, module):
            super().on_train_epoch_end(trainer, module)
            left.append((self.training.left, self.validation.left))

    progress = Watched()
    data = data_of(config)
    train(config, data, tmp_path, enable_progress_bar=True, callbacks=[progress])
    lines = capsys.readouterr().out.splitlines()
    assert all(line.startswith(f"epoch {number} of 3: loss ") for number, line in enumerate(lines, 1))
    assert [bool(re.search(r"\(about [\d:]+ left\)$", line)) for line in lines] == [True, True, False]
    batches = len(data.val_dataloader())
    validation = batches * data.val_batch_factor / 3  # in training batches, of which an epoch has four
    assert left == [(8, pytest.approx(2 * validation)), (4, pytest.approx(validation)), (0, 0)]
    assert progress.training.done == 12
    assert progress.validation.done == pytest.approx(3 * validation)


def test_progress_of_a_resumed_run_uses_its_own_epochs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = small_run(epochs=3)

    def stop(row: dict[str, float]) -> None:
        if row["epoch"] == 2:
            raise RuntimeError

    with pytest.raises(RuntimeError):
        train(config, data_of(config), tmp_path, on_epoch=stop)
    progress = RunProgress()
    train(config, data_of(config), tmp_path, enable_progress_bar=True, callbacks=[progress])
    assert [line[:12] for line in capsys.readouterr().out.splitlines()] == ["epoch 2 of 3", "epoch 3 of 3"]
    assert progress.training.done == 8


def test_as_clock_has_hours_only_if_needed() -> None:
    assert [as_clock(seconds) for seconds in (0.4, 59.6, 3600, 90061)] == [
        "00:00",
        "01:00",
        "1:00:00",
        "1 day, 1:01:01",
    ]
