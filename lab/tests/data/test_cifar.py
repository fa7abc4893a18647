"""Tests of CIFAR-10 and CIFAR-100: folder, archive and download, and rejection of other files."""

import gzip
import os
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from data_sets import refused
from miniatures import CIFAR_FOLDERS as FOLDERS
from miniatures import cifar, cifar_parts
from torchvision import datasets as torchvision_datasets

from torchrope_lab.data.build import make_data
from torchrope_lab.data.cifar import Cifar10, Cifar100
from torchrope_lab.data.data_config import data_config

pytestmark = pytest.mark.usefixtures("published_miniatures")


def load(kind: str, root: Path | None, **options):
    return make_data(data_config(f"cifar{kind}", root=None if root is None else str(root), **options))


def written(kind: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Training images and labels, and validation labels, of the miniature."""
    *train, val = cifar_parts(kind).values()
    pixels = np.concatenate([pixels for pixels, _ in train])
    return torch.from_numpy(pixels), torch.tensor([n for _, labels in train for n in labels]), torch.tensor(val[1])


@pytest.mark.parametrize("kind", ["10", "100"])
@pytest.mark.parametrize("packed", [False, True])
def test_images_and_labels_are_those_of_the_files(tmp_path, kind, packed):
    train, val = load(kind, cifar(tmp_path, kind, packed)).datasets()
    pixels, labels, val_labels = written(kind)
    assert train.inputs.dtype == torch.uint8
    assert torch.equal(train.inputs, pixels)
    assert torch.equal(train.labels, labels)
    assert torch.equal(val.labels, val_labels)
    scaled = pixels.double() / 255
    mean, std = scaled.mean((0, 2, 3), keepdim=True), scaled.std((0, 2, 3), correction=0, keepdim=True)
    everything = train.__getitems__(range(len(train)))[0]
    torch.testing.assert_close(everything, ((scaled - mean) / std).float(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["10", "100"])
def test_root_may_be_the_inner_folder_or_the_archive(tmp_path, kind):
    inner = cifar(tmp_path / "unpacked", kind) / FOLDERS[kind]
    archive = next(cifar(tmp_path / "packed", kind, packed=True).iterdir())
    assert load(kind, inner).counts == load(kind, archive).counts == (40, 20)
    assert [path.name for path in archive.parent.iterdir()] == [archive.name], "nothing is left of what was unpacked"


def test_classes_match_torchvision():
    assert len(set(Cifar100.classes)) == 100
    assert list(Cifar100.classes) == sorted(Cifar100.classes)
    assert (Cifar10.source, Cifar100.source) == (torchvision_datasets.CIFAR10, torchvision_datasets.CIFAR100)


def test_resized_subset_keeps_bytes(tmp_path):
    train, val = load("10", cifar(tmp_path, "10"), size=16, train_size=20, val_size=10).datasets()
    assert train.inputs.shape == (20, 3, 16, 16)
    assert train.inputs.dtype == val.inputs.dtype == torch.uint8
    assert torch.equal(train.labels.bincount(), torch.full((10,), 2))


# Downloads


def test_download_is_verified_and_cached(tmp_path, monkeypatch):
    archive = cifar(tmp_path / "net", "100", packed=True) / "cifar-100-python.tar.gz"
    fetched = []

    def fetch(url, path, **_):
        fetched.append(url)
        shutil.copy(archive, path)

    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("torchvision.datasets.utils._urlretrieve", fetch)
    monkeypatch.setattr("torchvision.datasets.utils._get_redirect_url", lambda url, **_: url)
    assert load("100", None).counts == load("100", None).counts == (40, 20)
    assert fetched == [torchvision_datasets.CIFAR100.url]

    archive.write_bytes(gzip.compress(b"another file"))
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "other"))
    with refused(r"^CIFAR-100 must be downloadable, or --data.root .*not found or corrupted"):
        load("100", None).datasets()


@pytest.mark.parametrize("kind", ["10", "100"])
def test_failed_download_names_files_and_address(tmp_path, monkeypatch, kind):
    def fail(*_, **__):
        raise OSError("no\nnetwork")

    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr("torchvision.datasets.cifar.download_and_extract_archive", fail)
    with refused(rf"{FOLDERS[kind]}/ .*\.tar\.gz.*cs\.toronto\.edu.*got: no network$"):
        load(kind, None).setup()


def test_root_without_files_is_rejected(tmp_path):
    with refused(r"^--data.root must be or hold cifar-10-batches-py/ or cifar-10-python.*, got '"):
        load("10", tmp_path).setup()


# Files that are not the published ones


class Runs:
    """An object whose unpickling calls a function."""

    def __init__(self, function, *arguments):
        self.reduced = function, arguments

    def __reduce__(self):
        return self.reduced


@pytest.mark.parametrize("name", ["train", "test", "meta"])
def test_unknown_pickle_is_not_executed(tmp_path, name):
    mark = tmp_path / "executed"
    content = pickle.dumps(Runs(os.mkdir, str(mark)))
    pickle.loads(content)
    assert mark.exists(), "the test's own pickle is harmless"
    mark.rmdir()
    root = cifar(tmp_path / "data", "100")
    (root / FOLDERS["100"] / name).write_bytes(content)
    with refused(rf"with their MD5 sums, got a missing or different {name}$"):
        load("100", root).setup()
    assert not mark.exists()


@pytest.mark.parametrize("kind", ["10", "100"])
def test_damaged_and_missing_files_are_named(tmp_path, kind):
    folder = cifar(tmp_path, kind) / FOLDERS[kind]
    first, *_, last = sorted(path for path in folder.iterdir() if "meta" not in path.name)
    first.unlink()
    last.write_bytes(last.read_bytes()[:-1])
    named = rf"({first.name}, {last.name}|{last.name}, {first.name})"
    with refused(rf"must hold the files of https://.*missing or different {named}$"):
        load(kind, tmp_path).setup()


def test_incomplete_archive_is_not_unpacked(tmp_path):
    (archive,) = cifar(tmp_path, "100", packed=True).iterdir()
    archive.write_bytes(archive.read_bytes()[:-1])
    with refused(rf"{archive.name} must be .* with the MD5 sum [0-9a-f]+, got another"):
        load("100", tmp_path).setup()
