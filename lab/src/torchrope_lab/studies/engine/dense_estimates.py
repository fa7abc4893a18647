"""mIoU from per-image pixel counts, also for bootstrap draws of the images."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchrope_lab.data.dense import IGNORED
from torchrope_lab.dense import prediction

Counts = Mapping[str, Sequence[int]]
"""Of one image: intersection, predicted and true pixels of every class in its true or predicted map."""
Measure = Callable[[np.ndarray], np.ndarray]
"""A measure of weighted images, `(draws, images)` to `(draws,)`."""


def count_pixels(predicted: Tensor, truth: Tensor) -> dict[str, Any]:
    """Count intersection, predicted and true pixels of each class of one image; pixels of true class 255 are ignored.

    Args:
        predicted: Class of every pixel, `(height, width)`.
        truth: True class of every pixel, `(height, width)`.

    Example:
        >>> count_pixels(torch.tensor([[0, 1, 1]]), torch.tensor([[0, 0, 255]]))
        {'0': [1, 1, 2], '1': [0, 1, 0]}
    """
    valid = truth != IGNORED
    classes = int(torch.cat([predicted[valid], truth[valid]]).max()) + 1 if valid.any() else 0
    counts = prediction.per_image_counts(predicted, truth, classes).T.tolist()
    return {str(kind): [both, named, true] for kind, (both, named, true) in enumerate(counts) if named + true}


def mean_iou(records: Sequence[Counts]) -> Measure:
    """Return a function of image weights that computes mIoU over all images; classes in no image are ignored.

    Args:
        records: Results of `count_pixels`, one per image.
    """
    index = {kind: at for at, kind in enumerate(sorted({kind for record in records for kind in record}))}
    counts = torch.zeros(len(records), 3, len(index), dtype=torch.float64)
    for image, record in enumerate(records):
        for kind, pixels in record.items():
            counts[image, :, index[kind]] = torch.tensor(pixels, dtype=torch.float64)

    def measure(weights: np.ndarray) -> np.ndarray:
        return prediction.mean_iou(
            torch.tensordot(torch.as_tensor(weights, dtype=torch.float64), counts, dims=1)
        ).numpy()

    return measure


def total(records: Iterable[Counts]) -> tuple[int, int]:
    """Sum predicted and true pixels over all classes and images."""
    cells = [pixels for record in records for pixels in record.values()]
    return sum(named for _, named, _ in cells), sum(true for _, _, true in cells)
