"""mIoU and AP with their uncertainty: measures of a set of images, computed anew for bootstrap draws of them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchrope.lab.conclusion import ERROR_RATE, Interval
from torchrope.lab.data.dense import IGNORED
from torchrope.lab.dense import prediction
from torchrope.lab.statistics import drawn_interval, resample
from torchrope.lab.studies.engine.estimates import Contrast, judge, spread

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
        draws: Of each training in each bootstrap draw of images, `(seeds, draws)`; the same for all encodings.
        images: How many there are.
    """

    name: str
    measure: str
    seeds: np.ndarray
    draws: np.ndarray
    images: int

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
        """The ends of the 95 % interval over images and trainings."""
        _, low, high = drawn_interval(self.seeds, self.draws, self.images)
        return low, high

    def ahead_of(self, other: "Score", level: float = 0.95) -> Interval:
        """The difference to another on the same images, with its interval."""
        seeds = min(len(self.seeds), len(other.seeds))
        whole, drawn = self.seeds[:seeds] - other.seeds[:seeds], self.draws[:seeds] - other.draws[:seeds]
        return drawn_interval(whole, drawn, self.images, level=level)

    def against(self, other: "Score") -> Contrast:
        """How much better it is than another, in points, and whether that is measurable."""
        value, low, high = (100 * each for each in self.ahead_of(other))
        return judge(value, low, high)


def ranked(scores: Sequence[Score]) -> list[tuple[Score, str]]:
    """Scores with "best", "tied" or "behind", the highest first; 5 % for all pairs together, as Bonferroni has it."""
    ordered = sorted(scores, key=lambda each: -each.mean)
    pairs = len(ordered) * (len(ordered) - 1) / 2
    level = 1 - ERROR_RATE / max(1, pairs)
    behind = [ordered[0].ahead_of(other, level).low > 0 for other in ordered[1:]]
    return [(ordered[0], "best"), *zip(ordered[1:], ["behind" if each else "tied" for each in behind], strict=True)]


def score(name: str, measure: str, seeds: Sequence[Weigh], images: int, draws: int = DRAWS) -> Score:
    """Measure all trainings of an encoding on all images, and on bootstrap draws of them.

    Args:
        name: The encoding.
        measure: What is measured.
        seeds: The measure of each training.
        images: Their number, which with `draws` decides the draws.
        draws: Of the bootstrap.
    """
    weights = resample(images, draws=draws)
    whole = [float(weigh(np.ones((1, images)))[0]) for weigh in seeds]
    return Score(name, measure, np.array(whole), np.stack([weigh(weights) for weigh in seeds]), images)


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
