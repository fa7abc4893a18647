"""Tests shared by COCO, ADE20k and segments: batches of lists, and aligned augmentation of targets."""

from pathlib import Path

import pytest
import torch
from data_sets import batches_of_training, load_data, place, refused
from miniatures import MINIATURES
from torchvision import tv_tensors
from torchvision.ops import masks_to_boxes

from torchrope_lab.data import boxes_and_maps as dense
from torchrope_lab.data.boxes_and_maps import (
    DenseModule,
    DenseSet,
    compose,
    flip_and_colours,
    large_scale_jitter,
    to_boxes,
)
from torchrope_lab.data.data_config import AugmentConfig
from torchrope_lab.data.sets import NAMES_DENSE
from torchrope_lab.data.tensors import Normalise

IDENTITY = Normalise(torch.tensor(0.0), torch.tensor(1.0))
WITHOUT_COLOURS = dict(scale_jitter=(0.3, 2.0), flip=True)
EVERYTHING = dict(**WITHOUT_COLOURS, color_jitter=0.3)


def load(name: str, folder: Path, augment: dict | None = None, **options) -> DenseModule:
    root = folder if any(folder.iterdir()) else MINIATURES[name](folder)
    few = {"batch_size": 2, "train_size": 4, "val_size": 3, "size": 32}
    return load_data(name, root, augment=augment or {}, **{**few, **options})


def same(one, other) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    return one == other


def bounding_boxes(masks: torch.Tensor) -> torch.Tensor:
    return masks_to_boxes(masks) + torch.tensor([0, 0, 1, 1])


class Painted(DenseSet):
    """Blocks side by side with one brightness each, so that pixel values give the object at each position."""

    def __init__(self, change=None, count: int = 40, side: int = 48):
        super().__init__(IDENTITY, change)
        rng = torch.Generator().manual_seed(2)
        tops = torch.randint(0, side - 16, (count, 3), generator=rng)
        lefts = torch.randint(0, 8, (count, 3), generator=rng) + torch.tensor([0, 18, 36])
        self.corners = torch.stack([tops, lefts], dim=2)
        self.side = side

    def __len__(self) -> int:
        return len(self.corners)

    def read(self, index):
        numbers = torch.zeros(self.side, self.side + 8, dtype=torch.uint8)
        for number, (top, left) in enumerate(self.corners[index].tolist(), start=1):
            numbers[top : top + 14, left : left + 11] = number
        labels = torch.tensor([1, 2, 3])
        return tv_tensors.Image(numbers[None].expand(3, -1, -1) * 60), {
            "boxes": to_boxes(bounding_boxes(numbers == labels[:, None, None]), *numbers.shape),
            "labels": labels,
            "crowd": torch.zeros_like(labels, dtype=torch.bool),
            "map": tv_tensors.Mask(numbers),
            "name": str(index),
        }


# Batches


@pytest.mark.parametrize("name", NAMES_DENSE)
@pytest.mark.parametrize("changed", [False, True])
def test_dense_data_sets_have_the_required_properties(tmp_path, name, changed):
    data = load(name, tmp_path, EVERYTHING if changed else None)
    assert data.counts == (4, 3)
    assert data.skipped == []
    assert data.description.endswith(".")
    assert data.title
    assert data.num_axes == len(data.input_size) == 2
    keys = {"name"}
    if "segment" in data.tasks:
        keys |= {"map"}
        assert len(set(data.map_classes)) == len(data.map_classes) > 1
    if "detect" in data.tasks:
        keys |= {"boxes", "labels", "crowd"}
    trained = data.train_dataloader()
    for loader, count in zip((trained, data.val_dataloader()), data.counts, strict=True):
        batches = list(loader)
        assert [len(images) for images, _ in batches] == ([2, 2] if count == 4 else [2, 1])
        for images, targets in batches:
            assert isinstance(images, list)
            for image, target in zip(images, targets, strict=True):
                check(data, image, target, keys)
                assert "map" not in target or target["map"].shape == image.shape[1:] or loader is not trained
                assert max(image.shape[1:]) <= 32 or not changed or loader is not trained
        assert len({target["name"] for _, targets in batches for target in targets}) == count


def check(data: DenseModule, image: torch.Tensor, target: dict, keys: set[str]) -> None:
    assert target.keys() == keys
    assert all(type(value) is torch.Tensor for value in [image, *target.values()] if not isinstance(value, str))
    assert image.dtype == torch.float32
    assert image.shape[0] == data.in_channels
    height, width = image.shape[1:]
    if "map" in keys:
        assert target["map"].dtype == torch.int64
        assert set(target["map"].unique().tolist()) <= {*range(len(data.map_classes)), 255}
    if "boxes" in keys:
        count = len(target["boxes"])
        assert [target[name].dtype for name in ("boxes", "labels", "crowd")] == [torch.float32, torch.int64, torch.bool]
        assert target["boxes"].shape == (count, 4)
        assert target["labels"].shape == target["crowd"].shape == (count,)
        assert set(target["labels"].tolist()) <= set(range(data.num_classes))
        left, top, right, bottom = target["boxes"].unbind(1)
        assert bool(((left >= 0) & (left < right) & (right <= width + 1e-3)).all())
        assert bool(((top >= 0) & (top < bottom) & (bottom <= height + 1e-3)).all())


@pytest.mark.filterwarnings("ignore:.*does not have many workers.*")
def test_resumed_epoch_reads_the_remaining_batches(tmp_path):
    def run(resume_at=(0, 0)):
        data = load("segments", tmp_path, WITHOUT_COLOURS, train_size=5)
        data.run_seed, data.resume_at = 5, resume_at
        return batches_of_training(data, 2, reload_dataloaders_every_n_epochs=1)

    whole, rest = run(), run((0, 2))
    assert len(whole) == 6
    assert same(whole[2:], rest)
    names = [
        sorted(target["name"] for _, targets in whole[start : start + 3] for target in targets) for start in (0, 3)
    ]
    assert names[0] == names[1]
    assert len({*names[0]}) == len(names[0]) == 5


def test_ranks_share_the_examples(tmp_path):
    data = load("segments", tmp_path)
    seen = {"train": [], "val": []}
    for rank in range(2):
        place(data, epoch=1, rank=rank, ranks=2)
        for part, loader in (("train", data.train_dataloader()), ("val", data.val_dataloader())):
            seen[part] += [target["name"] for _, targets in loader for target in targets]
    train, val = ([path for path, _ in part.samples] for part in data._made_datasets())
    assert sorted(seen["train"]) == sorted(train)
    assert sorted(seen["val"]) == sorted(val)


def test_no_rank_validates_an_empty_batch(tmp_path):
    data = load("segments", tmp_path, batch_size=1)
    loaders = [place(data, epoch=0, rank=rank, ranks=2).val_dataloader() for rank in range(2)]
    assert [[len(images) for images, _ in loader] for loader in loaders] == [[2], [1]]


def test_fingerprints_distinguish_data_sets(tmp_path):
    data = load("coco", tmp_path)
    assert load("coco", tmp_path).fingerprint == data.fingerprint
    assert load("coco", tmp_path, split_seed=1).fingerprint != data.fingerprint


# Randomness


@pytest.mark.parametrize("name", NAMES_DENSE)
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_dense_batches_do_not_depend_on_workers(tmp_path, name):
    def epoch(workers: int, chance: int) -> list:
        data = load(name, tmp_path, EVERYTHING, workers=workers)
        data.run_seed = 3
        torch.manual_seed(chance)
        expected = torch.random.get_rng_state()
        batches = list(data.train_dataloader())
        if workers == 0:
            assert torch.equal(torch.random.get_rng_state(), expected)
        return batches

    assert same(epoch(0, 1), epoch(2, 2))


@pytest.mark.parametrize("name", NAMES_DENSE)
def test_example_depends_on_run_epoch_and_index_only(tmp_path, name):
    train = load(name, tmp_path, EVERYTHING)._made_datasets()[0]
    images, targets = train.of_epoch(7).__getitems__([3, 1, 2])
    again = train.of_epoch(7)
    assert same(list(again[1]), [images[1], targets[1]])
    assert same(again.__getitems__([2]), ([images[2]], [targets[2]]))
    others = [train.of_epoch(seed)[1] for seed in range(8, 12)]
    assert not all(same(list(other), [images[1], targets[1]]) for other in others)
    repeated = train.of_epoch(7).__getitems__([1, 1 + len(train), 1 + 2 * len(train), 1 + 3 * len(train)])
    assert len({target["name"] for target in repeated[1]}) == 1
    assert not all(same(repeated[0][0], image) for image in repeated[0])
    with pytest.raises(IndexError, match="between 0 and 3, got 4"):
        train[4]


# Geometry


@pytest.mark.parametrize("augment", [dict(flip=True), dict(scale_jitter=(56 / 32, 56 / 32), flip=True)])
def test_flips_and_crops_keep_image_and_target_aligned(augment):
    config = AugmentConfig(**augment)
    side = 32  # a factor of 56 / 32 leaves the longer side as it is
    changed = Painted(compose([*large_scale_jitter(config, side), *flip_and_colours(config)]))
    before = [Painted()[index] for index in range(len(changed))]
    shapes, moved, fewer = set(), 0, 0
    for index, (image, target) in enumerate(changed):
        shapes.add(tuple(image.shape[1:]))
        numbers = (image[0] * 255 / 60).round().long()
        assert torch.equal(target["map"], numbers)
        assert target["labels"].tolist() == [number for number in (1, 2, 3) if bool((numbers == number).any())]
        assert torch.equal(target["boxes"], bounding_boxes(numbers == target["labels"][:, None, None]))
        assert len(target["crowd"]) == len(target["labels"])
        moved += not same(image, before[index][0])
        fewer += len(target["labels"]) < len(before[index][1]["labels"])
    assert shapes == ({(32, 32)} if "scale_jitter" in augment else {(48, 56)})
    assert moved > 10
    assert (fewer > 0) == ("scale_jitter" in augment)


@pytest.mark.parametrize("scale", [(0.5, 0.5), (0.02, 3.0)])
def test_resize_keeps_objects_aligned_with_the_image(scale):
    config = AugmentConfig(scale_jitter=scale, flip=True)
    changed = Painted(compose([*large_scale_jitter(config, 48), *flip_and_colours(config)]))
    for image, target in changed:
        assert max(image.shape[1:]) <= 48
        assert len(target["boxes"]) == len(target["labels"]) == len(target["crowd"])
        low, high = target["boxes"].view(-1, 2, 2).unbind(1)
        assert bool((low >= 0).all() & (high <= 48).all() & (high - low >= 1).all())
        for box, label in zip(target["boxes"], target["labels"], strict=True):
            mask = target["map"] == label
            if mask.any():
                assert (box - bounding_boxes(mask[None])[0]).abs().max() <= 1
            shown = (image[0] * 255 / 60 - label).abs() < 0.5
            if mask.sum() > 60 and len(target["labels"]) == 1:
                assert (mask & shown).sum() / (mask | shown).sum() > 0.7


def test_scale_jitter_is_in_its_range():
    config = AugmentConfig(scale_jitter=(0.25, 0.75))
    longest = [max(image.shape[1:]) for image, _ in Painted(compose(large_scale_jitter(config, 40)), count=300)]
    assert 10 <= min(longest) <= 11
    assert 29 <= max(longest) <= 30
    assert 19 < sum(longest) / 300 < 21


def test_multi_scale_draws_shorter_sides_after_a_crop_for_half_of_the_images():
    steps = dense.multi_scale(80, 200)  # a tenth of DETR's 800 pixels
    images = Painted(compose(steps), count=300)
    shorter, ratios = [], []
    for image, target in images:
        height, width = image.shape[1:]
        shorter.append(min(height, width))
        ratios.append(round(max(height, width) / min(height, width), 1))
        numbers = (image[0] * 255 / 60).round().long()
        assert set(target["labels"].tolist()) <= {1, 2, 3}
        assert (target["boxes"][:, 2:] <= torch.tensor([width, height]) + 1e-3).all()
        assert target["map"].shape == numbers.shape
    assert set(shorter) == {round(pixels / 10) for pixels in range(480, 801, 32)}
    whole = ratios.count(round(56 / 48, 1)) / 300  # some crops have the aspect of the image
    assert 0.45 < whole < 0.75
    long = tv_tensors.Image(torch.zeros(3, 40, 400, dtype=torch.uint8))
    assert max(compose(steps[1:])(long).shape) == 200


def test_crop_of_a_range_draws_height_and_width():
    image = tv_tensors.Image(torch.zeros(1, 70, 30, dtype=torch.uint8))
    sizes = [dense.Crop(60, 38)(image).shape[1:] for _ in range(300)]
    assert {height for height, _ in sizes} == set(range(38, 61))
    assert {width for _, width in sizes} == {30}, "smaller sides stay"


@pytest.mark.parametrize("value", [0, 255])
def test_last_crop_is_kept_where_no_crop_has_several_classes(value):
    map = torch.full((60, 60), value, dtype=torch.uint8)
    image = tv_tensors.Image(torch.zeros(3, 60, 60, dtype=torch.uint8))
    cropped = dense.CropSeveralClasses(20, 0.75)(image, {"map": tv_tensors.Mask(map)})[1]["map"]
    assert torch.equal(cropped.as_subclass(torch.Tensor), map[:20, :20])


def test_crop_keeps_smaller_images_whole():
    image = tv_tensors.Image(torch.zeros(1, 10, 50, dtype=torch.uint8))
    assert dense.Crop(20)(image).shape == (1, 10, 20)
    assert dense.Jitter((8, 8), (0.01, 0.01))(image).shape == (1, 1, 1)


# Configuration


@pytest.mark.parametrize("name", NAMES_DENSE)
def test_select_some_rejects_too_many_examples(tmp_path, name):
    with refused(r"^--data.val_size must be at most \d+ \(all examples\), got 99$"):
        load(name, tmp_path, val_size=99)


def test_folds_are_for_classification(tmp_path):
    with refused(r"--data\.folds is for classification, got --data segments$"):
        load("segments", tmp_path, folds=3)


def test_select_some_is_nested(tmp_path):
    few, many = (load("ade20k", tmp_path, train_size=size)._made_datasets()[0].samples for size in (2, 4))
    assert set(few) < set(many)
