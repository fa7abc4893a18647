"""Tests of COCO's format: agreement with pycocotools, and one-line errors for invalid files."""

import contextlib
import copy
import io
import json
import logging
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from data_sets import load_data, refused
from miniatures import COCO_CATEGORIES, coco, encoded, picture, write
from PIL import Image
from pycocotools.coco import COCO

from torchrope_lab.data.boxes_and_maps import FileSet
from torchrope_lab.data.faults import TooManyFaults

TRAIN = "annotations/instances_train2017.json"
VAL = "annotations/instances_val2017.json"


load = partial(load_data, "coco", size=32, batch_size=2)


def sets(root: Path, **options) -> tuple[FileSet, FileSet]:
    return load(root, **options)._made_datasets()


def change(root: Path, file: str, edit) -> None:
    content = json.loads((root / file).read_text())
    edit(content)
    write(root / file, json.dumps(content))


def api(root: Path, file: str = VAL) -> COCO:
    with contextlib.redirect_stdout(io.StringIO()):
        return COCO(root / file)


# Agreement with pycocotools


@pytest.mark.parametrize("file", [TRAIN, VAL])
def test_boxes_and_labels_match_pycocotools(tmp_path, file):
    root, oracle = coco(tmp_path), api(coco(tmp_path), file)
    dataset = sets(root)[file == VAL]
    ids = sorted(oracle.cats)
    seen = 0
    for index in range(len(dataset)):
        image, target = dataset.load(index)
        entry = oracle.imgs[int(Path(target["name"]).stem)]
        assert image.shape == (3, entry["height"], entry["width"])
        annotations = oracle.loadAnns(oracle.getAnnIds(entry["id"]))
        annotations = [one for one in annotations if file == VAL or not one["iscrowd"]]
        assert target["crowd"].tolist() == [bool(one["iscrowd"]) for one in annotations]
        assert target["labels"].tolist() == [ids.index(one["category_id"]) for one in annotations]
        for one, box in zip(annotations, target["boxes"], strict=True):
            left, top, wide, high = one["bbox"]
            torch.testing.assert_close(box, torch.tensor([left, top, left + wide, top + high]).float())
            seen += 1
    assert seen == {TRAIN: 11, VAL: 7}[file]


def test_labels_are_contiguous(tmp_path):
    data = load(coco(tmp_path))
    assert data.classes == tuple(COCO_CATEGORIES.values())
    assert data.tasks == ("detect",)
    assert data.map_classes == ()


# Training and validation


def test_crowds_and_empty_images_are_in_validation_only(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        data = load(coco(tmp_path))
    assert caplog.messages == []
    train, val = data._made_datasets()
    assert [Path(name).stem[-2:] for name, _ in train.samples] == ["01", "02", "03", "05", "06"]
    assert not any(target["crowd"].any() for _, target in train)
    assert [len(target["labels"]) for _, target in val] == [1, 3, 0, 3]
    assert [int(target["crowd"].sum()) for _, target in val] == [0, 1, 0, 0]


def test_resize_sets_shorter_side_and_bounds_longer_side(tmp_path):
    root = coco(tmp_path)
    write(root / "val2017" / "wide.jpg", encoded(picture(20, 100, 1)))
    box = {"bbox": [50, 5, 40, 10]}

    def add(content):
        content["images"].append({"id": 99, "file_name": "wide.jpg", "height": 20, "width": 100})
        content["annotations"].append({"id": 5, "image_id": 99, "category_id": 1, "iscrowd": 0, **box})

    change(root, VAL, add)
    for dataset in sets(root, size=30):
        shapes = {tuple(image.shape[1:]) for image, _ in dataset}
        assert all(min(shape) == 30 or max(shape) == 50 for shape in shapes)
    image, target = sets(root, size=30)[1][-1 + 5]
    assert image.shape == (3, 10, 50)
    torch.testing.assert_close(target["boxes"], torch.tensor([[25.0, 2.5, 45.0, 7.5]]))


def test_pixels_are_normalised_by_imagenet_statistics(tmp_path):
    (train, _), root = sets(coco(tmp_path), size=48), tmp_path
    image, target = train[[path for path, _ in train.samples].index("train2017/000000000005.jpg")]
    pixels = np.asarray(Image.open(root / target["name"]).convert("RGB"), np.float32) / 255
    expected = (pixels - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225]
    torch.testing.assert_close(image, torch.from_numpy(expected).float().permute(2, 0, 1), atol=1e-5, rtol=1e-5)


# Layouts


def test_other_file_names_and_one_image_folder_are_read(tmp_path):
    root = coco(tmp_path / "standard")
    for part in ("train", "val"):
        content = (root / "annotations" / f"instances_{part}2017.json").read_text()
        write(tmp_path / "own" / "annotations" / f"cars_{part}.json", content)
        for file in (root / f"{part}2017").iterdir():
            write(tmp_path / "own" / "images" / file.name, file.read_bytes())
    assert load(tmp_path / "own").counts == load(root).counts == (5, 4)


def test_coco_without_val_holds_out_a_fifth(tmp_path):
    root = coco(tmp_path)
    (root / VAL).unlink()
    (root / "annotations" / "captions_val2017.json").unlink()
    train, val = sets(root)
    assert len(val) == 1
    assert len(train) + len(val) in (5, 6)  # the empty image is in one of them
    assert {name for name, _ in train.samples}.isdisjoint(name for name, _ in val.samples)
    assert sets(root)[1].samples == val.samples


def test_file_of_train_and_val_is_for_training_and_a_fifth_is_held_out(tmp_path):
    root = coco(tmp_path)
    for file in (root / "annotations").glob("*val*"):
        file.unlink()
    (root / TRAIN).rename(root / "annotations" / "instances_trainval.json")
    (root / "train2017").rename(root / "images")
    train, val = sets(root)
    assert (len(train), len(val)) == (4, 1)
    assert {name for name, _ in train.samples}.isdisjoint(name for name, _ in val.samples)


def test_image_of_both_parts_is_refused(tmp_path):
    root = coco(tmp_path)
    write(root / VAL, (root / TRAIN).read_bytes())
    (root / "val2017").rename(root / "old")
    (root / "train2017").rename(root / "images")
    with refused(r"^an image must be in train or in val, got 'images/.*' and 5 more in both$"):
        load(root)


def test_annotations_need_no_segmentation(tmp_path):
    root = coco(tmp_path)
    whole = sets(root)
    for file in (TRAIN, VAL):
        change(root, file, lambda content: [one.pop("segmentation") for one in content["annotations"]])
    for before, after in zip(whole, sets(root), strict=True):
        assert [target["labels"].tolist() for _, target in after] == [target["labels"].tolist() for _, target in before]


# Faults


def first(content: dict) -> dict:
    return content["annotations"][0]


FAULTS = {
    "category": (lambda one: one.update(category_id=77), "category_id must be the id of a category, got 77"),
    "no category": (lambda one: one.pop("category_id"), "no 'category_id'"),
    "no box": (lambda one: one.pop("bbox"), "no 'bbox'"),
    "not a number": (lambda one: one.update(bbox=[1, float("nan"), 3, 4]), "bbox must have an area in the image"),
    "no area": (lambda one: one.update(bbox=[3, 4, 0, 5]), "bbox must have an area in the image"),
    "negative": (lambda one: one.update(bbox=[30, 40, -8, 5]), "bbox must have an area in the image"),
    "outside": (
        lambda one: one.update(bbox=[70, 4, 9, 5]),
        r"bbox must have an area in the image of 64x48 pixels, got \[70, 4,",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_invalid_annotation_is_skipped_with_warning_or_raises(tmp_path, caplog, fault):
    edit, message = FAULTS[fault]
    root = coco(tmp_path)
    expected = [target["labels"].tolist() for _, target in sets(root)[0]]
    change(root, TRAIN, lambda content: edit(first(content)))
    with caplog.at_level(logging.WARNING):
        data = load(root)
    (warning,) = caplog.messages
    named = "train2017/000000000001.jpg annotation 100"
    assert warning.startswith(f"skipped 1 of 30 images and annotations: {named} (")
    assert [name for name, _ in data.skipped] == [named]
    labels = [target["labels"].tolist() for _, target in data._made_datasets()[0]]
    assert labels == [expected[0][1:], *expected[1:]]
    with refused(rf"^at most --data.max_skipped = 0 .* got 1: {named} \({message}", TooManyFaults):
        load(root, max_skipped=0)


def test_box_is_clipped_to_the_image(tmp_path):
    root = coco(tmp_path)
    change(root, TRAIN, lambda content: first(content).update(bbox=[-4, 30, 20, 90]))
    dataset = sets(root)[0]
    assert load(root).skipped == []
    assert dataset.load(0)[1]["boxes"][0].tolist() == [0, 30, 16, 48]


IMAGES = {
    "missing": (lambda root, content: (root / "train2017/000000000001.jpg").unlink(), r"000000000001.jpg \(missing\)"),
    "unlisted": (
        lambda root, content: content["annotations"][0].update(image_id=4711),
        r"instances_train2017.json annotation 100 \(image_id must be the id of a listed image, got 4711\)",
    ),
    "twice": (
        lambda root, content: content["images"].append(copy.copy(content["images"][0])),
        r"000000000001.jpg \(image 1 is listed twice\)",
    ),
    "no size": (lambda root, content: content["images"][0].pop("height"), r"jpg \(no 'height'\)"),
    "no name": (lambda root, content: content["images"][0].pop("file_name"), r"json \(no 'file_name'\)"),
}


@pytest.mark.parametrize("fault", IMAGES)
def test_invalid_image_is_skipped_with_warning_or_raises(tmp_path, caplog, fault):
    edit, message = IMAGES[fault]
    root = coco(tmp_path)
    change(root, TRAIN, lambda content: edit(root, content))
    with caplog.at_level(logging.WARNING):
        data = load(root)
    assert len(caplog.messages) == 1
    assert data.counts[0] == (5 if fault in ("unlisted", "twice") else 4)
    with refused(message, TooManyFaults):
        load(root, max_skipped=0)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff\xd8 no picture", r"000000000002.jpg \((cannot identify|broken|truncated)"),
        (
            encoded(picture(48, 64, 1)),
            r"000000000002.jpg \(an image must have the size in its annotations, 48x64 pixels, got",
        ),
    ],
)
def test_unreadable_image_is_replaced_by_the_next(tmp_path, caplog, content, message):
    root = coco(tmp_path)
    write(root / "train2017/000000000002.jpg", content)
    data = load(root)
    with caplog.at_level(logging.WARNING):
        names = [target["name"][-6:] for _, target in data._made_datasets()[0]]
    assert names == ["01.jpg", "03.jpg", "03.jpg", "05.jpg", "06.jpg"]
    assert len(data.skipped) == 1
    assert len(caplog.messages) == 1
    with refused(message, TooManyFaults):
        list(load(root, max_skipped=0)._made_datasets()[0])


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda root: change(root, TRAIN, lambda c: c.pop("categories")), "train2017.json: no 'categories'$"),
        (
            lambda root: change(root, VAL, lambda c: c["categories"][1].update(name="bus")),
            "^categories of val must be those of train, got 3 'bus' instead of 'car'$",
        ),
        (
            lambda root: change(root, TRAIN, lambda c: c["categories"].append({"id": 3, "name": "bus"})),
            "^ids of categories must be different integers, which those of instances_train2017.json are not$",
        ),
        (
            lambda root: change(root, TRAIN, lambda c: c.update(annotations=[])),
            "^--data.root must hold images with objects to train on and images to validate on, got 0 and 4$",
        ),
    ],
)
def test_coco_rejects_other_formats(tmp_path, edit, message):
    root = coco(tmp_path)
    edit(root)
    with refused(message):
        load(root)


def test_folder_without_annotations_is_refused(tmp_path):
    with refused(r"^--data.root must hold annotations/.*; got none for train in '.*'$"):
        load(tmp_path)
