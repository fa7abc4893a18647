"""Training at several input sizes, with one size per batch."""

from collections.abc import Mapping, Sequence

import torch
from torch.utils.data import Dataset

from torchrope_lab.data.transforms import resize

Size = tuple[int, ...]


class MixedSizes(Dataset):
    """The same examples at several sizes, read in batches."""

    def __init__(self, sets: Mapping[Size, Dataset]) -> None:
        self.sets = sets

    def __len__(self) -> int:
        return len(next(iter(self.sets.values())))  # type: ignore[arg-type]

    def __getitems__(self, request: tuple[Size, Sequence[int]]) -> tuple:
        """Read a batch `(size, indices)`."""
        size, indices = request
        return self.sets[size].__getitems__(indices)  # type: ignore[attr-defined]


class Resampled(Dataset):
    """Resample the inputs of a data set to another size, after its augmentation."""

    def __init__(self, dataset: Dataset, size: Size) -> None:
        self.dataset = dataset
        self.size = size

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def __getitems__(self, indices: Sequence[int]) -> tuple:
        inputs, labels, *spacings = self.dataset.__getitems__(indices)  # type: ignore[attr-defined]
        factors = torch.tensor(inputs.shape[2:]) / torch.tensor(self.size)  # the total extent stays
        return resize(inputs, self.size), labels, *(spacing * factors.to(spacing) for spacing in spacings)
