"""Crops of images: random crops for training, centre crops for validation."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torchvision.transforms import InterpolationMode, v2

from torchrope_lab.data.data_config import AugmentConfig, CropRatio


@dataclass(frozen=True)
class CropTransform:
    """A crop that converts images of any size to `size` × `size` pixels."""

    size: int
    transform: Callable[[Any], Any]  # of PIL images or tensors `(..., height, width)`
    resized: int = 0  # pixels to which `transform` resizes the shorter side; 0 if drawn or not resized
    native: bool = False  # whether `transform` does not resize

    @property
    def decoded(self) -> int:
        """Size for `load_image`, which may decode at any resolution of at least twice this many pixels per side."""
        return max(self.size, -(-self.resized // 2))


def centre(
    size: int, crop_ratio: CropRatio = 1.0, interpolation: InterpolationMode = InterpolationMode.BILINEAR
) -> CropTransform:
    """Resize the shorter side to round(size / crop_ratio), unless it is native, and crop the central square."""
    if isinstance(crop_ratio, str):
        return CropTransform(size, v2.CenterCrop(size), native=True)
    resized = round(size / crop_ratio)
    return CropTransform(size, v2.Compose([v2.Resize(resized, interpolation), v2.CenterCrop(size)]), resized)


def random_crop(
    augment: AugmentConfig,
    size: int,
    default_scale: tuple[float, float] = (1.0, 1.0),
    interpolation: InterpolationMode = InterpolationMode.BILINEAR,
) -> CropTransform:
    """Crop at random by `resize_crop` or `crop_scale`, drawing from torch's global generator."""
    if augment.resize_crop is not None:
        resized = round(augment.resize_crop * size)
        return CropTransform(size, v2.Compose([v2.Resize(resized, interpolation), v2.RandomCrop(size)]), resized)
    return CropTransform(
        size, v2.RandomResizedCrop(size, augment.crop_scale or default_scale, interpolation=interpolation)
    )
