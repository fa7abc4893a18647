"""Average precision of detections, kept image by image, so that other draws of images need no other matching."""

import contextlib
import io
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from torch import Tensor

Record = dict[str, Any]

THRESHOLDS = np.linspace(0.5, 0.95, 10)  # of overlap
RECALLS = np.linspace(0.0, 1.0, 101)
MOST = 100  # detections of an image that count


def match(
    predicted: Sequence[Mapping[str, Tensor]],
    targets: Sequence[Mapping[str, Tensor]],
    *,
    kind: Literal["boxes", "masks"] = "boxes",
) -> list[Record]:
    """Match the detections of every image with its objects, by pycocotools.

    Args:
        predicted: Of every image `boxes` `(n, 4)` xyxy, `scores`, `labels` `(n,)`, for masks `masks` `(n, h, w)` too.
        targets: Of every image `boxes`, `labels`, `crowd` `(n,)` where some are, for masks `masks` too.
        kind: What must overlap.

    Returns:
        One plain dict for each image, which JSON can keep: `{"classes": {label: {"scores", "matched", "ignored",
        "truths"}}}`. Detections come by falling score; bit t of `matched` says whether one meets an object at overlap
        `THRESHOLDS[t]`, bit t of `ignored` whether it does not count there, as inside a crowd; `truths` counts objects.

    Example:
        >>> import torch
        >>> there = {"boxes": torch.tensor([[0.0, 0.0, 8.0, 8.0]]), "labels": torch.tensor([3])}
        >>> match([{**there, "scores": torch.tensor([0.5])}], [there])
        [{'classes': {'3': {'scores': [0.5], 'matched': [1023], 'ignored': [0], 'truths': 1}}}]
    """
    if len(predicted) != len(targets):
        raise ValueError(f"predictions must be as many as targets, got {len(predicted)} and {len(targets)}")
    from pycocotools.cocoeval import COCOeval

    truths = [_annotations(target, kind) for target in targets]
    found = [_annotations(each, kind) for each in predicted]
    labels = sorted({each["category_id"] for image in (*truths, *found) for each in image})
    records: list[Record] = [{"classes": {}} for _ in targets]
    if not labels:
        return records
    with contextlib.redirect_stdout(io.StringIO()):  # it prints
        evaluation = COCOeval(_index(truths, labels), _index(found, labels), "bbox" if kind == "boxes" else "segm")
        evaluation.params.areaRng, evaluation.params.areaRngLbl = [[0, 1e10]], ["all"]
        evaluation.params.maxDets = [MOST]
        evaluation.evaluate()
    for image in filter(None, evaluation.evalImgs):
        records[image["image_id"]]["classes"][str(image["category_id"])] = {
            "scores": [float(score) for score in image["dtScores"]],
            "matched": _bits(image["dtMatches"] > 0),
            "ignored": _bits(image["dtIgnore"] > 0),
            "truths": int(np.sum(np.equal(image["gtIgnore"], 0))),
        }
    return records


def average_precision(
    records: Sequence[Record], weights: Sequence[float] | np.ndarray | None = None, *, iou: float | None = None
) -> float:
    """COCO's average precision: precision at 101 recalls, averaged over them, overlaps .50 to .95, and classes.

    Args:
        records: What `match` returns.
        weights: How often each image counts, 1 by default; whole numbers are as so many copies of it.
        iou: One overlap alone, such as 0.5.

    Returns:
        From 0 to 1; of classes with objects alone, and nan where none has any.

    Raises:
        ValueError: other weights than images, or an overlap that is none of `THRESHOLDS`.

    References:
        Lin et al., Microsoft COCO, and `COCOeval.accumulate` of its code.
    """
    given = np.ones(len(records)) if weights is None else np.asarray(weights, dtype=float)
    return float(average_precisions(records, given[None], iou=iou)[0])


def average_precisions(records: Sequence[Record], weights: np.ndarray, *, iou: float | None = None) -> np.ndarray:
    """`average_precision` of many draws of images at once.

    Args:
        records: What `match` returns.
        weights: How often each image counts in each draw, `(draws, images)`.
        iou: One overlap alone.

    Returns:
        `(draws,)`.
    """
    if weights.ndim != 2 or weights.shape[1] != len(records):
        raise ValueError(f"weights must be one for each of {len(records)} images, got {weights.shape[1:]}")
    rows = list(range(len(THRESHOLDS))) if iou is None else _row(iou)
    labels = sorted({label for record in records for label in record["classes"]})
    if not labels:
        return np.full(len(weights), np.nan)
    of_classes = np.stack([_of_class(records, label, weights, rows) for label in labels])
    there = ~np.isnan(of_classes)
    with np.errstate(invalid="ignore"):
        return np.where(there, of_classes, 0.0).sum(axis=0) / there.sum(axis=0)


def _of_class(records: Sequence[Record], label: str, weights: np.ndarray, rows: list[int]) -> np.ndarray:
    """Average precision of one class in each draw, nan where none of its objects is drawn."""
    having = [(index, record["classes"][label]) for index, record in enumerate(records) if label in record["classes"]]
    images = np.array([index for index, _ in having])
    truths = weights[:, images] @ np.array([each["truths"] for _, each in having], dtype=float)
    scores, matched, ignored = (
        np.concatenate([np.asarray(each[name], dtype=kind) for _, each in having])
        for name, kind in (("scores", float), ("matched", int), ("ignored", int))
    )
    order = np.argsort(-scores, kind="stable")
    of_image = np.repeat(images, [len(each["scores"]) for _, each in having])[order]
    matched, ignored = matched[order], ignored[order]
    totals = np.zeros(len(weights))
    counted, drawn, seen = None, np.empty(0), np.empty(0)
    for row in rows:
        counts = (ignored >> row & 1) == 0
        if counted is None or not np.array_equal(counts, counted):
            counted, drawn = counts, weights[:, of_image[counts]]
            seen = drawn.cumsum(axis=1)
        hits = (matched[counts] >> row & 1) == 1
        totals += _mean_precision(drawn[:, hits].cumsum(axis=1), seen[:, hits], truths)
    return np.where(truths > 0, totals / len(rows), np.nan)


def _mean_precision(right: np.ndarray, seen: np.ndarray, truths: np.ndarray) -> np.ndarray:
    """Mean over recalls of the highest precision at each or beyond, `(draws,)`.

    Args:
        right: Hits up to each hit, `(draws, hits)`; precision between hits falls, so that they suffice.
        seen: Detections up to each hit, `(draws, hits)`.
        truths: Objects, `(draws,)`.
    """
    precision = right / (seen + np.spacing(1))
    highest = np.maximum.accumulate(precision[:, ::-1], axis=1)[:, ::-1]
    highest = np.pad(highest, ((0, 0), (0, 1)))  # 0 at recalls that are not reached
    recall = right / np.where(truths > 0, truths, 1.0)[:, None]
    return np.array([row[np.searchsorted(at, RECALLS)].mean() for row, at in zip(highest, recall, strict=True)])


def _row(iou: float) -> list[int]:
    near = np.flatnonzero(np.isclose(THRESHOLDS, iou))
    if not len(near):
        raise ValueError(f"iou must be one of {', '.join(f'{each:.2f}' for each in THRESHOLDS)}, got {iou}")
    return [int(near[0])]


def _bits(flags: np.ndarray) -> list[int]:
    """Flags `(thresholds, detections)` as one number for each detection."""
    return (flags.T @ (1 << np.arange(len(flags)))).tolist()


def _annotations(each: Mapping[str, Tensor], kind: str) -> list[dict[str, Any]]:
    """The objects or detections of an image as COCO's files have them."""
    boxes, labels = each["boxes"].double().cpu().numpy(), each["labels"].tolist()
    scores = each["scores"].tolist() if "scores" in each else [None] * len(labels)
    crowd = each["crowd"].tolist() if "crowd" in each else [False] * len(labels)
    outlines = _outlines(each["masks"]) if kind == "masks" else [{}] * len(labels)
    return [
        {
            "category_id": label,
            "bbox": [left, top, right - left, bottom - top],
            "area": (right - left) * (bottom - top),
            "iscrowd": int(is_crowd),
            "score": score,
            **outline,
        }
        for (left, top, right, bottom), label, score, is_crowd, outline in zip(
            boxes.tolist(), labels, scores, crowd, outlines, strict=True
        )
    ]


def _outlines(masks: Tensor) -> list[dict[str, Any]]:
    """Masks `(n, h, w)` run-length encoded, with their areas."""
    from pycocotools import mask as coco

    encoded = [coco.encode(np.asfortranarray(mask, dtype=np.uint8)) for mask in masks.cpu().numpy()]
    return [{"segmentation": each, "area": int(coco.area(each))} for each in encoded]


def _index(images: list[list[dict[str, Any]]], labels: list[int]) -> Any:
    """Annotations of images 0 to n - 1 as pycocotools looks them up; they count from 1, since 0 means unmatched."""
    from pycocotools.coco import COCO

    listed = [{**each, "image_id": index} for index, image in enumerate(images) for each in image]
    coco = COCO()
    coco.dataset = {
        "images": [{"id": index, "height": 0, "width": 0} for index in range(len(images))],  # sizes are for polygons
        "categories": [{"id": label} for label in labels],
        "annotations": [{**each, "id": number} for number, each in enumerate(listed, start=1)],
    }
    coco.createIndex()
    return coco
