"""Data sets in memory, their normalisation, and class-balanced subsets."""

from collections import Counter
from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor

from torchrope_lab.data.repeated import ReadInBatches
from torchrope_lab.mistakes import Mistake

STATISTICS = {
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),  # as used by published models
    "half": ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
    "liere": ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)),  # often used for CIFAR
}
"""Mean and standard deviation of the RGB channels, by name."""

TUNING_PARTS = 5
"""One in this many training examples is held out for tuning of hyperparameters."""


class Normalise:
    """Compute (x - mean) / std per channel, of bytes x / 255; mean and std are `(channels, 1, ...)`."""

    def __init__(self, mean: Tensor, std: Tensor) -> None:
        self.mean = mean
        self.std = std

    def __call__(self, inputs: Tensor) -> Tensor:
        """Normalise `(..., channels, *sizes)` to float32."""
        if inputs.dtype != torch.uint8:
            return (inputs - self.mean) / self.std
        return inputs.to(torch.float32).mul_(1 / 255).sub_(self.mean).div_(self.std)


class TensorSet(ReadInBatches):
    """Inputs, float32 or uint8 with `normalise`, and int64 labels in memory, indexed by example or by batch."""

    def __init__(self, inputs: Tensor, labels: Tensor, normalise: Normalise | None = None) -> None:
        self.inputs = inputs
        self.labels = labels
        self.normalise = normalise

    def __len__(self) -> int:
        return len(self.labels)

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        chosen = torch.as_tensor(indices)
        inputs = self.inputs[chosen]
        return inputs if self.normalise is None else self.normalise(inputs), self.labels[chosen]

    @property
    def raw(self) -> "TensorSet":
        """The same examples before normalisation."""
        return TensorSet(self.inputs, self.labels)

    def with_examples(self, sets: Sequence["TensorSet"], indices: Tensor) -> "TensorSet":
        """Return examples of several sets, numbered consecutively, with the normalisation of this one."""
        inputs, labels = torch.cat([part.inputs for part in sets]), torch.cat([part.labels for part in sets])
        return TensorSet(inputs[indices], labels[indices], self.normalise)


def normalisation(name: str, measure: Callable[[], tuple[Tensor, Tensor]]) -> Normalise:
    """Return the normalisation `normalise`: by ImageNet's statistics, by 0.5, or by measured ones."""
    if name == "measured":
        return Normalise(*measure())
    mean, std = STATISTICS[name]
    return Normalise(torch.tensor(mean).view(3, 1, 1), torch.tensor(std).view(3, 1, 1))


def image_sets(
    train_inputs: Tensor, train_labels: Tensor, val_inputs: Tensor, val_labels: Tensor, normalise: str = "measured"
) -> tuple[TensorSet, TensorSet]:
    """Build both sets, normalised by (x - mean) / std per channel; statistics are those of the training inputs."""
    # Floats are normalised here; bytes remain bytes and are normalised, as `normalisation` says, when they are read.
    if train_inputs.is_floating_point():
        mean, std = channel_statistics(train_inputs)
        return TensorSet((train_inputs - mean) / std, train_labels), TensorSet((val_inputs - mean) / std, val_labels)
    normalised = normalisation(normalise, lambda: byte_statistics(train_inputs))
    return TensorSet(train_inputs, train_labels, normalised), TensorSet(val_inputs, val_labels, normalised)


def channel_statistics(inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Measure mean and standard deviation `(channels, 1, ...)` of inputs `(examples, channels, *sizes)` in [0, 1]."""
    # The standard deviation is at least one step of 8-bit data, so that constant channels give finite values.
    others = [axis for axis in range(inputs.ndim) if axis != 1]
    mean = inputs.mean(others, keepdim=True)
    std = inputs.std(others, keepdim=True, correction=0).clamp(min=1 / 255)
    return mean[0], std[0]


def byte_statistics(inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `channel_statistics` of uint8 inputs / 255, exactly and without a float copy, from histograms."""
    levels = torch.arange(256, dtype=torch.float64) / 255
    counts = torch.stack([channel.flatten().bincount(minlength=256) for channel in inputs.unbind(1)])  # [c, 256]
    shares = counts.double() / counts.sum(1, keepdim=True)
    mean = shares @ levels
    std = (shares @ levels**2 - mean**2).clamp(min=0).sqrt().clamp(min=1 / 255)
    shape = (-1, *[1] * (inputs.ndim - 2))
    return mean.float().view(shape), std.float().view(shape)


def balanced_subset(labels: Tensor, size: int | None, seed: int, name: str) -> Tensor:
    """Return increasing indices of `size` random examples (None: all), with numbers per class as equal as possible."""
    # With the same seed, a smaller selection is a subset of a larger one.
    if size is None:
        return torch.arange(len(labels))
    fewest = len(labels.unique())
    if not fewest <= size <= len(labels):
        raise Mistake(
            f"--data.{name} must be between {fewest} (one per class) and {len(labels)} (all examples), got {size}"
        )
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    ranks = _rank_within_class(labels[order])
    return order[ranks.argsort(stable=True)[:size]].sort().values


def held_out_for_tuning(labels: Tensor, seed: int, groups: Sequence[Hashable] | None = None) -> Tensor:
    """Choose a fifth of each class: bool `(examples,)`, True for those held out."""
    # Examples of one group are in the same part, as a fifth of the groups of each class is held out by the label of
    # their first example.
    members = range(len(labels)) if groups is None else groups
    numbers = Counter(label for label, _ in {*zip(labels.tolist(), members, strict=True)})
    if (fewest := min(numbers.values())) < 2:
        what = "training examples" if groups is None else "groups of training examples"
        raise Mistake(f"--data.tuning must have at least two {what} of each class, got {fewest} of one")
    first = {member: index for index, member in reversed([*enumerate(members)])}  # example of every group
    number_of = {member: number for number, member in enumerate(sorted(first, key=first.__getitem__))}
    chosen = labels[sorted(first.values())]
    order = torch.randperm(len(chosen), generator=torch.Generator().manual_seed(seed))
    held_out = torch.zeros(len(chosen), dtype=torch.bool)
    held_out[order] = _rank_within_class(chosen[order]) < (chosen.bincount()[chosen[order]] / TUNING_PARTS).ceil()
    return held_out[[number_of[member] for member in members]]


def folds_of(labels: Tensor, folds: int, seed: int, groups: Sequence[Hashable] | None = None) -> Tensor:
    """Assign every example to a fold, int64 `(examples,)` from 0 to folds - 1, with equal shares of every class."""
    # Examples of one group are in the same fold; shares are then approximate.
    members = range(len(labels)) if groups is None else groups
    numbers = Counter(label for label, _ in {*zip(labels.tolist(), members, strict=True)})
    if (fewest := min(numbers.values())) < folds:
        what = "examples" if groups is None else "patients, or other groups,"
        raise Mistake(f"--data.folds must be at most {fewest}, the {what} of the smallest class, got {folds}")
    assigned = torch.empty_like(labels)
    if groups is None:
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
        assigned[order[labels[order].argsort(stable=True)]] = torch.arange(len(labels)) % folds
        return assigned
    from sklearn.model_selection import StratifiedGroupKFold

    parts = StratifiedGroupKFold(folds, shuffle=True, random_state=seed).split(labels, labels, groups)
    for fold, (_, held_out) in enumerate(parts):
        assigned[torch.from_numpy(held_out)] = fold
    return assigned


def _rank_within_class(labels: Tensor) -> Tensor:
    """Number the members of every class 0, 1, 2, ... in their order."""
    order, counts = labels.argsort(stable=True), labels.bincount()
    ranks = torch.empty_like(labels)
    ranks[order] = torch.arange(len(labels)) - (counts.cumsum(0) - counts)[labels[order]]
    return ranks
