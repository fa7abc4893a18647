"""Handling of SIGTERM and SIGUSR1 in a run: save a checkpoint after the current step, and exit with status 75."""

from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Checkpoint

from torchrope_lab.training.checkpoints import completes_step, save_within_epoch
from torchrope_lab.training.history import Summed
from torchrope_lab.training.signals import EXIT_INTERRUPTED, Interrupted, replace_handlers, report, restore_handlers


class SaveOnSignal(Checkpoint):
    """Save and exit on SIGTERM and SIGUSR1; on Slurm, requeue the job on SIGUSR1."""

    # All processes stop after the same optimiser step, so that a resumed run equals an uninterrupted one: the next one
    # that completes, or with several processes the one after it, because none waits to learn of the others' signals. A
    # signal in the last batch of an epoch takes effect when the next begins.

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.received: int | None = None
        self.unread: Summed | None = None
        self.replaced: dict[int, Any] = {}

    def on_train_start(self, trainer: pl.Trainer, *_: Any) -> None:
        """Replace Lightning's signal handlers, which would save in the middle of a step."""
        self.replaced = replace_handlers(self._note)
        # Lightning would broadcast what its handlers received, and wait for it, in every step.
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save, requeue the job on Slurm, and exit."""
        asked = completes_step(trainer, batch_idx) and self._is_asked(trainer)
        if asked and save_within_epoch(trainer, batch_idx, self.folder):
            self._stop(trainer)

    def on_train_epoch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        """Exit if a signal came in the last batch of the previous epoch, whose end was saved, or in validation."""
        if trainer.global_step and self._is_asked(trainer, wait=True):
            self._stop(trainer)

    def _is_asked(self, trainer: pl.Trainer, *, wait: bool = False) -> bool:
        """Return whether any process had received a signal at the previous call, or at this one to wait for."""
        if trainer.world_size == 1:
            return self.received is not None
        received = torch.full((1,), float(self.received is not None), device=trainer.strategy.root_device)
        previous, self.unread = self.unread, Summed(trainer, received)
        asked = self.unread if wait else previous
        return asked is not None and asked.read()[0] > 0

    def _stop(self, trainer: pl.Trainer) -> None:
        if trainer.is_global_zero:
            report(f"a checkpoint was saved, run the same command to resume: {self.folder}", self.received)
        raise Interrupted(EXIT_INTERRUPTED)

    def on_train_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Restore the previous signal handlers, and exit if a signal came after the last batch had begun."""
        self._restore()
        if self._is_asked(trainer, wait=True):
            self._stop(trainer)

    def on_exception(self, *_: Any) -> None:
        """Restore the previous signal handlers."""
        self._restore()

    def _note(self, number: int, _: Any) -> None:
        self.received = number

    def _restore(self) -> None:
        restore_handlers(self.replaced)
        self.replaced = {}
