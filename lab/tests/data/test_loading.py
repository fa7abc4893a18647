"""Tests of benchmarks/data.py: measured loading speed, result files, and comparison with GPU throughput."""

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

import pytest
import torch
from render import render_data_docs
from suite_results import DataSuite, read_results, write_results

from torchrope_lab.data.datamodule import follow_parent

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
    with pytest.raises(ValueError, match=r"must (have|be) "):
        read_results(tmp_path / "data.json", DataSuite)


def test_page_is_generated_from_committed_results() -> None:
    assert render_data_docs(PAGE.read_text(), read_results(COMMITTED, DataSuite)) == PAGE.read_text()


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
from torchrope_lab.data.datamodule import Loader

if __name__ == "__main__":
    os.register_at_fork(after_in_child=lambda: os.kill(os.getpid(), signal.SIGTERM))
    print([batch.tolist() for batch in Loader(range(4), batch_size=2, num_workers=2)])
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_loading_processes_survive_a_signal_to_the_group_while_they_start() -> None:
    loaded = subprocess.run([sys.executable, "-c", SIGNALLED], capture_output=True, text=True)
    assert (loaded.returncode, loaded.stdout) == (0, "[[0, 1], [2, 3]]\n"), loaded.stderr
    assert loaded.stderr == ""
