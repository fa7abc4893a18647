"""The choice of a data set and its settings, as plain values: imports no torch."""

import difflib
import math
import os
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

DataName = Literal[
    "digits", "motion", "fashion-mnist", "images", "cifar10", "cifar100", "tiny-imagenet", "imagenet", "videos",
    "ucf101", "volumes", "rsna", "kanji", "scenes", "kanji-components", "coco", "ade20k", "segments",
]  # fmt: skip
LARGEST_MAGNITUDE = 30  # of RandAugment


@dataclass
class Augment:
    """How training inputs are changed at random; nothing is changed by default.

    What happens to an example is a function of the run's seed, the epoch and the example. `AugmentConfig` has the
    settings of all data sets; each data set has those that apply to it.

    Attributes:
        flip: Exchange left and right in half of the examples.
        repeats: How often an example that is drawn comes within an epoch, changed otherwise each time; the epoch keeps
            its length, so that it sees so many times fewer of them (Hoffer et al., arXiv:1901.09335; DeiT: 3).

    Raises:
        ValueError: a number is out of range.
    """

    flip: bool = False
    repeats: int = 1

    def __post_init__(self) -> None:
        given = vars(self)
        for name in {"crop_scale", "scale_jitter", "randaugment"} & given.keys():
            value = given[name]
            if value is not None:
                if len(value) != 2:
                    raise ValueError(f"{name} must be two numbers, got {value}")
                setattr(self, name, tuple(value))  # YAML has lists alone
        crop, scale, operations = (given.get(name) for name in ("crop_scale", "scale_jitter", "randaugment"))
        if crop is not None and not 0 < crop[0] <= crop[1] <= 1:
            raise ValueError(f"crop_scale must rise within 0 and 1, got {crop}")
        if scale is not None and not 0 < scale[0] <= scale[1] < math.inf:
            raise ValueError(f"scale_jitter must rise from above 0, got {scale}")
        if operations is not None and (operations[0] < 1 or not 0 <= operations[1] <= LARGEST_MAGNITUDE):
            rule = f"randaugment must be 1 or more operations of magnitude 0 to {LARGEST_MAGNITUDE}"
            raise ValueError(f"{rule}, got {operations}")
        if self.repeats < 1:
            raise ValueError(f"repeats must be 1 or more, got {self.repeats}")
        for name in ("crop_padding", "mixup", "cutmix"):
            if not given.get(name, 0) >= 0:
                raise ValueError(f"{name} must be 0 or more, got {given[name]}")
        for name in ("color_jitter", "erasing", "mix_probability"):
            if not 0 <= given.get(name, 0) <= 1:
                raise ValueError(f"{name} must lie between 0 and 1, got {given[name]}")

    @property
    def on(self) -> bool:
        """Whether anything is changed."""
        return self != type(self)()


@dataclass
class MixAugment(Augment):
    """Of data that are classified.

    Attributes:
        mixup: Alpha of Mixup (Zhang et al., arXiv:1710.09412); labels become probabilities. 0 is off.
        cutmix: Alpha of CutMix (Yun et al., arXiv:1905.04899), likewise; where both are on, each batch draws one.
        mix_probability: Share of batches that are mixed.
    """

    mixup: float = 0.0
    cutmix: float = 0.0
    mix_probability: float = 1.0


@dataclass
class StreamAugment(MixAugment):
    """Of videos and volumes.

    Attributes:
        randaugment: n operations of magnitude m (0 to 30) on every picture (Cubuk et al., arXiv:1909.13719), the same
            ones on all frames of a clip; on all slices of a volume those that are no change of colours.
        erasing: Probability that a box of noise covers a part (Zhong et al., arXiv:1708.04896), through all frames or
            slices.
    """

    randaugment: tuple[int, int] | None = None
    erasing: float = 0.0


@dataclass
class ColourAugment(Augment):
    """Of pictures in colour.

    Attributes:
        color_jitter: Largest relative change of brightness, contrast and saturation (0.3 in DeiT-III).
    """

    color_jitter: float = 0.0


@dataclass
class PictureAugment(StreamAugment, ColourAugment):
    """Of pictures that are classified, in this order: crop, flip, RandAugment, 3-Augment, colours, erasing, mixing.

    Attributes:
        crop_padding: Pixels of black added on every side before a crop of the old size (4 for CIFAR).
        three_augment: One of grey, solarised and blurred (DeiT-III, Touvron et al., arXiv:2204.07118).
    """

    crop_padding: int = 0
    three_augment: bool = False


@dataclass
class CropAugment(MixAugment):
    """Of pictures that are cropped when they are read.

    Attributes:
        crop_scale: Least and largest share of a picture that is cropped and resized; None is the data set's own
            (0.6 to 1 of "images", 0.08 to 1 of "imagenet", no crop of "kanji").
    """

    crop_scale: tuple[float, float] | None = None


@dataclass
class FileAugment(PictureAugment, CropAugment):
    """Of pictures in files."""


@dataclass
class SceneAugment(Augment):
    """Of pictures with boxes, masks or maps.

    Attributes:
        scale_jitter: Least and largest factor on the size of a picture, of which a crop of `size` pixels per side, or
            less where there is less, is taken then. With 1 the longer side is `size` (Ghiasi et al., arXiv:2012.07177:
            0.1 to 2), in "ade20k" and "segments" the shorter one. None is 0.5 to 2 for these two, and no jitter and no
            crop for "scenes" and "coco".
    """

    scale_jitter: tuple[float, float] | None = None


@dataclass
class PhotographAugment(SceneAugment, ColourAugment):
    """Of photographs with boxes, masks or maps."""


@dataclass
class AugmentConfig(FileAugment, PhotographAugment):
    """Of all data sets, each of which takes a part of them."""


@dataclass
class DataConfig:
    """Which data, how much of it, and in what batches: what all data sets have; `data_config` makes that of one.

    Attributes:
        name: The data set, see docs/data.md.
        size: Pixels per side; of "ade20k" and "segments" those of a training crop, of "coco" the shorter side of a
            picture, where `scale_jitter` makes no crops.
        train_size: Train on that many examples, as equally many of each class as there can be; None is all.
        val_size: Validate on that many examples, chosen likewise.
        batch_size: Examples in one training step.
        split_seed: Decides what is trained on and what is held out, whatever the seed of the run.
        workers: Processes that load data beside the training; 0 loads in the training process.
        augment: How training inputs are changed at random.

    Raises:
        ValueError: a number is out of range, or the data set does not have a setting of `augment`.
    """

    name: DataName = "digits"
    size: int = 8
    train_size: int | None = None
    val_size: int | None = None
    batch_size: int = 64
    split_seed: int = 0
    workers: int = 0
    augment: Augment = field(default_factory=Augment)

    def __post_init__(self) -> None:
        given = vars(self)
        for name in ("root", "labels"):
            if given.get(name) is not None:  # stored, it must mean the same from anywhere
                setattr(self, name, os.path.abspath(os.path.expanduser(given[name])))
        for name in ("size", "train_size", "val_size", "batch_size", "frames", "frame_stride"):
            if given.get(name) is not None and given[name] < 1:
                raise ValueError(f"{name} must be at least 1, got {given[name]}")
        for name in ("split_seed", "workers", "max_skipped"):
            if given.get(name, 0) < 0:
                raise ValueError(f"{name} must be at least 0, got {given[name]}")
        own = type(self).augmentation()
        if type(self.augment) is not own:  # plain settings from a file, or those of all data sets
            changes = self.augment if isinstance(self.augment, dict) else changed(self.augment)
            for name in changes:
                if name not in options(own):
                    raise refusal(f"augment.{name}", self.name)
            self.augment = own(**changes)

    @classmethod
    def augmentation(cls) -> type[Augment]:
        """The class of `augment`."""
        return next(f.default_factory for f in fields(cls) if f.name == "augment")  # type: ignore[return-value]


@dataclass
class HeldConfig(DataConfig):
    """Data that are held in memory.

    Attributes:
        resident: Keep a set that fits into memory on the training device, as bytes, and augment it there.
    """

    resident: bool = True


@dataclass
class RootConfig(DataConfig):
    """Data in files.

    Attributes:
        root: Folder that holds the files, laid out as docs/data.md says; "fashion-mnist", "cifar10" and "cifar100" are
            downloaded where it is not given.
    """

    root: str | None = None


@dataclass
class FilesConfig(RootConfig):
    """Data in files of which some may be damaged.

    Attributes:
        max_skipped: Files that may be left out because they cannot be read; one more stops the run with their list.
    """

    max_skipped: int = 100


@dataclass
class DigitsConfig(HeldConfig):
    """Real 8x8 digits."""

    augment: MixAugment = field(default_factory=MixAugment)


@dataclass
class MotionConfig(DigitsConfig):
    """Clips of moving digits; without sizes 2400 to train on and 600 to validate."""

    name: DataName = "motion"
    size: int = 20


@dataclass
class FashionConfig(RootConfig, HeldConfig):
    """Fashion-MNIST."""

    name: DataName = "fashion-mnist"
    size: int = 28
    augment: MixAugment = field(default_factory=MixAugment)


@dataclass
class Cifar10Config(RootConfig, HeldConfig):
    """CIFAR-10."""

    name: DataName = "cifar10"
    size: int = 32
    augment: PictureAugment = field(default_factory=PictureAugment)


@dataclass
class Cifar100Config(Cifar10Config):
    """CIFAR-100."""

    name: DataName = "cifar100"


@dataclass
class TinyImageNetConfig(FilesConfig, HeldConfig):
    """Tiny-ImageNet."""

    name: DataName = "tiny-imagenet"
    size: int = 64
    augment: PictureAugment = field(default_factory=PictureAugment)


@dataclass
class ImagesConfig(FilesConfig):
    """Pictures of your own."""

    name: DataName = "images"
    size: int = 64
    augment: FileAugment = field(default_factory=FileAugment)


@dataclass
class ImageNetConfig(ImagesConfig):
    """ImageNet-1k."""

    name: DataName = "imagenet"
    size: int = 224


@dataclass
class VideosConfig(FilesConfig):
    """Videos of your own.

    Attributes:
        frames: Frames of a clip.
        frame_stride: Frames of a video for each frame of a clip.
        test_views: Temporal segments and spatial crops of a video over which an evaluation averages logits.
    """

    name: DataName = "videos"
    size: int = 224
    augment: StreamAugment = field(default_factory=StreamAugment)
    frames: int = 8
    frame_stride: int = 4
    test_views: list[int] = field(default_factory=lambda: [1, 1])

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.test_views) != 2 or min(self.test_views) < 1:
            raise ValueError(f"test_views must be segments and crops, at least 1 each, got {self.test_views}")


@dataclass
class UCF101Config(VideosConfig):
    """UCF101.

    Attributes:
        split: Which of the three official splits.
    """

    name: DataName = "ucf101"
    split: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.split not in (1, 2, 3):
            raise ValueError(f"split must be 1, 2 or 3, got {self.split}")


@dataclass
class VolumesConfig(FilesConfig):
    """Volumes of your own.

    Attributes:
        frames: Slices of a volume.
        labels: Table with the labels; None is root/labels.csv, of "rsna" root/stage_2_train.csv.
        windows: [centre, width] of every channel, in the file's units, Hounsfield units for CT; None is one channel,
            each volume from its 0.5th to its 99.5th percentile.
    """

    name: DataName = "volumes"
    size: int = 224
    augment: StreamAugment = field(default_factory=StreamAugment)
    frames: int = 32
    labels: str | None = None
    windows: list[list[float]] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for window in [] if self.windows is None else self.windows or [[]]:
            if len(window) != 2 or not window[1] > 0:
                raise ValueError(f"windows must each be [centre, width above 0], got {self.windows}")


@dataclass
class RSNAConfig(VolumesConfig):
    """CT of the head; windows are brain, subdural and soft tissue unless given."""

    name: DataName = "rsna"
    windows: list[list[float]] | None = field(default_factory=lambda: [[40.0, 80.0], [80.0, 200.0], [40.0, 380.0]])


@dataclass
class KanjiComponentsConfig(RootConfig, HeldConfig):
    """Characters drawn from their strokes, with boxes, masks and a map of their components.

    Attributes:
        stroke_width: Width of a stroke, in units of which the picture has 109 per side, at every size.
        variants: Draw other ways to write a character too, on the same side of the split.
    """

    name: DataName = "kanji-components"
    size: int = 64
    augment: SceneAugment = field(default_factory=SceneAugment)
    stroke_width: float = 4.0
    variants: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.stroke_width < math.inf:
            raise ValueError(f"stroke_width must be above 0, got {self.stroke_width}")


@dataclass
class KanjiConfig(KanjiComponentsConfig):
    """Characters drawn from their strokes.

    Attributes:
        task: What the class is: the radical, the layout of the components, or the number of strokes.
    """

    name: DataName = "kanji"
    size: int = 32
    augment: CropAugment = field(default_factory=CropAugment)  # type: ignore[assignment]
    task: Literal["radical", "layout", "strokes"] = "radical"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.task not in ("radical", "layout", "strokes"):
            raise ValueError(f"task must be radical, layout or strokes, got {self.task!r}")


@dataclass
class ScenesConfig(HeldConfig):
    """Several digits on a canvas, with boxes, masks and a map; without sizes 2000 to train on and 200 to validate."""

    name: DataName = "scenes"
    size: int = 64
    augment: SceneAugment = field(default_factory=SceneAugment)


@dataclass
class CocoConfig(FilesConfig):
    """COCO, or data of your own in its format."""

    name: DataName = "coco"
    size: int = 800
    augment: PhotographAugment = field(default_factory=PhotographAugment)


@dataclass
class ADE20kConfig(CocoConfig):
    """ADE20k."""

    name: DataName = "ade20k"
    size: int = 512


@dataclass
class SegmentsConfig(ADE20kConfig):
    """Pictures and masks of your own."""

    name: DataName = "segments"


_CLASSIFIED = (DigitsConfig, MotionConfig, FashionConfig, ImagesConfig, Cifar10Config, Cifar100Config)
_FROM_FILES = (TinyImageNetConfig, ImageNetConfig, VideosConfig, UCF101Config, VolumesConfig, RSNAConfig, KanjiConfig)
_DENSE = (ScenesConfig, KanjiComponentsConfig, CocoConfig, ADE20kConfig, SegmentsConfig)
SETTINGS: dict[str, type[DataConfig]] = {kind.name: kind for kind in (*_CLASSIFIED, *_FROM_FILES, *_DENSE)}
DATA_NAMES: tuple[str, ...] = get_args(DataName)
NAMES_DENSE = tuple(kind.name for kind in _DENSE)
NAMES_TO_CLASSIFY = tuple(name for name in DATA_NAMES if name not in NAMES_DENSE)


def data_config(name: str = "digits", **settings: Any) -> DataConfig:
    """Make the settings of a data set.

    Raises:
        ValueError: there is no such data set, it does not have a setting, or a value is out of range.

    Example:
        >>> data_config("volumes").frames
        32
    """
    if name not in SETTINGS:
        raise ValueError(f"name must be one of {', '.join(SETTINGS)}, got {name!r}")
    for setting in settings:
        if setting not in options(SETTINGS[name]):
            raise refusal(setting, name)
    return SETTINGS[name](**settings)


def changed(config: Any) -> dict[str, Any]:
    """The settings of a dataclass that differ from its defaults."""
    default = vars(type(config)())
    return {name: value for name, value in vars(config).items() if value != default[name]}


def options(kind: type) -> list[str]:
    """Names of the settings of a dataclass, those of `augment` too, as `augment.flip`."""
    own = [f.name for f in fields(kind)]
    return own + ([f"augment.{f.name}" for f in fields(kind.augmentation())] if issubclass(kind, DataConfig) else [])


def takers(setting: str) -> list[str]:
    """Names of the data sets that have a setting."""
    return [name for name, kind in SETTINGS.items() if setting in options(kind)]


def refusal(setting: str, name: str) -> ValueError:
    """Make the error for a setting that a data set does not have: whose it is, or which one is spelled like it."""
    if takers(setting):
        return ValueError(f"data.{setting} is for {', '.join(takers(setting))}, got data.name {name!r}")
    near = difflib.get_close_matches(setting, options(SETTINGS[name]), n=1, cutoff=0.5)
    hint = f"; did you mean 'data.{near[0]}'?" if near else ""
    return ValueError(f"there is no setting data.{setting} of {name}{hint}")
