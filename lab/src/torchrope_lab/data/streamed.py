"""Base class of data sets whose samples are decoded on access, with replacement of unreadable samples."""

import copy
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, TypeVar

import torch
from torch import Tensor
from torch.utils.data import Dataset

from torchrope_lab.data.faults import Skipping
from torchrope_lab.data.tensors import Normalise

STATISTICS_SAMPLES = 64
BEGINNING = 2**20

Streamed = TypeVar("Streamed", bound="StreamedSet")


class StreamedSet(Dataset, ABC):
    """Data set of samples decoded on access; an unreadable sample is replaced by the next readable one."""

    # `max_skipped` is of all loading processes of a run. `decodes_once`: whether `load` draws no random numbers, so
    # that several crops may share its result.

    decodes_once: ClassVar[bool] = False

    def __init__(self, samples: Sequence[tuple[str, int]], max_skipped: int, kind: str) -> None:
        self.samples = list(samples)
        self.normalise: Normalise | None = Normalise(torch.zeros(()), torch.ones(()))
        self._enlarged = torch.zeros(len(samples), dtype=torch.bool).share_memory_()  # shared by the loading processes
        self.reading = Skipping([name for name, _ in self.samples], self.sample, max_skipped, kind)

    @abstractmethod
    def load(self, index: int) -> Any:
        """Decode a sample `(..., channels, *sizes)`, float32 in [0, 1] or bytes, or what `to_size` converts to it."""
        # Raises any exception if the sample is unreadable.

    @abstractmethod
    def files(self, index: int) -> Sequence[Path | BinaryIO]:
        """Return the paths, or open files, of a sample."""

    def stored(self, index: int) -> Iterator[bytes]:
        """Yield the size and the first `BEGINNING` bytes of every file of a sample; nothing of unreadable files."""
        for file in self.files(index):
            try:
                with file.open("rb") if isinstance(file, Path) else file as opened:
                    yield opened.read(BEGINNING)
                    yield str(opened.seek(0, os.SEEK_END)).encode()
            except OSError:
                continue

    def to_size(self, decoded: Any) -> Tensor:
        """Convert what `load` returns to a sample of the set's size, drawing from torch's global generator."""
        return decoded

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple:
        return self.cropped(*self.reading.get(index))

    def cropped(self, decoded: Any, *others: Any) -> tuple:
        """Return a sample of the set's size from a decoded one."""
        inputs = self.to_size(decoded)
        return inputs if self.normalise is None else self.normalise(inputs), *others

    def sample(self, index: int) -> tuple:
        """Decode a sample and return it with its label; raises if it is unreadable."""
        return self.load(index), self.samples[index][1]

    @property
    def raw(self: Streamed) -> Streamed:
        """The same samples before normalisation."""
        return self.changed(normalise=None)

    @property
    def enlarged(self) -> int:
        """Number of samples read so far whose shorter side was upsampled, in sets that count them."""
        return int(self._enlarged.sum())

    def changed(self: Streamed, **attributes: Any) -> Streamed:
        """Return the same samples with other attributes; unreadable samples are counted together."""
        same = copy.copy(self)
        vars(same).update(attributes)
        same.reading = copy.copy(self.reading)
        same.reading.load = same.sample
        return same

    def with_examples(self: Streamed, sets: Sequence["StreamedSet"], indices: Tensor) -> Streamed:
        """Return samples of several sets, numbered consecutively, decoded as those of this one."""
        same, samples = copy.copy(self), [sample for part in sets for sample in part.samples]
        same.samples = [samples[index] for index in indices.tolist()]
        same._enlarged = torch.zeros(len(indices), dtype=torch.bool).share_memory_()
        names = [name for name, _ in same.samples]
        same.reading = Skipping(names, same.sample, self.reading.limit, self.reading.kind)
        return same

    def statistics(self) -> tuple[Tensor, Tensor]:
        """Measure mean and standard deviation, `(channels, 1, ...)`, on up to 64 samples, evenly spaced in the set."""
        # The standard deviation is at least one step of 8-bit data.
        step = -(-len(self) // STATISTICS_SAMPLES)
        inputs = [self[index][0] for index in range(0, len(self), step)]
        others = tuple(range(1, inputs[0].ndim))
        mean = torch.stack([sample.mean(others, keepdim=True) for sample in inputs]).mean(0)
        variance = torch.stack([(sample - mean).square().mean(others, keepdim=True) for sample in inputs]).mean(0)
        return mean, variance.sqrt().clamp(min=1 / 255)
