"""The built-in data sets: functions whose signatures are their settings, as of a user's source; imports no torch.

A function returns the class of its data module, which reads its settings from the configuration. `DataConfig` explains
the settings that several have.
"""

from typing import Annotated, Any, Literal

from torchrope_lab.data.data_config import (
    MIXES,
    POINTS,
    ClipSize,
    CropRatio,
    Interpolation,
    Normalisation,
    Windows,
    built_in,
    data_set,
    data_sets_with,
)
from torchrope_lab.schema import Fraction, NonNegativeFloat, NonNegativeInt, PositiveInt, at_least

_CROPS = (*MIXES, "crop_scale", "resize_crop")
_PICTURES = ("flip", "color_jitter", *_CROPS[1:], "erasing", "randaugment", "crop_padding", "three_augment")
_PHOTOGRAPHS = ("flip", "color_jitter", "scale_jitter")
_HEAD = [[40.0, 80.0], [80.0, 200.0], [40.0, 380.0]]


@data_set(*_CROPS)
def digits(size: PositiveInt = 8) -> Any:
    """Handwritten digits of scikit-learn, 8x8 pixels."""
    from torchrope_lab.data.digits import Digits

    return Digits


@data_set(like=digits)
def motion(size: ClipSize = 20, **settings: Any) -> Any:
    """Clips of moving digits. Default: 2,400 training and 600 validation clips."""
    from torchrope_lab.data.motion import Motion

    return Motion


@data_set(*_PICTURES)
def images(
    size: PositiveInt = 64,
    normalise: Normalisation = "measured",
    crop_ratio: CropRatio = 1.0,
    root: str | None = None,
    max_skipped: NonNegativeInt = 100,
    pipeline: Literal["exact", "fast"] = "exact",
    interpolation: Interpolation = "bilinear",
) -> Any:
    """Images in class folders.

    Args:
        pipeline: How training images are read. "exact": decoded, cropped and augmented one by one by the loading
            processes, with Pillow, as in the papers. "fast": JPEG files are decoded by libjpeg-turbo and cropped as
            bytes; the distribution is the same up to the resampling filter.
        interpolation: Resampling filter of crops, with antialiasing.
    """
    from torchrope_lab.data.images import Images

    return Images


@data_set(*_PICTURES)
def cifar10(size: PositiveInt = 32, normalise: Normalisation = "measured", root: str | None = None) -> Any:
    """CIFAR-10: 32x32 colour images, 10 classes."""
    from torchrope_lab.data.cifar import Cifar10

    return Cifar10


@data_set(like=cifar10)
def cifar100(**settings: Any) -> Any:
    """CIFAR-100: 32x32 colour images, 100 classes."""
    from torchrope_lab.data.cifar import Cifar100

    return Cifar100


@data_set(like=images)
def imagenet(
    size: PositiveInt = 224,
    normalise: Normalisation = "imagenet",
    crop_ratio: CropRatio = 0.875,
    interpolation: Interpolation = "bicubic",
    **settings: Any,
) -> Any:
    """ImageNet-1k: photographs, 1000 classes."""
    from torchrope_lab.data.imagenet import ImageNet

    return ImageNet


@data_set(*_CROPS, "erasing", "randaugment")
def videos(
    size: PositiveInt = 224,
    normalise: Normalisation = "measured",
    crop_ratio: Fraction = 1.0,
    root: str | None = None,
    max_skipped: NonNegativeInt = 100,
    cache_gib: NonNegativeFloat = 20.0,
    frames: PositiveInt = 8,
    frame_stride: PositiveInt = 4,
    test_views: tuple[PositiveInt, PositiveInt] = (1, 1),
) -> Any:
    """Videos in class folders.

    Args:
        frames: Frames per clip.
        frame_stride: Distance between the frames of a clip, in frames of the video.
        test_views: Temporal segments and spatial crops of a video over which an evaluation averages logits.
    """
    from torchrope_lab.data.videos import Videos

    return Videos


@data_set(like=videos)
def ucf101(split: Annotated[int, at_least(1, 3)] = 1, **settings: Any) -> Any:
    """UCF101: videos of 101 actions.

    Args:
        split: Official split, 1 to 3.
    """
    from torchrope_lab.data.ucf101 import UCF101

    return UCF101


@data_set(*MIXES, "erasing", "randaugment")
def volumes(
    size: PositiveInt = 224,
    root: str | None = None,
    max_skipped: NonNegativeInt = 100,
    cache_gib: NonNegativeFloat = 20.0,
    frames: PositiveInt = 32,
    labels: str | None = None,
    windows: Windows | None = None,
) -> Any:
    """Volumes in DICOM or NIfTI files.

    Args:
        frames: Slices per volume.
        labels: Table of the labels. Default: root/labels.csv, for "rsna" root/stage_2_train.csv.
        windows: Intensity windows [centre, width], one per channel, in the unit of the file (Hounsfield units for CT).
            Default: one channel, from the 0.5th to the 99.5th percentile of each volume.
    """
    from torchrope_lab.data.volumes import Volumes

    return Volumes


@data_set(like=volumes)
def rsna(windows: Windows | None = _HEAD, **settings: Any) -> Any:
    """CT of the head; default windows: brain, subdural and soft tissue."""
    from torchrope_lab.data.rsna import RSNA

    return RSNA


@data_set(*POINTS, lattice=False)
def points(
    size: PositiveInt = 1024,
    root: str | None = None,
    max_skipped: NonNegativeInt = 100,
    axes: list[str] | None = None,
    features: list[str] | None = None,
    label: str | None = None,
    example: str | None = None,
    coordinates: bool | None = None,
) -> Any:
    """Sets of points in tables.

    Args:
        axes: Names of the position columns. Default: those of t (or time, timestamp), x, y, z in the first file.
        features: Names of the feature columns. Default: all other columns of the first file.
        label: Name of the class column, with one value per example. Default: the sub-folder is the class.
        example: Name of the column that tells the examples of a file apart; those of one value, in several files, are
            in one part and fold. Default: a file is one example.
        coordinates: Whether tokens include the coordinates of their point, relative to the mean of the example's points
            and divided by half the extent. Default: only if there are no features, because attention over identical
            tokens does not depend on positions.
    """
    from torchrope_lab.data.points import Points

    return Points


@data_set(*_PHOTOGRAPHS, "multi_scale")
def coco(size: PositiveInt = 800, root: str | None = None, max_skipped: NonNegativeInt = 100) -> Any:
    """COCO, or other data in its format."""
    from torchrope_lab.data.coco import Coco

    return Coco


@data_set(*_PHOTOGRAPHS, "max_class_share")
def ade20k(size: PositiveInt = 512, root: str | None = None, max_skipped: NonNegativeInt = 100) -> Any:
    """ADE20k: photographs with maps of 150 classes."""
    from torchrope_lab.data.maps import ADE20k

    return ADE20k


@data_set(like=ade20k)
def segments(**settings: Any) -> Any:
    """Images and masks in folders."""
    from torchrope_lab.data.maps import Segments

    return Segments


@data_set(name="hf:", like=imagenet, recipe="images")
def hub(
    size: PositiveInt = 64,
    subset: str | None = None,
    train_split: str = "train",
    val_split: str | None = None,
    image: str | None = None,
    label: str | None = None,
    **settings: Any,
) -> Any:
    """Images of a data set of the Hugging Face Hub, or of a folder that the package datasets reads, as for "imagenet".

    Args:
        subset: Name of the configuration, for data sets that have several.
        train_split: Name of the training split.
        val_split: Name of the validation split. Default: the first of validation, val, valid and test that exists; if
            none does, a fifth of each class is held out.
        image: Name of the column of images. Default: the only one of this type.
        label: Name of the column of classes. Default: the only one of this type.
    """
    from torchrope_lab.data.hub import HubImages

    return HubImages


@data_set(name="webdataset:", like=imagenet, recipe="images")
def webdataset(size: PositiveInt = 64, **settings: Any) -> Any:
    """Images in tar shards of webdataset's format, in a folder as for "imagenet"; root is that of the name."""
    from torchrope_lab.data.hub import WebDataset

    return WebDataset


DATA_NAMES = tuple(built_in())
NAMES_DENSE = tuple(data_sets_with("augment.scale_jitter"))
