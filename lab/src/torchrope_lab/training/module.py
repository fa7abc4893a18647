"""Base class of the Lightning modules: optimiser, learning-rate schedule and metrics of the learning curve."""

import math
from typing import Any, ClassVar

import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, nn
from torchmetrics import MeanMetric

from torchrope_lab.settings.run_config import OptimConfig
from torchrope_lab.training.optim import build_optimizer, build_schedule


class MeanLoss(MeanMetric):
    """Mean of losses that are not NaN, weighted by numbers of examples; unlike `MeanMetric`, no step waits for it."""

    def update(self, value: Tensor, weight: int) -> None:  # type: ignore[override]
        """Add the mean loss of a batch, 0-d, of `weight` examples."""
        known = ~value.isnan()
        self.mean_value += torch.where(known, value, 0).to(self.mean_value.dtype) * weight
        self.weight += known.to(self.weight.dtype) * weight


class Module(pl.LightningModule):
    """Base class for training a model. Subclasses define the steps, and log the metrics of `curve` in validation."""

    # The last metric of `curve` measures the model's quality, in [0, 1]. `batch_loss` is the mean loss of the last
    # batch, which Lightning divides by the number of accumulated batches, `batch_examples` the number of its examples.

    curve: ClassVar[tuple[str, ...]]

    def __init__(self, model: nn.Module, optim: OptimConfig) -> None:
        super().__init__()
        self.model: Any = model
        self.optim = optim
        self.train_loss = MeanLoss()
        self.batch_loss = torch.tensor(math.nan)
        self.batch_examples = 0

    @property
    def chance_loss(self) -> float:
        """Loss of guessing, to which `LossGuard`'s limit is proportional; infinite if not defined for the task."""
        return math.inf

    def record(self, loss: Tensor, examples: int) -> None:
        """Store the mean loss of a training batch and the number of its examples."""
        self.batch_loss, self.batch_examples = loss.detach(), examples
        self.train_loss.update(self.batch_loss, examples)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Compute gradients of the loss."""
        # Those of the batches of an optimiser step add up to the gradients of the mean over its examples. Lightning
        # gives every batch the weight 1 / `accumulate_grad_batches`, also if the last step of an epoch has fewer or
        # smaller ones.
        accumulated = self.trainer.accumulate_grad_batches
        if accumulated > 1:
            loss = loss * (accumulated * self.batch_examples / examples_of_step(self.trainer))
        super().backward(loss, *args, **kwargs)

    def on_train_epoch_start(self) -> None:
        """Reset the mean loss."""
        self.train_loss.reset()

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        """Build the optimiser, and the learning-rate schedule with one update per step."""
        optimizer = build_optimizer(self.model, self.optim)
        schedule = build_schedule(optimizer, self.optim, int(self.trainer.estimated_stepping_batches))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def examples_of_step(trainer: pl.Trainer) -> int:
    """Return the number of examples, in this process, of the batches that the current optimiser step accumulates."""
    order: Any = trainer.train_dataloader.batch_sampler  # type: ignore[union-attr]
    accumulated = trainer.accumulate_grad_batches
    first = trainer.fit_loop.epoch_loop.batch_idx // accumulated * accumulated
    end = min(first + accumulated, int(trainer.num_training_batches))
    return min(end * order.batch_size, len(order.sampler)) - first * order.batch_size
