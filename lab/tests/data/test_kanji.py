"""Tests of examples/sources.py: labels from parts, drawing at any size, points along strokes, and disjoint splits."""

import pickle
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from data_sets import refused

from torchrope_lab.data.build import make_data
from torchrope_lab.data.data_config import data_config
from torchrope_lab.modules import load_module, loaded_module

FILE = Path(__file__).parents[3] / "examples/sources.py"
load_module(f"{FILE}:radicals")
sources: ModuleType = loaded_module(f"{FILE}:radicals")


@pytest.fixture(scope="module")
def by_character() -> dict[str, sources.Character]:
    characters = sources.read_characters()
    return {letter: characters[ord(letter)] for letter in "休国進病一花間"}


@pytest.mark.parametrize(
    ("letter", "radical", "layout"),
    [
        ("休", "亻", "left-right"),
        ("花", "艹", "top-bottom"),
        ("病", "疒", "from upper left"),
        ("国", "囗", "enclosed"),
        ("一", "一", sources.SINGLE),
    ],
)
def test_classes_are_derived_from_parts(by_character, letter, radical, layout):
    assert (sources.radical_of(by_character[letter]), sources.layout_of(by_character[letter])) == (radical, layout)


def test_draw_scales_position_and_width_with_size():
    line = f"M0,{sources.CANVAS / 2}H{sources.CANVAS}"
    for size in (32, 64, 128):
        picture = sources.draw([line], size, stroke_width=sources.CANVAS / 8).double() / 255
        rows = picture[:, size // 2]
        assert rows.sum() == pytest.approx(size / 8, abs=0.02)
        assert (rows * (torch.arange(size) + 0.5)).sum() / rows.sum() == pytest.approx(size / 2, abs=0.01)


def test_draw_at_larger_size_averages_to_the_smaller(by_character):
    strokes = sources.strokes_of(by_character["進"])
    coarse, fine = (sources.draw(strokes, size, 4.0).double() / 255 for size in (32, 128))
    pooled = fine.view(32, 4, 32, 4).mean((1, 3))
    assert (coarse - pooled).abs().mean() < 0.02 < pooled.mean()
    assert not torch.equal(fine, coarse.repeat_interleave(4, 0).repeat_interleave(4, 1))


@pytest.mark.parametrize("class_of", [sources.radical_of, pytest.param(sources.layout_of, marks=pytest.mark.slow)])
def test_characters_are_in_one_part_and_classes_in_both(class_of):
    characters, labels, classes = sources.characters_by(class_of)
    train, val = sources.split(labels, 0)
    assert sorted([*train.tolist(), *val.tolist()]) == [*range(len(characters))]
    assert 0.15 < len(val) / len(characters) < 0.25
    assert {*labels[val].tolist()} == {*labels[train].tolist()} == {*range(len(classes))}
    assert labels.bincount().min() >= sources.MIN_CHARACTERS


@pytest.mark.slow
def test_images_are_rendered_at_the_size_that_is_set():
    data = make_data(data_config(f"{FILE}:radicals", size=24, train_size=56, val_size=28))
    train, val = data._made_datasets()
    assert (len(train), len(val), len(data.classes)) == (56, 28, 28)
    assert data.slug == "sources-radicals"
    assert data.input_size == (24, 24)
    characters, labels, _ = sources.characters_by(sources.radical_of)
    held_out = sources.split(labels, 0)[1]
    drawn = sources.draw(sources.strokes_of(characters[held_out[0]]), 24, 4.0)
    images, targets = sources.radicals(size=24)["val"].tensors
    assert torch.equal((images[0, 0] * sources.STD + sources.MEAN).mul(255).round().to(torch.uint8), drawn)
    assert targets[0] == labels[held_out[0]]
    assert pickle.loads(pickle.dumps(data.config)) == data.config


@pytest.mark.slow
def test_strokes_are_points_in_writing_order():
    data = make_data(data_config(f"{FILE}:strokes", size=48, train_size=56, val_size=28))
    train, _ = data._made_datasets()
    assert (data.axes, data.features) == (("t", "x", "y"), ("vx", "vy"))
    for cloud in train.clouds:
        assert cloud.positions.min(0).values.tolist() == [0, 0, 0]
        assert cloud.positions[:, 1:].max() <= sources.CANVAS
        assert (cloud.positions[1:, 0] >= cloud.positions[:-1, 0]).all()
        torch.testing.assert_close(cloud.features.norm(dim=1), torch.ones(len(cloud.features)))


def test_missing_package_error_names_it(monkeypatch):
    def missing(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(sources, "distribution", missing)
    with refused(r"^kanji require the package kanjivg .*pip install[^\n]*$"):
        sources.read_characters.__wrapped__()


def test_points_follow_a_stroke_and_time_goes_on_between_strokes() -> None:
    line, other = "M0,0C10,0,20,0,30,0", "M30,40c0,5,0,10,0,20"
    places, directions = sources.points_along((line, other), 10.0)
    np.testing.assert_allclose(places[:4], [[0, 0, 0], [10, 10, 0], [20, 20, 0], [30, 30, 0]], atol=0.3)
    np.testing.assert_allclose(places[4:], [[70, 30, 40], [80, 30, 50], [90, 30, 60]], atol=0.3)
    np.testing.assert_allclose(directions[:4], [[1, 0]] * 4, atol=1e-6)
    np.testing.assert_allclose(directions[4:], [[0, 1]] * 3, atol=1e-6)


def test_paths_are_those_of_svg() -> None:
    assert sources.curves("M1,2C3,4 5,6 7,8S9,10 11,12") == sources.curves("m1,2c2,2,4,4,6,6s2,2,4,4")
    (_, mirrored, *_) = sources.curves("M0,0C1,1,2,3,4,4S9,9,10,10")[1]
    assert mirrored == (6, 5)
    assert sources.curves("M0,0C1e1,.5-2-3,4,5")[0] == [(0, 0), (10, 0.5), (-2, -3), (4, 5)]
    for path in ("", "M0,0", "M0,0L1,1", "M0,0C1,2,3", "C", "M,"):
        with refused("got"):
            sources.curves(path)


def test_stroke_of_no_length_is_two_points_without_direction() -> None:
    places, directions = sources.points_along(("M5,5c0,0,0,0,0,0",), 10.0)
    assert places.tolist() == [[0, 5, 5]] * 2
    assert directions.tolist() == [[0, 0]] * 2
