"""What stops a run before it wastes days: a loss that is lost, and memory that does not suffice."""

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from torchrope.lab.training.checkpoints import newest
from torchrope.lab.training.config import RunConfig
from torchrope.lab.training.cost import measure_peak_memory
from torchrope.lab.training.history import of_all_processes

NAMES_TOLD = 8
USABLE = 0.9
"""Share of a device's memory to plan with; the rest goes to fragments and to what the driver holds."""


class Diverged(ValueError):
    """The loss or a gradient is not finite, or the loss has exploded."""


class LossGuard(Callback):
    """Look at loss and gradients before every step of the optimiser, and stop, or leave the step out.

    Args:
        folder: The run's, which holds the last good checkpoint.
        largest: A loss above it has exploded.
        skip: Leave the step out and count it, instead of stopping.
    """

    def __init__(self, folder: Path, largest: float, *, skip: bool) -> None:
        self.folder = folder
        self.largest = largest
        self.skip = skip
        self.skipped = 0
        self.losses: list[Tensor] = []

    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        """Remember the losses that the step is made of."""
        self.losses.append(loss.detach() * trainer.accumulate_grad_batches)

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Stop, or take the gradients away, so that weights and averages stay as they are."""
        losses, self.losses = torch.stack(self.losses), []
        gradients = [p.grad for p in pl_module.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        worst = torch.where(losses.isfinite(), losses, math.inf).max()
        # One number leaves the device: nan and inf fail the comparison too.
        good = bool(torch.isfinite(norm) & (worst <= self.largest))
        if trainer.strategy.reduce_boolean_decision(good):
            return
        if not self.skip:
            raise Diverged(self._message(trainer, losses, float(norm)))
        self.skipped += 1
        for parameter in pl_module.parameters():
            parameter.grad = None

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Log how many steps have been left out."""
        if self.skip:
            pl_module.log("skipped_steps", float(self.skipped))

    def state_dict(self) -> dict[str, Any]:
        """What the checkpoint keeps."""
        return {"skipped": self.skipped}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on counting."""
        self.skipped = state_dict["skipped"]

    def _message(self, trainer: pl.Trainer, losses: Tensor, norm: float) -> str:
        last = trainer.fit_loop.epoch_loop.batch_idx
        batches = range(last + 1 - len(losses), last + 1)
        names = trainer.datamodule.batch_names(batches) if trainer.datamodule is not None else []  # type: ignore[attr-defined]
        told = [name for names_there in of_all_processes(names) for name in names_there]
        more = f", ... ({len(told)} in all)" if len(told) > NAMES_TOLD else ""
        saved = newest(self.folder)
        good = f"the last good checkpoint is {saved[0]}" if saved else "there is no checkpoint yet"
        place = f"step {trainer.global_step + 1} (epoch {trainer.current_epoch + 1}, batch {last + 1})"
        return (
            f"the loss must stay finite and at most {self.largest:.3g}, got {float(losses.max()):.3g} with a gradient "
            f"of norm {norm:.3g} in {place} on {', '.join(told[:NAMES_TOLD])}{more}; {good}; "
            "--scale.on_nan skip leaves such steps out"
        )


def out_of_memory(config: RunConfig, build: Callable[[], nn.Module], example: Tensor, limit: int, devices: int) -> str:
    """Say in one line which batch size would fit, and how to keep the effective batch with it.

    Memory is measured here, on steps of an eighth and a quarter of the batch: m(b) = fixed + b · each.

    Args:
        config: What did not fit.
        build: Makes the model, on the device.
        example: One input `(1, channels, *sizes)` on the device.
        limit: Bytes of the device.
        devices: Number of devices.
    """
    wanted = config.data.batch_size
    fixed, each = _memory_line(build, example, max(wanted // 8, 1))
    fits = min(int((USABLE * limit - fixed) // each), wanted)
    measured = f"{fixed / 2**30:.2f} GiB and {each / 2**30:.3f} GiB an example, of {limit / 2**30:.1f} GiB"
    rule = f"a step must fit into memory, got batch_size {wanted} ({measured})"
    if fits < 1:
        return f"{rule}; not even one example fits: --model.checkpoint_layers true needs less"
    batch = next(size for size in range(fits, 0, -1) if wanted % size == 0)
    effective = config.optim.effective_batch or wanted * devices
    return f"{rule}; --data.batch_size {batch} --optim.effective_batch {effective} would fit (up to {fits} at once)"


def device_memory(device: torch.device) -> int:
    """Bytes of a device, or of the machine."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _memory_line(build: Callable[[], nn.Module], example: Tensor, few: int) -> tuple[int, int]:
    """Bytes that a step needs whatever the batch, and those of each example; fewer are tried where these do not fit."""
    try:
        some, twice = (_step_memory(build(), example.expand(n, *example.shape[1:])) for n in (few, 2 * few))
    except torch.OutOfMemoryError:
        if few == 1:
            raise
        return _memory_line(build, example, few // 2)
    each = max((twice - some) // few, 1)
    return max(some - few * each, 0), each


def _step_memory(model: nn.Module, inputs: Tensor) -> int:
    """Most bytes that a step holds, with the two moments that the optimiser keeps of every weight."""
    labels = torch.zeros(len(inputs), dtype=torch.long, device=inputs.device)

    def step() -> None:
        functional.cross_entropy(model(inputs), labels).backward()

    moments = 2 * sum(parameter.nbytes for parameter in model.parameters())
    return measure_peak_memory(model, step, inputs.device) + moments
