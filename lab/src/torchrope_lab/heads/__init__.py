"""Semantic segmentation and object detection: heads of transformers on torchrope's backbones."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, distributed, nn

from torchrope.models import Features

Target = Mapping[str, Any]

IGNORED = 255
"""Label of pixels without a class."""


class DenseModel(nn.Module, ABC):
    """Base class of models for segmentation and detection: a backbone, the names of the classes, and prediction.

    Images must be normalised; a model neither resizes nor normalises them. The prediction for an image does not depend
    on the other images of a batch: `predict` batches images of one size, and pads none to the size of another.

    Args:
        backbone: Computes the feature maps.
        classes: Names of the classes; in segmentation in the order of the numbers in label maps.
    """

    def __init__(self, backbone: Features, classes: Sequence[str]) -> None:
        super().__init__()
        self.backbone = backbone
        self.classes = tuple(classes)

    @abstractmethod
    def losses(self, images: Sequence[Tensor], targets: Sequence[Target]) -> dict[str, Tensor]:
        """Compute the terms of the loss of a batch, to be summed.

        Args:
            images: `(channels, height, width)` each, of any sizes.
            targets: For each image `map` `(height, width)`, the class of every pixel, or 255; or `boxes` `(n, 4)` xyxy
                and `labels` `(n,)` from 0, where objects with `crowd` `(n,)` True are left out.
        """

    def predict(self, images: Sequence[Tensor]) -> list[dict[str, Tensor]]:
        """Predict each image, in its own pixels.

        Args:
            images: `(channels, height, width)` each, of any sizes.

        Returns:
            For each image `logits` `(classes, height, width)`; or `boxes` `(n, 4)` xyxy, `scores`, `labels` `(n,)` by
            falling score, n ≤ 100.
        """
        return by_size(images, self.predict_same_size)

    @abstractmethod
    def predict_same_size(self, images: Sequence[Tensor]) -> list[dict[str, Tensor]]:
        """Predict images of one size."""


def by_size(
    images: Sequence[Tensor], predict: Callable[[list[Tensor]], list[dict[str, Tensor]]]
) -> list[dict[str, Tensor]]:
    """Predict images of the same size as one batch, and return the predictions in the order of the images."""
    groups: dict[torch.Size, list[int]] = {}
    for index, image in enumerate(images):
        groups.setdefault(image.shape, []).append(index)
    predictions = {
        index: prediction
        for group in groups.values()
        for index, prediction in zip(group, predict([images[index] for index in group]), strict=True)
    }
    return [predictions[index] for index in range(len(images))]


def per_device(count: Tensor, training: bool) -> Tensor:
    """Compute the divisor of a device's sum of losses: the total count of all devices, 1 or more, over their number."""
    # Gradients, which are averaged over devices, are then those of one device with all examples. In evaluation, where a
    # device may work alone, it is the device's own count.
    if not (training and distributed.is_available() and distributed.is_initialized()):
        return count.clamp_min(1)
    total = count.clone()
    distributed.all_reduce(total)
    return total.clamp_min(1) / distributed.get_world_size()
