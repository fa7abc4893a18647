"""Live progress: which run of how many, how far, how well, time left."""

import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from datetime import timedelta
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

_QUALITIES = {"val_top1": "top-1", "val_miou": "mIoU", "val_ap": "AP"}


def told_quality(row: Mapping[str, float]) -> str:
    """How good a model is after an epoch, from the row of its learning curve: "top-1 97.2 %"."""
    name = next(name for name in _QUALITIES if name in row)
    return f"{_QUALITIES[name]} {100 * row[name]:.1f} %"


class StudyProgress(AbstractContextManager):
    """A bar over all epochs that are left; without a terminal, one line per finished run.

    Args:
        runs: Number of runs that are left.
        finished: Number of runs that an earlier start has finished.
        epochs: Epochs of all of them together.
        console: Where to write.
    """

    def __init__(self, runs: int, finished: int, epochs: int, console: Console) -> None:
        self.runs, self.finished, self.console = runs, finished, console
        self.number = self.before = self.epochs = 0
        self.started = time.monotonic()
        self.title = ""
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        self.bar = Progress(*columns, console=console, disable=not console.is_terminal)
        self.task = self.bar.add_task("starting", total=epochs)

    def __enter__(self) -> "StudyProgress":
        self.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bar.stop()

    def begin(self, run: object, epochs: int) -> None:
        """A run of so many epochs starts, or goes on."""
        self.number += 1
        self.before, self.epochs = self.before + self.epochs, epochs
        self.title = f"run {self.finished + self.number} of {self.finished + self.runs}: {run}"
        self.bar.update(self.task, description=self.title)

    def epoch(self, row: dict[str, float]) -> None:
        """An epoch ended; a run that goes on from a checkpoint jumps to where it is."""
        described = f"{self.title}, epoch {row['epoch']:.0f}/{self.epochs}, {told_quality(row)}"
        self.bar.update(self.task, completed=self.before + int(row["epoch"]), description=described)

    def end(self, quality: str) -> None:
        """A run is finished and measured, and this good."""
        self.bar.update(self.task, completed=self.before + self.epochs)
        elapsed = time.monotonic() - self.started
        left = elapsed / self.number * (self.runs - self.number)
        times = f"{_clock(elapsed)} elapsed, about {_clock(left)} left"
        self.console.print(f"{self.title}: {quality}  ({times})", highlight=False)


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds))).removeprefix("0:")
