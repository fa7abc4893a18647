"""Lightning modules for semantic segmentation and object detection: losses, mean IoU and average precision."""

from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torchmetrics.classification import MulticlassJaccardIndex
from torchmetrics.detection import MeanAveragePrecision

from torchrope_lab.heads import IGNORED
from torchrope_lab.heads.average_precision import RECALLS, THRESHOLDS
from torchrope_lab.heads.prediction import resized
from torchrope_lab.settings.run_config import OptimConfig
from torchrope_lab.training.module import MeanLoss, Module

Batch = tuple[Sequence[Tensor], Sequence[dict[str, Any]]]


class DenseTraining(Module):
    """Base class of the modules of both tasks; `model` has `losses`, `predict` and `classes`, as `DenseModel`."""

    def __init__(self, model: Any, optim: OptimConfig) -> None:
        super().__init__(model, optim)
        self.val_loss = MeanLoss()

    def forward(self, images: Sequence[Tensor]) -> list[dict[str, Tensor]]:
        """Predict images `(channels, height, width)`."""
        return self.model.predict(images)

    def training_step(self, batch: Batch, _: int) -> dict[str, Tensor]:
        """Compute the loss of a batch, and the terms of which it is the sum."""
        images, targets = batch
        losses = self.model.losses(images, targets)
        loss = torch.stack(list(losses.values())).sum()
        self.record(loss, len(images))
        return {"loss": loss, **{name: term.detach() for name, term in losses.items()}}


class Segmenter(DenseTraining):
    """Train a model for semantic segmentation; validation predicts full images."""

    # Logits are resized to the label maps. It logs the mean cross-entropy of labelled pixels, and the mean intersection
    # over union of the classes that occur.

    curve = ("val_loss", "val_miou")

    def __init__(self, model: Any, optim: OptimConfig) -> None:
        super().__init__(model, optim)
        self.val_miou = MulticlassJaccardIndex(len(model.classes), ignore_index=IGNORED)

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


class Detector(DenseTraining):
    """Train a model for object detection; validation logs the loss and COCO's average precision of boxes, `val_ap`."""

    # The loss is in evaluation mode, the precision over the images of all processes. Crowds are treated as by COCO.

    curve = ("val_loss", "val_ap")

    def __init__(self, model: Any, optim: OptimConfig) -> None:
        super().__init__(model, optim)
        import_module("pycocotools")  # if it is missing, this error has its name, unlike torchmetrics'
        # The defaults are COCO's in float32, where a recall such as 7 / 10 reaches 0.7; in COCO's float64 it does not.
        exact = dict(iou_thresholds=THRESHOLDS.tolist(), rec_thresholds=RECALLS.tolist())
        self.val_precision = MeanAveragePrecision(backend="pycocotools", **exact)

    def validation_step(self, batch: Batch, _: int) -> None:
        """Update loss and average precision with a batch."""
        images, targets = batch
        losses = self.model.losses(images, targets)
        self.val_loss.update(torch.stack(list(losses.values())).sum(), len(images))
        self.val_precision.update(self(images), [_truth(target) for target in targets])

    def on_validation_epoch_end(self) -> None:
        """Log the metrics of the epoch; average precision is 0 if no image has an object."""
        precision = self.val_precision.compute()["map"].clamp(min=0)
        self.val_precision.reset()
        self.log("val_loss", self.val_loss)
        self.log("val_ap", precision, sync_dist=True)  # the same in all processes


def _truth(target: dict[str, Any]) -> dict[str, Tensor]:
    """Convert a target to the names that torchmetrics uses."""
    truth: dict[str, Tensor] = {name: target[name] for name in ("boxes", "labels")}
    return {**truth, "iscrowd": target["crowd"].long()} if "crowd" in target else truth
