"""Exponential moving average (EMA) of the weights, used for validation and saved as the trained model."""

from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import WeightAveraging
from torch.optim.swa_utils import get_ema_multi_avg_fn


class AveragedWeights(WeightAveraging):
    """Keep an exponential moving average of the weights:  a ← d a + (1 - d) w,  a = w after the first step."""

    # Polyak and Juditsky, Acceleration of stochastic approximation by averaging; with decay, as in DeiT's code.
    # A step without gradients, which `LossGuard` skips, does not change the average. Validation uses the average,
    # checkpoints hold both, and a finished run ends with the average as its weights. Lightning's EMAWeightAveraging
    # updates one weight at a time, which costs three kernels for each.

    def __init__(self, decay: float) -> None:
        super().__init__(use_buffers=False, multi_avg_fn=get_ema_multi_avg_fn(decay))
        self.has_stepped = False

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Note whether the step has gradients."""
        self.has_stepped = any(parameter.grad is not None for parameter in pl_module.parameters())

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        """Return whether to update the average: after every step that had gradients."""
        return step_idx is not None and self.has_stepped

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the step of the last update."""
        super().load_state_dict({"latest_update_step": int(state_dict["latest_update_step"])})

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Copy the average to the model, also if the run was already finished and nothing was trained."""
        self._copy_average_to_current(pl_module)
