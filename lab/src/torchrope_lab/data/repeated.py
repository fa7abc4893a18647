"""Repeated augmentation: a sampler that draws each example several times per step, and sets that read batches."""

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.utils.data import Dataset, Sampler


class Repeated(Sampler[int]):
    """Order one process's part of an epoch in which each example occurs `repeats` times in a row; the length stays."""

    # Hoffer et al., Augment your batch, arXiv:1901.09335; `RASampler` of DeiT's code. The batches of all processes, in
    # turn, are consecutive parts of the repeated order. So the copies of an example are in the same step for any number
    # of processes and accumulated batches, with at most two exceptions per step, and the examples of a step are those
    # of DeiT's `RASampler`. Unlike there, copies are in one batch, which lets one decoding serve all. In a batch, an
    # example is not next to a copy of itself, with which Mixup would mix it, and the copies have different neighbours.
    # Copy k = 0, 1, ... of example i has the index i + k · size, so its augmentation differs; see `example_of`.

    def __init__(
        self,
        order: Sampler[int] | Sequence[int],
        repeats: int,
        size: int,
        batch_size: int,
        replicas: int = 1,
        rank: int = 0,
    ) -> None:
        self.order = order
        self.repeats = repeats
        self.size = size
        self.batch_size = batch_size
        self.replicas = replicas
        self.rank = rank

    def __len__(self) -> int:
        return -(-len(self.order) // self.replicas)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[int]:
        order = list(self.order)
        for start in range(0, len(self), self.batch_size):
            count = min(self.batch_size, len(self) - start)
            first = start * self.replicas + self.rank * count
            copies: list[list[int]] = [[] for _ in range(self.repeats)]
            for position in range(first, first + count):
                number, copy = divmod(position, self.repeats)
                copies[copy].append(order[number % len(order)] + copy * self.size)
            for copy, indices in enumerate(copies):
                for offset in range(copy + 1):  # steps of 1, 2, 3: copies have different neighbours
                    yield from indices[offset :: copy + 1]


def example_of(index: int, size: int) -> int:
    """Return the example of an index of `Repeated`; indices with the same example are copies."""
    return index % size


class ReadInBatches(Dataset):
    """Base class of sets that define `__len__` and `__getitems__`; an example is a batch of one."""

    def __getitem__(self, index: int) -> tuple:
        if not 0 <= index < len(self):  # type: ignore[arg-type]  # stops iteration; only `__getitems__` takes repeats
            raise IndexError(f"an example must be between 0 and {len(self) - 1}, got {index}")  # type: ignore[arg-type]
        inputs, labels, *others = self.__getitems__([index])
        label: Any = int(labels[0]) if isinstance(labels, Tensor) and labels.ndim == 1 else labels[0]
        return inputs[0], label, *(other[0] for other in others)

    def __getitems__(self, indices: Sequence[int]) -> tuple:
        """Return a batch."""
        raise NotImplementedError
