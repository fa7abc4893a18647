"""Images with boxes, masks and semantic maps: the fields of a batch, and random augmentation in training."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from copy import copy
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.data import Dataset
from torchvision import tv_tensors
from torchvision.ops import masks_to_boxes
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as pictures

from torchrope.lab.data.config import ColourAugment, SceneAugment
from torchrope.lab.data.datamodule import DataModule
from torchrope.lab.data.draws import Draws, seeded
from torchrope.lab.data.faults import Skipping
from torchrope.lab.data.tensors import Normalise

IGNORED = 255  # in a map: without a label
MEAN = (0.485, 0.456, 0.406)  # of ImageNet's pixels, with which backbones were trained before
STD = (0.229, 0.224, 0.225)
LARGEST_SHARE = 0.75  # of one class in a crop
TRIES = 10

Target = dict[str, Any]
Example = tuple[Tensor, Target]
Change = Callable[[Tensor, Target], Example]
Made = TypeVar("Made", bound="DenseSet")


class DenseSet(Dataset, ABC):
    """Pictures with what is to be found in them; several at once are `(images, targets)`, lists of equal length.

    An image is float32 `(channels, height, width)`, normalised; sizes may differ. A target has what the data has:

    * `map`: int64 `(height, width)`, the class of every pixel, 255 if unlabelled.
    * `boxes`: float32 `(objects, 4)`, left, top, right and bottom in pixels, from 0 to width and height.
    * `labels`: int64 `(objects,)`, the class of each.
    * `masks`: bool `(objects, height, width)`, the pixels of each that are seen.
    * `crowd`: bool `(objects,)`, whether it is a crowd without separate instances.
    * `name`: the file, or the number, as a string.

    What is drawn at random for an example is a function of `seed` and of its index alone.

    Args:
        normalise: Makes float32 of bytes.
        change: Changes bytes and truth, as tv_tensors; what it draws comes from torch's generator.
    """

    seed: int = 0

    def __init__(self, normalise: Normalise, change: Change | None = None) -> None:
        self.normalise = normalise
        self.change = change

    @abstractmethod
    def __len__(self) -> int:
        """Number of pictures."""

    @abstractmethod
    def read(self, index: int) -> Example:
        """A picture as bytes and its truth: tv_tensors, but for labels, crowd and name."""

    def __getitem__(self, index: int) -> Example:
        if not 0 <= index < len(self):  # where a loop over the set ends; repeats come in batches alone
            raise IndexError(f"an example must be between 0 and {len(self) - 1}, got {index}")
        images, targets = self.__getitems__([index])
        return images[0], targets[0]

    def __getitems__(self, indices: Sequence[int]) -> tuple[list[Tensor], list[Target]]:
        seeds = Draws(self.seed, indices).seeds("dense")
        # Beyond the end: a repeat, changed otherwise.
        examples = [self._example(index % len(self), seed) for index, seed in zip(indices, seeds, strict=True)]
        return [image for image, _ in examples], [target for _, target in examples]

    def of_epoch(self: Made, seed: int) -> Made:
        """The same examples, changed at random as in an epoch of a run."""
        same = copy(self)
        same.seed = seed
        return same

    def _example(self, index: int, seed: int) -> Example:
        image, target = self.read(index)
        if self.change is not None:
            with seeded(seed):
                image, target = self.change(image, target)
        return self.normalise(image.as_subclass(Tensor)), plain(target)


class PictureSet(DenseSet):
    """Likewise, from files that are read when they are asked for; one that cannot be gives way to the next that can.

    Args:
        samples: (path below the root, what tells its truth from others) of every picture.
        normalise: Makes float32 of bytes.
        change: Changes bytes and truth.
        max_skipped: How many may be left out.
    """

    def __init__(
        self, samples: Sequence[tuple[str, Any]], normalise: Normalise, change: Change | None, max_skipped: int
    ) -> None:
        super().__init__(normalise, change)
        self.samples = samples
        self.reading = Skipping([path for path, _ in samples], self.load, max_skipped, "images")

    @abstractmethod
    def load(self, index: int) -> Example:
        """Read a picture and its truth; raises anything where it cannot."""

    def __len__(self) -> int:
        return len(self.samples)

    def read(self, index: int) -> Example:
        """A picture, or the next one that can be read."""
        return self.reading.get(index)


class DenseModule(DataModule):
    """Data whose answers have a place in the picture; its sets are `DenseSet`s."""

    axes = ("height", "width")
    val_batch_factor = 1  # pictures of several sizes are padded to the largest

    def _augmented(self, train: Dataset, seed: int) -> Dataset:
        assert isinstance(train, DenseSet)
        return train.of_epoch(seed)


def plain(target: Target) -> Target:
    """A target of ordinary tensors, of the types that `DenseSet` names."""
    tensors = {name: value.as_subclass(Tensor) for name, value in target.items() if isinstance(value, Tensor)}
    if "map" in tensors:
        tensors["map"] = tensors["map"].long()
    return {**target, **tensors}


def to_boxes(boxes: Tensor, height: int, width: int) -> tv_tensors.BoundingBoxes:
    """Boxes `(objects, 4)`, left, top, right and bottom, on a picture of a size."""
    return tv_tensors.BoundingBoxes(boxes.float().view(-1, 4), format="XYXY", canvas_size=(height, width))


def boxes_of(masks: Tensor) -> Tensor:
    """The smallest boxes around masks that are not empty: float32 `(objects, 4)`, from edge to edge of their pixels.

    Example:
        >>> boxes_of(torch.eye(3, dtype=torch.bool)[None])
        tensor([[0., 0., 3., 3.]])
    """
    ends = torch.tensor([0, 0, 1, 1], device=masks.device)
    return masks_to_boxes(masks).float() + ends  # theirs ends at the centre of the last pixel


def imagenet_normalise() -> Normalise:
    """ImageNet's usual mean and deviation."""
    return Normalise(torch.tensor(MEAN).view(3, 1, 1), torch.tensor(STD).view(3, 1, 1))


def compose(steps: Sequence[Any]) -> Change | None:
    """Apply the changes one after another; None if there are none."""
    return v2.Compose(steps) if steps else None


def large_scale_jitter(augment: SceneAugment, side: int) -> list[Any]:
    """Resize so that the longer side is `side` times a random factor, crop, and keep what is seen of every object.

    References:
        Ghiasi et al., Simple copy-paste, arXiv:2012.07177, with factors from 0.1 to 2.
    """
    if augment.scale_jitter is None:
        return []
    return [Jitter((side, side), augment.scale_jitter), Crop(side), keep_visible]


def map_scale_jitter(scale: tuple[float, float], side: int) -> list[Any]:
    """Resize so that the shorter side is `side` times a random factor, and crop where no class has nearly all.

    References:
        The pipeline of mmsegmentation for ADE20k, with factors from 0.5 to 2 and `cat_max_ratio=0.75`.
    """
    low, high = (max(1, round(factor * side)) for factor in scale)
    return [v2.RandomResize(low, high + 1), CropSeveralClasses(side)]


def flip_and_colours(augment: SceneAugment) -> list[Any]:
    """What does not move a picture's frame."""
    strength = augment.color_jitter if isinstance(augment, ColourAugment) else 0.0
    flip = [v2.RandomHorizontalFlip()] if augment.flip else []
    return flip + ([v2.ColorJitter(strength, strength, strength)] if strength else [])


def keep_visible(image: Tensor, target: Target) -> Example:
    """Leave out the objects that a crop left nothing of, and fit the boxes of the others to what is left of them."""
    boxes, masks = target.get("boxes"), target.get("masks")
    if boxes is None:
        return image, target
    if masks is None:
        _, seen = pictures.sanitize_bounding_boxes(boxes, min_size=1, min_area=1)
    else:
        seen = masks.flatten(1).any(1)
    kept: Target = {name: target[name][seen] for name in ("labels", "crowd", "masks") if name in target}
    fitted = boxes[seen] if masks is None else boxes_of(kept["masks"])
    if masks is not None:
        kept["masks"] = tv_tensors.Mask(kept["masks"])  # an index leaves an ordinary tensor, which no change touches
    return image, {**target, **kept, "boxes": to_boxes(fitted, *image.shape[-2:])}


class Jitter(v2.ScaleJitter):
    """torchvision's, of pictures that are much longer than wide, too: a side has a pixel at least."""

    def make_params(self, flat_inputs: list[Any]) -> dict[str, Any]:
        """Draw a size."""
        height, width = super().make_params(flat_inputs)["size"]
        return {"size": (max(1, height), max(1, width))}


class Crop(v2.Transform):
    """Crop to `side` at random along each axis that is longer; a batch is padded later, where it is made."""

    def __init__(self, side: int) -> None:
        super().__init__()
        self.side = side

    def make_params(self, flat_inputs: list[Any]) -> dict[str, Any]:
        """Draw a place."""
        height, width = v2.query_size(flat_inputs)
        kept_height, kept_width = min(height, self.side), min(width, self.side)
        top = int(torch.randint(height - kept_height + 1, ()))
        left = int(torch.randint(width - kept_width + 1, ()))
        return {"top": top, "left": left, "height": kept_height, "width": kept_width}

    def transform(self, inpt: Any, params: dict[str, Any]) -> Any:
        """Crop a picture, boxes, masks or a map."""
        return pictures.crop(inpt, **params)


class CropSeveralClasses(Crop):
    """Likewise, the first of ten in which no class has more than three quarters of the labelled pixels, or the last."""

    def make_params(self, flat_inputs: list[Any]) -> dict[str, Any]:
        """Draw a place."""
        (classes,) = (part for part in flat_inputs if isinstance(part, tv_tensors.Mask))
        for _ in range(TRIES):
            params = super().make_params(flat_inputs)
            if _has_several(pictures.crop(classes.as_subclass(Tensor), **params)):
                break
        return params


def _has_several(classes: Tensor) -> bool:
    counts = classes.flatten().int().bincount(minlength=IGNORED + 1)[:IGNORED]
    return bool(counts.max() < LARGEST_SHARE * counts.sum())


def select_some(samples: Sequence[Any], size: int | None, seed: int, name: str) -> list[Any]:
    """Choose `size` samples, in their order; a smaller choice with the same seed is part of every larger one.

    Raises:
        ValueError: there are fewer.
    """
    if size is None:
        return list(samples)
    if size > len(samples):
        raise ValueError(f"--data.{name} must be at most {len(samples)} (all there are), got {size}")
    order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(seed))
    return [samples[index] for index in order[:size].sort().values.tolist()]
