"""Scenes of digits: what is said to be where is drawn there, and larger canvases differ in their extent alone."""

import pytest
import torch
from torch.nn import functional
from torchvision.ops import masks_to_boxes

from torchrope_lab.data import scenes as module
from torchrope_lab.data.build import make_data
from torchrope_lab.data.config import data_config
from torchrope_lab.data.digits import split_digits
from torchrope_lab.data.numbered import NumberedSet
from torchrope_lab.data.scenes import Scenes, make_scene, make_scenes

DIGITS, LABELS, *_ = split_digits(0)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def scenes(**options) -> tuple[NumberedSet, NumberedSet]:
    data = make_data(data_config("scenes", **{"train_size": 6, "val_size": 5, **options}))
    data.setup()
    return data._made_datasets()


@pytest.fixture(scope="module")
def many() -> dict[int, NumberedSet]:
    return {side: make_scenes(DIGITS, LABELS, side, range(count)) for side, count in ((64, 200), (128, 30), (200, 8))}


def test_defaults_are_those_that_are_promised():
    data = Scenes(data_config("scenes"))
    assert data.input_size == (64, 64)
    assert data.sizes == (2000, 200)
    assert data.tasks == ("segment", "detect")
    assert data.map_classes == ("background", *data.classes)


@pytest.mark.parametrize("size", [32, 63, 257])
def test_other_canvases_are_refused(size):
    with pytest.raises(ValueError, match=f"^--data.size must lie between 64 and 256, got {size}$"):
        Scenes(data_config("scenes", size=size))


def test_boxes_and_map_say_the_same(many):
    for of_size in many.values():
        for image, target in of_size:
            assert image.shape == (1, *target["map"].shape)
            for label in target["labels"].unique():
                boxes = target["boxes"][target["labels"] == label]
                both = torch.cat([boxes[:, :2].amin(0), boxes[:, 2:].amax(0)])
                mask = target["map"] == 1 + label
                assert torch.equal(masks_to_boxes(mask[None])[0] + torch.tensor([0, 0, 1, 1]), both)
            assert not target["crowd"].any()


def test_mask_is_where_its_digit_is_drawn(monkeypatch):
    """Without noise and fragments, on one digit: ink in the mask, none outside but for what is faint."""
    monkeypatch.setattr(module, "NOISE", 0.0)
    monkeypatch.setattr(module, "FRAGMENTS", (0, 0))
    monkeypatch.setattr(module, "DIGITS", (1, 1))
    for seed in range(20):
        picture, numbers, _ = make_scene(DIGITS, LABELS, 64, generator(seed))
        brightest = picture.max()
        assert 0.4 * 255 < brightest <= 255
        assert picture[numbers == 1].min() > 0.25 * 0.9 * brightest > 0
        assert picture[numbers == 0].max() <= 0.25 * 255


def test_digit_is_drawn_upright_at_its_size(monkeypatch):
    """A picture of the digit at the size of its box correlates with the scene, most of all where the box is."""
    monkeypatch.setattr(module, "NOISE", 0.0)
    monkeypatch.setattr(module, "FRAGMENTS", (0, 0))
    monkeypatch.setattr(module, "DIGITS", (1, 1))
    five = (LABELS == 5).nonzero()[0]
    for seed in range(5):
        picture, _, (row,) = make_scene(DIGITS[five], LABELS[five], 64, generator(seed))
        label, left, top, right, bottom = row.tolist()
        assert label == 5
        best = {"score": 0.0}
        for side in range(10, 29):
            digit = functional.interpolate(DIGITS[five], size=(side, side), mode="bilinear", antialias=True)
            scores = functional.conv2d(picture[None, None].float(), digit)[0, 0] / digit.norm()
            if scores.max() > best["score"]:
                place = divmod(int(scores.argmax()), scores.shape[1])
                best = {"score": float(scores.max()), "side": side, "place": place}
        assert best["score"] == pytest.approx(float(picture.float().norm()), rel=1e-3)
        assert best["place"][0] <= top < bottom <= best["place"][0] + best["side"]
        assert best["place"][1] <= left < right <= best["place"][1] + best["side"]


def test_later_digits_cover_earlier_ones_and_none_by_more_than_half(monkeypatch):
    """Another way to the same scene: paint every place that was tried on a canvas of its own, keep it where all see."""
    tried = []
    place = module._place

    def recorded(piece, sides, brightness, canvas, drawn):
        ink, where = place(piece, sides, brightness, canvas, drawn)
        if sides == module.SIDES:
            here = torch.zeros(canvas, canvas, dtype=torch.bool)
            low, high = brightness
            here[where] = ink > 0.25 * (low + drawn[1] * (high - low))
            tried.append(here)
        return ink, where

    monkeypatch.setattr(module, "_place", recorded)
    monkeypatch.setattr(module, "DIGITS", (9, 12))  # crowded
    left_out = 0
    for seed in range(15):
        tried.clear()
        _, numbers, objects = make_scene(DIGITS, LABELS, 64, generator(seed))
        kept: list[torch.Tensor] = []
        for candidate in tried:
            seen = [mask & ~candidate for mask in visible(kept)]
            if all(2 * part.sum() >= whole.sum() for part, whole in zip(seen, kept, strict=True)):
                kept.append(candidate)
        assert torch.equal(numbers, sum(n * mask.to(torch.uint8) for n, mask in enumerate(visible(kept), start=1)))
        assert len(objects) == len(kept)
        left_out += len(tried) - len(kept)
    assert left_out > 0


def visible(painted: list[torch.Tensor]) -> list[torch.Tensor]:
    """What later ones leave of each."""
    left = []
    for number, mask in enumerate(painted):
        for later in painted[number + 1 :]:
            mask = mask & ~later
        left.append(mask)
    return left


def test_canvases_of_all_sizes_have_one_density_and_one_scale(many):
    density, sides, brightness = {}, {}, {}
    for side, of_size in many.items():
        counts = torch.tensor([len(each) for each in of_size.objects], dtype=torch.float64)
        density[side] = float(counts.mean()) * (64 / side) ** 2
        boxes = torch.cat(of_size.objects)[:, 1:].double()
        extents = (boxes[:, 2:] - boxes[:, :2]).max(1).values
        assert extents.max() <= 28
        sides[side] = float(extents.mean())
        brightness[side] = (of_size.inputs / 255).mean(), (of_size.inputs / 255).std()
    assert {1, 2, 3, 4, 5} == {len(each) for each in many[64].objects}
    assert {len(each) for each in many[128].objects} <= set(range(4, 21))
    for side in (128, 200):
        assert density[side] == pytest.approx(density[64], rel=0.25)
        assert sides[side] == pytest.approx(sides[64], rel=0.06)
    for mean, std in brightness.values():
        assert mean == pytest.approx(module.MEAN, rel=0.2)
        assert std == pytest.approx(module.STD, rel=0.2)


def test_digits_are_complete():
    counts = torch.cat(make_scenes(DIGITS, LABELS, 64, range(200)).objects)[:, 0].bincount(minlength=10)
    assert counts.min() > 30


def test_digits_of_both_parts_are_disjoint(monkeypatch):
    train, train_labels, val, val_labels = split_digits(3)
    assert {tuple(x.flatten().tolist()) for x in train}.isdisjoint(tuple(x.flatten().tolist()) for x in val)
    marked = (train, torch.full_like(train_labels, 1), val, torch.full_like(val_labels, 7))
    monkeypatch.setattr(module, "split_digits", lambda seed: marked)
    of_train, of_val = scenes()
    assert set(torch.cat(of_train.objects)[:, 0].tolist()) == {1}
    assert set(torch.cat(of_val.objects)[:, 0].tolist()) == {7}


def test_scene_is_a_function_of_split_seed_part_and_number():
    train, val = scenes()
    more_train, more_val = scenes(train_size=9, val_size=7)
    assert torch.equal(more_train.inputs[:6], train.inputs)
    assert torch.equal(more_val.inputs[:5], val.inputs)
    assert torch.equal(more_val.numbers[:5], val.numbers)
    assert more_val.samples[:5] == val.samples
    other_train, _ = scenes(split_seed=1)
    assert not any(torch.equal(one, other) for one, other in zip(train.inputs, other_train.inputs, strict=True))
    assert not any(torch.equal(one, other) for one in train.inputs for other in val.inputs)
    assert len({scene.numpy().tobytes() for scene in more_train.inputs}) == 9


def test_evaluation_at_another_size_has_scenes_alike_and_as_many():
    data = make_data(data_config("scenes", train_size=6, val_size=5))
    assert isinstance(data, Scenes)
    larger = data.at_size(96)
    assert larger.input_size == (96, 96)
    images, targets = next(iter(larger.val_dataloader()))
    assert len(images) == 5
    assert images[0].shape == (1, 96, 96)
    expected = scenes(size=96)[1]
    assert all(torch.equal(image, expected[index][0]) for index, image in enumerate(images))
    assert all(2 <= len(target["labels"]) <= 11 for target in targets)
    assert (data.input_size, data.counts) == ((64, 64), (6, 5))


def test_scenes_move_to_a_device_whole():
    train, _ = scenes()
    moved = train.to(torch.device("cpu"))
    assert moved.nbytes == train.nbytes > 2 * 6 * 64 * 64
    for one, other in zip(train, moved, strict=True):
        assert torch.equal(one[0], other[0])
        assert torch.equal(one[1]["map"], other[1]["map"])
