"""Handling of SIGTERM and SIGUSR1: save a checkpoint after the current step, and exit with status 75."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from lightning_fabric.plugins.environments import SLURMEnvironment
from pytorch_lightning.callbacks import Checkpoint

from torchrope.lab.training.checkpoints import WITHIN_EPOCH, save_within_epoch

EXIT_INTERRUPTED = 75
"""Exit status of a run that a signal stopped after saving: EX_TEMPFAIL of sysexits.h (temporary failure)."""


class Interrupted(SystemExit):
    """A signal stopped the run after it saved a checkpoint."""


class SaveOnSignal(Checkpoint):
    """Save and exit on SIGTERM and SIGUSR1; on Slurm, requeue the job on SIGUSR1.

    All processes stop after the same optimiser step, the next one that completes, so that a resumed run equals an
    uninterrupted one. A signal in the last batch of an epoch takes effect after the first step of the next.

    Args:
        folder: The folder of the run.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / WITHIN_EPOCH
        self.received: int | None = None
        self.replaced: dict[int, Any] = {}

    def on_train_start(self, trainer: pl.Trainer, *_: Any) -> None:
        """Replace Lightning's signal handlers, which would save in the middle of a step."""
        try:
            self.replaced = {number: signal.signal(number, self._note) for number in (signal.SIGTERM, signal.SIGUSR1)}
        except ValueError:  # only the main thread may set handlers, and this is another
            self.replaced = {}

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Save, requeue the job on Slurm, and exit."""
        if not trainer.strategy.reduce_boolean_decision(self.received is not None, all=False):
            return
        if not save_within_epoch(trainer, self.path):
            return
        if trainer.is_global_zero:
            print(
                f"stopped by a signal; a checkpoint was saved, run the same command to resume: {self.path.parent}",
                file=sys.stderr,
            )
            if SLURMEnvironment.detect() and self.received == signal.SIGUSR1:
                requeue()
        raise Interrupted(EXIT_INTERRUPTED)

    def on_train_end(self, *_: Any) -> None:
        """Restore the previous signal handlers."""
        self._restore()

    def on_exception(self, *_: Any) -> None:
        """Restore the previous signal handlers."""
        self._restore()

    def _note(self, number: int, _: Any) -> None:
        self.received = number

    def _restore(self) -> None:
        for number, handler in self.replaced.items():
            signal.signal(number, handler)
        self.replaced = {}


def requeue() -> None:
    """Requeue this Slurm job, or this task of a job array."""
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    job = os.environ["SLURM_JOB_ID"] if array is None else f"{array}_{task}"
    try:
        subprocess.run(["scontrol", "requeue", job], check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"the job could not be requeued: {error}", file=sys.stderr)
