"""Names and settings of the data sets as plain values; imports no torch."""

import inspect
import os
import re
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field, fields, make_dataclass, replace
from functools import cache, partial
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_type_hints

from typing_extensions import dataclass_transform  # of typing from Python 3.11 on; torch needs typing_extensions

from torchrope_lab.mistakes import Mistake
from torchrope_lab.modules import NAME, find_object, load_module
from torchrope_lab.schema import (
    NOT_EMPTY,
    ClosedUnit,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Rule,
    Settings,
    at_least,
)
from torchrope_lab.spelling import closest, suggestion

Normalisation = Literal["measured", "imagenet", "half", "liere"]
Interpolation = Literal["bilinear", "bicubic"]
NATIVE = "native"
CropRatio = Fraction | Literal["native"]
LARGEST_MAGNITUDE = 30  # of RandAugment
TwoAxes = Annotated[list[str], Rule("two different axes as in x,y", lambda axes: len({*axes}) == len(axes) == 2)]
CropScale = Annotated[
    tuple[float, float], Rule("low,high with 0 < low <= high <= 1", lambda pair: 0 < pair[0] <= pair[1] <= 1)
]
ScaleRange = Annotated[
    tuple[PositiveFloat, PositiveFloat], Rule("low,high with 0 < low <= high", lambda pair: pair[0] <= pair[1])
]
RandAugment = Annotated[
    tuple[PositiveInt, int],
    Rule(f"operations,magnitude up to {LARGEST_MAGNITUDE}", lambda pair: 0 <= pair[1] <= LARGEST_MAGNITUDE),
]
ClipSize = Annotated[
    int, Rule("a multiple of 4 and at least 20", lambda side: side % 4 == 0 and side >= 20)
]  # of smaller clips two motions would coincide
LIERE = "liere"
RandAugmentName = Annotated[
    str,
    Rule(
        f"{LIERE} or timm:rand-... as in timm:rand-m9-mstd0.5-inc1",
        lambda name: (
            name == LIERE or re.fullmatch(r"timm:rand(-(m|n)\d{1,2}|-(p|mstd)\d(\.\d+)?)*-inc1", name) is not None
        ),
    ),
]
Window = Annotated[list[float], Rule("[centre, width above 0]", lambda pair: len(pair) == 2 and pair[1] > 0)]
Windows = Annotated[list[Window], NOT_EMPTY]
Kind = TypeVar("Kind", bound="DataConfig")


@dataclass
class Augment(Settings):
    """Random augmentation of training inputs; none by default.

    The augmentation of an example is a function of the run's seed, the epoch and the example's index. `AugmentConfig`
    has the settings of all data sets; each data set has those that apply to it.

    Attributes:
        repeats: Number of differently augmented copies of each drawn example in an epoch (repeated augmentation, Hoffer
            et al., arXiv:1901.09335; DeiT: 3). An epoch keeps its length and contains 1 / repeats of the examples.

    Raises:
        ValueError: a value is out of range, or both of two settings are given that exclude each other.
    """

    prefix: ClassVar[str] = "--data.augment."
    repeats: PositiveInt = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, other in (("resize_crop", "crop_scale"), ("multi_scale", "scale_jitter")):
            one, two = getattr(self, name, None), getattr(self, other, None)
            if one and two is not None:
                rule = f"{self.prefix}{name} and {other} must not both be set"
                raise Mistake(f"{rule}, got {'true' if one is True else one} with {two}")

    @property
    def enabled(self) -> bool:
        """Whether any augmentation is set."""
        return self != type(self)()

    @property
    def crops(self) -> bool:
        """Whether crop_scale or resize_crop is given."""
        return any(getattr(self, name, None) is not None for name in ("crop_scale", "resize_crop"))


@dataclass
class AugmentConfig(Augment):
    """All augmentation settings; each data set has some of them.

    Images and videos are cropped, flipped, changed by RandAugment, 3-Augment and colours, erased and mixed in this
    order; points are rotated, shifted, jittered and dropped.

    Attributes:
        rotate: Two axes, as in x,y. Positions are rotated in this plane by a random angle about the mean of the
            example's points; feature columns that are normals (nx, ny) or velocities (vx, vy) along these axes rotate
            too.
        degrees: Maximum rotation angle, in either direction.
        shift: Maximum random translation of all points along each axis, in units of `scale`.
        jitter: Standard deviation of Gaussian noise added to each position, in units of `scale`.
        drop_points: Maximum fraction of points dropped; the fraction is drawn uniformly per example, and at least one
            point is kept.
        flip: Flip examples horizontally (along the last axis) with probability 1/2.
        color_jitter: Maximum relative change of brightness, contrast and saturation (0.3 in DeiT-III).
        scale_jitter: Range of the random resize factor; a crop of at most `size` × `size` pixels follows. Factor 1
            makes the longer side `size` (Ghiasi et al., arXiv:2012.07177: 0.1 to 2), in "ade20k" and "segments" the
            shorter side. Default: 0.5 to 2 for these two; no jitter and no crop for "coco".
        multi_scale: Resize the shorter side at random to 60 to 100 % of `size` (480 to 800 pixels of 800), for half of
            the images after a crop of 48 to 75 % (384 to 600 pixels), as DETR (Carion et al., arXiv:2005.12872);
            excludes scale_jitter.
        max_class_share: Crops in which one class has this share of the labelled pixels or more are drawn again, up to
            ten times (mmsegmentation: 0.75); 1 takes the first crop (Mask2Former).
        mixup: Alpha of Mixup (Zhang et al., arXiv:1710.09412); labels become probabilities. 0 is off.
        cutmix: Alpha of CutMix (Yun et al., arXiv:1905.04899); 0 is off. If both are on, one is drawn per batch.
        mix_probability: Probability of mixing a batch.
        crop_scale: Range of the crop's area as a fraction of the image (RandomResizedCrop), the same for all frames of
            a clip. Default: 0.6 to 1 for "images", 0.08 to 1 for "imagenet", "videos" and "ucf101", no crop for the
            others.
        resize_crop: Resize the shorter side to resize_crop · size and take a random crop of `size`; excludes crop_scale
            (ComRoPE's code: 1.1).
        erasing: Probability of random erasing (Zhong et al., arXiv:1708.04896); the box is the same in all frames or
            slices.
        randaugment: RandAugment (Cubuk et al., arXiv:1909.13719), the same for all frames of a clip: number of
            operations and magnitude (0 to 30) of torchvision's; timm:rand-m9-mstd0.5-inc1 or the like for timm's own
            transform (m magnitude of 10, mstd its noise, n operations, each applied with probability p); or "liere" for
            LieRE's code, two of its 16 operations before the crop: 22 % of 32x32 images become blank.
        crop_padding: Zero padding in pixels on every side before a random crop of the original size (4 for CIFAR).
        three_augment: Apply 3-Augment: greyscale, solarisation or Gaussian blur, each with probability 1/3 (DeiT-III,
            Touvron et al., arXiv:2204.07118).
    """

    rotate: TwoAxes | None = None
    degrees: Annotated[float, at_least(0, 180)] = 180.0
    shift: NonNegativeFloat = 0.0
    jitter: NonNegativeFloat = 0.0
    drop_points: ClosedUnit = 0.0
    flip: bool = False
    color_jitter: ClosedUnit = 0.0
    scale_jitter: ScaleRange | None = None
    multi_scale: bool = False
    max_class_share: Fraction = 0.75
    mixup: NonNegativeFloat = 0.0
    cutmix: NonNegativeFloat = 0.0
    mix_probability: ClosedUnit = 1.0
    crop_scale: CropScale | None = None
    resize_crop: Annotated[float, at_least(1)] | None = None
    erasing: ClosedUnit = 0.0
    randaugment: RandAugment | RandAugmentName | None = None
    crop_padding: NonNegativeInt = 0
    three_augment: bool = False


def augmented(*names: str, **others: tuple[Any, str]) -> Callable[[type[Kind]], type[Kind]]:
    """Decorator: give a dataclass of data some settings of `AugmentConfig`, those in `others` with type and text."""
    known = get_type_hints(AugmentConfig, include_extras=True) | {name: hint for name, (hint, _) in others.items()}
    texts = "".join(f"    {name}: {text}\n" for name, (_, text) in others.items())
    chosen = [(name, known[name], field(default=getattr(AugmentConfig, name))) for name in names]

    def add(kind: type[Kind]) -> type[Kind]:
        place = {"__module__": __name__, "__qualname__": f"{kind.__name__}.Augment"}  # where pickle finds it
        names = {"__doc__": f"{inspect.getdoc(AugmentConfig)}\n{texts}", **place}
        augment = make_dataclass("Augment", chosen, bases=(Augment,), namespace=names)
        kind.__annotations__["augment"] = augment
        kind.Augment, kind.augment = augment, field(default_factory=augment)  # type: ignore[attr-defined]
        return kind

    return add


_MIXES = ("flip", "mixup", "cutmix", "mix_probability")
_CROPS = (*_MIXES, "crop_scale", "resize_crop")
_PICTURES = ("flip", "color_jitter", *_CROPS[1:], "erasing", "randaugment", "crop_padding", "three_augment")
_OF_VOLUMES = (
    "RandAugment (Cubuk et al., arXiv:1909.13719) with torchvision's operations: their number and magnitude (0 to 30), "
    "the same for all slices, without operations on colours."
)
_POINTS = ("rotate", "degrees", "shift", "jitter", "drop_points")
_PHOTOGRAPHS = ("flip", "color_jitter", "scale_jitter")


@dataclass
@augmented()
class DataConfig(Settings):
    """Settings that all data sets share; `data_config` builds those of one data set.

    Attributes:
        name: Name of the data set, see docs/data.md.
        size: Pixels per side of an input, for "ade20k" and "segments" of a training crop, for "coco" of the shorter
            side without `scale_jitter`; for "points" the maximum number of points
            per example: larger ones are subsampled, at random in every epoch, to the same points in every validation.
        train_size: Number of training examples, with classes as balanced as possible; by default all.
        val_size: Number of validation examples, chosen in the same way.
        batch_size: Examples in one training step.
        split_seed: Seed of the split into training and validation examples, independent of the seed of the run.
        folds: Number of folds of a cross-validation: parts of the examples that `train_size` and `val_size` choose,
            each with its share of every class, and no patient (or other group) in two parts. The normalisation stays
            that of the original training examples.
        fold: The part, from 0, that is validated; the others are trained on. `compare` and `study` train all.
        tuning: Validate on a held-out fifth of the training examples instead of the validation set, for choosing
            hyperparameters; for in-memory data only.
        workers: Processes that load data beside the training; 0 loads in the training process.
        prefetch: Batches that each of these processes loads ahead.
        drop_last: Drop the last training batch of an epoch if it is smaller than the others, as DeiT does; with
            `run.compile` all steps then have the same shapes.
        augment: Augmentation of training inputs.

    Raises:
        ValueError: a value is out of range, or the data set does not have a setting of `augment`.
    """

    prefix: ClassVar[str] = "--data."
    module: ClassVar[str]  # "module:Class" of the data module, in torchrope_lab.data
    lattice: ClassVar[bool] = True  # whether examples lie on a lattice
    recipe: ClassVar[str] = "digits"  # default recipe of names that have none
    name: str = "digits"
    size: PositiveInt = 8
    train_size: PositiveInt | None = None
    val_size: PositiveInt | None = None
    batch_size: PositiveInt = 64
    split_seed: NonNegativeInt = 0
    folds: Annotated[int, at_least(2)] | None = None
    fold: NonNegativeInt = 0
    tuning: bool = False
    workers: NonNegativeInt = 0
    prefetch: PositiveInt = 2
    drop_last: bool = False
    augment: AugmentConfig = field(default_factory=AugmentConfig)

    def __post_init__(self) -> None:
        for name in ("root", "labels"):
            if isinstance(path := getattr(self, name, None), str):  # absolute: independent of the working directory
                setattr(self, name, os.path.abspath(os.path.expanduser(path)))
        if self.fold >= (self.folds or 1):
            raise Mistake(f"--data.fold must be below --data.folds, got {self.fold} with {self.folds}")
        if self.folds and self.tuning:
            raise Mistake(f"--data.folds and tuning must not both be set, got {self.folds} and true")
        own = type(self).augmentation()
        if type(self.augment) is not own:  # plain settings from a file, or those of all data sets
            changes = self.augment if isinstance(self.augment, dict) else changed(self.augment)
            for name in changes:
                if name not in options(own):
                    raise unknown_setting(f"augment.{name}", self.name)
            self.augment = own(**changes)
        super().__post_init__()

    @staticmethod
    def kind_of(values: dict[str, Any]) -> "type[DataConfig]":
        """Return the settings class of stored settings, by their `name`."""
        kind = settings_of(values.get("name", "digits"))
        for setting in values:
            if setting not in options(kind):
                raise unknown_setting(setting, kind.name)
        return kind

    @classmethod
    def augmentation(cls) -> type[AugmentConfig]:
        """Return the class of `augment`: a dataclass of some settings of `AugmentConfig`."""
        return next(f.default_factory for f in fields(cls) if f.name == "augment")  # type: ignore[return-value]


@dataclass
class RootConfig(DataConfig):
    """Settings of data in files.

    Attributes:
        root: Folder of the files, see docs/data.md for the layout. Without it, "cifar10" and "cifar100" are
            downloaded.
    """

    root: str | None = None


@dataclass
class FilesConfig(RootConfig):
    """Settings of data in files, some of which may be unreadable.

    Attributes:
        max_skipped: Maximum number of unreadable files that are skipped; beyond it, the run ends with an error that
            lists them.
    """

    max_skipped: NonNegativeInt = 100


@dataclass
class CachedConfig(FilesConfig):
    """Settings of data whose examples take long to decode.

    Attributes:
        cache_gib: Largest size in GiB of the cache of decoded examples, for all data together, in torch's cache folder;
            0 disables it. It changes no result.
    """

    cache_gib: NonNegativeFloat = 20.0


@dataclass
@augmented(*_POINTS)
class TokensConfig(DataConfig):
    """Settings of tokens at any positions, without a lattice.

    Attributes:
        scale: Length of one unit of position, in the unit of the data, one number or one per axis. Default, per axis:
            mean extent of the training examples / (n - 1) with one axis, / √n with several, where n is their mean
            number of points.
    """

    lattice: ClassVar[bool] = False
    scale: Annotated[list[PositiveFloat], NOT_EMPTY] | None = None


@dataclass
class ColourConfig(DataConfig):
    """Settings of colour images or videos for classification.

    Attributes:
        normalise: Mean and standard deviation of the channels: "measured" on the training examples, those of
            "imagenet", "half": mean 0.5 and standard deviation 0.5 (ComRoPE), or "liere": those of LieRE's code.
    """

    normalise: Normalisation = "measured"


@dataclass
class CentredConfig(ColourConfig):
    """Settings of colour images or videos of any size, of which validation takes the centre crop.

    Attributes:
        crop_ratio: Side of the validation crop as a fraction of the shorter side: the shorter side is resized to size /
            crop_ratio and the central `size` × `size` square is cropped. For images, "native" crops without resizing
            and pads smaller ones with black (LieRE's code): larger sizes show more of a picture.
    """

    crop_ratio: CropRatio = 1.0


SETTINGS: dict[str, type[DataConfig]] = {}
_RESERVED = ("name", "augment", "prefix", "module", "lattice", "recipe", "source", "parameters")
"""Names of settings that a parameter of a user's source must not have."""


@dataclass_transform(field_specifiers=(field,))
def data_set(name: str, module: str, size: int | None = None) -> Callable[[type[Kind]], type[Kind]]:
    """Decorator: register a dataclass as the settings of a data set, with its name, "module:Class" and default size."""

    def add(kind: type[Kind]) -> type[Kind]:
        kind.__annotations__ = {"name": str, "size": PositiveInt, **kind.__annotations__}
        kind.module, kind.name = module, name
        kind.size = kind.size if size is None else size
        SETTINGS[name] = dataclass(kind)
        return kind

    return add


@data_set("digits", "digits:Digits")
@augmented(*_CROPS)
class DigitsConfig(DataConfig):
    """Handwritten digits of scikit-learn, 8x8 pixels."""


@data_set("motion", "motion:Motion")
class MotionConfig(DigitsConfig):
    """Clips of moving digits. Default: 2,400 training and 600 validation clips."""

    size: ClipSize = 20


@data_set("images", "images:Images", size=64)
@augmented(*_PICTURES)
class ImagesConfig(FilesConfig, CentredConfig):
    """Images in class folders.

    Attributes:
        pipeline: How training images are read. "exact": decoded, cropped and augmented one by one by the loading
            processes, with Pillow, as in the papers. "fast": JPEG files are decoded by libjpeg-turbo and cropped as
            bytes; the distribution is the same up to the resampling filter.
        interpolation: Resampling filter of crops, with antialiasing.
    """

    pipeline: Literal["exact", "fast"] = "exact"
    interpolation: Interpolation = "bilinear"


@data_set("cifar10", "cifar:Cifar10", size=32)
@augmented(*_PICTURES)
class Cifar10Config(RootConfig, ColourConfig):
    """CIFAR-10: 32x32 colour images, 10 classes."""


@data_set("cifar100", "cifar:Cifar100")
class Cifar100Config(Cifar10Config):
    """CIFAR-100: 32x32 colour images, 100 classes."""


@data_set("imagenet", "imagenet:ImageNet", size=224)
class ImageNetConfig(ImagesConfig):
    """ImageNet-1k: photographs, 1000 classes."""

    normalise: Normalisation = "imagenet"
    crop_ratio: CropRatio = 0.875
    interpolation: Interpolation = "bicubic"


@data_set("videos", "videos:Videos", size=224)
@augmented(*_CROPS, "erasing", "randaugment")
class VideosConfig(CachedConfig, CentredConfig):
    """Videos in class folders.

    Attributes:
        frames: Frames per clip.
        frame_stride: Distance between the frames of a clip, in frames of the video.
        test_views: Temporal segments and spatial crops of a video over which an evaluation averages logits.
    """

    crop_ratio: Fraction = 1.0
    frames: PositiveInt = 8
    frame_stride: PositiveInt = 4
    test_views: tuple[PositiveInt, PositiveInt] = (1, 1)


@data_set("ucf101", "ucf101:UCF101")
class UCF101Config(VideosConfig):
    """UCF101: videos of 101 actions.

    Attributes:
        split: Official split, 1 to 3.
    """

    split: Annotated[int, at_least(1, 3)] = 1


@data_set("volumes", "volumes:Volumes", size=224)
@augmented(*_MIXES, "erasing", "randaugment", randaugment=(RandAugment | None, _OF_VOLUMES))
class VolumesConfig(CachedConfig):
    """Volumes in DICOM or NIfTI files.

    Attributes:
        frames: Slices per volume.
        labels: Table of the labels. Default: root/labels.csv, for "rsna" root/stage_2_train.csv.
        windows: Intensity windows [centre, width], one per channel, in the unit of the file (Hounsfield units for CT).
            Default: one channel, from the 0.5th to the 99.5th percentile of each volume.
    """

    frames: PositiveInt = 32
    labels: str | None = None
    windows: Windows | None = None


@data_set("rsna", "rsna:RSNA")
class RSNAConfig(VolumesConfig):
    """CT of the head; default windows: brain, subdural and soft tissue."""

    windows: Windows | None = field(default_factory=lambda: [[40.0, 80.0], [80.0, 200.0], [40.0, 380.0]])


@data_set("points", "points:Points", size=1024)
class PointsConfig(TokensConfig, FilesConfig):
    """Sets of points in tables.

    Attributes:
        axes: Names of the position columns. Default: those of t (or time, timestamp), x, y, z in the first file.
        features: Names of the feature columns. Default: all other columns of the first file.
        label: Name of the class column, with one value per example. Default: the sub-folder is the class.
        example: Name of the column that tells the examples of a file apart; those of one value, in several files, are
            in one part and fold. Default: a file is one example.
        coordinates: Whether tokens include the coordinates of their point, relative to the mean of the example's points
            and divided by half the extent. Default: only if there are no features, because attention over identical
            tokens does not depend on positions.
    """

    axes: list[str] | None = None
    features: list[str] | None = None
    label: str | None = None
    example: str | None = None
    coordinates: bool | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        named = [*(self.axes or ()), *(self.features or ()), *filter(None, [self.label, self.example])]
        if self.axes == [] or len(set(named)) < len(named):
            rule = "--data.axes must name one column or more, and no column twice with features, label and example"
            raise Mistake(f"{rule}, got {','.join(named) or 'none'}")


@data_set("coco", "coco:Coco", size=800)
@augmented(*_PHOTOGRAPHS, "multi_scale")
class CocoConfig(FilesConfig):
    """COCO, or other data in its format."""


@data_set("ade20k", "maps:ADE20k", size=512)
@augmented(*_PHOTOGRAPHS, "max_class_share")
class ADE20kConfig(FilesConfig):
    """ADE20k: photographs with maps of 150 classes."""


@data_set("segments", "maps:Segments")
class SegmentsConfig(ADE20kConfig):
    """Images and masks in folders."""


@dataclass
@augmented(*_MIXES)
class SourceConfig(DataConfig):
    """Settings of data on a lattice that a user's function or class returns; its parameters are settings too.

    Attributes:
        size: Passed to a source with this parameter.
    """

    module: ClassVar[str] = "source:Source"
    source: ClassVar[Callable[..., Any]]
    parameters: ClassVar[tuple[str, ...]] = ()
    size: NonNegativeInt = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lattice and self.size and "size" not in self.parameters:
            raise Mistake(f"--data.size is for sources with a parameter size, got --data {self.name}")

    def __reduce__(self) -> Any:
        """Pickle by name: the class is built from the source, whose module another process imports."""
        return _load_settings, ({f.name: getattr(self, f.name) for f in fields(self)},)


@dataclass
@augmented(*_POINTS)
class PointSourceConfig(TokensConfig, SourceConfig):
    """Settings of tokens at any positions that a user's function or class returns."""

    module: ClassVar[str] = "source:PointSource"
    recipe: ClassVar[str] = "points"
    size: PositiveInt = 1024


@dataclass
class HubConfig(ImageNetConfig):
    """Images of a data set of the Hugging Face Hub, or of a folder that the package datasets reads, as for "imagenet".

    Attributes:
        subset: Name of the configuration, for data sets that have several.
        train_split: Name of the training split.
        val_split: Name of the validation split. Default: the first of validation, val, valid and test that exists; if
            none does, a fifth of each class is held out.
        image: Name of the column of images. Default: the only one of this type.
        label: Name of the column of classes. Default: the only one of this type.
    """

    module: ClassVar[str] = "hub:HubImages"
    recipe: ClassVar[str] = "images"
    name: str = "hf:"
    size: PositiveInt = 64
    subset: str | None = None
    train_split: str = "train"
    val_split: str | None = None
    image: str | None = None
    label: str | None = None

    def __post_init__(self) -> None:
        self.name = _with_absolute_path(self.name)
        super().__post_init__()


@dataclass
class WebDatasetConfig(ImageNetConfig):
    """Images in tar shards of webdataset's format, in a folder as for "imagenet"; root is that of the name."""

    module: ClassVar[str] = "hub:WebDataset"
    recipe: ClassVar[str] = "images"
    name: str = "webdataset:"
    size: PositiveInt = 64

    def __post_init__(self) -> None:
        self.name = _with_absolute_path(self.name)
        self.root = self.root or self.name.partition(":")[2]
        super().__post_init__()


SCHEMES: dict[str, type[DataConfig]] = {"hf": HubConfig, "webdataset": WebDatasetConfig}
"""Settings of names such as hf:cifar10, by what precedes the colon."""


def _with_absolute_path(name: str) -> str:
    """Make the folder of a name such as hf:folder independent of the working directory."""
    scheme, _, path = name.partition(":")
    folder = os.path.abspath(os.path.expanduser(path))
    return f"{scheme}:{folder}" if path and os.path.isdir(folder) else name


def _load_settings(values: dict[str, Any]) -> DataConfig:
    load_module(values["name"])
    return data_config(**values)


@cache
def _settings_of_source(name: str, source: Callable[..., Any]) -> type[SourceConfig]:
    """Build the settings of a user's source: those that all sources have, and its parameters."""
    base = SourceConfig if getattr(source, "lattice", True) else PointSourceConfig
    known, own = get_type_hints(base, include_extras=True), []
    parameters = inspect.signature(source, eval_str=True).parameters.values()
    for parameter in parameters:
        if parameter.default is parameter.empty or parameter.name in _RESERVED:
            raise Mistake(f"--data {name}: parameters must have a default and another name, got {parameter}")
        hint = type(parameter.default) if parameter.annotation is parameter.empty else parameter.annotation
        default: Any = field(default_factory=partial(deepcopy, parameter.default))
        own.append((parameter.name, known.get(parameter.name, hint), default))
    namespace = {
        "name": name,
        "source": staticmethod(source),
        "parameters": tuple(parameter.name for parameter in parameters),
        "__doc__": inspect.getdoc(source) or base.__doc__,
    }
    return make_dataclass("SourceConfig", [("name", str, name), *own], bases=(base,), namespace=namespace)


def data_config(name: str = "digits", **settings: Any) -> DataConfig:
    """Build the settings of a data set, or of a user's source in a loaded module."""
    return DataConfig.kind_of({"name": name, **settings})(name=name, **settings)


def with_crop_ratio(config: DataConfig, crop_ratio: CropRatio) -> DataConfig:
    """Return the settings with another crop_ratio."""
    option, kind = ("--crop-ratio native", ImagesConfig) if crop_ratio == NATIVE else ("--crop-ratio", CentredConfig)
    if not isinstance(config, kind):
        names = [name for name, each in SETTINGS.items() if issubclass(each, kind)]
        raise Mistake(f"{option} is for {', '.join(names)}, got data set {config.name}")
    return replace(config, crop_ratio=crop_ratio)


def settings_of(name: str) -> type[DataConfig]:
    """Return the settings class of a data set, of hf:NAME or webdataset:FOLDER, or of a source in a loaded module."""
    if name in SETTINGS:
        return SETTINGS[name]
    scheme, _, path = name.partition(":")
    if scheme in SCHEMES and path:
        return SCHEMES[scheme]
    if NAME.fullmatch(name):
        source = find_object(name, "function or class", inspect.isroutine)
        if not callable(source):
            raise Mistake(f"--data {name} must be a function or a class, got {type(source).__name__}")
        return _settings_of_source(name, source)
    others = "hf:NAME, webdataset:FOLDER, mypackage.module:source or FILE.py:source"
    rule = f"--data must be one of {', '.join(DATA_NAMES)}, {others}"
    raise Mistake(f"{rule}, got {name!r}{suggestion(closest(name, DATA_NAMES))}")


def changed(config: Any) -> dict[str, Any]:
    """Return the settings that differ from their defaults."""
    default = vars(type(config)())
    return {name: value for name, value in vars(config).items() if value != default[name]}


def options(kind: type) -> list[str]:
    """List the names of the settings of a dataclass, including those of `augment` as `augment.flip`."""
    own = [f.name for f in fields(kind)]
    return own + ([f"augment.{f.name}" for f in fields(kind.augmentation())] if issubclass(kind, DataConfig) else [])


def data_sets_with(setting: str) -> list[str]:
    """List the data sets that have a setting."""
    return [name for name, kind in SETTINGS.items() if setting in options(kind)]


def unknown_setting(setting: str, name: str) -> Mistake:
    """Build the error for an unknown setting: the data sets that have it, or a setting with a similar name."""
    option = f"--data.{setting}"
    if data_sets_with(setting):
        return Mistake(f"{option} is for {', '.join(data_sets_with(setting))}, got --data {name}")
    known = [f"--data.{known}" for known in options(settings_of(name))]
    return Mistake(f"there is no option {option} of {name}{suggestion(closest(option, known))}")


DATA_NAMES = tuple(SETTINGS)
NAMES_DENSE = tuple(name for name, kind in SETTINGS.items() if "augment.scale_jitter" in options(kind))
