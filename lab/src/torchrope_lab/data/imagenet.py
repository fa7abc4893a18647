"""ImageNet-1k, from class folders or tar shards."""

import csv
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.utils.data import Dataset, Sampler
from torchvision.datasets.folder import IMG_EXTENSIONS

from torchrope_lab.data.data_config import DataConfig
from torchrope_lab.data.faults import name_some, warn_skipped
from torchrope_lab.data.folders import files_below, matching_parts, subfolders
from torchrope_lab.data.images import (
    CroppedImages,
    ImageSet,
    Sample,
    existing_folder,
    list_samples,
    select_examples,
)
from torchrope_lab.data.shards import ShardOrder, Shards, index_shards
from torchrope_lab.data.tensors import balanced_subset
from torchrope_lab.mistakes import Mistake

LAYOUT = (
    "train/<class>/* with val/<class>/*, or with val/* and LOC_val_solution.csv; or *train*.tar with *val*.tar, of jpg "
    "and cls"
)
SOURCE = "image-net.org or kaggle.com/c/imagenet-object-localization-challenge"
KAGGLE_FOLDER = Path("ILSVRC/Data/CLS-LOC")
SOLUTION = "LOC_val_solution.csv"


class ImageNet(CroppedImages):
    """ImageNet-1k, 1,281,167 training and 50,000 validation images, or any data in the same layout."""

    # Source: O. Russakovsky et al., ImageNet Large Scale Visual Recognition Challenge, arXiv:1409.0575, 2015.
    # Images are read during training, and unreadable ones are skipped. Training crops 8 to 100 % of an image at random;
    # validation takes the central crop of 7/8 of the shorter side, at any size from the files. Before training, only
    # headers and labels of shards are read, once.

    name = "imagenet"
    title = "ImageNet"
    crop_scale = (0.08, 1.0)

    def __init__(self, config: DataConfig) -> None:
        super().__init__(config)
        side = config.size
        self.classes = ()
        root = config.root or config.name.partition(":")[2] or None  # of webdataset:FOLDER
        self.root = existing_folder(root, "imagenet", f"{LAYOUT}; from {SOURCE}")
        self.description = f"Photographs of ImageNet, cropped to {side}×{side} colour pixels; the class is the synset."

    def datasets(self) -> tuple[ImageSet, ImageSet]:
        """List images or shards, and select `train_size` and `val_size` images."""
        train_shards, val_shards = find_shards(self.root)
        if train_shards and val_shards:
            return self._normalised(self._sharded(train_shards, True), self._sharded(val_shards, False))
        candidates = (self.root, self.root / KAGGLE_FOLDER)
        base = next((folder for folder in candidates if (folder / "train").is_dir()), None)
        if base is None or not (base / "val").is_dir():
            raise Mistake(f"--data.root must hold {LAYOUT}; from {SOURCE}; got {str(self.root)!r}")
        self.classes = tuple(subfolders(base / "train"))
        train = list_samples(self.root, base / "train", self.classes)
        val = list_validation(self.root, base / "val", self.classes)
        for part, samples in (("train", train), ("val", val)):
            if not samples:
                raise Mistake(f"{part} must hold images, found 0 in {str(base / part)!r}")
        return self._normalised(self._folder(train, True), self._folder(val, False))

    def sampler(self, train: Dataset, seed: int, epoch: int, replicas: int, rank: int) -> Sampler:
        """Return a shuffled order; for shards one that reads few shards at a time."""
        if isinstance(train, ImageSet) and train.shards is not None:
            return ShardOrder(train.shards.places[:, 0], seed, epoch, replicas, rank)
        return super().sampler(train, seed, epoch, replicas, rank)

    def _folder(self, samples: list[Sample], train: bool) -> ImageSet:
        size, name = self._size(train)
        return self._set(select_examples(samples, size, self.config.split_seed, name), train=train)

    def _sharded(self, shards: list[Path], train: bool) -> ImageSet:
        samples, places, faults = index_shards(shards)
        self.skipped = [*self._skipped, *faults]
        if not samples:
            named = name_some(faults) or shards[0].name
            raise Mistake(f"shards must hold images with labels (jpg and cls), found 0: {named}")
        warn_skipped(faults, len(samples) + len(faults), self.config.max_skipped, "shards and images")
        labels = torch.tensor([label for _, label in samples])
        if train:
            self.classes = shard_classes(self.root, int(labels.max()) + 1)
        elif int(labels.max()) >= self.num_classes:
            raise Mistake(f"labels of val must be below {self.num_classes} as in train, got {int(labels.max())}")
        size, name = self._size(train)
        chosen = balanced_subset(labels, size, self.config.split_seed, name)
        selected = [samples[index] for index in chosen.tolist()]
        return self._set(selected, train=train, shards=Shards(shards, places[chosen]))

    def _size(self, train: bool) -> tuple[int | None, str]:
        return (self.config.train_size, "train_size") if train else (self.config.val_size, "val_size")


def find_shards(root: Path) -> tuple[list[Path], list[Path]]:
    """List the training and the validation shards, recognised by their names or folders, sorted."""
    return matching_parts(root, "*{}*.tar", "{}*/*.tar")


def shard_classes(root: Path, count: int) -> tuple[str, ...]:
    """Read class names from LOC_synset_mapping.txt or classes.txt in root, one per line; else number the classes."""
    for name in ("LOC_synset_mapping.txt", "classes.txt"):
        if (root / name).is_file():
            names = (root / name).read_text().splitlines()
            if len(names) < count:
                raise Mistake(f"{name} must name {count} classes, one per line, got {len(names)}")
            return tuple(names)
    return tuple(str(number) for number in range(count))


def list_validation(root: Path, folder: Path, classes: Sequence[str]) -> list[Sample]:
    """List the validation images, in class folders or in one folder with a list of their classes."""
    if subfolders(folder):
        unknown = [name for name in subfolders(folder) if name not in classes]
        if unknown:
            raise Mistake(f"val must have the classes of train, got {', '.join(unknown[:3])} in val only")
        return list_samples(root, folder, classes)
    files = [root / path for path in files_below(folder, root, IMG_EXTENSIONS)]
    labels = {name: label for label, name in enumerate(classes)}
    classes_of = validation_classes(root, folder)
    for path in files:
        if classes_of.get(path.stem) not in labels:
            rule = f"{SOLUTION} must give a class of train to every image of val"
            raise Mistake(f"{rule}, got {classes_of.get(path.stem)!r} for {path.name}")
    return [(path.relative_to(root).as_posix(), labels[classes_of[path.stem]]) for path in files]


def validation_classes(root: Path, folder: Path) -> dict[str, str]:
    """Return the class of each image, by file name without extension, from Kaggle's list."""
    for parent in (root, folder, folder.parent):
        if (parent / SOLUTION).is_file():
            with (parent / SOLUTION).open(newline="") as file:
                rows = [row for row in csv.reader(file) if len(row) > 1]
            return {row[0]: row[1].split()[0] for row in rows[1:] if row[1].split()}
    raise Mistake(f"val must have class folders, or {str(root)!r} must hold {SOLUTION}, got neither")
