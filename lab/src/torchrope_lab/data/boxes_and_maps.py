"""Images with boxes and semantic maps: the fields of a batch, and random augmentation in training."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from copy import copy
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.data import Dataset
from torchvision import tv_tensors
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as image_ops

from torchrope_lab.data.data_config import AugmentConfig
from torchrope_lab.data.datamodule import DataModule
from torchrope_lab.data.draws import Draws, seeded
from torchrope_lab.data.faults import Skipping
from torchrope_lab.data.images import hold_out
from torchrope_lab.data.repeated import ReadInBatches, example_of
from torchrope_lab.data.tensors import STATISTICS, Normalise
from torchrope_lab.mistakes import Mistake

IGNORED = 255  # in a map: unlabelled
MEAN, STD = STATISTICS["imagenet"]  # as in published pretrained backbones
TRIES = 10
LONGEST = 4  # times the shorter side, of validation images with maps

Target = dict[str, Any]
Example = tuple[Tensor, Target]
Transform = Callable[[Tensor, Target], Example]
Made = TypeVar("Made", bound="DenseSet")
Listed = TypeVar("Listed", bound=Sequence[Any])


class DenseSet(ReadInBatches, ABC):
    """Images with targets for detection or segmentation; a batch is `(images, targets)`, lists of equal length.

    An image is float32 `(channels, height, width)`, normalised; sizes may differ. A target has those of these entries
    that the data provides:

    * `map`: int64 `(height, width)`, the class of every pixel, 255 if unlabelled; in validation as large as its file.
    * `boxes`: float32 `(objects, 4)`, left, top, right and bottom in pixels, from 0 to width and height.
    * `labels`: int64 `(objects,)`, the class of each object.
    * `crowd`: bool `(objects,)`, True for a crowd without separate instances.
    * `name`: the file name or the number, as a string.

    The augmentation of an example depends on `seed` and its index only.

    Args:
        normalise: Converts bytes to float32.
        transform: Transform of image (bytes) and target, as tv_tensors; draws from torch's global generator.
    """

    seed: int = 0

    def __init__(self, normalise: Normalise, transform: Transform | None = None) -> None:
        self.normalise = normalise
        self.transform = transform

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of images."""

    @abstractmethod
    def read(self, index: int) -> Example:
        """Read an image as bytes and its target; both use tv_tensors, except for labels, crowd and name."""

    def __getitems__(self, indices: Sequence[int]) -> tuple[list[Tensor], list[Target]]:
        seeds = Draws(self.seed, indices).seeds("dense")
        # An index past the end is a repeat with different augmentation.
        examples = [
            self._example(example_of(index, len(self)), seed) for index, seed in zip(indices, seeds, strict=True)
        ]
        return [image for image, _ in examples], [target for _, target in examples]

    def of_epoch(self: Made, seed: int) -> Made:
        """Return the same examples with the augmentation of another seed."""
        same = copy(self)
        same.seed = seed
        return same

    def _example(self, index: int, seed: int) -> Example:
        image, target = self.read(index)
        if self.transform is not None:
            with seeded(seed):
                image, target = self.transform(image, target)
        return self.normalise(image.as_subclass(Tensor)), plain(target)


class FileSet(DenseSet):
    """A `DenseSet` of photographs read on access; an unreadable file is replaced by the next readable one."""

    # A sample is the path below the root and a value that identifies its target.

    def __init__(
        self,
        samples: Sequence[tuple[str, Any]],
        load: Callable[[int], Example],
        transform: Transform | None,
        max_skipped: int,
    ) -> None:
        super().__init__(Normalise(torch.tensor(MEAN).view(3, 1, 1), torch.tensor(STD).view(3, 1, 1)), transform)
        self.samples = samples
        self.load = load
        self.reading = Skipping([path for path, _ in samples], load, max_skipped, "images")

    def __len__(self) -> int:
        return len(self.samples)

    def read(self, index: int) -> Example:
        """Read an image, or the next readable one."""
        return self.reading.get(index)


class DenseModule(DataModule):
    """Data module for detection and segmentation; its sets are `DenseSet`s."""

    axes = ("height", "width")
    val_batch_factor = 1  # images of several sizes are padded to the largest

    def _augmented(self, train: Dataset, seed: int) -> Dataset:
        assert isinstance(train, DenseSet)
        return train.of_epoch(seed)


def plain(target: Target) -> Target:
    """Convert the tv_tensors of a target to tensors of the types listed in `DenseSet`."""
    tensors = {name: value.as_subclass(Tensor) for name, value in target.items() if isinstance(value, Tensor)}
    if "map" in tensors:
        tensors["map"] = tensors["map"].long()
    return {**target, **tensors}


def to_boxes(boxes: Tensor, height: int, width: int) -> tv_tensors.BoundingBoxes:
    """Convert `(objects, 4)`, left, top, right and bottom, to bounding boxes of an image of the given size."""
    return tv_tensors.BoundingBoxes(boxes.float().view(-1, 4), format="XYXY", canvas_size=(height, width))


def compose(steps: Sequence[Any]) -> Transform | None:
    """Compose transforms; returns None if there are none."""
    return v2.Compose(steps) if steps else None


def large_scale_jitter(augment: AugmentConfig, side: int) -> list[Any]:
    """Resize the longer side to `side` times a random factor, crop, and update the objects; [] if not set."""
    # Ghiasi et al., Simple copy-paste, arXiv:2012.07177, with factors from 0.1 to 2.
    if augment.scale_jitter is None:
        return []
    return [Jitter((side, side), augment.scale_jitter), Crop(side), keep_visible]


def multi_scale(side: int, longest: int) -> list[Any]:
    """Resize the shorter side to 60 to 100 % of `side`, for half of the images after a crop of 48 to 75 %."""
    # Carion et al., DETR, arXiv:2005.12872, appendix A.4: 480 to 800 pixels after crops of 384 to 600, or without.
    before, after = [400, 500, 600], range(480, 801, 32)
    least, most = (round(side * pixels / 800) for pixels in (384, 600))
    resizes = [v2.Resize(round(side * pixels / 800)) for pixels in before]
    crop = v2.RandomApply([v2.RandomChoice(resizes), Crop(most, least), keep_visible], 0.5)
    return [crop, v2.RandomChoice([v2.Resize(round(side * pixels / 800), max_size=longest) for pixels in after])]


def map_scale_jitter(scale: tuple[float, float], side: int, largest_share: float) -> list[Any]:
    """Resize the shorter side to `side` times a random factor, and crop so that no class dominates."""
    # For ADE20k, factors from 0.5 to 2, mmsegmentation's `cat_max_ratio=0.75` and Mask2Former's
    # `SINGLE_CATEGORY_MAX_AREA: 1.0`.
    low, high = (max(1, round(factor * side)) for factor in scale)
    crop = Crop(side) if largest_share == 1 else CropSeveralClasses(side, largest_share)
    return [v2.RandomResize(low, high + 1), crop]


def fit(side: int, image: Tensor, target: Target) -> Example:
    """Resize an image, but not its map, to a shorter side of `side`, less if the longer would be above 4 · `side`."""
    # Tests on ADE20k at 512: mmsegmentation's `img_scale=(2048, 512)`, Mask2Former's MIN_SIZE_TEST and MAX_SIZE_TEST.
    shorter, longer = sorted(image.shape[-2:])
    scale = min(side / shorter, LONGEST * side / longer)
    return image_ops.resize(image, [max(1, int(scale * length + 0.5)) for length in image.shape[-2:]]), target


def flip_and_colours(augment: AugmentConfig) -> list[Any]:
    """Return the transforms that keep the size: horizontal flip and colour jitter, those that are set."""
    strength = getattr(augment, "color_jitter", 0.0)
    flip = [v2.RandomHorizontalFlip()] if augment.flip else []
    return flip + ([v2.ColorJitter(strength, strength, strength)] if strength else [])


def keep_visible(image: Tensor, target: Target) -> Example:
    """Drop the objects of which the crop holds less than a pixel; the boxes of the others end at the crop."""
    boxes, visible = image_ops.sanitize_bounding_boxes(target["boxes"], min_size=1, min_area=1)
    return image, {**target, "boxes": boxes, "labels": target["labels"][visible], "crowd": target["crowd"][visible]}


class Jitter(v2.ScaleJitter):
    """`v2.ScaleJitter` with sides of at least one pixel, for images with an extreme aspect ratio."""

    def make_params(self, flat_inputs: list[Any]) -> dict[str, Any]:
        """Draw the new size."""
        height, width = super().make_params(flat_inputs)["size"]
        return {"size": (max(1, height), max(1, width))}


class Crop(v2.Transform):
    """Crop at random to `least` (by default `side`) to `side` pixels per axis; smaller images are padded in batches."""

    def __init__(self, side: int, least: int | None = None) -> None:
        super().__init__()
        self.side = side
        self.least = side if least is None else least

    def _extent(self, length: int) -> int:
        low, high = min(length, self.least), min(length, self.side)
        return low if low == high else int(torch.randint(low, high + 1, ()))

    def make_params(self, flat_inputs: list[Any]) -> dict[str, Any]:
        """Draw the size, if it is a range, and the position."""
        height, width = v2.query_size(flat_inputs)
        kept_height, kept_width = self._extent(height), self._extent(width)
        top = int(torch.randint(height - kept_height + 1, ()))
        left = int(torch.randint(width - kept_width + 1, ()))
        return {"top": top, "left": left, "height": kept_height, "width": kept_width}

    def transform(self, inpt: Any, params: dict[str, Any]) -> Any:
        """Crop an image, boxes or a map."""
        return image_ops.crop(inpt, **params)


class CropSeveralClasses(Crop):
    """Draw up to ten crops; take the first where no class has `share` of the labelled pixels or more, else the last."""

    def __init__(self, side: int, share: float) -> None:
        super().__init__(side)
        self.share = share

    def make_params(self, flat_inputs: list[Any]) -> dict[str, Any]:
        """Draw the position."""
        (classes,) = (part for part in flat_inputs if isinstance(part, tv_tensors.Mask))
        for _ in range(TRIES):
            params = super().make_params(flat_inputs)
            cropped = image_ops.crop(classes.as_subclass(Tensor), **params)
            counts = cropped.flatten().int().bincount(minlength=IGNORED + 1)[:IGNORED]
            if bool(counts.max() < self.share * counts.sum()):
                break
        return params


def hold_out_images(listed: Sequence[Listed], split_seed: int) -> tuple[list[Listed], list[Listed]]:
    """Hold out a fifth of the images for validation, by a hash of path, the first item of each, and seed."""
    if len(listed) < 2:
        raise Mistake(f"images must number at least 2, one to train on and one to hold out, got {len(listed)}")
    by_path = {image[0]: image for image in listed}
    train, val = hold_out([(path, 0) for path in by_path], split_seed)
    return [by_path[path] for path, _ in train], [by_path[path] for path, _ in val]


def select_some(samples: Sequence[Any], size: int | None, seed: int, name: str) -> list[Any]:
    """Select `size` random samples, in their order; with the same seed, a smaller selection is a subset of a larger."""
    if size is None:
        return list(samples)
    if size > len(samples):
        raise Mistake(f"--data.{name} must be at most {len(samples)} (all examples), got {size}")
    order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(seed))
    return [samples[index] for index in order[:size].sort().values.tolist()]
