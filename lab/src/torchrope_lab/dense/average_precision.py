"""COCO's average precision, from matches stored per image, so that bootstrap samples of images need no new matching."""

import contextlib
import io
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from torch import Tensor

Record = dict[str, Any]

THRESHOLDS = np.linspace(0.5, 0.95, 10)  # of IoU
RECALLS = np.linspace(0.0, 1.0, 101)
MAX_DETECTIONS = 100  # per image


def match(
    predicted: Sequence[Mapping[str, Tensor]],
    targets: Sequence[Mapping[str, Tensor]],
    *,
    kind: Literal["boxes", "masks"] = "boxes",
) -> list[Record]:
    """Match the detections of every image with its objects, by pycocotools.

    Args:
        predicted: For each image `boxes` `(n, 4)` xyxy, `scores`, `labels` `(n,)`; `masks` `(n, h, w)` if `kind` is
            "masks".
        targets: For each image `boxes`, `labels`; `crowd` `(n,)` bool if there are crowds; `masks` if `kind` is
            "masks".
        kind: Whether the IoU is that of boxes or of masks.

    Returns:
        One dict per image, which JSON can store: `{"classes": {label: {"scores", "matched", "ignored", "truths"}}}`.
        Detections are in order of decreasing score; bit t of `matched` is 1 if the detection matches an object at IoU
        `THRESHOLDS[t]`, bit t of `ignored` if it does not count there, for example inside a crowd; `truths` is the
        number of objects.

    Example:
        >>> import torch
        >>> target = {"boxes": torch.tensor([[0.0, 0.0, 8.0, 8.0]]), "labels": torch.tensor([3])}
        >>> match([{**target, "scores": torch.tensor([0.5])}], [target])
        [{'classes': {'3': {'scores': [0.5], 'matched': [1023], 'ignored': [0], 'truths': 1}}}]
    """
    if len(predicted) != len(targets):
        raise ValueError(f"predictions must be as many as targets, got {len(predicted)} and {len(targets)}")
    from pycocotools.cocoeval import COCOeval

    truths = [_annotations(target, kind) for target in targets]
    detections = [_annotations(prediction, kind) for prediction in predicted]
    labels = sorted({each["category_id"] for image in (*truths, *detections) for each in image})
    records: list[Record] = [{"classes": {}} for _ in targets]
    if not labels:
        return records
    with contextlib.redirect_stdout(io.StringIO()):  # pycocotools prints its progress
        evaluation = COCOeval(_index(truths, labels), _index(detections, labels), "bbox" if kind == "boxes" else "segm")
        evaluation.params.areaRng, evaluation.params.areaRngLbl = [[0, 1e10]], ["all"]
        evaluation.params.maxDets = [MAX_DETECTIONS]
        evaluation.evaluate()
    for image in filter(None, evaluation.evalImgs):
        records[image["image_id"]]["classes"][str(image["category_id"])] = {
            "scores": [float(score) for score in image["dtScores"]],
            "matched": _bits(image["dtMatches"] > 0),
            "ignored": _bits(image["dtIgnore"] > 0),
            "truths": int(np.sum(np.equal(image["gtIgnore"], 0))),
        }
    return records


def average_precisions(records: Sequence[Record], weights: np.ndarray, *, iou: float | None = None) -> np.ndarray:
    """Compute COCO's average precision: the mean of precision over 101 recalls, IoU .50 to .95, and classes.

    Args:
        records: Result of `match`.
        weights: Weight of each image in each bootstrap sample, `(draws, images)`; an integer weight n equals n copies
            of the image.
        iou: A single IoU threshold, such as 0.5, instead of the mean over all.

    Returns:
        `(draws,)`, from 0 to 1, the mean over classes with objects; nan if there are no objects.

    Raises:
        ValueError: the number of weights differs from that of images, or `iou` is not one of `THRESHOLDS`.

    References:
        Lin et al., Microsoft COCO, and `COCOeval.accumulate` of its code.
    """
    if weights.ndim != 2 or weights.shape[1] != len(records):
        raise ValueError(f"weights must be one for each of {len(records)} images, got {weights.shape[1:]}")
    rows = list(range(len(THRESHOLDS))) if iou is None else _row(iou)
    labels = sorted({label for record in records for label in record["classes"]})
    if not labels:
        return np.full(len(weights), np.nan)
    per_class = np.stack([_of_class(records, label, weights, rows) for label in labels])
    has_objects = ~np.isnan(per_class)
    with np.errstate(invalid="ignore"):
        return np.where(has_objects, per_class, 0.0).sum(axis=0) / has_objects.sum(axis=0)


def _of_class(records: Sequence[Record], label: str, weights: np.ndarray, rows: list[int]) -> np.ndarray:
    """Compute the average precision of one class in each draw; nan if the draw has no objects of the class."""
    entries = [(index, record["classes"][label]) for index, record in enumerate(records) if label in record["classes"]]
    images = np.array([index for index, _ in entries])
    truths = weights[:, images] @ np.array([each["truths"] for _, each in entries], dtype=float)
    scores, matched, ignored = (
        np.concatenate([np.asarray(each[name], dtype=kind) for _, each in entries])
        for name, kind in (("scores", float), ("matched", int), ("ignored", int))
    )
    order = np.argsort(-scores, kind="stable")
    image_of_detection = np.repeat(images, [len(each["scores"]) for _, each in entries])[order]
    matched, ignored = matched[order], ignored[order]
    totals = np.zeros(len(weights))
    last_counted, drawn, detections = None, np.empty(0), np.empty(0)
    for row in rows:
        counted = (ignored >> row & 1) == 0
        if last_counted is None or not np.array_equal(counted, last_counted):
            last_counted, drawn = counted, weights[:, image_of_detection[counted]]
            detections = drawn.cumsum(axis=1)
        hits = (matched[counted] >> row & 1) == 1
        totals += _mean_precision(drawn[:, hits].cumsum(axis=1), detections[:, hits], truths)
    return np.where(truths > 0, totals / len(rows), np.nan)


def _mean_precision(true_positives: np.ndarray, detections: np.ndarray, truths: np.ndarray) -> np.ndarray:
    """Compute the mean over recalls of the highest precision at that recall or a higher one, `(draws,)`.

    Args:
        true_positives: Hits up to each hit, `(draws, hits)`; hits suffice, because precision decreases between them.
        detections: Detections up to each hit, `(draws, hits)`.
        truths: Number of objects, `(draws,)`.
    """
    precision = true_positives / (detections + np.spacing(1))
    highest = np.maximum.accumulate(precision[:, ::-1], axis=1)[:, ::-1]
    highest = np.pad(highest, ((0, 0), (0, 1)))  # 0 at recalls that are not reached
    recall = true_positives / np.where(truths > 0, truths, 1.0)[:, None]
    return np.array([row[np.searchsorted(at, RECALLS)].mean() for row, at in zip(highest, recall, strict=True)])


def _row(iou: float) -> list[int]:
    rows = np.flatnonzero(np.isclose(THRESHOLDS, iou))
    if not len(rows):
        raise ValueError(f"iou must be one of {', '.join(f'{each:.2f}' for each in THRESHOLDS)}, got {iou}")
    return [int(rows[0])]


def _bits(flags: np.ndarray) -> list[int]:
    """Encode flags `(thresholds, detections)` as one integer per detection."""
    return (flags.T @ (1 << np.arange(len(flags)))).tolist()


def _annotations(each: Mapping[str, Tensor], kind: str) -> list[dict[str, Any]]:
    """Convert the objects or detections of an image to COCO's annotations."""
    boxes, labels = each["boxes"].double().cpu().numpy(), each["labels"].tolist()
    scores = each["scores"].tolist() if "scores" in each else [None] * len(labels)
    crowd = each["crowd"].tolist() if "crowd" in each else [False] * len(labels)
    encoded_masks = _encode_masks(each["masks"]) if kind == "masks" else [{}] * len(labels)
    return [
        {
            "category_id": label,
            "bbox": [left, top, right - left, bottom - top],
            "area": (right - left) * (bottom - top),
            "iscrowd": int(is_crowd),
            "score": score,
            **mask,
        }
        for (left, top, right, bottom), label, score, is_crowd, mask in zip(
            boxes.tolist(), labels, scores, crowd, encoded_masks, strict=True
        )
    ]


def _encode_masks(masks: Tensor) -> list[dict[str, Any]]:
    """Run-length encode masks `(n, h, w)`, and compute their areas."""
    from pycocotools import mask as coco

    encoded = [coco.encode(np.asfortranarray(mask, dtype=np.uint8)) for mask in masks.cpu().numpy()]
    return [{"segmentation": each, "area": int(coco.area(each))} for each in encoded]


def _index(images: list[list[dict[str, Any]]], labels: list[int]) -> Any:
    """Build pycocotools' index of the annotations of images 0 to n - 1; ids start at 1, because 0 means unmatched."""
    from pycocotools.coco import COCO

    annotations = [{**each, "image_id": index} for index, image in enumerate(images) for each in image]
    coco = COCO()
    coco.dataset = {
        "images": [{"id": index, "height": 0, "width": 0} for index in range(len(images))],  # only polygons need sizes
        "categories": [{"id": label} for label in labels],
        "annotations": [{**each, "id": number} for number, each in enumerate(annotations, start=1)],
    }
    coco.createIndex()
    return coco
