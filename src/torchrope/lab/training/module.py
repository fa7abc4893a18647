"""What every kind of training shares: optimiser, schedule, and what its learning curve tells."""

import math
from typing import Any, ClassVar

import pytorch_lightning as pl
from pytorch_lightning.utilities.types import OptimizerLRSchedulerConfig
from torch import nn
from torchmetrics import MeanMetric

from torchrope.lab.training.config import OptimConfig
from torchrope.lab.training.optim import build_optimizer, build_schedule


class Module(pl.LightningModule):
    """A model in training. A subclass writes the steps, and logs what `curve` names after every validation.

    Args:
        model: What is trained.
        optim: Settings of the optimiser.

    Attributes:
        curve: Measures of a validation that the learning curve keeps; the last one is how good the model is, in [0, 1].
        quality: What people call that one.
        train_loss: Mean loss of the epoch so far.
    """

    curve: ClassVar[tuple[str, ...]]
    quality: ClassVar[str]

    def __init__(self, model: nn.Module, optim: OptimConfig) -> None:
        super().__init__()
        self.model: Any = model
        self.optim = optim
        self.train_loss = MeanMetric(nan_strategy="ignore")

    @property
    def guess_loss(self) -> float:
        """The loss of guessing, by which the guard knows an explosion; infinite where there is no such number."""
        return math.inf

    def on_train_epoch_start(self) -> None:
        """Forget the last epoch's losses."""
        self.train_loss.reset()

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        """The optimiser, whose weight decay spares encodings, with the schedule taken step by step."""
        optimizer = build_optimizer(self.model, self.optim)
        schedule = build_schedule(optimizer, self.optim, int(self.trainer.estimated_stepping_batches))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}
