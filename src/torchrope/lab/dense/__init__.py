"""Other people's detection and segmentation models on this library's backbones."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

IGNORED = 255
"""The class of pixels that have none."""


def by_size(
    images: Sequence[Tensor], find: Callable[[list[Tensor]], list[dict[str, Tensor]]]
) -> list[dict[str, Tensor]]:
    """Predict for images of one size together, and give what is found in the order of the images."""
    groups: dict[torch.Size, list[int]] = {}
    for index, image in enumerate(images):
        groups.setdefault(image.shape, []).append(index)
    found = {
        index: each
        for group in groups.values()
        for index, each in zip(group, find([images[index] for index in group]), strict=True)
    }
    return [found[index] for index in range(len(images))]
