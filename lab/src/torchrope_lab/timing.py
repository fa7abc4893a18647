"""Measure the time of functions in interleaved rounds, and their peak memory."""

import ctypes
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

Work = Callable[[], object]

Name = TypeVar("Name", bound=Hashable)

_SHORTEST_SAMPLE = 0.05
_MOST_REPEATS = 5000
_BEYOND_CACHES = 64 * 2**20
"""Bytes, more than the caches of a processor."""


@dataclass(frozen=True)
class Quartiles:
    """Median and quartiles over the rounds."""

    low: float
    median: float
    high: float


def interleaved_seconds(
    works: Mapping[Name, Work], *, rounds: int, device: str, new_memory: bool = False
) -> dict[Name, list[float]]:
    """Time functions in interleaved rounds, so that other load on the machine affects all equally.

    Each round takes one sample of each and starts with a different one; a sample repeats short functions for
    50 milliseconds. One untimed call warms up and the fastest of three more sets the number of repeats.

    Args:
        works: The functions to time, by name.
        rounds: Samples of each.
        device: Device of the functions; CUDA is synchronised.
        new_memory: Return freed memory to the operating system before each sample, and large freed blocks within it, so
            that new allocations cause page faults. If False, freed memory is reused, as by a caching allocator.

    Returns:
        Seconds of one call, a number per round and name.
    """
    with _freed_memory(kept=not new_memory):
        for work in works.values():
            work()
        repeats = {name: _repeats(work, device) for name, work in works.items()}
        seconds: dict[Name, list[float]] = {name: [] for name in works}
        for name in _rotated_rounds(list(works), rounds):
            if new_memory:
                _release_freed_memory()
            seconds[name].append(_seconds(works[name], repeats[name], device))
    return seconds


def interleaved_cold_seconds(
    works: Mapping[Name, Callable[[], Work]], *, rounds: int, device: str
) -> dict[Name, list[float]]:
    """Time single calls in interleaved rounds, each on newly prepared memory and with cold caches.

    Args:
        works: Functions that prepare a call, by name.
        rounds: Calls of each.
        device: Device of the functions; CUDA is synchronised.

    Returns:
        Seconds of a call, a number per round and name.
    """
    with _freed_memory(kept=False):
        for prepare in works.values():
            prepare()()
        flush = torch.empty(
            _BEYOND_CACHES, dtype=torch.uint8, device=device
        )  # its writes evict q and k from the caches
        seconds: dict[Name, list[float]] = {name: [] for name in works}
        for name in _rotated_rounds(list(works), rounds):
            work = works[name]()
            flush.fill_(1)
            _release_freed_memory()
            seconds[name].append(_seconds(work, 1, device))
    return seconds


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


def slope(sizes: Sequence[int], times: Sequence[float]) -> float:
    """Fit the exponent of a power law by least squares of the logarithms."""
    return statistics.linear_regression([math.log(size) for size in sizes], [math.log(t) for t in times]).slope


def peak_bytes(work: Work, device: str) -> int:
    """Measure the peak memory of a function, beyond what was allocated before.

    On the CPU every allocation of PyTorch's allocator counts, scratch memory inside operators too; memory that a
    library such as MKL allocates itself does not.
    """
    work()
    if device == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        work()
        return torch.cuda.max_memory_allocated() - before
    held = peak = 0
    for change in _cpu_allocations(work):
        held += change
        peak = max(peak, held)
    return peak


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
def _freed_memory(*, kept: bool) -> Iterator[None]:
    """Make glibc keep freed memory for later allocations, or return large blocks to the system.

    Page faults of new memory can take longer than a rotation. On exit the thresholds are those that glibc itself
    reaches when large blocks are freed. Other C libraries are not affected.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", lambda option, value: None)
    set_option(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD if kept else 128 * 2**10)
    set_option(_M_TRIM_THRESHOLD, 2**31 - 1 if kept else 128 * 2**10)
    try:
        yield
    finally:
        set_option(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
        set_option(_M_TRIM_THRESHOLD, 2 * _LARGEST_MMAP_THRESHOLD)


def _release_freed_memory() -> None:
    """Return the pages of all freed blocks to the system, also those below blocks in use, which stay in the heap."""
    getattr(ctypes.CDLL(None), "malloc_trim", lambda pad: None)(0)


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # from malloc.h
_LARGEST_MMAP_THRESHOLD = 32 * 2**20


def _cpu_allocations(work: Work) -> list[int]:
    """Return the bytes of every allocation, and as negative numbers of every deallocation, in order of time."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        result = work()
        del result
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    on_cpu = [event for event in events if event["name"] == "[memory]" and event["args"]["Device Type"] == 0]
    return [int(event["args"]["Bytes"]) for event in sorted(on_cpu, key=lambda event: event["ts"])]


def _rotated_rounds(names: Sequence[Name], rounds: int) -> Iterator[Name]:
    """Yield all names in each round, each round starting with the next name."""
    for index in range(rounds):
        first = index % len(names)
        yield from names[first:]
        yield from names[:first]


def _repeats(work: Work, device: str) -> int:
    seconds = _seconds(work, 1, device)
    if seconds < _SHORTEST_SAMPLE:
        seconds = min(seconds, _seconds(work, 1, device), _seconds(work, 1, device))
    return max(1, min(_MOST_REPEATS, math.ceil(_SHORTEST_SAMPLE / max(seconds, 1e-9))))


def _seconds(work: Work, repeats: int, device: str) -> float:
    _wait(device)
    start = time.perf_counter()
    for _ in range(repeats):
        work()
    _wait(device)
    return (time.perf_counter() - start) / repeats


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
