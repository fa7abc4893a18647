"""Scenes of several real digits with boxes and a semantic map, small enough for quick training."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from torchrope_lab.data.config import ScenesConfig
from torchrope_lab.data.dense import (
    DenseModule,
    Transform,
    boxes_of,
    compose,
    flip_and_colours,
    large_scale_jitter,
)
from torchrope_lab.data.digits import DIGIT_SIZE, split_digits
from torchrope_lab.data.draws import Draws
from torchrope_lab.data.numbered import NumberedSet
from torchrope_lab.data.tensors import Normalise
from torchrope_lab.data.transforms import resize

SIZE = 64
SIZES = (64, 256)
TRAIN_SIZE = 2000
VAL_SIZE = 200
DIGITS = (1, 5)  # per 64 x 64 pixels; scaled with the area, as FRAGMENTS is
SIDES = (10, 28)  # pixels, on every canvas
BRIGHTNESS = (0.5, 1.0)
VISIBLE = 0.25  # minimum brightness of a pixel of a digit, as a fraction of the digit's
MAX_ATTEMPTS = 10  # positions tried per digit
FRAGMENTS = (0, 4)
FRAGMENT_SIDES = (5, 12)
FRAGMENT_BRIGHTNESS = (0.2, 0.6)
NOISE = 0.05
MEAN, STD = 0.085, 0.17  # of scenes of any size


class Scenes(DenseModule):
    """Handwritten digits at random positions and sizes on a square canvas of 64 to 256 grey pixels.

    A canvas of 64 pixels has 1 to 5 digits of 10 to 28 pixels per side and random brightness; larger canvases have
    proportionally more digits of the same sizes, so that evaluation on them tests positions beyond the training range.
    Later digits cover earlier ones. A digit that would hide more than half of another is moved, and dropped after ten
    attempts. Masks and boxes cover visible pixels: those of at least a quarter of the digit's brightness. Fragments of
    digits and noise belong to the background.

    Scene n of either part is a function of `split_seed` and n; no digit image is in both parts.

    Source: the digits of `Digits`.

    Raises:
        ValueError: size is below 64 or above 256.
    """

    name = "scenes"
    title = "Scenes of handwritten digits"
    in_channels = 1
    tasks = ("segment", "detect")
    classes = tuple("0123456789")
    map_classes = ("background", *classes)
    other_sizes = "drawn"

    config: ScenesConfig

    def __init__(self, config: ScenesConfig) -> None:
        super().__init__(config)
        side = config.size
        if not SIZES[0] <= side <= SIZES[1]:
            raise ValueError(f"--data.size must lie between {SIZES[0]} and {SIZES[1]}, got {side}")
        self.input_size = (side, side)
        self.sizes = (config.train_size or TRAIN_SIZE, config.val_size or VAL_SIZE)
        fewest, most = in_proportion(DIGITS, side)
        self.description = (
            f"{sum(self.sizes):,} synthetic scenes of {side}×{side} grey pixels with {fewest} to {most} handwritten "
            "digits (UCI, from scikit-learn) each; targets are boxes and classes."
        )

    def datasets(self) -> tuple[NumberedSet, NumberedSet]:
        """Split the digits, and render the scenes of both parts."""
        config, side = self.config, self.input_size[0]
        train_digits, train_labels, val_digits, val_labels = split_digits(config.split_seed)
        seeds = {part: Draws(config.split_seed, range(size)).seeds(part) for part, size in self._parts()}
        transform = compose([*large_scale_jitter(config.augment, side), *flip_and_colours(config.augment)])
        return (
            make_scenes(train_digits, train_labels, side, seeds["train"], transform),
            make_scenes(val_digits, val_labels, side, seeds["val"]),
        )

    def at_size(self, size: int) -> "Scenes":
        """Return data with validation scenes on a canvas of another size, and a single training scene."""
        return Scenes(replace(self.config, size=size, train_size=1))

    def _parts(self) -> list[tuple[str, int]]:
        return list(zip(("train", "val"), self.sizes, strict=True))


def in_proportion(counts: tuple[int, int], side: int) -> tuple[int, int]:
    """Scale the minimum and maximum count on 64 x 64 pixels to a canvas."""
    area = (side / SIZE) ** 2
    return round(counts[0] * area), round(counts[1] * area)


def make_scenes(
    digits: Tensor, labels: Tensor, side: int, seeds: Sequence[int], transform: Transform | None = None
) -> NumberedSet:
    """Make a scene for each seed.

    Args:
        digits: Digits to draw from, `(digits, 1, 8, 8)` in [0, 1].
        labels: Their classes.
        side: Pixels per side of the canvas.
        seeds: Seed of each scene.
        transform: Transform of image and target.
    """
    scenes = [make_scene(digits, labels, side, torch.Generator().manual_seed(seed)) for seed in seeds]
    inputs, numbers, objects = zip(*scenes, strict=True)
    return NumberedSet(
        torch.stack(inputs)[:, None],
        torch.stack(numbers),
        objects,
        [f"scene {index}" for index in range(len(scenes))],
        Normalise(torch.tensor(MEAN), torch.tensor(STD)),
        transform,
    )


def make_scene(digits: Tensor, labels: Tensor, side: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Draw a scene.

    Returns:
        Picture, uint8 `(side, side)`; number of the digit at every pixel, 0 for none, uint8 `(side, side)`; class and
        box (left, top, right, bottom) of every digit, int64 `(digits, 5)`.
    """

    def draw(count: int) -> list[float]:
        return torch.rand(count, generator=generator, dtype=torch.float64).tolist()

    canvas = torch.zeros(side, side)
    numbers = torch.zeros(side, side, dtype=torch.uint8)
    of_digits, of_fragments = draw(2)
    for _ in range(_between(in_proportion(FRAGMENTS, side), of_fragments)):
        which, corner, *rest = draw(6)
        row, column = divmod(int(corner * (DIGIT_SIZE // 2 + 1) ** 2), DIGIT_SIZE // 2 + 1)
        piece = digits[int(which * len(digits)), :, row : row + DIGIT_SIZE // 2, column : column + DIGIT_SIZE // 2]
        ink, place = _place(piece, FRAGMENT_SIDES, FRAGMENT_BRIGHTNESS, side, rest)
        canvas[place] = torch.maximum(canvas[place], ink)
    classes: list[int] = []
    whole, seen = torch.zeros(2, 256, dtype=torch.int64)  # pixels of each number: when it was drawn, and now
    for _ in range(_between(in_proportion(DIGITS, side), of_digits)):
        for _ in range(MAX_ATTEMPTS):
            which, *rest = draw(5)
            index, number = int(which * len(digits)), len(classes) + 1
            ink, place = _place(digits[index], SIDES, BRIGHTNESS, side, rest)
            here = ink > VISIBLE * _within(BRIGHTNESS, rest[1])
            left = seen - numbers[place][here].int().bincount(minlength=256)
            if bool((2 * left >= whole)[1:number].all()):
                seen, seen[number], whole[number] = left, here.sum(), here.sum()
                numbers[place][here] = number
                canvas[place] = torch.where(here, ink, torch.maximum(canvas[place], ink))
                classes.append(int(labels[index]))
                break
    noisy = canvas + NOISE * torch.randn(side, side, generator=generator)
    boxes = boxes_of(numbers == torch.arange(1, len(classes) + 1)[:, None, None]).long()
    picture = (255 * noisy).round().clamp(0, 255).to(torch.uint8)
    return picture, numbers, torch.cat([torch.tensor(classes)[:, None], boxes], dim=1)


def _place(
    piece: Tensor, sides: tuple[int, int], brightness: tuple[float, float], canvas: int, drawn: Sequence[float]
) -> tuple[Tensor, tuple[slice, slice]]:
    """Resize a picture `(1, rows, columns)` to a random side and brightness; return it and its random position."""
    extent = _between(sides, drawn[0])
    top, left = (int(number * (canvas - extent + 1)) for number in drawn[2:])
    ink = resize(piece[None], extent)[0, 0] * _within(brightness, drawn[1])
    return ink, (slice(top, top + extent), slice(left, left + extent))


def _between(ends: tuple[int, int], drawn: float) -> int:
    """Convert a draw from [0, 1) to an integer, both ends included."""
    low, high = ends
    return low + int(drawn * (high - low + 1))


def _within(ends: tuple[float, float], drawn: float) -> float:
    low, high = ends
    return low + drawn * (high - low)
