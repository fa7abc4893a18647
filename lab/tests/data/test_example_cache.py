"""Cached examples: the same as decoded ones, decoded once, within a limit, and replaced when damaged or outdated."""

import errno
import logging
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data_sets import load_data, place
from miniatures import MINIATURES, OPTIONS
from PIL import Image
from video_files import encode, video_folder
from volume_files import head, nifti_folder, rsna_folder, write_nifti

from torchrope_lab.data import cache, dicom, faults, images, maps, videos, volumes
from torchrope_lab.data.data_config import AugmentConfig
from torchrope_lab.data.datamodule import DataModule

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")

KINDS: dict[str, Callable[[Path], Path]] = {
    "volumes": nifti_folder,
    "rsna": rsna_folder,
    "videos": lambda root: video_folder(root, 4),
}


@pytest.fixture(autouse=True)
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of cached examples."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    return cache.cache_folder() / "examples"


AUGMENT = AugmentConfig(flip=True, randaugment=(1, 9))
load = partial(load_data, size=8, frames=2, batch_size=4, augment=AUGMENT)


def batches(data: DataModule, epoch: int) -> Iterator[torch.Tensor]:
    place(data, epoch)
    for loader in (data.train_dataloader(), data.val_dataloader()):
        yield from (inputs for inputs, *_ in loader)


def epochs(data: DataModule, count: int = 3) -> torch.Tensor:
    return torch.cat([batch for epoch in range(count) for batch in batches(data, epoch)])


def no_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_):
        raise AssertionError("decoded again")

    monkeypatch.setattr(volumes, "read_volume", refuse)
    monkeypatch.setattr(videos.OpenVideo, "read", refuse)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_batches_are_those_without_the_cache_and_files_decoded_in_the_first_epoch_only(
    tmp_path, stored, monkeypatch, name, workers
):
    root = KINDS[name](tmp_path / "data")
    without = epochs(load(name, root, cache_gib=0, workers=workers))
    assert not stored.exists()
    data = load(name, root, workers=workers)
    first = torch.cat(list(batches(data, 0)))
    assert list(stored.rglob("*.safetensors"))
    no_decoding(monkeypatch)
    assert torch.equal(torch.cat([first, *batches(data, 1), *batches(data, 2)]), without)
    assert torch.equal(epochs(load(name, root, workers=workers)), without)


@pytest.mark.parametrize("content", [b"", b"damaged", b"\xff" * 4096, None])
@pytest.mark.parametrize("name", ["rsna", pytest.param("videos", marks=pytest.mark.slow)])
def test_damaged_file_of_the_cache_is_replaced(tmp_path, stored, monkeypatch, name, content):
    root = KINDS[name](tmp_path / "data")
    expected = epochs(load(name, root), 1)
    sizes = {path: path.stat().st_size for path in stored.rglob("*.safetensors")}
    for path in sizes:
        path.write_bytes(path.read_bytes()[:-7] if content is None else content)
    assert torch.equal(epochs(load(name, root), 1), expected)
    assert {path: path.stat().st_size for path in stored.rglob("*.safetensors")} == sizes
    no_decoding(monkeypatch)
    assert torch.equal(epochs(load(name, root), 1), expected)


def test_changed_file_and_changed_settings_are_decoded_again(tmp_path):
    root = nifti_folder(tmp_path / "data")
    before = load("volumes", root).datasets()[0].raw
    name = before.samples[0][0]
    first = before[0][0]
    write_nifti(root / f"{name}.nii.gz", head(5, True, 50))
    assert not torch.equal(before[0][0], first)
    other = load("volumes", root, windows=[[0, 4000]]).datasets()[0].raw
    assert not torch.equal(other[0][0], before[0][0])
    larger = load("volumes", root, frames=4).datasets()[0].raw
    assert larger[0][0].shape == (1, 4, 8, 8)


def test_limit_bounds_the_bytes_and_changes_no_result(tmp_path, stored, caplog):
    root = nifti_folder(tmp_path / "data")
    expected = epochs(load("volumes", root, cache_gib=0))
    one = 4 * 2 * 8 * 8
    with caplog.at_level(logging.WARNING):
        assert torch.equal(epochs(load("volumes", root, cache_gib=4.5 * one / 2**30)), expected)
    files = list(stored.rglob("*.safetensors"))
    assert 1 <= len(files) <= 4
    assert sum(path.stat().st_size for path in files) <= 4.5 * one
    (message,) = caplog.messages
    assert message.startswith(f"no further examples are cached in {stored}: the limit of ")
    assert message.endswith("(delete this folder or change --data.cache_gib)")


def test_full_disk_ends_caching_with_one_warning(tmp_path, monkeypatch, caplog):
    root = video_folder(tmp_path / "data", 4)
    expected = epochs(load("videos", root, cache_gib=0))

    def full(path, content):
        raise OSError(28, f"cannot write {path}: No space left on device")

    monkeypatch.setattr(cache, "write_whole", full)
    assert torch.equal(epochs(load("videos", root)), expected)
    (message,) = caplog.messages
    assert "No space left on device" in message


def test_long_videos_are_not_decoded_as_a_whole(tmp_path, monkeypatch):
    root = video_folder(tmp_path / "data", 4)
    expected = epochs(load("videos", root, cache_gib=0))
    monkeypatch.setattr(videos, "LARGEST_CACHED", 1000)
    asked = []
    read = videos.OpenVideo.read

    def counting(self, indices, *side):
        asked.append(len(indices))
        return read(self, indices, *side)

    monkeypatch.setattr(videos.OpenVideo, "read", counting)
    assert torch.equal(epochs(load("videos", root)), expected)
    assert set(asked) == {2}


@pytest.mark.slow
def test_video_with_one_damaged_frame_gives_the_same_clips_with_the_cache(tmp_path):
    root = video_folder(tmp_path / "data", 4)
    for path in root.rglob("*.mp4"):
        encode(path, 60, codec="libx264", g=5)
    data = load("videos", root, cache_gib=0)
    [path] = [root / name for name, _ in data.datasets()[0].samples[:1]]
    with videos.av.open(str(path)) as container:
        at, size = [(packet.pos, packet.size) for packet in container.demux(video=0) if packet.pos][-3]
    content = bytearray(path.read_bytes())
    content[at : at + size] = b"\x55" * size
    path.write_bytes(content)
    assert torch.equal(epochs(load("videos", root)), epochs(load("videos", root, cache_gib=0)))


@pytest.mark.parametrize("gib", [0, 1])
def test_frames_of_four_times_the_crop_are_reduced_to_twice_its_size(tmp_path, gib):
    rows, columns = np.mgrid[:96, :128]
    frames = [Image.fromarray((rows + columns + number).astype(np.uint8)) for number in range(6)]
    for number in range(8):
        path = tmp_path / "data" / "ab"[number % 2] / f"{number}.gif"
        path.parent.mkdir(parents=True, exist_ok=True)
        frames[0].save(path, save_all=True, append_images=frames[1:], duration=40)
    (clip,) = videos.read_clips(path, lambda count: [[0, 3]], 16)
    (whole,) = videos.read_clips(path, lambda count: [[0, 3]])
    assert (clip.shape, whole.shape) == ((2, 3, 16, 21), (2, 3, 96, 128))
    small = torch.nn.functional.interpolate(whole.float(), (16, 21), mode="area")
    assert (clip.float() - small)[..., 1:-1, 1:-1].abs().max() < 4
    assert videos.read_clips(path, lambda count: [[0]], 49)[0].shape == (1, 3, 96, 128)
    assert next(batches(load("videos", tmp_path / "data", cache_gib=gib), 0)).shape == (4, 3, 2, 8, 8)


@pytest.mark.parametrize(("shape", "warns"), [({"frames": 5, "size": 12}, False), ({"frames": 32, "size": 112}, True)])
def test_warning_tells_how_much_volumes_are_enlarged(tmp_path, caplog, shape, warns):
    load("volumes", nifti_folder(tmp_path / "data"), **shape)
    expected = (
        "volumes of 5x10x12 voxels are enlarged to 32x112x112, 669 times as many: "
        "--data.frames 5 --data.size 12 keeps their size"
    )
    assert caplog.messages == [expected] * warns


READS = {  # data whose files are read before training, the function that reads one, and the kind of the files
    "images": (images, "decode", "*.png"),
    "segments": (maps, "read_mask", "masks/**/*.png"),
    "videos": (videos, "open_video", "*.*"),
    "rsna": (dicom, "read_header", "*.dcm"),
}


@pytest.mark.parametrize(
    "name", ["images", "segments", *(pytest.param(name, marks=pytest.mark.slow) for name in ("videos", "rsna"))]
)
def test_files_are_checked_once_and_again_where_one_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    module, function, pattern = READS[name]
    root = MINIATURES[name](tmp_path / "data")
    files = sorted(root.rglob(pattern))
    checked: list[Path] = []
    read = getattr(module, function)

    def start() -> list[Any]:
        checked.clear()
        data = load_data(name, root, **{"size": 16, **OPTIONS.get(name, {})})
        return [data.counts, data.description, sorted(path for path, _ in data.skipped)]

    monkeypatch.setattr(cache, "attempt", lambda read, path: checked.append(path) or faults.attempt(read, path))
    first = start()
    assert sorted(checked) == files
    assert (start(), checked) == (first, [])
    files[3].write_bytes(b"damaged")
    damaged = start()
    assert checked == [files[3]]
    assert damaged != first
    assert (start(), checked) == (damaged, [])
    files[5].touch()
    start()
    assert checked == [files[5]]

    def lost(path: Path, *_: object, **__: object) -> Any:
        if path == files[6]:
            raise OSError(errno.EIO, "Input/output error")
        return read(path)

    files[6].touch()
    with monkeypatch.context() as losing:
        losing.setattr(module, function, lost)
        assert start() != damaged
    assert (start(), checked) == (damaged, [files[6]])  # an error of the system is not kept


def test_data_are_read_where_nothing_can_be_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_HOME", "/proc/nowhere")
    assert load_data("images", MINIATURES["images"](tmp_path / "data"), size=8).counts == (40, 10)
