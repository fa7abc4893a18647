"""Names and settings of the data sets as plain values; imports no torch."""

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Literal, TypeVar, get_args

from typing_extensions import dataclass_transform  # of typing from Python 3.11 on; torch needs typing_extensions

from torchrope.lab.spelling import closest, suggestion

DataName = Literal[
    "digits", "motion", "fashion-mnist", "images", "cifar10", "cifar100", "tiny-imagenet", "imagenet", "videos",
    "ucf101", "volumes", "rsna", "kanji", "points", "series", "kanji-strokes", "scenes", "kanji-components", "coco",
    "ade20k", "segments", "globe", "views",
]  # fmt: skip
Normalisation = Literal["measured", "imagenet", "half"]
LARGEST_MAGNITUDE = 30  # of RandAugment
_RANGES: dict[str, tuple[float, float]] = {
    **dict.fromkeys(("size", "train_size", "val_size", "batch_size", "frames", "frame_stride"), (1, math.inf)),
    **dict.fromkeys(("split_seed", "workers", "max_skipped", "crop_padding", "mixup", "cutmix"), (0, math.inf)),
    **dict.fromkeys(("jitter", "shift"), (0, math.inf)),
    **dict.fromkeys(("color_jitter", "erasing", "mix_probability", "drop_points"), (0, 1)),
    "degrees": (0, 180),
    **dict.fromkeys(("repeats", "resize_crop"), (1, math.inf)),
    "split": (1, 3),
}
"""Least and largest value of numbers, by setting."""

_PAIRS: dict[str, tuple[str, Callable[[float, float], bool]]] = {
    "crop_scale": ("rise within 0 and 1", lambda low, high: 0 < low <= high <= 1),
    "scale_jitter": ("rise from above 0", lambda low, high: 0 < low <= high < math.inf),
    "randaugment": (
        f"be 1 or more operations of magnitude 0 to {LARGEST_MAGNITUDE}",
        lambda number, magnitude: number >= 1 and 0 <= magnitude <= LARGEST_MAGNITUDE,
    ),
}
"""The rule of settings that are two numbers."""


def check_ranges(settings: dict[str, Any], prefix: str) -> None:
    """Refuse a number that is out of its range, by the name of its option."""
    for name, (least, largest) in _RANGES.items():
        value = settings.get(name)
        if value is not None and not least <= value <= largest:
            rule = f"be at least {least}" if largest == math.inf else f"lie between {least} and {largest}"
            raise ValueError(f"{prefix}{name} must {rule}, got {value}")


@dataclass
class Augment:
    """How training inputs are changed at random; nothing is changed by default.

    What happens to an example is a function of the run's seed, the epoch and the example. `AugmentConfig` has the
    settings of all data sets; each data set has those that apply to it.

    Attributes:
        repeats: How often an example that is drawn comes within an epoch, changed otherwise each time; the epoch keeps
            its length, so that it sees so many times fewer of them (Hoffer et al., arXiv:1901.09335; DeiT: 3).

    Raises:
        ValueError: a number is out of range.
    """

    repeats: int = 1

    def __post_init__(self) -> None:
        given, prefix = vars(self), "--data.augment."
        check_ranges(given, prefix)
        for name, (rule, holds) in _PAIRS.items():
            pair = given.get(name)
            if pair is not None and len(pair) != 2:
                raise ValueError(f"{prefix}{name} must be two numbers, got {pair}")
            if pair is not None and not holds(*pair):
                raise ValueError(f"{prefix}{name} must {rule}, got {pair}")
            if pair is not None:
                setattr(self, name, tuple(pair))  # YAML has lists alone

    @property
    def on(self) -> bool:
        """Whether anything is changed."""
        return self != type(self)()


@dataclass
class FlipAugment(Augment):
    """Of data on a lattice.

    Attributes:
        flip: Exchange left and right in half of the examples.
    """

    flip: bool = False


@dataclass
class PointAugment(Augment):
    """Of tokens at any positions, in this order: rotate, shift, jitter, drop_points.

    Attributes:
        rotate: Two axes, such as x,y: positions rotate in their plane by a random angle about the mean of the example's
            points, and so do vectors whose columns are named like the axes behind n or v (nx, ny; vx, vy).
        degrees: Largest angle, in either direction.
        shift: Largest move of all points together along each axis, in units of `scale`, in either direction.
        jitter: Deviation of the noise that is added to each position, in units of `scale`.
        drop_points: Largest share of an example's points that is left out; the share is drawn for each example, and one
            point stays.

    Raises:
        ValueError: rotate does not name two different axes.
    """

    rotate: list[str] | None = None
    degrees: float = 180.0
    shift: float = 0.0
    jitter: float = 0.0
    drop_points: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rotate is not None and len({*self.rotate}) != 2:
            rule = "--data.augment.rotate must name two different axes as in x,y"
            raise ValueError(f"{rule}, got {','.join(self.rotate)}")


@dataclass
class MixAugment(FlipAugment):
    """Of data on a lattice that are classified.

    Attributes:
        mixup: Alpha of Mixup (Zhang et al., arXiv:1710.09412); labels become probabilities. 0 is off.
        cutmix: Alpha of CutMix (Yun et al., arXiv:1905.04899); 0 is off. If both are on, one is drawn per batch.
        mix_probability: Share of batches that are mixed.
    """

    mixup: float = 0.0
    cutmix: float = 0.0
    mix_probability: float = 1.0


@dataclass
class CropAugment(MixAugment):
    """Of pictures and videos that are classified.

    Attributes:
        crop_scale: Least and largest share of a picture that is cropped at random and resized, the same for all frames
            of a clip; None is the data set's own (0.6 to 1 of "images", 0.08 to 1 of "imagenet", "videos" and "ucf101",
            no crop of others).
        resize_crop: Factor on `size` to which the shorter side is resized before a crop of `size` at a random place, in
            place of crop_scale (ComRoPE's code: 1.1).

    Raises:
        ValueError: both are given.
    """

    crop_scale: tuple[float, float] | None = None
    resize_crop: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.crop_scale is not None and self.resize_crop is not None:
            rule = "--data.augment.resize_crop takes the place of crop_scale"
            raise ValueError(f"{rule}, got {self.resize_crop} with {self.crop_scale}")

    @property
    def crops(self) -> bool:
        """Whether either is given."""
        return self.crop_scale is not None or self.resize_crop is not None


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
class ColourAugment(FlipAugment):
    """Of pictures in colour.

    Attributes:
        color_jitter: Largest relative change of brightness, contrast and saturation (0.3 in DeiT-III).
    """

    color_jitter: float = 0.0


@dataclass
class VideoAugment(StreamAugment, CropAugment):
    """Of videos."""


@dataclass
class PictureAugment(VideoAugment, ColourAugment):
    """Of pictures that are classified, in this order: crop, flip, RandAugment, 3-Augment, colours, erasing, mixing.

    Attributes:
        crop_padding: Pixels of black added on every side before a crop of the old size (4 for CIFAR).
        three_augment: One of grey, solarised and blurred (DeiT-III, Touvron et al., arXiv:2204.07118).
    """

    crop_padding: int = 0
    three_augment: bool = False


@dataclass
class SceneAugment(FlipAugment):
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
class AugmentConfig(PictureAugment, PhotographAugment, PointAugment):
    """Of all data sets, each of which takes a part of them."""


@dataclass
class DataConfig:
    """Which data, how much of it, and in what batches: what all data sets have; `data_config` makes that of one.

    Attributes:
        name: The data set, see docs/data.md.
        size: Pixels per side; of "ade20k" and "segments" those of a training crop, of "coco" the shorter side of a
            picture, where `scale_jitter` makes no crops. Of "points", "series" and "kanji-strokes" the most points of
            an example: of more so many are chosen at random, again in each epoch, and always the same in validation.
        train_size: Train on that many examples, with classes as balanced as possible; None is all.
        val_size: Validate on that many examples, chosen in the same way.
        batch_size: Examples in one training step.
        split_seed: Seed of the split into training and validation examples, independent of the seed of the run.
        tuning: Validate on a held-out fifth of the training examples instead of the validation set, to choose settings
            on examples that no result is reported on; for data in memory.
        workers: Processes that load data beside the training; 0 loads in the training process.
        augment: How training inputs are changed at random.

    Raises:
        ValueError: a number is out of range, or the data set does not have a setting of `augment`.
    """

    module: ClassVar[str]  # and class of its data module, in this package
    name: DataName = "digits"
    size: int = 8
    train_size: int | None = None
    val_size: int | None = None
    batch_size: int = 64
    split_seed: int = 0
    tuning: bool = False
    workers: int = 0
    augment: Augment = field(default_factory=Augment)

    def __post_init__(self) -> None:
        given = vars(self)
        for name in ("root", "labels"):
            if given.get(name) is not None:  # stored, it must mean the same from anywhere
                setattr(self, name, os.path.abspath(os.path.expanduser(given[name])))
        check_ranges(given, "--data.")
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


Kind = TypeVar("Kind", bound=DataConfig)


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
            downloaded if it is not given, and kanji are those of the package kanjivg.
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
class TokensConfig(DataConfig):
    """Tokens at any positions, without a lattice.

    Attributes:
        scale: Length that counts as one unit of position, in the unit of the data: one number, or one per axis. None
            measures it, for each axis separately: the mean extent of the training examples over n - 1 if there is one
            axis, over √n where there are more, n their mean number of points.
    """

    augment: PointAugment = field(default_factory=PointAugment)
    scale: list[float] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scale is not None and (not self.scale or not all(0 < each < math.inf for each in self.scale)):
            raise ValueError(f"--data.scale must be numbers above 0, one for each axis or for all, got {self.scale}")


@dataclass
class ColourConfig(DataConfig):
    """Pictures or videos in colour that are classified.

    Attributes:
        normalise: Mean and standard deviation of the channels: "measured" on the training examples, those of
            "imagenet", or "half", 0.5 of both (ComRoPE's).
    """

    normalise: Normalisation = "measured"

    def __post_init__(self) -> None:
        super().__post_init__()
        known = get_args(Normalisation)
        if self.normalise not in known:
            raise ValueError(f"--data.normalise must be one of {', '.join(known)}, got {self.normalise!r}")


@dataclass
class CentredConfig(ColourConfig):
    """Likewise, of which validation shows the centre.

    Attributes:
        crop_ratio: Share of the shorter side that validation shows: it is resized to size / crop_ratio, and a square of
            `size` is cut out of the centre.
    """

    crop_ratio: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.crop_ratio <= 1:
            raise ValueError(f"--data.crop_ratio must be above 0 and at most 1, got {self.crop_ratio}")


SETTINGS: dict[str, type[DataConfig]] = {}


@dataclass_transform(field_specifiers=(field,))
def data_set(name: DataName, module: str, size: int | None = None) -> Callable[[type[Kind]], type[Kind]]:
    """Make a dataclass of the settings of a data set, with its name and size, and add it to `SETTINGS`.

    Args:
        name: What `--data` takes.
        module: Module of this package, and the class of its data module.
        size: The default, if it differs from that of the class above.
    """

    def add(kind: type[Kind]) -> type[Kind]:
        kind.__annotations__.update(name=DataName, size=int)
        kind.module, kind.name = module, name
        kind.size = kind.size if size is None else size
        SETTINGS[name] = dataclass(kind)
        return kind

    return add


@data_set("digits", "digits:Digits")
class DigitsConfig(HeldConfig):
    """Real 8x8 digits."""

    augment: CropAugment = field(default_factory=CropAugment)


@data_set("motion", "motion:Motion", size=20)
class MotionConfig(DigitsConfig):
    """Clips of moving digits; without sizes 2400 to train on and 600 to validate."""


@data_set("fashion-mnist", "fashion:FashionMNIST", size=28)
class FashionConfig(RootConfig, HeldConfig):
    """Fashion-MNIST."""

    augment: CropAugment = field(default_factory=CropAugment)


@data_set("images", "images:Images", size=64)
class ImagesConfig(FilesConfig, CentredConfig):
    """Pictures of your own."""

    augment: PictureAugment = field(default_factory=PictureAugment)


@data_set("cifar10", "cifar:Cifar10", size=32)
class Cifar10Config(RootConfig, HeldConfig, ColourConfig):
    """CIFAR-10."""

    augment: PictureAugment = field(default_factory=PictureAugment)


@data_set("cifar100", "cifar:Cifar100")
class Cifar100Config(Cifar10Config):
    """CIFAR-100."""


@data_set("tiny-imagenet", "imagenet:TinyImageNet", size=64)
class TinyImageNetConfig(FilesConfig, HeldConfig, CentredConfig):
    """Tiny-ImageNet."""

    augment: PictureAugment = field(default_factory=PictureAugment)


@data_set("imagenet", "imagenet:ImageNet", size=224)
class ImageNetConfig(ImagesConfig):
    """ImageNet-1k."""

    normalise: Normalisation = "imagenet"
    crop_ratio: float = 0.875


@data_set("videos", "videos:Videos", size=224)
class VideosConfig(FilesConfig, CentredConfig):
    """Videos of your own.

    Attributes:
        frames: Frames of a clip.
        frame_stride: Frames of a video for each frame of a clip.
        test_views: Temporal segments and spatial crops of a video over which an evaluation averages logits.
    """

    augment: VideoAugment = field(default_factory=VideoAugment)
    frames: int = 8
    frame_stride: int = 4
    test_views: list[int] = field(default_factory=lambda: [1, 1])

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.test_views) != 2 or min(self.test_views) < 1:
            raise ValueError(f"--data.test_views must be segments and crops, at least 1 each, got {self.test_views}")


@data_set("ucf101", "ucf101:UCF101")
class UCF101Config(VideosConfig):
    """UCF101.

    Attributes:
        split: Which of the three official splits.
    """

    split: int = 1


@data_set("volumes", "volumes:Volumes", size=224)
class VolumesConfig(FilesConfig):
    """Volumes of your own.

    Attributes:
        frames: Slices of a volume.
        labels: Table with the labels; None is root/labels.csv, of "rsna" root/stage_2_train.csv.
        windows: [centre, width] of every channel, in the file's units, Hounsfield units for CT; None is one channel,
            each volume from its 0.5th to its 99.5th percentile.
    """

    augment: StreamAugment = field(default_factory=StreamAugment)
    frames: int = 32
    labels: str | None = None
    windows: list[list[float]] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for window in [] if self.windows is None else self.windows or [[]]:
            if len(window) != 2 or not window[1] > 0:
                raise ValueError(f"--data.windows must each be [centre, width above 0], got {self.windows}")


@data_set("rsna", "rsna:RSNA")
class RSNAConfig(VolumesConfig):
    """CT of the head; windows are brain, subdural and soft tissue unless given."""

    windows: list[list[float]] | None = field(default_factory=lambda: [[40.0, 80.0], [80.0, 200.0], [40.0, 380.0]])


@data_set("points", "points:Points", size=1024)
class PointsConfig(TokensConfig, FilesConfig):
    """Sets of points of your own.

    Attributes:
        axes: Names of the columns that are positions; None takes those of t, x, y, z that the first file has.
        features: Names of the columns that tokens hold; None takes all others that the first file has.
        label: Name of the column that is the class, of one value in each file; None takes the sub-folder as the class.
        coordinates: Whether tokens hold their own coordinates too, from the mean of the example's points, in halves of
            the extent; None adds them where there are no features. Tokens that are all alike tell an encoding nothing:
            attention mixes them to the same.
    """

    axes: list[str] | None = None
    features: list[str] | None = None
    label: str | None = None
    coordinates: bool | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        named = [*(self.axes or ()), *(self.features or ()), *([self.label] if self.label else [])]
        if self.axes == [] or len(set(named)) < len(named):
            rule = "--data.axes must name one column or more, and no column twice with --data.features and --data.label"
            raise ValueError(f"{rule}, got {','.join(named) or 'none'}")


@data_set("series", "series:Series", size=2048)
class SeriesConfig(TokensConfig, RootConfig):
    """Time series in files of the UCR and UEA archives.

    Attributes:
        problem: Name of the set, as files begin before _TRAIN and _TEST, where root holds several; without root one
            of those in the package aeon, where that is installed.
    """

    problem: str | None = None


@dataclass
class CharactersConfig(RootConfig):
    """Characters of KanjiVG.

    Attributes:
        variants: Take other ways to write a character too, on the same side of the split.
    """

    variants: bool = False


@dataclass
class AskedConfig(DataConfig):
    """Characters to be classified.

    Attributes:
        task: What the class is: the radical, the layout of the components, or the number of strokes.
    """

    task: Literal["radical", "layout", "strokes"] = "radical"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.task not in ("radical", "layout", "strokes"):
            raise ValueError(f"--data.task must be radical, layout or strokes, got {self.task!r}")


@data_set("kanji-strokes", "strokes:KanjiStrokes", size=256)
class KanjiStrokesConfig(TokensConfig, CharactersConfig, AskedConfig):
    """Points along the strokes of characters, to be classified.

    Attributes:
        spacing: Distance of points along a stroke, in units of which a character is 109 wide; each stroke has points at
            both ends.
    """

    spacing: float = 16.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.1 <= self.spacing < math.inf:
            raise ValueError(f"--data.spacing must be 0.1 or more, got {self.spacing}")


@data_set("globe", "globe:Globe", size=1024)
class GlobeConfig(TokensConfig):
    """Land or sea at a place of the earth, by the places around it.

    Attributes:
        root: A .npz file with the map; None is that of the package global-land-mask.
        points: Places of an example, the one that is asked included.
        radius: Degrees from the middle of an example's part of the earth to its edge; 180 is the whole earth.
        places: What positions are: latitude and longitude in "degrees", unit "vectors", or the stereographic "plane".
        closed: Whether longitude closes, where places are in degrees.
    """

    root: str | None = None
    points: int = 48
    radius: float = 40.0
    places: Literal["degrees", "vectors", "plane"] = "degrees"
    closed: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.points < 2:
            raise ValueError(f"--data.points must be 2 or more, got {self.points}")
        if not 0 < self.radius <= 180:
            raise ValueError(f"--data.radius must be above 0 and at most 180 degrees, got {self.radius}")
        if self.places not in ("degrees", "vectors", "plane"):
            raise ValueError(f"--data.places must be degrees, vectors or plane, got {self.places!r}")
        if self.places == "plane" and self.radius > 80:
            raise ValueError(f"--data.radius must be at most 80 degrees for places of a plane, got {self.radius}")


@dataclass
class StrokesConfig(CharactersConfig, HeldConfig):
    """Characters drawn from their strokes.

    Attributes:
        stroke_width: Width of a stroke, in units of which the picture has 109 per side, at every size.
    """

    stroke_width: float = 4.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.stroke_width < math.inf:
            raise ValueError(f"--data.stroke_width must be above 0, got {self.stroke_width}")


@data_set("kanji", "kanji:Kanji", size=32)
class KanjiConfig(StrokesConfig, AskedConfig):
    """Characters drawn from their strokes, to be classified."""

    augment: CropAugment = field(default_factory=CropAugment)


@data_set("views", "views:Views", size=12)
class ViewsConfig(DataConfig):
    """Six views of a cube with digits; without sizes 2000 to train on and 600 to validate."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.size % 6:
            raise ValueError(f"--data.size must be a multiple of the 6 pixels of a patch, got {self.size}")


@data_set("scenes", "scenes:Scenes", size=64)
class ScenesConfig(HeldConfig):
    """Several digits on a canvas, with boxes, masks and a map; without sizes 2000 to train on and 200 to validate."""

    augment: SceneAugment = field(default_factory=SceneAugment)


@data_set("kanji-components", "components:KanjiComponents", size=64)
class KanjiComponentsConfig(StrokesConfig):
    """Characters drawn from their strokes, with boxes, masks and a map of their components."""

    augment: SceneAugment = field(default_factory=SceneAugment)


@data_set("coco", "coco:Coco", size=800)
class CocoConfig(FilesConfig):
    """COCO, or data of your own in its format."""

    augment: PhotographAugment = field(default_factory=PhotographAugment)


@data_set("ade20k", "ade20k:ADE20k", size=512)
class ADE20kConfig(CocoConfig):
    """ADE20k."""


@data_set("segments", "segments:Segments")
class SegmentsConfig(ADE20kConfig):
    """Pictures and masks of your own."""


DATA_NAMES = tuple(SETTINGS)
NAMES_DENSE = tuple(name for name, kind in SETTINGS.items() if issubclass(kind.augmentation(), SceneAugment))
NAMES_WITHOUT_LATTICE = tuple(name for name, kind in SETTINGS.items() if issubclass(kind, TokensConfig | ViewsConfig))
NAMES_TO_CLASSIFY = tuple(name for name in DATA_NAMES if name not in NAMES_DENSE)


def data_config(name: str = "digits", **settings: Any) -> DataConfig:
    """Make the settings of a data set.

    Raises:
        ValueError: there is no such data set, it does not have a setting, or a value is out of range.

    Example:
        >>> data_config("volumes").frames
        32
    """
    kind = settings_of(name)
    for setting in settings:
        if setting not in options(kind):
            raise refusal(setting, name)
    return kind(**settings)


def with_crop_ratio(config: DataConfig, crop_ratio: float) -> DataConfig:
    """The same settings, of which validation shows another share.

    Raises:
        ValueError: the data set has no `crop_ratio`, or it is out of range.
    """
    if not isinstance(config, CentredConfig):
        raise refusal("crop_ratio", config.name)
    return replace(config, crop_ratio=crop_ratio)


def settings_of(name: str) -> type[DataConfig]:
    """The class of a data set's settings.

    Raises:
        ValueError: there is no such data set.
    """
    if name not in SETTINGS:
        raise ValueError(
            f"--data is one of {', '.join(DATA_NAMES)}, got {name!r}{suggestion(closest(name, DATA_NAMES))}"
        )
    return SETTINGS[name]


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
    option = f"--data.{setting}"
    if takers(setting):
        return ValueError(f"{option} is for {', '.join(takers(setting))}, got --data {name}")
    known = [f"--data.{known}" for known in options(SETTINGS[name])]
    return ValueError(f"there is no option {option} of {name}{suggestion(closest(option, known))}")
