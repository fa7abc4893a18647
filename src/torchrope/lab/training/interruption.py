"""Signals that ask a run to stop: it saves behind the step that is under way, and exits in a way that says so."""

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
"""Exit status of a run that was asked to stop and saved: EX_TEMPFAIL of sysexits.h, try again."""


class Interrupted(SystemExit):
    """The run was asked to stop, and has saved."""


class SaveOnSignal(Checkpoint):
    """Save and exit on SIGTERM; on Slurm also on SIGUSR1, after the job has been put into the queue again.

    A signal is answered behind the next step of the optimiser, in all processes at the same one, so that the run goes
    on as if nothing had happened. At the end of an epoch the next one's first step is waited for.

    Args:
        folder: The run's.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / WITHIN_EPOCH
        self.received: int | None = None
        self.replaced: dict[int, Any] = {}

    def on_train_start(self, trainer: pl.Trainer, *_: Any) -> None:
        """Listen, in place of Lightning, which would save in the middle of a step."""
        try:
            self.replaced = {number: signal.signal(number, self._note) for number in (signal.SIGTERM, signal.SIGUSR1)}
        except ValueError:  # signals reach the main thread alone, and this is another
            self.replaced = {}

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Save, ask for another turn on Slurm, exit."""
        if not trainer.strategy.reduce_boolean_decision(self.received is not None, all=False):
            return
        if not save_within_epoch(trainer, self.path):
            return
        if trainer.is_global_zero:
            print(f"stopped by a signal; saved, the same command goes on: {self.path.parent}", file=sys.stderr)
            if SLURMEnvironment.detect() and self.received == signal.SIGUSR1:
                requeue()
        raise Interrupted(EXIT_INTERRUPTED)

    def on_train_end(self, *_: Any) -> None:
        """Leave signals to whom they belonged."""
        self._restore()

    def on_exception(self, *_: Any) -> None:
        """Likewise."""
        self._restore()

    def _note(self, number: int, _: Any) -> None:
        self.received = number

    def _restore(self) -> None:
        for number, handler in self.replaced.items():
            signal.signal(number, handler)
        self.replaced = {}


def requeue() -> None:
    """Put this Slurm job, or this task of a job array, into the queue again."""
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    job = os.environ["SLURM_JOB_ID"] if array is None else f"{array}_{task}"
    try:
        subprocess.run(["scontrol", "requeue", job], check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"the job could not be put into the queue again: {error}", file=sys.stderr)
