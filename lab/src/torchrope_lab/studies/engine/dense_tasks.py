"""Semantic segmentation and object detection: predictions on a data set, per-image records and measures."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from torchrope_lab.data.datamodule import DataModule
from torchrope_lab.data.dense import IGNORED
from torchrope_lab.dense.average_precision import average_precisions, match
from torchrope_lab.dense.prediction import MultiScale, SlidingWindows
from torchrope_lab.statistics import draw
from torchrope_lab.studies.engine.dense_estimates import Measure, count_pixels, mean_iou
from torchrope_lab.studies.engine.pictures import Overlay, box_overlay, map_overlay

Target = Mapping[str, Any]
Found = Mapping[str, Tensor]
Record = dict[str, Any]
"""Per-image statistics from which a measure is computed, stored as JSON."""

SCORE_THRESHOLD = 0.5
"""Score threshold of boxes that are rendered."""


class Task(ABC):
    """A dense prediction task and its measure.

    Attributes:
        name: Name in data sets and heads.
        title: Title shown in the report.
        measure: Displayed name of the measure.
        head: Default head on the backbone.
        curve: The measure's name in a learning curve.
        about: Definition of the measure, in a sentence.
        shown: Explanation of its pictures, in a sentence.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    measure: ClassVar[str]
    head: ClassVar[str]
    curve: ClassVar[str]
    about: ClassVar[str]
    shown: ClassVar[str]

    @abstractmethod
    def classes(self, data: DataModule) -> Sequence[str]:
        """Return the names of the classes."""

    @abstractmethod
    def truth(self, target: Target) -> Found:
        """Return the ground truth in the form of a prediction."""

    @abstractmethod
    def in_image(self, found: Found, image: Tensor, zoom: float) -> Found:
        """Convert the prediction for an image enlarged by `zoom` to the image's original pixels."""

    @abstractmethod
    def record(self, found: Found, target: Target) -> Record:
        """Return the statistics of an image that are stored."""

    @abstractmethod
    def measure_of(self, records: Sequence[Record]) -> Measure:
        """Return a function of image weights that computes the measure."""

    @abstractmethod
    def overlay(self, found: Found, image: Tensor, data: DataModule) -> Overlay:
        """Draw a prediction, or the ground truth, over an image."""


class Segment(Task):
    """Semantic segmentation: the class of every pixel, measured by mIoU."""

    name = "segment"
    title = "Segmentation"
    measure = "mIoU"
    head = "upernet"
    curve = "val_miou"
    about = (
        "mIoU is the mean over classes, a background among them, of intersection over union of pixels of all images "
        "together."
    )
    shown = "Colours are classes; a background has none."

    def classes(self, data: DataModule) -> Sequence[str]:
        """Return the names of the classes of a map."""
        return data.map_classes

    def truth(self, target: Target) -> Found:
        """Return the map."""
        return {"map": target["map"]}

    def in_image(self, found: Found, image: Tensor, zoom: float) -> Found:
        """Return the most probable class of each pixel, from resampled logits."""
        logits = found["logits"].float()
        if zoom != 1:
            logits = functional.interpolate(logits[None], image.shape[1:], mode="bilinear")[0]
        return {"map": logits.argmax(dim=0).cpu()}

    def record(self, found: Found, target: Target) -> Record:
        """Count the pixels of each class."""
        return count_pixels(found["map"], target["map"])

    def measure_of(self, records: Sequence[Record]) -> Measure:
        """Return a function that computes mIoU."""
        return mean_iou(records)

    def overlay(self, found: Found, image: Tensor, data: DataModule) -> Overlay:
        """Draw a map without the background."""
        background = (index for index, name in enumerate(self.classes(data)) if name == "background")
        return map_overlay(found["map"], {IGNORED, *background})


class Detect(Task):
    """Object detection: box and class of every object, measured by box AP."""

    name = "detect"
    title = "Detection"
    measure = "box AP"
    head = "faster-rcnn"
    curve = "val_ap"
    about = "Box AP is COCO's: the mean over classes and ten overlaps, 0.5 to 0.95, with at most 100 boxes per image."
    shown = f"Colours are classes. Boxes of score {SCORE_THRESHOLD:g} or more, with their score in percent."

    def classes(self, data: DataModule) -> Sequence[str]:
        """Return the names of the classes of boxes."""
        return data.classes

    def truth(self, target: Target) -> Found:
        """Return the boxes that are not crowds, with score 1."""
        labels = target["labels"]
        one = ~target["crowd"] if "crowd" in target else torch.ones_like(labels, dtype=torch.bool)
        return {"boxes": target["boxes"][one], "labels": labels[one], "scores": torch.ones(int(one.sum()))}

    def in_image(self, found: Found, image: Tensor, zoom: float) -> Found:
        """Scale boxes back; masks are left out."""
        height, width = (_zoomed(side, zoom) / side for side in image.shape[1:])
        here = {name: found[name].cpu() for name in ("boxes", "labels", "scores")}
        return {**here, "boxes": here["boxes"].float() / torch.tensor([width, height, width, height])}

    def record(self, found: Found, target: Target) -> Record:
        """Match detections with objects."""
        return match([found], [target])[0]

    def measure_of(self, records: Sequence[Record]) -> Measure:
        """Return a function that computes AP."""
        return partial(average_precisions, records)

    def overlay(self, found: Found, image: Tensor, data: DataModule) -> Overlay:
        """Draw the boxes above the score threshold, and all boxes of the ground truth."""
        if "scores" not in found:
            return box_overlay(image.shape[1:], found["boxes"], found["labels"])
        sure = found["scores"] >= SCORE_THRESHOLD
        return box_overlay(image.shape[1:], *(found[key][sure] for key in ("boxes", "labels", "scores")))


@torch.no_grad()
def predictions(model: Any, task: Task, data: DataModule, zoom: float) -> Iterator[tuple[Tensor, Target, Found]]:
    """Yield every validation image, its target, and a model's prediction for the image enlarged by `zoom`."""
    device = _device(model)
    for images, targets in data.val_dataloader():
        found = model.predict([_enlarged(image.to(device), zoom) for image in images])
        for image, target, each in zip(images, targets, found, strict=True):
            yield image, target, task.in_image(each, image, zoom)


def examples(data: DataModule) -> Iterator[tuple[Tensor, Target]]:
    """Yield every validation image and its target."""
    for images, targets in data.val_dataloader():
        yield from zip(images, targets, strict=True)


def evaluate_dense(
    model: Any,
    task: str,
    data: DataModule,
    *,
    crop: int | None = None,
    scales: Sequence[float] = (1.0,),
    flip: bool = False,
) -> dict[str, Any]:
    """Measure a trained model on the validation images of its data, with 95 % bootstrap intervals over images.

    Args:
        model: The trained model.
        task: "segment" or "detect".
        data: Its data.
        crop: Side of the windows of sliding-window inference, in pixels; the stride is two thirds of it.
        scales: Input scales of multi-scale test-time augmentation.
        flip: Whether to use horizontal-flip test-time augmentation.

    Returns:
        `miou`, or `ap` and `ap50`; `interval` of the first; `images`, the number of images.
    """
    dense_task = next(each for each in (Segment(), Detect()) if each.name == task)
    predictor = model
    if crop is not None:
        predictor = SlidingWindows(predictor, crop=crop, stride=max(1, 2 * crop // 3))
    if flip or tuple(scales) != (1.0,):
        predictor = MultiScale(predictor, scales=scales, flip=flip)
    records = [dense_task.record(found, target) for _, target, found in predictions(predictor, dense_task, data, 1.0)]
    ones = np.ones((1, len(records)))
    measured = draw([dense_task.measure_of(records)], len(records))
    at_half = {} if task == "segment" else {"ap50": float(average_precisions(records, ones, iou=0.5)[0])}
    name = dense_task.curve.removeprefix("val_")
    return {name: measured.mean, **at_half, "interval": measured.interval()[1:], "images": len(records)}


def _device(model: Any) -> torch.device:
    """Return the device of a model, or of the model that it wraps."""
    while not hasattr(model, "parameters"):
        model = model.model
    return next(model.parameters()).device


def _enlarged(image: Tensor, zoom: float) -> Tensor:
    if zoom == 1:
        return image
    size = [_zoomed(side, zoom) for side in image.shape[1:]]
    return functional.interpolate(image[None], size, mode="bilinear", antialias=True)[0]


def _zoomed(side: int, zoom: float) -> int:
    return max(1, round(zoom * side))
