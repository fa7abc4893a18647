"""COCO's average precision, from matches stored per image, so that bootstrap samples of images need no new matching."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

Record = dict[str, Any]

THRESHOLDS = np.linspace(0.5, 0.95, 10)  # of IoU
RECALLS = np.linspace(0.0, 1.0, 101)
MAX_DETECTIONS = 100  # per image


def match(predicted: Sequence[Mapping[str, Tensor]], targets: Sequence[Mapping[str, Tensor]]) -> list[Record]:
    """Match the detections of every image with its objects, by pycocotools.

    Args:
        predicted: For each image `boxes` `(n, 4)` xyxy, `scores`, `labels` `(n,)`.
        targets: For each image `boxes`, `labels`; `crowd` `(n,)` bool if there are crowds.

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
    return [_match_image(*pair) for pair in zip(predicted, targets, strict=True)]


def _match_image(prediction: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> Record:
    """Match one image; `COCOeval` is given its annotations directly, without the index of a data set."""
    from pycocotools.cocoeval import COCOeval

    evaluation = COCOeval(iouType="bbox")
    evaluation.params.maxDets = [MAX_DETECTIONS]
    for annotations, each in ((evaluation._gts, target), (evaluation._dts, prediction)):
        for number, annotation in enumerate(_annotations(each), start=1):  # id 0 means unmatched
            annotations[0, annotation["category_id"]].append({**annotation, "id": number})
    classes = {}
    for key in sorted({*evaluation._gts, *evaluation._dts}):
        evaluation.ious[key] = evaluation.computeIoU(*key)
        matches = evaluation.evaluateImg(*key, [0, 1e10], MAX_DETECTIONS)
        classes[str(key[1])] = {
            "scores": [float(score) for score in matches["dtScores"]],
            "matched": _bits(matches["dtMatches"] > 0),
            "ignored": _bits(matches["dtIgnore"] > 0),
            "truths": int(np.sum(np.equal(matches["gtIgnore"], 0))),
        }
    return {"classes": classes}


def average_precisions(records: Sequence[Record], weights: np.ndarray, *, iou: float | None = None) -> np.ndarray:
    """Compute COCO's average precision: the mean of precision over 101 recalls, IoU .50 to .95, and classes.

    Args:
        records: Result of `match`.
        weights: Weight of each image in each bootstrap sample, `(draws, images)`; an integer weight n equals n copies
            of the image.
        iou: A single IoU threshold, such as 0.5, instead of the mean over all.

    Returns:
        `(draws,)`, from 0 to 1, the mean over classes with objects; nan if there are no objects.

    References:
        Lin et al., Microsoft COCO, and `COCOeval.accumulate` of its code.
    """
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
    """Compute the mean over recalls of the highest precision at that recall or a higher one, `(draws,)`."""
    # (draws, hits); hits suffice, because precision decreases between them
    precision = true_positives / (detections + np.spacing(1))
    highest = np.maximum.accumulate(precision[:, ::-1], axis=1)[:, ::-1]
    highest = np.pad(highest, ((0, 0), (0, 1)))  # 0 at recalls that are not reached
    recall = true_positives / np.where(truths > 0, truths, 1.0)[:, None]
    return np.array([row[np.searchsorted(at, RECALLS)].mean() for row, at in zip(highest, recall, strict=True)])


def _row(iou: float) -> list[int]:
    rows = np.flatnonzero(np.isclose(THRESHOLDS, iou))
    return [int(rows[0])]


def _bits(flags: np.ndarray) -> list[int]:
    """Encode flags `(thresholds, detections)` as one integer per detection."""
    return (flags.T @ (1 << np.arange(len(flags)))).tolist()


def _annotations(each: Mapping[str, Tensor]) -> list[dict[str, Any]]:
    """Convert the objects or detections of an image to COCO's annotations."""
    boxes, labels = each["boxes"].double().cpu(), each["labels"].tolist()
    corners, extents = boxes[:, :2], boxes[:, 2:] - boxes[:, :2]
    columns = {
        "category_id": labels,
        "bbox": torch.cat([corners, extents], dim=1).tolist(),
        "area": extents.prod(dim=1).tolist(),
        "score": each["scores"].tolist() if "scores" in each else [None] * len(labels),
        "iscrowd": each["crowd"].int().tolist() if "crowd" in each else [0] * len(labels),
    }
    columns["ignore"] = columns["iscrowd"]
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
