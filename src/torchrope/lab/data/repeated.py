"""Training examples repeated several times per epoch, each time with different augmentation."""

from collections.abc import Iterator
from itertools import islice

from torch.utils.data import Sampler

TOGETHER = 256  # whose repeats follow each other, so that Mixup's neighbours are not the same example


class Repeated(Sampler[int]):
    """Draw the first examples of an order several times each, as many in all as the order has.

    The k-th time, example i is called i + k · size: what is drawn at random for it is another's. On several processes
    each repeats examples of its own.

    Args:
        order: The order of an epoch.
        repeats: How often each example comes.
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
        together = min(TOGETHER, -(-len(self) // self.repeats))
        while window := list(islice(order, together)):
            for time in range(self.repeats):
                yield from (index + time * self.size for index in window)
