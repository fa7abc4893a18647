"""Estimate of the time left, and progress bar that displays it."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from datetime import timedelta
from statistics import fmean
from typing import Any

from pytorch_lightning.utilities.rank_zero import rank_zero_only
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.table import Column
from rich.text import Text

_QUALITIES = {"val_top1": "top-1", "val_miou": "mIoU", "val_ap": "AP"}


@dataclass
class Part:
    """Amount of work of one kind, in a unit that all parts share, such as forward passes of one example."""

    left: float = 0.0
    done: float = 0.0  # and timed
    seconds: float = 0.0  # that the work done took
    processes: int = 1  # that share the work left

    def add(self, work: float, seconds: float) -> None:
        """Add timed work; the work left does not change."""
        self.done += work
        self.seconds += seconds


def seconds_left(parts: Collection[Part]) -> float | None:
    """Estimate the time left:  Σ_k  left_k / processes_k · seconds_k / done_k  over the parts k."""
    # A part with no timed work has the mean rate  Σ seconds / Σ done  of all parts. None if nothing has been timed.
    done = sum(part.done for part in parts)
    if not done:
        return None
    mean = sum(part.seconds for part in parts) / done
    rates = [part.seconds / part.done if part.done else mean for part in parts]
    return sum(part.left / part.processes * rate for part, rate in zip(parts, rates, strict=True))


def as_clock(seconds: float) -> str:
    """Format seconds as minutes, hours and days: "01:20", "2:01:05"."""
    return str(timedelta(seconds=round(seconds))).removeprefix("0:")


class Display:
    """Progress bar of one line with the time left on a terminal; only lines of text if the output is not a terminal."""

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
        """Print a line with notes in parentheses; the last note is the estimate if no bar shows it."""
        # `text` has {} for the name, which is cut on a terminal, so that the line fits.
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


def describe_quality(row: Mapping[str, float]) -> str:
    """Format the quality of a model after an epoch, from a row of its learning curve: "top-1 97.2 %"."""
    name = next(name for name in _QUALITIES if name in row)
    return f"{_QUALITIES[name]} {100 * row[name]:.1f} %"


def print_epochs(epochs: int) -> Callable[[dict[str, float]], None]:
    """Return a function that prints a line for a row of the learning curve: loss, quality and the time left."""
    # The time left is that of the epochs to come, by the mean duration of those that were printed.
    seconds: list[float] = []

    @rank_zero_only
    def print_row(row: dict[str, float]) -> None:
        seconds.append(row["seconds"])
        left = (epochs - row["epoch"]) * fmean(seconds)
        loss = row.get("val_loss", row["train_loss"])
        about = f"  (about {as_clock(left)} left)" if left else ""
        print(f"epoch {row['epoch']} of {epochs}: loss {loss:.4f}, {describe_quality(row)}{about}", flush=True)

    return print_row
