"""SIGTERM and SIGUSR1, by which a scheduler stops a command: exit with status 75, so that it is started again."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

EXIT_INTERRUPTED = 75
"""Exit status of a run that a signal stopped after saving: EX_TEMPFAIL of sysexits.h (temporary failure)."""

SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name))
"""Signals that stop a run; Windows lacks SIGUSR1."""


class Interrupted(SystemExit):
    """A signal stopped the run after it saved a checkpoint."""


_BLOCKS: list[list[int]] = []
"""The signals that came in each block of `interrupted_by_signals` that runs, the innermost last."""


@contextmanager
def interrupted_by_signals() -> Iterator[None]:
    """Raise `Interrupted` in the block on SIGTERM and SIGUSR1; on Slurm, SIGUSR1 requeues the job when it has ended."""
    # Only the main thread receives signals; in another the block is not interrupted.
    received: list[int] = []

    def interrupt(number: int, _: Any) -> None:
        received.append(number)
        raise_if_interrupted()

    _BLOCKS.append(received)
    replaced = replace_handlers(interrupt)
    try:
        yield
        raise_if_interrupted()
    except Interrupted:
        if received:  # otherwise a run or a block in this one reports it
            report("run the same command to resume", received[0])
        raise
    finally:
        restore_handlers(replaced)
        _BLOCKS.pop()


def raise_if_interrupted() -> None:
    """Raise `Interrupted` if a signal came in a block that runs: what it interrupted may have caught the exception."""
    if any(_BLOCKS):
        raise Interrupted(EXIT_INTERRUPTED)


def replace_handlers(handler: Any) -> dict[int, Any]:
    """Handle SIGTERM and SIGUSR1, and return the previous handlers."""
    try:
        return {number: signal.signal(number, handler) for number in SIGNALS}
    except ValueError:  # only the main thread may set handlers, and this is another
        return {}


def restore_handlers(handlers: dict[int, Any]) -> None:
    """Set the handlers that `replace_handlers` returned."""
    for number, handler in handlers.items():
        signal.signal(number, handler)


def report(what: str, number: int | None = None) -> None:
    """Print that a signal stopped the run; on Slurm, requeue the job if it was SIGUSR1."""
    from lightning_fabric.plugins.environments import SLURMEnvironment  # slow to import

    print(f"stopped by a signal; {what}", file=sys.stderr)
    if SLURMEnvironment.detect() and number == getattr(signal, "SIGUSR1", None):
        requeue()


def requeue() -> None:
    """Requeue this Slurm job, or this task of a job array."""
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    job = os.environ["SLURM_JOB_ID"] if array is None else f"{array}_{task}"
    try:
        subprocess.run(["scontrol", "requeue", job], check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"the job could not be requeued: {error}", file=sys.stderr)
