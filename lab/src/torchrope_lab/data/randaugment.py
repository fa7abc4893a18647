"""RandAugment: the operations and strengths of torchvision and of LieRE's code, and timm's own transform.

In a batch every image has its own operations and strengths; images with the same operation are processed together.

References:
    Cubuk et al., RandAugment, arXiv:1909.13719.
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor
from torch.nn import functional
from torchvision.transforms.v2 import functional as image_ops

from torchrope_lab.data.data_config import LARGEST_MAGNITUDE, LIERE
from torchrope_lab.data.draws import Draws

TIMM_FILL = (124, 116, 104)  # ImageNet's mean, as in timm's `create_transform`
CUTOUT_FILL = (125, 123, 114)
COLOURS = ("Color", "Posterize", "Solarize", "AutoContrast", "Equalize")

Operation = Callable[[Tensor, Tensor], Tensor]
"""From images `(n, ..., channels, height, width)`, uint8 or in [0, 1], and strengths `(n, ...)`, to images."""
Strength = Callable[[Tensor, Tensor], Tensor]
"""From levels in [0, 1] `(n,)` and uniform numbers `(n, 3)`, of a direction and a point, to strengths `(n, ...)`."""


class Policy(NamedTuple):
    """Distribution of the operations of an image."""

    strengths: Mapping[str, Strength]  # names of operations and their strengths; all are equally likely
    number: int  # of operations of an image
    level: float  # as a fraction of the largest magnitude


def randaugment(inputs: Tensor, setting: tuple[int, int] | str, draws: Draws) -> Tensor:
    """Apply the random operations of a setting of `AugmentConfig` to every example of a batch."""
    # Inputs are images `(batch, 3, height, width)` or clips `(batch, 3, time, height, width)`, uint8, or volumes
    # `(batch, channels, depth, height, width)` in [0, 1]. The operations of a clip or volume are the same for all
    # frames or slices (VideoMAE, arXiv:2203.12602). For volumes there are none on colours, and contrast scales around
    # the mean of a channel over the volume.
    if isinstance(setting, str) and setting != LIERE:
        return one_by_one_with_timm(inputs, setting, draws)
    volumes = inputs.is_floating_point()
    policy = find_policy(setting, *inputs.shape[-2:])
    policy = of_volumes(policy) if volumes else policy
    changed = (inputs.unsqueeze(-3) if volumes else inputs.movedim(1, -3)).clone()
    for step in range(policy.number):
        apply_one(changed, policy, draws.uniform(f"randaugment {step}", 6))
    return changed.squeeze(-3) if volumes else changed.movedim(-3, 1).contiguous()


def apply_one(images: Tensor, policy: Policy, drawn: Tensor) -> None:
    """Apply one operation of a policy to every image `(n, ..., channels, height, width)`, in place."""
    # Numbers drawn, uniform `(n, 6)`, are of operation, direction, two that are not used, position.
    names = list(policy.strengths)
    levels = torch.full_like(drawn[:, 0], policy.level)
    kinds = (drawn[:, 0] * len(names)).long()
    operations = [OPERATIONS[name] for name in names]
    apply_by_kind(
        images,
        kinds,
        operations,
        lambda kind, members: policy.strengths[names[kind]](levels[members], drawn[members][:, [1, 4, 5]]),
    )


def apply_by_kind(
    images: Tensor, kinds: Tensor, operations: Sequence[Operation], strengths: Callable[[int, Tensor], Tensor]
) -> None:
    """Apply `operations[kinds[i]]` to image i, in place, with one call for all images of a kind."""
    # `strengths` maps a kind and the indices of its images to their strengths.
    for kind in kinds.unique().tolist():
        members = (kinds == kind).nonzero().flatten()
        images[members] = operations[kind](images[members], strengths(kind, members).float())


def find_policy(setting: tuple[int, int] | str, height: int, width: int) -> Policy:
    """Return torchvision's or LieRE's policy for images of a size."""
    if isinstance(setting, str):
        return Policy(LIERE_STRENGTHS, 2, 14 / LARGEST_MAGNITUDE)
    sides = zip(SHIFTS, (width, height), strict=True)
    shifts = {name: scaled(-150 / 331 * side, signed=True, whole=True) for name, side in sides}
    return Policy(TORCHVISION_STRENGTHS | shifts, setting[0], setting[1] / LARGEST_MAGNITUDE)


def of_volumes(policy: Policy) -> Policy:
    """Return torchvision's policy without colours, for volumes, where equal values must stay equal in all slices."""
    kept = {name: strength for name, strength in policy.strengths.items() if name not in COLOURS}
    names = {"Contrast": "ContrastOfVolume"}
    return policy._replace(strengths={names.get(name, name): strength for name, strength in kept.items()})


# Strengths


def scaled(scale: float, base: float = 0.0, *, signed: bool = False, whole: bool = False) -> Strength:
    """Return base + scale · level; with `signed` in a random direction, with `whole` scale · level truncated."""

    def strength(levels: Tensor, drawn: Tensor) -> Tensor:
        size = (scale * levels).trunc() if whole else scale * levels
        return base + torch.where((drawn[:, 0] < 0.5) & signed, -size, size)

    return strength


NONE = scaled(0)  # of operations without strength
BLENDS = ("Brightness", "Color", "Contrast", "Sharpness")
SHEARS, SHIFTS = ("ShearX", "ShearY"), ("TranslateX", "TranslateY")

# In torchvision's order; shifts are fractions of the side.
TORCHVISION_STRENGTHS: dict[str, Strength] = {
    "Identity": NONE,
    **dict.fromkeys(SHEARS, scaled(0.3, signed=True)),
    **dict.fromkeys(SHIFTS, NONE),
    "Rotate": scaled(30, signed=True),
    **dict.fromkeys(BLENDS, scaled(0.9, 1, signed=True)),
    "Posterize": lambda levels, _: (8 - 4 * levels).round(),
    "Solarize": scaled(-255, 255),
    "AutoContrast": NONE,
    "Equalize": NONE,
}
# dataset/randomaug.py of StanfordMIMI/LieRE; shifts and cutouts are in pixels, whatever the size of the image.
LIERE_STRENGTHS: dict[str, Strength] = {
    **dict.fromkeys(("AutoContrast", "Equalize", "Invert"), NONE),
    "Rotate": scaled(30, signed=True),
    "Posterize": lambda levels, _: (4 * levels).trunc().clamp(min=1),
    "Solarize": scaled(256),
    "AddAndSolarize": scaled(110),
    **dict.fromkeys(BLENDS, scaled(1.8, 0.1)),
    **dict.fromkeys(SHEARS, scaled(0.3, signed=True)),
    "Cutout": lambda levels, drawn: torch.stack([40 * levels, *drawn[:, 1:].unbind(1)], dim=1),
    **dict.fromkeys(SHIFTS, scaled(100, signed=True)),
}


# Operations


def warp(images: Tensor, strengths: Tensor, inverse: Callable[..., tuple[Any, ...]]) -> Tensor:
    """Resample images `(n, ..., channels, height, width)` by an affine map, to the nearest pixel; outside is black."""
    # `inverse` maps strengths, height and width to the six numbers of the map from pixels of the result to pixels of
    # the images, relative to the centre.
    height, width = images.shape[-2:]
    a, b, c, d, e, f = (
        torch.broadcast_to(torch.as_tensor(x), strengths.shape) for x in inverse(strengths, height, width)
    )
    normalised = [a, b * height / width, c * 2 / width, d * width / height, e, f * 2 / height]
    theta = torch.stack(normalised, dim=1).view(-1, 2, 3)
    grid = functional.affine_grid(theta, [len(images), 1, height, width], align_corners=False)
    frames = images.float().flatten(1, -3)  # as channels
    shown = functional.grid_sample(frames, grid, "nearest", "zeros", align_corners=False).view(images.shape)
    return in_range(shown if images.is_floating_point() else shown.round_(), images)


INVERSES: Mapping[str, Callable[..., tuple[Any, ...]]] = {
    # Shears keep the upper left corner.
    "ShearX": lambda s, height, width: (1.0, s, s * height / 2, 0.0, 1.0, 0.0),
    "ShearY": lambda s, height, width: (1.0, 0.0, 0.0, s, 1.0, s * width / 2),
    "TranslateX": lambda s, height, width: (1.0, 0.0, s, 0.0, 1.0, 0.0),
    "TranslateY": lambda s, height, width: (1.0, 0.0, 0.0, 0.0, 1.0, s),
    "Rotate": lambda s, height, width: (
        s.deg2rad().cos(),
        -s.deg2rad().sin(),
        0.0,
        s.deg2rad().sin(),
        s.deg2rad().cos(),
        0.0,
    ),
}


def in_range(values: Tensor, images: Tensor) -> Tensor:
    """Clamp values to the range of images, and truncate them to their type."""
    return values.clamp_(0, 1 if images.is_floating_point() else 255).to(images.dtype)


def blend(images: Tensor, factors: Tensor, reference: Callable[[Tensor], Tensor]) -> Tensor:
    """Interpolate from `reference(images)` at factor 0 to the images at factor 1, and beyond."""
    shown = images.float()
    return in_range((reference(images) - shown).mul_(1 - per_image(factors, images)).add_(shown), images)


def per_image(strengths: Tensor, images: Tensor) -> Tensor:
    """View strengths `(n,)` for products with images."""
    return strengths.view(-1, *[1] * (images.ndim - 1))


def mean_grey(images: Tensor, axes: tuple[int, ...] = (-3, -2, -1)) -> Tensor:
    """Compute the mean of greyscale images."""
    return image_ops.rgb_to_grayscale(images).float().mean(axes, keepdim=True)


def solarize(images: Tensor, thresholds: Tensor) -> Tensor:
    """Invert the values from a threshold on."""
    return torch.where(images < per_image(thresholds, images), images, ~images)


def posterize(images: Tensor, bits: Tensor) -> Tensor:
    """Keep the upper bits of every value."""
    return images & -(2 ** (8 - per_image(bits, images).int())).to(torch.uint8)


def add_and_solarize(images: Tensor, added: Tensor) -> Tensor:
    """Brighten all values, then invert those from 128 on."""
    brighter = in_range(images + per_image(added, images), images)
    return torch.where(brighter < 128, brighter, ~brighter)


def cutout(images: Tensor, boxes: Tensor) -> Tensor:
    """Fill a square around a random point; boxes are `(n, 3)`, the side in pixels, and x and y in [0, 1]."""
    height, width = images.shape[-2:]
    side = per_image(boxes[:, 0], images)
    inside = torch.ones(1, dtype=torch.bool)
    for at, length, shape in ((boxes[:, 1], width, (1, -1)), (boxes[:, 2], height, (-1, 1))):
        first = (per_image(at, images) * length - side / 2).clamp(min=0).trunc()
        pixels = torch.arange(length).view(shape)
        inside = inside & (pixels >= first) & (pixels <= first + side)
    return torch.where(inside, torch.tensor(CUTOUT_FILL, dtype=torch.uint8).view(-1, 1, 1), images)


OPERATIONS: Mapping[str, Operation] = {
    "Identity": lambda images, _: images,
    "AutoContrast": lambda images, _: image_ops.autocontrast(images),
    "Equalize": lambda images, _: image_ops.equalize(images),
    "Invert": lambda images, _: ~images,
    "Brightness": partial(blend, reference=torch.zeros_like),
    "Color": partial(blend, reference=image_ops.rgb_to_grayscale),
    "Contrast": partial(blend, reference=mean_grey),
    "ContrastOfVolume": partial(blend, reference=partial(mean_grey, axes=(-4, -3, -2, -1))),
    "Sharpness": partial(blend, reference=partial(image_ops.adjust_sharpness, sharpness_factor=0.0)),
    "Posterize": posterize,
    "Solarize": solarize,
    "AddAndSolarize": add_and_solarize,
    "Cutout": cutout,
    **{name: partial(warp, inverse=inverse) for name, inverse in INVERSES.items()},
}


# timm's own transforms


def one_by_one_with_timm(inputs: Tensor, name: str, draws: Draws) -> Tensor:
    """Apply timm's transform of a name such as "timm:rand-m9-mstd0.5-inc1"; frames of a clip are changed alike."""
    frames = inputs.movedim(1, -3)
    changed = torch.empty_like(frames)
    transform = timm_transform(name.removeprefix("timm:"))
    for example, result, seed in zip(frames.split(1), changed.split(1), draws.seeds("timm"), strict=True):
        for frame, into in zip(example.flatten(0, -4), result.flatten(0, -4), strict=True):
            with seeded_python(seed):
                into.copy_(image_ops.pil_to_tensor(transform(image_ops.to_pil_image(frame))))
    return changed.movedim(-3, 1).contiguous()


@cache
def timm_transform(name: str) -> Callable[[Image.Image], Image.Image]:
    """Build timm's transform with the arguments of its `create_transform` for bicubic interpolation."""
    from timm.data import auto_augment  # takes a second to import

    options = {"img_mean": TIMM_FILL, "interpolation": Image.Resampling.BICUBIC}
    transform = auto_augment.rand_augment_transform(name, options)
    for operation in transform.ops:
        if operation.aug_fn is auto_augment.posterize:
            operation.aug_fn = posterize_image
    return transform


def posterize_image(image: Image.Image, bits: int, **_: Any) -> Image.Image:
    """Posterize as timm does; newer versions of Pillow raise an error for 0 bits, which older ones make black."""
    return ImageOps.posterize(image, bits) if bits else image.point(lambda _: 0)


@contextmanager
def seeded_python(seed: int) -> Iterator[None]:
    """Seed Python's and NumPy's global generators inside the `with` block, and restore their states afterwards."""
    states = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
