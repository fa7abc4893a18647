"""Data sets held in memory, and the choice of some of their examples."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.data import Dataset


class TensorSet(Dataset):
    """Inputs and labels in memory, indexed one by one or by whole batches.

    Args:
        inputs: float32 `(examples, channels, *sizes)`.
        labels: int64 `(examples,)`.
    """

    def __init__(self, inputs: Tensor, labels: Tensor) -> None:
        self.inputs = inputs
        self.labels = labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.inputs[index], int(self.labels[index])

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        chosen = torch.as_tensor(indices)
        return self.inputs[chosen], self.labels[chosen]


def normalised_sets(
    train_inputs: Tensor, train_labels: Tensor, val_inputs: Tensor, val_labels: Tensor
) -> tuple[TensorSet, TensorSet]:
    """Make both sets of (x - mean) / std, per channel, with mean and std of the training inputs."""
    mean, std = channel_statistics(train_inputs)
    return (
        TensorSet((train_inputs - mean) / std, train_labels),
        TensorSet((val_inputs - mean) / std, val_labels),
    )


def channel_statistics(inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Measure mean and standard deviation of every channel.

    Args:
        inputs: `(examples, channels, *sizes)`, values in [0, 1].

    Returns:
        Two tensors `(channels, 1, ...)` that broadcast over `inputs`; the standard deviation is at least one
        step of 8-bit data, so that a constant channel stays finite.
    """
    others = [axis for axis in range(inputs.ndim) if axis != 1]
    mean = inputs.mean(others, keepdim=True)
    std = inputs.std(others, keepdim=True, correction=0).clamp(min=1 / 255)
    return mean[0], std[0]


def balanced_subset(labels: Tensor, size: int | None, seed: int, name: str) -> Tensor:
    """Choose `size` examples, as equal in number among the classes as they can be.

    A smaller choice with the same seed is part of every larger one.

    Args:
        labels: int64 `(examples,)`.
        size: How many to choose; None is all.
        seed: Decides which are chosen.
        name: What the caller calls `size`, for the error.

    Returns:
        Indices of the chosen, increasing.

    Raises:
        ValueError: size is smaller than the number of classes or larger than the number of examples.
    """
    if size is None:
        return torch.arange(len(labels))
    fewest = len(labels.unique())
    if not fewest <= size <= len(labels):
        raise ValueError(
            f"{name} must lie between {fewest} (one per class) and {len(labels)} (all there are), got {size}"
        )
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    turn = _rank_within_class(labels[order])
    return order[turn.argsort(stable=True)[:size]].sort().values


def _rank_within_class(labels: Tensor) -> Tensor:
    """Number the members of every class 0, 1, 2, ... in the order they come."""
    ranks = torch.empty_like(labels)
    for label in labels.unique():
        members = labels == label
        ranks[members] = torch.arange(int(members.sum()))
    return ranks
