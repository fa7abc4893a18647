"""Data sets held in memory, and class-balanced subsets of them."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.utils.data import Dataset

STATISTICS = {
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),  # as published models use them
    "half": ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
}
"""Mean and standard deviation of red, green and blue, by name."""


TUNING_PARTS = 5
"""One of so many training examples is held out to choose settings on."""


class Normalise:
    """Make bytes ready for a model: (x / 255 - mean) / std, per channel.

    Args:
        mean: Of x / 255, `(channels, 1, ...)`.
        std: Likewise.
    """

    def __init__(self, mean: Tensor, std: Tensor) -> None:
        self.mean = mean
        self.std = std

    def __call__(self, inputs: Tensor) -> Tensor:
        """Normalise uint8 `(..., channels, *sizes)` to float32, on the device that they are on."""
        mean, std = self.mean.to(inputs.device), self.std.to(inputs.device)
        return inputs.to(torch.float32).mul_(1 / 255).sub_(mean).div_(std)


class InMemorySet(Dataset, ABC):
    """Examples in memory, of the main processor or of another device.

    Attributes:
        inputs: All of them, `(examples, channels, *sizes)`.
    """

    inputs: Tensor

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes that it takes."""

    @abstractmethod
    def to(self, device: torch.device) -> "InMemorySet":
        """Copy it to a device, whole."""


class TensorSet(InMemorySet):
    """Inputs and labels in memory, indexed one by one or by whole batches.

    Args:
        inputs: `(examples, channels, *sizes)`, float32, or uint8 with `normalise`.
        labels: int64 `(examples,)`.
        normalise: Makes float32 of a batch; None where inputs are ready.
    """

    def __init__(self, inputs: Tensor, labels: Tensor, normalise: Normalise | None = None) -> None:
        self.inputs = inputs
        self.labels = labels
        self.normalise = normalise

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        inputs, labels = self.__getitems__([index])
        return inputs[0], int(labels[0])

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        chosen = torch.as_tensor(indices, device=self.labels.device)
        inputs = self.inputs[chosen]
        return inputs if self.normalise is None else self.normalise(inputs), self.labels[chosen]

    def part(self, chosen: Tensor) -> "TensorSet":
        """Some of the examples, by their indices."""
        return TensorSet(self.inputs[chosen], self.labels[chosen], self.normalise)

    @property
    def raw(self) -> "TensorSet":
        """The same examples before `normalise`."""
        return TensorSet(self.inputs, self.labels)

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        return self.inputs.nbytes + self.labels.nbytes

    def to(self, device: torch.device) -> "TensorSet":
        """Copy it to a device, whole."""
        return TensorSet(self.inputs.to(device), self.labels.to(device), self.normalise)


def normalisation(name: str, measure: Callable[[], tuple[Tensor, Tensor]]) -> Normalise:
    """Make what `ColourConfig.normalise` names: of ImageNet's statistics, of 0.5, or of those that are measured."""
    if name == "measured":
        return Normalise(*measure())
    mean, std = STATISTICS[name]
    return Normalise(torch.tensor(mean).view(3, 1, 1), torch.tensor(std).view(3, 1, 1))


def byte_sets(
    train_inputs: Tensor, train_labels: Tensor, val_inputs: Tensor, val_labels: Tensor, normalise: str = "measured"
) -> tuple[TensorSet, TensorSet]:
    """Make both sets of uint8 inputs, kept as bytes, with the `normalisation` named, measured on training inputs."""
    normalised = normalisation(normalise, lambda: byte_statistics(train_inputs))
    return TensorSet(train_inputs, train_labels, normalised), TensorSet(val_inputs, val_labels, normalised)


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


def byte_statistics(inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Measure what `channel_statistics` does on uint8 inputs / 255, exactly and without a copy as floats."""
    levels = torch.arange(256, dtype=torch.float64) / 255
    counts = torch.stack([channel.flatten().bincount(minlength=256) for channel in inputs.unbind(1)])  # [c, 256]
    shares = counts.double() / counts.sum(1, keepdim=True)
    mean = shares @ levels
    std = (shares @ levels**2 - mean**2).clamp(min=0).sqrt().clamp(min=1 / 255)
    shape = (-1, *[1] * (inputs.ndim - 2))
    return mean.float().view(shape), std.float().view(shape)


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
            f"--data.{name} must lie between {fewest} (one per class) and {len(labels)} (all there are), got {size}"
        )
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    turn = _rank_within_class(labels[order])
    return order[turn.argsort(stable=True)[:size]].sort().values


def split_for_tuning(labels: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Indices of the training examples to keep, and of a fifth of each class that is held out of them.

    Raises:
        ValueError: a class has fewer than two examples.
    """
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    counts = labels.bincount()
    if (fewest := int(counts[counts > 0].min())) < 2:
        raise ValueError(f"--data.tuning needs two training examples or more of each class, got {fewest} of one")
    held_out = torch.zeros(len(labels), dtype=torch.bool)
    held_out[order] = _rank_within_class(labels[order]) < (counts[labels[order]] / TUNING_PARTS).ceil()
    return (~held_out).nonzero()[:, 0], held_out.nonzero()[:, 0]


def _rank_within_class(labels: Tensor) -> Tensor:
    """Number the members of every class 0, 1, 2, ... in the order they come."""
    ranks = torch.empty_like(labels)
    for label in labels.unique():
        members = labels == label
        ranks[members] = torch.arange(int(members.sum()))
    return ranks
