"""Training examples at several sizes, one size for all examples of a batch."""

from collections.abc import Mapping, Sequence

import torch
from torch.utils.data import Dataset

from torchrope.lab.data.transforms import resize

Size = tuple[int, ...]


class MixedSizes(Dataset):
    """The same examples at several sizes, read by whole batches.

    Args:
        sets: They at each size, with `__getitems__`.
    """

    def __init__(self, sets: Mapping[Size, Dataset]) -> None:
        self.sets = sets

    def __len__(self) -> int:
        return len(next(iter(self.sets.values())))  # type: ignore[arg-type]

    def __getitems__(self, chosen: Sequence[tuple[Size, int]]) -> tuple:
        """A batch of examples `(size, index)`, all of one size."""
        (size,) = {size for size, _ in chosen}
        return self.sets[size].__getitems__([index for _, index in chosen])  # type: ignore[attr-defined]


class Resampled(Dataset):
    """Examples whose inputs are resampled after everything else that changes them.

    Args:
        dataset: Batches of inputs, labels, and distances between voxels if known, with `__getitems__`.
        size: Extent of every axis.
    """

    def __init__(self, dataset: Dataset, size: Size) -> None:
        self.dataset = dataset
        self.size = size

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def __getitems__(self, indices: Sequence[int]) -> tuple:
        inputs, labels, *spacings = self.dataset.__getitems__(indices)  # type: ignore[attr-defined]
        longer = torch.tensor(inputs.shape[2:]) / torch.tensor(self.size)  # voxels show as much in all
        return resize(inputs, self.size), labels, *(spacing * longer.to(spacing) for spacing in spacings)


def sources(dataset: Dataset) -> list[Dataset]:
    """The sets that a set reads from: one, or those of all sizes."""
    while hasattr(dataset, "dataset"):
        dataset = dataset.dataset
    if isinstance(dataset, MixedSizes):
        return [each for of_size in dataset.sets.values() for each in sources(of_size)]
    return [dataset]
