"""Random augmentation of training batches."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import Dataset, default_collate
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as image_ops

from torchrope_lab.data.crops import random_crop
from torchrope_lab.data.data_config import LIERE, AugmentConfig
from torchrope_lab.data.draws import Draws, seeded
from torchrope_lab.data.randaugment import OPERATIONS, apply_by_kind, randaugment, solarize
from torchrope_lab.data.repeated import ReadInBatches, example_of

SOLARISE_FROM = 128
SIGMAS = 0.1, 2.0
"""Range of the standard deviations of blurs, DeiT-III's."""
ATTEMPTS, AREAS, RATIOS = 10, (0.02, 0.33), (0.3, 3.3)
"""Of boxes that are erased: number of draws, range of areas, of an image, and of heights over widths."""


class EpochSet(ReadInBatches):
    """Apply random augmentation to the training examples of one epoch."""

    # Example i depends on `seed` and i only; with Mixup or CutMix, also on the other examples of its batch. Random
    # numbers that `dataset` draws from torch's global generator, such as those of a random crop, are seeded the same
    # way. If `dataset` has the method `normalise` and the attribute `raw`, the same set before normalisation,
    # augmentation is applied before normalisation: to images and clips as bytes, to volumes in [0, 1].

    def __init__(self, dataset: Dataset, config: AugmentConfig, num_classes: int, seed: int) -> None:
        self.dataset = dataset
        self.config = config
        self.num_classes = num_classes
        self.seed = seed

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def __getitems__(self, indices: Sequence[int]) -> tuple:
        draws = Draws(self.seed, indices)
        normalise = getattr(self.dataset, "normalise", None)
        raw = self.dataset if normalise is None else self.dataset.raw  # type: ignore[attr-defined]
        inputs, labels, *others = read_batch(raw, draws)
        inputs = transform(inputs, self.config, draws)
        if normalise is not None:
            inputs = erase(normalise(inputs), self.config.erasing, draws)
        return *mix(inputs, labels, self.num_classes, self.config, draws), *others


def read_batch(dataset: Dataset, draws: Draws) -> Sequence[Tensor]:
    """Read a batch with `__getitems__` if the set has it, else example by example, each with its own seed."""
    # Copies of an example, which repeated augmentation makes, are decoded once if the set `decodes_once`.
    indices = [example_of(index, len(dataset)) for index in draws.indices]  # type: ignore[arg-type]
    if hasattr(dataset, "__getitems__"):
        return dataset.__getitems__(indices)
    copies: dict[int, list[tuple[int, int]]] = {}
    for number, (index, seed) in enumerate(zip(indices, draws.seeds("sample"), strict=True)):
        copies.setdefault(index, []).append((number, seed))
    samples: list[tuple] = [()] * len(indices)
    for index, numbered in copies.items():
        decoded = dataset.reading.get(index) if getattr(dataset, "decodes_once", False) else None  # type: ignore[attr-defined]
        for number, seed in numbered:
            with seeded(seed):
                samples[number] = dataset[index] if decoded is None else dataset.cropped(*decoded)  # type: ignore[attr-defined]
    return default_collate(samples)


def transform(inputs: Tensor, config: AugmentConfig, draws: Draws) -> Tensor:
    """Crop, flip and change colours, in the order of `AugmentConfig`; LieRE's operations are before the crop."""
    # Inputs are images or clips `(batch, channels, [time,] height, width)` as bytes, or volumes in [0, 1]. The changes
    # of a clip or a volume are the same in all frames or slices.
    before = config.randaugment == LIERE
    if before:
        inputs = randaugment(inputs, LIERE, draws)
    if config.crops:
        inputs = one_by_one(inputs, random_crop(config, inputs.shape[-1]).transform, draws.seeds("random crop"))
    if config.crop_padding:
        inputs = crop_padded(inputs, config.crop_padding, draws)
    if config.flip:
        inputs = flip(inputs, draws)
    if config.randaugment is not None and not before:
        inputs = randaugment(inputs, config.randaugment, draws)
    if config.three_augment:
        inputs = three_augment(inputs, draws)
    if config.color_jitter:
        inputs = jitter_colours(inputs, config.color_jitter, draws)
    return inputs


def three_augment(images: Tensor, draws: Draws) -> Tensor:
    """Make images `(batch, 3, height, width)` grey, solarise or blur them, with probability 1/3 each (DeiT-III)."""
    drawn = draws.uniform("three_augment", 2)
    kinds, sigmas = (3 * drawn[:, 0]).long(), SIGMAS[0] + (SIGMAS[1] - SIGMAS[0]) * drawn[:, 1]
    changed = images.clone()
    apply_by_kind(changed, kinds, (grey, solarise, blur), lambda _, members: sigmas[members])
    return changed


def jitter_colours(images: Tensor, strength: float, draws: Draws) -> Tensor:
    """Change brightness, contrast and saturation by factors from 1 - strength to 1 + strength, in random order."""
    drawn = draws.uniform("color_jitter", 6).float()
    factors = 1 + strength * (2 * drawn[:, :3] - 1)
    order = drawn[:, 3:].argsort(dim=1)  # of the three, for every image
    operations = [OPERATIONS[name] for name in ("Brightness", "Contrast", "Color")]
    changed = images.clone()
    for kinds in order.unbind(1):
        apply_by_kind(changed, kinds, operations, lambda kind, members: factors[members, kind])
    return changed


def grey(images: Tensor, _: Tensor) -> Tensor:
    """Make images grey, with three equal channels."""
    return image_ops.rgb_to_grayscale(images, num_output_channels=3)


def solarise(images: Tensor, _: Tensor) -> Tensor:
    """Invert the values from 128 on."""
    return solarize(images, images.new_tensor([SOLARISE_FROM]))


def blur(images: Tensor, sigmas: Tensor) -> Tensor:
    """Blur images `(n, channels, height, width)` by standard deviations `(n,)`: three boxes per axis, as Pillow."""
    variances = sigmas.square() / 3  # of a box, which has 2 whole + 1 equal weights, and smaller ones at its ends
    whole = ((12 * variances + 1).sqrt() / 2 - 0.5).floor()
    ends = (2 * whole + 1) * (whole * (whole + 1) - 3 * variances) / (6 * (variances - (whole + 1).square()))
    boxes = (1 + (whole + ends)[:, None] - torch.arange(-2, 3).abs()).clamp(0, 1)  # (n, 5), for deviations below 2.4
    kernels = boxes = boxes / boxes.sum(dim=1, keepdim=True)
    for _ in range(2):  # (n, 9), (n, 13)
        kernels = functional.conv1d(functional.pad(kernels, (4, 4)), boxes.unsqueeze(1), groups=len(boxes))
    kernels = kernels.repeat_interleave(images.shape[1], dim=0).unsqueeze(1)  # (n · channels, 1, 13)
    padded = functional.pad(images.float().flatten(0, 1), (6,) * 4, mode="replicate")
    across = functional.conv2d(padded, kernels.unsqueeze(2), groups=len(padded))
    return functional.conv2d(across, kernels.unsqueeze(3), groups=len(padded)).round_().view_as(images).to(images.dtype)


def crop_padded(images: Tensor, padding: int, draws: Draws) -> Tensor:
    """Pad every image by `padding` black pixels and crop it at random to its original size."""
    height, width = images.shape[-2:]
    padded = functional.pad(images, (padding,) * 4)
    corners = (draws.uniform("crop", 2) * (2 * padding + 1)).long()  # [b, 2]
    rows = corners[:, :1] + torch.arange(height)
    columns = corners[:, 1:] + torch.arange(width)
    sample = torch.arange(len(images))[:, None, None]
    return padded[sample, :, rows[:, :, None], columns[:, None]].movedim(-1, 1).contiguous()


def flip(inputs: Tensor, draws: Draws) -> Tensor:
    """Flip every example along the last axis (left and right) with probability 1/2."""
    flipped = draws.uniform("flip") < 0.5  # [b, 1]
    return torch.where(flipped.view(-1, *[1] * (inputs.ndim - 1)), inputs.flip(-1), inputs)


def one_by_one(inputs: Tensor, transform: Callable[[Tensor], Tensor], seeds: Sequence[int]) -> Tensor:
    """Apply a transform that draws from torch's global generator to every example, each with its own seed."""
    changed = []
    for example, seed in zip(inputs, seeds, strict=True):
        with seeded(seed):
            changed.append(transform(example))
    return torch.stack(changed)


def erase(inputs: Tensor, probability: float, draws: Draws) -> Tensor:
    """Replace a random box of 2 to 33 % of an input by noise, distributed as torchvision's `RandomErasing`."""
    # In a clip or a volume the box is the same in all frames or slices (VideoMAE), with different noise in each.
    if not probability:
        return inputs
    height, width = inputs.shape[-2:]
    erased, y, x = draws.uniform("erasing", 3).unbind(1)
    drawn = draws.uniform("erased box", 2 * ATTEMPTS).view(-1, ATTEMPTS, 2)
    areas = height * width * (AREAS[0] + (AREAS[1] - AREAS[0]) * drawn[..., 0])
    low, high = map(math.log, RATIOS)
    ratios = (low + (high - low) * drawn[..., 1]).exp()
    sides = torch.stack([(areas * ratios).sqrt().round(), (areas / ratios).sqrt().round()], dim=-1)
    fits = (sides < torch.tensor([height, width])).all(dim=-1)  # (batch, attempts)
    changed, seeds = inputs.clone(), draws.seeds("noise")
    for example in ((erased < probability) & fits.any(dim=1)).nonzero().flatten().tolist():
        tall, wide = sides[example, fits[example].int().argmax()].long().tolist()
        top, left = int(y[example] * (height - tall + 1)), int(x[example] * (width - wide + 1))
        box = changed[example, ..., top : top + tall, left : left + wide]
        box.copy_(torch.randn(box.shape, generator=torch.Generator().manual_seed(seeds[example])))
    return changed


def mix(inputs: Tensor, labels: Tensor, num_classes: int, config: AugmentConfig, draws: Draws) -> tuple[Tensor, Tensor]:
    """Mix every example with its neighbour in the batch by Mixup or CutMix; labels become `(batch, num_classes)`."""
    # CutMix pastes a box of the last two axes, through all positions along the others; of one axis, a segment.
    if not config.mixup and not config.cutmix:
        return inputs, labels
    batch = draws.of_batch
    _, kind_draw = batch.uniform("mix", 2)[0].tolist()  # one number for each would change recorded runs
    cut = config.cutmix > 0 and (not config.mixup or kind_draw < 0.5)
    one_axis = inputs.ndim == 3
    mixer = (CutSegment if one_axis else v2.CutMix) if cut else v2.MixUp
    images = inputs.unsqueeze(2) if one_axis else inputs.flatten(1, -3)  # torchvision's are (batch, channels, h, w)
    with seeded(batch.seeds("mix shares")[0]):
        mixed, shares = mixer(alpha=config.cutmix if cut else config.mixup, num_classes=num_classes)(images, labels)
    return mixed.view_as(inputs), shares


class CutSegment(v2.CutMix):
    """CutMix of inputs `(batch, channels, 1, length)`: the box of `v2.CutMix` has no area on an axis of length 1."""

    def make_params(self, flat_inputs: list[Any]) -> dict[str, Any]:
        """Draw a segment around a uniform centre, whose share of the length is 1 - λ before it is clipped."""
        share = 1 - float(self._dist.sample())
        _, length = v2.query_size(flat_inputs)
        centre, half = int(torch.randint(length, ())), int(0.5 * share * length)
        start, end = max(0, centre - half), min(length, centre + half)
        return {"box": (start, 0, end, 1), "lam_adjusted": 1 - (end - start) / length}
