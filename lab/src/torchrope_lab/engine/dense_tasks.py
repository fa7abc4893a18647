"""Semantic segmentation and object detection: predictions on a data set, per-image records and measures."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchrope_lab.data.boxes_and_maps import IGNORED
from torchrope_lab.data.datamodule import DataModule
from torchrope_lab.engine.drawings import Overlay, box_overlay, map_overlay
from torchrope_lab.heads.average_precision import average_precisions, match
from torchrope_lab.heads.prediction import MultiScale, SlidingWindows, per_image_counts, resized
from torchrope_lab.heads.prediction import mean_iou as mean_iou_of_counts
from torchrope_lab.statistics import draw

Target = Mapping[str, Any]
Prediction = Mapping[str, Tensor]
Record = dict[str, Any]
"""Per-image statistics from which a measure is computed, stored as JSON."""
Measure = Callable[[np.ndarray], np.ndarray]
"""A measure of weighted images, `(draws, images)` to `(draws,)`."""

SCORE_THRESHOLD = 0.5
"""Score threshold of boxes that are rendered."""


@dataclass(frozen=True)
class Task:
    """A dense prediction task and its measure. It can be pickled."""

    name: str  # in data sets and heads
    title: str
    measure: str  # its displayed name
    head: str  # the default
    curve: str  # the measure's name in a learning curve
    classes: str  # the attribute of the data with the names of the classes
    about: str  # definition of the measure, in a sentence
    shown: str  # explanation of its pictures, in a sentence
    truth: Callable[[Target], Prediction]  # maps a target to a prediction
    in_image: Callable[[Prediction, Tensor, Tensor, Target], Prediction]  # from an enlarged image to the target
    record: Callable[[Prediction, Target], Record]  # computes what is stored of a prediction
    measure_of: Callable[[Sequence[Record]], Measure]  # maps records of all images to a function of weights
    overlay: Callable[[Prediction, Tensor, DataModule], Overlay]  # draws it over an image


def count_pixels(prediction: Prediction, target: Target) -> Record:
    """Count intersection, predicted and true pixels of each class in a map; pixels of true class 255 are ignored."""
    predicted, truth = prediction["map"], target["map"]
    valid = truth != IGNORED
    classes = int(torch.cat([predicted[valid], truth[valid]]).max()) + 1 if valid.any() else 0
    counts = per_image_counts(predicted, truth, classes).T.tolist()
    return {str(kind): [both, named, true] for kind, (both, named, true) in enumerate(counts) if named + true}


def mean_iou(records: Sequence[Record]) -> Measure:
    """Return a function of image weights that computes mIoU from `count_pixels`; classes in no image are ignored."""
    index = {kind: at for at, kind in enumerate(sorted({kind for record in records for kind in record}))}
    counts = torch.zeros(len(records), 3, len(index), dtype=torch.float64)
    for image, record in enumerate(records):
        for kind, pixels in record.items():
            counts[image, :, index[kind]] = torch.tensor(pixels, dtype=torch.float64)
    return lambda weights: mean_iou_of_counts(torch.tensordot(torch.tensor(weights).double(), counts, dims=1)).numpy()


def _true_map(target: Target) -> Prediction:
    return {"map": target["map"]}


def _map_in_image(prediction: Prediction, enlarged: Tensor, image: Tensor, target: Target) -> Prediction:
    """Return the most probable class of each pixel, from resampled logits."""
    return {"map": resized(prediction["logits"], target["map"].shape).argmax(dim=0).cpu()}


def _map_overlay(found: Prediction, image: Tensor, data: DataModule) -> Overlay:
    """Draw a map without the background."""
    background = (index for index, name in enumerate(data.map_classes) if name == "background")
    return map_overlay(found["map"], {IGNORED, *background})


def _true_boxes(target: Target) -> Prediction:
    """Return the boxes that are not crowds, with score 1."""
    labels = target["labels"]
    one = ~target["crowd"] if "crowd" in target else torch.ones_like(labels, dtype=torch.bool)
    return {"boxes": target["boxes"][one], "labels": labels[one], "scores": torch.ones(int(one.sum()))}


def _boxes_in_image(prediction: Prediction, enlarged: Tensor, image: Tensor, target: Target) -> Prediction:
    """Scale boxes back."""
    height, width = (large / side for large, side in zip(enlarged.shape[1:], image.shape[1:], strict=True))
    here = {name: prediction[name].cpu() for name in ("boxes", "labels", "scores")}
    return {**here, "boxes": here["boxes"].float() / torch.tensor([width, height, width, height])}


def _match_boxes(prediction: Prediction, target: Target) -> Record:
    return match([prediction], [target])[0]


def _precision_of(records: Sequence[Record]) -> Measure:
    return partial(average_precisions, records)


def _box_overlay(found: Prediction, image: Tensor, data: DataModule) -> Overlay:
    """Draw the boxes above the score threshold, and all boxes of the ground truth."""
    if "scores" not in found:
        return box_overlay(image.shape[1:], found["boxes"], found["labels"])
    sure = found["scores"] >= SCORE_THRESHOLD
    return box_overlay(image.shape[1:], *(found[key][sure] for key in ("boxes", "labels", "scores")))


SEGMENT = Task(
    name="segment",
    title="Segmentation",
    measure="mIoU",
    head="upernet",
    curve="val_miou",
    classes="map_classes",
    about="mIoU is the mean over classes, a background among them, of intersection over union of pixels of all images "
    "together.",
    shown="Colours are classes; a background has none.",
    truth=_true_map,
    in_image=_map_in_image,
    record=count_pixels,
    measure_of=mean_iou,
    overlay=_map_overlay,
)
DETECT = Task(
    name="detect",
    title="Detection",
    measure="box AP",
    head="dino",
    curve="val_ap",
    classes="classes",
    about="Box AP is COCO's: the mean over classes and ten overlaps, 0.5 to 0.95, with at most 100 boxes per image.",
    shown=f"Colours are classes. Boxes of score {SCORE_THRESHOLD:g} or more, with their score in percent.",
    truth=_true_boxes,
    in_image=_boxes_in_image,
    record=_match_boxes,
    measure_of=_precision_of,
    overlay=_box_overlay,
)
TASKS = (SEGMENT, DETECT)


@torch.no_grad()
def predictions(model: Any, task: Task, data: DataModule, zoom: float) -> Iterator[tuple[Tensor, Target, Prediction]]:
    """Yield every validation image, its target, and a model's prediction for the image enlarged by `zoom`."""
    device = _device(model)
    for images, targets in data.val_dataloader():
        sizes = [[max(1, round(zoom * side)) for side in image.shape[1:]] for image in images]
        enlarged = [resized(image.to(device), size, antialias=True) for image, size in zip(images, sizes, strict=True)]
        predicted = model.predict(enlarged)
        for image, target, large, prediction in zip(images, targets, enlarged, predicted, strict=True):
            yield image, target, task.in_image(prediction, large, image, target)


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
    """Return `miou`, or `ap` and `ap50`, on validation `images`, with the 95 % bootstrap `interval` of the first."""
    # `crop` is the side of sliding windows in pixels, with a stride of two thirds of it.
    # `scales` and `flip` are those of multi-scale and horizontal-flip test-time augmentation.
    dense_task = next(known for known in TASKS if known.name == task)
    predictor = model
    if crop is not None:
        predictor = SlidingWindows(predictor, crop=crop, stride=max(1, 2 * crop // 3))
    if flip or tuple(scales) != (1.0,):
        predictor = MultiScale(predictor, scales=scales, flip=flip)
    records = [
        dense_task.record(prediction, target) for _, target, prediction in predictions(predictor, dense_task, data, 1.0)
    ]
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
