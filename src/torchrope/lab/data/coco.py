"""Data sets in COCO's instance format: boxes, polygons and run-length masks, one JSON file per part."""

import json
import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, TypeGuard

import numpy as np
import torch
from pycocotools import mask as run_lengths
from torch import Tensor
from torchvision import tv_tensors
from torchvision.transforms import v2

from torchrope.lab.data.config import CocoConfig
from torchrope.lab.data.dense import (
    Change,
    DenseModule,
    Example,
    PictureSet,
    compose,
    flip_and_colours,
    imagenet_normalise,
    large_scale_jitter,
    select_some,
    to_boxes,
)
from torchrope.lab.data.faults import Fault, name_some, warn_skipped
from torchrope.lab.data.folders import matching
from torchrope.lab.data.images import existing_folder, hold_out, load_image

LONGEST = 5 / 3  # side, over the shorter one: 1333 for 800
NOTHING = b"[]"
FARTHEST = 1e5  # pixels; a polygon that goes beyond is damaged

LAYOUT = (
    "annotations/instances_train2017.json and instances_val2017.json (or one *train*.json and one or no *val*.json), "
    "and the images that they name in train2017 and val2017, train and val, either in images/, or images"
)
SOURCE = "cocodataset.org"


class Picture(NamedTuple):
    """An image with its objects and its crowds.

    Both are JSON, [label, left, top, right, bottom, id, segmentation] of each: as text, since many small Python objects
    would be copied into every loading process.
    """

    path: str
    height: int
    width: int
    objects: bytes
    crowds: bytes


class Instances(NamedTuple):
    """Contents of a JSON file: category names by id, images, their annotations, and faults of some of them."""

    file: str
    categories: dict[int, str]
    images: dict[int, dict[str, Any]]
    annotations: dict[int, list[dict[str, Any]]]
    faults: list[Fault]


class CocoSet(PictureSet):
    """Pictures with boxes, labels, crowds, and masks where the annotations have some.

    Args:
        root: Folder that the paths start from.
        listed: The pictures.
        masks: Whether targets have masks.
        change: Changes bytes and truth.
        max_skipped: How many may be left out.
    """

    def __init__(
        self, root: Path, listed: Sequence[Picture], masks: bool, change: Change | None, max_skipped: int
    ) -> None:
        self.root = root
        self.listed = listed
        self.masks = masks
        samples = [(picture.path, zlib.crc32(picture.objects + picture.crowds)) for picture in listed]
        super().__init__(samples, imagenet_normalise(), change, max_skipped)

    def load(self, index: int) -> Example:
        """Read a picture, and decode its objects."""
        path, height, width, *packed = self.listed[index]
        image = tv_tensors.Image(load_image(self.root / path))
        if image.shape[-2:] != (height, width):
            rule = f"it must be as large as its annotations say, {width}x{height} pixels"
            raise ValueError(f"{rule}, got {image.shape[-1]}x{image.shape[-2]}")
        objects, crowds = (json.loads(part) for part in packed)
        rows = objects + crowds
        target = {
            "boxes": to_boxes(torch.tensor([row[1:5] for row in rows]), height, width),
            "labels": torch.tensor([row[0] for row in rows], dtype=torch.int64),
            "crowd": torch.arange(len(rows)) >= len(objects),
            "name": path,
        }
        if self.masks:
            masks = [decode(row[-1], height, width) for row in rows]
            stacked = torch.stack(masks) if masks else torch.zeros(0, height, width, dtype=torch.bool)
            target["masks"] = tv_tensors.Mask(stacked)
        return image, target


class Coco(DenseModule):
    """COCO, 118,287 pictures to train on and 5,000 to validate with 80 classes of objects, or data in its format.

    Labels are the places of the categories' ids in their order. Annotations that cannot be used, and images that are
    not there, are left out, named and counted. Crowds, and then images without an object, are left out of training, as
    detectron2 and torchvision have it, and are part of validation. Without a file for val a fifth of the images is held
    out by a hash of the name and `split_seed`. Where no annotation has a polygon or run lengths there are no masks.

    Training resizes the shorter side to `data.size` and the longer to 5/3 of it at most, as validation does, or
    jitters and crops by `augment.scale_jitter`.

    Source: T.-Y. Lin et al., Microsoft COCO: Common Objects in Context, arXiv:1405.0312.

    Raises:
        ValueError: root is missing or not laid out so, or a file is not of the format.
    """

    name = "coco"
    in_channels = 3
    tasks = ("detect",)

    config: CocoConfig

    def __init__(self, config: CocoConfig) -> None:
        super().__init__(config)
        side = config.size
        self.input_size = (side, side)
        self.root = existing_folder(config.root, "COCO", f"{LAYOUT}; from {SOURCE}")
        self.classes = ()
        self.title = f"COCO in {self.root.name}"
        self.description = f"Photographs in COCO's format from {self.root.name}, with a box around every object."

    def datasets(self) -> tuple[CocoSet, CocoSet]:
        """Read both files, check every annotation, and choose `train_size` and `val_size` images."""
        config, side = self.config, self.input_size[0]
        files = {part: find_annotations(self.root, part) for part in ("train", "val")}
        read = {part: read_instances(file) for part, file in files.items() if file is not None}
        categories = same_categories({part: instances.categories for part, instances in read.items()})
        self.classes = tuple(categories[number] for number in sorted(categories))
        masks = any(one.get("segmentation") for each in read["train"].annotations.values() for one in each)
        labels = {number: label for label, number in enumerate(sorted(categories))}
        parts, faults = {}, []
        for part, instances in read.items():
            parts[part], found = list_pictures(self.root, part, instances, labels, masks)
            faults += instances.faults + found
        self.skipped = faults
        total = sum(len(one.images) + sum(map(len, one.annotations.values())) for one in read.values())
        warn_skipped(faults, total, config.max_skipped, "images and annotations")
        train, val = (parts["train"], parts["val"]) if "val" in parts else held_out(parts["train"], config.split_seed)
        train = [picture._replace(crowds=NOTHING) for picture in train if picture.objects != NOTHING]
        if not train or not val:
            came = f"{len(train)} and {len(val)}: {name_some(faults)}" if faults else f"{len(train)} and {len(val)}"
            raise ValueError(
                f"--data.root must hold images with objects to train on and images to validate on, got {came}"
            )
        fit = v2.Resize(side, max_size=max(side + 1, int(LONGEST * side)))
        jitter = large_scale_jitter(config.augment, side)
        change = compose([*(jitter or [fit]), *flip_and_colours(config.augment)])
        chosen = select_some(train, config.train_size, config.split_seed, "train_size")
        held = select_some(val, config.val_size, config.split_seed, "val_size")
        return (
            CocoSet(self.root, chosen, masks, change, config.max_skipped),
            CocoSet(self.root, held, masks, compose([fit]), config.max_skipped),
        )


def find_annotations(root: Path, part: str) -> Path | None:
    """Find the file of a part; None for a val that is not there.

    Raises:
        ValueError: there are several, or there is none for train.
    """
    found = matching(root / "annotations", f"*{part}*.json")
    found = [path for path in found if path.name.startswith("instances_")] or found
    if len(found) > 1 or (not found and part == "train"):
        came = ", ".join(path.name for path in found) or f"none for {part} in {str(root)!r}"
        raise ValueError(f"--data.root must hold {LAYOUT}; from {SOURCE}; got {came}")
    return found[0] if found else None


def read_instances(path: Path) -> Instances:
    """Read a file of annotations, and sort them by image.

    Raises:
        ValueError: it cannot be read, or is of another format.
    """
    rule = "annotations must be COCO's JSON of images, annotations and categories"
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{rule}, got {path.name}: {' '.join(str(error).split())}") from error
    for name in ("images", "annotations", "categories"):
        entries = content.get(name) if isinstance(content, dict) else None
        if not isinstance(entries, list) or not all(isinstance(one, dict) for one in entries):
            raise ValueError(f"{rule}, got {path.name} without a list of {name}")
    images, annotations, categories = content["images"], content["annotations"], content["categories"]
    names = {one.get("id"): str(one.get("name")) for one in categories}
    if not names or len(names) < len(categories) or not all(_is_whole(number) for number in names):
        raise ValueError(f"categories must have each an id of its own, a whole number, got others in {path.name}")
    faults: list[Fault] = []
    by_id: dict[int, dict[str, Any]] = {}
    for image in images:
        wrong = fault_of_image(image, by_id)
        if wrong is None:
            by_id[image["id"]] = image
        else:
            faults.append((str(image.get("file_name", path.name)), wrong))
    of_image: dict[int, list[dict[str, Any]]] = {number: [] for number in by_id}
    for one in annotations:
        if _is_whole(one.get("image_id")) and one["image_id"] in of_image:
            of_image[one["image_id"]].append(one)
        else:
            faults.append((f"{path.name} annotation {one.get('id')}", f"of image {one.get('image_id')}, not listed"))
    return Instances(path.stem, names, by_id, of_image, faults)


def fault_of_image(image: Mapping[str, Any], known: Iterable[int]) -> str | None:
    """Describe what is wrong with an image's entry; None if nothing is."""
    if not _is_whole(image.get("id")) or not isinstance(image.get("file_name"), str):
        return f"image {image.get('id')!r} without an id and a file_name"
    name = PurePosixPath(image["file_name"])
    if name.is_absolute() or ".." in name.parts:
        return f"image {image['id']} is not below the folder of images"
    if image["id"] in known:
        return f"image {image['id']} is listed twice"
    if not all(_is_whole(image.get(name)) and image[name] > 0 for name in ("height", "width")):
        return f"image {image['id']} without height and width"
    return None


def same_categories(of_parts: Mapping[str, Mapping[int, str]]) -> dict[int, str]:
    """The categories of training, which those of validation must be among."""
    train = of_parts["train"]
    for number, name in of_parts.get("val", {}).items():
        if train.get(number) != name:
            rule = "categories of val must be those of train"
            raise ValueError(f"{rule}, got {number} {name!r} instead of {train.get(number)!r}")
    return dict(train)


def list_pictures(
    root: Path, part: str, instances: Instances, labels: Mapping[int, int], masks: bool
) -> tuple[list[Picture], list[Fault]]:
    """List the images that are there with their annotations that can be used, in the order of their ids.

    Returns:
        The pictures, and images and annotations that are left out.
    """
    folder = image_folder(root, part, instances)
    listed, faults = [], []
    for number, image in sorted(instances.images.items()):
        path = folder / image["file_name"]
        name = path.relative_to(root).as_posix()
        if not path.is_file():
            faults.append((name, "not there"))
            continue
        height, width = image["height"], image["width"]
        objects: tuple[list, list] = [], []  # and crowds
        for one in instances.annotations[number]:
            try:
                objects[bool(one.get("iscrowd"))].append(checked(one, labels, height, width, masks))
            except ValueError as error:
                faults.append((f"{name} annotation {one.get('id')}", str(error)))
        listed.append(Picture(name, height, width, *(_packed(each) for each in objects)))
    return listed, faults


def image_folder(root: Path, part: str, instances: Instances) -> Path:
    """Find the folder that has at least one of the images: train2014 for instances_train2014, else train."""
    own = instances.file[instances.file.index(part) :]
    below = (own, f"images/{own}", part, f"images/{part}", "images", ".")
    names = [image["file_name"] for image in instances.images.values()]
    for folder in (root / name for name in below):
        if folder.is_dir() and any((folder / name).is_file() for name in names):
            return folder
    raise ValueError(f"--data.root must hold {LAYOUT}; from {SOURCE}; got no image of {part} in {str(root)!r}")


def checked(
    annotation: Mapping[str, Any], labels: Mapping[int, int], height: int, width: int, masks: bool
) -> list[Any]:
    """Bring an annotation to the form of `Picture`, its box cut off where the image ends.

    Raises:
        ValueError: it cannot be used.
    """
    category = annotation.get("category_id")
    if not _is_whole(category) or category not in labels:
        raise ValueError(f"category {category!r} is not among the categories")
    box = annotation.get("bbox")
    if not _are_numbers(box) or len(box) != 4:
        raise ValueError(f"empty: without a box of four numbers, got {box!r}")
    left, top, wide, high = box
    if not (wide > 0 and high > 0):
        raise ValueError(f"a box without area, {box}")
    ends = [max(left, 0), max(top, 0), min(left + wide, width), min(top + high, height)]
    if not (ends[0] < ends[2] and ends[1] < ends[3]):
        raise ValueError(f"a box out of the image of {width}x{height} pixels, {box}")
    segmentation = annotation.get("segmentation") if masks else None
    if masks:
        check_segmentation(segmentation, height, width)
    return [labels[category], *ends, annotation.get("id"), segmentation]


def check_segmentation(segmentation: Any, height: int, width: int) -> None:
    """Check polygons, or run lengths, which pycocotools would read beyond their end.

    Raises:
        ValueError: they are none, or of another image's size.
    """
    if isinstance(segmentation, list) and segmentation:
        for polygon in segmentation:
            if not _are_numbers(polygon) or len(polygon) < 6 or len(polygon) % 2:
                raise ValueError("a polygon must be three or more pairs of numbers")
            if max(map(abs, polygon)) > FARTHEST:
                raise ValueError(f"a polygon {max(map(abs, polygon)):g} pixels away")
    elif isinstance(segmentation, dict):
        if segmentation.get("size") != [height, width]:
            rule = f"a mask must be as large as the image, [{height}, {width}]"
            raise ValueError(f"{rule}, got {segmentation.get('size')}")
        counts = segmentation.get("counts")
        runs = unpacked(counts) if isinstance(counts, str) else counts
        if not isinstance(runs, list) or not all(_is_whole(run) and run >= 0 for run in runs):
            raise ValueError("a mask must have counts of 0 or more")
        if sum(runs) != height * width:
            raise ValueError(f"counts of a mask must sum to {height * width}, the image's pixels, got {sum(runs)}")
    else:
        raise ValueError("empty: without a polygon or a mask")


def unpacked(counts: str) -> list[int]:
    """Run lengths of pycocotools' compressed form.

    Five bits a character, low ones first; from the fourth run on the difference to the run before the last.

    Example:
        >>> unpacked("52203")
        [5, 2, 2, 2, 5]
    """
    runs: list[int] = []
    value = shift = 0
    for character in counts.encode(errors="replace"):
        bits = character - 48
        if not 0 <= bits < 64:
            raise ValueError("a mask must have counts in pycocotools' characters")
        value |= (bits & 31) << shift
        shift += 5
        if bits & 32:
            continue
        if bits & 16:
            value -= 1 << shift
        runs.append(value + (runs[-2] if len(runs) > 2 else 0))
        value = shift = 0
    return runs


def decode(segmentation: Any, height: int, width: int) -> Tensor:
    """Draw polygons or run lengths as pycocotools does: bool `(height, width)`."""
    if isinstance(segmentation, dict) and isinstance(segmentation["counts"], str):
        packed = segmentation
    else:
        packed = run_lengths.frPyObjects(segmentation, height, width)
    if isinstance(packed, list):
        packed = run_lengths.merge(packed)
    return torch.from_numpy(np.ascontiguousarray(run_lengths.decode(packed))).bool()


def held_out(pictures: Sequence[Picture], split_seed: int) -> tuple[list[Picture], list[Picture]]:
    """Hold out a fifth."""
    if len(pictures) < 2:
        raise ValueError(f"images must number at least 2, one to train on and one to hold out, got {len(pictures)}")
    by_path = {picture.path: picture for picture in pictures}
    train, val = hold_out([(path, 0) for path in by_path], split_seed)
    return [by_path[path] for path, _ in train], [by_path[path] for path, _ in val]


def _packed(objects: Sequence[Any]) -> bytes:
    return json.dumps(objects, separators=(",", ":")).encode()


def _is_whole(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _are_numbers(values: Any) -> TypeGuard[list[float]]:
    return isinstance(values, list) and all(
        isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) for value in values
    )
