"""Learning curve of a run, and random states that make a resumed run reproduce an uninterrupted one."""

import io
import random
import time
from collections.abc import Callable
from csv import DictWriter
from pathlib import Path
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback
from torch import Tensor

from torchrope.files import write_whole

OnEpoch = Callable[[dict[str, float]], None]
_SUMS = ("mean_value", "weight")
"""States of the metric of the mean training loss."""


class SeedEpoch(Callback):
    """Seed every epoch only from seed, epoch and rank, so that a resumed run draws the same random numbers."""

    # A checkpoint within an epoch holds the states of the random generators of all processes.

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.rank = 0
        self.loaded: list[dict[str, Any]] = []

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Store the rank of this process."""
        self.rank = trainer.global_rank

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Seed dropout and augmentation."""
        torch.manual_seed((self.seed * 1_000_003 + trainer.current_epoch) + self.rank * 7_919_000_033)
        self.loaded = []

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        """Restore the states of the checkpoint before the first batch of a run that resumes within an epoch."""
        if self.loaded and trainer.fit_loop.restarted_mid_epoch:
            _set_generators(self.loaded[self.rank])
        self.loaded = []

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the random generators of every process."""
        return {"generators": of_all_processes(_generators())}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Store the states for the first batch; raise now if they are invalid."""
        current = _generators()
        for states in state_dict["generators"]:
            _set_generators(states)
        _set_generators(current)
        self.loaded = state_dict["generators"]


class History(Callback):
    """The learning curve: one row per epoch, saved in the checkpoint and in a CSV file."""

    def __init__(self, path: Path, on_epoch: OnEpoch | None = None) -> None:
        self.path = path
        self.on_epoch = on_epoch
        self.rows: list[dict[str, float]] = []
        self.spent = 0.0
        self.epoch_started = 0.0
        self.module: Any = None
        self.sums: list[dict[str, float]] = []
        self.validated = False

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Restore the module's loss sums of an unfinished epoch."""
        self.module = pl_module
        if self.sums:
            for name, value in self.sums[trainer.global_rank].items():
                getattr(pl_module.train_loss, name).fill_(value)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the clock with the seconds already spent on an epoch that is resumed."""
        self.epoch_started = time.perf_counter() - self.spent

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the epoch's clock."""
        self.epoch_started, self.validated = time.perf_counter(), False

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Store that this epoch has been validated."""
        self.validated = True

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Append a row for the epoch, and rewrite the file; an epoch that max_steps cut before validation has none."""
        if not self.validated:
            return
        # Computed from the metric: callbacks are called before the module can log the epoch that ends.
        logged = {"train_loss": pl_module.train_loss.compute(), **trainer.callback_metrics}  # type: ignore[union-attr, operator]
        metrics = {name: round(float(logged[name]), 6) for name in ("train_loss", *pl_module.curve)}  # type: ignore[misc]
        seconds = round(time.perf_counter() - self.epoch_started, 3)
        self.rows.append({"epoch": trainer.current_epoch + 1, **metrics, "seconds": seconds})
        if trainer.is_global_zero:
            self._write()
        if self.on_epoch is not None:
            self.on_epoch(self.rows[-1])

    def state_dict(self) -> dict[str, Any]:
        """Return the rows, and the loss sums and seconds of the unfinished epoch."""
        metric = self.module.train_loss
        sums = {name: getattr(metric, name).cpu() for name in _SUMS}
        spent = time.perf_counter() - self.epoch_started
        return {"rows": self.rows, "sums": of_all_processes(sums), "seconds": spent}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the rows, and the loss sums and seconds of the unfinished epoch."""
        self.rows = list(state_dict["rows"])
        self.spent = float(state_dict.get("seconds", 0.0))
        self.sums = [{name: float(sums[name]) for name in _SUMS} for sums in state_dict.get("sums", [])]

    def _write(self) -> None:
        text = io.StringIO()
        writer = DictWriter(text, fieldnames=list(self.rows[-1]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.rows)
        write_whole(self.path, text.getvalue())


def of_all_processes(value: Any) -> list[Any]:
    """Gather the values of all processes, in the order of ranks; all processes must call it."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return [value]
    values: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value)
    return values


class Summed:
    """Numbers of a step, the first summed over all processes, on their way to the CPU; no step waits for them."""

    # All processes must call it. The strategy's `reduce` would wait for them at a barrier.

    def __init__(self, trainer: pl.Trainer, values: Tensor) -> None:
        self.sum = torch.distributed.all_reduce(values[:1], async_op=True) if trainer.world_size > 1 else None
        if values.is_cuda and self.sum is not None:
            self.sum.wait()  # delays the copy on the device only
        self.values = values.to("cpu", non_blocking=True)
        self.copied = torch.cuda.Event() if values.is_cuda else None
        if self.copied is not None:
            self.copied.record()

    def read(self) -> list[float]:
        """Wait for the numbers and return them."""
        if self.copied is not None:
            self.copied.synchronize()
        elif self.sum is not None:
            self.sum.wait()
        return self.values.tolist()


def _generators() -> dict[str, Any]:
    kind, keys, *rest = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(np.array(keys, dtype=np.int64)), *rest),
    }


def _set_generators(states: dict[str, Any]) -> None:
    torch.set_rng_state(states["torch"].cpu())
    if states["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"].cpu())
    random.setstate(states["python"])
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, keys.cpu().numpy().astype(np.uint32), *rest))
