"""Tests of named pipes and sockets in a data folder: they are skipped and listed, and never read."""

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from threading import Timer

import pytest
from miniatures import MINIATURES, OPTIONS

from torchrope_lab.data.arrays import read_arrays
from torchrope_lab.data.build import make_data
from torchrope_lab.data.coco import read_instances
from torchrope_lab.data.config import data_config
from torchrope_lab.data.images import load_image
from torchrope_lab.data.shards import index_shard
from torchrope_lab.data.tables import read_series, read_table
from torchrope_lab.data.videos import read_clips
from torchrope_lab.data.volumes import read_slice, read_volume
from torchrope_lab.data.volumes import read_table as read_labels

PIPE = "no regular file, but a named pipe"


@pytest.fixture
def pipe(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Make named pipes; a reader of one gets an empty file after 10 seconds instead of waiting for ever."""
    timers = []

    def write_nothing(path: Path) -> None:
        with suppress(OSError):  # nobody reads
            os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))

    def make(name: str) -> Path:
        path = tmp_path / name
        os.mkfifo(path)
        timers.append(Timer(10, write_nothing, [path]))
        timers[-1].daemon = True
        timers[-1].start()
        return path

    yield make
    for timer in timers:
        timer.cancel()


READERS: dict[str, Callable[[Path], object]] = {
    "a.png": load_image,
    "a.mp4": lambda path: read_clips(path, lambda _: []),
    "a.nii": lambda path: read_volume(path.parent, [path.name]),
    "a.nii.gz": lambda path: read_volume(path.parent, [path.name]),
    "a.dcm": read_slice,
    "a.csv": read_table,
    "a.ply": read_table,
    "a.npz": read_arrays,
    "a.ts": read_series,
    "a.arff": read_series,
}


@pytest.mark.parametrize("name", READERS)
def test_reader_refuses_a_named_pipe(pipe: Callable[[str], Path], name: str) -> None:
    with pytest.raises((OSError, ValueError), match=PIPE):
        READERS[name](pipe(name))


def test_reader_of_annotations_labels_and_shards_refuses_a_named_pipe(pipe: Callable[[str], Path]) -> None:
    with pytest.raises(ValueError, match=PIPE):
        read_instances(pipe("a.json"))
    with pytest.raises(ValueError, match=PIPE):
        read_labels(pipe("labels.csv"), ["file"], "labels")
    assert index_shard(pipe("a.tar")) == ([], [("", PIPE)])


@pytest.mark.parametrize("name", ["images", "points"])
def test_pipe_in_a_folder_is_skipped_and_listed(tmp_path: Path, pipe: Callable[[str], Path], name: str) -> None:
    MINIATURES[name](tmp_path / "data")
    settings = data_config(name, root=str(tmp_path / "data"), **OPTIONS.get(name, {}))
    counts = make_data(settings).counts
    [first, *_] = sorted(path for path in (tmp_path / "data").rglob("*") if path.is_file())
    made = pipe(f"{first.parent.relative_to(tmp_path)}/added{first.suffix}")
    data = make_data(settings)
    assert data.counts == counts
    assert data.skipped == [(made.relative_to(tmp_path / "data").as_posix(), PIPE)]


def test_socket_and_device_are_no_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # a socket's path must be short
    with socket.socket(socket.AF_UNIX) as opened:
        opened.bind("a.png")
        with pytest.raises(OSError, match=r"no regular file, but a socket"):
            load_image(Path("a.png"))
    with pytest.raises(OSError, match=r"no regular file, but a device"):
        load_image(Path(os.devnull))
