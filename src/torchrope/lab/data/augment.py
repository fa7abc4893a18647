"""Random augmentation of whole batches of training inputs, on the device of the batch."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import Dataset, default_collate
from torchvision import tv_tensors
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as pictures

from torchrope.lab.data.config import LARGEST_MAGNITUDE, AugmentConfig
from torchrope.lab.data.crops import random_crop
from torchrope.lab.data.draws import Draws, seeded

SOLARISE_FROM = 128
BLUR = {"kernel_size": 9, "sigma": (0.1, 2.0)}  # pixels; the deviations are DeiT-III's
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
OPERATIONS_OF_VOLUMES = tuple(
    # Channels are no colours, and a value is to mean the same in all slices.
    name
    for name in OPERATIONS
    if name not in ("Color", "Posterize", "Solarize", "AutoContrast", "Equalize")
)

# Grey, solarised or blurred, each with a third of the chance (DeiT-III, section 3).
THREE_AUGMENT = v2.RandomChoice([v2.Grayscale(3), v2.RandomSolarize(SOLARISE_FROM, p=1.0), v2.GaussianBlur(**BLUR)])

Change = Callable[[Tensor], Tensor]


class EpochSet(Dataset):
    """The training examples of one epoch, changed at random.

    Example i is a function of `seed` and i alone, Mixup and CutMix of its batch too. What the set itself draws
    from torch's generator, such as a random crop, is seeded the same way.

    Args:
        dataset: Examples (input, label, ...). Where it has `normalise`, which makes inputs ready for a model, and
            `raw`, the same set before that, inputs are changed in between: pictures and clips as bytes, volumes in
            [0, 1].
        config: What is changed.
        num_classes: Length of a label that Mixup and CutMix make.
        seed: That of the run and the epoch.
    """

    def __init__(self, dataset: Dataset, config: AugmentConfig, num_classes: int, seed: int) -> None:
        self.dataset = dataset
        self.config = config
        self.num_classes = num_classes
        self.seed = seed

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> tuple:
        if not 0 <= index < len(self):  # where a loop over the set ends; repeats come in batches alone
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
            change = change_pixels if inputs.dtype == torch.uint8 else change_voxels
            inputs = erase(normalise(change(inputs, self.config, draws)), self.config.erasing, draws)
        elif self.config.flip:
            inputs = flip(inputs, draws)
        inputs, labels = mix(inputs, labels, self.num_classes, self.config, draws)
        return inputs, labels, *others


def read_batch(dataset: Dataset, draws: Draws) -> Sequence[Tensor]:
    """Read a batch at once where the set can, else one by one, each with a seed of its own."""
    indices = [index % len(dataset) for index in draws.indices]  # type: ignore[arg-type]  # beyond the end: a repeat
    if hasattr(dataset, "__getitems__"):
        return dataset.__getitems__(indices)
    samples = []
    for index, seed in zip(indices, draws.seeds("sample"), strict=True):
        with seeded(seed):
            samples.append(dataset[index])
    return default_collate(samples)


def crop(inputs: Tensor, config: AugmentConfig, draws: Draws) -> Tensor:
    """Show a part of square pictures or clips `(batch, channels, [time,] size, size)`, enlarged to `size`, if asked."""
    if not config.crops:
        return inputs
    return one_by_one(inputs, random_crop(config, inputs.shape[-1]).change, draws.seeds("random crop"))


def change_pixels(images: Tensor, config: AugmentConfig, draws: Draws) -> Tensor:
    """Pad and crop, flip and recolour uint8 pictures `(batch, 3, height, width)`, in the order of `AugmentConfig`.

    Clips `(batch, 3, time, height, width)` are flipped and take RandAugment, all frames alike.
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


def change_voxels(volumes: Tensor, config: AugmentConfig, draws: Draws) -> Tensor:
    """Flip volumes `(batch, channels, depth, height, width)` in [0, 1], and apply RandAugment, all slices alike."""
    if config.flip:
        volumes = flip(volumes, draws)
    if config.randaugment is not None:
        volumes = randaugment_volumes(volumes, *config.randaugment, draws)
    return volumes


def crop_padded(images: Tensor, padding: int, draws: Draws) -> Tensor:
    """Shift every picture by up to `padding` pixels along each axis, black coming in."""
    height, width = images.shape[-2:]
    padded = functional.pad(images, (padding,) * 4)
    corners = (draws.uniform("crop", 2) * (2 * padding + 1)).long().to(images.device)  # [b, 2]
    rows = corners[:, :1] + torch.arange(height, device=images.device)
    columns = corners[:, 1:] + torch.arange(width, device=images.device)
    sample = torch.arange(len(images), device=images.device)[:, None, None]
    return padded[sample, :, rows[:, :, None], columns[:, None]].movedim(-1, 1).contiguous()


def flip(inputs: Tensor, draws: Draws) -> Tensor:
    """Exchange left and right, the ends of the last axis, in half of the examples."""
    chosen = (draws.uniform("flip") < 0.5).to(inputs.device)  # [b, 1]
    return torch.where(chosen.view(-1, *[1] * (inputs.ndim - 1)), inputs.flip(-1), inputs)


def randaugment(images: Tensor, number: int, magnitude: int, draws: Draws) -> Tensor:
    """Apply `number` operations of a magnitude to every picture (Cubuk et al., arXiv:1909.13719).

    Operations, strengths and directions are torchvision's `RandAugment` with 31 magnitudes. Pictures with the
    same operation are changed together, so a batch costs as many calls as there are operations. The frames of a clip
    `(batch, 3, time, height, width)` have the operations and strengths of their clip, each as a picture of its own
    (VideoMAE, Tong et al., arXiv:2203.12602).
    """
    changes = randaugment_changes(magnitude, *images.shape[-2:])
    last = images.movedim(1, -3)  # torchvision takes any axes before the channels
    return _drawn_changes(last, number, changes, draws).movedim(-3, 1).contiguous()


def randaugment_volumes(volumes: Tensor, number: int, magnitude: int, draws: Draws) -> Tensor:
    """Apply `number` of `OPERATIONS_OF_VOLUMES` to every volume, strengths and directions as `randaugment`'s.

    A volume is moved in the plane of its slices, by the same amount in all. Contrast is about the mean of each channel
    of the whole volume, where a picture's is about its grey.

    Args:
        volumes: `(batch, channels, depth, height, width)` in [0, 1].
        number: Operations on each.
        magnitude: 0 to 30.
        draws: The random numbers of the batch.
    """
    return _drawn_changes(volumes, number, volume_changes(magnitude, *volumes.shape[-2:]), draws)


def volume_changes(magnitude: int, height: int, width: int) -> list[tuple[Change, Change]]:
    """What each of `OPERATIONS_OF_VOLUMES` does at a magnitude, in either direction."""
    of_pictures = dict(zip(OPERATIONS, randaugment_changes(magnitude, height, width), strict=True))
    changes = []
    for name in OPERATIONS_OF_VOLUMES:
        one, other = of_pictures[name]
        part = _of_channels if name == "Contrast" else _of_slices
        changes.append((part(one), part(other)))
    return changes


def _drawn_changes(images: Tensor, number: int, changes: Sequence[tuple[Change, Change]], draws: Draws) -> Tensor:
    """Change every example `number` times, each time in one of the ways, in either direction."""
    directed = [change for both in changes for change in both]
    for turn in range(number):
        drawn = draws.uniform(f"randaugment {turn}", 2)
        kinds = 2 * (drawn[:, 0] * len(changes)).long() + (drawn[:, 1] < 0.5)
        images = change_by_kind(images, kinds, directed)
    return images


def _of_slices(change: Change) -> Change:
    """A change of grey pictures, for each slice of each channel `(..., height, width)`."""
    return lambda x: change(x.unsqueeze(-3)).squeeze(-3)


def _of_channels(change: Change) -> Change:
    """Likewise, for each channel with its slices below one another as one picture."""
    return lambda x: change(x.flatten(-3, -2).unsqueeze(-3)).squeeze(-3).view_as(x)


def randaugment_changes(magnitude: int, height: int, width: int) -> list[tuple[Change, Change]]:
    """What each of `OPERATIONS` does at a magnitude, in either direction (alike where it has none)."""
    level = magnitude / LARGEST_MAGNITUDE
    shear = math.degrees(math.atan(0.3 * level))
    turn, factor = 30.0 * level, 0.9 * level
    right, down = int(150 / 331 * width * level), int(150 / 331 * height * level)
    bits, bright = round(8 - 4 * level), 255 * (1 - level)

    def moved(angles: tuple[float, float], pixels: tuple[int, int], about: list[float] | None = None) -> Change:
        return lambda x: pictures.affine(x, 0.0, list(pixels), 1.0, list(angles), center=about)

    corner = [0.0, 0.0]
    changes: dict[str, Callable[[int], Change]] = {
        "Identity": lambda sign: lambda x: x,
        "ShearX": lambda sign: moved((sign * shear, 0.0), (0, 0), corner),
        "ShearY": lambda sign: moved((0.0, sign * shear), (0, 0), corner),
        "TranslateX": lambda sign: moved((0.0, 0.0), (sign * right, 0)),
        "TranslateY": lambda sign: moved((0.0, 0.0), (0, sign * down)),
        "Rotate": lambda sign: lambda x: pictures.rotate(x, sign * turn),
        "Brightness": lambda sign: lambda x: pictures.adjust_brightness(x, 1 + sign * factor),
        "Color": lambda sign: lambda x: pictures.adjust_saturation(x, 1 + sign * factor),
        "Contrast": lambda sign: lambda x: pictures.adjust_contrast(x, 1 + sign * factor),
        "Sharpness": lambda sign: lambda x: pictures.adjust_sharpness(x, 1 + sign * factor),
        "Posterize": lambda sign: lambda x: pictures.posterize(x, bits),
        "Solarize": lambda sign: lambda x: pictures.solarize(x, bright),
        "AutoContrast": lambda sign: pictures.autocontrast,
        "Equalize": lambda sign: pictures.equalize,
    }
    return [(changes[name](1), changes[name](-1)) for name in OPERATIONS]


def change_by_kind(images: Tensor, kinds: Tensor, changes: Sequence[Change]) -> Tensor:
    """Change every picture in the way that its kind names, those of one kind together."""
    changed = images.clone()
    for kind in kinds.unique().tolist():
        members = (kinds == kind).nonzero().flatten().to(images.device)
        changed[members] = changes[kind](images[members])
    return changed


def one_by_one(inputs: Tensor, change: Change, seeds: Sequence[int]) -> Tensor:
    """Change every example by what draws from torch's global generator, each with a seed of its own."""
    changed = []
    for example, seed in zip(inputs, seeds, strict=True):
        with seeded(seed):
            changed.append(change(example))
    return torch.stack(changed)


def erase(inputs: Tensor, probability: float, draws: Draws) -> Tensor:
    """Cover a box of 2 to 33 % of some inputs with noise, as torchvision's `RandomErasing` does.

    The box of a clip or a volume goes through all frames or slices (VideoMAE), with other noise in each.
    """
    if not probability:
        return inputs
    flat = inputs.flatten(1, -3)  # channels and frames are alike to it
    return one_by_one(flat, v2.RandomErasing(probability, value="random"), draws.seeds("erasing")).view_as(inputs)


def mix(inputs: Tensor, labels: Tensor, num_classes: int, config: AugmentConfig, draws: Draws) -> tuple[Tensor, Tensor]:
    """Mix every example with its neighbour in the batch by Mixup or CutMix.

    Returns:
        Inputs, and labels as probabilities `(batch, num_classes)` where either is on, mixed or not.
    """
    if not config.mixup and not config.cutmix:
        return inputs, labels
    batch = draws.of_batch
    whether, which = batch.uniform("mix", 2)[0].tolist()
    if whether >= config.mix_probability:
        return inputs, functional.one_hot(labels, num_classes).float()
    cut = config.cutmix > 0 and (not config.mixup or which < 0.5)
    mixer = v2.CutMix if cut else v2.MixUp
    # torchvision takes five axes for videos alone.
    wrapped = tv_tensors.Video(inputs) if inputs.ndim == 5 else inputs
    with seeded(batch.seeds("mix shares")[0]):
        mixed, shares = mixer(alpha=config.cutmix if cut else config.mixup, num_classes=num_classes)(wrapped, labels)
    return mixed.as_subclass(Tensor), shares
