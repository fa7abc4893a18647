"""Lightning module for classification: loss and metrics."""

import math
from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional
from torchmetrics.classification import MulticlassAccuracy

from torchrope_lab.settings.run_config import OptimConfig
from torchrope_lab.training.module import MeanLoss, Module


class Classifier(Module):
    """Train a model, which maps inputs to logits, to classify."""

    curve = ("val_loss", "val_top1")

    def __init__(self, model: nn.Module, num_classes: int, optim: OptimConfig) -> None:
        super().__init__(model, optim)
        self.num_classes = num_classes
        self.val_loss = MeanLoss()
        self.val_top1 = MulticlassAccuracy(num_classes, average="micro")

    @property
    def chance_loss(self) -> float:
        """The logarithm of the number of classes."""
        return math.log(max(self.num_classes, 2))

    def forward(self, inputs: Tensor, *extra: Tensor) -> Tensor:
        """Compute logits `(batch, classes)`; further tensors of a batch, such as voxel spacings, are passed on."""
        return self.model(inputs, *extra)

    def training_step(self, batch: Sequence[Tensor], _: int) -> Tensor:
        """Compute the loss of a batch."""
        inputs, labels, *extra = batch
        loss = training_loss(self(inputs, *extra), labels, self.optim)
        self.record(loss, len(labels))
        return loss

    def validation_step(self, batch: Sequence[Tensor], _: int) -> None:
        """Update loss and accuracy with a batch."""
        inputs, labels, *extra = batch
        logits = self(inputs, *extra)
        self.val_loss.update(functional.cross_entropy(logits, labels), len(labels))
        self.val_top1.update(logits, labels)

    def on_validation_epoch_end(self) -> None:
        """Log the metrics of the epoch; Lightning resets them."""
        self.log_dict({"val_loss": self.val_loss, "val_top1": self.val_top1})


def training_loss(logits: Tensor, labels: Tensor, config: OptimConfig) -> Tensor:
    """Compute the loss of logits `(batch, classes)`; labels are `(batch,)` or, if mixed, shares `(batch, classes)`."""
    # Cross-entropy, or binary cross-entropy with target 1 for every class that has a share in the label: Touvron et
    # al., DeiT III, section 3; `train_one_epoch` of its code for mixed labels.
    if config.loss == "cross-entropy":
        return functional.cross_entropy(logits, labels, label_smoothing=config.label_smoothing)
    targets = functional.one_hot(labels, logits.shape[-1]) if labels.ndim == 1 else labels > 0
    return functional.binary_cross_entropy_with_logits(logits, targets.to(logits.dtype))
