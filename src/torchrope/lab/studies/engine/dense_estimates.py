"""mIoU from the counts of each image, also for bootstrap draws of the images."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchrope.lab.data.dense import IGNORED
from torchrope.lab.dense import prediction

Counts = Mapping[str, Sequence[int]]
"""Of one image: for every class that is in its true or predicted map pixels of both, predicted ones, true ones."""
Weigh = Callable[[np.ndarray], np.ndarray]
"""A measure of weighted images, `(draws, images)` to `(draws,)`."""


def count_pixels(predicted: Tensor, truth: Tensor) -> dict[str, Any]:
    """Count what mIoU needs of one image; pixels whose true class is 255 do not count.

    Args:
        predicted: Class of every pixel, `(height, width)`.
        truth: Likewise.

    Example:
        >>> count_pixels(torch.tensor([[0, 1, 1]]), torch.tensor([[0, 0, 255]]))
        {'0': [1, 1, 2], '1': [0, 1, 0]}
    """
    valid = truth != IGNORED
    classes = int(torch.cat([predicted[valid], truth[valid]]).max()) + 1 if valid.any() else 0
    counts = prediction.per_image_counts(predicted, truth, classes).T.tolist()
    return {str(kind): [both, named, true] for kind, (both, named, true) in enumerate(counts) if named + true}


def mean_iou(records: Sequence[Counts]) -> Weigh:
    """Mean over classes of intersection over union of pixels of all images; classes in no image do not count.

    Args:
        records: Of each image what `count_pixels` returns.
    """
    index = {kind: at for at, kind in enumerate(sorted({kind for record in records for kind in record}))}
    counts = torch.zeros(len(records), 3, len(index), dtype=torch.float64)
    for image, record in enumerate(records):
        for kind, pixels in record.items():
            counts[image, :, index[kind]] = torch.tensor(pixels, dtype=torch.float64)

    def weigh(weights: np.ndarray) -> np.ndarray:
        return prediction.mean_iou(
            torch.tensordot(torch.as_tensor(weights, dtype=torch.float64), counts, dims=1)
        ).numpy()

    return weigh


def total(records: Iterable[Counts]) -> tuple[int, int]:
    """Pixels predicted and true over all classes and images."""
    cells = [pixels for record in records for pixels in record.values()]
    return sum(named for _, named, _ in cells), sum(true for _, _, true in cells)
