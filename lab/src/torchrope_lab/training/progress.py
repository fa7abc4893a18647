"""Estimate of the time left, and progress bar that displays it."""

import math
import time
from collections.abc import Collection
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.callbacks import ProgressBar
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.table import Column
from rich.text import Text

from torchrope_lab.training.watch import BACKWARD_AND_FORWARD


@dataclass
class Part:
    """Amount of work of one kind, in a unit that all parts share, such as forward passes of one example.

    Attributes:
        left: Work left.
        done: Work done and timed.
        seconds: Time that the work done took.
        processes: Number of processes that share the work left.
    """

    left: float = 0.0
    done: float = 0.0
    seconds: float = 0.0
    processes: int = 1

    def add(self, work: float, seconds: float) -> None:
        """Add timed work; the work left does not change."""
        self.done += work
        self.seconds += seconds


def seconds_left(parts: Collection[Part]) -> float | None:
    """Estimate the time left:  Σ_k  left_k / processes_k · seconds_k / done_k  over the parts k.

    A part with no timed work has the mean rate  Σ seconds / Σ done  of all parts. None if nothing has been timed.

    Example:
        >>> seconds_left([Part(left=40, done=20, seconds=10), Part(left=10)])
        25.0
    """
    done = sum(part.done for part in parts)
    if not done:
        return None
    mean = sum(part.seconds for part in parts) / done
    rates = [part.seconds / part.done if part.done else mean for part in parts]
    return sum(part.left / part.processes * rate for part, rate in zip(parts, rates, strict=True))


def as_clock(seconds: float) -> str:
    """Format seconds as minutes, hours and days.

    Example:
        >>> as_clock(80), as_clock(7265.4)
        ('01:20', '2:01:05')
    """
    return str(timedelta(seconds=round(seconds))).removeprefix("0:")


class Display:
    """Progress bar with the time left on a terminal; only lines of text if the output is not a terminal.

    The bar has one line; names are cut if the terminal is too narrow.

    Args:
        console: Console to write to.
        total: Steps of the bar.
        suffix: Text after the estimate, such as "left".
    """

    def __init__(self, console: Console, total: int, suffix: str = "left") -> None:
        self.console, self.total, self.suffix = console, total, suffix
        cut, whole = Column(ratio=1, no_wrap=True, overflow="ellipsis"), Column(no_wrap=True)
        columns = (
            TextColumn("{task.description}", table_column=whole),
            TextColumn("{task.fields[name]}", table_column=cut),
            TextColumn("{task.fields[detail]}", table_column=whole),
            BarColumn(bar_width=6),
            _Left(table_column=whole),
        )
        disable = console.quiet or not console.file.isatty()  # rich forces is_terminal in notebooks
        self.bar = Progress(*columns, console=console, disable=disable, transient=True, expand=True)
        unknown: dict[str, Any] = {"name": "", "detail": "", "word": "", "at": 0.0, "estimate": None}
        self.task = self.bar.add_task("starting", total=total, **unknown)

    @property
    def is_bar(self) -> bool:
        """Whether a bar is shown, so that lines need no estimate."""
        return not self.bar.disable

    def update(
        self, description: str, completed: float, seconds: float | None, *, name: str = "", detail: str = ""
    ) -> None:
        """Set the bar's step and texts, and the time left from now on if it is known."""
        fields: dict[str, Any] = {"word": self.suffix, "at": self.bar.get_time(), "estimate": seconds}
        self.bar.update(self.task, description=description, completed=completed, name=name, detail=detail, **fields)

    def line(self, text: str, name: str = "", *notes: str, seconds: float | None = None) -> None:
        """Print a line with notes in parentheses; the last note is the estimate if no bar shows it.

        Args:
            text: The line, with {} for the name.
            name: Cut on a terminal, so that the line fits.
            notes: Short texts.
            seconds: Estimated time left.
        """
        about = [] if not seconds or self.is_bar else [f"about {as_clock(seconds)} {self.suffix}"]
        noted = f"  ({', '.join([*notes, *about])})" if notes or about else ""
        room = self.console.width - len(text.format("")) - len(noted)
        if self.is_bar and len(name) > room:
            name = f"{name[: max(0, room - 1)]}…"
        self.console.print(f"{text.format(name)}{noted}", highlight=False, soft_wrap=True)


class _Left(ProgressColumn):
    """Column with the last estimate minus the time since it was made."""

    def render(self, task: Task) -> Text:
        estimate, at, word = (task.fields[name] for name in ("estimate", "at", "word"))
        if estimate is None:
            return Text("")
        return Text(f"{as_clock(max(0.0, estimate - (task.get_time() - at)))} {word}")


class RunProgress(ProgressBar):
    """Progress bar over all steps of a run, and one line per epoch; no bar without a terminal.

    The time left is estimated from the numbers of training steps and validation batches, and includes validation;
    `max_time` of the Trainer is ignored.
    """

    def __init__(self) -> None:
        super().__init__()
        self.console = Console()
        self.display: Any = None
        self.training, self.validation = Part(), Part()
        self.total, self.since = 0, 0.0

    def disable(self) -> None:
        """Print nothing; Lightning calls this on all ranks but 0."""
        self.console.quiet = True

    def on_train_start(self, trainer: pl.Trainer, *_: Any) -> None:
        """Start the bar."""
        self.total = int(trainer.estimated_stepping_batches)
        self.display = Display(self.console, self.total)
        self.display.bar.start()
        self.since = time.monotonic()

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Add the time of the batch, and update the bar."""
        self.training.add(1, self._passed())
        epoch = f"epoch {trainer.current_epoch + 1}/{trainer.max_epochs}"
        self.display.update(epoch, trainer.global_step, self._left(trainer, trainer.current_epoch))

    def on_validation_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Add the time of the batch."""
        if not trainer.sanity_checking:
            self.validation.add(_validation_work(trainer), self._passed())

    def on_train_epoch_end(self, trainer: pl.Trainer, module: Any) -> None:
        """Print the loss and the quality of the epoch."""
        self.validation.seconds += self._passed()
        done = trainer.current_epoch + 1
        logged = {"train_loss": module.train_loss.compute(), **trainer.callback_metrics}
        loss = float(logged.get("val_loss", logged["train_loss"]))
        measured = f"loss {loss:.4f}, {module.quality} {100 * float(logged[module.curve[-1]]):.1f} %"
        self.display.line(f"epoch {done} of {trainer.max_epochs}: {measured}", seconds=self._left(trainer, done))

    def on_train_end(self, *_: Any) -> None:
        """Stop the bar."""
        self.display.bar.stop()

    def on_exception(self, *_: Any) -> None:
        """Stop the bar if it was started."""
        if self.display is not None:
            self.display.bar.stop()

    def _passed(self) -> float:
        """Return the seconds since the last call."""
        before, self.since = self.since, time.monotonic()
        return self.since - before

    def _left(self, trainer: pl.Trainer, epochs_done: int) -> float | None:
        """Estimate the seconds left after a number of finished epochs, including the validations still to come."""
        self.training.left = (self.total - trainer.global_step) * trainer.accumulate_grad_batches
        epochs = min(
            (trainer.max_epochs or 0) - epochs_done, math.ceil(self.training.left / trainer.num_training_batches)
        )
        validations = epochs // (trainer.check_val_every_n_epoch or 1)
        self.validation.left = validations * sum(trainer.num_val_batches) * _validation_work(trainer)
        return seconds_left([self.training, self.validation])


def _validation_work(trainer: Any) -> float:
    """Return the work of a validation batch in training batches: forward passes only, of another batch size."""
    return trainer.datamodule.val_batch_factor / BACKWARD_AND_FORWARD
