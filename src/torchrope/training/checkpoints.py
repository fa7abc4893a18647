"""Checkpoints: written whole, found again, read without running anything that is in them."""

import io
import json
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import safetensors.torch
import torch
from lightning_fabric.plugins import TorchCheckpointIO
from pytorch_lightning.callbacks import Checkpoint, ModelCheckpoint
from torch import Tensor

from torchrope.files import write_whole

CHECKPOINT = "checkpoint.ckpt"
WITHIN_EPOCH = "within-epoch.ckpt"
WEIGHTS = "weights.safetensors"


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
    batches = saved["loops"]["fit_loop"]["epoch_loop.batch_progress"]["current"]["processed"]
    return path, (saved["epoch"], batches)


def read(path: Path, device: str) -> dict[str, Any]:
    """Read a checkpoint; nothing but tensors and plain values is accepted, so nothing in it can run.

    Raises:
        ValueError: it is damaged, or holds more than data.
    """
    try:
        saved = torch.load(path, map_location=device, weights_only=True)
        whole = {"state_dict", "pytorch-lightning_version"} <= set(saved)
    except (OSError, MemoryError):
        raise
    except Exception:
        whole = False
    if not whole:
        raise ValueError(f"a checkpoint must be whole, got a damaged one; delete it: {path}")
    return saved


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
