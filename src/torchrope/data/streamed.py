"""Samples that are decoded when they are asked for: their own randomness, and substitutes for the damaged."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.data import Dataset

from torchrope.data.faults import Fault, Skipping

STATISTICS_SAMPLES = 64
SAMPLES_PER_SEED = 1_000_003

Streamed = TypeVar("Streamed", bound="StreamedSet")


class StreamedSet(Dataset, ABC):
    """Inputs decoded one by one; what cannot be decoded is replaced by the next sample that can.

    What `load` draws from torch's global generator is a function of `seed` and the sample alone, whichever
    process draws it and in whatever order.

    Args:
        samples: (name, label) of every sample.
        max_skipped: So many samples may be damaged, over all loading processes of a run.
        kind: What the samples are, for messages.
    """

    def __init__(self, samples: Sequence[tuple[str, int]], max_skipped: int, kind: str) -> None:
        self.samples = list(samples)
        self.seed = 0
        self.mean: Tensor | float = 0.0
        self.std: Tensor | float = 1.0
        self._skipping = Skipping([name for name, _ in self.samples], self._get, max_skipped, kind)

    @abstractmethod
    def load(self, index: int) -> Tensor:
        """Decode a sample: float32 `(..., channels, *sizes)` in [0, 1]. Raises anything where it cannot."""

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self._skipping.get(index)

    def at_epoch(self: Streamed, seed: int) -> Streamed:
        """The same samples with another randomness."""
        return self._changed(seed=seed)

    def normalised(self: Streamed, mean: Tensor, std: Tensor) -> Streamed:
        """The same samples as (x - mean) / std, both `(channels, 1, ...)`."""
        return self._changed(mean=mean, std=std)

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

    @property
    def skipped(self) -> list[Fault]:
        """Samples that could not be decoded so far, by any process, with what is wrong with them."""
        return self._skipping.found()

    def _get(self, index: int) -> tuple[Tensor, int]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed((self.seed * SAMPLES_PER_SEED + index) % 2**63)
            return (self.load(index) - self.mean) / self.std, self.samples[index][1]

    def _changed(self: Streamed, **attributes: Any) -> Streamed:
        changed = copy.copy(self)
        vars(changed).update(attributes)
        changed._skipping = copy.copy(self._skipping)  # counts in the same shared memory
        changed._skipping.load = changed._get
        return changed
