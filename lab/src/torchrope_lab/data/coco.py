"""Object detection data in COCO's format, with one JSON file per part."""

import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torchvision import tv_tensors
from torchvision.transforms import v2

from torchrope_lab.data.boxes_and_maps import (
    DenseModule,
    Example,
    FileSet,
    Transform,
    compose,
    flip_and_colours,
    hold_out_images,
    large_scale_jitter,
    multi_scale,
    select_some,
    to_boxes,
)
from torchrope_lab.data.data_config import DataConfig
from torchrope_lab.data.faults import Fault, name_some, reason, warn_skipped
from torchrope_lab.data.folders import matching_parts
from torchrope_lab.data.images import existing_folder, load_image
from torchrope_lab.mistakes import Mistake

MAX_ASPECT = 5 / 3  # longer side / data.size at most: 1333 / 800
NO_OBJECTS = b"[]"  # JSON

LAYOUT = (
    "annotations/instances_train2017.json and instances_val2017.json (or one *train*.json and at most one *val*.json), "
    "with their images in train2017 and val2017, in train and val, in these folders below images, or in images"
)
SOURCE = "cocodataset.org"


class ImageEntry(NamedTuple):
    """Path and size of an image, with its objects and crowds."""

    # Objects and crowds are stored as JSON text, a list of [label, left, top, right, bottom, id]: many small Python
    # objects would be copied into every loading process.

    path: str
    height: int
    width: int
    objects: bytes
    crowds: bytes


class Instances(NamedTuple):
    """Contents of an annotation file: category names by id, images by id with their `annotations`, invalid entries."""

    file: str
    categories: dict[int, str]
    images: dict[int, dict[str, Any]]
    faults: list[Fault]


class Coco(DenseModule):
    """COCO, 118,287 training and 5,000 validation images with objects of 80 classes, or data in the same format."""

    # Polygons and run lengths are not read.
    # Source: T.-Y. Lin et al., Microsoft COCO: Common Objects in Context, arXiv:1405.0312. A label is the index of the
    # category's id among the sorted ids. Invalid annotations and missing images are skipped and listed in `skipped`.
    # Training leaves out crowds and images without another object, as detectron2 and torchvision do; validation keeps
    # them. Without a val file, a fifth of the images is held out by a hash of path and `split_seed`. Images are resized
    # so that the shorter side is `data.size` and the longer at most 5/3 of it; with `augment.scale_jitter` or
    # `multi_scale`, training resizes by a random factor and crops instead.

    name = "coco"
    in_channels = 3
    tasks = ("detect",)

    def __init__(self, config: DataConfig) -> None:
        super().__init__(config)
        side = config.size
        self.input_size = (side, side)
        self.root = existing_folder(config.root, "COCO", f"{LAYOUT}; from {SOURCE}")
        self.classes = ()
        self.title = f"COCO in {self.root.name}"
        self.description = f"Photographs in COCO's format from {self.root.name}, with a box for every object."

    def datasets(self) -> tuple[FileSet, FileSet]:
        """Read the annotation files, check every annotation, and select `train_size` and `val_size` images."""
        config, side = self.config, self.input_size[0]
        read = {part: read_instances(file) for part, file in find_annotations(self.root).items()}
        faults = [fault for found in read.values() for fault in found.faults]
        categories = same_categories({part: instances.categories for part, instances in read.items()})
        labels = {number: label for label, number in enumerate(sorted(categories))}
        self.classes = tuple(categories[number] for number in labels)
        parts = {part: list_images(self.root, part, found, labels, faults) for part, found in read.items()}
        self.skipped = faults
        total = sum(1 + len(image["annotations"]) for found in read.values() for image in found.images.values())
        warn_skipped(faults, total, config.max_skipped, "images and annotations")
        train, val = parts.values() if "val" in parts else hold_out_images(parts["train"], config.split_seed)
        if both := {image.path for image in train} & {image.path for image in val}:
            raise Mistake(f"an image must be in train or in val, got {min(both)!r} and {len(both) - 1} more in both")
        train = [image._replace(crowds=NO_OBJECTS) for image in train if image.objects != NO_OBJECTS]
        if not train or not val:
            received = f"{len(train)} and {len(val)}: {name_some(faults)}" if faults else f"{len(train)} and {len(val)}"
            raise Mistake(
                f"--data.root must hold images with objects to train on and images to validate on, got {received}"
            )
        longest = max(side + 1, int(MAX_ASPECT * side))
        fit = v2.Resize(side, max_size=longest)
        jitter = multi_scale(side, longest) if config.augment.multi_scale else large_scale_jitter(config.augment, side)
        transform = compose([*(jitter or [fit]), *flip_and_colours(config.augment)])
        train = select_some(train, config.train_size, config.split_seed, "train_size")
        val = select_some(val, config.val_size, config.split_seed, "val_size")
        return self._set(train, transform), self._set(val, compose([fit]))

    def _set(self, listed: Sequence[ImageEntry], transform: Transform | None) -> FileSet:
        samples = [(image.path, zlib.crc32(image.objects + image.crowds)) for image in listed]
        return FileSet(samples, partial(load_image_entry, self.root, listed), transform, self.config.max_skipped)


def load_image_entry(root: Path, listed: Sequence[ImageEntry], index: int) -> Example:
    """Read an image and its annotations."""
    path, height, width, *packed = listed[index]
    image = tv_tensors.Image(load_image(root / path))
    if image.shape[-2:] != (height, width):
        rule = f"an image must have the size in its annotations, {width}x{height} pixels"
        raise Mistake(f"{rule}, got {image.shape[-1]}x{image.shape[-2]}")
    objects, crowds = (json.loads(part) for part in packed)
    rows = objects + crowds
    return image, {
        "boxes": to_boxes(torch.tensor([row[1:5] for row in rows]), height, width),
        "labels": torch.tensor([row[0] for row in rows], dtype=torch.int64),
        "crowd": torch.arange(len(rows)) >= len(objects),
        "name": path,
    }


def find_annotations(root: Path) -> dict[str, Path]:
    """Return the annotation files of "train" and, if there is one, of "val"."""
    found: dict[str, Path] = {}
    for part, matches in zip(("train", "val"), matching_parts(root / "annotations", "*{}*.json"), strict=True):
        files = [path for path in matches if path.name.startswith("instances_")] or matches
        if len(files) > 1 or (not files and part == "train"):
            received = ", ".join(path.name for path in files) or f"none for {part} in {str(root)!r}"
            raise Mistake(f"--data.root must hold {LAYOUT}; from {SOURCE}; got {received}")
        if files:
            found[part] = files[0]
    return found


def read_instances(path: Path) -> Instances:
    """Read an annotation file."""
    rule = "annotations must be COCO's JSON of images, annotations and categories"
    try:
        content = json.loads(path.read_bytes())
        images, annotations, categories = (content[name] for name in ("images", "annotations", "categories"))
        names = {one["id"]: str(one["name"]) for one in categories}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Mistake(f"{rule}, got {path.name}: {reason(error)}") from error
    if not names or len(names) < len(categories):
        raise Mistake(f"ids of categories must be different integers, which those of {path.name} are not")
    faults: list[Fault] = []
    by_id: dict[int, dict[str, Any]] = {}
    for image in images:
        with noted(str(image.get("file_name", path.name)), faults):
            if image["id"] in by_id:
                raise Mistake(f"image {image['id']} is listed twice")
            by_id[image["id"]] = {name: image[name] for name in ("file_name", "height", "width")} | {"annotations": []}
    for one in annotations:
        with noted(f"{path.name} annotation {one.get('id')}", faults):
            if one["image_id"] not in by_id:
                raise Mistake(f"image_id must be the id of a listed image, got {one['image_id']}")
            by_id[one["image_id"]]["annotations"].append(one)
    return Instances(path.stem, names, by_id, faults)


@contextmanager
def noted(name: str, faults: list[Fault]) -> Iterator[None]:
    """Add the error of an invalid entry to `faults`."""
    try:
        yield
    except (ValueError, KeyError, TypeError) as error:
        faults.append((name, reason(error)))


def same_categories(of_parts: Mapping[str, Mapping[int, str]]) -> dict[int, str]:
    """Return the categories of training, which must include those of validation."""
    train = of_parts["train"]
    for number, name in of_parts.get("val", {}).items():
        if train.get(number) != name:
            rule = "categories of val must be those of train"
            raise Mistake(f"{rule}, got {number} {name!r} instead of {train.get(number)!r}")
    return dict(train)


def list_images(
    root: Path, part: str, instances: Instances, labels: Mapping[int, int], faults: list[Fault]
) -> list[ImageEntry]:
    """List the existing images with their valid annotations, in the order of their ids; add the others to `faults`."""
    folder = image_folder(root, part, instances)
    listed = []
    for _, image in sorted(instances.images.items()):
        path = folder / image["file_name"]
        name = path.relative_to(root).as_posix()
        if not path.is_file():
            faults.append((name, "missing"))
            continue
        height, width = image["height"], image["width"]
        by_crowd: tuple[list, list] = [], []  # objects, crowds
        for one in image["annotations"]:
            with noted(f"{name} annotation {one.get('id')}", faults):
                by_crowd[bool(one.get("iscrowd"))].append(convert_annotation(one, labels, height, width))
        packed = (json.dumps(rows, separators=(",", ":")).encode() for rows in by_crowd)
        listed.append(ImageEntry(name, height, width, *packed))
    return listed


def image_folder(root: Path, part: str, instances: Instances) -> Path:
    """Return the folder that holds an image of a part, such as train2014 for instances_train2014, else train."""
    named = instances.file[instances.file.index(part) :]
    below = (named, f"images/{named}", part, f"images/{part}", "images", ".")
    names = [image["file_name"] for image in instances.images.values()]
    for folder in (root / name for name in below):
        if folder.is_dir() and any((folder / name).is_file() for name in names):
            return folder
    raise Mistake(f"--data.root must hold {LAYOUT}; from {SOURCE}; got no image of {part} in {str(root)!r}")


def convert_annotation(annotation: Mapping[str, Any], labels: Mapping[int, int], height: int, width: int) -> list[Any]:
    """Convert an annotation to the list in `ImageEntry`, with its box clipped to the image."""
    category, box = annotation["category_id"], annotation["bbox"]
    if category not in labels:
        raise Mistake(f"category_id must be the id of a category, got {category!r}")
    left, top, wide, high = box
    ends = [max(left, 0), max(top, 0), min(left + wide, width), min(top + high, height)]
    if not (ends[0] < ends[2] and ends[1] < ends[3]):
        raise Mistake(f"bbox must have an area in the image of {width}x{height} pixels, got {box}")
    return [labels[category], *ends, annotation.get("id")]
