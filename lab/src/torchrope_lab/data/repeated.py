"""Repeated augmentation: a sampler that draws each example several times per epoch."""

from collections.abc import Iterator
from itertools import islice

from torch.utils.data import Sampler

WINDOW = 256  # examples before the first repeat, so that Mixup does not mix an example with itself


class Repeated(Sampler[int]):
    """Repeat the first examples of an order; the length of the epoch stays the same.

    Repeat k = 0, 1, ... of example i has the index i + k · size, so its augmentation differs. With several processes,
    each repeats the examples of its own order.

    Args:
        order: Sampler of one epoch.
        repeats: Number of times that each example is drawn.
        size: Number of examples in the set.

    References:
        Hoffer et al., Augment your batch, arXiv:1901.09335; `RASampler` of DeiT's code.

    Example:
        >>> list(Repeated([2, 0, 1, 3], repeats=2, size=4))
        [2, 0, 6, 4]
    """

    def __init__(self, order: Sampler[int], repeats: int, size: int) -> None:
        self.order = order
        self.repeats = repeats
        self.size = size

    def __len__(self) -> int:
        return len(self.order)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[int]:
        return islice(self._all(), len(self))

    def _all(self) -> Iterator[int]:
        order = iter(self.order)
        length = min(WINDOW, -(-len(self) // self.repeats))
        while window := list(islice(order, length)):
            for repeat in range(self.repeats):
                yield from (index + repeat * self.size for index in window)
