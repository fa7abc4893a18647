"""Random numbers per example: functions of seed and index, independent of process and order."""

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
    """The random numbers of a batch, one row an example.

    A number is a hash of (seed, index, purpose, place in the row): the generator SplitMix64 (Steele, Lea and
    Flood, Fast splittable pseudorandom number generators, OOPSLA 2014), entered at any point. So an example is
    changed alike in any batch, by any process and on any device, and drawing for it draws from no one else.

    Args:
        seed: That of the run and the epoch.
        indices: Which examples.

    Example:
        >>> both, second = Draws(7, [3, 5]).uniform("flip"), Draws(7, [5]).uniform("flip")
        >>> bool(both[1] == second[0])
        True
    """

    seed: int
    indices: Sequence[int]

    def uniform(self, purpose: str, count: int = 1) -> Tensor:
        """Draw from [0, 1): float64 `(examples, count)` on the CPU."""
        bits = self._bits(purpose, count) >> np.uint64(11)
        return torch.from_numpy(bits.astype(np.float64) / 2.0**53)

    def seeds(self, purpose: str) -> list[int]:
        """One seed of 63 bits for each example."""
        return (self._bits(purpose, 1)[:, 0] >> np.uint64(1)).tolist()

    @property
    def of_batch(self) -> "Draws":
        """Numbers for the batch as a whole: those of its first example, so name another purpose."""
        return Draws(self.seed, self.indices[:1])

    def _bits(self, purpose: str, count: int) -> np.ndarray:
        start = np.array([self.seed % 2**64], np.uint64) + np.array([zlib.crc32(purpose.encode())], np.uint64) * _GOLDEN
        rows = _scramble(_scramble(start) + np.asarray(self.indices, np.int64).astype(np.uint64) * _GOLDEN)
        places = np.arange(1, count + 1, dtype=np.uint64) * _GOLDEN
        return _scramble(rows[:, None] + places)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Run what draws from torch's global generator on the CPU with a seed, and leave that generator untouched."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


def _scramble(bits: np.ndarray) -> np.ndarray:
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))
