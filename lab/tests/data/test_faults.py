"""Tests of unreadable files: listed, counted, skipped, and an error if there are too many."""

import logging
import pickle

import pytest
from data_sets import refused
from torch.utils.data import DataLoader, Dataset

from torchrope_lab.data.faults import Skipping, TooManyFaults, find_faults, name_some, warn_skipped


def refuse(name: str) -> None:
    if name.startswith("bad"):
        raise OSError(f"image file is truncated ({name})" if name.endswith("1") else "odd\nbytes")


class Numbers(Dataset):
    """0, 1, 2, ... of which some cannot be read."""

    def __init__(self, length: int, broken: set[int], limit: int):
        self.broken = broken
        self.reading = Skipping([f"file{index}" for index in range(length)], self.load, limit)

    def load(self, index: int) -> int:
        if index in self.broken:
            raise OSError("broken")
        return index

    def __len__(self) -> int:
        return len(self.reading.names)

    def __getitem__(self, index: int) -> int:
        return self.reading.get(index)


def read(numbers: Numbers, workers: int) -> list[int]:
    return [number for batch in DataLoader(numbers, batch_size=3, num_workers=workers) for number in batch.tolist()]


def test_find_faults_keeps_order_with_one_line_each():
    assert find_faults(["bad2", "good", "bad1"], refuse) == [("bad2", "odd bytes"), ("bad1", "truncated")]


def test_warn_skipped_lists_all_faults_above_the_limit(caplog):
    faults = [(f"f{number}", "broken") for number in range(8)]
    with caplog.at_level(logging.WARNING):
        warn_skipped(faults, 20, 8, "images")
    assert caplog.messages == [f"skipped 8 of 20 images: {name_some(faults)}"]
    assert name_some(faults).endswith("f4 (broken) and 3 more")
    with refused(r"^at most --data.max_skipped = 7 images may be unreadable, got 8: f0 .*f7 \(bro", TooManyFaults):
        warn_skipped(faults, 20, 7, "images")


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_skipping_returns_the_next_readable_example(workers):
    numbers = Numbers(9, {1, 2, 8}, limit=3)
    assert read(numbers, workers) == [0, 3, 3, 3, 4, 5, 6, 7, 0]
    assert numbers.reading.found() == [(f"file{index}", "broken") for index in (1, 2, 8)]


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_skipping_raises_with_list_above_the_limit(workers):
    rule = "at most --data.max_skipped = 1 files may be unreadable, got 2"
    with refused(rf"^{rule}: file0 \(broken\), file3 \(broken\)$", TooManyFaults):
        read(Numbers(9, {0, 3}, limit=1), workers)


def test_skipping_warns_once_per_example(caplog):
    numbers = Numbers(4, {1}, limit=1)
    assert [numbers[1], numbers[1]] == [2, 2]
    assert caplog.messages == ["skipped file1 (broken), 1 of at most 1"]


def test_skipping_raises_if_all_examples_are_unreadable():
    with refused(r"can be read: file0 \(broken\), file1 \(broken\), file2 \(broken\)$", TooManyFaults):
        Numbers(3, {0, 1, 2}, limit=10)[0]


def test_skipping_ends_iteration_with_index_error():
    assert [*Numbers(3, {1}, limit=1)] == [0, 2, 2]
    with pytest.raises(IndexError, match="below 3, got 3"):
        Numbers(3, {1}, limit=1)[3]


def test_memory_error_is_not_skipped():
    def exhausted(_):
        raise MemoryError

    with pytest.raises(MemoryError):
        find_faults(["a"], exhausted)
    with pytest.raises(MemoryError):
        Skipping(["a"], exhausted, 1).get(0)


def test_skipping_can_be_pickled():
    assert pickle.loads(pickle.dumps(Numbers(3, {0}, limit=1)))[0] == 1


def test_remember_counts_examples_that_are_still_unreadable():
    broken = {1, 2, 3}

    def load(index):
        if index in broken:
            raise ValueError("broken")
        return index

    reading = Skipping([f"file{index}" for index in range(6)], load, limit=2)
    reading.remember(["file1", "file5", "file1", "elsewhere"])
    assert reading.found() == [("file1", "broken")]
    with refused(r"^at most --data.max_skipped = 2 files .* got 3: file1 \(broken\)", TooManyFaults):
        reading.remember(["file2", "file3"])
