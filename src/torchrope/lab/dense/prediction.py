"""How a segmentation model is asked: in windows, at several sizes and mirrored; and what its answers hit.

A model here is what has `predict(images) -> [{"logits": (classes, height, width)}, ...]`; so have `SlidingWindows` and
`MultiScale` around one, and so they go around each other.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from torchrope.lab.dense import IGNORED
from torchrope.tensors import wide_dtype

Predictions = list[dict[str, Tensor]]


class SlidingWindows:
    """Predict in windows that overlap, the mean of their logits where they do; an image below a window is one window.

    Args:
        model: Predicts a window.
        crop: Pixels of a window along each axis.
        stride: Pixels from one window to the next; the last one ends where the image ends.

    Raises:
        ValueError: a stride that would leave pixels out.

    References:
        mmsegmentation's "slide" inference, with crop 512 and stride 341 for ADE20K at 512x512.
    """

    def __init__(self, model: Any, *, crop: int = 512, stride: int = 341) -> None:
        if not 1 <= stride <= crop:
            raise ValueError(f"stride must be between 1 and crop = {crop}, got {stride}")
        self.model = model
        self.crop = crop
        self.stride = stride

    def predict(self, images: Sequence[Tensor]) -> Predictions:
        """Predictions of images `(channels, height, width)`."""
        return [{"logits": self._logits(image)} for image in images]

    def _logits(self, image: Tensor) -> Tensor:
        height, width = image.shape[-2:]
        lefts = window_starts(width, self.crop, self.stride)
        total: Any = 0
        count = image.new_zeros(height, width)
        for top in window_starts(height, self.crop, self.stride):
            windows = [image[:, top : top + self.crop, left : left + self.crop] for left in lefts]
            for left, found in zip(lefts, self.model.predict(windows), strict=True):
                high, wide = found["logits"].shape[-2:]
                around = (left, width - left - wide, top, height - top - high)
                total = total + functional.pad(found["logits"], around)
                count[top : top + high, left : left + wide] += 1
        return total / count


class MultiScale:
    """Predict an image at several sizes, and mirrored, and average the probabilities of the classes.

    Args:
        model: Predicts an image of any size.
        scales: Factors on the image's own size; mmsegmentation's by default.
        flip: Whether each size is seen mirrored too.
    """

    def __init__(
        self, model: Any, *, scales: Sequence[float] = (0.5, 0.75, 1.0, 1.25, 1.5, 1.75), flip: bool = True
    ) -> None:
        if not scales or min(scales) <= 0:
            raise ValueError(f"scales must be one or more factors above 0, got {tuple(scales)}")
        self.model = model
        self.scales = tuple(scales)
        self.flip = flip

    def predict(self, images: Sequence[Tensor]) -> Predictions:
        """Predictions of images `(channels, height, width)`; the softmax of the logits is the mean of those seen."""
        return [{"logits": self._logits(image)} for image in images]

    def _logits(self, image: Tensor) -> Tensor:
        shares = [share for scale in self.scales for share in self._shares(image, scale)]
        mean = torch.stack(shares).mean(dim=0)
        return mean.clamp_min(torch.finfo(mean.dtype).tiny).log()

    def _shares(self, image: Tensor, scale: float) -> list[Tensor]:
        """Probabilities `(classes, height, width)` seen at a scale, mirrored too if asked for."""
        size = [max(1, round(extent * scale)) for extent in image.shape[-2:]]
        view = resized(image, size, antialias=True)
        views = [view, view.flip(-1)] if self.flip else [view]
        logits = [found["logits"] for found in self.model.predict(views)]
        if self.flip:
            logits[1] = logits[1].flip(-1)
        return [resized(each, image.shape[-2:]).softmax(dim=0) for each in logits]


def window_starts(size: int, crop: int, stride: int) -> list[int]:
    """Where windows begin along an axis; the last one ends at its end.

    >>> window_starts(1000, 512, 341)
    [0, 341, 488]
    """
    steps = math.ceil(max(0, size - crop) / stride)
    return [min(index * stride, max(0, size - crop)) for index in range(steps + 1)]


def resized(image: Tensor, size: Sequence[int], *, antialias: bool = False) -> Tensor:
    """An image or logits `(channels, height, width)` brought to a height and width bilinearly, float32 at least."""
    wide = image.to(wide_dtype(image))
    if tuple(size) == tuple(image.shape[-2:]):
        return wide
    return functional.interpolate(wide[None], tuple(size), mode="bilinear", antialias=antialias)[0]


def per_image_counts(prediction: Tensor, map: Tensor, classes: int) -> Tensor:
    """Count the pixels of one image by class: hit, predicted, true.

    Args:
        prediction: Logits `(classes, height, width)`, or classes `(height, width)`.
        map: True classes `(height, width)`; pixels of 255 are not looked at.
        classes: Number of classes.

    Returns:
        Integers `(3, classes)`: pixels where prediction and truth are the class, where the prediction is, where the
        truth is. Counts of images add up to those of a set.

    Raises:
        ValueError: other sizes, and true classes that are none.
    """
    found = prediction.argmax(dim=0) if prediction.ndim == 3 else prediction
    if found.shape != map.shape:
        raise ValueError(f"a prediction must have its map's size {tuple(map.shape)}, got {tuple(found.shape)}")
    looked_at = map != IGNORED
    found, true = found[looked_at].long(), map[looked_at].long()
    if true.numel() and not 0 <= int(true.min()) <= int(true.max()) < classes:
        came = sorted(set(true.unique().tolist()) - set(range(classes)))
        raise ValueError(f"a map must hold classes below {classes} or {IGNORED}, got {came}")
    of = [found[found == true], found, true]
    return torch.stack([torch.bincount(each, minlength=classes) for each in of])


def mean_iou(counts: Tensor) -> Tensor:
    """The mean over classes of  hit / (predicted + true - hit),  classes that occur nowhere left out.

    Args:
        counts: `(..., 3, classes)`, as `per_image_counts` gives them, summed over the images of a set.

    Returns:
        `(...)`, float64; NaN where no class occurs.
    """
    hit, predicted, true = counts.double().unbind(dim=-2)
    return (hit / (predicted + true - hit)).nanmean(dim=-1)
