"""Progress display of a study: runs, epochs, quality and the estimated time left."""

import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console

from torchrope_lab.training.progress import Display, Part, as_clock, describe_quality, seconds_left

if TYPE_CHECKING:
    from torchrope_lab.engine.runs import Run


LONG = 600.0
"""Seconds above which a hint says what takes less."""


@dataclass(frozen=True)
class Workload:
    """The work of a study, in forward passes of one example; a training step of an example is three."""

    epoch: float  # of a run, with its validation
    evaluation: float = 0.0  # after the epochs of each run
    processes: int = 1  # runs that train at the same time
    left: str = "to train"  # text after an estimate


class StudyProgress(AbstractContextManager):
    """A progress bar over all remaining epochs, and a line after every run; without a terminal, no bar."""

    # Without a terminal there is also a line after the first epoch. On a terminal, names are cut so that lines fit.
    # The time left is estimated from epochs timed since this start: those of runs of the same kind (`Run.kind`) if any,
    # otherwise all. `runs` are unfinished, with the number of epochs that each has finished.

    def __init__(self, runs: Sequence[tuple["Run", int]], finished: int, work: Workload, console: Console) -> None:
        self.work, self.total = work, finished + len(runs)
        self.epochs_left = {run.key: run.config.optim.epochs - done for run, done in runs}
        self.timed = dict.fromkeys(self.epochs_left, 0.0)  # seconds of each run's epochs in this start
        self.epochs = {run.kind: Part() for run, _ in runs}
        for run, _ in runs:
            self.epochs[run.kind].left += work.epoch * self.epochs_left[run.key]
        self.evaluation = Part(work.evaluation * len(runs))
        self.started = time.monotonic()
        self.display = Display(console, sum(self.epochs_left.values()), work.left)

    def __enter__(self) -> "StudyProgress":
        self.display.bar.start()
        self._show()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.display.bar.stop()

    def epoch(self, run: "Run", row: Mapping[str, float]) -> None:
        """Report a finished epoch of a run, with its row of the learning curve."""
        first = not any(self.timed.values())
        self._done(run, int(row["epoch"]))
        self.epochs[run.kind].add(self.work.epoch, row["seconds"])
        self.timed[run.key] += row["seconds"]
        reached = f"{_repeat(run)}, epoch {row['epoch']:.0f}/{run.config.optim.epochs}, {describe_quality(row)}"
        self._show(run.encoding, reached)
        if first and not self.display.is_bar:
            title = f"{self.ended} of {self.total} runs done"
            self.display.line(f"{title}: {{}} {reached}", run.encoding, seconds=self.seconds_left())
        if first and (self.seconds_left() or 0) > LONG:
            self.display.line("less takes less time: fewer --encodings, --seeds or --epochs, or a larger patch")

    def follow(self, run: "Run", curve: Sequence[Mapping[str, float]]) -> None:
        """Report the epochs that a run in another process has finished since the last call, from its curve."""
        reported = run.config.optim.epochs - self.epochs_left[run.key]
        for row in curve[reported:]:
            self.epoch(run, row)

    def end(self, run: "Run", quality: str, seconds: float) -> None:
        """Report a run that is finished and measured, with its quality and the seconds that this start spent on it."""
        all_timed = self.epochs_left[run.key] == 0
        self._done(run, run.config.optim.epochs)
        del self.epochs_left[run.key]
        self.evaluation.left -= self.work.evaluation
        if all_timed and self.work.evaluation:  # otherwise another process has trained it
            self.evaluation.add(self.work.evaluation, seconds - self.timed[run.key])
        self._show()
        elapsed = f"{as_clock(time.monotonic() - self.started)} elapsed"
        line = f"run {self.ended} of {self.total}: {{}} {_repeat(run)}: {quality}"
        self.display.line(line, run.encoding, elapsed, seconds=self.seconds_left())

    def seconds_left(self) -> float | None:
        """Estimate the time left; None before an epoch has been timed in this start."""
        for part in (*self.epochs.values(), self.evaluation):
            part.processes = max(1, min(self.work.processes, len(self.epochs_left)))
        return seconds_left([*self.epochs.values(), self.evaluation])

    @property
    def ended(self) -> int:
        """Number of runs that are finished."""
        return self.total - len(self.epochs_left)

    def _done(self, run: "Run", epochs: int) -> None:
        """Subtract the finished epochs of a run from the work left."""
        left = run.config.optim.epochs - epochs
        self.epochs[run.kind].left -= self.work.epoch * (self.epochs_left[run.key] - left)
        self.epochs_left[run.key] = left

    def _show(self, name: str = "", reached: str = "") -> None:
        done = self.display.total - sum(self.epochs_left.values())
        self.display.update(f"{self.ended}/{self.total} done", done, self.seconds_left(), name=name, detail=reached)


def _repeat(run: "Run") -> str:
    """Return the seed and the fold of a run in words."""
    return str(run).removeprefix(run.encoding).lstrip()
