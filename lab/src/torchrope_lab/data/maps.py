"""Semantic segmentation data: images and masks of class indices, in files of the same name in two folders."""

import csv
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path, PurePosixPath

import numpy as np
import PIL
import torch
from torch import Tensor
from torchvision import tv_tensors

from torchrope_lab.data.boxes_and_maps import (
    IGNORED,
    DenseModule,
    Example,
    FileSet,
    compose,
    fit,
    flip_and_colours,
    hold_out_images,
    map_scale_jitter,
    select_some,
)
from torchrope_lab.data.cache import index_of, read_files
from torchrope_lab.data.data_config import DataConfig
from torchrope_lab.data.faults import Fault, name_some, warn_skipped
from torchrope_lab.data.folders import subfolders, warn_unread
from torchrope_lab.data.images import check_parts, existing_folder, list_samples, load_image, open_image
from torchrope_lab.mistakes import Mistake

SCALE_JITTER = (0.5, 2.0)
MASK_EXTENSION = ".png"
ADE20K = "ADEChallengeData2016"
ADE20K_CLASSES = "objectInfo150.txt"
ADE20K_LAYOUT = (
    f"{ADE20K} with images/training/*.jpg, annotations/training/*.png, the same two folders for validation, and "
    f"{ADE20K_CLASSES}; from data.csail.mit.edu/places/ADEchallenge/ADEChallengeData2016.zip"
)
SEGMENTS_CLASSES = "classes.txt"
SEGMENTS_LAYOUT = (
    "images/train/* with masks/train/*.png of the same names and the same for val, or images/* with masks/*.png; "
    "optional: classes.txt with the name of each index, one per line"
)

Pair = tuple[str, str]  # image and mask below root


class MapModule(DenseModule):
    """Base class of data modules of images with masks of class indices."""

    # A subclass sets `root`, `classes`, `map_classes` and `first`, the index of the first class in a mask; lower
    # indices, or 255 if `first` is 0, are unlabelled.

    in_channels = 3
    tasks = ("segment",)
    root: Path
    first: int

    def __init__(self, config: DataConfig) -> None:
        super().__init__(config)
        self.input_size = (config.size, config.size)

    def pairs(self, folders: Sequence[tuple[Path, Path]]) -> tuple[list[list[Pair]], list[Fault]]:
        """Pair the files of each (image folder, mask folder), and list those without a counterpart."""
        paired, faults = [], []
        for images, masks in folders:
            pairs, alone = find_pairs(self.root, images, masks)
            require_pairs(pairs, alone, images)
            paired.append(pairs)
            faults += alone
        return paired, faults

    def sets(self, train: Sequence[Pair], val: Sequence[Pair], faults: list[Fault]) -> tuple[FileSet, FileSet]:
        """Warn about skipped files, and select `train_size` and `val_size` pairs; training pairs are augmented."""
        config, augment = self.config, self.config.augment
        self.skipped = faults
        warn_skipped(faults, len(train) + len(val) + len(faults), config.max_skipped, "images and masks")
        train = select_some(train, config.train_size, config.split_seed, "train_size")
        val = select_some(val, config.val_size, config.split_seed, "val_size")
        jitter = map_scale_jitter(augment.scale_jitter or SCALE_JITTER, config.size, augment.max_class_share)
        read = partial(load_pair, self.root, len(self.map_classes), self.first)
        return (
            FileSet(train, partial(read, train), compose([*jitter, *flip_and_colours(augment)]), config.max_skipped),
            FileSet(val, partial(read, val), partial(fit, config.size), config.max_skipped),
        )


class ADE20k(MapModule):
    """20,210 training and 2,000 validation images; every pixel has one of 150 classes or is unlabelled."""

    # Source: B. Zhou et al., Scene Parsing through ADE20K Dataset, CVPR 2017. In a mask, 0 is unlabelled.

    name = "ade20k"
    title = "ADE20k"
    first = 1

    def __init__(self, config: DataConfig) -> None:
        super().__init__(config)
        root = existing_folder(config.root, "ADE20k", ADE20K_LAYOUT)
        self.root = root / ADE20K if (root / ADE20K).is_dir() else root
        folders = [self.root / kind / part for kind in ("images", "annotations") for part in ("training", "validation")]
        if not all(folder.is_dir() for folder in folders) or not (self.root / ADE20K_CLASSES).is_file():
            raise Mistake(f"--data.root must hold {ADE20K_LAYOUT}; got {str(root)!r}")
        self.classes = self.map_classes = read_ade20k_classes(self.root / ADE20K_CLASSES)
        self.description = (
            f"Photographs of ADE20k; every pixel has one of {len(self.classes)} classes or is unlabelled (scene "
            "parsing challenge, 2016)."
        )

    def datasets(self) -> tuple[FileSet, FileSet]:
        """List images and masks, and select `train_size` and `val_size` pairs."""
        (train, val), faults = self.pairs(
            [(self.root / "images" / part, self.root / "annotations" / part) for part in ("training", "validation")]
        )
        return self.sets(train, val, faults)


class Segments(MapModule):
    """Images below root/images, each with a palette or greyscale PNG of class indices below root/masks."""

    # 255 in a mask is unlabelled. classes.txt names the classes from index 0 on, one per line; without it, the names
    # are the indices up to the largest in the masks. Without val, a fifth of the images is held out by a hash of path
    # and `split_seed`.

    name = "segments"
    first = 0

    def __init__(self, config: DataConfig) -> None:
        super().__init__(config)
        self.root = existing_folder(config.root, "segments", SEGMENTS_LAYOUT)
        images, masks = self.root / "images", self.root / "masks"
        self.parts = [part for part in ("train", "val") if (images / part).is_dir()] or [""]
        if not images.is_dir() or not masks.is_dir() or self.parts == ["val"]:
            raise Mistake(f"--data.root must hold {SEGMENTS_LAYOUT}; got {str(self.root)!r}")
        check_parts(images, subfolders(images), with_folders=False)
        names = self.root / SEGMENTS_CLASSES
        self.classes = self.map_classes = read_names(names) if names.is_file() else ()
        self.title = f"Segments in {self.root.name}"
        self.description = f"Images from the folder {self.root.name}, with a class for every pixel."

    def datasets(self) -> tuple[FileSet, FileSet]:
        """Pair images and masks, find the classes, split, and select `train_size` and `val_size` pairs."""
        parts, faults = self.pairs([(self.root / "images" / part, self.root / "masks" / part) for part in self.parts])
        listed = [path for pairs in parts for pair in pairs for path in pair] + [path for path, _ in faults]
        self.unread = warn_unread(self.root, [*listed, SEGMENTS_CLASSES], "images, masks (.png) or classes.txt")
        largest, unreadable = largest_index(self.root, [mask for pairs in parts for _, mask in pairs])
        broken = {mask for mask, _ in unreadable}
        parts = [[pair for pair in pairs if pair[1] not in broken] for pairs in parts]
        faults = faults + unreadable
        for pairs, part in zip(parts, self.parts, strict=True):
            require_pairs(pairs, faults, self.root / "images" / part)
        if not largest:
            rule = f"masks must have indices of at least two classes ({IGNORED} is unlabelled)"
            raise Mistake(f"{rule}, got only 0 in {str(self.root)!r}")
        self.classes = self.map_classes = self.map_classes or tuple(str(index) for index in range(largest + 1))
        train, val = parts if len(parts) == 2 else hold_out_images(parts[0], self.config.split_seed)
        return self.sets(train, val, faults)


def load_pair(root: Path, classes: int, first: int, pairs: Sequence[Pair], index: int) -> Example:
    """Read an image and its semantic map, with classes from 0; `first` is the index of the first class in a mask."""
    image, mask = pairs[index]
    indices = read_mask(root / mask)
    pixels = tv_tensors.Image(load_image(root / image))
    if pixels.shape[-2:] != indices.shape:
        rule = f"its mask must have the size of the image, {pixels.shape[-1]}x{pixels.shape[-2]} pixels"
        raise Mistake(f"{rule}, got {indices.shape[1]}x{indices.shape[0]}")
    unlabelled = indices < first if first else indices == IGNORED
    last = classes + first - 1
    beyond = indices[~unlabelled & (indices > last)]
    if len(beyond):
        raise Mistake(f"indices in its mask must be between 0 and {last}, got {int(beyond.max())}")
    return pixels, {"map": tv_tensors.Mask(torch.where(unlabelled, IGNORED, indices - first)), "name": image}


def find_pairs(root: Path, images: Path, masks: Path) -> tuple[list[Pair], list[Fault]]:
    """Return sorted pairs of image and mask of the same name, paths below root, and the files without a counterpart."""
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
        raise Mistake(f"images must have masks (.png) of the same names, found 0 in {str(folder)!r}{named}")


def read_mask(path: Path) -> Tensor:
    """Read the class indices of a palette or greyscale mask: uint8 `(height, width)`."""
    with open_image(path) as file:
        if file.mode not in ("P", "L", "1"):
            raise Mistake(f"a mask must have a palette or one grey channel of 8 bits, got {file.mode} pixels")
        return torch.from_numpy(np.array(file).astype(np.uint8))


def largest_index(root: Path, masks: Sequence[str]) -> tuple[int, list[Fault]]:
    """Return the largest index in all masks, ignoring 255, and the unreadable masks."""

    def read(path: Path) -> int:
        indices = read_mask(path)
        return int(indices[indices != IGNORED].max()) if bool((indices != IGNORED).any()) else 0

    index = index_of(root, "masks")
    maxima, faults = read_files(root, masks, read, index, version=f"1 {PIL.__version__}", doing="Checking masks")
    return max(maxima.values(), default=0), faults


def read_ade20k_classes(path: Path) -> tuple[str, ...]:
    """Read the first synonym of every class of objectInfo150.txt, or all if two classes have the same first one."""
    with path.open(newline="", encoding="utf-8-sig", errors="replace") as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    names = [(row.get("Name") or "").strip() for row in rows]
    indices = [(row.get("Idx") or "").strip() for row in rows]
    if not all(names) or indices != [str(number) for number in range(1, len(rows) + 1)] or not 2 <= len(rows) <= 254:
        rule = f"{path.name} must have the tab-separated columns Idx (1, 2, ...) and Name, 2 to 254 rows"
        raise Mistake(f"{rule}, got Idx {', '.join(indices) or 'none':.40} in {path}")
    first = [name.split(",")[0].strip() for name in names]
    counts = Counter(first)
    return tuple(short if counts[short] == 1 else name for short, name in zip(first, names, strict=True))


def read_names(path: Path) -> tuple[str, ...]:
    """Read class names, one per line."""
    names = [name.strip() for name in path.read_text(encoding="utf-8-sig").rstrip().split("\n")]
    if not 2 <= len(names) <= IGNORED or len(set(names)) < len(names) or "" in names:
        rule = f"{path.name} must name 2 to {IGNORED} different classes, one per line"
        raise Mistake(f"{rule}, got {', '.join(map(repr, names)):.60}")
    return tuple(names)


def _stem(root: Path, folder: Path, path: str) -> str:
    return PurePosixPath((root / path).relative_to(folder)).with_suffix("").as_posix()
