"""Tests of reading arrays from .npz files."""

import gc
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from torchrope_lab.data.table_files import read_arrays


class Cycle:
    """A reference cycle, which only the garbage collector frees, with a finaliser that lets other threads run."""

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        for _ in range(100):
            pass


@pytest.fixture
def threads_interrupt_each_other() -> Iterator[None]:
    """Switch threads as often as possible, with the garbage collector running all the time."""
    interval, thresholds = sys.getswitchinterval(), gc.get_threshold()
    sys.setswitchinterval(1e-6)
    gc.set_threshold(3, 1000, 1000)
    yield
    sys.setswitchinterval(interval)
    gc.set_threshold(*thresholds)


@pytest.mark.usefixtures("threads_interrupt_each_other")
def test_read_arrays_is_thread_safe(tmp_path: Path) -> None:
    file = tmp_path / "points.npz"
    np.savez(file, positions=np.arange(6.0).reshape(2, 3), label=np.array("a"))

    def read(path: Path) -> dict[str, np.ndarray]:
        for _ in range(20):
            Cycle()
        return read_arrays(path)

    with ThreadPoolExecutor(4) as threads:
        for arrays in threads.map(read, [file] * 1000):
            assert arrays["positions"].tolist() == [[0, 1, 2], [3, 4, 5]]
            assert arrays["label"] == "a"
