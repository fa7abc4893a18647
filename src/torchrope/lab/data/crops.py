"""Crops of images and their resolution: random crops in training, the centre in validation."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torchvision.transforms import InterpolationMode, v2

from torchrope.lab.data.config import CropAugment


@dataclass(frozen=True)
class View:
    """What is shown of a picture.

    Attributes:
        size: Pixels per side.
        change: From PIL pictures or tensors `(..., height, width)` to those of `size` × `size`.
        resized: Pixels to which `change` resizes the shorter side of every picture; 0 where it is drawn at random.
    """

    size: int
    change: Callable[[Any], Any]
    resized: int = 0

    @property
    def decoded(self) -> int:
        """Pixels of which a decoder may leave twice as many per side without losing detail."""
        return max(self.size, -(-self.resized // 2))


def centre(size: int, crop_ratio: float = 1.0, interpolation: InterpolationMode = InterpolationMode.BILINEAR) -> View:
    """Resize the shorter side to size / crop_ratio, rounded, and cut a square of `size` out of the centre."""
    resized = round(size / crop_ratio)
    return View(size, v2.Compose([v2.Resize(resized, interpolation), v2.CenterCrop(size)]), resized)


def random_crop(
    augment: CropAugment,
    size: int,
    usual: tuple[float, float] = (1.0, 1.0),
    interpolation: InterpolationMode = InterpolationMode.BILINEAR,
) -> View:
    """Show a part at random, as `crop_scale` or `resize_crop` say; what is drawn comes from torch's generator.

    Args:
        augment: The settings.
        size: Pixels per side of what comes out.
        usual: `crop_scale` where neither is given.
        interpolation: How pictures are resized.
    """
    if augment.resize_crop is not None:
        resized = round(augment.resize_crop * size)
        return View(size, v2.Compose([v2.Resize(resized, interpolation), v2.RandomCrop(size)]), resized)
    return View(size, v2.RandomResizedCrop(size, augment.crop_scale or usual, interpolation=interpolation))
