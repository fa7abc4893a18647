"""Image classification data from a folder with one sub-folder per class."""

import hashlib
import logging
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np
import PIL
import simplejpeg
import torch
from PIL import Image, ImageFile, ImageOps, UnidentifiedImageError
from torch import Tensor
from torchvision.datasets import folder as torchvision_folder
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional as image_ops

from torchrope_lab.data.cache import index_of, read_files
from torchrope_lab.data.crops import CropTransform, centre, random_crop
from torchrope_lab.data.data_config import NATIVE, DataConfig
from torchrope_lab.data.datamodule import DataModule
from torchrope_lab.data.faults import reason, warn_skipped
from torchrope_lab.data.folders import files_below, subfolders, warn_unread
from torchrope_lab.data.shards import Sample, Shards
from torchrope_lab.data.streamed import StreamedSet
from torchrope_lab.data.tensors import balanced_subset, byte_statistics, normalisation
from torchrope_lab.mistakes import Mistake

VAL_FRACTION = 0.2
CROP_SCALE = (0.6, 1.0)
PARTS = ("train", "val")
NAMES_OF_PARTS = {*PARTS, "training", "valid", "validation", "test", "testing"}
STATISTICS_IMAGES = 512
IMG_EXTENSIONS = (*torchvision_folder.IMG_EXTENSIONS, ".gif")
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "PPM", "TIFF", "GIF")
"""Formats of these extensions, of a GIF the first frame; for some others Pillow runs external programs."""
PHOTOMETRIC, WHITE_IS_ZERO = 262, 0  # of TIFF
ORIENTATION = 0x0112  # of EXIF
LAYOUT = "root/<class>/* or root/train/<class>/* with root/val/<class>/*"

Made = TypeVar("Made", bound="ImageSet")
Module = TypeVar("Module", bound="CroppedImages")

logger = logging.getLogger(__name__)


class ImageSet(StreamedSet):
    """Images read from disk, or from shards, on access; an unreadable image is replaced by the next readable one."""

    # With `fast`, JPEG files are decoded by libjpeg-turbo to tensors instead of PIL images.

    decodes_once = True

    def __init__(
        self,
        root: Path,
        samples: Sequence[Sample],
        view: CropTransform,
        max_skipped: int = 0,
        *,
        fast: bool = False,
        shards: Shards | None = None,
    ) -> None:
        super().__init__(samples, max_skipped, "images")
        self.root = root
        self.view = view
        self.fast = fast
        self.shards = shards

    def viewed(self: Made, view: CropTransform) -> Made:
        """Return the same images with another crop of PIL images; unreadable files are counted together."""
        return self.changed(view=view, fast=False, _enlarged=torch.zeros_like(self._enlarged).share_memory_())

    def load(self, index: int) -> Image.Image | Tensor:
        """Decode an image."""
        least = None if self.view.native else self.view.decoded
        image = decode_bytes(self.open(index)) if self.fast else load_image(self.open(index), least)
        self._enlarged[index] = min(image_ops.get_size(image)) < self.view.resized
        return image

    def to_size(self, decoded: Image.Image | Tensor) -> Tensor:
        """Crop an image to bytes `(3, size, size)`."""
        cropped = self.view.transform(decoded)
        return cropped if isinstance(cropped, Tensor) else image_ops.pil_to_tensor(cropped)

    def open(self, index: int) -> Path | BinaryIO:
        """Return the path or an open file of an image."""
        return self.root / self.samples[index][0] if self.shards is None else self.shards.open(index)

    def files(self, index: int) -> Sequence[Path | BinaryIO]:
        """Return the path or an open file of an image."""
        return [self.open(index)]

    def with_examples(self: Made, sets: Sequence[StreamedSet], indices: Tensor) -> Made:
        """Return images of several sets, numbered consecutively; raises ValueError for shards."""
        if self.shards is not None:  # they are read in their order
            raise Mistake(f"--data.folds is for images in folders, got shards in {str(self.root)!r}")
        return super().with_examples(sets, indices)

    def statistics(self) -> tuple[Tensor, Tensor]:
        """Measure mean and standard deviation per channel on up to 512 images, evenly spaced in the set."""
        images, step = self.raw, -(-len(self) // STATISTICS_IMAGES)
        return byte_statistics(torch.stack([images[index][0] for index in range(0, len(self), step)]))


class CroppedImages(DataModule):
    """Base class of colour images of any size, cropped when they are read."""

    axes = ("height", "width")
    in_channels = 3
    crop_scale = CROP_SCALE

    root: Path

    def __init__(self, config: DataConfig) -> None:
        super().__init__(config)
        self.input_size = (config.size, config.size)
        self.other_sizes = "cropped" if config.crop_ratio == NATIVE else "read"
        self.interpolation = InterpolationMode(config.interpolation)

    def at_size(self: Module, size: int) -> Module:
        """Return the validation images, read again and cropped to another size."""
        _, val = self._made_datasets()
        assert isinstance(val, ImageSet)
        return self._with_validation(size, val.viewed(self._centre(size)))

    def _set(self, samples: Sequence[Sample], *, train: bool, shards: Shards | None = None) -> ImageSet:
        view, fast = self._view(train=train)
        return ImageSet(self.root, samples, view, self.config.max_skipped, fast=fast, shards=shards)

    def _view(self, *, train: bool) -> tuple[CropTransform, bool]:
        """Return the crop of a part, and whether it is decoded by the fast pipeline."""
        if not train:
            return self._centre(self.config.size), False
        crop = random_crop(self.config.augment, self.config.size, self.crop_scale, self.interpolation)
        return crop, self.config.pipeline == "fast"

    def _normalised(self, train: ImageSet, val: ImageSet) -> tuple[ImageSet, ImageSet]:
        centred = train.viewed(self._centre(self.config.size))
        normalise = normalisation(self.config.normalise, centred.statistics)
        return train.changed(normalise=normalise), val.changed(normalise=normalise)

    def _centre(self, size: int) -> CropTransform:
        return centre(size, self.config.crop_ratio, self.interpolation)


class Images(CroppedImages):
    """Colour images from root/train/<class>/* with root/val/<class>/*, or from root/<class>/*."""

    # Without train and val, a fifth of each class is held out by a hash of path and `split_seed`: the split is the same
    # on every machine, and adding an image moves almost no other between the parts. Training crops 60 to 100 % of an
    # image at random, without flips unless `augment.flip` is set, since left and right may be classes. Every file is
    # decoded once, and again when it has changed; unreadable files are skipped, named in one warning and listed in
    # `skipped`, transparent ones are composed on white and counted in another.

    name = "images"

    def __init__(self, config: DataConfig) -> None:
        super().__init__(config)
        self.root = existing_folder(config.root)
        self.folders, self.classes = find_classes(self.root)
        self.title = f"Images in {self.root.name}"

    def datasets(self) -> tuple[ImageSet, ImageSet]:
        """Check the files, split, select `train_size` and `val_size` images, and measure mean and std."""
        config, side = self.config, self.input_size[0]
        train, val = split_parts(self._readable_samples(), self.classes, config.split_seed, "images")
        train = select_examples(train, config.train_size, config.split_seed, "train_size")
        val = select_examples(val, config.val_size, config.split_seed, "val_size")
        transparent = sum(path in self._transparent for path, _ in (*train, *val))
        on_white = f" {transparent:,} are transparent and composed on white." if transparent else ""
        self.description = (
            f"{len(train) + len(val):,} images from the folder {self.root.name}, cropped to {side}×{side} colour "
            f"pixels; the class is the sub-folder.{on_white}"
        )
        return self._normalised(self._set(train, train=True), self._set(val, train=False))

    def _readable_samples(self) -> dict[str, list[Sample]]:
        """List the readable images of each part; the others are listed in `skipped`, transparent ones are counted."""
        listed = {part: list_samples(self.root, folder, self.classes) for part, folder in self.folders.items()}
        paths = [path for samples in listed.values() for path, _ in samples]
        self.unread = warn_unread(self.root, paths, f"images of a class ({' '.join(IMG_EXTENSIONS)})")
        found, self.skipped = read_files(
            self.root,
            paths,
            lambda path: decode(path, self.input_size[0])[1],
            index_of(self.root, "images"),
            version=f"2 {PIL.__version__}",
            doing="Checking images",
            explain=explain_fault,
        )
        transparent = self._transparent = {path for path, is_transparent in found.items() if is_transparent}
        warn_skipped(self.skipped, len(paths), self.config.max_skipped, "images")
        if transparent:
            logger.warning("%d of %d images are transparent and composed on white", len(transparent), len(paths))
        broken = {path for path, _ in self.skipped}
        return {part: [s for s in samples if s[0] not in broken] for part, samples in listed.items()}


def existing_folder(root: str | None, kind: str = "images", layout: str = LAYOUT) -> Path:
    """Return the absolute path of root."""
    if not root or not Path(root).is_dir():
        raise Mistake(f"--data.root must be a folder with {kind} ({layout}), got {root!r}")
    return Path(root).resolve()


def find_classes(root: Path) -> tuple[dict[str, Path], tuple[str, ...]]:
    """Return the folders of the class folders, `{"train": ..., "val": ...}` or `{"": root}`, and the class names."""
    names = subfolders(root)
    check_parts(root, names)
    # A class may be called train: only a folder with sub-folders is a part.
    parts = {part: root / part for part in PARTS if part in names and subfolders(root / part)}
    if len(parts) == 1:
        raise Mistake(
            f"--data.root must hold train and val with one sub-folder per class in each, got {', '.join(names)}"
        )
    classes, *of_val = [subfolders(folder) for folder in parts.values()] or [names]
    if of_val and classes != of_val[0]:
        differences = [f"{name!r} in train only" for name in classes if name not in of_val[0]]
        differences += [f"{name!r} in val only" for name in of_val[0] if name not in classes]
        raise Mistake(f"train and val must have the same classes, got {', '.join(differences)}")
    if len(classes) < 2:
        rule = f"--data.root must hold one sub-folder per class, two or more ({LAYOUT})"
        raise Mistake(f"{rule}, got {', '.join(classes) or 'none'} in {str(root)!r}")
    return parts or {"": root}, tuple(classes)


def check_parts(root: Path, names: Sequence[str], *, with_folders: bool = True) -> None:
    """Raise ValueError if all sub-folders are called as parts, but not train and val; those without may be classes."""
    if {*PARTS} <= {*names} or {*names} <= {*PARTS} or not {name.lower() for name in names} <= NAMES_OF_PARTS:
        return
    if not with_folders or all(subfolders(root / name) for name in names):
        raise Mistake(f"parts must be called train and val, got {', '.join(names)} in {str(root)!r}")


def list_samples(
    root: Path, folder: Path, classes: Sequence[str], extensions: Sequence[str] = IMG_EXTENSIONS
) -> list[Sample]:
    """List the files of every class with one of the extensions, at any depth, sorted."""
    return sorted(
        (path, label) for label, name in enumerate(classes) for path in files_below(folder / name, root, extensions)
    )


def open_image(path: Path | BinaryIO) -> ImageFile.ImageFile:
    """Open an image in one of `FORMATS`; the file extension is ignored."""
    return Image.open(path, formats=FORMATS)


def load_image(path: Path | BinaryIO, size: int | None = None) -> Image.Image:
    """Decode an image to 8-bit RGB, rotated by its EXIF orientation; transparent pixels are composed on white."""
    # Of 16-bit values the upper 8 bits are kept: 0 to 65535 map to 0 to 255 for every image. With `size`, a large JPEG
    # is decoded at a reduced resolution of at least `2 * size` pixels per side.
    return decode(path, size)[0]


def decode(path: Path | BinaryIO, size: int | None = None) -> tuple[Image.Image, bool]:
    """Return the image of `load_image`, and whether pixels of the file are transparent."""
    with open_image(path) as file:
        if size is not None:
            file.draft("RGB", (2 * size, 2 * size))
        return _upright_rgb(file)


def decode_bytes(path: Path | BinaryIO) -> Tensor:
    """Decode an image as `load_image` does, at full resolution, to bytes `(3, height, width)`."""
    # JPEG files in colour or grey, upright and undamaged are decoded by libjpeg-turbo alone.
    with open_image(path) as file:
        stream: Any = file.fp  # open until the image is loaded
        plain = file.format == "JPEG" and file.mode in ("RGB", "L") and file.getexif().get(ORIENTATION, 1) == 1
        if plain:
            stream.seek(0)
            try:
                return torch.from_numpy(simplejpeg.decode_jpeg(stream.read())).movedim(-1, 0)
            except ValueError:  # damaged: Pillow decides and explains
                stream.seek(0)
        return image_ops.pil_to_tensor(_upright_rgb(file)[0])


def _upright_rgb(file: ImageFile.ImageFile) -> tuple[Image.Image, bool]:
    file.filename = ""  # else Pillow maps the file into memory, and a rotated TIFF gets rows of the wrong length
    ImageOps.exif_transpose(file, in_place=True)
    if file.mode.startswith("I;16") or (file.mode == "I" and file.format in ("PNG", "PPM")):
        return _upper_bits(file)
    if file.mode.startswith(("I", "F")):
        raise Mistake(f"pixels must be 8-bit or unsigned 16-bit, got mode {file.mode}")
    if file.mode in ("LA", "La", "PA", "RGBA", "RGBa") or "transparency" in file.info:
        return compose_on_white(file)
    file.load()
    return (file if file.mode == "RGB" else file.convert("RGB")), False


def _upper_bits(file: ImageFile.ImageFile) -> tuple[Image.Image, bool]:
    """Reduce a grey image of 16 bits to RGB, and tell whether a grey of it is transparent."""
    values = np.asarray(file)
    # Pillow inverts WhiteIsZero images of 8 bits only.
    inverted = getattr(file, "tag_v2", {}).get(PHOTOMETRIC) == WHITE_IS_ZERO
    upper = (values >> 8).astype(np.uint8)
    transparent = values == file.info.get("transparency", -1)
    grey = np.where(transparent, np.uint8(255), 255 - upper if inverted else upper)
    return Image.fromarray(grey).convert("RGB"), bool(transparent.any())


def compose_on_white(image: Image.Image) -> tuple[Image.Image, bool]:
    """Compose an image with transparency on white; return the RGB image, and whether a pixel is transparent."""
    colour = image.info.get("transparency")
    if isinstance(colour, tuple) and max(colour) > 255:  # of 16-bit values, whose upper 8 bits Pillow keeps
        image = image.copy()
        image.info["transparency"] = tuple(value >> 8 for value in colour)
    image = (image.convert("LA") if image.mode == "La" else image).convert("RGBA")  # Pillow needs the detour
    alpha = image.getchannel("A")
    white = Image.new("RGB", image.size, "white")
    white.paste(image, mask=alpha)
    return white, bool((np.asarray(alpha) < 255).any())


def explain_fault(error: Exception) -> str:
    """Describe why an image cannot be decoded."""
    return f"no image ({', '.join(FORMATS)})" if isinstance(error, UnidentifiedImageError) else reason(error)


def split_parts(
    parts: dict[str, list[Sample]], classes: Sequence[str], split_seed: int, kind: str
) -> tuple[list[Sample], list[Sample]]:
    """Return training and validation samples; without separate parts, a fifth of each class is held out."""
    if len(parts) == 2:
        require_each(parts["train"], classes, 1, kind, " in train")
        require_each(parts["val"], classes, 1, kind, " in val")
        return parts["train"], parts["val"]
    require_each(parts[""], classes, 2, kind, ", one to train on and one to hold out")
    return hold_out(parts[""], split_seed)


def require_each(samples: Sequence[Sample], classes: Sequence[str], fewest: int, kind: str, purpose: str) -> None:
    """Raise ValueError if a class has fewer than `fewest` samples."""
    counts = Counter(label for _, label in samples)
    for label, name in enumerate(classes):
        if counts[label] < fewest:
            rule = f"readable {kind} of each class must number at least {fewest}{purpose}"
            raise Mistake(f"{rule}, got {counts[label]} for {name!r}")


def hold_out(samples: Sequence[Sample], split_seed: int) -> tuple[list[Sample], list[Sample]]:
    """Split each class by a hash of path and seed: a fifth, at least one sample, is held out; both parts are sorted."""

    def draw(sample: Sample) -> str:
        return hashlib.sha256(f"{split_seed} {sample[0]}".encode(errors="surrogateescape")).hexdigest()

    train, val = [], []
    of_class: dict[int, list[Sample]] = defaultdict(list)
    for sample in sorted(samples, key=draw):
        of_class[sample[1]].append(sample)
    for members in of_class.values():
        val_count = max(1, round(VAL_FRACTION * len(members)))
        val += members[:val_count]
        train += members[val_count:]
    return sorted(train), sorted(val)


def split_by_group(
    examples: Mapping[str, tuple[int, str, str]], split_seed: int, kind: str
) -> tuple[list[Sample], list[Sample]]:
    """Split examples by the parts of their groups, such as patients; a fifth of groups without a part is held out."""
    # `examples` are label, group and part ("train", "val", or "" to be split here) by name. For stratification, the
    # label of a group is the highest of its examples.
    placed: dict[str, tuple[str, str]] = {}  # part of a group, and an example in it
    highest: dict[str, int] = {}
    for name, (label, group, part) in examples.items():
        known, other = placed.setdefault(group, (part, name)) if part else ("", "")
        if known != part:
            rule = f"a {kind} must be in one part, got {known} and {part} for {kind} {group!r}"
            raise Mistake(f"{rule} ({other} and {name})")
        highest[group] = max(label, highest.get(group, 0))
    validates = {group for group, (part, _) in placed.items() if part == "val"}
    free = [(group, label) for group, label in highest.items() if group not in placed]
    validates |= {group for group, _ in hold_out(free, split_seed)[1]}
    train: list[Sample] = []
    val: list[Sample] = []
    for name, (label, group, _) in sorted(examples.items()):
        (val if group in validates else train).append((name, label))
    return train, val


def select_examples(samples: Sequence[Sample], size: int | None, seed: int, name: str) -> list[Sample]:
    """Select `size` samples, with numbers per class as equal as possible."""
    labels = torch.tensor([label for _, label in samples])
    return [samples[index] for index in balanced_subset(labels, size, seed, name).tolist()]
