"""Checkpoints: written whole, found again, read without running anything that is in them."""

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
PARTS: dict[str, type] = {
    "epoch": int,
    "global_step": int,
    "pytorch-lightning_version": str,
    "state_dict": dict,
    "loops": dict,
    "callbacks": dict,
    "optimizer_states": list,
    "lr_schedulers": list,
}
"""What a run goes on with."""
COUNTS = {"ready", "started", "processed", "completed"}


class WholeCheckpoints(TorchCheckpointIO):
    """Write checkpoints whole or not at all, and the weights of a finished epoch once more as safetensors.

    Args:
        config: The run's settings, kept as JSON in the header of the weights.
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
        write_whole(Path(path), buffer.getvalue())  # last: a run that is killed before does the epoch's end again


class FitsOptimizer(Callback):
    """Refuse a checkpoint whose optimiser or schedule has other parts than this run's, before a step is made."""

    def on_fit_start(self, trainer: pl.Trainer, *_: Any) -> None:
        """Compare; both are still as they were built."""
        saved = trainer._checkpoint_connector._loaded_checkpoint
        if not saved:
            return
        schedules = [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs]
        fits = _alike(schedules, saved["lr_schedulers"])
        for optimizer, state in zip(trainer.optimizers, saved["optimizer_states"], strict=True):
            fits = fits and _alike(optimizer.state_dict()["param_groups"], state["param_groups"])
            fits = fits and _fit_moments(optimizer, state["state"])
        if not fits:
            raise ValueError("a checkpoint must fit the run's optimiser and schedule, got another one's")


class WithinEpoch(Checkpoint):
    """Keep a checkpoint every so many steps of the optimiser, besides that of the last finished epoch.

    None is written behind the last batch of an epoch, where the epoch's own follows.

    Args:
        folder: Where.
        every: Steps from one to the next.
    """

    def __init__(self, folder: Path, every: int) -> None:
        self.path = folder / WITHIN_EPOCH
        self.every = every

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Save where it is time."""
        if trainer.global_step % self.every == 0:
            save_within_epoch(trainer, self.path)


def save_within_epoch(trainer: pl.Trainer, path: Path) -> bool:
    """Save behind a batch after which training can go on: that of a step, but not the last of an epoch."""
    loop = trainer.fit_loop.epoch_loop
    if loop.batch_progress.is_last_batch or loop._should_accumulate():
        return False
    trainer.save_checkpoint(path)
    return True


def every_epoch(folder: Path) -> ModelCheckpoint:
    """Keep one checkpoint, that of the last finished epoch."""
    return ModelCheckpoint(
        folder,
        filename=CHECKPOINT.removesuffix(".ckpt"),
        save_on_train_epoch_end=True,
        enable_version_counter=False,
        save_weights_only=False,
    )


def newest(folder: Path) -> tuple[Path, tuple[int, int]] | None:
    """Find where training goes on.

    Returns:
        The checkpoint, and (epoch, batches of it that are done) where it is from within an epoch, else (epoch + 1, 0);
        None where there is no checkpoint.

    Raises:
        ValueError: one of them is damaged, or holds more than data.
    """
    found = [(path, read(path, "meta")) for name in (CHECKPOINT, WITHIN_EPOCH) if (path := folder / name).exists()]
    if not found:
        return None
    path, saved = max(found, key=lambda pair: pair[1]["global_step"])
    if path.name == CHECKPOINT:
        return path, (saved["epoch"] + 1, 0)
    return path, (saved["epoch"], _progress(saved)["current"]["processed"])


def read(path: Path, device: str) -> dict[str, Any]:
    """Read a checkpoint; nothing but tensors and plain values is accepted, so nothing in it can run.

    Raises:
        ValueError: it is damaged, holds more than data, or lacks what a run goes on with.
    """
    try:
        saved = torch.load(path, map_location=device, weights_only=True)
        migrate_checkpoint(saved)  # as Lightning will
        whole = (
            all(isinstance(saved[name], kind) for name, kind in PARTS.items())
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
        whole = False
    if not whole:
        raise damaged(path)
    return saved


def damaged(path: Path) -> ValueError:
    """The error for a checkpoint that no run can go on with."""
    return ValueError(f"a checkpoint must be whole, got a damaged one; delete it: {path}")


def _are_counts(value: Any) -> bool:
    """Whether all that a value is made of counts something."""
    if isinstance(value, dict):
        return all(map(_are_counts, value.values()))
    return isinstance(value, int) and 0 <= value < 2**60


def _progress(saved: dict[str, Any]) -> dict[str, Any]:
    """How many batches were begun and done, of the epoch under way and in all."""
    return saved["loops"]["fit_loop"]["epoch_loop.batch_progress"]


def _paths(callbacks: dict[str, Any]) -> list[Any]:
    return [value for state in callbacks.values() for name, value in state.items() if name.endswith("_path")]


def _alike(one: Any, other: Any) -> bool:
    """Whether another value has the parts of one, of the same kinds and shapes; a tensor of no axes is as a number.

    Flags may be missing: new versions of PyTorch add some, and load files without them.
    """
    if isinstance(one, dict):
        missing = [one[key] for key in one if key not in other]
        known = all(_alike(one[key], other[key]) for key in one if key in other)
        return known and all(isinstance(flag, bool | None) for flag in missing)
    if isinstance(one, list | tuple):
        return isinstance(other, list | tuple) and len(one) == len(other) and all(map(_alike, one, other))
    is_number = isinstance(one, int | float | Tensor) and not isinstance(one, bool)
    return isinstance(other, (int, float, Tensor) if is_number else type(one)) and _shape(one) == _shape(other)


def _shape(value: Any) -> tuple[int, ...]:
    return tuple(value.shape) if isinstance(value, Tensor) else ()


def _fit_moments(optimizer: torch.optim.Optimizer, state: dict[int, dict[str, Any]]) -> bool:
    """Whether the moments of all weights have one set of names, and the shapes of their weights."""
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    fit = [_fits(name, value, weights[number]) for number, of_one in state.items() for name, value in of_one.items()]
    return len({frozenset(of_one) for of_one in state.values()}) <= 1 and all(fit)


def _fits(name: str, value: Any, weight: Tensor) -> bool:
    if name == "step":
        return isinstance(value, int | float | Tensor) and _shape(value) == () and float(value) >= 0
    return isinstance(value, Tensor) and value.shape == weight.shape


def write_weights(path: Path, weights: dict[str, Tensor], header: dict[str, str]) -> None:
    """Write weights as safetensors, whole or not at all; a tensor under several names is stored under each."""
    own = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in weights.items()}
    write_whole(path, safetensors.torch.save(own, metadata=header))


def read_weights(folder: Path) -> dict[str, Tensor]:
    """The weights of the last finished epoch, from safetensors or, in the folder of an older version, the checkpoint.

    Raises:
        ValueError: the file is damaged.
    """
    if not (folder / WEIGHTS).exists():
        return read(folder / CHECKPOINT, "cpu")["state_dict"]
    try:
        return safetensors.torch.load_file(folder / WEIGHTS)
    except safetensors.SafetensorError as error:
        raise ValueError(f"weights must be whole, got a damaged file: {folder / WEIGHTS} ({error})") from None
