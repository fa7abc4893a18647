"""Tests of the data sets: properties of each set, order of batches, and errors for bad input."""

import logging
import math
import subprocess
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from data_sets import batches_of_training, load_data, refused, spoil
from miniatures import MINIATURES, OPTIONS, WNIDS, imagenet, imagenet_shards
from PIL import EpsImagePlugin, Image

from torchrope_lab.data import folders, images
from torchrope_lab.data.build import make_data
from torchrope_lab.data.data_config import AugmentConfig, data_config, data_sets_with, options, settings_of
from torchrope_lab.data.digits import Digits, split_digits
from torchrope_lab.data.images import split_parts
from torchrope_lab.data.motion import FRAMES, VELOCITIES, Motion, make_clips, render_clips
from torchrope_lab.data.sets import DATA_NAMES, NAMES_DENSE
from torchrope_lab.data.tensors import balanced_subset
from torchrope_lab.data.transforms import resize, resize_bytes, shuffle_patches
from torchrope_lab.engine.descriptions import describe_data
from torchrope_lab.settings.run_config import RunConfig, plain, read_config

pytestmark = pytest.mark.usefixtures("published_miniatures")

COLOURS = {"cat": (200, 30, 30), "dog": (30, 30, 200)}


# Folders of images and files written by the tests


def draw(path: Path, colour=(90, 120, 150), mode="RGB", size=(40, 30), **options) -> Path:
    """An image with some texture, so that a truncated file really lacks pixels."""
    path.parent.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(sum(path.name.encode()))
    noise = torch.randint(0, 40, (size[1], size[0], 3), generator=generator)
    pixels = (noise + torch.tensor(colour)).clamp(max=255).to(torch.uint8)
    Image.fromarray(pixels.numpy()).convert(mode).save(path, **options)
    return path


def truncate(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def picture_folder(root: Path, count: int, order=1) -> Path:
    """root/<class>/<n>.png, written in either order."""
    for number in range(count)[::order]:
        for name, colour in COLOURS.items():
            draw(root / name / f"{number}.png", colour)
    return root


load_images = partial(load_data, "images")


@pytest.mark.parametrize("parts", [("Training", "Testing"), ("train", "test"), ("Train", "Val")])
def test_parts_of_other_names_are_not_classes(tmp_path, parts):
    for part in parts:
        picture_folder(tmp_path / part, 4)
    with refused("train and val"):
        load_images(tmp_path)


def test_class_may_be_called_test(tmp_path):
    for name in ("test", "train"):
        draw(tmp_path / name / "0.png")
        draw(tmp_path / name / "1.png")
    assert load_images(tmp_path).classes == ("test", "train")


def test_other_pixels_have_another_fingerprint(tmp_path):
    first = load_images(picture_folder(tmp_path / "a", 4)).fingerprint
    assert load_images(picture_folder(tmp_path / "moved", 4)).fingerprint == first
    other = picture_folder(tmp_path / "b", 4)
    draw(next(other.rglob("0.png")), (1, 2, 3))
    assert load_images(other).fingerprint != first


# Configuration


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("digits", {"root": "here"}, f"root is for {', '.join(data_sets_with('root'))}, got --data digits"),
    ("digits", {"batch_size": 0}, "batch_size must be 1 or more, got 0"),
    ("digits", {"workers": -1}, "workers must be 0 or more, got -1"),
    ("ucf101", {"split": 4}, "split must be between 1 and 3, got 4"),
    ("ucf101", {"test_views": [5]}, r"test_views must be 2 values, got \[5\]"),
    ("rsna", {"windows": []}, r"windows must be one value or more, got \[\]"),
    ("rsna", {"windows": [[40, 0]]}, r"windows\[0\] must be \[centre, width above 0\], got \[40.0, 0.0\]"),
    ("motion", {"size": 16}, "size must be a multiple of 4 and at least 20, got 16"),
    ("images", {"crop_ratio": 1.2}, "crop_ratio must be above 0 and at most 1 or native, got 1.2"),
    ("videos", {"crop_ratio": "native"}, "crop_ratio must be a number, got 'native'"),
    ("digits", {"crop_ratio": 1.0}, "crop_ratio is for images, .*, ucf101, got --data digits"),
    ("images", {"normalise": "vgg"}, "normalise must be one of measured, imagenet, half, liere, got 'vgg'"),
    ("digits", {"folds": 3, "fold": 3}, "fold must be below --data.folds, got 3 with 3"),
    ("digits", {"folds": 3, "tuning": True}, "folds and tuning must not both be set, got 3 and true"),
]
REFUSED_AUGMENT: list[tuple[str, dict[str, Any], str]] = [
    ("digits", {"scale_jitter": [0.5, 2]}, "scale_jitter is for coco, ade20k, segments, got --data digits"),
    ("images", {"randaugment": (2, 31)}, r"randaugment must be operations,magnitude up to 30 or text, got \(2, 31\)"),
    ("images", {"randaugment": (2,)}, "randaugment must be 2 values or text, got .*"),
    ("images", {"crop_scale": (0.5, 0.2)}, "crop_scale must be low,high with 0 < low <= high <= 1, got .*"),
    ("images", {"erasing": 1.5}, "erasing must be between 0 and 1, got 1.5"),
    ("coco", {"scale_jitter": (2.0, 0.1)}, r"scale_jitter must be low,high with 0 < low <= high, got \(2.0, 0.1\)"),
    ("coco", {"scale_jitter": (0.1, math.inf)}, r"scale_jitter\[1\] must be within ±1e\+300, got inf"),
    (
        "images",
        {"resize_crop": 1.1, "crop_scale": [0.5, 1]},
        r"resize_crop and crop_scale must not both be set, got 1.1 with \(0.5, 1.0\)",
    ),
    (
        "coco",
        {"multi_scale": True, "scale_jitter": (0.5, 2.0)},
        r"multi_scale and scale_jitter must not both be set, got true with \(0.5, 2.0\)",
    ),
]


@pytest.mark.parametrize(("name", "values", "message"), REFUSED)
def test_data_config_rejects_bad_values(name, values, message):
    with refused(f"^--data.{message}$"):
        data_config(name, **values)


@pytest.mark.parametrize(("name", "augment", "message"), REFUSED_AUGMENT)
def test_data_config_rejects_bad_augmentation(name, augment, message):
    with refused(f"^--data.augment.{message}$"):
        data_config(name, augment=augment)


def test_settings_of_all_data_sets_are_those_of_one():
    assert data_config("digits", augment=AugmentConfig(mixup=0.8)).augment.mixup == 0.8
    with refused(r"^--data\.augment\.crop_padding is for images, .* got --data digits$"):
        data_config("digits", augment=AugmentConfig(crop_padding=2))


def test_unknown_names_are_told_with_what_is_near():
    names = f"{', '.join(DATA_NAMES)}, hf:NAME, webdataset:FOLDER, mypackage.module:source or FILE.py:source"
    with refused(rf"^--data must be one of {names}, got 'birds'; did you mean 'videos'\?$"):
        data_config("birds")
    rule = r"^there is no option --data\.batch_sise of digits; did you mean '--data\.batch_size'\?$"
    with refused(rule):
        data_config(batch_sise=8)


@pytest.mark.parametrize("name", DATA_NAMES)
def test_data_config_has_only_settings_of_its_data_set(name):
    config = data_config(name)
    assert type(config) is settings_of(name)
    assert config.name == name
    assert data_config(**plain(config)) == config
    assert {*plain(config)} | {f"augment.{setting}" for setting in plain(config)["augment"]} == {*options(type(config))}
    assert ("augment.mixup" in options(type(config))) == (name not in NAMES_DENSE and type(config).lattice)
    with refused(f"there is no option --data.colour of {name}"):
        data_config(name, colour=1)


@pytest.mark.parametrize("name", DATA_NAMES)
def test_data_config_survives_a_round_trip(name):
    known = options(settings_of(name).augmentation())
    change = next(({key: value} for key, value in {"jitter": 0.5, "flip": True}.items() if key in known), {})
    changed = {"batch_size": 3, "augment": {**change, "repeats": 2}, "size": 96}
    if "root" in options(settings_of(name)):
        changed["root"] = "here"
    run = RunConfig(data=data_config(name, **changed))
    assert read_config(yaml.safe_load(yaml.safe_dump(plain(run)))) == run
    assert run.data.batch_size == 3


@pytest.mark.parametrize("name", [name for name in DATA_NAMES if name not in NAMES_DENSE])  # see test_dense.py
def test_data_sets_have_the_required_properties(tmp_path, name):
    root = MINIATURES[name](tmp_path) if name in MINIATURES else None
    data = load_data(name, root, batch_size=4, train_size=16, val_size=10, **OPTIONS.get(name, {}))
    train, val = data.train_dataloader().dataset, data.val_dataloader().dataset
    inputs, label = train[0]
    if data.lattice:
        assert inputs.shape == (data.in_channels, *data.input_size)
        assert data.num_axes == len(data.input_size)
    else:
        assert 1 <= len(inputs) <= data.config.size
        assert inputs.shape[1:] == (data.in_channels + data.num_axes,)
        assert data.num_axes == len(data.scale) == len(data.extent)
        assert inputs.isfinite().all()
    assert inputs.dtype == torch.float32
    assert type(label) is int
    assert data.num_axes == len(data.axes)
    assert data.num_classes == len(set(data.classes)) > 1
    assert data.counts == (len(train), len(val)) == (16, 10)
    assert {label for _, label in (train[i] for i in range(len(train)))} <= set(range(data.num_classes))
    assert data.skipped == []
    assert data.description.endswith(".")
    assert data.title
    for loader, count in zip((data.train_dataloader(), data.val_dataloader()), data.counts, strict=True):
        batches = list(loader)
        assert sum(len(labels) for _, labels in batches) == count
        assert batches[0][0].ndim == (2 + data.num_axes if data.lattice else 3)
        assert not data.lattice or batches[0][0].shape[1:] == (data.in_channels, *data.input_size)
        assert batches[0][1].dtype == torch.int64
    assert len(next(iter(data.train_dataloader()))[1]) == 4


# The order of the examples


def orders_of(run_seed: int) -> list[tuple[int, ...]]:
    """The labels of each of three epochs, in the order of a training."""
    data = make_data(data_config("digits", train_size=100))
    data.run_seed = run_seed
    labels = torch.cat([labels for _, labels in batches_of_training(data, 3)])
    return [tuple(epoch.tolist()) for epoch in labels.split(100)]


@pytest.mark.filterwarnings("ignore:.*does not have many workers.*")
def test_order_depends_on_run_seed_and_epoch_only():
    first, other = orders_of(3), orders_of(4)
    assert orders_of(3) == first
    orders = [*first, *other]
    assert len(set(orders)) == 6, "an epoch repeats the order of another"
    assert all(sorted(order) == sorted(orders[0]) for order in orders)


def test_validation_order_is_fixed():
    loader = make_data(data_config("digits")).val_dataloader()
    assert torch.equal(torch.cat([labels for _, labels in loader]), loader.dataset.labels)


# Balanced subsets


def test_balanced_subset_is_balanced_nested_and_reproducible():
    labels = torch.tensor([0] * 50 + [1] * 30 + [2] * 4)
    small = balanced_subset(labels, 9, 5, "train_size")
    large = balanced_subset(labels, 30, 5, "train_size")
    assert Counter(labels[small].tolist()) == {0: 3, 1: 3, 2: 3}
    assert Counter(labels[large].tolist()) == {0: 13, 1: 13, 2: 4}
    assert set(small.tolist()) < set(large.tolist())
    assert torch.equal(small, balanced_subset(labels, 9, 5, "train_size"))
    assert not torch.equal(small, balanced_subset(labels, 9, 6, "train_size"))


class Counted(int):
    """A label that counts how often labels are compared."""

    compared = 0
    __hash__ = int.__hash__

    def __eq__(self, other: object) -> bool:
        Counted.compared += 1
        return int(self) == other


def test_splitting_compares_each_label_a_few_times() -> None:
    count, classes = 3000, 300
    samples = [(f"{number}.png", Counted(number % classes)) for number in range(count)]
    train, val = split_parts({"": samples}, [str(label) for label in range(classes)], 0, "images")
    assert Counted.compared < 10 * count
    assert len(val) == 2 * classes
    assert sorted(train + val) == sorted(samples)


@pytest.mark.parametrize("size", [2, 85])
def test_balanced_subset_rejects_impossible_sizes(size):
    labels = torch.tensor([0] * 50 + [1] * 30 + [2] * 4)
    message = rf"^--data.val_size must be between 3 \(one per class\) and 84 \(all examples\), got {size}$"
    with refused(message):
        balanced_subset(labels, size, 0, "val_size")


# Digits


def test_digits_are_split_within_each_class_and_disjoint():
    train_images, train_labels, val_images, val_labels = split_digits(0)
    assert (len(train_images), len(val_images)) == (1437, 360)
    assert train_images.min() == 0
    assert train_images.max() == 1
    share = val_labels.bincount() / (train_labels.bincount() + val_labels.bincount())
    assert (share - 0.2).abs().max() < 0.01
    train = {tuple(image.flatten().tolist()) for image in train_images}
    assert train.isdisjoint(tuple(image.flatten().tolist()) for image in val_images)


def test_split_depends_on_split_seed_not_run_seed():
    first, again, other = (split_digits(seed)[1] for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    data = make_data(data_config("digits"))
    data.run_seed = 7
    assert torch.equal(data.datasets()[0].labels, first)


def test_inputs_are_normalised_by_training_statistics():
    train, val = Digits(data_config("digits")).datasets()
    assert train.inputs.mean().abs() < 1e-5
    assert (train.inputs.std(correction=0) - 1).abs() < 1e-5
    assert val.inputs.mean().abs() > 1e-5, "the validation set is normalised with its own mean"


def test_digits_support_other_sizes():
    data = Digits(data_config("digits", size=16, train_size=20, val_size=10))
    train, val = data.datasets()
    assert train.inputs.shape == (20, 1, *data.input_size) == (20, 1, 16, 16)
    assert torch.equal(train.labels.bincount(), torch.full((10,), 2))
    assert torch.equal(val.labels.bincount(), torch.ones(10, dtype=torch.int64))


# Motion


def counted_patches(frame: torch.Tensor) -> Counter:
    patches = frame.unfold(0, 4, 4).unfold(1, 4, 4).reshape(-1, 16)
    return Counter(tuple(patch.tolist()) for patch in patches)


def test_motion_has_default_sizes_and_balanced_classes():
    data = Motion(data_config("motion"))
    train, val = data.datasets()
    assert train.inputs.shape == (2400, 1, *data.input_size) == (2400, 1, 5, 20, 20)
    assert val.inputs.shape == (600, 1, 5, 20, 20)
    assert torch.equal(train.labels.bincount(), torch.full((8,), 300))
    assert torch.equal(val.labels.bincount(), torch.full((8,), 75))


def test_motion_is_determined_by_split_seed():
    first, again, other = (Motion(data_config("motion", split_seed=seed)).datasets() for seed in (0, 0, 1))
    assert torch.equal(first[0].inputs, again[0].inputs)
    assert torch.equal(first[1].inputs, again[1].inputs)
    assert not torch.equal(first[0].labels, other[0].labels)


def test_motion_validation_does_not_depend_on_train_size():
    few, many = (Motion(data_config("motion", train_size=size)).datasets() for size in (80, 160))
    assert len(few[0]) == 80
    assert torch.equal(few[1].labels, many[1].labels)


def test_motion_frames_hold_the_same_patches():
    digit = split_digits(0)[0][:1].expand(8, -1, -1, -1)
    starts = torch.tensor([[17, 6]]).expand(8, -1)
    clips = render_clips(digit, starts, torch.arange(8), side=20)
    bags = [counted_patches(frame) for frame in clips.flatten(0, 2)]
    assert len(bags) == 8 * FRAMES
    assert all(bag == bags[0] for bag in bags)
    assert len({tuple(clip.flatten().tolist()) for clip in clips}) == 8, "two classes make the same clip"


@pytest.mark.parametrize("side", [20, 24])
def test_motion_class_is_direction_and_speed(side):
    clips, labels = make_clips(split_digits(0)[0], 64, side, torch.Generator().manual_seed(2))
    frames = clips[:, 0].double()
    spectrum = torch.fft.fft2(frames)
    correlation = torch.fft.ifft2(spectrum[:, :-1].conj() * spectrum[:, 1:]).real  # [n, t - 1, side, side]
    peak = correlation.flatten(2).argmax(-1)
    moved = torch.stack([peak // side, peak % side], -1)
    stated = torch.tensor(list(VELOCITIES.values()))[labels] % side
    assert torch.equal(moved, stated[:, None].expand_as(moved))


def test_motion_frame_contains_the_whole_digit():
    digits = split_digits(0)[0]
    clips, _ = make_clips(digits[:1], 16, 20, torch.Generator().manual_seed(2))
    expected = digits[0].flatten().sort().values
    for frame in clips.flatten(0, 2):
        assert torch.equal(frame.flatten().sort().values[-64:], expected)


def test_motion_requires_a_clip_per_class():
    rule = r"^--data.train_size and --data.val_size must be at least 8 \(one per class\), got 3$"
    with refused(rule):
        Motion(data_config("motion", val_size=3))


# Images


def paths_of(dataset) -> set[str]:
    return {path for path, _ in dataset.samples}


def test_class_folders_are_split_by_a_fifth(tmp_path):
    data = load_images(picture_folder(tmp_path, 10), size=32)
    train, val = data.datasets()
    assert data.classes == ("cat", "dog")
    assert data.counts == (16, 4)
    assert Counter(label for _, label in val.samples) == {0: 2, 1: 2}
    assert paths_of(train).isdisjoint(paths_of(val))
    assert train[0][0].shape == (3, 32, 32)
    assert data.description.startswith("20 images")


def test_split_does_not_depend_on_folder_or_file_order(tmp_path):
    forwards = load_images(picture_folder(tmp_path / "forwards", 10)).datasets()
    backwards = load_images(picture_folder(tmp_path / "backwards", 10, order=-1)).datasets()
    other = load_images(tmp_path / "forwards", split_seed=1).datasets()
    assert forwards[0].samples == backwards[0].samples
    assert forwards[1].samples == backwards[1].samples
    assert forwards[1].samples != other[1].samples


def test_train_and_val_folders_are_used_as_they_are(tmp_path):
    picture_folder(tmp_path / "train", 3)
    picture_folder(tmp_path / "val", 2)
    train, val = load_images(tmp_path).datasets()
    assert paths_of(train) == {f"train/{name}/{n}.png" for name in COLOURS for n in range(3)}
    assert paths_of(val) == {f"val/{name}/{n}.png" for name in COLOURS for n in range(2)}


def test_training_crops_depend_on_the_seed(tmp_path):
    train, val = load_images(picture_folder(tmp_path, 5), size=16).datasets()
    torch.manual_seed(1)
    first, second = train[0][0], train[0][0]
    torch.manual_seed(1)
    assert torch.equal(train[0][0], first)
    assert not torch.equal(first, second)
    assert torch.equal(val[0][0], val[0][0])


def test_images_are_normalised_by_training_statistics(tmp_path):
    picture_folder(tmp_path / "train", 4)
    picture_folder(tmp_path / "val", 1)
    for name in COLOURS:
        draw(tmp_path / "val" / name / "0.png", (255, 255, 255))
    train, val = load_images(tmp_path, size=24).datasets()
    train.view = val.view
    inputs = torch.stack([train[index][0] for index in range(len(train))])
    torch.testing.assert_close(inputs.mean((0, 2, 3)), torch.zeros(3), atol=1e-4, rtol=0)
    torch.testing.assert_close(inputs.std((0, 2, 3), correction=0), torch.ones(3), atol=1e-4, rtol=0)
    assert val[0][0].mean() > 1


TRANSPARENT = pytest.param("P", {"transparency": bytes(range(256))}, id="transparent palette")


@pytest.mark.parametrize(
    ("mode", "options"), [*((mode, {}) for mode in ("L", "LA", "P", "RGBA", "1", "CMYK")), TRANSPARENT]
)
def test_load_image_converts_other_8_bit_modes(tmp_path, mode, options):
    suffix = "tif" if mode == "CMYK" else "png"
    for name in COLOURS:
        for number in range(2):
            draw(tmp_path / name / f"{number}.{suffix}", mode=mode, **options)
    data = load_images(tmp_path)
    assert data.skipped == []
    assert next(iter(data.train_dataloader()))[0].shape == (2, 3, 64, 64)


SIXTEEN_BITS = np.linspace(0, 65535, 48).astype(np.uint16).reshape(6, 8)


@pytest.mark.parametrize(
    ("name", "stored", "tags"),
    [
        ("a.png", SIXTEEN_BITS, {}),
        ("a.tif", SIXTEEN_BITS, {}),
        ("a.tif", SIXTEEN_BITS.astype(">u2"), {}),
        ("a.tif", 65535 - SIXTEEN_BITS, {"tiffinfo": {262: 0}}),  # 0 is white
        ("a.tif", np.rot90(SIXTEEN_BITS), {"tiffinfo": {274: 6}}),  # EXIF rotation
        ("a.pgm", SIXTEEN_BITS, {}),
    ],
)
def test_load_image_keeps_upper_8_of_16_bits(tmp_path, name, stored, tags):
    Image.fromarray(np.ascontiguousarray(stored)).save(tmp_path / name, **tags)
    read = np.asarray(images.load_image(tmp_path / name))
    assert np.array_equal(read, np.stack([SIXTEEN_BITS // 256] * 3, axis=-1))
    assert (read.min(), read.max()) == (0, 255)


def test_folder_of_16_bit_images_is_read(tmp_path, caplog):
    for label, name in enumerate(("dark", "light")):
        (tmp_path / name).mkdir()
        for number in range(5):
            suffix = "png" if number % 2 else "tiff"
            Image.fromarray(SIXTEEN_BITS // (2 - label)).save(tmp_path / name / f"{number}.{suffix}")
    data = load_images(tmp_path, size=6)
    assert data.counts == (8, 2)
    assert caplog.messages == []
    dark, light = (inputs.mean() for inputs, _ in data.datasets()[1])
    assert dark < light


def add_system_files(root: Path) -> None:
    """Add the files that macOS, its archiver and Windows create for each file and folder."""
    files = [path for path in root.rglob("*") if path.is_file()]
    for path in files:
        path.with_name(f"._{path.name}").write_bytes(b"left by a file manager")
        copy = root / "__MACOSX" / path.relative_to(root)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.with_name(f"._{path.name}").write_bytes(b"left by an archiver")
        copy.write_bytes(path.read_bytes())
    for folder in {root, *(path.parent for path in files)}:
        (folder / ".DS_Store").write_bytes(b"x")
        (folder / "Thumbs.db").write_bytes(b"x")
        (folder / ".hidden").mkdir(exist_ok=True)
        (folder / ".hidden" / files[0].name).write_bytes(b"x")


WRITTEN = {name: (name, make) for name, make in MINIATURES.items() if "cifar" not in name}
WRITTEN["shards"] = ("imagenet", imagenet_shards)
SLOW = ("videos", "ucf101", "volumes")


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.slow if kind in SLOW else ()) for kind in WRITTEN]
)
def test_files_of_the_operating_system_are_ignored(tmp_path, caplog, kind):
    name, make = WRITTEN[kind]
    config = data_config(name, root=str(make(tmp_path / "data")), **OPTIONS.get(name, {}))
    fingerprint = make_data(config).fingerprint
    add_system_files(tmp_path / "data")
    caplog.clear()
    data = make_data(config)
    assert data.fingerprint == fingerprint
    assert data.skipped == []
    assert caplog.messages == []


def test_unread_files_are_named_in_one_warning(tmp_path, caplog):
    picture_folder(tmp_path / "train", 2)
    picture_folder(tmp_path / "val", 1)
    for number in range(3):
        draw(tmp_path / "test" / f"{number}.png")
    for name in ("loose.png", "train/notes.txt", "val/cat/photo.heic", "val/photo.png"):
        (tmp_path / name).write_bytes(b"not looked at")
    data = load_images(tmp_path)
    (message,) = caplog.messages
    assert message.endswith("loose.png, test/0.png, test/1.png, test/2.png, train/notes.txt and 2 more")
    assert describe_data(data).unread == message


def test_load_image_applies_exif_orientation(tmp_path):
    tags = Image.Exif()
    tags[0x0112] = 6  # camera rotated by 90 degrees
    path = draw(tmp_path / "a.jpg", size=(40, 30), exif=tags)
    assert images.load_image(path, 64).size == (30, 40)


NO_IMAGE = "no image (JPEG, PNG, WEBP, BMP, PPM, TIFF, GIF)"
EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 40 40\n%%EndComments\nshowpage\n%%EOF\n"


def test_postscript_file_as_image_runs_no_program(tmp_path, monkeypatch):
    started = []

    def refuse(_, command, *args, **kwargs):
        started.append(command)
        raise OSError("no programs here")

    monkeypatch.setattr(EpsImagePlugin, "gs_binary", None)  # not searched for yet
    monkeypatch.setattr(subprocess.Popen, "__init__", refuse)
    picture_folder(tmp_path, 4)
    (tmp_path / "cat" / "drawing.png").write_bytes(EPS)
    draw(tmp_path / "dog" / "cartoon.ico").rename(tmp_path / "dog" / "cartoon.jpg")
    data = load_images(tmp_path)
    assert started == []
    assert dict(data.skipped) == {"cat/drawing.png": NO_IMAGE, "dog/cartoon.jpg": NO_IMAGE}


@pytest.mark.parametrize("extension", images.IMG_EXTENSIONS)
def test_load_image_reads_every_extension(tmp_path, extension):
    assert images.load_image(draw(tmp_path / f"a{extension}", size=(40, 30)), 64).size == (40, 30)


def test_load_image_reads_the_first_frame_of_a_gif(tmp_path):
    first, second = (Image.new("RGB", (40, 30), colour) for colour in ("red", "blue"))
    first.save(tmp_path / "a.gif", save_all=True, append_images=[second])
    assert images.load_image(tmp_path / "a.gif", 64).getpixel((5, 5)) == (255, 0, 0)


def test_load_image_reads_multi_picture_jpeg(tmp_path):
    picture = Image.new("RGB", (40, 30), "red")
    picture.save(tmp_path / "a.jpg", format="MPO", save_all=True, append_images=[picture])
    assert images.load_image(tmp_path / "a.jpg", 64).size == (40, 30)


def test_damaged_files_are_skipped_named_and_counted(tmp_path, caplog):
    picture_folder(tmp_path, 4)
    truncate(draw(tmp_path / "cat" / "cut.jpg"))
    truncate(draw(tmp_path / "cat" / "cut.png"))
    (tmp_path / "dog" / "text.jpg").write_text("this is no picture")
    (tmp_path / "dog" / "empty.png").touch()
    Image.new("F", (8, 8)).save(tmp_path / "dog" / "deep.tif")
    (tmp_path / "dog" / "notes.txt").write_text("not looked at")
    (tmp_path / "dog" / "._0.png").write_text("left by a file manager")
    with caplog.at_level(logging.WARNING):
        data = load_images(tmp_path)
    assert dict(data.skipped) == {
        "cat/cut.jpg": "truncated",
        "cat/cut.png": "truncated",
        "dog/text.jpg": NO_IMAGE,
        "dog/empty.png": NO_IMAGE,
        "dog/deep.tif": "pixels must be 8-bit or unsigned 16-bit, got mode F",
    }
    assert len(caplog.messages) == 2
    others, skipped = caplog.messages
    assert others.startswith("1 .txt not read because they are not images of a class (.jpg ")
    assert others.endswith("): dog/notes.txt")
    assert skipped.startswith("skipped 5 of 13 images: cat/cut.jpg (truncated), ")
    assert sum(data.counts) == 8


@pytest.mark.parametrize(
    ("names", "root", "message"),
    [
        ([], "absent", r"--data.root must be a folder with images \(root/<class>.*\), got '.*absent'"),
        (["a.png"], "a.png", r"--data.root must be a folder with images \(root/<class>.*\), got '.*a.png'"),
        ([], "", r"--data.root must hold one sub-folder per class, two or more \(.*\), got none in '.*'"),
        (["a.png"], "", r"--data.root must hold one sub-folder per class, two or more \(.*\), got none in '.*'"),
        (["cat/0.png"], "", r"--data.root must hold one sub-folder per class, two or more \(.*\), got cat in '.*'"),
        (
            ["train/cat/0.png", "train/dog/0.png"],
            "",
            "--data.root must hold train and val with one sub-folder per class in each, got train",
        ),
        (
            ["train/cat/0.png", "train/dog/0.png", "val/cat/0.png", "val/cow/0.png"],
            "",
            "train and val must have the same classes, got 'dog' in train only, 'cow' in val only",
        ),
        (["cat/", "dog/"], "", "--data.root must hold readable images, found 0 of 0"),
        (
            ["cat/cut.png", "dog/cut.png"],
            "",
            r"--data.root must hold readable images, found 0 of 2: cat/cut.png \(truncated\), .*",
        ),
        (
            ["cat/0.png", "cat/1.png", "dog/0.png"],
            "",
            "readable images of each class must number at least 2, one to train on .*, got 1 for 'dog'",
        ),
        (
            ["train/cat/0.png", "train/dog/0.png", "val/cat/0.png", "val/dog/"],
            "",
            "readable images of each class must number at least 1 in val, got 0 for 'dog'",
        ),
    ],
)
def test_images_rejects_other_layouts(tmp_path, names, root, message):
    for name in names:
        (tmp_path / name).mkdir(parents=True) if name.endswith("/") else draw(tmp_path / name)
        if "cut" in name:
            truncate(tmp_path / name)
    with refused(f"^{message}$"):
        load_images(tmp_path / root)


@pytest.mark.parametrize(
    ("name", "layout"),
    [("images", "root/<class>.*"), ("imagenet", "train/.*val.*image-net.org.*"), ("coco", "annotations/.*dataset.org")],
)
def test_folder_is_asked_for_with_its_layout_and_source(name, layout):
    with refused(rf"^--data.root must be a folder with \w+ \({layout}\), got None$"):
        make_data(data_config(name))


ADE, TRAIN = "ADEChallengeData2016", "annotations/instances_train2017.json"
LISTS, UCF101 = "ucfTrainTestlist", "ucfTrainTestlist/classInd.txt"
SEGMENTS, CLASSES = "^--data.root must hold images/train.*; got '", "^classes.txt must name 2 to 255 different classes"
LAYOUTS: list[tuple[str, str, str | None, str]] = [  # a file or folder, what is in it instead, None if it is away
    ("ade20k", f"{ADE}/objectInfo150.txt", None, f"must hold {ADE} with .*; from data.csail.mit.edu/.*; got"),
    ("ade20k", f"{ADE}/objectInfo150.txt", "Idx\tName\n1\ta\n3\tb\n", r"the tab-separated columns Idx \(1, 2, "),
    ("ade20k", f"{ADE}/objectInfo150.txt", "nothing\n", "objectInfo150.txt must have the tab-separated columns Idx"),
    ("ade20k", f"{ADE}/images/validation", None, "^--data.root must hold .*; got '"),
    ("segments", "masks", None, SEGMENTS),
    ("segments", "images/train", None, SEGMENTS),
    ("segments", "classes.txt", "road\n\nsky\n", CLASSES),
    ("segments", "classes.txt", "road\nroad\n", CLASSES),
    ("segments", "masks/val", None, "No such file or directory: '.*/masks/val'$"),
    ("coco", TRAIN, "{not json", "annotations must be COCO's JSON .* got instances_train2017.json: "),
    ("coco", TRAIN, None, "got captions_train2017.json: no 'images'$"),
    ("coco", TRAIN.replace("7.", "4."), "{}", "got instances_train2014.json, instances_train2017.json$"),
    ("coco", "train2017", None, "got no image of train in '.*'$"),
    ("imagenet", "LOC_val_solution.csv", None, "val must have class folders, or .* LOC_val_sol"),
    ("imagenet", "LOC_val_solution.csv", "ImageId,x\n", "every image of val, got None for ILS"),
    ("imagenet", "train", None, r"--data.root must hold train/<class>/\*.*image-net\.org"),
    ("imagenet", f"train/{WNIDS[3]}", None, f"got '{WNIDS[3]}' for ILSVRC2012_val"),
    ("ucf101", UCF101, None, r"hold UCF101 \(root/UCF-101/<class>.*crcv.ucf.edu.*\), got '.*' without classInd.txt$"),
    ("ucf101", "UCF-101", None, "^--data.root must hold UCF101 .*, got '.*' without ApplyEyeMakeup$"),
    ("ucf101", UCF101, "1 a\n3 b\n", "classInd.txt must number two or more classes from 1 up, got 1, 3$"),
    ("ucf101", f"{LISTS}/trainlist01.txt", "Biking/a.avi 1\n", "must name videos .* classInd.txt, got 'Biking.* 1'$"),
    ("ucf101", f"{LISTS}/testlist01.txt", "Biking/a.avi\n", "^split 1's test list must name readable videos, found 0"),
]


@pytest.mark.parametrize(("name", "file", "content", "message"), LAYOUTS)
def test_incomplete_folder_says_what_is_expected(tmp_path, name, file, content, message):
    root = imagenet(tmp_path, "kaggle") if name == "imagenet" else MINIATURES[name](tmp_path)
    spoil(root / file, content)
    with refused(message, (ValueError, OSError)):
        load_data(name, root)


def test_class_folder_that_cannot_be_listed_is_not_empty(tmp_path, monkeypatch):
    scan = folders.os.scandir

    def refuse_dogs(folder):
        if Path(folder).name == "dog":
            raise PermissionError(13, "Permission denied", str(folder))
        return scan(folder)

    root = picture_folder(tmp_path, 3)
    monkeypatch.setattr(folders.os, "scandir", refuse_dogs)
    with pytest.raises(PermissionError, match=r"Permission denied: '.*dog'$"):
        load_images(root)


# Transforms

SHAPES = [
    pytest.param((12,), 3, id="one axis"),
    pytest.param((8, 6), (4, 2), id="two axes"),
    pytest.param((3, 4, 8), (1, 2, 4), id="three axes"),
]


def cut(sample: torch.Tensor, patch) -> list[tuple]:
    """The patches of a sample (channels, *sizes), row-major."""
    patch = (patch,) * (sample.ndim - 1) if isinstance(patch, int) else patch
    for axis, extent in enumerate(patch):
        sample = sample.unfold(1 + axis, extent, extent)
    return [tuple(p.flatten().tolist()) for p in sample.movedim(0, -len(patch) - 1).flatten(0, len(patch) - 1)]


@pytest.mark.parametrize(("sizes", "patch"), SHAPES)
def test_shuffle_patches_permutes_patches(sizes, patch):
    inputs = torch.arange(5 * 2 * torch.Size(sizes).numel()).view(5, 2, *sizes).float()
    shuffled = shuffle_patches(inputs, patch, torch.Generator().manual_seed(0))
    assert shuffled.shape == inputs.shape
    for before, after in zip(inputs, shuffled, strict=True):
        assert Counter(cut(before, patch)) == Counter(cut(after, patch))
    assert not torch.equal(shuffled, inputs)


def test_shuffle_patches_differs_by_sample():
    inputs = torch.arange(16.0).expand(50, 1, 16)
    shuffled = shuffle_patches(inputs, 1, torch.Generator().manual_seed(0))
    assert len({tuple(sample.flatten().tolist()) for sample in shuffled}) == 50


def test_shuffle_patches_is_uniform_over_permutations():
    inputs = torch.arange(3.0).expand(6000, 1, 3)
    shuffled = shuffle_patches(inputs, 1, torch.Generator().manual_seed(0))
    counts = Counter(tuple(sample.flatten().tolist()) for sample in shuffled)
    assert len(counts) == 6
    assert all(abs(count - 1000) < 5 * 1000**0.5 for count in counts.values())


def test_shuffle_patches_repeats_with_its_generator():
    inputs = torch.rand(4, 1, 8, 8)
    first, again, other = (shuffle_patches(inputs, 2, torch.Generator().manual_seed(seed)) for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("axes", [1, 2, 3])
def test_resize_keeps_a_linear_ramp_inside(axes):
    """Pixel i of n sits at (i + 1/2) / n; a function linear in that stays so away from the edges."""

    def ramp(size: int) -> torch.Tensor:
        along = (torch.arange(size) + 0.5) / size
        return along.view(-1, *[1] * (axes - 1)).expand(*[size] * axes)[None, None]

    enlarged = resize(ramp(8), 16)
    assert enlarged.shape == (1, 1, *[16] * axes)
    torch.testing.assert_close(enlarged[:, :, 1:-1], ramp(16)[:, :, 1:-1])


def test_resize_to_the_same_size_returns_the_input():
    inputs = torch.rand(2, 3, 5, 7)
    assert torch.equal(resize(inputs, (5, 7)), inputs)


def test_resize_bytes_rounds_to_the_nearest():
    pixels = torch.randint(0, 256, (3, 1, 7, 9), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    expected = resize(pixels.double(), (10, 12))
    changed = resize_bytes(pixels, (10, 12))
    assert changed.dtype == torch.uint8
    assert (changed - expected).abs().max() <= 0.501
    assert abs((changed - expected).mean()) < 0.05


@pytest.mark.parametrize(("axis", "extent"), [(0, 1), (0, 2), (1, 3), (2, 1)])
def test_slices_along_one_axis_are_permuted_per_sample(axis, extent):
    patch = [extent if number == axis else None for number in range(3)]
    inputs = torch.arange(50 * 2 * 4 * 6 * 5).view(50, 2, 4, 6, 5)
    shuffled = shuffle_patches(inputs, patch, torch.Generator().manual_seed(0))
    assert shuffled.shape == inputs.shape
    orders = set()
    for before, after in zip(inputs, shuffled, strict=True):
        slices = [part.numpy().tobytes() for part in before.split(extent, dim=1 + axis)]
        orders.add(tuple(slices.index(part.contiguous().numpy().tobytes()) for part in after.split(extent, 1 + axis)))
    assert all(sorted(order) == list(range(len(order))) for order in orders)
    assert len(orders) > 1
    again = shuffle_patches(inputs, patch, torch.Generator().manual_seed(0))
    assert torch.equal(again, shuffled)


def test_resize_antialiases_two_axes():
    stripes = (torch.arange(32) % 4 == 0).float().expand(1, 1, 32, 32)
    assert (resize(stripes, (32, 8))[..., 1:-1] - 0.25).abs().max() < 0.1
