"""Detection of divergence during training, and the batch size that fits after running out of memory."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from torchrope_lab.training.checkpoints import newest
from torchrope_lab.training.config import RunConfig
from torchrope_lab.training.cost import measure_peak_memory
from torchrope_lab.training.history import of_all_processes

MAX_NAMES = 8
"""Largest number of examples that an error names."""
USABLE = 0.9
"""Share of a device's memory to plan with; fragmentation and the driver take the rest."""


class Diverged(ValueError):
    """The loss or a gradient is not finite, or the loss is too large."""


class LossGuard(Callback):
    """Check loss and gradients of every optimiser step; if they diverge, raise `Diverged` or skip the step.

    To raise, the check of a step is read while the next one is computed, so that no step waits for the device: weights
    in memory may then be of one diverged step, but none is validated or saved, because both wait for the check. To
    skip, every step waits for its check, and a diverged one changes neither weights nor averages.

    Args:
        folder: The folder of the run, which holds the last good checkpoint.
        largest: Largest loss that does not count as diverged.
        skip: Skip the step and count it, instead of raising.
    """

    def __init__(self, folder: Path, largest: float, *, skip: bool) -> None:
        self.folder = folder
        self.largest = largest
        self.skip = skip
        self.skipped = 0
        self.losses: list[Tensor] = []
        self.unread: Check | None = None

    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        """Store the loss of a batch until the optimiser step, undoing the division by accumulated batches."""
        self.losses.append(loss.detach() * trainer.accumulate_grad_batches)

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Raise if the previous step diverged, or remove the gradients so that neither weights nor averages change."""
        losses, self.losses = torch.stack(self.losses), []
        gradients = [p.grad for p in pl_module.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        worst = torch.where(losses.isfinite(), losses, math.inf).max()
        bad = ~(norm.isfinite() & (worst <= self.largest))  # NaN and inf fail the comparison too
        bad = trainer.strategy.reduce(bad.float(), reduce_op="sum")
        check = Check(trainer, torch.stack([bad, losses.max().float(), norm.float()]), len(losses))
        if not self.skip:
            self._raise_if_diverged(trainer)
            self.unread = check
        elif check.read()[0]:
            self.skipped += 1
            for parameter in pl_module.parameters():
                parameter.grad = None

    def on_validation_start(self, trainer: pl.Trainer, *_: Any) -> None:
        """Raise if the last step diverged."""
        self._raise_if_diverged(trainer)

    def on_save_checkpoint(self, trainer: pl.Trainer, *_: Any) -> None:
        """Raise if the last step diverged."""
        self._raise_if_diverged(trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Raise if the last step diverged; log how many steps have been skipped."""
        self._raise_if_diverged(trainer)
        if self.skip:
            pl_module.log("skipped_steps", float(self.skipped))

    def state_dict(self) -> dict[str, Any]:
        """Return the number of skipped steps."""
        return {"skipped": self.skipped}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the number of skipped steps."""
        self.skipped = state_dict["skipped"]

    def _raise_if_diverged(self, trainer: pl.Trainer) -> None:
        check, self.unread = self.unread, None
        if check is None:
            return
        diverged, loss, norm = check.read()
        if not diverged:
            return
        names = trainer.datamodule.batch_names(check.batches) if trainer.datamodule is not None else []  # type: ignore[attr-defined]
        examples = [name for names_of_rank in of_all_processes(names) for name in names_of_rank]
        more = f", ... ({len(examples)} in all)" if len(examples) > MAX_NAMES else ""
        saved = newest(self.folder)
        good = f"the last good checkpoint is {saved[0]}" if saved else "there is no checkpoint yet"
        raise Diverged(
            f"the loss must stay finite and at most {self.largest:.3g}, got {loss:.3g} with a gradient "
            f"of norm {norm:.3g} in {check.step} on {', '.join(examples[:MAX_NAMES])}{more}; {good}; "
            "--run.on_nan skip skips such steps"
        )


class Check:
    """Whether an optimiser step diverged, its loss and its gradient's norm, copied from the device without waiting.

    Args:
        trainer: The trainer, in the step.
        values: These three numbers, float32 `(3,)`; the first is above 0 if the step diverged in any process.
        accumulated: Number of batches of the step.

    Attributes:
        step: Name of the step, for messages.
        batches: Numbers of its batches in the epoch.
    """

    def __init__(self, trainer: pl.Trainer, values: Tensor, accumulated: int) -> None:
        last = trainer.fit_loop.epoch_loop.batch_idx
        self.step = f"step {trainer.global_step + 1} (epoch {trainer.current_epoch + 1}, batch {last + 1})"
        self.batches = range(last + 1 - accumulated, last + 1)
        self.values = values.to("cpu", non_blocking=True)
        self.copied = torch.cuda.Event() if values.is_cuda else None
        if self.copied is not None:
            self.copied.record()

    def read(self) -> list[float]:
        """Wait for the copy and return the numbers."""
        if self.copied is not None:
            self.copied.synchronize()
        return self.values.tolist()


def out_of_memory(config: RunConfig, build: Callable[[], nn.Module], example: Tensor, limit: int, devices: int) -> str:
    """Return a one-line error with the largest batch size that fits and the options that keep the effective batch.

    Memory is measured on steps with an eighth and a quarter of the batch:  m(b) = fixed + b · per_example.

    Args:
        config: The configuration that ran out of memory.
        build: Builds the model on the device.
        example: One input `(1, channels, *sizes)` on the device.
        limit: Memory of the device in bytes.
        devices: Number of devices.
    """
    batch_size = config.data.batch_size
    fixed, per_example = _fit_memory(build, example, max(batch_size // 8, 1))
    fits = min(int((USABLE * limit - fixed) // per_example), batch_size)
    measured = f"{fixed / 2**30:.2f} GiB and {per_example / 2**30:.3f} GiB an example, of {limit / 2**30:.1f} GiB"
    rule = f"a step must fit into memory, got batch_size {batch_size} ({measured})"
    if fits < 1:
        return f"{rule}; not even one example fits: --model.checkpoint_layers true reduces memory"
    batch = next(size for size in range(fits, 0, -1) if batch_size % size == 0)
    effective = config.optim.effective_batch or batch_size * devices
    return f"{rule}; --data.batch_size {batch} --optim.effective_batch {effective} would fit (up to {fits} at once)"


def device_memory(device: torch.device) -> int:
    """Return the memory of a GPU, or for other devices that of the machine, in bytes."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return int(psutil.virtual_memory().total)


def _fit_memory(build: Callable[[], nn.Module], example: Tensor, batch: int) -> tuple[int, int]:
    """Measure the bytes of a step that do not depend on the batch, and those per example; halve a batch too large."""
    try:
        single, double = (_step_memory(build(), example.expand(n, *example.shape[1:])) for n in (batch, 2 * batch))
    except torch.OutOfMemoryError:
        if batch == 1:
            raise
        return _fit_memory(build, example, batch // 2)
    per_example = max((double - single) // batch, 1)
    return max(single - batch * per_example, 0), per_example


def _step_memory(model: nn.Module, inputs: Tensor) -> int:
    """Measure the peak memory of a step in bytes, and add the two moments that the optimiser keeps of every weight."""
    labels = torch.zeros(len(inputs), dtype=torch.long, device=inputs.device)

    def step() -> None:
        functional.cross_entropy(model(inputs), labels).backward()

    moments = 2 * sum(parameter.nbytes for parameter in model.parameters())
    return measure_peak_memory(model, step, inputs.device) + moments
