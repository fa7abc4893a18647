"""Handling of SIGTERM and SIGUSR1 in a run: save a checkpoint after the current step, and exit with status 75."""

from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.callbacks import Checkpoint

from torchrope_lab.training.checkpoints import save_within_epoch
from torchrope_lab.training.signals import EXIT_INTERRUPTED, Interrupted, replace_handlers, report, restore_handlers


class SaveOnSignal(Checkpoint):
    """Save and exit on SIGTERM and SIGUSR1; on Slurm, requeue the job on SIGUSR1.

    All processes stop after the same optimiser step, the next one that completes, so that a resumed run equals an
    uninterrupted one. A signal in the last batch of an epoch takes effect when the next begins.

    Args:
        folder: The folder of the run.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.received: int | None = None
        self.replaced: dict[int, Any] = {}

    def on_train_start(self, trainer: pl.Trainer, *_: Any) -> None:
        """Replace Lightning's signal handlers, which would save in the middle of a step."""
        self.replaced = replace_handlers(self._note)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save, requeue the job on Slurm, and exit."""
        if self._is_asked(trainer) and save_within_epoch(trainer, batch_idx, self.folder):
            self._stop(trainer)

    def on_train_epoch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        """Exit if a signal came in the last batch of the previous epoch, whose end was saved, or in validation."""
        if trainer.global_step and self._is_asked(trainer):
            self._stop(trainer)

    def _is_asked(self, trainer: pl.Trainer) -> bool:
        return trainer.strategy.reduce_boolean_decision(self.received is not None, all=False)

    def _stop(self, trainer: pl.Trainer) -> None:
        if trainer.is_global_zero:
            report(f"a checkpoint was saved, run the same command to resume: {self.folder}", self.received)
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
        restore_handlers(self.replaced)
        self.replaced = {}
