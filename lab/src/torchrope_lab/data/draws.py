"""Counter-based random numbers: functions of seed and example index, independent of process and order."""

import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class Draws:
    """Random numbers of a batch, one row per example."""

    # A number is a hash of (seed, index, purpose, column) with the mixing function of SplitMix64 (Steele, Lea and
    # Flood, Fast splittable pseudorandom number generators, OOPSLA 2014). So the augmentation of an example is the same
    # in any batch, in any process and on any device, and advances no other generator.

    seed: int
    indices: Sequence[int]

    def uniform(self, purpose: str, count: int = 1) -> Tensor:
        """Draw uniformly from [0, 1): float64 `(examples, count)` on the CPU."""
        bits = self._bits(purpose, count) >> np.uint64(11)
        return torch.from_numpy(bits.astype(np.float64) / 2.0**53)

    def seeds(self, purpose: str) -> list[int]:
        """Draw a seed of 63 bits for each example."""
        return (self._bits(purpose, 1)[:, 0] >> np.uint64(1)).tolist()

    @property
    def of_batch(self) -> "Draws":
        """Draws for the whole batch: those of its first example, so use a purpose that no example uses."""
        return Draws(self.seed, self.indices[:1])

    def _bits(self, purpose: str, count: int) -> np.ndarray:
        start = np.array([self.seed % 2**64], np.uint64) + np.array([zlib.crc32(purpose.encode())], np.uint64) * _GOLDEN
        rows = _scramble(_scramble(start) + np.asarray(self.indices, np.int64).astype(np.uint64) * _GOLDEN)
        columns = np.arange(1, count + 1, dtype=np.uint64) * _GOLDEN
        return _scramble(rows[:, None] + columns)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed torch's global CPU generator inside the `with` block, and restore its state afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


def _scramble(bits: np.ndarray) -> np.ndarray:
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))
