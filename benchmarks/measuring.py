"""Measure the peak memory of a function, and fit the exponent of its growth. Needs torch alone."""

import json
import math
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch


def peak_bytes(work: Callable[[], object], device: str) -> int:
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


def slope(sizes: Sequence[int], values: Sequence[float]) -> float:
    """Fit the exponent of a power law by least squares of the logarithms."""
    return statistics.linear_regression([math.log(size) for size in sizes], [math.log(v) for v in values]).slope


def _cpu_allocations(work: Callable[[], object]) -> list[int]:
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
