"""CIFAR-10 and CIFAR-100: every way that they come in, pickles that are not run, and what is said of damage."""

import gzip
import hashlib
import pickle
import shutil
import struct
import tarfile
import tracemalloc
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from miniatures import cifar, cifar_contents, cifar_parts
from torchvision import datasets as torchvision_datasets
from training_path import train_two_steps

from torchrope.lab.data import cifar as module
from torchrope.lab.data.build import make_data
from torchrope.lab.data.cifar import Cifar10, Cifar100, read_python
from torchrope.lab.data.config import data_config
from torchrope.lab.data.pickles import read_arrays

FOLDERS = {"10": "cifar-10-batches-py", "100": "cifar-100-python"}


def load(kind: str, root: Path | None, **options):
    return make_data(data_config(f"cifar{kind}", root=None if root is None else str(root), **options))


def written(kind: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Training pictures and labels, and validation labels, as the miniature has them."""
    *train, val = cifar_parts(kind).values()
    pixels = np.concatenate([pixels for pixels, _ in train])
    return torch.from_numpy(pixels), torch.tensor([n for _, labels in train for n in labels]), torch.tensor(val[1])


@pytest.mark.parametrize("kind", ["10", "100"])
@pytest.mark.parametrize("binary", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_every_version_gives_the_same_pictures(tmp_path, kind, binary, packed):
    train, val = load(kind, cifar(tmp_path, kind, binary, packed)).datasets()
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
def test_the_root_may_be_the_folder_or_the_archive_itself(tmp_path, kind):
    inner = cifar(tmp_path / "unpacked", kind) / FOLDERS[kind]
    archive = next(cifar(tmp_path / "packed", kind, packed=True).iterdir())
    assert load(kind, inner).counts == load(kind, archive).counts == (40, 20)


def test_facts_agree_with_torchvision():
    for ours, theirs in ((Cifar10, torchvision_datasets.CIFAR10), (Cifar100, torchvision_datasets.CIFAR100)):
        assert (ours.archives[0], ours.md5) == (theirs.filename, theirs.tgz_md5)
        assert f"{module.ADDRESS}/{ours.archives[0]}" == theirs.url
        assert ours.folders[0] == theirs.base_folder
        assert list(ours.train_files) == [name for name, _ in theirs.train_list]
        assert list(ours.val_files) == [name for name, _ in theirs.test_list]
    assert len(set(Cifar100.classes)) == 100
    assert list(Cifar100.classes) == sorted(Cifar100.classes)


def test_another_size_and_a_part_are_made_of_bytes(tmp_path):
    train, val = load("10", cifar(tmp_path, "10"), size=16, train_size=20, val_size=10).datasets()
    assert train.inputs.shape == (20, 3, 16, 16)
    assert train.inputs.dtype == val.inputs.dtype == torch.uint8
    assert torch.equal(train.labels.bincount(), torch.full((10,), 2))


# Downloads


def test_a_download_is_checked_kept_and_read(tmp_path, monkeypatch):
    content = cifar(tmp_path / "net", "100", packed=True) / "cifar-100-python.tar.gz"
    calls = []

    def fetch(address, root, filename, md5):
        calls.append((address, md5))
        Path(root).mkdir(parents=True)
        shutil.copy(content, Path(root) / filename)

    monkeypatch.setattr(module, "cache_folder", lambda: tmp_path / "cache")
    monkeypatch.setattr("torchvision.datasets.utils.download_url", fetch)
    assert load("100", None).counts == load("100", None).counts == (40, 20)
    assert calls == [(torchvision_datasets.CIFAR100.url, torchvision_datasets.CIFAR100.tgz_md5)]


def test_a_download_with_another_checksum_is_refused(tmp_path, monkeypatch):
    archive = cifar(tmp_path / "net", "100", packed=True) / "cifar-100-python.tar.gz"
    monkeypatch.setattr(module, "cache_folder", lambda: tmp_path / "cache")
    monkeypatch.setattr(
        "torchvision.datasets.utils._urlretrieve", lambda url, path, **_: shutil.copy(archive, path), raising=True
    )
    monkeypatch.setattr("torchvision.datasets.utils._get_redirect_url", lambda url, **_: url)
    with pytest.raises(
        ValueError, match=r"^CIFAR-100 must be downloadable, or root must be or hold .*not found or cor"
    ):
        load("100", None).datasets()
    md5 = hashlib.md5(archive.read_bytes(), usedforsecurity=False).hexdigest()
    monkeypatch.setattr(Cifar100, "md5", md5)
    assert load("100", None).counts == (40, 20)


@pytest.mark.parametrize("kind", ["10", "100"])
def test_offline_one_line_says_what_is_expected_where_and_whence(tmp_path, monkeypatch, kind):
    def fail(*_):
        raise OSError("no\nnetwork")

    monkeypatch.setattr(module, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr("torchvision.datasets.utils.download_url", fail)
    with pytest.raises(ValueError, match=rf"{FOLDERS[kind]}/ .*\.tar\.gz.*cs\.toronto\.edu.*got: no network$") as error:
        load(kind, None).setup()
    assert "\n" not in str(error.value)


def test_a_root_without_the_files_is_refused(tmp_path):
    cifar(tmp_path, "10")
    (tmp_path / FOLDERS["10"] / "data_batch_3").unlink()
    with pytest.raises(ValueError, match=r"^root must be or hold cifar-10-batches-py/ \(data_batch_1, .* got '"):
        load("10", tmp_path).setup()


# Pickles, which are not run


def short(text: bytes) -> bytes:
    return b"U" + bytes([len(text)]) + text


def python2_pickle(pixels: np.ndarray, labels: list[int], core: str = "core") -> bytes:
    """What Python 2's cPickle wrote for numpy 1, by hand: byte strings, numpy.core, the dtype with its state."""
    rows, columns = pixels.shape
    make = f"cnumpy.{core}.multiarray\n_reconstruct\n".encode() + b"cnumpy\nndarray\n"
    kind = b"cnumpy\ndtype\n" + short(b"u1") + b"K\x00K\x01\x87R(K\x03" + short(b"|") + b"NNN"
    kind += b"J\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    shape = b"M" + struct.pack("<H", rows) + b"M" + struct.pack("<H", columns) + b"\x86"
    content = b"T" + struct.pack("<I", pixels.size) + pixels.tobytes()
    array = make + b"K\x00\x85" + short(b"b") + b"\x87R(K\x01" + shape + kind + b"\x89" + content + b"tb"
    numbers = b"](" + b"".join(b"K" + bytes([label]) for label in labels) + b"e"
    return b"\x80\x02}(" + short(b"data") + array + short(b"fine_labels") + numbers + b"u."


def test_a_pickle_of_python_2_is_read_as_python_reads_it():
    pixels, labels = cifar_parts("100")["train"]
    flat = pixels.reshape(len(pixels), -1)
    theirs = pickle.loads(python2_pickle(flat, labels, core="_core"), encoding="bytes")
    assert np.array_equal(theirs[b"data"], flat), "the test's own pickle is wrong"
    images, read = read_python(python2_pickle(flat, labels), "fine_labels", "train")
    assert torch.equal(images, torch.from_numpy(pixels))
    assert read.tolist() == theirs[b"fine_labels"]


@pytest.mark.parametrize("protocol", range(6))
def test_every_protocol_is_read(protocol):
    pixels, labels = cifar_parts("100")["test"]
    content = pickle.dumps({"data": pixels.reshape(20, -1), "fine_labels": labels}, protocol=protocol)
    images, read = read_python(content, "fine_labels", "test")
    assert torch.equal(images, torch.from_numpy(pixels))
    assert read.tolist() == labels


class Runs:
    """What it is reduced to is called by an ordinary unpickler."""

    def __init__(self, function, *arguments):
        self.reduced = function, arguments

    def __reduce__(self):
        return self.reduced


def malicious(mark: Path) -> dict[str, tuple[bytes, str]]:
    """Pickles that would write a file, by several roads, and the name that gives them away."""
    import os
    import subprocess

    command = f"touch {mark}"
    pixels, labels = cifar_parts("100")["test"]
    data = {"data": pixels.reshape(20, -1), "fine_labels": labels}
    return {
        "system": (pickle.dumps({**data, "x": Runs(os.system, command)}), f"{os.system.__module__}.system"),
        "instead": (pickle.dumps(Runs(subprocess.call, ["touch", str(mark)])), "subprocess.call"),
        "eval": (pickle.dumps([Runs(eval, f"open({str(mark)!r}, 'w')")], protocol=2), "eval"),
        "getattr": (
            b"\x80\x02c__builtin__\ngetattr\ncnumpy\nndarray\n" + short(b"x") + b"\x86R.",
            "__builtin__.getattr",
        ),
        "nested": (b"\x80\x04\x8c\x05numpy\x94\x8c\x14core.multiarray.eval\x94\x93.", "numpy.core.multiarray.eval"),
        "instance": (f"(S'{command}'\nios\nsystem\n.".encode(), "os.system"),
        "extension": (b"\x80\x02\x82\x01.", "extension code 1"),
        "persistent": (b"Ppickle\n.", "persistent"),
    }


@pytest.mark.parametrize(
    "road", ["system", "instead", "eval", "getattr", "nested", "instance", "extension", "persistent"]
)
def test_a_malicious_pickle_runs_nothing_and_is_refused_by_name(tmp_path, road):
    mark = tmp_path / "executed"
    content, name = malicious(mark)[road]
    root = cifar(tmp_path / "data", "100")
    (root / FOLDERS["100"] / "test").write_bytes(content)
    with pytest.raises(ValueError, match=name) as error:
        load("100", root).setup()
    assert not mark.exists()
    assert str(error.value).startswith("test must be a whole pickle of plain values and arrays of bytes, got: ")
    assert "\n" not in str(error.value)


def test_the_malicious_pickle_of_the_test_is_malicious(tmp_path):
    content, _ = malicious(tmp_path / "executed")["system"]
    pickle.loads(content)
    assert (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\x80\x02cnumpy\nndarray\n}b.", "state for _ArrayType"),
        (b"\x80\x02cnumpy.core.multiarray\n_reconstruct\n}b.", "state for _MakeArray"),
        (b"\x80\x02cnumpy\ndtype\n}" + short(b"__call__") + b"Nsb.", "state for _MakeType"),
        (b"\x80\x02cnumpy\nndarray\n)R.", "not callable"),
        (b"\x80\x02}" + short(b"data") + b"cnumpy\nndarray\ns.", "_ArrayType in place of a value"),
    ],
)
def test_stand_ins_cannot_be_turned_into_something_else(content, message):
    with pytest.raises(ValueError, match=f"^it must be a whole pickle .*{message}"):
        read_arrays(content, "it")


def dumped(values: dict) -> bytes:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pickle.dumps(values, protocol=2)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"data": np.zeros((2, 3072), np.float32), "fine_labels": [1, 2]}, "an array of .*f4.*, not of bytes"),
        ({"data": np.array([{}, 1], object), "fine_labels": [1, 2]}, "an array of .*O8.*, not of bytes"),
        ({"data": np.zeros((2, 7), np.uint8), "fine_labels": [1, 2]}, r"\(pictures, 3072\) of bytes, got \(2, 7\)"),
        ({"data": np.zeros((2, 3072), np.uint8), "fine_labels": [1]}, "one number per picture = 2, got 1"),
        ({"data": np.zeros((2, 3072), np.uint8), "labels": [1, 2]}, "'fine_labels', .*got NoneType"),
        ({"fine_labels": [1, 2]}, "must hold 'data'.*got NoneType"),
        ([1], "a list in place of a dict"),
    ],
)
def test_a_pickle_without_pictures_and_labels_is_refused(values, message):
    with pytest.raises(ValueError, match=message):
        read_python(dumped(values), "fine_labels", "train")


# Claims that are larger than their file


def opcodes(*parts: bytes) -> bytes:
    return b"\x80\x05" + b"".join(parts) + b"."


HUGE = struct.pack("<Q", 2**62)


@pytest.mark.parametrize(
    "content",
    [
        opcodes(b"\x8e", HUGE, b"few bytes"),  # BINBYTES8
        opcodes(b"\x96", HUGE, b"few bytes"),  # BYTEARRAY8
        opcodes(b"\x8d", HUGE, b"few bytes"),  # BINUNICODE8
        opcodes(b"\x95", HUGE, b"}"),  # FRAME
        opcodes(b"\x8b\xff\xff\xff\x7f", b"few bytes"),  # LONG4
        opcodes(b"}r", struct.pack("<I", 2**32 - 1)),  # LONG_BINPUT
        opcodes(b"}p4294967295\n"),  # PUT
        opcodes(
            b"cnumpy.core.numeric\n_frombuffer\n(\x8a\x08", HUGE, b"cnumpy\ndtype\n\x8c\x02u1\x85RK\x01\x85\x8c\x01CtR"
        ),
    ],
    ids=["bytes", "bytearray", "text", "frame", "long", "memo", "memo as text", "array"],
)
def test_read_arrays_takes_no_memory_for_what_a_pickle_claims(content):
    tracemalloc.start()
    with pytest.raises(ValueError, match=r"^train must be a whole pickle of plain values") as error:
        read_arrays(content, "train")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**24
    assert "\n" not in str(error.value)


def test_read_arrays_writes_no_nested_values_out():
    get = [b"h" + bytes([level]) for level in range(60)]  # BINGET
    lists = b"]\x94" + b"".join(b"](" + 9 * get[level] + b"e\x94" for level in range(59))  # each of nine of the last
    with pytest.raises(ValueError, match=r"list in place of text$"):
        read_arrays(opcodes(lists, b"cnumpy\ndtype\n", get[59], b"\x85R"), "train")


def test_a_label_beyond_all_numbers_is_refused(tmp_path):
    root = cifar(tmp_path, "10")
    stored = pickle.loads(cifar_contents("10", False)["data_batch_2"])
    stored[b"labels"][3] = 10**400
    (root / FOLDERS["10"] / "data_batch_2").write_bytes(pickle.dumps(stored))
    with pytest.raises(ValueError, match=r"^data_batch_2 must hold 'labels' between 0 and 99, got others; whole ones"):
        load("10", root).setup()


def bomb(archive: Path, name: str, kind: bytes = tarfile.REGTYPE) -> Path:
    """A file of 8 GB of zeros in an archive of a few kB."""
    member = tarfile.TarInfo(name)
    member.type, member.size = kind, 2**33
    zeros = gzip.compress(bytes(2**20))
    archive.parent.mkdir(parents=True)
    archive.write_bytes(gzip.compress(member.tobuf(tarfile.GNU_FORMAT)) + zeros * 2**13)
    return archive


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("cifar-100-python/train", tarfile.REGTYPE),
        ("cifar-100-python/file.txt~", tarfile.REGTYPE),
        ("././@LongLink", tarfile.GNUTYPE_LONGNAME),
        ("pax", tarfile.XHDTYPE),
    ],
)
def test_a_bomb_in_place_of_an_archive_is_refused_in_one_line(tmp_path, monkeypatch, name, kind):
    read, unpacked = gzip.GzipFile.read, []

    def counted(self, size=-1):
        unpacked.append(len(content := read(self, size)))
        return content

    monkeypatch.setattr(module, "UNPACKED", 2**22)
    monkeypatch.setattr(gzip.GzipFile, "read", counted)
    archive = bomb(tmp_path / "data" / "cifar-100-python.tar.gz", name, kind)
    why = r"must be a readable, whole archive, .*, got: more than 4,194,304 bytes when unpacked$"
    with pytest.raises(ValueError, match=why) as error:
        load("100", archive).setup()
    assert "\n" not in str(error.value)
    assert sum(unpacked) <= 2**22 + 1


def test_an_archive_may_hold_all_that_cifar_does():
    python, binary = 186_000_000, 60_000 * (module.PIXELS + 2)  # bytes of the files, about, and exactly
    assert 1.9 * max(python, binary) < module.UNPACKED < 4 * binary


# Damage


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("binary", [False, True])
def test_a_cut_file_is_named(tmp_path, packed, binary):
    root = cifar(tmp_path, "100", binary, packed)
    path = max((path for path in root.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2 - 1])
    with pytest.raises(ValueError, match=rf"{path.name} must (be|hold)") as error:
        load("100", root).setup()
    assert "\n" not in str(error.value)


def test_a_label_beyond_the_classes_is_refused(tmp_path):
    root = cifar(tmp_path, "10")
    stored = pickle.loads(cifar_contents("10", False)["data_batch_2"])
    stored[b"labels"][3] = 10
    (root / FOLDERS["10"] / "data_batch_2").write_bytes(pickle.dumps(stored))
    with pytest.raises(ValueError, match=r"labels of data_batch_1, .* must lie below 10, got 0 to 10"):
        load("10", root).setup()


# Training


@pytest.mark.parametrize("kind", ["10", "100"])
def test_two_steps_are_trained(tmp_path, kind):
    root = str(cifar(tmp_path / "data", kind))
    config = data_config(f"cifar{kind}", root=root, batch_size=16, train_size=32, val_size=16, augment={"flip": True})
    data, classifier, rows = train_two_steps(config, tmp_path / "run")
    assert data.trainer.global_step == 2
    assert rows[0]["train_loss"] > 0
    assert all(parameter.isfinite().all() for parameter in classifier.parameters())
