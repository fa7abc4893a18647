"""Progress display of a study: runs, epochs, quality and the estimated time left."""

import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console

from torchrope_lab.training.progress import Display, Part, as_clock, seconds_left

if TYPE_CHECKING:
    from torchrope_lab.studies.engine.runs import Run

_QUALITIES = {"val_top1": "top-1", "val_miou": "mIoU", "val_ap": "AP"}


def describe_quality(row: Mapping[str, float]) -> str:
    """Format the quality of a model after an epoch, from a row of its learning curve: "top-1 97.2 %"."""
    name = next(name for name in _QUALITIES if name in row)
    return f"{_QUALITIES[name]} {100 * row[name]:.1f} %"


@dataclass(frozen=True)
class Workload:
    """The work of a study, in forward passes of one example; a training step of an example is three.

    Attributes:
        epoch: Work of one epoch of a run, with its validation.
        evaluation: Work after the epochs of each run.
        afterwards: Work after all runs.
        processes: Runs that train at the same time.
        left: Text after an estimate: "left" if it covers all work, otherwise what it covers.
    """

    epoch: float
    evaluation: float = 0.0
    afterwards: float = 0.0
    processes: int = 1
    left: str = "left"


class StudyProgress(AbstractContextManager):
    """A progress bar over all remaining epochs, and a line after every run; without a terminal, no bar.

    Without a terminal there is also a line after the first epoch.

    The time left is estimated from epochs timed since this start: those of runs of the same kind (`Run.kind`) if there
    are any, otherwise all.

    Args:
        runs: Unfinished runs, with the number of epochs that each has finished.
        finished: Number of runs finished by an earlier start.
        work: The work of the study.
        console: Output.
    """

    def __init__(self, runs: Sequence[tuple["Run", int]], finished: int, work: Workload, console: Console) -> None:
        self.work, self.total = work, finished + len(runs)
        self.epochs_left = {run.key: run.config.optim.epochs - done for run, done in runs}
        self.timed = dict.fromkeys(self.epochs_left, 0.0)  # seconds of each run's epochs in this start
        self.epochs = {run.kind: Part() for run, _ in runs}
        for run, _ in runs:
            self.epochs[run.kind].left += work.epoch * self.epochs_left[run.key]
        self.evaluation, self.afterwards = Part(work.evaluation * len(runs)), Part(work.afterwards)
        self.begun: Run | None = None
        self.started = time.monotonic()
        self.display = Display(console, sum(self.epochs_left.values()), work.left)

    def __enter__(self) -> "StudyProgress":
        self.display.bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.display.bar.stop()

    def begin(self, run: "Run") -> None:
        """Report that a run starts or resumes, as the only one."""
        self.begun = run
        self._show(self._numbered(run))

    def epoch(self, run: "Run", row: Mapping[str, float]) -> None:
        """Report a finished epoch of a run, with its row of the learning curve."""
        first = not any(self.timed.values())
        self._done(run, int(row["epoch"]))
        self.epochs[run.kind].add(self.work.epoch, row["seconds"])
        self.timed[run.key] += row["seconds"]
        ended = self.total - len(self.epochs_left)
        title = self._numbered(run) if run == self.begun else f"{ended} of {self.total} runs done: {run}"
        described = f"{title}, epoch {row['epoch']:.0f}/{run.config.optim.epochs}, {describe_quality(row)}"
        self._show(described)
        if first and not self.display.is_bar:
            self.display.line(described, seconds=self.seconds_left())

    def follow(self, run: "Run", curve: Sequence[Mapping[str, float]]) -> None:
        """Report the epochs that a run in another process has finished since the last call, from its curve."""
        reported = run.config.optim.epochs - self.epochs_left[run.key]
        for row in curve[reported:]:
            self.epoch(run, row)

    def end(self, run: "Run", quality: str, seconds: float) -> None:
        """Report a run that is finished and measured, with its quality and the seconds that this start spent on it."""
        title, all_timed = self._numbered(run), self.epochs_left[run.key] == 0
        self._done(run, run.config.optim.epochs)
        del self.epochs_left[run.key]
        self.evaluation.left -= self.work.evaluation
        if all_timed and self.work.evaluation:  # otherwise another process has trained it
            self.evaluation.add(self.work.evaluation, seconds - self.timed[run.key])
        self._show(title)
        elapsed = f"{as_clock(time.monotonic() - self.started)} elapsed"
        self.display.line(f"{title}: {quality}", elapsed, seconds=self.seconds_left())

    def seconds_left(self) -> float | None:
        """Estimate the time left; None before an epoch has been timed in this start."""
        for part in (*self.epochs.values(), self.evaluation):
            part.processes = max(1, min(self.work.processes, len(self.epochs_left)))
        return seconds_left([*self.epochs.values(), self.evaluation, self.afterwards])

    def _numbered(self, run: "Run") -> str:
        """Return a run with its number; runs are numbered in the order in which they end."""
        return f"run {self.total - len(self.epochs_left) + 1} of {self.total}: {run}"

    def _done(self, run: "Run", epochs: int) -> None:
        """Subtract the finished epochs of a run from the work left."""
        left = run.config.optim.epochs - epochs
        self.epochs[run.kind].left -= self.work.epoch * (self.epochs_left[run.key] - left)
        self.epochs_left[run.key] = left

    def _show(self, described: str) -> None:
        self.display.update(described, self.display.total - sum(self.epochs_left.values()), self.seconds_left())
