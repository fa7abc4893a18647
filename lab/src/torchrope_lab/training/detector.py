"""Lightning module for object detection: losses and average precision."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torchmetrics import MeanMetric
from torchmetrics.detection import MeanAveragePrecision

from torchrope_lab.dense.average_precision import RECALLS, THRESHOLDS
from torchrope_lab.training.config import OptimConfig
from torchrope_lab.training.module import Module

Batch = tuple[Sequence[Tensor], Sequence[dict[str, Any]]]


class Detector(Module):
    """Train a model for object detection.

    Validation logs the loss in evaluation mode and COCO's average precision of boxes, `val_ap`, and of masks,
    `val_mask_ap`, if the model predicts them; over the images of all processes. Crowds are treated as by COCO.

    Args:
        model: Has `losses`, `predict` and `outputs`, as those of `torchrope_lab.dense.detection`.
        optim: Settings of the optimiser.
    """

    curve = ("val_loss", "val_ap")

    def __init__(self, model: Any, optim: OptimConfig) -> None:
        super().__init__(model, optim)
        self.val_loss = MeanMetric(nan_strategy="ignore")
        kinds = tuple({"boxes": "bbox", "masks": "segm"}[kind] for kind in model.outputs)
        # The defaults are COCO's in float32, where a recall such as 7 / 10 reaches 0.7; in COCO's float64 it does not.
        exact = dict(iou_thresholds=THRESHOLDS.tolist(), rec_thresholds=RECALLS.tolist())
        self.val_precision = MeanAveragePrecision(iou_type=kinds, backend="pycocotools", **exact)  # type: ignore[arg-type]

    def forward(self, images: Sequence[Tensor]) -> list[dict[str, Tensor]]:
        """Predict the objects of images `(channels, height, width)`."""
        return self.model.predict(images)

    def training_step(self, batch: Batch, _: int) -> dict[str, Tensor]:
        """Compute the loss of a batch, and the terms of which it is the sum."""
        images, targets = batch
        losses = self.model.losses(images, targets)
        loss = torch.stack(list(losses.values())).sum()
        self.train_loss.update(loss.detach(), len(images))
        return {"loss": loss, **{name: term.detach() for name, term in losses.items()}}

    def validation_step(self, batch: Batch, _: int) -> None:
        """Update loss and average precision with a batch."""
        images, targets = batch
        losses = self.model.losses(images, targets)
        self.val_loss.update(torch.stack(list(losses.values())).sum(), len(images))
        self.val_precision.update(self(images), [_truth(target) for target in targets])

    def on_validation_epoch_end(self) -> None:
        """Log the metrics of the epoch; average precision is 0 if no image has an object."""
        measured = self.val_precision.compute()
        self.val_precision.reset()
        keys = {"val_ap": "bbox_map", "val_mask_ap": "segm_map"} if len(self.model.outputs) > 1 else {"val_ap": "map"}
        precisions = {name: measured[key].clamp(min=0) for name, key in keys.items()}
        self.log_dict({"val_loss": self.val_loss})
        self.log_dict(precisions, sync_dist=True)  # the same in all processes


def _truth(target: dict[str, Any]) -> dict[str, Tensor]:
    """Convert a target to the names that torchmetrics uses."""
    truth: dict[str, Tensor] = {name: target[name] for name in ("boxes", "labels", "masks") if name in target}
    return {**truth, "iscrowd": target["crowd"].long()} if "crowd" in target else truth
