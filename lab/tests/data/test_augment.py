"""Tests of random augmentation: reproducibility per example, and the effect of each operation."""

import pickle

import numpy as np
import pytest
import torch
from data_sets import draws, pictures_of
from miniatures import MINIATURES, OPTIONS
from PIL import ImageFilter
from torch.nn import functional
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as image_ops

from torchrope_lab.data import augment
from torchrope_lab.data.augment import EpochSet
from torchrope_lab.data.build import make_data
from torchrope_lab.data.data_config import AugmentConfig, data_config
from torchrope_lab.data.draws import Draws, seeded
from torchrope_lab.data.sets import DATA_NAMES
from torchrope_lab.data.tensors import TensorSet, image_sets
from torchrope_lab.settings.run_config import OptimConfig
from torchrope_lab.training.classifier import Classifier

pytestmark = pytest.mark.usefixtures("published_miniatures")

EVERYTHING = dict(
    crop_padding=4,
    flip=True,
    randaugment=(2, 9),
    three_augment=True,
    color_jitter=0.3,
    erasing=0.5,
    mixup=0.8,
    cutmix=1.0,
)
OF_CLIPS = dict(flip=True, randaugment=(2, 9), erasing=0.5, mixup=0.8, cutmix=1.0)  # and of volumes


def small_set(count: int = 24) -> TensorSet:
    pixels, labels = pictures_of(count), torch.arange(count) % 3
    return image_sets(pixels, labels, pixels[:3], labels[:3])[0]


# Random numbers per example


def test_draws_are_uniform_and_independent():
    drawn = draws(20_000).uniform("a", 3)
    assert 0 <= drawn.min() < 1e-3 < 0.999 < drawn.max() < 1
    assert (drawn.mean(0) - 0.5).abs().max() < 0.01
    counts = torch.histc(drawn[:, 0], 20, 0, 1)
    assert ((counts - 1000) ** 2 / 1000).sum() < 50, "chi-square of 19 degrees"
    others = [draws(20_000).uniform("b")[:, 0], draws(20_000, 1).uniform("a")[:, 0], drawn[:, 1], drawn[:, 0].roll(1)]
    for other in others:
        assert torch.corrcoef(torch.stack([drawn[:, 0], other]))[0, 1].abs() < 0.03


def test_draws_of_an_example_do_not_depend_on_the_batch():
    assert torch.equal(Draws(5, [7, 2, 9]).uniform("x", 4)[1], Draws(5, [2]).uniform("x", 4)[0])
    assert Draws(5, [7, 2]).seeds("x")[1] == Draws(5, [2]).seeds("x")[0]
    assert Draws(2**64 + 3, [1]).seeds("x") == Draws(3, [1]).seeds("x")
    assert len({Draws(3 + 2**bit, [1]).seeds("x")[0] for bit in range(64)}) == 64, "each bit of a seed counts"


def test_seeded_restores_the_global_generator():
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    with seeded(8):
        first = torch.rand(1)
    with seeded(8):
        assert torch.equal(torch.rand(1), first)
    assert torch.equal(torch.rand(2), expected)


# One epoch


@pytest.mark.parametrize(
    ("settings", "changed"),
    [
        pytest.param({**EVERYTHING, "mixup": 0.0, "cutmix": 0.0}, 24, id="everything"),
        pytest.param({"randaugment": "liere"}, 12, id="liere"),
        pytest.param({"randaugment": "timm:rand-m9-mstd0.5-inc1"}, 12, id="timm"),
    ],
)
def test_epoch_set_depends_on_seed_and_index_only(settings, changed):
    every, other = (EpochSet(small_set(), AugmentConfig(**settings), 3, seed=seed) for seed in (4, 5))
    whole, _ = every.__getitems__(range(24))
    again, labels = EpochSet(small_set(), every.config, 3, seed=4).__getitems__([5, 20, 3])
    assert torch.equal(whole[[5, 20, 3]], again)
    assert labels.tolist() == [2, 2, 0]
    assert torch.equal(every[5][0], whole[5])
    assert (whole != other.__getitems__(range(24))[0]).flatten(1).any(1).sum() >= changed


def test_index_past_the_end_repeats_with_other_augmentation():
    data = small_set(24)
    assert not AugmentConfig().enabled
    plain, labels = EpochSet(data, AugmentConfig(), 3, seed=4).__getitems__([29, 24, 71])
    assert torch.equal(plain, data.__getitems__([5, 0, 23])[0])
    assert labels.tolist() == [2, 0, 2]
    cropped, _ = EpochSet(data, AugmentConfig(crop_padding=4), 3, seed=4).__getitems__([5, 29, 53, 77])
    assert len({image.numpy().tobytes() for image in cropped}) == 4


def test_erased_boxes_are_standard_normal_after_normalisation():
    data = small_set(24)
    erased, _ = EpochSet(data, AugmentConfig(erasing=1.0), 3, seed=4).__getitems__(range(24))
    noise = erased[erased != data.__getitems__(range(24))[0]]
    assert len(noise) > 5000
    assert abs(noise.mean()) < 0.05
    assert abs(noise.std() - 1) < 0.05


@pytest.mark.parametrize("setting", sorted(EVERYTHING))
def test_settings_change_the_inputs(setting):
    data, config = small_set(), AugmentConfig(**{setting: EVERYTHING[setting]})
    inputs, labels = EpochSet(data, config, 3, seed=4).__getitems__(range(24))
    assert config.enabled
    assert not torch.equal(inputs, data.__getitems__(range(24))[0])
    assert labels.shape == ((24, 3) if setting in ("mixup", "cutmix") else (24,))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cifar10", "images", "videos", "volumes"])
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*does not have many workers.*")
def test_batches_do_not_depend_on_workers_or_global_generator(tmp_path, name):
    root = str(MINIATURES[name](tmp_path))

    def epoch(workers: int, chance: int) -> list:
        options = {"root": root, "size": 32, "train_size": 20, "batch_size": 8, "workers": workers}
        settings = OF_CLIPS if name in OPTIONS else EVERYTHING
        data = make_data(data_config(name, augment=AugmentConfig(**settings), **{**options, **OPTIONS.get(name, {})}))
        data.run_seed = 3
        torch.manual_seed(chance)
        return list(data.train_dataloader())

    first, again = epoch(0, 1), epoch(2, 2)
    assert all(
        torch.equal(a, b) for one, other in zip(first, again, strict=True) for a, b in zip(one, other, strict=True)
    )


# Each change


def test_padded_crop_shifts_and_fills_with_black():
    images = pictures_of(200, 8) | 1
    cropped = augment.crop_padded(images, 2, draws(200))
    seen = set()
    for image, crop in zip(images, cropped, strict=True):
        padded = functional.pad(image, (2,) * 4)
        places = [(y, x) for y in range(5) for x in range(5) if torch.equal(padded[:, y : y + 8, x : x + 8], crop)]
        assert len(places) == 1
        seen.add(places[0])
    assert len(seen) == 25


@pytest.mark.parametrize("shape", [(400, 3, 4, 4), (400, 1, 2, 4, 4)])
def test_flip_reverses_last_axis_of_half_the_examples(shape):
    inputs = torch.randn(shape)
    flipped = augment.flip(inputs, draws(400))
    changed = (flipped != inputs).flatten(1).any(1)
    assert 150 < changed.sum() < 250
    assert torch.equal(flipped[changed], inputs[changed].flip(-1))


def coordinates(side: int = 32) -> torch.Tensor:
    """An image of its own coordinates, `(2, side, side)`: rows in the first channel, columns in the second."""
    line = torch.arange(side, dtype=torch.float32)
    return torch.stack([line[:, None].expand(side, side), line.expand(side, side)])


@pytest.mark.parametrize("share", [0.3, 0.8])
def test_random_crop_keeps_size_and_covers_its_share_of_area(share):
    shown = augment.transform(
        coordinates().expand(300, -1, -1, -1), AugmentConfig(crop_scale=(share, share)), draws(300)
    )
    assert shown.shape == (300, 2, 32, 32)
    steps = shown.diff(dim=-2)[:, 0, 8:-8].mean((1, 2)) * shown.diff(dim=-1)[:, 1, :, 8:-8].mean((1, 2))
    assert (steps - share).abs().max() < 0.08  # crops have integer sizes, and edge pixels are narrower
    corners = shown[:, :, 0, 0]
    assert (corners.min(0).values < 1).all()
    assert len(corners.unique(dim=0)) > 20


def test_crop_is_equal_for_all_frames_of_a_clip():
    clips = coordinates().unsqueeze(1).expand(8, -1, 3, -1, -1)
    for settings in ({"crop_scale": (0.2, 0.5)}, {"resize_crop": 1.5}):
        shown = augment.transform(clips, AugmentConfig(**settings), draws(8))
        assert shown.shape == clips.shape
        assert torch.equal(shown, shown[:, :, :1].expand_as(shown))
        assert len({clip.numpy().tobytes() for clip in shown}) == 8


@pytest.mark.parametrize("name", DATA_NAMES)
def test_settings_of_a_data_set_are_some_of_all_and_survive_pickling(name: str) -> None:
    config = data_config(name, augment={"repeats": 3})
    assert vars(config.augment).items() <= vars(AugmentConfig(repeats=3)).items()
    stored = pickle.loads(pickle.dumps(config))
    assert stored == config
    assert type(stored.augment) is type(config).augmentation()


def test_three_augment_applies_grey_solarise_or_blur():
    images = pictures_of(120, 16)
    changed = augment.transform(images, AugmentConfig(three_augment=True), draws(120))
    grey = (changed[:, :1] == changed).flatten(1).all(1)
    solarised = torch.tensor([torch.equal(a, image_ops.solarize(b, 128)) for a, b in zip(changed, images, strict=True)])
    blurred = ~grey & ~solarised
    assert min(grey.sum(), solarised.sum(), blurred.sum()) > 20
    assert torch.equal(changed[grey], image_ops.rgb_to_grayscale(images[grey], 3))
    for before, after in zip(images[blurred], changed[blurred], strict=True):
        blurs = [image_ops.gaussian_blur(before, [13, 13], [sigma]).int() for sigma in torch.arange(0.1, 2.05, 0.05)]
        assert min((after - blur).abs().max() for blur in blurs) < 20


@pytest.mark.parametrize("sigma", [0.1, 0.25, 0.5, 1.0, 2.0])
def test_three_augment_blur_is_pillows_with_its_deviation(sigma):
    image = pictures_of(1, 24)[0]
    blurred = augment.blur(image.unsqueeze(0), torch.tensor([sigma]))[0]
    theirs = image_ops.to_pil_image(image).filter(ImageFilter.GaussianBlur(sigma))  # DeiT-III's
    difference = blurred.int() - image_ops.pil_to_tensor(theirs).int()
    assert difference[:, 6:-6, 6:-6].abs().max() <= 3, "Pillow rounds after every box"
    line = torch.zeros(1, 1, 1, 31)
    line[..., 15] = 1e6
    spread = augment.blur(line, torch.tensor([sigma])).flatten()
    variance = (spread * (torch.arange(31) - 15).square()).sum() / spread.sum()
    assert variance.sqrt().item() == pytest.approx(sigma, abs=1e-3)


def test_color_jitter_is_in_range_and_differs_by_example():
    images = pictures_of(1, 8).expand(64, -1, -1, -1).contiguous()
    changed = augment.transform(images, AugmentConfig(color_jitter=0.3), draws(64))
    assert len({image.numpy().tobytes() for image in changed}) > 60
    ratio = changed.float().mean((1, 2, 3)) / images.float().mean((1, 2, 3))
    assert 0.69 < ratio.min() < 0.8
    assert 1.2 < ratio.max() < 1.31
    against = images.float() - images.float().mean(1, keepdim=True)
    saturation = (changed.float() - changed.float().mean(1, keepdim=True)).std((1, 2, 3)) / against.std((1, 2, 3))
    assert saturation.min() < 0.75 < 1.25 < saturation.max()


def test_erase_covers_a_box_with_its_probability():
    inputs = torch.zeros(200, 3, 16, 16)
    erased = augment.erase(inputs.clone(), 0.25, draws(200))
    covered = (erased != 0).all(1)  # [b, h, w]
    changed = covered.flatten(1).any(1)
    assert 30 < changed.sum() < 70
    for mask in covered[changed]:
        rows, columns = mask.any(1).sum(), mask.any(0).sum()
        assert mask.sum() == rows * columns, "not a box"
        assert 0.01 < mask.float().mean() < 0.4


def test_erased_areas_are_those_of_torchvision():
    count = 2000
    ours = (augment.erase(torch.zeros(count, 1, 24, 32), 1.0, draws(count)) != 0).flatten(1).float().mean(1)
    theirs = torch.stack([v2.RandomErasing(1.0, value="random")(torch.zeros(1, 24, 32)) for _ in range(count)])
    levels = torch.linspace(0.1, 0.9, 9)
    torch.testing.assert_close(
        ours.quantile(levels), (theirs != 0).flatten(1).float().mean(1).quantile(levels), rtol=0, atol=0.02
    )


def test_erase_uses_one_box_and_new_noise_for_all_frames():
    erased = augment.erase(torch.zeros(60, 3, 4, 16, 16), 0.5, draws(60))
    covered = erased != 0  # [b, channels, frames, height, width]
    assert 15 < covered.flatten(1).any(1).sum() < 45
    assert torch.equal(covered, covered[:, :1, :1].expand_as(covered))
    noise = erased[covered.flatten(1).any(1)].flatten(1, 2)
    assert all(len({plane.numpy().tobytes() for plane in planes}) == 12 for planes in noise)


# Mixing


def test_mix_draws_mixup_or_cutmix_per_batch():
    kinds = {"mixup": 0, "cutmix": 0, "none": 0}  # Mixup and CutMix may leave one example whole
    config = AugmentConfig(mixup=1.0, cutmix=1.0)
    for seed in range(200):
        inputs = torch.arange(4.0).view(-1, 1, 1, 1).expand(-1, 1, 16, 16).clone()
        out, labels = augment.mix(inputs, torch.arange(4), 4, config, draws(4, seed))
        whole = bool((labels.max(1).values == 1).all())
        kinds["none" if whole else "cutmix" if (out == out.round()).all() else "mixup"] += 1
        assert labels.shape == (4, 4)
    assert min(kinds["mixup"], kinds["cutmix"]) > 60


@pytest.mark.parametrize("sizes", [(64,), (16, 16), (3, 16, 16), (2, 3, 16, 16)])
@pytest.mark.parametrize("options", [{"mixup": 0.8}, {"cutmix": 1.0}, {"mixup": 0.8, "cutmix": 1.0}])
def test_mix_weights_labels_like_pixels_on_any_number_of_axes(sizes, options):
    inputs = torch.arange(4.0).view(-1, *[1] * (1 + len(sizes))).expand(-1, 3, *sizes)
    whole = 0
    for seed in range(20):
        out, labels = augment.mix(inputs.clone(), torch.arange(4), 4, AugmentConfig(**options), draws(4, seed))
        assert out.shape == inputs.shape
        torch.testing.assert_close(labels.sum(1), torch.ones(4))
        torch.testing.assert_close(out.flatten(1).mean(1), labels @ torch.arange(4.0))
        assert torch.equal(out[:, :1].expand_as(out), out), "the same in all channels"
        assert "mixup" in options or (out == out.round()).all(), "CutMix blends nothing"
        whole += bool((labels.max(1).values == 1).all())
    assert whole < 5


def test_cutmix_of_one_axis_pastes_one_segment_of_uniform_share():
    shares = []
    inputs = torch.arange(2.0).view(2, 1, 1).expand(2, 1, 64)
    for seed in range(300):
        out, labels = augment.mix(inputs.clone(), torch.arange(2), 2, AugmentConfig(cutmix=1.0), draws(2, seed))
        assert (out[0, 0].diff() != 0).sum() <= 2
        shares.append(labels[0, 1].item())
    # A segment of the length s around a uniform centre has s - s²/4 of its length inside, and s is uniform.
    assert abs(np.mean(shares) - (1 / 2 - 1 / 12)) < 0.05


def test_loss_of_soft_labels_is_weighted_sum_of_losses():
    torch.manual_seed(0)
    classifier = Classifier(torch.nn.Linear(5, 3), 3, OptimConfig())
    inputs, labels = torch.randn(4, 5), torch.tensor([0, 1, 2, 0])
    soft = 0.7 * functional.one_hot(labels, 3) + 0.3 * functional.one_hot(labels.roll(1), 3)
    logits = classifier(inputs)
    expected = 0.7 * functional.cross_entropy(logits, labels) + 0.3 * functional.cross_entropy(logits, labels.roll(1))
    torch.testing.assert_close(classifier.training_step((inputs, soft), 0), expected)
