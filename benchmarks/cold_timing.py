"""Measure the time of single calls in interleaved rounds, on new memory and with cold caches."""

import ctypes
from collections.abc import Callable, Mapping
from functools import partial

import torch

from torchrope_lab.training.timing import Name, Work, interleaved, malloc_thresholds, seconds_per_call

_BEYOND_CACHES = 64 * 2**20
"""Bytes, more than the caches of a processor."""
_SMALL = 128 * 2**10
"""glibc's first thresholds: freed blocks above this size are returned to the operating system."""


def interleaved_cold_seconds(
    works: Mapping[Name, Callable[[], Work]], *, rounds: int, device: str
) -> dict[Name, list[float]]:
    """Time single calls in interleaved rounds, each with cold caches, and on new memory, which causes page faults.

    Freed memory is returned to the operating system before each call, and large freed blocks within it.

    Args:
        works: Functions that prepare a call, by name.
        rounds: Calls of each.
        device: Device of the functions; CUDA is synchronised.

    Returns:
        Seconds of a call, a number per round and name.
    """
    flush = torch.empty(_BEYOND_CACHES, dtype=torch.uint8, device=device)  # its writes evict q and k from the caches

    def sample(prepare: Callable[[], Work]) -> float:
        work = prepare()
        flush.fill_(1)
        _release_freed_memory()
        return seconds_per_call(work, 1, device)

    with malloc_thresholds(mmap=_SMALL, trim=_SMALL):
        for prepare in works.values():
            prepare()()
        return interleaved({name: partial(sample, prepare) for name, prepare in works.items()}, rounds)


def _release_freed_memory() -> None:
    """Return the pages of all freed blocks to the system, also those below blocks in use, which stay in the heap."""
    getattr(ctypes.CDLL(None), "malloc_trim", lambda pad: None)(0)
