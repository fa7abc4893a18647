"""Measure the time of functions in interleaved rounds."""

import ctypes
import math
import statistics
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch

Work = Callable[[], object]

Name = TypeVar("Name", bound=Hashable)

_SHORTEST_SAMPLE = 0.05
_MOST_REPEATS = 5000
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # from malloc.h
_LARGEST_MMAP_THRESHOLD = 32 * 2**20


@dataclass(frozen=True)
class Quartiles:
    """Median and quartiles over the rounds."""

    low: float
    median: float
    high: float


def interleaved_seconds(works: Mapping[Name, Work], *, rounds: int, device: str) -> dict[Name, list[float]]:
    """Time functions in interleaved rounds, so that other load affects all equally; return seconds of one call."""
    # Each round takes one sample of each and starts with a different one; a sample repeats short functions for 50
    # milliseconds. One untimed call warms up and the fastest of three more sets the number of repeats. Freed memory is
    # reused, as by a caching allocator.
    with malloc_thresholds(mmap=_LARGEST_MMAP_THRESHOLD, trim=2**31 - 1):
        for work in works.values():
            work()
        samples = {
            name: partial(seconds_per_call, work, _repeats(work, device), device) for name, work in works.items()
        }
        return interleaved(samples, rounds)


def interleaved(samples: Mapping[Name, Callable[[], float]], rounds: int) -> dict[Name, list[float]]:
    """Take samples in interleaved rounds, each starting with a different one; return a number per round and name."""
    names = list(samples)
    values: dict[Name, list[float]] = {name: [] for name in names}
    for index in range(rounds):
        first = index % len(names)
        for name in names[first:] + names[:first]:
            values[name].append(samples[name]())
    return values


def seconds_per_call(work: Work, repeats: int, device: str) -> float:
    """Compute the mean time of repeated calls."""
    _wait(device)
    start = time.perf_counter()
    for _ in range(repeats):
        work()
    _wait(device)
    return (time.perf_counter() - start) / repeats


def quartiles(values: Sequence[float]) -> Quartiles:
    """Compute median and quartiles of at least one value."""
    if len(values) == 1:
        return Quartiles(values[0], values[0], values[0])
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Quartiles(low, median, high)


def ratio(over: Sequence[float], under: Sequence[float]) -> Quartiles:
    """Compute quartiles of the ratios of each round, in which a temporary slowdown cancels."""
    return quartiles([a / b for a, b in zip(over, under, strict=True)])


def milliseconds(seconds: Sequence[float]) -> Quartiles:
    """Compute quartiles in milliseconds."""
    return quartiles([1e3 * value for value in seconds])


@contextmanager
def threads(count: int | None) -> Iterator[None]:
    """Set the number of threads of PyTorch within the context; None leaves it unchanged."""
    before = torch.get_num_threads()
    torch.set_num_threads(before if count is None else count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def malloc_thresholds(*, mmap: int, trim: int) -> Iterator[None]:
    """Set the sizes from which glibc returns freed memory to the operating system."""
    # Page faults of new memory can take longer than a rotation. On exit the thresholds are those that glibc itself
    # reaches when large blocks are freed. Other C libraries are not affected. `mmap`: bytes from which a block is
    # requested from the system, and returned when it is freed; `trim`: bytes of free memory at the end of the heap
    # above which it is returned.
    set_option = getattr(ctypes.CDLL(None), "mallopt", lambda option, value: None)
    set_option(_M_MMAP_THRESHOLD, mmap)
    set_option(_M_TRIM_THRESHOLD, trim)
    try:
        yield
    finally:
        set_option(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
        set_option(_M_TRIM_THRESHOLD, 2 * _LARGEST_MMAP_THRESHOLD)


def _repeats(work: Work, device: str) -> int:
    seconds = seconds_per_call(work, 1, device)
    if seconds < _SHORTEST_SAMPLE:
        seconds = min(seconds, seconds_per_call(work, 1, device), seconds_per_call(work, 1, device))
    return max(1, min(_MOST_REPEATS, math.ceil(_SHORTEST_SAMPLE / max(seconds, 1e-9))))


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
