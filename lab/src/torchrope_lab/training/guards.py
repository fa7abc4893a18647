"""Detection of divergence during training."""

import math
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import Callback
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from torchrope_lab.mistakes import Mistake
from torchrope_lab.training.checkpoints import newest
from torchrope_lab.training.history import Summed

DIVERGED = 10.0
"""A loss above this multiple of that of a uniform prediction has diverged."""


class Diverged(Mistake):
    """The loss or a gradient is not finite, or the loss is too large."""


class LossGuard(Callback):
    """Check loss and gradients of every optimiser step; if they diverge, raise `Diverged`, or skip the step."""

    # To raise, the check of a step is read while the next one is computed, so that no step waits for the device:
    # weights in memory may then be of one diverged step, but none is validated or saved, because both wait for the
    # check. To skip, every step waits for its check, and a diverged one changes neither weights nor averages, those of
    # batch norms included.

    def __init__(self, folder: Path, largest: float, *, skip: bool) -> None:
        self.folder = folder
        self.largest = largest
        self.skip = skip
        self.skipped = 0
        self.losses: list[Tensor] = []
        self.statistics: list[tuple[Tensor, Tensor]] = []  # buffers of batch norms, and their values before the step
        self.unread: Check | None = None

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        """Store the statistics of batch norms, which change in the forward pass, before the first batch of a step."""
        if self.skip and not self.losses:
            norms = (module for module in pl_module.modules() if isinstance(module, _BatchNorm))
            self.statistics = [(buffer, buffer.clone()) for norm in norms for buffer in norm.buffers()]

    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        """Store the loss of a batch until the optimiser step."""
        self.losses.append(pl_module.batch_loss)  # type: ignore[arg-type]

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Raise if the previous step diverged, or remove the gradients so that neither weights nor averages change."""
        losses, self.losses = torch.stack(self.losses), []
        gradients = [p.grad for p in pl_module.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        worst = torch.where(losses.isfinite(), losses, math.inf).max()
        bad = ~(norm.isfinite() & (worst <= self.largest))  # NaN and inf fail the comparison too
        check = Check(trainer, torch.stack([bad.float(), losses.max().float(), norm.float()]))
        if not self.skip:
            self._raise_if_diverged()
            self.unread = check
        elif check.read()[0]:
            self.skipped += 1
            for buffer, before in self.statistics:
                buffer.copy_(before)
            for parameter in pl_module.parameters():
                parameter.grad = None

    def on_validation_start(self, trainer: pl.Trainer, *_: Any) -> None:
        """Raise if the last step diverged."""
        self._raise_if_diverged()

    def on_save_checkpoint(self, trainer: pl.Trainer, *_: Any) -> None:
        """Raise if the last step diverged."""
        self._raise_if_diverged()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Raise if the last step diverged; log how many steps have been skipped."""
        self._raise_if_diverged()
        if self.skip:
            pl_module.log("skipped_steps", float(self.skipped))

    def state_dict(self) -> dict[str, Any]:
        """Return the number of skipped steps."""
        return {"skipped": self.skipped}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the number of skipped steps."""
        self.skipped = state_dict["skipped"]

    def _raise_if_diverged(self) -> None:
        check, self.unread = self.unread, None
        if check is None:
            return
        diverged, loss, norm = check.read()
        if not diverged:
            return
        saved = newest(self.folder)
        good = f"the last good checkpoint is {saved[0]}" if saved else "there is no checkpoint yet"
        raise Diverged(
            f"the loss must stay finite and at most {self.largest:.3g}, got {loss:.3g} with a gradient "
            f"of norm {norm:.3g} in {check.step}; {good}; --run.on_nan skip skips such steps"
        )


class Check(Summed):
    """Whether an optimiser step diverged in any process (above 0), its loss and its gradient's norm, float32 `(3,)`."""

    def __init__(self, trainer: pl.Trainer, values: Tensor) -> None:
        super().__init__(trainer, values)
        batch = trainer.fit_loop.epoch_loop.batch_idx + 1
        self.step = f"step {trainer.global_step + 1} (epoch {trainer.current_epoch + 1}, batch {batch})"
