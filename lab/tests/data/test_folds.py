"""Folds of a cross-validation: which examples are held out, and how they are read."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from data_sets import refused
from miniatures import MINIATURES, OPTIONS, imagenet_shards
from volume_files import rsna_folder

from torchrope_lab.data.build import make_data
from torchrope_lab.data.data_config import data_config
from torchrope_lab.data.tensors import held_out_for_tuning

pytestmark = pytest.mark.usefixtures("published_miniatures")


def folded(name: str, folds: int, **settings: Any) -> list[Any]:
    """Return the data of each fold, of which the first has read it."""
    first = make_data(data_config(name, folds=folds, **settings))
    first.setup()
    return [first.with_settings(data_config(name, folds=folds, fold=fold, **settings)) for fold in range(folds)]


def settings_of(name: str, folder: Path) -> dict[str, Any]:
    """Return the settings of a small set, which is written once."""
    root = folder / name
    written = {"root": str(root if root.exists() else MINIATURES[name](root))} if name in MINIATURES else {}
    return OPTIONS.get(name, {}) | written | ({"train_size": 100, "val_size": 30} if name == "digits" else {})


def ids(part: Any) -> list[Any]:
    """Return what identifies the examples of a set: their names, else their values."""
    return [name for name, _ in part.samples] if hasattr(part, "samples") else [bytes(x.numpy()) for x in part.inputs]


def labels(part: Any) -> list[int]:
    return [label for _, label in part.samples] if hasattr(part, "samples") else part.labels.tolist()


SOURCES = ("digits", "images", "cifar10", pytest.param("videos", marks=pytest.mark.slow), "volumes", "points")


@pytest.mark.parametrize("name", SOURCES)
def test_every_example_is_held_out_once_and_trained_on_in_the_other_folds(name: str, tmp_path: Path) -> None:
    settings = settings_of(name, tmp_path)
    whole = make_data(data_config(name, **settings))._made_datasets()
    examples = Counter(ids(whole[0]) + ids(whole[1]))
    parts = [data._made_datasets() for data in folded(name, 2, **settings)]
    assert Counter(each for _, val in parts for each in ids(val)) == examples
    for train, val in parts:
        assert Counter(ids(train)) + Counter(ids(val)) == examples
        assert not {*ids(train)} & {*ids(val)}
        assert type(train) is type(whole[0])
        assert type(val) is type(whole[1])


def test_classes_are_spread_evenly_over_folds_of_equal_size() -> None:
    parts = [data._made_datasets()[1] for data in folded("digits", 4, train_size=103, val_size=30)]
    sizes = [len(val) for val in parts]
    assert sum(sizes) == 133
    assert max(sizes) - min(sizes) <= 1
    counts = torch.stack([val.labels.bincount(minlength=10) for val in parts])
    assert (counts.amax(0) - counts.amin(0) <= 1).all()


@pytest.mark.parametrize("name", SOURCES)
def test_folds_do_not_depend_on_who_reads_the_data(name: str, tmp_path: Path) -> None:
    settings = settings_of(name, tmp_path)
    first = make_data(data_config(name, folds=2, **settings))
    hashes = [first.fingerprint]  # computed before the others are made of it
    for fold in (1, 0):
        config = data_config(name, folds=2, fold=fold, **settings)
        hashes.append(first.with_settings(config).fingerprint)
        assert make_data(config).fingerprint == hashes[-1]
    assert hashes[0] == hashes[2] != hashes[1]
    assert make_data(data_config(name, folds=2, split_seed=1, **settings)).fingerprint not in hashes


def test_folds_at_another_size_are_read_at_that_size(tmp_path: Path) -> None:
    first, _ = folded("images", 2, **settings_of("images", tmp_path), size=16)
    larger = first.at_size(24)
    second = larger.with_settings(data_config("images", folds=2, fold=1, **settings_of("images", tmp_path), size=24))
    assert {tuple(image.shape) for part in second._made_datasets() for image, _ in part} == {(3, 24, 24)}
    assert second.fingerprint != first.fingerprint


def test_held_out_examples_are_in_the_order_of_all_examples() -> None:
    settings = dict(train_size=100, val_size=30)
    whole = make_data(data_config("digits", **settings))._made_datasets()
    everything = torch.tensor(labels(whole[0]) + labels(whole[1]))
    for fold, data in enumerate(folded("digits", 3, **settings)):
        assert data._made_datasets()[1].labels.tolist() == everything[data.fold_of_examples == fold].tolist()


def test_held_out_images_are_not_augmented(tmp_path: Path) -> None:
    settings: dict[str, Any] = dict(root=str(MINIATURES["images"](tmp_path)), size=16, crop_ratio=0.5)
    whole = make_data(data_config("images", **settings))._made_datasets()[1]
    expected = dict(zip(ids(whole), whole, strict=True))
    compared = 0
    for data in folded("images", 2, **settings):
        train, val = data._made_datasets()
        for name, (pixels, _) in zip(ids(val), val, strict=True):
            if name in expected:
                assert torch.equal(pixels, expected[name][0])
                compared += 1
        first, second = (torch.stack([train[index][0] for index in range(4)]) for _ in range(2))
        assert not torch.equal(first, second)  # random crops
    assert compared == len(expected)


def test_volumes_of_a_patient_are_in_one_fold(tmp_path: Path) -> None:
    root = str(rsna_folder(tmp_path, 24, patients=8))
    patients = [
        {volume.patient for volume in data._made_datasets()[1].volumes}
        for data in folded("rsna", 3, root=root, frames=2, size=16)
    ]
    assert len(set.union(*patients)) == sum(map(len, patients)) == 8


def test_clips_of_a_video_are_in_one_fold(tmp_path: Path) -> None:
    root = str(MINIATURES["ucf101"](tmp_path))
    videos = [
        {name.partition("_c")[0] for name in ids(data._made_datasets()[1])}
        for data in folded("ucf101", 2, root=root, **OPTIONS["ucf101"])
    ]
    assert not videos[0] & videos[1]
    assert len(videos[0]) > 1


def test_shards_are_refused(tmp_path: Path) -> None:
    data = make_data(data_config("imagenet", root=str(imagenet_shards(tmp_path)), size=16, folds=2))
    with refused(r"^--data\.folds is for images in folders, got shards in "):
        data.setup()


def test_images_of_folds_have_other_sizes_by_resampling_if_the_files_are_not_kept(tmp_path: Path) -> None:
    data = folded("cifar10", 2, root=str(MINIATURES["cifar10"](tmp_path)), size=16)[0]
    assert data._made_datasets()
    assert data.other_sizes == "resampled"


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("digits", {"folds": 9, "train_size": 40, "val_size": 20}, r"at most 6, the examples of the .*, got 9"),
        ("motion", {"folds": 3}, r"--data\.folds is for data that is not generated"),
    ],
)
def test_folds_that_are_impossible_are_refused(name: str, settings: dict[str, Any], message: str) -> None:
    with refused(message):
        make_data(data_config(name, **settings)).setup()


@pytest.mark.parametrize("name", ["images", "cifar10"])
def test_tuning_holds_out_training_examples_at_every_size(tmp_path: Path, name: str) -> None:
    usual, data = (
        make_data(data_config(name, tuning=each, size=16, **settings_of(name, tmp_path))) for each in (False, True)
    )
    (whole, _), (train, val) = usual._made_datasets(), data._made_datasets()
    assert sorted([*labels(train), *labels(val)]) == sorted(labels(whole))
    larger = data.at_size(20) or data  # None is resampled
    assert labels(larger._made_datasets()[1]) == labels(val)


def test_examples_of_a_group_are_in_the_same_part_for_tuning():
    generator = torch.Generator().manual_seed(0)
    classes = torch.randint(0, 3, (90,), generator=generator)
    groups = torch.randint(0, 30, (90,), generator=generator).tolist()
    held_out = held_out_for_tuning(classes, 0, groups)
    assert {groups[index] for index in held_out.nonzero()}.isdisjoint(groups[index] for index in (~held_out).nonzero())
    assert 9 <= held_out.sum() <= 36
    assert torch.equal(held_out_for_tuning(classes, 0), held_out_for_tuning(classes, 0, range(90)))
    with refused(r"at least two groups of training examples of each class, got 1 of one$"):
        held_out_for_tuning(torch.tensor([0, 0, 0, 1, 1]), 0, "abcdd")
