"""Loaders of batches: the order of their examples, and their loading processes."""

import atexit
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from itertools import islice
from multiprocessing.connection import wait
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, Sampler, default_collate

from torchrope_lab.data.mixed_sizes import Size


class SizedBatches(BatchSampler):
    """Batch sampler that yields the size of every batch and its indices, `(size, indices)`, for `MixedSizes`."""

    # `size_of` maps the number of a batch in the epoch to its size; with a `ResumedSampler`, numbers start after the
    # skipped batches.

    def __init__(self, order: Sampler[int], batch_size: int, drop_last: bool, size_of: Callable[[int], Size]) -> None:
        super().__init__(order, batch_size, drop_last)
        self.size_of = size_of

    def __iter__(self) -> Iterator[Any]:
        first = self.sampler.seen // self.batch_size if isinstance(self.sampler, ResumedSampler) else 0
        for number, indices in enumerate(super().__iter__(), first):
            yield self.size_of(number), indices


class ResumedSampler(Sampler[int]):
    """Sampler that skips the first `seen` indices of an epoch; its length is that of the whole epoch."""

    def __init__(self, whole: Sampler[int], epoch: int, seen: int) -> None:
        self.whole = whole
        self.epoch = epoch
        self.seen = seen

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the sampler; called by Lightning."""
        if hasattr(self.whole, "set_epoch"):
            self.whole.set_epoch(epoch)
        self.seen = self.seen if epoch == self.epoch else 0

    def __iter__(self) -> Iterator[int]:
        return islice(iter(self.whole), self.seen, None)

    def __len__(self) -> int:
        return len(self.whole)  # type: ignore[arg-type]


def collate_once(batch: Any) -> Any:
    """Return a batch from `__getitems__` unchanged; collate a list of samples."""
    return batch if isinstance(batch, tuple) else default_collate(batch)


class Loader(DataLoader):
    """Data loader whose processes leave signals, which a terminal sends to all of a command, to the parent."""

    def __init__(self, dataset: Dataset, **options: Any) -> None:
        pinned = torch.cuda.is_available()
        defaults = {"collate_fn": collate_once, "worker_init_fn": follow_parent, "pin_memory": pinned}
        super().__init__(dataset, **{**defaults, **options})

    def __iter__(self) -> Any:
        """Start the loading processes, with signals blocked until they ignore them."""
        if not hasattr(signal, "pthread_sigmask"):  # Windows
            return super().__iter__()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _LEFT_TO_PARENT)
        try:
            return super().__iter__()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


_LEFT_TO_PARENT = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1") if hasattr(signal, name)]


def follow_parent(_: int) -> None:
    """Leave signals to the parent process, and end with it."""
    # PyTorch's loading processes run for ever if their parent is killed while they start.
    for number in _LEFT_TO_PARENT:
        signal.signal(number, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _LEFT_TO_PARENT)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()


def _end_with(sentinel: int) -> None:
    wait([sentinel])
    os._exit(1)


@atexit.register
def _kill_loading_processes() -> None:
    """Kill loading processes that are left; multiprocessing would end them by SIGTERM, and wait."""
    for process in multiprocessing.active_children():
        if process.daemon:
            process.kill()
