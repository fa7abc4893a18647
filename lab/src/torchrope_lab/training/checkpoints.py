"""Checkpoints of a run: written atomically, found for resuming, and read without executing code from the file."""

import io
import json
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import safetensors.torch
import torch
from lightning_fabric.plugins import TorchCheckpointIO
from pytorch_lightning.callbacks import Callback, Checkpoint, ModelCheckpoint
from pytorch_lightning.utilities.migration import migrate_checkpoint
from torch import Tensor

from torchrope.files import write_whole

CHECKPOINT = "checkpoint.ckpt"
WITHIN_EPOCH = "within-epoch.ckpt"
WEIGHTS = "weights.safetensors"
REQUIRED: dict[str, type] = {
    "epoch": int,
    "global_step": int,
    "pytorch-lightning_version": str,
    "state_dict": dict,
    "loops": dict,
    "callbacks": dict,
    "optimizer_states": list,
    "lr_schedulers": list,
}
"""Entries that resuming needs, and their types."""
COUNTS = {"ready", "started", "processed", "completed"}


class WholeCheckpoints(TorchCheckpointIO):
    """Write checkpoints atomically, and the weights of a finished epoch as safetensors too.

    Args:
        config: The run's settings, saved as JSON in the header of the weights.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Serialise in memory, then replace each file in one step."""
        if Path(path).name == CHECKPOINT:
            header = {"config": json.dumps(self.config), "epochs": str(checkpoint["epoch"] + 1)}
            write_weights(Path(path).with_name(WEIGHTS), checkpoint["state_dict"], header)
        buffer = io.BytesIO()
        torch.save(checkpoint, buffer)
        write_whole(Path(path), buffer.getvalue())  # last: a run killed before this repeats the end of the epoch


class CheckOptimizerState(Callback):
    """Raise ValueError before the first step if a checkpoint's optimiser or schedule differs from this run's."""

    def on_fit_start(self, trainer: pl.Trainer, *_: Any) -> None:
        """Compare parameter groups, moments and schedules before the checkpoint is loaded into them."""
        saved = trainer._checkpoint_connector._loaded_checkpoint
        if not saved:
            return
        schedules = [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs]
        fits = _same_structure(schedules, saved["lr_schedulers"])
        for optimizer, state in zip(trainer.optimizers, saved["optimizer_states"], strict=True):
            fits = fits and _same_structure(optimizer.state_dict()["param_groups"], state["param_groups"])
            fits = fits and _moments_fit(optimizer, state["state"])
        if not fits:
            rule = "a checkpoint must fit the run's optimiser and schedule"
            raise ValueError(f"{rule}, got one of another optimiser or schedule")


class WithinEpoch(Checkpoint):
    """Save a checkpoint every `every` optimiser steps, besides that of the last finished epoch.

    None is written after the last batch of an epoch, because the epoch's own checkpoint follows.

    Args:
        folder: The run's.
        every: Optimiser steps between checkpoints.
    """

    def __init__(self, folder: Path, every: int) -> None:
        self.path = folder / WITHIN_EPOCH
        self.every = every

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Save if the number of steps is a multiple of `every`."""
        if trainer.global_step % self.every == 0:
            save_within_epoch(trainer, self.path)


def save_within_epoch(trainer: pl.Trainer, path: Path) -> bool:
    """Save if training can resume after this batch: it completed a step and is not the last of an epoch.

    Returns:
        Whether a checkpoint was written.
    """
    loop = trainer.fit_loop.epoch_loop
    if loop.batch_progress.is_last_batch or loop._should_accumulate():
        return False
    trainer.save_checkpoint(path)
    return True


def every_epoch(folder: Path) -> ModelCheckpoint:
    """Build the callback that saves one checkpoint, that of the last finished epoch."""
    return ModelCheckpoint(
        folder,
        filename=CHECKPOINT.removesuffix(".ckpt"),
        save_on_train_epoch_end=True,
        enable_version_counter=False,
        save_weights_only=False,
    )


def newest(folder: Path) -> tuple[Path, tuple[int, int]] | None:
    """Find the checkpoint from which training resumes.

    Returns:
        The checkpoint, and (epoch, batches done) if it was written within an epoch, else (epoch + 1, 0); None if there
        is no checkpoint.

    Raises:
        ValueError: a checkpoint is damaged, or holds objects other than tensors and plain values.
    """
    paths = [folder / name for name in (CHECKPOINT, WITHIN_EPOCH)]
    checkpoints = [(path, read(path, "meta")) for path in paths if path.exists()]
    if not checkpoints:
        return None
    path, saved = max(checkpoints, key=lambda pair: pair[1]["global_step"])
    if path.name == CHECKPOINT:
        return path, (saved["epoch"] + 1, 0)
    return path, (saved["epoch"], _progress(saved)["current"]["processed"])


def read(path: Path, device: str) -> dict[str, Any]:
    """Read a checkpoint of tensors and plain values only, so that no code in the file can run.

    Raises:
        ValueError: it is damaged, holds other objects, or lacks an entry that resuming needs.
    """
    try:
        saved = torch.load(path, map_location=device, weights_only=True)
        migrate_checkpoint(saved)  # as Lightning will
        valid = (
            all(isinstance(saved[name], kind) for name, kind in REQUIRED.items())
            and all(
                isinstance(name, str) and isinstance(weight, Tensor) for name, weight in saved["state_dict"].items()
            )
            and all(map(_are_counts, (saved["loops"], saved["epoch"], saved["global_step"])))
            and all(set(_progress(saved)[part]) == COUNTS for part in ("total", "current"))
            and all(isinstance(path, str) for path in _paths(saved["callbacks"]))
        )
    except (OSError, MemoryError):
        raise
    except Exception:
        valid = False
    if not valid:
        raise damaged(path)
    return saved


def damaged(path: Path) -> ValueError:
    """Build the error for a checkpoint from which no run can resume."""
    return ValueError(f"a checkpoint must be complete, got a damaged one; delete it: {path}")


def _are_counts(value: Any) -> bool:
    """Return whether a value, or every leaf of nested dicts, is a count: an integer from 0 to 2^60."""
    if isinstance(value, dict):
        return all(map(_are_counts, value.values()))
    return isinstance(value, int) and 0 <= value < 2**60


def _progress(saved: dict[str, Any]) -> dict[str, Any]:
    """Return Lightning's counts of batches started and completed, of the current epoch and in total."""
    return saved["loops"]["fit_loop"]["epoch_loop.batch_progress"]


def _paths(callbacks: dict[str, Any]) -> list[Any]:
    return [value for state in callbacks.values() for name, value in state.items() if name.endswith("_path")]


def _same_structure(expected: Any, stored: Any) -> bool:
    """Return whether two nested values have the same keys, types and shapes; a 0-d tensor counts as a number.

    Flags may be missing in `stored`: new versions of PyTorch add some, and load files without them.
    """
    if isinstance(expected, dict):
        missing = [expected[key] for key in expected if key not in stored]
        common = all(_same_structure(expected[key], stored[key]) for key in expected if key in stored)
        return common and all(isinstance(flag, bool | None) for flag in missing)
    if isinstance(expected, list | tuple):
        same_length = isinstance(stored, list | tuple) and len(expected) == len(stored)
        return same_length and all(map(_same_structure, expected, stored))
    is_number = isinstance(expected, int | float | Tensor) and not isinstance(expected, bool)
    kinds = (int, float, Tensor) if is_number else type(expected)
    return isinstance(stored, kinds) and _shape(expected) == _shape(stored)


def _shape(value: Any) -> tuple[int, ...]:
    return tuple(value.shape) if isinstance(value, Tensor) else ()


def _moments_fit(optimizer: torch.optim.Optimizer, state: dict[int, dict[str, Any]]) -> bool:
    """Return whether the moments of all weights have the same names, and the shapes of their weights."""
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    fit = [
        _moment_fits(name, value, weights[number])
        for number, moments in state.items()
        for name, value in moments.items()
    ]
    return len({frozenset(moments) for moments in state.values()}) <= 1 and all(fit)


def _moment_fits(name: str, value: Any, weight: Tensor) -> bool:
    if name == "step":
        return isinstance(value, int | float | Tensor) and _shape(value) == () and float(value) >= 0
    return isinstance(value, Tensor) and value.shape == weight.shape


def write_weights(path: Path, weights: dict[str, Tensor], header: dict[str, str]) -> None:
    """Write weights as safetensors, atomically; a tensor under several names is stored under each."""
    copies = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in weights.items()}
    write_whole(path, safetensors.torch.save(copies, metadata=header))


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Read the weights of the last finished epoch from safetensors or, if an older version wrote none, the checkpoint.

    Raises:
        ValueError: the file is damaged.
    """
    if not (folder / WEIGHTS).exists():
        return read(folder / CHECKPOINT, "cpu")["state_dict"]
    try:
        return safetensors.torch.load_file(folder / WEIGHTS)
    except safetensors.SafetensorError as error:
        raise ValueError(f"weights must be complete, got a damaged file: {folder / WEIGHTS} ({error})") from None
