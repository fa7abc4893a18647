"""Sliding-window inference, multi-scale and flip test-time augmentation, and mean IoU of semantic segmentation.

A model here is any object with `predict(images) -> [{"logits": (classes, height, width)}, ...]`. `SlidingWindows` and
`MultiScale` wrap one and have the same method, so that each can wrap the other.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from torchrope.tensors import wide_dtype
from torchrope_lab.heads import IGNORED
from torchrope_lab.mistakes import Mistake

Predictions = list[dict[str, Tensor]]


class SlidingWindows:
    """Predict overlapping windows and average their logits per pixel; an image smaller than a window is one window.

    Args:
        model: The model that predicts each window.
        crop: Pixels of a window along each axis.
        stride: Pixels from one window to the next; the last window ends at the edge of the image.

    References:
        mmsegmentation's "slide" inference, with crop 512 and stride 341 for ADE20K at 512x512.
    """

    def __init__(self, model: Any, *, crop: int = 512, stride: int = 341) -> None:
        self.model = model
        self.crop = crop
        self.stride = stride

    def predict(self, images: Sequence[Tensor]) -> Predictions:
        """Predict the logits of images `(channels, height, width)`."""
        return [{"logits": self._logits(image)} for image in images]

    def _logits(self, image: Tensor) -> Tensor:
        height, width = image.shape[-2:]
        lefts = window_starts(width, self.crop, self.stride)
        total: Any = 0
        count = image.new_zeros(height, width)
        for top in window_starts(height, self.crop, self.stride):
            windows = [image[:, top : top + self.crop, left : left + self.crop] for left in lefts]
            for left, prediction in zip(lefts, self.model.predict(windows), strict=True):
                high, wide = prediction["logits"].shape[-2:]
                padding = (left, width - left - wide, top, height - top - high)
                total = total + functional.pad(prediction["logits"], padding)
                count[top : top + high, left : left + wide] += 1
        return total / count


class MultiScale:
    """Predict an image at several sizes, also flipped horizontally, and average the class probabilities.

    Args:
        model: The model, for images of any size.
        scales: Factors on the image's size; mmsegmentation's by default.
        flip: Whether to predict the horizontally flipped image at each size too.
    """

    def __init__(
        self, model: Any, *, scales: Sequence[float] = (0.5, 0.75, 1.0, 1.25, 1.5, 1.75), flip: bool = True
    ) -> None:
        self.model = model
        self.scales = tuple(scales)
        self.flip = flip

    def predict(self, images: Sequence[Tensor]) -> Predictions:
        """Predict images `(channels, height, width)`; the softmax of the logits is the mean probability."""
        return [{"logits": self._logits(image)} for image in images]

    def _logits(self, image: Tensor) -> Tensor:
        probabilities = [each for scale in self.scales for each in self._probabilities(image, scale)]
        mean = torch.stack(probabilities).mean(dim=0)
        return mean.clamp_min(torch.finfo(mean.dtype).tiny).log()

    def _probabilities(self, image: Tensor, scale: float) -> list[Tensor]:
        """Predict probabilities `(classes, height, width)` at a scale, and with `flip` also of the flipped image."""
        size = [max(1, round(extent * scale)) for extent in image.shape[-2:]]
        view = resized(image, size, antialias=True)
        views = [view, view.flip(-1)] if self.flip else [view]
        logits = [prediction["logits"] for prediction in self.model.predict(views)]
        if self.flip:
            logits[1] = logits[1].flip(-1)
        return [resized(each, image.shape[-2:]).softmax(dim=0) for each in logits]


def window_starts(size: int, crop: int, stride: int) -> list[int]:
    """Compute the first pixel of each window along an axis; the last window ends at the last pixel."""
    steps = math.ceil(max(0, size - crop) / stride)
    return [min(index * stride, max(0, size - crop)) for index in range(steps + 1)]


def resized(image: Tensor, size: Sequence[int], *, antialias: bool = False) -> Tensor:
    """Resize an image or logits `(channels, height, width)` bilinearly, in at least float32."""
    wide = image.to(wide_dtype(image))
    if tuple(size) == tuple(image.shape[-2:]):
        return wide
    return functional.interpolate(wide[None], tuple(size), mode="bilinear", antialias=antialias)[0]


def per_image_counts(prediction: Tensor, map: Tensor, classes: int) -> Tensor:
    """Count the true positive, predicted and true pixels of each class in one image.

    Args:
        prediction: Logits `(classes, height, width)`, or classes `(height, width)`.
        map: True classes `(height, width)`; pixels of 255 are ignored.
        classes: Number of classes.

    Returns:
        Integers `(3, classes)`: pixels where prediction and truth are the class, where the prediction is, where the
        truth is. The counts of a data set are the sums over its images.

    Raises:
        ValueError: the map holds values that are no classes.
    """
    predicted = prediction.argmax(dim=0) if prediction.ndim == 3 else prediction
    labelled = map != IGNORED
    predicted, true = predicted[labelled].long(), map[labelled].long()
    if true.numel() and not 0 <= int(true.min()) <= int(true.max()) < classes:
        invalid = sorted(set(true.unique().tolist()) - set(range(classes)))
        raise Mistake(f"a map must hold classes below {classes} or {IGNORED}, got {invalid}")
    counted = [predicted[predicted == true], predicted, true]
    return torch.stack([torch.bincount(each, minlength=classes) for each in counted])


def mean_iou(counts: Tensor) -> Tensor:
    """Compute the mean of  hit / (predicted + true - hit)  over the classes that occur in predictions or truth.

    Args:
        counts: `(..., 3, classes)`, the sum of `per_image_counts` over the images of a data set.

    Returns:
        `(...)`, float64; NaN if no class occurs.
    """
    hit, predicted, true = counts.double().unbind(dim=-2)
    return (hit / (predicted + true - hit)).nanmean(dim=-1)
