"""A vision transformer in training: loss, metrics, optimiser, schedule."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, nn
from torch.nn import functional
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from torchrope.backbones import SIZES, ViT
from torchrope.data.datamodule import DataModule
from torchrope.encodings import choose
from torchrope.training.config import ModelConfig, OptimConfig
from torchrope.training.optim import build_optimizer, build_schedule


def build_vit(encoding: str, config: ModelConfig, data: DataModule) -> ViT:
    """Build the transformer of a configuration for data of a kind.

    Args:
        encoding: A name such as "learned+liere:8".
        config: Everything else about the model.
        data: Tells the input size, channels and classes.

    Raises:
        ValueError: what the encoding or the model refuses.
    """
    choice = choose(encoding)
    rotary = partial(choice.rotary, shared_heads=True) if config.share_heads else choice.rotary
    return ViT(
        data.input_size,
        patch_size=config.patch,
        in_channels=data.in_channels,
        num_classes=data.num_classes,
        encoding=rotary,
        absolute=choice.absolute,
        bias=choice.bias,
        share_layers=config.share_layers,
        spacing=_one_or_all(config.spacing),
        origin=_one_or_all(config.origin),
        pool=config.pool,
        num_registers=config.num_registers,
        qkv_bias=config.qkv_bias,
        dropout=config.dropout,
        attention_dropout=config.attention_dropout,
        drop_path=config.drop_path,
        layer_scale=config.layer_scale,
        checkpoint_layers=config.checkpoint_layers,
        **_dimensions(config),
    )


class Classifier(pl.LightningModule):
    """Train a model to classify: cross-entropy, linear warm-up and cosine decay.

    Args:
        model: Maps inputs to logits.
        num_classes: Number of classes.
        optim: Settings of the optimiser.
    """

    def __init__(self, model: nn.Module, num_classes: int, optim: OptimConfig) -> None:
        super().__init__()
        self.model: Any = model
        self.optim = optim
        self.train_loss = MeanMetric(nan_strategy="ignore")
        self.val_loss = MeanMetric(nan_strategy="ignore")
        self.val_top1 = MulticlassAccuracy(num_classes, average="micro")

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits `(batch, classes)`."""
        return self.model(inputs)

    def training_step(self, batch: Sequence[Tensor], _: int) -> Tensor:
        """Cross-entropy of a batch."""
        inputs, labels = batch
        loss = functional.cross_entropy(self(inputs), labels, label_smoothing=self.optim.label_smoothing)
        self.train_loss.update(loss.detach(), len(labels))
        return loss

    def validation_step(self, batch: Sequence[Tensor], _: int) -> None:
        """Count loss and hits of a batch."""
        inputs, labels = batch
        logits = self(inputs)
        self.val_loss.update(functional.cross_entropy(logits, labels), len(labels))
        self.val_top1.update(logits, labels)

    def on_validation_epoch_end(self) -> None:
        """Report the epoch; Lightning resets the metrics."""
        self.log_dict({"val_loss": self.val_loss, "val_top1": self.val_top1})

    def on_train_epoch_start(self) -> None:
        """Forget the last epoch's losses."""
        self.train_loss.reset()

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        """The optimiser, whose weight decay spares encodings, with the schedule taken step by step."""
        optimizer = build_optimizer(self.model, self.optim)
        schedule = build_schedule(optimizer, self.optim, int(self.trainer.estimated_stepping_batches))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def _dimensions(config: ModelConfig) -> dict[str, Any]:
    """The size by name, overridden by what is given one by one; ViT's defaults where neither is."""
    named = SIZES[config.size] if config.size else {}
    given = {key: getattr(config, key) for key in ("dim", "depth", "num_heads", "mlp_dim")}
    return {**named, **{key: value for key, value in given.items() if value is not None}}


def _one_or_all(values: Sequence[float] | None) -> float | Sequence[float] | None:
    return values[0] if values and len(values) == 1 else values
