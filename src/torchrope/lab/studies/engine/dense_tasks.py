"""Segmentation and detection: what a model predicts for the images of a set, what is kept of it, and its measure."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from torchrope.lab.data.datamodule import DataModule
from torchrope.lab.data.dense import IGNORED
from torchrope.lab.dense.average_precision import average_precisions, match
from torchrope.lab.dense.prediction import MultiScale, SlidingWindows
from torchrope.lab.results import Panel
from torchrope.lab.statistics import draw
from torchrope.lab.studies.engine.dense_estimates import Weigh, count_pixels, mean_iou
from torchrope.lab.studies.engine.pictures import box_panel, map_panel

Target = Mapping[str, Any]
Found = Mapping[str, Tensor]
Record = dict[str, Any]
"""Of one image, what its part in the measure is computed from; JSON keeps it."""

SURE = 0.5
"""Least score of a box that is drawn."""


class Task(ABC):
    """What is predicted, and how it is measured.

    Attributes:
        name: As data and heads call it.
        title: For people.
        measure: For people.
        head: What reads the backbone where the user names no head for this.
        curve: The measure's name in a learning curve.
        about: What the measure is, in a sentence.
        shown: How its pictures are read, in a sentence.
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
        """Names of what is predicted."""

    @abstractmethod
    def truth(self, target: Target) -> Found:
        """The truth as a prediction."""

    @abstractmethod
    def in_image(self, found: Found, image: Tensor, zoom: float) -> Found:
        """What was predicted for an image, made `zoom` times as large, in the image's own pixels."""

    @abstractmethod
    def record(self, found: Found, target: Target) -> Record:
        """What is kept of an image."""

    @abstractmethod
    def weigh(self, records: Sequence[Record]) -> Weigh:
        """The measure of images that count more or less."""

    @abstractmethod
    def panel(self, name: str, image: Tensor, found: Found, data: DataModule) -> Panel:
        """What is laid over an image."""


class Segment(Task):
    """The class of every pixel."""

    name = "segment"
    title = "Segmentation"
    measure = "mIoU"
    head = "upernet"
    curve = "val_miou"
    about = (
        "mIoU is the mean over classes, a background among them, of intersection over union of pixels of all images "
        "together."
    )
    shown = "Colours and names are classes; a background has none."

    def classes(self, data: DataModule) -> Sequence[str]:
        """What the numbers of a map mean."""
        return data.map_classes

    def truth(self, target: Target) -> Found:
        """The map."""
        return {"map": target["map"]}

    def in_image(self, found: Found, image: Tensor, zoom: float) -> Found:
        """The likeliest class of each pixel, of logits resampled."""
        logits = found["logits"].float()
        if zoom != 1:
            logits = functional.interpolate(logits[None], image.shape[1:], mode="bilinear")[0]
        return {"map": logits.argmax(dim=0).cpu()}

    def record(self, found: Found, target: Target) -> Record:
        """Pixels of each class."""
        return count_pixels(found["map"], target["map"])

    def weigh(self, records: Sequence[Record]) -> Weigh:
        """mIoU."""
        return mean_iou(records)

    def panel(self, name: str, image: Tensor, found: Found, data: DataModule) -> Panel:
        """A map."""
        background = (kind for kind, each in enumerate(self.classes(data)) if each == "background")
        return map_panel(name, found["map"], {IGNORED, *background})


class Detect(Task):
    """The box and the class of every object."""

    name = "detect"
    title = "Detection"
    measure = "box AP"
    head = "faster-rcnn"
    curve = "val_ap"
    about = "Box AP is COCO's: the mean over classes and ten overlaps, 0.5 to 0.95, with 100 boxes an image at most."
    shown = f"Boxes of score {SURE:g} or more, their score in percent behind the class."

    def classes(self, data: DataModule) -> Sequence[str]:
        """What the labels of boxes mean."""
        return data.classes

    def truth(self, target: Target) -> Found:
        """The boxes that are no crowd, each certain."""
        labels = target["labels"]
        one = ~target["crowd"] if "crowd" in target else torch.ones_like(labels, dtype=torch.bool)
        return {"boxes": target["boxes"][one], "labels": labels[one], "scores": torch.ones(int(one.sum()))}

    def in_image(self, found: Found, image: Tensor, zoom: float) -> Found:
        """Boxes made smaller; masks are left out."""
        height, width = (_zoomed(side, zoom) / side for side in image.shape[1:])
        here = {name: found[name].cpu() for name in ("boxes", "labels", "scores")}
        return {**here, "boxes": here["boxes"].float() / torch.tensor([width, height, width, height])}

    def record(self, found: Found, target: Target) -> Record:
        """Detections matched with objects."""
        return match([found], [target])[0]

    def weigh(self, records: Sequence[Record]) -> Weigh:
        """AP."""
        return partial(average_precisions, records)

    def panel(self, name: str, image: Tensor, found: Found, data: DataModule) -> Panel:
        """Boxes that are sure."""
        sure = found["scores"] >= SURE
        return box_panel(name, image.shape[1:], *(found[key][sure] for key in ("boxes", "labels", "scores")))


@torch.no_grad()
def predictions(model: Any, task: Task, data: DataModule, zoom: float) -> Iterator[tuple[Tensor, Target, Found]]:
    """Every validation image, its target, and the prediction of a model for it enlarged by `zoom`."""
    device = _device(model)
    for images, targets in data.val_dataloader():
        found = model.predict([_enlarged(image.to(device), zoom) for image in images])
        for image, target, each in zip(images, targets, found, strict=True):
            yield image, target, task.in_image(each, image, zoom)


def examples(data: DataModule) -> Iterator[tuple[Tensor, Target]]:
    """Every validation image, and what is true of it."""
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
        model: Predicts.
        task: "segment" or "detect".
        data: Its data.
        crop: Name pixels in windows of so many pixels, two thirds of one apart.
        scales: Name them at these sizes, and average.
        flip: Name them in the mirrored image too, and average.

    Returns:
        `miou`, or `ap` and `ap50`; `interval` of the first; `images`, their number.
    """
    doing = next(each for each in (Segment(), Detect()) if each.name == task)
    asked = model
    if crop is not None:
        asked = SlidingWindows(asked, crop=crop, stride=max(1, 2 * crop // 3))
    if flip or tuple(scales) != (1.0,):
        asked = MultiScale(asked, scales=scales, flip=flip)
    records = [doing.record(found, target) for _, target, found in predictions(asked, doing, data, 1.0)]
    all_of_them = np.ones((1, len(records)))
    measured = draw([doing.weigh(records)], len(records))
    at_half = {} if task == "segment" else {"ap50": float(average_precisions(records, all_of_them, iou=0.5)[0])}
    name = doing.curve.removeprefix("val_")
    return {name: measured.mean, **at_half, "interval": measured.interval()[1:], "images": len(records)}


def _device(model: Any) -> torch.device:
    """Where a model computes, or the one that it asks."""
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
