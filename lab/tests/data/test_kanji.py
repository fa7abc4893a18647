"""Tests of KanjiVG data: labels from components, drawing at any size, and disjoint splits."""

from importlib.metadata import PackageNotFoundError

import numpy as np
import pytest
import torch

from torchrope.models import ViT
from torchrope_lab.data import kanjivg
from torchrope_lab.data.build import make_data
from torchrope_lab.data.config import data_config
from torchrope_lab.data.kanji import SINGLE, layout_of, radical_of
from torchrope_lab.data.kanjivg import CANVAS, Character, draw, draw_all, find_folder, read_character
from torchrope_lab.training.evaluate import correct_at, predict


@pytest.fixture(scope="module")
def by_character() -> dict[str, Character]:
    folder = find_folder(None)
    return {letter: read_character(folder / f"{ord(letter):05x}.svg") for letter in "休国進病一花間"}


@pytest.fixture(scope="module")
def kanji(tmp_path_factory):
    data = make_data(data_config("kanji", train_size=280, val_size=140))
    data.setup()
    return data


def test_character_has_its_strokes_and_components(by_character):
    rest = by_character["休"]  # a person beside a tree
    person, tree = rest.root.parts
    assert len(rest.strokes) == 6
    assert (person.element, person.position, person.radical, person.strokes) == ("亻", "left", "general", (0, 2))
    assert (tree.element, tree.position, tree.strokes) == ("木", "right", (2, 6))


@pytest.mark.parametrize(
    ("letter", "radical", "layout"),
    [
        ("休", "亻", "left-right"),
        ("花", "艹", "top-bottom"),
        ("病", "疒", "from upper left"),
        ("国", "囗", "enclosed"),
        ("一", "一", SINGLE),
    ],
)
def test_classes_are_derived_from_components(by_character, letter, radical, layout):
    assert (radical_of(by_character[letter]), layout_of(by_character[letter])) == (radical, layout)


def test_draw_scales_position_and_width_with_size():
    line = f"M0,{CANVAS / 2}H{CANVAS}"
    for size in (32, 64, 128):
        picture = draw([line], size, stroke_width=CANVAS / 8).double() / 255
        rows = picture[:, size // 2]
        assert rows.sum() == pytest.approx(size / 8, abs=0.02)
        assert (rows * (torch.arange(size) + 0.5)).sum() / rows.sum() == pytest.approx(size / 2, abs=0.01)


def test_draw_at_larger_size_averages_to_the_smaller(by_character):
    strokes = by_character["進"].strokes
    coarse, fine = (draw(strokes, size, 4.0).double() / 255 for size in (32, 128))
    pooled = fine.view(32, 4, 32, 4).mean((1, 3))
    assert (coarse - pooled).abs().mean() < 0.02 < pooled.mean()
    assert not torch.equal(fine, coarse.repeat_interleave(4, 0).repeat_interleave(4, 1))


def test_draw_all_uses_the_cache_unless_damaged(by_character, tmp_path, monkeypatch):
    monkeypatch.setattr(kanjivg, "cache_folder", lambda: tmp_path)
    drawings = [character.strokes for character in by_character.values()]
    first = draw_all(drawings, 16, 4.0)
    (file,) = (tmp_path / "kanji").iterdir()
    with monkeypatch.context() as patched:
        patched.setattr(kanjivg, "draw", lambda *_, **__: pytest.fail("drawn again"))
        assert torch.equal(draw_all(drawings, 16, 4.0), first)
    file.write_bytes(file.read_bytes()[:100])
    assert torch.equal(draw_all(drawings, 16, 4.0), first)
    np.savez(file, pictures=np.zeros((1, 16, 16), np.uint8))  # of something else
    assert torch.equal(draw_all(drawings, 16, 4.0), first)


@pytest.mark.slow
@pytest.mark.parametrize(
    "task", ["strokes", *(pytest.param(task, marks=pytest.mark.slow) for task in ("radical", "layout"))]
)
def test_variants_of_a_character_are_in_the_same_part(task):
    data = make_data(data_config("kanji", task=task, variants=True))
    train, val = data._split
    codes = [{data.characters[index].code for index in part.tolist()} for part in (train, val)]
    assert not codes[0] & codes[1]
    assert len(train) + len(val) == len(data.characters)
    assert 0.15 < len(val) / len(data.characters) < 0.25
    assert {*data.labels[val].tolist()} == {*range(len(data.classes))}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["kanji", "kanji-strokes"])
def test_variants_of_a_character_are_in_the_same_part_for_tuning(name):
    data = make_data(data_config(name, task="strokes", variants=True, tuning=True, train_size=1000, val_size=40))
    train, val = data._made_datasets()
    groups = data.groups(train, val)
    assert {*groups[: len(train)]}.isdisjoint(groups[len(train) :])
    assert len(train) + len(val) == 1000
    assert 150 < len(val) < 300


def test_classes_have_enough_characters(kanji):
    codes = {(character.code, label) for character, label in zip(kanji.characters, kanji.labels.tolist(), strict=True)}
    counts = torch.tensor([label for _, label in codes]).bincount()
    assert len(counts) == len(kanji.classes)
    assert counts.min() >= 60


def test_inputs_are_normalised_by_training_statistics(kanji):
    train, val = kanji._made_datasets()
    inputs = torch.stack([image for image, _ in train])
    assert inputs.shape == (280, 1, 32, 32)
    assert inputs.mean().item() == pytest.approx(0, abs=1e-4)
    assert inputs.std().item() == pytest.approx(1, abs=1e-3)
    assert (val.normalise.mean, val.normalise.std) == (train.normalise.mean, train.normalise.std)


def test_other_sizes_are_drawn_not_resampled(kanji):
    _, val = kanji._made_datasets()
    _, larger = kanji.at_size(64)._made_datasets()
    assert kanji.other_sizes == "drawn"
    assert torch.equal(larger.labels, val.labels)
    strokes = kanji.characters[kanji._split[1][3]].strokes
    assert torch.equal(larger.raw[3][0][0], draw(strokes, 64, 4.0))


def test_evaluation_at_another_size_uses_drawn_images(kanji):
    torch.manual_seed(0)
    model = ViT((32, 32), patch_size=4, in_channels=1, num_outputs=len(kanji.classes), dim=16, depth=1, num_heads=1)
    labels, logits = predict(model, kanji.at_size(64))
    assert correct_at(model, kanji, (2.0,)) == {(64, 64): (logits.argmax(-1) == labels).tolist()}


@pytest.mark.slow
def test_crops_depend_on_seed_and_epoch():
    cropped = make_data(data_config("kanji", train_size=56, val_size=28, augment={"crop_scale": [0.3, 0.5]}))
    cropped.setup()
    first, again, other = cropped.train_dataloader(), cropped.train_dataloader(), None
    images = [torch.cat([inputs for inputs, _ in batches]) for batches in (first, again)]
    assert torch.equal(*images)
    cropped.run_seed = 1
    other = torch.cat([inputs for inputs, _ in cropped.train_dataloader()])
    assert not torch.equal(images[0].sum((1, 2, 3)).sort().values, other.sum((1, 2, 3)).sort().values)
    assert images[0].shape[1:] == (1, 32, 32)
    plain = make_data(data_config("kanji", train_size=56, val_size=28))
    assert torch.equal(
        next(iter(plain.val_dataloader()))[0], next(iter(cropped.val_dataloader()))[0]
    )  # only training is cropped


def test_missing_package_error_names_the_extra(monkeypatch):
    def missing(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(kanjivg, "distribution", missing)
    with pytest.raises(ValueError, match=r"^kanji requires the package kanjivg .*pip install[^\n]*$"):
        make_data(data_config("kanji"))


def test_empty_folder_and_damaged_file_are_rejected(tmp_path):
    with pytest.raises(ValueError, match=r"^--data.root must hold KanjiVG's files[^\n]*$"):
        make_data(data_config("kanji", root=str(tmp_path)))
    for content in ("", "<svg/>", "<svg><g id='kvg:StrokePaths_04e00'/></svg>", "no xml"):
        (tmp_path / "04e00.svg").write_text(content)
        with pytest.raises(ValueError, match=r"^a character must be an SVG file of KanjiVG[^\n]*04e00.svg[^\n]*$"):
            make_data(data_config("kanji", root=str(tmp_path)))
