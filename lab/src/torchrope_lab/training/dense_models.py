"""Build a model for semantic segmentation or object detection from a configuration."""

from typing import Any

from torch import nn

from torchrope.models import Features, ViT
from torchrope_lab.data.datamodule import DataModule
from torchrope_lab.mistakes import Mistake, as_mistake
from torchrope_lab.settings.run_config import ModelConfig, RunConfig
from torchrope_lab.training.models import build_model, on_lattice
from torchrope_lab.training.module import Module

UPERNET_CHANNELS, CHANNELS = 512, 256
"""Channels of UperNet in mmsegmentation's recipes, and of Mask2Former and DINO in theirs."""


def build_dense_module(config: RunConfig, data: DataModule) -> Module:
    """Build the untrained model of a configuration for segmentation or detection."""
    model = build_head(config.model, build_features(config.encoding, config.model, data), data)
    from torchrope_lab.training.dense_modules import Detector, Segmenter

    return (Segmenter if config.model.task == "segment" else Detector)(model, config.optim)


@as_mistake()
def build_features(encoding: str, config: ModelConfig, data: DataModule) -> Features:
    """Build the backbone of a configuration: the stages of a Swin; of a ViT four layers for UperNet, else a pyramid."""
    # As in detrex, DINO skips the first stage of a Swin, and the finest level of a ViT's pyramid.
    # DINO's pyramid also omits levels whose cells are smaller than 2 pixels, because they would take most of the time.
    model = on_lattice(build_model(encoding, config, data))
    if not isinstance(model, ViT):
        return Features(model, indices=range(int(config.head == "dino"), len(model.stages)))
    windows: dict[str, Any] = {"window_size": config.window, "global_layers": config.global_layers}
    if config.head == "upernet":
        from torchrope_lab.heads.segmentation import layers_of_plain_vit

        return Features(model, indices=layers_of_plain_vit(len(model.layers)), **windows)
    small = sum(config.patch_size[0] < 2 * cells for cells in (4, 2, 1))
    skipped = max(small, 1) if config.head == "dino" else 0
    channels = config.head_channels or CHANNELS
    return Features(model, pyramid=True, indices=range(skipped, 4), out_channels=channels, **windows)


def build_head(config: ModelConfig, features: Features, data: DataModule) -> nn.Module:
    """Build the head on the feature maps of a backbone, its widths in the proportions of its paper."""
    channels = config.head_channels or (UPERNET_CHANNELS if config.head == "upernet" else CHANNELS)
    queries: dict[str, int] = {} if config.num_queries is None else {"queries": config.num_queries}
    classes = data.classes if config.task == "detect" else data.map_classes
    match config.head:
        case "upernet":
            from torchrope_lab.heads.segmentation import UperNet

            auxiliary, dropout = min(256, max(1, channels // 2)), config.head_dropout
            return UperNet(features, classes, channels=channels, auxiliary_channels=auxiliary, dropout=dropout)
        case "mask2former":
            from torchrope_lab.heads.segmentation import Mask2Former

            widths = {"encoder_mlp_dim": 4 * channels, "mlp_dim": 8 * channels}
            return Mask2Former(features, classes, channels=channels, **widths, **queries)
        case "dino":
            from torchrope_lab.heads.detr import DINO

            return DINO(features, classes, channels=channels, mlp_dim=8 * channels, **queries)
    raise Mistake(f"head must be one for segmentation or detection, got {config.head!r}")
