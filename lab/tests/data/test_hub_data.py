"""Images by name: `--data hf:NAME_OR_FOLDER` and `--data webdataset:FOLDER`."""

import io
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data_sets import load_data, refused
from miniatures import encoded, imagenet_shards, images, noise, write
from PIL import Image

from torchrope_lab.cli import main
from torchrope_lab.data.data_config import data_config
from torchrope_lab.engine.runs import Run
from torchrope_lab.results import StudyResult
from torchrope_lab.settings.run_config import RunConfig, plain, read_config

datasets = pytest.importorskip("datasets")


@pytest.fixture(autouse=True)
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cache below the test's folder, and no network."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def rows_of(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Cells of images."""
    return [{"bytes": encoded(image, "PNG"), "path": None} for image in noise(count, 40, seed)]


def saved(folder: Path, splits: tuple[str, ...] = ("train", "test"), **columns: Any) -> Path:
    """A folder of save_to_disk with 20 images of two classes in each split."""
    features = {
        "picture": datasets.Image(),
        "kind": datasets.ClassLabel(names=["cat", "dog"]),
        "row": datasets.Value("int64"),
    }
    made = {}
    for seed, split in enumerate(splits):
        rows = {"picture": rows_of(20, seed), "kind": [row % 2 for row in range(20)], "row": list(range(20)), **columns}
        made[split] = datasets.Dataset.from_dict(rows, datasets.Features(features))
    datasets.DatasetDict(made).save_to_disk(str(folder))
    return folder


def saved_with(folder: Path, column: str, kind: Any, values: list[Any]) -> Path:
    """A folder of save_to_disk with an image for each value of a column of classes."""
    features = datasets.Features({"image": datasets.Image(), column: kind})
    rows = {"image": rows_of(len(values)), column: values}
    datasets.Dataset.from_dict(rows, features).save_to_disk(str(folder))
    return folder


load = partial(load_data, size=32, batch_size=8)


def test_saved_folder_is_read_with_columns_and_splits_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path / "pets")
    monkeypatch.chdir(tmp_path)
    data = load("hf:pets", train_size=10, workers=1)
    assert data.counts == (10, 20)
    assert (data.classes, data.name) == (("cat", "dog"), f"hf:{tmp_path / 'pets'}")
    inputs, labels = next(iter(data.train_dataloader()))
    assert (inputs.shape, sorted(labels.unique().tolist())) == ((8, 3, 32, 32), [0, 1])
    val = data.val_dataloader().dataset
    expected = Image.open(io.BytesIO(encoded(noise(20, 40, 1)[7], "PNG")))
    mean = np.asarray(expected).mean(axis=(0, 1)) / 255
    shown = val.raw[7][0].double().mean(dim=(1, 2)) / 255
    torch.testing.assert_close(shown, torch.tensor(mean), atol=0.05, rtol=0)
    assert val[7][1] == 1
    run = RunConfig(data=data.config)
    assert read_config(plain(run)) == run
    assert "/" not in data.slug


@pytest.mark.parametrize("kind", ["saved", "folder"])
def test_a_changed_image_changes_the_fingerprint(tmp_path: Path, kind: str) -> None:
    def changed(folder: Path) -> None:
        if kind == "saved":
            pixels = rows_of(20)
            pixels[3:4] = rows_of(1, 99)
            shutil.rmtree(folder)
            saved(folder, ("train",), picture=pixels)
        else:
            file = min(path for path in folder.rglob("*") if path.is_file())
            file.write_bytes(encoded(noise(1, 40, 99)[0], "PNG"))

    make = {"saved": lambda folder: saved(folder, ("train",)), "folder": images}[kind]
    name = f"hf:{make(tmp_path / 'pets')}"
    first = load(name)
    assert load(name).fingerprint == first.fingerprint
    changed(tmp_path / "pets")
    second = load(name)
    assert [part.samples for part in second._made_datasets()] == [part.samples for part in first._made_datasets()]
    assert second.fingerprint != first.fingerprint


def test_fifth_of_a_single_split_is_held_out_and_folds_are_disjoint(tmp_path: Path) -> None:
    name = f"hf:{saved(tmp_path / 'pets', ('train',))}"
    data = load(name)
    assert data.counts == (16, 4)
    train, val = ({sample for sample, _ in part.samples} for part in data._made_datasets())
    assert train.isdisjoint(val)
    rows = []
    for fold in range(2):
        part = load(name, folds=2, fold=fold)._made_datasets()[1]
        assert all(
            part.rows[index]["row"] == int(sample.rpartition("/")[2]) for index, (sample, _) in enumerate(part.samples)
        )
        rows += part.rows["row"]
    assert sorted(rows) == list(range(20))


def test_examples_that_are_trained_on_are_not_validated(tmp_path: Path) -> None:
    name = f"hf:{saved(tmp_path / 'pets')}"
    train, val = load(name, train_split="test")._made_datasets()
    assert {sample for sample, _ in train.samples}.isdisjoint({sample for sample, _ in val.samples})
    assert (len(train), len(val)) == (16, 4)
    with refused(r"^--data\.val_split must differ from train_split, got 'train' for both$"):
        load(name, val_split="train")


def test_folder_of_images_and_column_of_text(tmp_path: Path) -> None:
    data = load(f"hf:{images(tmp_path / 'pets')}")
    assert data.classes == ("cat", "dog")
    assert data.counts == (40, 10)
    text = saved_with(tmp_path / "text", "kind", TEXT, ["10", "9"] * 4)
    assert load(f"hf:{text}", label="kind").classes == ("9", "10")


def broken(folder: Path) -> None:
    rows = rows_of(20)
    rows[3]["bytes"] = b"no image"
    rows[4] = {"bytes": None, "path": "/dev/null"}
    saved(folder, picture=rows)


def test_unreadable_image_is_skipped_and_listed(tmp_path: Path) -> None:
    broken(tmp_path / "pets")
    data = load(f"hf:{tmp_path / 'pets'}")
    for _ in data.train_dataloader():
        pass
    assert sorted(name for name, _ in data.skipped if name.startswith("train")) == ["train/3", "train/4"]
    with refused(r"at most --data\.max_skipped = 1 images may be unreadable, got 2"):
        for _ in load(f"hf:{tmp_path / 'pets'}", max_skipped=1).train_dataloader():
            pass


def script(folder: Path) -> None:
    write(folder / f"{folder.name}.py", f"open({str(folder / 'ran')!r}, 'w')")


TEXT, NUMBERS = datasets.Value("string"), datasets.Sequence(datasets.Value("int64"))
without_labels = partial(saved, kind=[-1] * 20)
several_labels = partial(saved_with, column="kinds", kind=NUMBERS, values=[[0], [0, 1], [1], []])
empty_label = partial(saved_with, column="kind", kind=TEXT, values=["a", "b", None, "a"])


@pytest.mark.parametrize(
    ("make", "settings", "message"),
    [
        (empty_label, {"label": "kind"}, "column kind of train of hf:.* must have one class in each row, got None$"),
        (
            saved,
            {"label": "colour"},
            r"--data\.label must be one of the columns picture, kind, row of hf:.*, got 'colour'",
        ),
        (saved, {"val_split": "dev"}, r"splits of hf:.* are train, test, got 'dev'"),
        (without_labels, {}, r"column kind of train of hf:.* must have the 2 classes of train, got -1"),
        (
            several_labels,
            {"label": "kinds"},
            r"column kinds of train of hf:.* must have one class in each row, got \[0\]$",
        ),
        (script, {}, r"--data hf:.* cannot be loaded: "),
        (lambda _: None, {}, r"--data hf:.* cannot be loaded: "),
    ],
)
def test_mistake_is_one_line_and_no_code_runs(
    tmp_path: Path, make: Callable[[Path], Any], settings: dict[str, Any], message: str
) -> None:
    make(tmp_path / "pets")
    with refused(f"^{message}"):
        load(f"hf:{tmp_path / 'pets'}", **settings)
    assert not (tmp_path / "pets" / "ran").exists()


def test_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with refused(r"^hf:pets requires datasets \(pip install datasets\), which is not installed"):
        load("hf:pets")


def test_images_are_cropped_and_normalised_as_by_imagenet(tmp_path: Path) -> None:
    for part in ("train", "val"):
        images(tmp_path / "pets" / part)
    of_hub, of_imagenet = load(f"hf:{tmp_path / 'pets'}"), load("imagenet", root=str(tmp_path / "pets"))
    for hub, imagenet in zip(of_hub.val_dataloader(), of_imagenet.val_dataloader(), strict=True):
        assert torch.equal(hub[0], imagenet[0])
        assert torch.equal(hub[1], imagenet[1])


def test_shards_are_read_by_name(tmp_path: Path) -> None:
    data = load(f"webdataset:{imagenet_shards(tmp_path / 'shards')}")
    assert data.counts == (24, 16)
    assert data.num_classes == 4
    assert next(iter(data.train_dataloader()))[0].shape == (8, 3, 32, 32)
    with refused(r"^--data webdataset:https://.* must be a folder of shards, .*download them"):
        load("webdataset:https://example.org/{0..9}.tar")


@pytest.mark.parametrize("kind", [pytest.param("hf", marks=pytest.mark.slow), "webdataset"])
def test_comparison_on_a_folder_ends_with_results(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "a folder" / "pets"
    make = {"hf": saved, "webdataset": imagenet_shards}[kind]
    sizes = ["--data.size=8", "--data.batch_size=8", "--data.train_size=8", "--data.val_size=8"]
    model = ["--model.dim=16", "--model.depth=1", "--model.num_heads=1", "--model.patch_size=[4]", "--epochs=1"]
    few = ["--encodings=none", "--seeds=1", "--scales=[1.0]", f"--out={tmp_path / 'out'}"]
    assert main(["compare", f"--data={kind}:{make(folder)}", *sizes, *model, *few]) == 0
    assert StudyResult.read(tmp_path / "out" / "results.json").findings.tables[0].rows


def test_runs_on_folders_have_names_of_files() -> None:
    configs = [
        RunConfig(encoding="liere:8+axial:base=10", data=data_config(f"hf:/a folder/{'x' * 4000}/{end}"))
        for end in "ab"
    ]
    names = [Run(config).name for config in configs]
    assert all("/" not in name and len(name) < 200 for name in names)
    assert names[0] != names[1]
    assert re.fullmatch(
        r"digits-liere-8-and-axial-base=10-seed0-\w{10}", Run(replace(configs[0], data=data_config())).name
    )
