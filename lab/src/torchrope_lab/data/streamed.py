"""Base class of data sets whose samples are decoded on access, with replacement of unreadable samples."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor
from torch.utils.data import Dataset

from torchrope_lab.data.faults import Skipping

STATISTICS_SAMPLES = 64

Streamed = TypeVar("Streamed", bound="StreamedSet")


class StreamedSet(Dataset, ABC):
    """Data set of samples decoded on access; an unreadable sample is replaced by the next readable one.

    Args:
        samples: (name, label) of every sample.
        max_skipped: Largest number of unreadable samples, over all loading processes of a run.
        kind: Plural noun for the samples, for messages.

    Attributes:
        reading: Reads samples and counts the unreadable ones.
    """

    def __init__(self, samples: Sequence[tuple[str, int]], max_skipped: int, kind: str) -> None:
        self.samples = list(samples)
        self.mean: Tensor | float = 0.0
        self.std: Tensor | float = 1.0
        self.normalises = True
        self.reading = Skipping([name for name, _ in self.samples], self.sample, max_skipped, kind)

    @abstractmethod
    def load(self, index: int) -> Tensor:
        """Decode a sample `(..., channels, *sizes)`, float32 in [0, 1] or bytes; raises any exception if that fails."""

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.reading.get(index)

    def sample(self, index: int) -> tuple[Tensor, int]:
        """Read a sample and its label; raises if it is unreadable."""
        inputs = self.load(index)
        return self.normalise(inputs) if self.normalises else inputs, self.samples[index][1]

    def normalise(self, inputs: Tensor) -> Tensor:
        """Compute (x - mean) / std, where bytes are first divided by 255."""
        scaled = inputs.float() / 255 if inputs.dtype == torch.uint8 else inputs
        return (scaled - self.mean) / self.std

    def normalised(self: Streamed, mean: Tensor, std: Tensor) -> Streamed:
        """Return the same samples as (x - mean) / std, with mean and std `(channels, 1, ...)`."""
        same = self.copied()
        same.mean, same.std = mean, std
        return same

    @property
    def raw(self: Streamed) -> Streamed:
        """The same samples as decoded by `load`, before normalisation."""
        same = self.copied()
        same.normalises = False
        return same

    def copied(self: Streamed) -> Streamed:
        """Return a copy with the same samples; unreadable samples are counted together."""
        same = copy.copy(self)
        same.reading = copy.copy(self.reading)
        same.reading.load = same.sample
        return same

    def with_examples(self: Streamed, sets: Sequence["StreamedSet"], indices: Tensor) -> Streamed:
        """Return samples of several sets, numbered consecutively, decoded as those of this one."""
        same, samples = copy.copy(self), [sample for part in sets for sample in part.samples]
        same.samples = [samples[index] for index in indices.tolist()]
        names = [name for name, _ in same.samples]
        same.reading = Skipping(names, same.sample, self.reading.limit, self.reading.kind)
        return same

    def statistics(self) -> tuple[Tensor, Tensor]:
        """Measure mean and standard deviation of every channel on up to 64 samples, evenly spaced in the set.

        Returns:
            Two tensors `(channels, 1, ...)`; the standard deviation is at least one step of 8-bit data.
        """
        step = -(-len(self) // STATISTICS_SAMPLES)
        inputs = [self[index][0] for index in range(0, len(self), step)]
        others = tuple(range(1, inputs[0].ndim))
        mean = torch.stack([sample.mean(others, keepdim=True) for sample in inputs]).mean(0)
        variance = torch.stack([(sample - mean).square().mean(others, keepdim=True) for sample in inputs]).mean(0)
        return mean, variance.sqrt().clamp(min=1 / 255)
