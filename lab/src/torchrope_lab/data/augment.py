"""Random augmentation of training batches, on the device of the batch."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import Dataset, default_collate
from torchvision import tv_tensors
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as image_ops

from torchrope_lab.data.config import LARGEST_MAGNITUDE, AugmentConfig
from torchrope_lab.data.crops import random_crop
from torchrope_lab.data.draws import Draws, seeded

SOLARISE_FROM = 128
BLUR = {"kernel_size": 9, "sigma": (0.1, 2.0)}  # pixels; the standard deviations are those of DeiT-III
OPERATIONS = (
    "Identity",
    "ShearX",
    "ShearY",
    "TranslateX",
    "TranslateY",
    "Rotate",
    "Brightness",
    "Color",
    "Contrast",
    "Sharpness",
    "Posterize",
    "Solarize",
    "AutoContrast",
    "Equalize",
)  # torchvision's names and order
VOLUME_OPERATIONS = tuple(
    # Channels are not colours, and equal values must stay equal in all slices.
    name
    for name in OPERATIONS
    if name not in ("Color", "Posterize", "Solarize", "AutoContrast", "Equalize")
)

# Greyscale, solarise or blur, each with probability 1/3 (DeiT-III, section 3).
THREE_AUGMENT = v2.RandomChoice([v2.Grayscale(3), v2.RandomSolarize(SOLARISE_FROM, p=1.0), v2.GaussianBlur(**BLUR)])

Transform = Callable[[Tensor], Tensor]


class EpochSet(Dataset):
    """Apply random augmentation to the training examples of one epoch.

    Example i depends on `seed` and i only; with Mixup or CutMix, also on the other examples of its batch. Random
    numbers that `dataset` draws from torch's global generator, such as those of a random crop, are seeded the same way.

    Args:
        dataset: Examples (input, label, ...). If it has the method `normalise` and the attribute `raw`, the same set
            before normalisation, augmentation is applied before normalisation: to images and clips as bytes, to volumes
            in [0, 1].
        config: The augmentation.
        num_classes: Length of the soft labels of Mixup and CutMix.
        seed: Seed of the run and the epoch.
    """

    def __init__(self, dataset: Dataset, config: AugmentConfig, num_classes: int, seed: int) -> None:
        self.dataset = dataset
        self.config = config
        self.num_classes = num_classes
        self.seed = seed

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> tuple:
        if not 0 <= index < len(self):  # stops iteration; indices past the end (repeats) are valid in __getitems__ only
            raise IndexError(f"an example must be between 0 and {len(self) - 1}, got {index}")
        inputs, labels, *others = self.__getitems__([index])
        label = labels[0] if labels.ndim > 1 else int(labels[0])
        return inputs[0], label, *(other[0] for other in others)

    def __getitems__(self, indices: Sequence[int]) -> tuple:
        draws = Draws(self.seed, indices)
        normalise = getattr(self.dataset, "normalise", None)
        raw = self.dataset if normalise is None else self.dataset.raw  # type: ignore[attr-defined]
        inputs, labels, *others = read_batch(raw, draws)
        inputs = crop(inputs, self.config, draws)
        if normalise is not None:
            transform = transform_pixels if inputs.dtype == torch.uint8 else transform_voxels
            inputs = erase(normalise(transform(inputs, self.config, draws)), self.config.erasing, draws)
        elif self.config.flip:
            inputs = flip(inputs, draws)
        inputs, labels = mix(inputs, labels, self.num_classes, self.config, draws)
        return inputs, labels, *others


def read_batch(dataset: Dataset, draws: Draws) -> Sequence[Tensor]:
    """Read a batch with `__getitems__` if the set has it, else example by example, each with its own seed."""
    indices = [index % len(dataset) for index in draws.indices]  # type: ignore[arg-type]  # an index past the end is a repeat
    if hasattr(dataset, "__getitems__"):
        return dataset.__getitems__(indices)
    samples = []
    for index, seed in zip(indices, draws.seeds("sample"), strict=True):
        with seeded(seed):
            samples.append(dataset[index])
    return default_collate(samples)


def crop(inputs: Tensor, config: AugmentConfig, draws: Draws) -> Tensor:
    """Crop square images or clips `(batch, channels, [time,] size, size)` at random and resize to `size`, if set."""
    if not config.crops:
        return inputs
    return one_by_one(inputs, random_crop(config, inputs.shape[-1]).transform, draws.seeds("random crop"))


def transform_pixels(images: Tensor, config: AugmentConfig, draws: Draws) -> Tensor:
    """Augment uint8 images `(batch, 3, height, width)`: crop, flip, colours, in the order of `AugmentConfig`.

    Clips `(batch, 3, time, height, width)` support flips and RandAugment, the same for all frames.
    """
    if config.crop_padding:
        images = crop_padded(images, config.crop_padding, draws)
    if config.flip:
        images = flip(images, draws)
    if config.randaugment is not None:
        images = randaugment(images, *config.randaugment, draws)
    if config.three_augment:
        images = one_by_one(images, THREE_AUGMENT, draws.seeds("three_augment"))
    if config.color_jitter:
        strength = config.color_jitter
        images = one_by_one(images, v2.ColorJitter(strength, strength, strength), draws.seeds("color_jitter"))
    return images


def transform_voxels(volumes: Tensor, config: AugmentConfig, draws: Draws) -> Tensor:
    """Flip volumes `(batch, channels, depth, height, width)` in [0, 1] and apply RandAugment, equally to all slices."""
    if config.flip:
        volumes = flip(volumes, draws)
    if config.randaugment is not None:
        volumes = randaugment_volumes(volumes, *config.randaugment, draws)
    return volumes


def crop_padded(images: Tensor, padding: int, draws: Draws) -> Tensor:
    """Pad every image by `padding` black pixels and crop it at random to its original size."""
    height, width = images.shape[-2:]
    padded = functional.pad(images, (padding,) * 4)
    corners = (draws.uniform("crop", 2) * (2 * padding + 1)).long().to(images.device)  # [b, 2]
    rows = corners[:, :1] + torch.arange(height, device=images.device)
    columns = corners[:, 1:] + torch.arange(width, device=images.device)
    sample = torch.arange(len(images), device=images.device)[:, None, None]
    return padded[sample, :, rows[:, :, None], columns[:, None]].movedim(-1, 1).contiguous()


def flip(inputs: Tensor, draws: Draws) -> Tensor:
    """Flip every example along the last axis (left and right) with probability 1/2."""
    flipped = (draws.uniform("flip") < 0.5).to(inputs.device)  # [b, 1]
    return torch.where(flipped.view(-1, *[1] * (inputs.ndim - 1)), inputs.flip(-1), inputs)


def randaugment(images: Tensor, number: int, magnitude: int, draws: Draws) -> Tensor:
    """Apply `number` random operations of a magnitude to every image (Cubuk et al., arXiv:1909.13719).

    Operations, strengths and directions are those of torchvision's `RandAugment` with 31 magnitudes. Images with the
    same operation are processed together, so a batch needs one call per operation. The operations and strengths of a
    clip `(batch, 3, time, height, width)` apply to each of its frames (VideoMAE, Tong et al., arXiv:2203.12602).
    """
    transforms = randaugment_transforms(magnitude, *images.shape[-2:])
    last = images.movedim(1, -3)  # torchvision accepts any leading axes
    return _drawn_transforms(last, number, transforms, draws).movedim(-3, 1).contiguous()


def randaugment_volumes(volumes: Tensor, number: int, magnitude: int, draws: Draws) -> Tensor:
    """Apply `number` random `VOLUME_OPERATIONS` to every volume, with the strengths of `randaugment`.

    Geometric operations act in the plane of the slices, equally on all slices. Contrast scales around the mean of each
    channel over the volume; for an image it scales around the mean of its greyscale version.

    Args:
        volumes: `(batch, channels, depth, height, width)` in [0, 1].
        number: Operations per volume.
        magnitude: 0 to 30.
        draws: Random numbers of the batch.
    """
    return _drawn_transforms(volumes, number, volume_transforms(magnitude, *volumes.shape[-2:]), draws)


def volume_transforms(magnitude: int, height: int, width: int) -> list[tuple[Transform, Transform]]:
    """Return each of `VOLUME_OPERATIONS` at a magnitude, in both directions."""
    image_transforms = dict(zip(OPERATIONS, randaugment_transforms(magnitude, height, width), strict=True))
    transforms = []
    for name in VOLUME_OPERATIONS:
        forward, backward = image_transforms[name]
        adapt = _per_channel if name == "Contrast" else _per_slice
        transforms.append((adapt(forward), adapt(backward)))
    return transforms


def _drawn_transforms(
    images: Tensor, number: int, transforms: Sequence[tuple[Transform, Transform]], draws: Draws
) -> Tensor:
    """Apply `number` random transforms to every example, each in a random direction."""
    directed = [transform for pair in transforms for transform in pair]
    for step in range(number):
        drawn = draws.uniform(f"randaugment {step}", 2)
        kinds = 2 * (drawn[:, 0] * len(transforms)).long() + (drawn[:, 1] < 0.5)
        images = apply_by_index(images, kinds, directed)
    return images


def _per_slice(transform: Transform) -> Transform:
    """Apply a transform of greyscale images to each slice of each channel `(..., height, width)`."""
    return lambda x: transform(x.unsqueeze(-3)).squeeze(-3)


def _per_channel(transform: Transform) -> Transform:
    """Apply a transform of greyscale images to each channel, its slices stacked vertically into one image."""
    return lambda x: transform(x.flatten(-3, -2).unsqueeze(-3)).squeeze(-3).view_as(x)


def randaugment_transforms(magnitude: int, height: int, width: int) -> list[tuple[Transform, Transform]]:
    """Return each of `OPERATIONS` at a magnitude, in both directions (twice the same if it has no direction)."""
    level = magnitude / LARGEST_MAGNITUDE
    shear = math.degrees(math.atan(0.3 * level))
    degrees, factor = 30.0 * level, 0.9 * level
    right, down = int(150 / 331 * width * level), int(150 / 331 * height * level)
    bits, threshold = round(8 - 4 * level), 255 * (1 - level)

    def moved(angles: tuple[float, float], pixels: tuple[int, int], centre: list[float] | None = None) -> Transform:
        return lambda x: image_ops.affine(x, 0.0, list(pixels), 1.0, list(angles), center=centre)

    corner = [0.0, 0.0]
    transforms: dict[str, Callable[[int], Transform]] = {
        "Identity": lambda sign: lambda x: x,
        "ShearX": lambda sign: moved((sign * shear, 0.0), (0, 0), corner),
        "ShearY": lambda sign: moved((0.0, sign * shear), (0, 0), corner),
        "TranslateX": lambda sign: moved((0.0, 0.0), (sign * right, 0)),
        "TranslateY": lambda sign: moved((0.0, 0.0), (0, sign * down)),
        "Rotate": lambda sign: lambda x: image_ops.rotate(x, sign * degrees),
        "Brightness": lambda sign: lambda x: image_ops.adjust_brightness(x, 1 + sign * factor),
        "Color": lambda sign: lambda x: image_ops.adjust_saturation(x, 1 + sign * factor),
        "Contrast": lambda sign: lambda x: image_ops.adjust_contrast(x, 1 + sign * factor),
        "Sharpness": lambda sign: lambda x: image_ops.adjust_sharpness(x, 1 + sign * factor),
        "Posterize": lambda sign: lambda x: image_ops.posterize(x, bits),
        "Solarize": lambda sign: lambda x: image_ops.solarize(x, threshold),
        "AutoContrast": lambda sign: image_ops.autocontrast,
        "Equalize": lambda sign: image_ops.equalize,
    }
    return [(transforms[name](1), transforms[name](-1)) for name in OPERATIONS]


def apply_by_index(images: Tensor, kinds: Tensor, transforms: Sequence[Transform]) -> Tensor:
    """Apply `transforms[kinds[i]]` to image i, with one call for all images of a kind."""
    changed = images.clone()
    for kind in kinds.unique().tolist():
        members = (kinds == kind).nonzero().flatten().to(images.device)
        changed[members] = transforms[kind](images[members])
    return changed


def one_by_one(inputs: Tensor, transform: Transform, seeds: Sequence[int]) -> Tensor:
    """Apply a transform that draws from torch's global generator to every example, each with its own seed."""
    changed = []
    for example, seed in zip(inputs, seeds, strict=True):
        with seeded(seed):
            changed.append(transform(example))
    return torch.stack(changed)


def erase(inputs: Tensor, probability: float, draws: Draws) -> Tensor:
    """Replace a random box of 2 to 33 % of an input by noise, as torchvision's `RandomErasing` does.

    In a clip or a volume the box is the same in all frames or slices (VideoMAE), with different noise in each.
    """
    if not probability:
        return inputs
    flat = inputs.flatten(1, -3)  # frames are treated as channels
    return one_by_one(flat, v2.RandomErasing(probability, value="random"), draws.seeds("erasing")).view_as(inputs)


def mix(inputs: Tensor, labels: Tensor, num_classes: int, config: AugmentConfig, draws: Draws) -> tuple[Tensor, Tensor]:
    """Mix every example with its neighbour in the batch by Mixup or CutMix.

    Returns:
        Inputs and labels. If Mixup or CutMix is configured, labels are probabilities `(batch, num_classes)`, also for
        a batch that is not mixed.
    """
    if not config.mixup and not config.cutmix:
        return inputs, labels
    batch = draws.of_batch
    mix_draw, kind_draw = batch.uniform("mix", 2)[0].tolist()
    if mix_draw >= config.mix_probability:
        return inputs, functional.one_hot(labels, num_classes).float()
    cut = config.cutmix > 0 and (not config.mixup or kind_draw < 0.5)
    mixer = v2.CutMix if cut else v2.MixUp
    # torchvision accepts five axes for videos only.
    wrapped = tv_tensors.Video(inputs) if inputs.ndim == 5 else inputs
    with seeded(batch.seeds("mix shares")[0]):
        mixed, shares = mixer(alpha=config.cutmix if cut else config.mixup, num_classes=num_classes)(wrapped, labels)
    return mixed.as_subclass(Tensor), shares
