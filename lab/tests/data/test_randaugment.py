"""RandAugment of torchvision, timm and LieRE's code: operations, strengths and distributions beside the authors'."""

import random

import numpy as np
import pytest
import torch
from data_sets import draws, pictures_of, refused
from miniatures import noise
from PIL import Image, ImageDraw, ImageEnhance, ImageOps
from sklearn.datasets import load_sample_images
from timm.data.auto_augment import rand_augment_transform
from torch import Tensor
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as image_ops

from torchrope_lab.data.augment import transform
from torchrope_lab.data.data_config import AugmentConfig
from torchrope_lab.data.randaugment import (
    LIERE_STRENGTHS,
    OPERATIONS,
    TORCHVISION_STRENGTHS,
    find_policy,
    of_volumes,
    randaugment,
    timm_transform,
)

TIMM = "timm:rand-m9-mstd0.5-inc1"
VOLUME_OPERATIONS = [*of_volumes(find_policy((2, 9), 8, 8)).strengths]


def clips_of(count: int, frames: int = 3, side: int = 24) -> Tensor:
    """Bytes `(count, 3, frames, side, side)`."""
    return torch.from_numpy(noise(count * frames, side)).unflatten(0, (count, frames)).movedim(1, 2).contiguous()


def photographs(count: int, side: int = 32) -> list[Image.Image]:
    """Parts of scikit-learn's two photographs, with values from 0 to 255 in every channel, as photographs have."""
    whole, generator = [Image.fromarray(image) for image in load_sample_images().images], np.random.default_rng(0)
    corners = [(generator.integers(0, 440), generator.integers(0, 227)) for _ in range(64)]
    parts = [whole[n % 2].crop((x, y, x + 200, y + 200)).resize((side, side)) for n, (x, y) in enumerate(corners)]
    return [ImageOps.autocontrast(parts[number % 64]) for number in range(count)]


def as_tensors(images: list[Image.Image]) -> Tensor:
    return torch.stack([image_ops.pil_to_tensor(image) for image in images])


def apply(name: str, images: Tensor, magnitude: int, sign: int) -> Tensor:
    """Apply one of torchvision's operations in one direction."""
    policy = find_policy((1, magnitude), *images.shape[-2:])
    policy = of_volumes(policy) if images.is_floating_point() else policy
    levels = torch.full((len(images),), policy.level, dtype=torch.float64)
    strengths = policy.strengths[name](levels, torch.full((len(images), 3), 0.5 + 0.25 * sign, dtype=torch.float64))
    return OPERATIONS[name](images, strengths.float())


# torchvision's


@pytest.mark.parametrize("operation", TORCHVISION_STRENGTHS)
@pytest.mark.parametrize("magnitude", [0, 9, 14, 30])
def test_randaugment_operations_match_torchvision(operation: str, magnitude: int) -> None:
    space = {operation: v2.RandAugment._AUGMENTATION_SPACE[operation]}
    One = type("One", (v2.RandAugment,), {"_AUGMENTATION_SPACE": space})
    images = pictures_of(3, 24)
    ours = [apply(operation, images, magnitude, sign).int() for sign in (1, -1)]
    theirs = []
    for seed in range(8):  # torchvision draws one direction per batch
        torch.manual_seed(seed)
        theirs.append(One(1, magnitude)(images).int())

    # Strengths are float32, so that a product may round to another integer, and a centre to another pixel.
    def close_to_any(one: Tensor, others: list[Tensor]) -> bool:
        differences = [(one - other).abs() for other in others]
        return any(bool((d > 1).float().mean() < 0.003) and (d > 0).float().mean() < 0.05 for d in differences)

    assert all(close_to_any(one, theirs) for one in ours)
    assert all(close_to_any(one, ours) for one in theirs)


def test_randaugment_draws_operations_and_directions_uniformly_per_image() -> None:
    images = (pictures_of(1, 24) // 2 + 60).expand(2800, -1, -1, -1).contiguous()
    changed = randaugment(images, (1, 20), draws(2800))
    _, counts = changed.flatten(1).unique(dim=0, return_counts=True)
    counts = counts.sort().values
    assert len(counts) == 14 + 9  # nine have two directions
    assert (counts[:18] - 100).abs().max() < 45
    assert (counts[18:] - 200).abs().max() < 65
    twice = randaugment(images, (2, 20), draws(2800))
    assert len(twice.flatten(1).unique(dim=0)) > 300, "both operations are the same"


@pytest.mark.parametrize("setting", [(2, 14), "liere", TIMM])
def test_randaugment_is_equal_for_all_frames_of_a_clip(setting: tuple[int, int] | str) -> None:
    clips = clips_of(60)
    changed = randaugment(clips, setting, draws(60))
    assert changed.shape == clips.shape
    assert (changed != clips).flatten(1).any(1).sum() > 30
    for frame in range(clips.shape[2]):
        assert torch.equal(changed[:, :, frame], randaugment(clips[:, :, frame], setting, draws(60)))


@pytest.mark.parametrize("operation", VOLUME_OPERATIONS)
@pytest.mark.parametrize("magnitude", [0, 14, 30])
def test_volume_operations_match_torchvision_per_slice(operation: str, magnitude: int) -> None:
    volumes = clips_of(2).float() / 255  # [2, 3, slices, height, width], the channels are windows
    one, other = (apply(operation, volumes.unsqueeze(-3), magnitude, sign).squeeze(-3) for sign in (1, -1))
    name = "Contrast" if operation == "ContrastOfVolume" else operation
    space = {name: v2.RandAugment._AUGMENTATION_SPACE[name]}
    theirs = type("One", (v2.RandAugment,), {"_AUGMENTATION_SPACE": space})(1, magnitude)
    expected = []
    for seed in range(8):  # torchvision draws one direction per batch
        torch.manual_seed(seed)
        planes = volumes.reshape(6, 1, -1, 24) if name == "Contrast" else volumes.reshape(-1, 1, 24, 24)
        expected.append(theirs(planes).view_as(volumes))
    for ours in (one, other):
        assert any(((ours - their).abs() > 1e-5).float().mean() < 0.003 for their in expected)
        assert 0 <= ours.min() <= ours.max() <= 1
    assert magnitude == 0 or operation == "Identity" or not torch.allclose(one, other, atol=1e-3)


def test_randaugment_of_volumes_draws_every_operation() -> None:
    volumes = torch.rand(1, 2, 2, 8, 8).expand(200, -1, -1, -1, -1).contiguous()
    changed = randaugment(volumes, (1, 20), draws(200))
    assert len({volume.numpy().tobytes() for volume in changed}) == 2 * len(VOLUME_OPERATIONS) - 1


# LieRE's


def cut(image: Image.Image, side: float, x: float, y: float) -> Image.Image:
    left, top = (int(max(0, at * length - side / 2)) for at, length in zip((x, y), image.size, strict=True))
    ends = (min(image.width, left + side), min(image.height, top + side))
    changed = image.copy()
    ImageDraw.Draw(changed).rectangle((left, top, *ends), (125, 123, 114))
    return changed


def add(image: Image.Image, number: float) -> Image.Image:
    return Image.fromarray(np.clip(np.asarray(image) + number, 0, 255).astype(np.uint8))


def moved(image: Image.Image, a: float, b: float, c: float, d: float, e: float, f: float) -> Image.Image:
    return image.transform(image.size, Image.Transform.AFFINE, (a, b, c, d, e, f))


LARGEST = 14 / 30
BY_PILLOW = {
    # The operations of the authors' code with its largest strengths at magnitude 30; s is a random direction.
    "AutoContrast": lambda image, s, x, y: ImageOps.autocontrast(image),
    "Equalize": lambda image, s, x, y: ImageOps.equalize(image),
    "Invert": lambda image, s, x, y: ImageOps.invert(image),
    "Rotate": lambda image, s, x, y: image.rotate(s * 30 * LARGEST),
    "Posterize": lambda image, s, x, y: ImageOps.posterize(image, max(1, int(4 * LARGEST))),
    "Solarize": lambda image, s, x, y: ImageOps.solarize(image, 256 * LARGEST),
    "AddAndSolarize": lambda image, s, x, y: ImageOps.solarize(add(image, 110 * LARGEST), 128),
    "Color": lambda image, s, x, y: ImageEnhance.Color(image).enhance(0.1 + 1.8 * LARGEST),
    "Contrast": lambda image, s, x, y: ImageEnhance.Contrast(image).enhance(0.1 + 1.8 * LARGEST),
    "Brightness": lambda image, s, x, y: ImageEnhance.Brightness(image).enhance(0.1 + 1.8 * LARGEST),
    "Sharpness": lambda image, s, x, y: ImageEnhance.Sharpness(image).enhance(0.1 + 1.8 * LARGEST),
    "ShearX": lambda image, s, x, y: moved(image, 1, s * 0.3 * LARGEST, 0, 0, 1, 0),
    "ShearY": lambda image, s, x, y: moved(image, 1, 0, 0, s * 0.3 * LARGEST, 1, 0),
    "Cutout": lambda image, s, x, y: cut(image, 40 * LARGEST, x, y),
    "TranslateX": lambda image, s, x, y: moved(image, 1, 0, s * 100 * LARGEST, 0, 1, 0),
    "TranslateY": lambda image, s, x, y: moved(image, 1, 0, 0, 0, 1, s * 100 * LARGEST),
}


@pytest.mark.parametrize("operation", LIERE_STRENGTHS)
@pytest.mark.parametrize("side", [32, 80])
def test_lieres_operations_match_their_formulas(operation: str, side: int) -> None:
    images = photographs(12, side)
    drawn = torch.from_numpy(np.random.default_rng(0).random((12, 3)))
    policy = find_policy("liere", side, side)
    strengths = policy.strengths[operation](torch.full((12,), policy.level, dtype=torch.float64), drawn)
    ours = OPERATIONS[operation](as_tensors(images), strengths.float())
    signs = [-1 if number < 0.5 else 1 for number in drawn[:, 0]]
    points = drawn[:, 1:].tolist()
    change = BY_PILLOW[operation]
    theirs = [change(image, sign, *point) for image, sign, point in zip(images, signs, points, strict=True)]
    difference = (ours.int() - as_tensors(theirs).int()).abs()
    assert (difference > 1).float().mean() < 0.001  # a pixel's centre may round to the next pixel
    assert (difference > 0).float().mean() < 0.1


def is_blank(images: Tensor) -> Tensor:
    """Whether every channel is constant."""
    return (images.flatten(2).amax(2) == images.flatten(2).amin(2)).all(1)


@pytest.mark.slow
def test_lieres_randaugment_leaves_22_percent_of_small_images_blank() -> None:
    count = 4000  # the standard error of a share of 0.22 is 0.0065
    images = photographs(count)
    ours = is_blank(randaugment(as_tensors(images), "liere", draws(count))).float().mean()
    generator = random.Random(0)
    operations = list(BY_PILLOW.values())
    changed = []
    for image in images:
        for change in generator.choices(operations, k=2):
            image = change(image, generator.choice((-1, 1)), generator.random(), generator.random())
        changed.append(image)
    theirs = is_blank(as_tensors(changed)).float().mean()
    assert abs(ours - 0.22) < 0.02
    assert abs(theirs - 0.22) < 0.02
    assert abs(ours - theirs) < 0.03
    assert not is_blank(randaugment(as_tensors(images[:500]), (2, 14), draws(500))).any(), "torchvision's leaves none"


def test_lieres_randaugment_is_before_the_crop() -> None:
    images = pictures_of(200).clamp(min=1)
    config = AugmentConfig(crop_padding=4, randaugment="liere")
    expected = transform(randaugment(images, "liere", draws(200)), AugmentConfig(crop_padding=4), draws(200))
    assert torch.equal(transform(images, config, draws(200)), expected)


# timm's


def quantiles(images: Tensor) -> Tensor:
    """Quantiles of the means and of the standard deviations of images."""
    values = images.flatten(1).float()
    at = torch.tensor([0.1, 0.25, 0.5, 0.75, 0.9])
    return torch.cat([values.mean(1).quantile(at), values.std(1).quantile(at)])


@pytest.mark.slow
def test_timms_policy_has_timms_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    count = 3000  # standard errors: 0.013 operations, 0.008 of the share unchanged
    images = photographs(count)
    inputs = as_tensors(images)
    calls = []
    for operation in timm_transform(TIMM.removeprefix("timm:")).ops:
        change = operation.aug_fn
        monkeypatch.setattr(
            operation, "aug_fn", lambda *args, change=change, **rest: (calls.append(1), change(*args, **rest))[1]
        )
    ours = randaugment(inputs, TIMM, draws(count))
    assert abs(len(calls) / count - 1) < 0.05
    theirs = rand_augment_transform(
        "rand-m9-mstd0.5-inc1", {"img_mean": (124, 116, 104), "interpolation": Image.Resampling.BICUBIC}
    )
    random.seed(1)
    np.random.seed(1)
    direct = []
    for image in images:
        try:
            direct.append(theirs(image))
        except ValueError:  # newer Pillow does not posterize to 0 bits
            direct.append(Image.new("RGB", image.size))
    for changed in (ours, as_tensors(direct)):
        unchanged = (changed == inputs).flatten(1).all(1).float().mean()
        assert abs(unchanged - (8 / 15) ** 2) < 0.03, "the first of 15 operations changes none of these images"
        assert (quantiles(changed) - quantiles(ours)).abs().max() < 8


def test_timms_posterize_to_no_bits_is_black() -> None:
    images = photographs(400, 16)
    changed = randaugment(as_tensors(images), "timm:rand-m10-n1-p1-inc1", draws(400))
    black = (changed == 0).flatten(1).all(1).float().mean()
    assert abs(black - 1 / 15) < 0.04


def test_timms_policy_leaves_global_generators_unchanged() -> None:
    def numbers() -> tuple[float, float, float]:
        return random.random(), np.random.random(), torch.rand(()).item()

    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    expected = numbers()
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
    randaugment(pictures_of(3), TIMM, draws(3))
    assert numbers() == expected


# Settings


@pytest.mark.parametrize(
    "name",
    [
        "rand-m9",
        "timm:",
        "timm:rand-m9",
        "timm:rand-m9-x3-inc1",
        "timm:rand-mstd-inc1",
        "lieRE",
        "",
        "timm:rand-m9-inc1\n",
    ],
)
def test_unknown_policies_are_rejected(name: str) -> None:
    rule = "--data.augment.randaugment must be "
    with refused(rf"^{rule}.*liere or timm:rand-\.\.\. as in timm:rand-m9-mstd0\.5-inc1, got"):
        AugmentConfig(randaugment=name)
