"""Semantic segmentation and object detection: heads of torchvision and transformers on torchrope's backbones."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

IGNORED = 255
"""Label of pixels without a class."""


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
