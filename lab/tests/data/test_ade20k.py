"""Tests of ADE20k and of `segments`: images with masks of class indices."""

import logging
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from data_sets import load_data, refused
from miniatures import MINIATURES, ade20k, encoded, index_mask, picture, png, segments, write
from PIL import Image
from torchvision.transforms import v2

from torchrope_lab.data.boxes_and_maps import FileSet
from torchrope_lab.data.faults import TooManyFaults

BASE = "ADEChallengeData2016"


load = partial(load_data, size=32, batch_size=2)


def parts(name: str, root: Path, **options) -> tuple[FileSet, FileSet]:
    return load(name, root, **options)._made_datasets()


# ADE20k


@pytest.mark.parametrize("inner", ["", BASE])
def test_maps_of_validation_have_the_files_indices_from_0(tmp_path, inner):
    data = load("ade20k", ade20k(tmp_path) / inner)
    assert data.counts == (5, 3)
    for _, target in data._made_datasets()[1]:
        file = str(data.root / target["name"])
        indices = np.asarray(Image.open(file.replace("images", "annotations").replace(".jpg", ".png"))).astype(int)
        assert target["map"].tolist() == np.where(indices == 0, 255, indices - 1).tolist()


@pytest.mark.parametrize("name", ["ade20k", "segments"])
@pytest.mark.parametrize(  # with mmcv's rounding: 512 · 1024 / 768 = 682.7; at most 2048
    ("file", "shown"), [((256, 256), (512, 512)), ((768, 1024), (512, 683)), ((800, 100), (2048, 256))]
)
def test_validation_resizes_images_to_a_shorter_side_of_512_and_keeps_maps(tmp_path, name, file, shown):
    root = MINIATURES[name](tmp_path)
    image, mask = (
        next(root.glob(f"**/{folder}/val*/*1.{kind}")) for folder, kind in (("images", "jpg"), ("[am]*s", "png"))
    )
    pixels, indices = picture(*file, 1), index_mask(*file, 3, 1)
    write(image, encoded(pixels, "PNG"))
    write(mask, png(indices))
    val = parts(name, root, size=512)[1]
    found, target = next(val[at] for at, (path, _) in enumerate(val.samples) if path.endswith(image.name))
    assert target["map"].shape == file
    scaled = v2.functional.resize(torch.from_numpy(pixels), shown, antialias=True) / 255
    expected = v2.functional.normalize(scaled, [0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
    torch.testing.assert_close(found, expected)


def test_class_names_are_first_synonyms(tmp_path):
    data = load("ade20k", ade20k(tmp_path))
    assert data.map_classes == data.classes == tuple(f"thing{index}" for index in range(1, 151))
    table = tmp_path / BASE / "objectInfo150.txt"
    table.write_text(table.read_text().replace("thing7,", "thing6,"))
    assert load("ade20k", tmp_path).classes[4:8] == ("thing5", "thing6, object6", "thing6, object7", "thing8")


def test_training_scales_images_by_half_to_two_and_crops(tmp_path):
    train, _ = parts("ade20k", ade20k(tmp_path), size=24)
    sizes = {tuple(image.shape[1:]) for seed in range(8) for image, _ in train.of_epoch(seed)}
    assert all(max(size) <= 24 for size in sizes)
    assert (24, 24) in sizes
    assert min(min(size) for size in sizes) < 18
    steady, _ = parts("ade20k", tmp_path, size=24, augment={"scale_jitter": (1.0, 1.0)})
    assert {tuple(image.shape[1:]) for image, _ in steady.of_epoch(3)} == {(24, 24)}


TRAIN = "training/ADE_train_00000002"
DAMAGE = {
    "another size": (png(index_mask(30, 20, 9, 1)), "its mask must have the size of the image, 72x56 .* got 20x30"),
    "beyond": (png(np.full((56, 72), 151, np.uint8)), "indices in its mask must be between 0 and 150, got 151"),
    "in colour": (
        encoded(picture(56, 72, 1), "PNG"),
        "a mask must have a palette or one grey channel of 8 bits, got RGB",
    ),
    "no mask at all": (b"nothing", "cannot identify image file"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_mask_is_skipped_with_warning_or_raises(tmp_path, caplog, damage):
    content, message = DAMAGE[damage]
    base = ade20k(tmp_path) / BASE
    write(base / "annotations" / f"{TRAIN}.png", content)
    data = load("ade20k", tmp_path)
    with caplog.at_level(logging.WARNING):
        names = [Path(target["name"]).stem[-1] for _, target in data._made_datasets()[0]]
    assert names == ["1", "3", "3", "4", "5"]
    assert len(caplog.messages) == 1
    assert f"images/{TRAIN}.jpg" in caplog.messages[0]
    with refused(rf"got 1: images/{TRAIN}.jpg \({message}", TooManyFaults):
        list(load("ade20k", tmp_path, max_skipped=0)._made_datasets()[0])


def test_damaged_image_is_skipped_and_listed(tmp_path):
    base = ade20k(tmp_path) / BASE
    file = base / "images" / f"{TRAIN}.jpg"
    file.write_bytes(file.read_bytes()[:500])
    data = load("ade20k", tmp_path)
    assert len(list(data._made_datasets()[0])) == 5
    assert data.skipped == [(f"images/{TRAIN}.jpg", "truncated")]


@pytest.mark.parametrize(
    ("file", "message"),
    [
        (f"images/{TRAIN}.jpg", rf"annotations/{TRAIN}.png \(no image of this name\)"),
        (f"annotations/{TRAIN}.png", rf"images/{TRAIN}.jpg \(no mask of this name\)"),
    ],
)
def test_file_without_counterpart_is_skipped_or_raises(tmp_path, caplog, file, message):
    (ade20k(tmp_path) / BASE / file).unlink()
    with caplog.at_level(logging.WARNING):
        data = load("ade20k", tmp_path)
    assert data.counts == (4, 3)
    assert len(caplog.messages) == 1
    with refused(f"--data.max_skipped = 0 .* got 1: {message}", TooManyFaults):
        load("ade20k", tmp_path, max_skipped=0)


# Segments from folders


@pytest.mark.parametrize("palette", [False, True])
@pytest.mark.parametrize("named", [False, True])
def test_masks_with_palette_or_grey_give_class_indices(tmp_path, palette, named):
    segments(tmp_path, palette=palette)
    if named:
        write(tmp_path / "classes.txt", "road\nsky\ntree\nhouse\n\n")
    data = load("segments", tmp_path)
    assert data.map_classes == data.classes == (("road", "sky", "tree", "house") if named else ("0", "1", "2"))
    assert data.counts == (5, 4)
    for index, (_, target) in enumerate(data._made_datasets()[1]):
        expected = torch.from_numpy(index_mask(48, 40 + 8 * index, 3, 10 + index)).long()
        expected[:4, :4] = 255
        assert torch.equal(target["map"], expected)


@pytest.mark.parametrize("layout", [(), ("",), ("train",)])
def test_segments_without_val_hold_out_a_fifth(tmp_path, layout):
    segments(tmp_path, parts=layout or ("",))
    train, val = parts("segments", tmp_path)
    assert (len(train), len(val)) == (4, 1)
    assert set(train.samples).isdisjoint(val.samples)
    assert parts("segments", tmp_path)[1].samples == val.samples
    others = {tuple(parts("segments", tmp_path, split_seed=seed)[1].samples) for seed in range(5)}
    assert len(others) > 1


def test_segments_with_parts_of_other_names_are_refused(tmp_path):
    segments(tmp_path, parts=("training", "validation"))
    with refused(r"^parts must be called train and val, got training, validation in"):
        load("segments", tmp_path)


def test_images_in_nested_folders_are_paired_with_masks(tmp_path):
    for place in ("train/a", "train/b", "val/a"):
        write(tmp_path / "images" / place / "x.jpg", encoded(picture(20, 24, 1)))
        write(tmp_path / "masks" / place / "x.png", png(index_mask(20, 24, 3, 1)))
    train, _ = parts("segments", tmp_path)
    assert train.samples == [(f"images/train/{n}/x.jpg", f"masks/train/{n}/x.png") for n in "ab"]


def test_unread_files_are_named_in_warning(tmp_path, caplog):
    root = segments(tmp_path)
    (root / "masks" / "train" / "notes.txt").write_text("not looked at")
    load("segments", root)
    assert caplog.messages == [
        "1 .txt not read because they are not images, masks (.png) or classes.txt: masks/train/notes.txt"
    ]


def test_unreadable_mask_is_skipped_when_counting_classes(tmp_path, caplog):
    segments(tmp_path)
    write(tmp_path / "masks/train/scene1.png", b"nothing")
    with caplog.at_level(logging.WARNING):
        data = load("segments", tmp_path)
    assert data.counts == (4, 4)
    assert len(caplog.messages) == 1
    assert "masks/train/scene1.png (cannot identify" in caplog.messages[0]


def test_image_is_rotated_by_exif_to_match_its_mask(tmp_path):
    """Cameras store the orientation in EXIF; annotators draw masks on the rotated image."""
    stored, upright = picture(20, 30, 1), index_mask(30, 20, 3, 1)
    for part in ("train", "val"):
        exif = Image.Exif()
        exif[0x0112] = 6
        (tmp_path / "images" / part).mkdir(parents=True)
        Image.fromarray(stored.transpose(1, 2, 0)).save(tmp_path / "images" / part / "a.jpg", exif=exif)
        write(tmp_path / "masks" / part / "a.png", png(upright))
    image, target = parts("segments", tmp_path, size=20)[1][0]
    assert image.shape == (3, 30, 20)
    assert target["map"].shape == (30, 20)


def without_objects(root: Path) -> None:
    for file in root.rglob("*.png"):
        write(file, png(np.where(np.eye(48, dtype=bool), 255, 0).astype(np.uint8)))


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (without_objects, r"^masks must have indices of at least two classes \(255 is unlabelled\), got only 0 in"),
        (
            lambda root: [without_objects(root), write(root / "classes.txt", "road\nsky\n")],
            r"^masks must have indices of at least two classes \(255 is unlabelled\), got only 0 in",
        ),
        (
            lambda root: [file.unlink() for file in (root / "masks/val").iterdir()],
            r"^images must have masks \(.png\) of the same names, found 0 in '.*/val': images/val/scene0.jpg \(no",
        ),
    ],
)
def test_masks_without_objects_or_files_are_refused(tmp_path, edit, message):
    edit(segments(tmp_path))
    with refused(message):
        load("segments", tmp_path)


def test_mask_index_above_named_classes_raises(tmp_path):
    segments(tmp_path)
    write(tmp_path / "classes.txt", "road\nsky\n")
    with refused(r"images/train/scene\d.jpg \(indices in its mask must be between 0 and 1, got 2", TooManyFaults):
        list(load("segments", tmp_path, max_skipped=0)._made_datasets()[0])
