"""Checkpoints of a run: written atomically, found for resuming, and read without executing code from the file."""

import io
import json
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import safetensors.torch
import torch
from lightning_fabric.plugins import TorchCheckpointIO
from pytorch_lightning.callbacks import Checkpoint
from pytorch_lightning.utilities.migration import migrate_checkpoint
from torch import Tensor

from torchrope.files import write_whole
from torchrope_lab.files import EVALUATION
from torchrope_lab.mistakes import Mistake

CHECKPOINT = "checkpoint.ckpt"
WITHIN_EPOCH = "within-epoch.ckpt"
WEIGHTS = "weights.safetensors"
BATCHES = "epoch_loop.batch_progress"
"""Lightning's counts of batches started and completed, in the state of its fit loop."""


class WholeCheckpoints(TorchCheckpointIO):
    """Write checkpoints atomically, and the weights of a finished epoch as safetensors with the run's settings."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Serialise in memory, then replace each file in one step."""
        if Path(path).name == CHECKPOINT:
            header = {"config": json.dumps(self.config), "epochs": str(checkpoint["epoch"] + 1)}
            Path(path).with_name(EVALUATION).unlink(missing_ok=True)  # of earlier weights
            write_weights(Path(path).with_name(WEIGHTS), checkpoint["state_dict"], header)
        buffer = io.BytesIO()
        torch.save(checkpoint, buffer)
        write_whole(Path(path), buffer.getvalue())  # last: a run killed before this repeats the end of the epoch


class SaveCheckpoints(Checkpoint):
    """Save a checkpoint after every epoch and, if `every` is set, every so many optimiser steps within an epoch."""

    # Unlike `ModelCheckpoint`, it stores no path in the checkpoint, so a folder may be moved and a file names none.

    def __init__(self, folder: Path, every: int | None) -> None:
        self.folder = folder
        self.every = every

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save if the number of steps is a multiple of `every`."""
        if self.every is not None and trainer.global_step % self.every == 0:
            save_within_epoch(trainer, batch_idx, self.folder)

    def on_train_epoch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Save the state after the epoch."""
        trainer.save_checkpoint(self.folder / CHECKPOINT)


def save_within_epoch(trainer: pl.Trainer, batch_idx: int, folder: Path) -> bool:
    """Save, and return True, if training can resume after this batch: it completed a step and does not end an epoch."""
    if trainer.is_last_batch or not completes_step(trainer, batch_idx):
        return False
    trainer.save_checkpoint(folder / WITHIN_EPOCH)
    return True


def completes_step(trainer: pl.Trainer, batch_idx: int) -> bool:
    """Return whether an optimiser step followed the batch of this number within the epoch."""
    return trainer.is_last_batch or (batch_idx + 1) % trainer.accumulate_grad_batches == 0


def newest(folder: Path) -> tuple[Path, tuple[int, int]] | None:
    """Return the checkpoint to resume from, and the epoch and its batches done; None if there is none."""
    paths = [folder / name for name in (CHECKPOINT, WITHIN_EPOCH)]
    checkpoints = [(path, read(path)) for path in paths if path.exists()]
    if not checkpoints:
        return None
    path, saved = max(checkpoints, key=lambda pair: pair[1]["global_step"])
    if path.name == CHECKPOINT:
        return path, (saved["epoch"] + 1, 0)
    return path, (saved["epoch"], saved["loops"]["fit_loop"][BATCHES]["current"]["processed"])


def read(path: Path) -> dict[str, Any]:
    """Read a checkpoint of tensors and plain values only, so that no code in the file can run."""
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        migrate_checkpoint(saved)  # as Lightning will
        complete = {"epoch", "global_step", "loops", "state_dict"} <= saved.keys()
    except (OSError, MemoryError):
        raise
    except Exception:
        complete = False
    if not complete:
        raise Mistake(f"a checkpoint must be complete, got a damaged one; delete it: {path}")
    return saved


def write_weights(path: Path, weights: dict[str, Tensor], header: dict[str, str]) -> None:
    """Write weights as safetensors, atomically; a tensor under several names is stored under each."""
    copies = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in weights.items()}
    write_whole(path, safetensors.torch.save(copies, metadata=header))


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Read the weights of the last finished epoch from safetensors or, of older versions, from the checkpoint."""
    if not (folder / WEIGHTS).exists():
        return read(folder / CHECKPOINT)["state_dict"]
    try:
        return safetensors.torch.load_file(folder / WEIGHTS)
    except safetensors.SafetensorError as error:
        raise Mistake(f"weights must be complete, got a damaged file: {folder / WEIGHTS} ({error})") from None
