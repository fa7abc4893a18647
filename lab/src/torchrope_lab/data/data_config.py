"""Settings of data sets, read from the signatures of their sources; imports no torch."""

import inspect
import os
import re
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, fields, make_dataclass, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, get_origin, get_type_hints

from torchrope_lab.mistakes import Mistake, closest, suggestion
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
            LieRE's code, two of its 16 operations before the crop: 22 % of 32x32 images become blank. For "volumes" and
            "rsna" only torchvision's, alike in all slices, without operations on colours.
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
    crop_scale: CropScale | None = None
    resize_crop: Annotated[float, at_least(1)] | None = None
    erasing: ClosedUnit = 0.0
    randaugment: RandAugment | RandAugmentName | None = None
    crop_padding: NonNegativeInt = 0
    three_augment: bool = False


MIXES = ("flip", "mixup", "cutmix")
POINTS = ("rotate", "degrees", "shift", "jitter", "drop_points")


@dataclass
class DataConfig(Settings):
    """Settings that all data sets share, and the texts of those that several have; `data_config` builds those of one.

    Attributes:
        name: Name of the data set, see docs/data.md.
        size: Pixels per side of an input; for "points" the maximum number of points per example. For "ade20k" and
            "segments" of a training crop, for "coco" of the shorter side without `scale_jitter`. Larger sets of points
            are subsampled, at random in every epoch, to the same points in every validation. A source of your own may
            have this parameter.
        train_size: Number of training examples, with classes as balanced as possible; by default all.
        val_size: Number of validation examples, chosen in the same way.
        batch_size: Examples in one training step.
        split_seed: Seed of the split into training and validation examples, independent of the seed of the run.
        folds: Number of folds of a cross-validation. They are parts of the examples that `train_size` and `val_size`
            choose, each with its share of every class, and no patient (or other group) in two parts. The normalisation
            stays that of the original training examples.
        fold: The part, from 0, that is validated; the others are trained on. `compare` and `study` train all.
        tuning: Validate on a held-out fifth of the training examples instead of the validation set, for choosing
            hyperparameters.
        workers: Processes that load data beside the training; 0 loads in the training process.
        drop_last: Drop the last training batch of an epoch if it is smaller than the others, as DeiT does; with
            `run.compile` all steps then have the same shapes.
        augment: Augmentation of training inputs.
        normalise: Mean and standard deviation of the channels: "measured" on the training examples, those of
            "imagenet", "half": mean 0.5 and standard deviation 0.5 (ComRoPE), or "liere": those of LieRE's code.
        crop_ratio: Side of the validation crop as a fraction of the shorter side: the shorter side is resized to size /
            crop_ratio and the central `size` × `size` square is cropped. For images, "native" crops without resizing
            and pads smaller ones with black (LieRE's code): larger sizes show more of a picture.
        root: Folder of the files, see docs/data.md for the layout. Without it, "cifar10" and "cifar100" are
            downloaded.
        max_skipped: Maximum number of unreadable files that are skipped; beyond it, the run ends with an error that
            lists them.
        cache_gib: Largest size in GiB of the cache of decoded examples, for all data together, in torch's cache folder;
            0 disables it. It changes no result.

    Raises:
        ValueError: a value is out of range, or the data set does not have a setting of `augment`.
    """

    prefix: ClassVar[str] = "--data."
    source: ClassVar[Callable[..., Any]]  # returns the data, called with its parameters
    parameters: ClassVar[tuple[str, ...]] = ()
    lattice: ClassVar[bool] = True  # whether examples lie on a lattice
    recipe: ClassVar[str] = "digits"  # default recipe of names that have none
    name: str = "digits"
    size: NonNegativeInt = 0
    train_size: PositiveInt | None = None
    val_size: PositiveInt | None = None
    batch_size: PositiveInt = 64
    split_seed: NonNegativeInt = 0
    folds: Annotated[int, at_least(2)] | None = None
    fold: NonNegativeInt = 0
    tuning: bool = False
    workers: NonNegativeInt = 0
    drop_last: bool = False
    augment: AugmentConfig = field(default_factory=AugmentConfig)

    def __post_init__(self) -> None:
        for name in ("root", "labels"):
            if isinstance(path := getattr(self, name, None), str):  # absolute: independent of the working directory
                setattr(self, name, os.path.abspath(os.path.expanduser(path)))
        scheme, _, path = self.name.partition(":")
        folder = os.path.abspath(os.path.expanduser(path))
        if path and f"{scheme}:" in SOURCES and os.path.isdir(folder):
            self.name = f"{scheme}:{folder}"
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

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:  # a parameter of the source
            ...

    def __reduce__(self) -> Any:
        """Pickle by name: the class is built from the source, whose module another process imports."""
        return _load_settings, ({**vars(self), "augment": vars(self.augment)},)

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
class TokensConfig(DataConfig):
    """Settings of tokens at any positions, without a lattice.

    Attributes:
        scale: Length of one unit of position, in the unit of the data, one number or one per axis. Default, per axis:
            mean extent of the training examples / (n - 1) with one axis, / √n with several, where n is their mean
            number of points.
    """

    lattice: ClassVar[bool] = False
    size: PositiveInt = 1024
    scale: Annotated[list[PositiveFloat], NOT_EMPTY] | None = None


SOURCES: dict[str, Callable[[], type[DataConfig]]] = {}
"""Settings of the built-in data sets, those of `data.sets`, by name; of names such as hf:cifar10 by "hf:"."""
_RESERVED = ("name", "augment", "prefix", "lattice", "recipe", "source", "parameters")
"""Names of settings that a parameter of a source must not have."""


def data_set(
    *augment: str, name: str = "", like: Any = None, recipe: str = "digits", lattice: bool = True
) -> Callable[[Any], Any]:
    """Decorator: register a source with some settings of `AugmentConfig`; one `like` another has the other's, too."""

    def add(source: Any) -> Any:
        key = name or source.__name__
        SOURCES[key] = partial(_settings_of, key, source, lattice, recipe, augment, like)
        return source

    return add


@cache
def _settings_of(
    name: str, source: Any, lattice: bool, recipe: str, augment: tuple[str, ...], like: Any = None
) -> type[DataConfig]:
    """Build the settings of a source: those that all have, or of a source that it is like, and its parameters."""
    base = SOURCES[like.__name__]() if like else DataConfig if lattice else TokensConfig
    known = get_type_hints(base, include_extras=True)
    own: list[tuple[str, Any, Any]] = [("name", str, name)]
    if not like:
        augmentation = _augmentation(augment)
        own.append(("augment", augmentation, field(default_factory=augmentation)))
    parameters = dict.fromkeys(base.parameters)
    for parameter in inspect.signature(source, eval_str=True).parameters.values():
        if like and parameter.kind is parameter.VAR_KEYWORD:  # those of the other source
            continue
        if parameter.default is parameter.empty or parameter.name in _RESERVED:
            raise Mistake(f"--data {name}: parameters must have a default and another name, got {parameter}")
        hint = type(parameter.default) if parameter.annotation is parameter.empty else parameter.annotation
        hint = hint if get_origin(hint) is Annotated else known.get(parameter.name, hint)
        own.append((parameter.name, hint, field(default_factory=partial(deepcopy, parameter.default))))
        parameters[parameter.name] = None
    namespace = {
        "source": staticmethod(source),
        "parameters": tuple(parameters),
        "lattice": lattice,
        "recipe": recipe,
        "__doc__": inspect.getdoc(source) or f"Data of {name}.",
    }
    return make_dataclass("SourceConfig", own, bases=(base,), namespace=namespace)


def _augmentation(names: Sequence[str]) -> type[AugmentConfig]:
    """Build a dataclass of some settings of `AugmentConfig`."""
    known = get_type_hints(AugmentConfig, include_extras=True)
    chosen = [(name, known[name], field(default=getattr(AugmentConfig, name))) for name in names]
    return make_dataclass("Augment", chosen, bases=(Augment,), namespace={"__doc__": AugmentConfig.__doc__})


def _load_settings(values: dict[str, Any]) -> DataConfig:
    load_module(values["name"])
    return data_config(**values)


def data_config(name: str = "digits", **settings: Any) -> DataConfig:
    """Build the settings of a data set, or of a user's source in a loaded module."""
    return DataConfig.kind_of({"name": name, **settings})(name=name, **settings)


def with_crop_ratio(config: DataConfig, crop_ratio: CropRatio) -> DataConfig:
    """Return the settings with another crop_ratio."""
    # Only images, which have a filter of interpolation, may be cropped without resizing.
    native, changes = crop_ratio == NATIVE, {"crop_ratio": crop_ratio}
    option, setting = ("--crop-ratio native", "interpolation") if native else ("--crop-ratio", "crop_ratio")
    if not hasattr(config, setting):
        raise Mistake(f"{option} is for {', '.join(data_sets_with(setting))}, got data set {config.name}")
    return replace(config, **changes)  # type: ignore[arg-type]


def settings_of(name: str) -> type[DataConfig]:
    """Return the settings class of a data set, of hf:NAME or webdataset:FOLDER, or of a source in a loaded module."""
    scheme, colon, path = name.partition(":")
    if scheme + colon in SOURCES and bool(colon) == bool(path):
        return SOURCES[scheme + colon]()
    if NAME.fullmatch(name):
        source = find_object(name, "function or class", inspect.isroutine)
        if not callable(source):
            raise Mistake(f"--data {name} must be a function or a class, got {type(source).__name__}")
        lattice = getattr(source, "lattice", True)
        return _settings_of(name, source, lattice, *(("digits", MIXES) if lattice else ("points", POINTS)))
    others = "hf:NAME, webdataset:FOLDER, mypackage.module:source or FILE.py:source"
    rule = f"--data must be one of {', '.join(built_in())}, {others}"
    raise Mistake(f"{rule}, got {name!r}{suggestion(closest(name, built_in()))}")


def built_in() -> list[str]:
    """List the built-in data sets."""
    return [name for name in SOURCES if ":" not in name]


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
    return [name for name in built_in() if setting in options(settings_of(name))]


def unknown_setting(setting: str, name: str) -> Mistake:
    """Build the error for an unknown setting: the data sets that have it, or a setting with a similar name."""
    option = f"--data.{setting}"
    if data_sets_with(setting):
        return Mistake(f"{option} is for {', '.join(data_sets_with(setting))}, got --data {name}")
    known = [f"--data.{known}" for known in options(settings_of(name))]
    return Mistake(f"there is no option {option} of {name}{suggestion(closest(option, known))}")
