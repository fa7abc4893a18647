"""Lightning module for semantic segmentation: loss and mean intersection over union."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassJaccardIndex

from torchrope_lab.dense import IGNORED
from torchrope_lab.dense.prediction import resized
from torchrope_lab.training.config import OptimConfig
from torchrope_lab.training.module import Module

Batch = tuple[Sequence[Tensor], Sequence[dict[str, Any]]]


class Segmenter(Module):
    """Train a model for semantic segmentation.

    Validation predicts full images, and resizes logits to the size of the label maps. It logs the mean cross-entropy of
    labelled pixels, and the mean intersection over union of the classes that occur.

    Args:
        model: Has `losses`, `predict` and `classes`, as those of `torchrope_lab.dense.segmentation`.
        optim: Settings of the optimiser.
    """

    curve = ("val_loss", "val_miou")

    def __init__(self, model: Any, optim: OptimConfig) -> None:
        super().__init__(model, optim)
        self.val_loss = MeanMetric(nan_strategy="ignore")
        self.val_miou = MulticlassJaccardIndex(len(model.classes), ignore_index=IGNORED)

    def forward(self, images: Sequence[Tensor]) -> list[dict[str, Tensor]]:
        """Predict the logits of images `(channels, height, width)`."""
        return self.model.predict(images)

    def training_step(self, batch: Batch, _: int) -> Tensor:
        """Compute the loss of a batch."""
        images, targets = batch
        loss = torch.stack(list(self.model.losses(images, targets).values())).sum()
        self.train_loss.update(loss.detach(), len(images))
        return loss

    def validation_step(self, batch: Batch, _: int) -> None:
        """Update loss and mean intersection over union with a batch."""
        images, targets = batch
        for prediction, target in zip(self(images), targets, strict=True):
            map = target["map"]
            logits = resized(prediction["logits"], map.shape)[None]
            loss = functional.cross_entropy(logits, map[None], ignore_index=IGNORED)
            self.val_loss.update(loss, (map != IGNORED).sum())
            self.val_miou.update(logits, map[None])

    def on_validation_epoch_end(self) -> None:
        """Log the metrics of the epoch; Lightning resets them."""
        self.log_dict({"val_loss": self.val_loss, "val_miou": self.val_miou})
