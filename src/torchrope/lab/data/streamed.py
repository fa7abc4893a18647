"""Samples decoded on access; a damaged sample is replaced by another one."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor
from torch.utils.data import Dataset

from torchrope.lab.data.faults import Skipping

STATISTICS_SAMPLES = 64

Streamed = TypeVar("Streamed", bound="StreamedSet")


class StreamedSet(Dataset, ABC):
    """Inputs decoded one by one; what cannot be decoded is replaced by the next sample that can.

    Args:
        samples: (name, label) of every sample.
        max_skipped: So many samples may be damaged, over all loading processes of a run.
        kind: What the samples are, for messages.

    Attributes:
        reading: Counts the damaged.
    """

    def __init__(self, samples: Sequence[tuple[str, int]], max_skipped: int, kind: str) -> None:
        self.samples = list(samples)
        self.mean: Tensor | float = 0.0
        self.std: Tensor | float = 1.0
        self.ready = True  # for a model
        self.reading = Skipping([name for name, _ in self.samples], self.sample, max_skipped, kind)

    @abstractmethod
    def load(self, index: int) -> Tensor:
        """Decode a sample `(..., channels, *sizes)`, float32 in [0, 1] or bytes. Raises anything where it cannot."""

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.reading.get(index)

    def sample(self, index: int) -> tuple[Tensor, int]:
        """A sample itself, with its label, and no substitute for it."""
        inputs = self.load(index)
        return self.normalise(inputs) if self.ready else inputs, self.samples[index][1]

    def normalise(self, inputs: Tensor) -> Tensor:
        """Make what `load` decodes ready for a model: (x - mean) / std, of bytes / 255."""
        in_one = inputs.float() / 255 if inputs.dtype == torch.uint8 else inputs
        return (in_one - self.mean) / self.std

    def normalised(self: Streamed, mean: Tensor, std: Tensor) -> Streamed:
        """The same samples as (x - mean) / std, both `(channels, 1, ...)`."""
        changed = self.copied()
        changed.mean, changed.std = mean, std
        return changed

    @property
    def raw(self: Streamed) -> Streamed:
        """The same samples as `load` decodes them."""
        changed = self.copied()
        changed.ready = False
        return changed

    def copied(self: Streamed) -> Streamed:
        """The same samples; what is found damaged is counted together."""
        same = copy.copy(self)
        same.reading = copy.copy(self.reading)
        same.reading.load = same.sample
        return same

    def statistics(self) -> tuple[Tensor, Tensor]:
        """Measure mean and standard deviation of every channel on up to 64 samples, spread over the whole set.

        Returns:
            Two tensors `(channels, 1, ...)`; the standard deviation is at least one step of 8-bit data.
        """
        step = -(-len(self) // STATISTICS_SAMPLES)
        inputs = [self[index][0] for index in range(0, len(self), step)]
        others = tuple(range(1, inputs[0].ndim))
        mean = torch.stack([sample.mean(others, keepdim=True) for sample in inputs]).mean(0)
        variance = torch.stack([(sample - mean).square().mean(others, keepdim=True) for sample in inputs]).mean(0)
        return mean, variance.sqrt().clamp(min=1 / 255)
