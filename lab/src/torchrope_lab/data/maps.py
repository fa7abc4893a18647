"""Semantic segmentation data: images and masks of class indices, in files of the same name in two folders."""

from collections.abc import Sequence
from pathlib import Path, PurePosixPath

import numpy as np
import torch
from torch import Tensor
from torchvision import tv_tensors

from torchrope_lab.data.config import ADE20kConfig, PhotographAugment
from torchrope_lab.data.dense import (
    IGNORED,
    DenseModule,
    Example,
    ImageFileSet,
    compose,
    flip_and_colours,
    imagenet_normalise,
    map_scale_jitter,
    select_some,
)
from torchrope_lab.data.faults import Fault, find_faults, name_some, warn_skipped
from torchrope_lab.data.images import list_samples, load_image, open_image

SCALE_JITTER = (0.5, 2.0)
MASK_EXTENSION = ".png"

Pair = tuple[str, str]  # image and mask below root


class MapSet(ImageFileSet):
    """Images with a semantic map.

    Args:
        root: Folder that the paths are relative to.
        samples: Paths of image and mask.
        classes: Number of classes.
        first: Index of the first class in a mask. Lower indices, or 255 if `first` is 0, are unlabelled.
        augment: Random augmentation; None for none.
        side: Pixels per side of a crop.
        max_skipped: Largest number of unreadable images that are skipped.
    """

    def __init__(
        self,
        root: Path,
        samples: Sequence[Pair],
        classes: int,
        first: int,
        augment: PhotographAugment | None,
        side: int,
        max_skipped: int,
    ) -> None:
        steps = []
        if augment is not None:
            scale = augment.scale_jitter or SCALE_JITTER
            steps = [*map_scale_jitter(scale, side), *flip_and_colours(augment)]
        self.root = root
        self.classes = classes
        self.first = first
        super().__init__(samples, imagenet_normalise(), compose(steps), max_skipped)

    def load(self, index: int) -> Example:
        """Read an image and its semantic map, with classes from 0."""
        image, mask = self.samples[index]
        indices = read_mask(self.root / mask)
        pixels = tv_tensors.Image(load_image(self.root / image))
        if pixels.shape[-2:] != indices.shape:
            rule = f"its mask must have the size of the image, {pixels.shape[-1]}x{pixels.shape[-2]} pixels"
            raise ValueError(f"{rule}, got {indices.shape[1]}x{indices.shape[0]}")
        return pixels, {"map": tv_tensors.Mask(self._map(indices)), "name": image}

    def _map(self, indices: Tensor) -> Tensor:
        unlabelled = indices < self.first if self.first else indices == IGNORED
        last = self.classes + self.first - 1
        beyond = indices[~unlabelled & (indices > last)]
        if len(beyond):
            raise ValueError(f"indices in its mask must be between 0 and {last}, got {int(beyond.max())}")
        return torch.where(unlabelled, IGNORED, indices - self.first)


class MapModule(DenseModule):
    """Base class of data modules of images with masks of class indices.

    A subclass sets `root`, `classes`, `map_classes` and `first`, the index of the first class in a mask.
    """

    in_channels = 3
    tasks = ("segment",)
    root: Path
    first: int

    config: ADE20kConfig

    def __init__(self, config: ADE20kConfig) -> None:
        super().__init__(config)
        side = config.size
        self.input_size = (side, side)

    def pairs(self, folders: Sequence[tuple[Path, Path]]) -> tuple[list[list[Pair]], list[Fault]]:
        """Pair the files of each (image folder, mask folder), and list those without a counterpart."""
        paired = [find_pairs(self.root, images, masks) for images, masks in folders]
        for (pairs, faults), (images, _) in zip(paired, folders, strict=True):
            require_pairs(pairs, faults, images)
        return [pairs for pairs, _ in paired], [fault for _, faults in paired for fault in faults]

    def sets(self, train: Sequence[Pair], val: Sequence[Pair], faults: list[Fault]) -> tuple[MapSet, MapSet]:
        """Warn about skipped files, and select `train_size` and `val_size` pairs; training pairs are augmented."""
        config = self.config
        self.skipped = faults
        warn_skipped(faults, len(train) + len(val) + len(faults), config.max_skipped, "images and masks")
        train = select_some(train, config.train_size, config.split_seed, "train_size")
        val = select_some(val, config.val_size, config.split_seed, "val_size")
        classes = (len(self.map_classes), self.first)
        limits = (self.input_size[0], config.max_skipped)
        return (
            MapSet(self.root, train, *classes, config.augment, *limits),
            MapSet(self.root, val, *classes, None, *limits),
        )


def find_pairs(root: Path, images: Path, masks: Path) -> tuple[list[Pair], list[Fault]]:
    """Pair every image with the mask of the same name, at any depth below both folders.

    Returns:
        Sorted pairs of paths below root, and the files without a counterpart.
    """
    stems = {_stem(root, images, path): path for path, _ in list_samples(root, images, [""])}
    masks_of = {
        _stem(root, masks, path): path
        for path, _ in list_samples(root, masks, [""])
        if path.lower().endswith(MASK_EXTENSION)
    }
    pairs = [(path, masks_of[stem]) for stem, path in stems.items() if stem in masks_of]
    faults = [(path, "no mask of this name") for stem, path in stems.items() if stem not in masks_of]
    return pairs, faults + [(path, "no image of this name") for stem, path in masks_of.items() if stem not in stems]


def require_pairs(pairs: Sequence[Pair], faults: Sequence[Fault], folder: Path) -> None:
    """Raise ValueError if no image in a folder has a mask."""
    if not pairs:
        named = f": {name_some(faults)}" if faults else ""
        raise ValueError(f"images must have masks (.png) of the same names, got none in {str(folder)!r}{named}")


def read_mask(path: Path) -> Tensor:
    """Read the class indices of a palette or greyscale mask: uint8 `(height, width)`.

    Raises:
        ValueError: the mask has several channels, or more than 8 bits.
    """
    with open_image(path) as file:
        if file.mode not in ("P", "L", "1"):
            raise ValueError(f"a mask must have a palette or one grey channel of 8 bits, got {file.mode} pixels")
        return torch.from_numpy(np.array(file).astype(np.uint8))


def largest_index(root: Path, masks: Sequence[str]) -> tuple[int, list[Fault]]:
    """Return the largest index in all masks, ignoring 255, and the unreadable masks."""
    maxima = {"": 0}

    def read(mask: str) -> None:
        indices = read_mask(root / mask)
        maxima[mask] = int(indices[indices != IGNORED].max()) if bool((indices != IGNORED).any()) else 0

    faults = find_faults(masks, read)
    return max(maxima.values()), faults


def _stem(root: Path, folder: Path, path: str) -> str:
    return PurePosixPath((root / path).relative_to(folder)).with_suffix("").as_posix()
