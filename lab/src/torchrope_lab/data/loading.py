"""Loaders of batches: their examples, and the work of the loading processes and of the device."""

import atexit
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from multiprocessing.connection import wait
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, Sampler, default_collate

from torchrope_lab.data.augment import EpochSet, augmented
from torchrope_lab.data.config import AugmentConfig
from torchrope_lab.data.draws import Draws, seeded
from torchrope_lab.data.repeated import example_of
from torchrope_lab.data.streamed import StreamedSet


class Request(NamedTuple):
    """Request of a loader to its processes: the indices of a batch, and the seed of their augmentation."""

    seed: int
    indices: list[int]


class ReadBatch(NamedTuple):
    """A batch as the loading processes send it, before normalisation: inputs, labels and further tensors."""

    request: Request
    tensors: tuple[Tensor, ...]


class Staged(Dataset):
    """The batches of an `EpochSet` of files, computed in two parts with the same results.

    `__getitems__` reads a batch in a loading process, which sends it as bytes; `finish` normalises, erases and mixes it
    on the device it is on. Copies of an example in one batch, which repeated augmentation makes, are decoded once.

    Args:
        epoch: Examples, augmentation and seed.
        on_device: Whether flips, colours and RandAugment belong to `finish` too.
    """

    def __init__(self, epoch: EpochSet, *, on_device: bool) -> None:
        self.epoch = epoch
        self.dataset: StreamedSet = epoch.dataset  # type: ignore[assignment]
        config = epoch.config
        last = {name: getattr(config, name) for name in ("erasing", "mixup", "cutmix", "mix_probability")}
        first = replace(config, erasing=0.0, mixup=0.0, cutmix=0.0)
        self.stages = (AugmentConfig(), config) if on_device else (first, AugmentConfig(**last))

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple:
        return self.epoch[index]

    def __getitems__(self, request: Request) -> ReadBatch:
        """Read, crop and augment a batch."""
        return ReadBatch(request, self.augment(request, self.read(request)))

    def read(self, request: Request) -> tuple[Tensor, ...]:
        """Read a batch as `augment.read_batch` does, with one decoding for the copies of an example."""
        draws = Draws(*request)
        copies: dict[int, list[tuple[int, int]]] = {}
        for number, (index, seed) in enumerate(zip(draws.indices, draws.seeds("sample"), strict=True)):
            copies.setdefault(example_of(index, len(self)), []).append((number, seed))
        samples: list[tuple] = [()] * len(draws.indices)
        for index, numbered in copies.items():
            decoded = None
            for number, seed in numbered:
                with seeded(seed):
                    if decoded is None or not self.dataset.decodes_once:
                        decoded, *others = self.dataset.reading.get(index)
                    samples[number] = (self.dataset.to_size(decoded), *others)
        return tuple(default_collate(samples))

    def augment(self, request: Request, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Apply the part of the augmentation that belongs to the loading processes."""
        return augmented(tensors, self.stages[0], self.epoch.num_classes, Draws(*request))

    def finish(self, batch: ReadBatch) -> tuple:
        """Compute the rest of the augmentation, on the device of the batch."""
        normalise, draws = self.dataset.normalise, Draws(*batch.request)
        return augmented(batch.tensors, self.stages[1], self.epoch.num_classes, draws, normalise)


class Batches(BatchSampler):
    """Batch sampler that yields a `Request` per batch.

    Args:
        order: Sampler of example indices; with a `ResumedSampler`, batch numbers start after the skipped batches.
        batch_size: Examples of a batch.
        drop_last: Drop the last batch if it is smaller.
        ask: Maps the number of a batch in the epoch and its indices to the argument of `__getitems__`.
    """

    def __init__(self, order: Sampler[int], batch_size: int, drop_last: bool, ask: Callable[[int, list[int]], Any]):
        super().__init__(order, batch_size, drop_last)
        self.ask = ask

    def __iter__(self) -> Iterator[Any]:
        first = self.sampler.seen // self.batch_size if isinstance(self.sampler, ResumedSampler) else 0
        for number, indices in enumerate(super().__iter__(), first):
            yield self.ask(number, indices)

    def become(self, other: "Batches") -> None:
        """Replace the order and the requests by those of another epoch."""
        vars(self).update(vars(other))


class ResumedSampler(Sampler[int]):
    """Sampler that skips the first `seen` indices of an epoch; its length is that of the whole epoch.

    Args:
        whole: Order of all examples.
        epoch: Epoch in which indices are skipped.
        seen: Number of indices to skip.
    """

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
    """Data loader whose batches of a `Staged` set are finished on a device.

    Its processes leave signals, which a terminal sends to all processes of a command, to the parent. With a CUDA device
    batches are copied from pinned memory and finished in a stream of their own, while the device computes.

    Args:
        dataset: Data set whose batches are collated once.
        device: Device of the batches of a `Staged` set.
        options: Options of `DataLoader`.
    """

    def __init__(self, dataset: Dataset, device: torch.device | None = None, **options: Any) -> None:
        self.device = device or torch.device("cpu")
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        pinned = torch.cuda.is_available()
        defaults = {"collate_fn": collate_once, "worker_init_fn": follow_parent, "pin_memory": pinned}
        super().__init__(dataset, **{**defaults, **options})

    def __iter__(self) -> Any:
        """Start the loading processes, with signals blocked until they ignore them."""
        if not hasattr(signal, "pthread_sigmask"):  # Windows
            return self._finished(super().__iter__())
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _LEFT_TO_PARENT)
        try:
            return self._finished(super().__iter__())
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def serves(self, dataset: "Staged", device: torch.device) -> bool:
        """Return whether the loader loads the same examples for the same device; seeds are part of its requests."""
        own = self.dataset
        same = isinstance(own, Staged) and own.dataset is dataset.dataset and own.stages == dataset.stages
        return same and self.device == device

    def _finished(self, batches: Iterator[Any]) -> Iterator[Any]:
        return map(self._finish, batches) if isinstance(self.dataset, Staged) else batches

    def _finish(self, batch: ReadBatch) -> tuple:
        assert isinstance(self.dataset, Staged)
        if self._stream is None:
            return self.dataset.finish(batch)
        current = torch.cuda.current_stream(self.device)
        with torch.cuda.stream(self._stream):
            moved = tuple(tensor.to(self.device, non_blocking=True) for tensor in batch.tensors)
            finished = self.dataset.finish(batch._replace(tensors=moved))
        current.wait_stream(self._stream)
        for tensor in finished:
            tensor.record_stream(current)
        return finished


_LEFT_TO_PARENT = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1") if hasattr(signal, name)]


def follow_parent(_: int) -> None:
    """Leave signals to the parent process, and end with it.

    PyTorch's loading processes run for ever if their parent is killed while they start.
    """
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
