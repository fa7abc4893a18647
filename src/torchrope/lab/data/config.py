"""The choice of a data set, as plain values: imports no torch."""

import math
import os
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

DataName = Literal[
    "digits",
    "motion",
    "fashion-mnist",
    "images",
    "cifar10",
    "cifar100",
    "tiny-imagenet",
    "imagenet",
    "videos",
    "ucf101",
    "volumes",
    "rsna",
    "scenes",
    "coco",
    "ade20k",
    "segments",
]
DATA_NAMES: tuple[str, ...] = get_args(DataName)
NAMES_OF_PICTURES = ("images", "cifar10", "cifar100", "tiny-imagenet", "imagenet")  # 8-bit, in colour
NAMES_OF_FILES = ("images", "imagenet")  # cropped when they are read
NAMES_OF_VIDEOS = ("videos", "ucf101")
NAMES_OF_VOLUMES = ("volumes", "rsna")
NAMES_OF_PHOTOGRAPHS = ("coco", "ade20k", "segments")  # with boxes, masks or maps
NAMES_DENSE = ("scenes", *NAMES_OF_PHOTOGRAPHS)  # where an answer has a place in the picture
NAMES_TO_CLASSIFY = tuple(name for name in DATA_NAMES if name not in NAMES_DENSE)
NAMES_WITH_ROOT = (
    "fashion-mnist",
    *NAMES_OF_PICTURES,
    *NAMES_OF_VIDEOS,
    *NAMES_OF_VOLUMES,
    *NAMES_OF_PHOTOGRAPHS,
)
READ_BY = {
    "frames": NAMES_OF_VIDEOS + NAMES_OF_VOLUMES,
    "frame_stride": NAMES_OF_VIDEOS,
    "split": ("ucf101",),
    "test_views": NAMES_OF_VIDEOS,
    "labels": NAMES_OF_VOLUMES,
    "windows": NAMES_OF_VOLUMES,
}

CHANGED_BY = {
    **dict.fromkeys(("crop_padding", "three_augment"), NAMES_OF_PICTURES),
    "crop_scale": NAMES_OF_FILES,
    "scale_jitter": NAMES_DENSE,
    "color_jitter": NAMES_OF_PICTURES + NAMES_OF_PHOTOGRAPHS,
    **dict.fromkeys(("mixup", "cutmix"), NAMES_TO_CLASSIFY),
    **dict.fromkeys(("randaugment", "erasing"), NAMES_OF_PICTURES + NAMES_OF_VIDEOS + NAMES_OF_VOLUMES),
}  # what else is changed there at random takes any data set

LARGEST_MAGNITUDE = 30  # of RandAugment


@dataclass
class AugmentConfig:
    """How training inputs are changed at random, in the order below; nothing is changed by default.

    What happens to an example is a function of the run's seed, the epoch and the example. `flip` and `repeats` are for
    every data set, `mixup` and `cutmix` for all that are classified, `randaugment` and `erasing` for pictures (images,
    CIFAR, Tiny-ImageNet and ImageNet), videos and volumes, `scale_jitter` for scenes, COCO, ADE20k and segments,
    `color_jitter` for the last three and for pictures, the others for pictures.

    Attributes:
        crop_padding: Pixels of black added on every side before a crop of the old size (4 for CIFAR).
        crop_scale: Least and largest share of a picture that is cropped and resized; None is the data set's own
            (0.6 to 1 of "images", 0.08 to 1 of "imagenet"; others have no such crop).
        scale_jitter: Least and largest factor on the size of a picture, of which a crop of `DataConfig.size` per side,
            or less where there is less, is taken then. With 1 the longer side is `size` (Ghiasi et al.,
            arXiv:2012.07177: 0.1 to 2), in "ade20k" and "segments" the shorter one. None is 0.5 to 2 for these two, and
            no jitter and no crop for "scenes" and "coco".
        flip: Exchange left and right in half of the examples.
        randaugment: n operations of magnitude m (0 to 30) on every picture (Cubuk et al., arXiv:1909.13719), the same
            ones on all frames of a clip; on all slices of a volume those that are no change of colours.
        three_augment: One of grey, solarised and blurred (DeiT-III, Touvron et al., arXiv:2204.07118).
        color_jitter: Largest relative change of brightness, contrast and saturation (0.3 in DeiT-III).
        erasing: Probability that a box of noise covers a part (Zhong et al., arXiv:1708.04896), through all frames or
            slices.
        mixup: Alpha of Mixup (Zhang et al., arXiv:1710.09412); labels become probabilities. 0 is off.
        cutmix: Alpha of CutMix (Yun et al., arXiv:1905.04899), likewise; where both are on, each batch draws one.
        mix_probability: Share of batches that are mixed.
        repeats: How often an example that is drawn comes within an epoch, changed otherwise each time; the epoch keeps
            its length, so that it sees so many times fewer of them (Hoffer et al., arXiv:1901.09335; DeiT: 3).

    Raises:
        ValueError: a number is out of range.
    """

    crop_padding: int = 0
    crop_scale: tuple[float, float] | None = None
    scale_jitter: tuple[float, float] | None = None
    flip: bool = False
    randaugment: tuple[int, int] | None = None
    three_augment: bool = False
    color_jitter: float = 0.0
    erasing: float = 0.0
    mixup: float = 0.0
    cutmix: float = 0.0
    mix_probability: float = 1.0
    repeats: int = 1

    def __post_init__(self) -> None:
        for name in ("crop_scale", "scale_jitter", "randaugment"):
            value = getattr(self, name)
            if value is not None:
                if len(value) != 2:
                    raise ValueError(f"{name} must be two numbers, got {value}")
                setattr(self, name, tuple(value))  # YAML has lists alone
        if self.crop_scale is not None and not 0 < self.crop_scale[0] <= self.crop_scale[1] <= 1:
            raise ValueError(f"crop_scale must rise within 0 and 1, got {self.crop_scale}")
        if self.scale_jitter is not None and not 0 < self.scale_jitter[0] <= self.scale_jitter[1] < math.inf:
            raise ValueError(f"scale_jitter must rise from above 0, got {self.scale_jitter}")
        if self.randaugment is not None:
            number, magnitude = self.randaugment
            if number < 1 or not 0 <= magnitude <= LARGEST_MAGNITUDE:
                rule = f"randaugment must be 1 or more operations of magnitude 0 to {LARGEST_MAGNITUDE}"
                raise ValueError(f"{rule}, got {self.randaugment}")
        if self.repeats < 1:
            raise ValueError(f"repeats must be 1 or more, got {self.repeats}")
        for name in ("crop_padding", "mixup", "cutmix"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must be 0 or more, got {getattr(self, name)}")
        for name in ("color_jitter", "erasing", "mix_probability"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must lie between 0 and 1, got {getattr(self, name)}")

    @property
    def of_some(self) -> list[str]:
        """The settings that are on and that not every data set takes."""
        return [name for name in CHANGED_BY if getattr(self, name)]

    @property
    def on(self) -> bool:
        """Whether anything is changed."""
        return bool(self.of_some) or self.flip or self.repeats > 1


@dataclass
class DataConfig:
    """Which data, how much of it, and in what batches.

    Attributes:
        name: The data set: "digits" (real 8x8 digits), "motion" (clips of moving digits), "fashion-mnist",
            "images" or "videos" (your own folder), "volumes" (your own DICOM series or NIfTI files), "rsna" (CT of
            the head), "scenes" (several digits on a canvas, with boxes, masks and a map), "segments" (your own pictures
            and masks), or another one by its name.
        root: Folder that holds the files, laid out as docs/data.md says. "digits", "motion" and "scenes" have none;
            "fashion-mnist", "cifar10" and "cifar100" are downloaded where it is not given.
        size: Pixels per side; None is the data set's own (8, 20, 28, 64, 32, 32, 64 and then 224 in the order
            of the names; 64 of "scenes", 800 of "coco", 512 of "ade20k" and "segments"). Of "ade20k" and "segments" it
            is that of a training crop, of "coco" the shorter side of a picture, where `scale_jitter` makes no crops.
        train_size: Train on that many examples, as equally many of each class as there can be; None is all,
            2400 clips of "motion", and 2000 "scenes".
        val_size: Validate on that many examples, chosen likewise; None is all, 600 clips of "motion", and 200 "scenes".
        batch_size: Examples in one training step.
        split_seed: Decides what is trained on and what is held out, whatever the seed of the run.
        workers: Processes that load data beside the training; 0 loads in the training process.
        resident: Keep a set that fits into memory on the training device, as bytes, and augment it there.
        augment: How training inputs are changed at random.
        frames: Frames of a clip, or slices of a volume; None is 8 and 32.
        frame_stride: Frames of a video for each frame of a clip; None is 4.
        split: Which of UCF101's three official splits; None is 1.
        test_views: Temporal segments and spatial crops of a video over which an evaluation averages logits; None is
            the centre alone.
        labels: Table with the labels of "volumes" or "rsna"; None is root/labels.csv or root/stage_2_train.csv.
        windows: [centre, width] of every channel of a volume, in the file's units, Hounsfield units for CT; None is
            brain, subdural and soft tissue for "rsna", and for "volumes" one channel, each volume from its 0.5th to
            its 99.5th percentile.
        max_skipped: Files that may be left out because they cannot be read; one more stops the run with their list.

    Raises:
        ValueError: a number is out of range, or root or augment is given to a data set that has no use for it.
    """

    name: DataName = "digits"
    root: str | None = None
    size: int | None = None
    train_size: int | None = None
    val_size: int | None = None
    batch_size: int = 64
    split_seed: int = 0
    workers: int = 0
    frames: int | None = None
    frame_stride: int | None = None
    split: int | None = None
    test_views: list[int] | None = None
    labels: str | None = None
    windows: list[list[float]] | None = None
    max_skipped: int = 100
    resident: bool = True
    augment: AugmentConfig = field(default_factory=AugmentConfig)

    def __post_init__(self) -> None:
        if self.root is not None:
            self.root = os.path.abspath(os.path.expanduser(self.root))  # stored, it must mean the same from anywhere
        if self.name not in DATA_NAMES:
            raise ValueError(f"name must be one of {', '.join(DATA_NAMES)}, got {self.name!r}")
        if self.root is not None and self.name not in NAMES_WITH_ROOT:
            readers = ", ".join(NAMES_WITH_ROOT)
            raise ValueError(f"root is read by {readers} alone, got {self.root!r} with name {self.name!r}")
        self._refuse_unread()
        if self.labels is not None:
            self.labels = os.path.abspath(os.path.expanduser(self.labels))
        for name in ("size", "train_size", "val_size", "batch_size", "frames", "frame_stride"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        for name in ("split_seed", "workers", "max_skipped"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")
        self.augment = _augment(self.augment)
        for setting in self.augment.of_some:
            takers = CHANGED_BY[setting]
            if self.name not in takers:
                raise ValueError(f"augment.{setting} is for {', '.join(takers)} alone, got name {self.name!r}")
        self._check_clips()

    def _refuse_unread(self) -> None:
        for name, readers in READ_BY.items():
            value = getattr(self, name)
            if value is not None and self.name not in readers:
                raise ValueError(f"{name} is read by {', '.join(readers)} alone, got {value!r} with name {self.name!r}")

    def _check_clips(self) -> None:
        if self.split not in (None, 1, 2, 3):
            raise ValueError(f"split must be 1, 2 or 3, got {self.split}")
        if self.test_views is not None and (len(self.test_views) != 2 or min(self.test_views) < 1):
            raise ValueError(f"test_views must be segments and crops, at least 1 each, got {self.test_views}")
        for window in [] if self.windows is None else self.windows or [[]]:
            if len(window) != 2 or not window[1] > 0:
                raise ValueError(f"windows must each be [centre, width above 0], got {self.windows}")


def _augment(stored: Any) -> AugmentConfig:
    """A configuration read back from a file holds plain settings."""
    return stored if isinstance(stored, AugmentConfig) else AugmentConfig(**stored)
