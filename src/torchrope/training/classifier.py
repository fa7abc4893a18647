"""A vision transformer in training: loss, metrics, optimiser, schedule."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, nn
from torch.nn import functional
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from torchrope.backbones import SIZES, ViT
from torchrope.data.datamodule import DataModule
from torchrope.encodings import AbsoluteEncoding, Encoding, RelativePositionBias, choose
from torchrope.training.config import ModelConfig, OptimConfig


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
        **_dimensions(config),
    )


class Classifier(pl.LightningModule):
    """Train a model to classify: cross-entropy, AdamW, linear warm-up and cosine decay.

    Args:
        model: Maps inputs to logits.
        num_classes: Number of classes.
        optim: Settings of the optimiser.
    """

    def __init__(self, model: nn.Module, num_classes: int, optim: OptimConfig) -> None:
        super().__init__()
        self.model: Any = model
        self.optim = optim
        self.train_loss = MeanMetric()
        self.val_loss = MeanMetric()
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
        """AdamW whose weight decay spares encodings, with the schedule taken step by step."""
        groups = decay_groups(self.model, self.optim.weight_decay)
        optimizer = torch.optim.AdamW(groups, lr=self.optim.lr, betas=self.optim.betas)
        total = int(self.trainer.estimated_stepping_batches)
        warmup = round(total * min(self.optim.warmup_epochs / self.optim.epochs, 0.5))
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, partial(warmup_cosine, warmup=warmup, total=total))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Split parameters: weight matrices decay; encodings, norms, biases and prefix tokens do not."""
    spared = {
        parameter
        for module in model.modules()
        if isinstance(module, Encoding | AbsoluteEncoding | RelativePositionBias)
        for parameter in module.parameters()
    }
    decayed: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        spare = parameter in spared or parameter.ndim < 2 or name.endswith("prefix_tokens")
        (others if spare else decayed).append(parameter)
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]


def warmup_cosine(step: int, *, warmup: int, total: int) -> float:
    """Factor on the learning rate: linear up to 1 at `warmup`, then a half cosine down to 0 at `total`."""
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - warmup) / max(1, total - warmup))))


def _dimensions(config: ModelConfig) -> dict[str, Any]:
    """The size by name, overridden by what is given one by one; ViT's defaults where neither is."""
    named = SIZES[config.size] if config.size else {}
    given = {key: getattr(config, key) for key in ("dim", "depth", "num_heads", "mlp_dim")}
    return {**named, **{key: value for key, value in given.items() if value is not None}}


def _one_or_all(values: Sequence[float] | None) -> float | Sequence[float] | None:
    return values[0] if values and len(values) == 1 else values
