"""What processes of a study compute in tests: files in a folder tell what has started and what was saved."""

import os
import signal
import threading
from multiprocessing import Process
from pathlib import Path
from typing import Any

from torchrope_lab.encodings import resolve_encoding
from torchrope_lab.training.signals import EXIT_INTERRUPTED, Interrupted, replace_handlers


def train_job(job: Any, folder: Path) -> tuple[str, float]:
    """Train the run of a job."""
    return train(job.run, folder)


def train(run: str, folder: Path) -> tuple[str, float]:
    """Train a run whose name begins with how it ends."""
    kind = run.split("-")[0]
    if kind == "long":

        def save(*_: object) -> None:
            (folder / f"{run}.saved").touch()
            raise Interrupted(EXIT_INTERRUPTED)

        replace_handlers(save)
        loading = Process(target=load, daemon=True)
        loading.start()
        note(folder / f"{run}.loading", loading.pid)
    note(folder / f"{run}.pid", os.getpid())
    if kind == "long":
        threading.Event().wait()
    if kind == "wrong":
        raise ValueError("dim must be divisible by 4, got 3")
    if kind == "mistake":
        resolve_encoding("mixd")
    if kind == "bug":
        raise KeyError("bug")
    if kind in ("killed", "stopped"):
        os.kill(os.getpid(), signal.SIGKILL if kind == "killed" else signal.SIGTERM)
    return run, 0.0


def note(file: Path, pid: int | None) -> None:
    """Write a number into a file, which appears with it."""
    unfinished = file.with_name(f"{file.name}.unfinished")
    unfinished.write_text(str(pid))
    unfinished.rename(file)


def load() -> None:
    """Load data: a process that ignores the signals of the group, as those of `DataModule` do."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    threading.Event().wait()


def environment(names: tuple[str, ...]) -> tuple[str | None, ...]:
    """Return variables of the environment, after another process could have taken a call."""
    threading.Event().wait(1)
    return tuple(map(os.environ.get, names))
