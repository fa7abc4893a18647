"""Semantic segmentation and object detection: heads of torchvision and transformers on torchrope's backbones."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, distributed

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


def per_device(count: Tensor, training: bool) -> Tensor:
    """Compute the divisor of a sum of losses on a device: the total count of all devices, 1 or more, over their number.

    Gradients, which are averaged over devices, are then those of one device with all examples. In evaluation, where a
    device may work alone, it is the device's own count.

    Args:
        count: Number of objects or pixels in the sum on this device.
        training: Whether the model is in training mode, in which all devices take the same steps.
    """
    if not (training and distributed.is_available() and distributed.is_initialized()):
        return count.clamp_min(1)
    total = count.clone()
    distributed.all_reduce(total)
    return total.clamp_min(1) / distributed.get_world_size()
