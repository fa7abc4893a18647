"""Tests of loading: both ways of decoding, loaders and their processes, and benchmarks/data.py."""

import json
import multiprocessing.connection
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from data_sets import load_data, place, refused
from miniatures import imagenet
from PIL import Image
from render import render_data_docs
from sklearn.datasets import load_sample_images
from suite_results import DataSuite, read_results, write_results
from torchvision.transforms.v2 import functional as image_ops

from torchrope_lab.data import images
from torchrope_lab.data.augment import read_batch
from torchrope_lab.data.datamodule import DataModule
from torchrope_lab.data.draws import Draws
from torchrope_lab.data.images import ImageSet, decode_bytes, load_image
from torchrope_lab.data.loading import follow_parent

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "data.md"
COMMITTED = ROOT / "benchmarks" / "results" / "data.json"


@pytest.fixture(scope="module")
def benchmark() -> Iterator[ModuleType]:
    """The script, imported from its folder as `python benchmarks/data.py` has it."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    threads = torch.get_num_threads()
    import data

    yield data
    sys.path.remove(str(ROOT / "benchmarks"))
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def suite(benchmark: ModuleType) -> DataSuite:
    plan = benchmark.Plan(
        pictures=128, files=8, videos=8, frames=12, volumes=4, slices=2, side=24, rounds=1, workers=0, threads=1
    )
    return benchmark.measure(plan, "a test")


@pytest.mark.slow
def test_suite_measures_every_kind_with_and_without_augmentation(suite: DataSuite) -> None:
    changes: dict[str, list[str]] = {}
    for row in suite.rows:
        changes.setdefault(row.data, []).append(row.augment)
        assert row.examples_per_second.median > 0
        assert row.workers == 0
    assert list(changes) == ["CIFAR-100 in memory", "JPEG files", "shards of JPEG", "videos", "DICOM series"]
    assert all(augments[0] == "nothing" for augments in changes.values())
    assert changes["JPEG files"][1] == "flip true, randaugment liere"
    assert "erasing" in changes["videos"][1]
    assert "mixup 0.8" in changes["DICOM series"][1]


def test_gpu_throughput_follows_from_vit_operations(suite: DataSuite) -> None:
    by_shape = {row.shape: row for row in suite.rows}
    assert by_shape[3, 224, 224].gflops / 2 == pytest.approx(17.5, abs=0.1)  # DeiT III's count of multiply-adds
    # ViT-B's matrices are read by every token: the product of tokens and channels, and the scores.
    tokens, dim, depth = 64 + 1, 768, 12
    layers = depth * (12 * tokens * dim**2 + 2 * tokens**2 * dim)
    expected = layers + 64 * 48 * dim + dim * 100
    assert by_shape[3, 32, 32].gflops * 1e9 / 2 == pytest.approx(expected, rel=1e-3)
    for row in suite.rows:
        assert row.taken_per_second == pytest.approx(0.45 * 989e12 / (3 * row.gflops * 1e9))


def test_results_round_trip_and_table_has_every_row(suite: DataSuite, tmp_path: Path) -> None:
    write_results(tmp_path / "data.json", suite)
    assert read_results(tmp_path / "data.json", DataSuite) == suite
    page = render_data_docs(PAGE.read_text(), suite)
    table = page.split("<!-- loading:begin -->")[1].split("<!-- loading:end -->")[0]
    assert "computed" in table
    for row in suite.rows:
        assert any(row.data in line and f"{row.taken_per_second:,.0f}" in line for line in table.splitlines())
    assert render_data_docs(page, suite) == page


@pytest.mark.parametrize("spoil", [{"schema": 0}, {"rows": [{}]}, {"utilisation": "much"}])
def test_results_of_another_layout_are_rejected(suite: DataSuite, tmp_path: Path, spoil: dict) -> None:
    write_results(tmp_path / "data.json", suite)
    plain = json.loads((tmp_path / "data.json").read_text())
    (tmp_path / "data.json").write_text(json.dumps({**plain, **spoil}))
    with refused(r"must (have|be) "):
        read_results(tmp_path / "data.json", DataSuite)


def test_page_is_generated_from_committed_results() -> None:
    assert render_data_docs(PAGE.read_text(), read_results(COMMITTED, DataSuite)) == PAGE.read_text()


# Pipelines


def load_images(root: Path, pipeline: str = "fast", **settings: Any) -> DataModule:
    return load_data("imagenet", root, **{"size": 64, "batch_size": 6, "pipeline": pipeline, **settings})


def pixels_of(data: DataModule, indices: list[int], seed: int = 0) -> torch.Tensor:
    """Training inputs of these indices, back as pixels in [0, 255]."""
    epoch: Any = data.train_dataloader().dataset
    epoch.seed = seed
    return 255 * (epoch.__getitems__(indices)[0] * epoch.dataset.normalise.std + epoch.dataset.normalise.mean)


def picture_files(root: Path) -> Path:
    """Photographs, and ramps whose red and green are a pixel's column and row."""
    across, down = np.meshgrid(np.linspace(0, 255, 320), np.linspace(0, 255, 240))
    ramp = np.stack([across, down, np.full_like(down, 128)], axis=-1).astype(np.uint8)
    china, flower = (picture[60:300, 100:420] for picture in load_sample_images().images)
    for part in ("train", "val"):
        for name, pictures in {"photographs": (china, flower), "ramps": (ramp, ramp)}.items():
            (root / part / name).mkdir(parents=True)
            for number, pixels in enumerate(pictures):
                Image.fromarray(pixels).save(root / part / name / f"{number}.jpg", quality=95)
    return root


COPIES = 300


def test_pipelines_have_the_same_distribution(tmp_path: Path) -> None:
    root = picture_files(tmp_path)
    # Copies of an example have indices beyond the four examples: 0 and 1 are photographs, 2 and 3 ramps.
    photographs, ramps = ([example + 4 * copy for copy in range(COPIES)] for example in (0, 2))
    areas, flips, pixels = {}, {}, {}
    for seed, pipeline in enumerate(("exact", "fast")):
        data = load_images(root, pipeline, augment={"flip": True})
        red, green, _ = pixels_of(data, ramps, seed).unbind(1)
        widths = (red[:, :, -4] - red[:, :, 3]).mean(1) / 255 * 64 / 57
        heights = (green[:, -4] - green[:, 3]).mean(1) / 255 * 64 / 57
        flips[pipeline] = (widths < 0).float().mean()
        areas[pipeline] = (widths.abs() * heights).sort().values
        pixels[pipeline] = pixels_of(data, photographs, seed)
    assert all(0.42 < share < 0.58 for share in flips.values())  # 2.8 standard errors
    for area in areas.values():  # 8 to 100 %; wide or high crops that do not fit are drawn again
        assert 0.06 < area.min() < 0.12
        assert 0.8 < area.max() < 1.05
    both = torch.cat(list(areas.values())).sort().values
    ranks = [torch.searchsorted(area, both, right=True) / COPIES for area in areas.values()]
    assert (ranks[0] - ranks[1]).abs().max() < 0.133  # Kolmogorov-Smirnov at 1 %
    exact, fast = pixels["exact"], pixels["fast"]
    assert (exact.mean((0, 2, 3)) - fast.mean((0, 2, 3))).abs().max() < 4  # levels of 255
    assert (exact.mean(0) - fast.mean(0)).abs().mean() < 5
    assert (exact.std(0) / fast.std(0) - 1).abs().mean() < 0.08


def test_pipelines_draw_the_same_crops_and_operations(tmp_path: Path) -> None:
    root = picture_files(tmp_path)
    augment = {"flip": True, "randaugment": [1, 9], "erasing": 0.5, "mixup": 0.8}
    exact, fast = (pixels_of(load_images(root, kind, augment=augment), list(range(24))) for kind in ("exact", "fast"))
    assert (exact - fast).abs().mean() < 2  # resampling filters of Pillow and torch differ in rounding


def test_copies_in_a_batch_are_decoded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw: Any = load_images(imagenet(tmp_path))._made_datasets()[0].raw  # type: ignore[attr-defined]
    opened: list[int] = []
    monkeypatch.setattr(
        ImageSet, "open", lambda self, index: opened.append(index) or self.root / self.samples[index][0]
    )
    batch = read_batch(raw, Draws(0, [1, 25, 2, 49, 3]))
    assert opened == [1, 2, 3]
    assert batch[1].tolist() == [raw.samples[index][1] for index in (1, 1, 2, 1, 3)]
    assert not torch.equal(batch[0][0], batch[0][1])


def write(path: Path, mode: str = "RGB", **options: Any) -> Path:
    picture = Image.fromarray(load_sample_images().images[0][:60, :80])
    deep = Image.fromarray(np.arange(4800, dtype=np.uint16).reshape(60, 80))
    (deep if mode == "I;16" else picture.convert(mode)).save(path, **options)
    return path


ROTATED = Image.Exif()
ROTATED[images.ORIENTATION] = 6


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("a.jpg", {}),
        ("a.jpg", {"mode": "L"}),
        ("a.jpg", {"mode": "CMYK"}),
        ("a.jpg", {"exif": ROTATED}),
        ("a.jpg", {"progressive": True, "subsampling": 0}),
        ("a.png", {"mode": "I;16"}),
        ("a.png", {"mode": "RGBA"}),
        ("a.bmp", {}),
    ],
)
def test_bytes_are_decoded_as_by_pillow(tmp_path: Path, name: str, options: dict) -> None:
    path = write(tmp_path / name, **options)
    assert torch.equal(decode_bytes(path), image_ops.pil_to_tensor(load_image(path)))


def test_damaged_jpeg_has_the_error_of_pillow(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jpg")
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(OSError, match=r"(?i)truncated"):
        decode_bytes(path)


# Loaders


def epoch(data: DataModule, number: int) -> list[torch.Tensor]:
    return [inputs for inputs, _ in place(data, number).train_dataloader()]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_processes_load_the_same_batches_and_resume_in_an_epoch(tmp_path: Path) -> None:
    root, augment = imagenet(tmp_path), {"flip": True, "randaugment": [1, 9], "repeats": 2}
    alone, by_two = (load_images(root, workers=workers, augment=augment) for workers in (0, 2))
    for number in range(2):
        expected = epoch(alone, number)
        loaded = epoch(by_two, number)
        assert all(torch.equal(*pair) for pair in zip(expected, loaded, strict=True))
    by_two.resume_at = (1, 3)
    assert torch.equal(torch.stack(epoch(by_two, 1)), torch.stack(expected[3:]))
    assert multiprocessing.active_children() == []


def test_last_batch_is_dropped_if_asked(tmp_path: Path) -> None:
    root = imagenet(tmp_path)
    data = load_images(root, batch_size=10, drop_last=True)
    assert len(data.train_dataloader()) == 2
    assert [len(inputs) for inputs in epoch(data, 0)] == [10, 10]
    assert [len(inputs) for inputs in epoch(load_images(root, batch_size=10), 0)] == [10, 10, 4]
    assert sum(len(labels) for _, labels in data.val_dataloader()) == 12
    with refused(r"^--data.batch_size with --data.drop_last must be at most .*, 24, got 25$"):
        load_images(root, batch_size=25, drop_last=True).train_dataloader()


def load(parent: int) -> None:
    while os.getppid() == parent:
        pass
    follow_parent(0)
    threading.Event().wait(600)


def start_loading_and_die() -> None:
    multiprocessing.get_context("fork").Process(target=load, args=(os.getpid(),)).start()
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_loading_process_ends_with_a_parent_that_was_killed_while_it_started() -> None:
    reading, writing = os.pipe()  # ends when the last process that holds it has ended
    parent = multiprocessing.get_context("fork").Process(target=start_loading_and_die)
    parent.start()
    os.close(writing)
    parent.join()
    assert parent.exitcode == -signal.SIGKILL
    assert multiprocessing.connection.wait([reading], timeout=60) == [reading]
    assert os.read(reading, 1) == b""
    os.close(reading)


SIGNALLED = """
import os, signal
from torchrope_lab.data.loading import Loader

if __name__ == "__main__":
    os.register_at_fork(after_in_child=lambda: os.kill(os.getpid(), signal.SIGTERM))
    print([batch.tolist() for batch in Loader(range(4), batch_size=2, num_workers=2)])
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.slow
def test_loading_processes_survive_a_signal_to_the_group_while_they_start() -> None:
    loaded = subprocess.run([sys.executable, "-c", SIGNALLED], capture_output=True, text=True)
    assert (loaded.returncode, loaded.stdout) == (0, "[[0, 1], [2, 3]]\n"), loaded.stderr
    assert loaded.stderr == ""
