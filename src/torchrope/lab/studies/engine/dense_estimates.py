"""mIoU and AP with their uncertainty: measures of a set of images, computed anew for bootstrap draws of them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchrope.lab.data.dense import IGNORED
from torchrope.lab.dense import prediction
from torchrope.lab.studies.engine.estimates import Contrast, ends, judge
from torchrope.lab.studies.ranking import spread

DRAWS = 1000
"""AP is sorted and matched anew in each, for every class and overlap."""
Counts = Mapping[str, Sequence[int]]
"""Of one image: for every class that is in its true or predicted map pixels of both, predicted ones, true ones."""
Weigh = Callable[[np.ndarray], np.ndarray]
"""A measure of weighted images, `(draws, images)` to `(draws,)`."""


@dataclass(frozen=True)
class Score:
    """What an encoding reaches, in shares of 1.

    Attributes:
        name: The encoding.
        measure: What is measured: "mIoU", "box AP".
        seeds: Of each training on all images, `(seeds,)`.
        draws: Mean over seeds in each bootstrap draw of images, `(draws,)`; the same draws for all encodings.
    """

    name: str
    measure: str
    seeds: np.ndarray
    draws: np.ndarray

    @property
    def mean(self) -> float:
        """Over seeds."""
        return float(self.seeds.mean())

    @property
    def spread(self) -> float | None:
        """Standard deviation over seeds; None where there is one seed."""
        return spread(self.seeds.tolist())

    @property
    def interval(self) -> tuple[float, float]:
        """The ends of the 95 % interval over images."""
        return ends(self.draws)

    def ahead_of(self, other: "Score") -> tuple[float, float]:
        """The ends of the 95 % interval of the difference on the same images."""
        return ends(self.draws - other.draws)

    def against(self, other: "Score") -> Contrast:
        """How much better it is than another, in points, and whether that can be told from luck."""
        low, high = self.ahead_of(other)
        spreads = [100 * (each.spread or 0.0) for each in (self, other)]
        return judge(100 * (self.mean - other.mean), 100 * low, 100 * high, spreads)


def score(name: str, measure: str, seeds: Sequence[Weigh], images: int, draws: int = DRAWS) -> Score:
    """Measure all trainings of an encoding on all images, and on bootstrap draws of them.

    Args:
        name: The encoding.
        measure: What is measured.
        seeds: The measure of each training.
        images: Their number, which with `draws` decides the draws.
        draws: Of the bootstrap.
    """
    weights = drawn(images, draws)
    whole = [float(weigh(np.ones((1, images)))[0]) for weigh in seeds]
    return Score(name, measure, np.array(whole), np.mean([weigh(weights) for weigh in seeds], axis=0))


def drawn(images: int, draws: int = DRAWS) -> np.ndarray:
    """How often each bootstrap draw takes each image, `(draws, images)`."""
    return np.random.default_rng(0).multinomial(images, np.full(images, 1 / images), draws)


def count_pixels(predicted: Tensor, truth: Tensor) -> dict[str, Any]:
    """Count what mIoU needs of one image; pixels whose true class is 255 do not count.

    Args:
        predicted: Class of every pixel, `(height, width)`.
        truth: Likewise.

    Example:
        >>> count_pixels(torch.tensor([[0, 1, 1]]), torch.tensor([[0, 0, 255]]))
        {'0': [1, 1, 2], '1': [0, 1, 0]}
    """
    told = truth != IGNORED
    classes = int(torch.cat([predicted[told], truth[told]]).max()) + 1 if told.any() else 0
    counts = prediction.per_image_counts(predicted, truth, classes).T.tolist()
    return {str(kind): [both, said, true] for kind, (both, said, true) in enumerate(counts) if said + true}


def mean_iou(records: Sequence[Counts]) -> Weigh:
    """Mean over classes of intersection over union of pixels of all images; classes that are nowhere do not count.

    Args:
        records: Of each image what `count_pixels` returns.
    """
    places = {kind: place for place, kind in enumerate(sorted({kind for record in records for kind in record}))}
    counts = torch.zeros(len(records), 3, len(places), dtype=torch.float64)
    for image, record in enumerate(records):
        for kind, pixels in record.items():
            counts[image, :, places[kind]] = torch.tensor(pixels, dtype=torch.float64)

    def weigh(weights: np.ndarray) -> np.ndarray:
        return prediction.mean_iou(
            torch.tensordot(torch.as_tensor(weights, dtype=torch.float64), counts, dims=1)
        ).numpy()

    return weigh


def total(records: Iterable[Counts]) -> tuple[int, int]:
    """Pixels predicted and true over all classes and images."""
    cells = [pixels for record in records for pixels in record.values()]
    return sum(said for _, said, _ in cells), sum(true for _, _, true in cells)
