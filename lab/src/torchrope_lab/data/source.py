"""Data of a user's own function or class, which returns data sets of tensors on a lattice."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset

from torchrope_lab.data.config import SourceConfig
from torchrope_lab.data.datamodule import DataModule
from torchrope_lab.data.tensors import balanced_subset

HASHED = 100
"""Examples of each set whose inputs the fingerprint contains, evenly spaced."""
AXES = {1: ("x",), 2: ("height", "width"), 3: ("depth", "height", "width")}
_PARTS = ("train", "val", "classes", "axes", "title", "description")


class SourceSet(Dataset):
    """Examples of a user's data set, checked when they are read.

    Args:
        examples: A sequence of (float tensor `(channels, *sizes)`, label).
        shape: The shape of every input.
        name: Name of the set in error messages.

    Attributes:
        labels: Label of every example, int64: the attribute `labels` or `targets` of the set, otherwise all are read.

    Raises:
        ValueError: there are no examples, or the labels are not whole numbers from 0.
    """

    def __init__(self, examples: Any, shape: tuple[int, ...], name: str) -> None:
        self.examples = examples
        self.shape = shape
        self.name = name
        known = getattr(examples, "labels", getattr(examples, "targets", None))
        labels = [examples[index][1] for index in range(len(examples))] if known is None else known
        self.labels = torch.as_tensor(labels)
        integral = not self.labels.is_floating_point() and self.labels.shape == (len(examples),)
        if not integral or not len(examples) or self.labels.min() < 0:
            raise ValueError(f"{name} must have examples, each with a whole number of 0 or more as label")
        self.labels = self.labels.long()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        inputs, _ = self.examples[index]
        _check_input(inputs, self.name, self.shape)
        return inputs.float(), int(self.labels[index])

    def part(self, indices: Tensor) -> "SourceSet":
        """Return the subset with the given indices."""
        subset = Subset(self.examples, indices.tolist())
        subset.labels = self.labels[indices]  # type: ignore[attr-defined]
        return SourceSet(subset, self.shape, self.name)


class Source(DataModule):
    """Data sets that a user's function or class returns: `--data mypackage.module:source`.

    Called with its settings, it returns a pair (train, val), or both by name: a dict, or an object with attributes.
    Names of classes and axes, a title and a description are optional. A set is a sequence of
    (float tensor `(channels, *sizes)`, label from 0), used as it is.

    Raises:
        ValueError: it returns anything else.
    """

    config: SourceConfig

    def __init__(self, config: SourceConfig) -> None:
        super().__init__(config)
        self.name = config.name
        made = type(config).source(**{name: getattr(config, name) for name in config.parameters})
        parts = _by_name(made)
        if not {"train", "val"} <= set(parts):
            rule = f"--data {self.name} must return a pair (train, val), or train and val by name"
            raise ValueError(f"{rule}, got {type(made).__name__}")
        first = _first_input(parts["train"], f"train of {self.name}")
        self.in_channels, *sizes = first.shape
        self.input_size = tuple(sizes)
        unnamed = AXES.get(len(sizes)) or tuple(f"axis {index}" for index in range(len(sizes)))
        self.axes = tuple(parts.get("axes") or unnamed)
        if len(self.axes) != len(sizes):
            raise ValueError(f"axes of {self.name} must name {len(sizes)}, got {', '.join(self.axes)}")
        shape = tuple(first.shape)
        self._whole = [SourceSet(parts[part], shape, f"{part} of {self.name}") for part in ("train", "val")]
        largest = max(int(part.labels.max()) for part in self._whole)
        self.classes = tuple(map(str, parts.get("classes") or range(largest + 1)))
        if largest >= len(self.classes):
            raise ValueError(f"labels of {self.name} must be below its {len(self.classes)} classes, got {largest}")
        self.title = str(parts.get("title") or self.name)
        self.description = str(parts.get("description") or f"Data of {self.name}.")

    @property
    def slug(self) -> str:
        """Name used in result file names."""
        return self.name.replace(":", "-")

    @property
    def fingerprint(self) -> str:
        """Hash of all labels and of some inputs."""
        digest = hashlib.sha256()
        for part in self._made_datasets():
            digest.update(str(part.labels.tolist()).encode())  # type: ignore[attr-defined]
            for index in range(0, len(part), max(1, len(part) // HASHED)):  # type: ignore[arg-type]
                digest.update(part[index][0].cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()[:16]

    def datasets(self) -> tuple[SourceSet, SourceSet]:
        """Select `train_size` and `val_size` examples."""
        seed, (train, val) = self.config.split_seed, self._whole
        chosen = balanced_subset(train.labels, self.config.train_size, seed, "train_size")
        return train.part(chosen), val.part(balanced_subset(val.labels, self.config.val_size, seed, "val_size"))


def _by_name(made: Any) -> dict[str, Any]:
    """Return what a source returned by name."""
    if isinstance(made, Mapping):
        return dict(made)
    if isinstance(made, tuple | list):
        return dict(zip(_PARTS, made, strict=False)) if len(made) == 2 else {}
    return {part: getattr(made, part) for part in _PARTS if hasattr(made, part)}


def _first_input(examples: Sequence[Any], name: str) -> Tensor:
    """Return the first input of a set; raise ValueError if the set is not a sequence of (tensor, label)."""
    if not hasattr(examples, "__len__") or not hasattr(examples, "__getitem__") or not len(examples):
        raise ValueError(f"{name} must be a sequence of (tensor, label) with len(), got {type(examples).__name__}")
    example = examples[0]
    if not isinstance(example, tuple | list) or len(example) != 2:
        raise ValueError(f"{name} must have examples (tensor, label), got {type(example).__name__}")
    _check_input(example[0], name)
    return example[0]


def _check_input(inputs: Any, name: str, shape: tuple[int, ...] | None = None) -> None:
    if not isinstance(inputs, Tensor) or not inputs.is_floating_point() or inputs.ndim < 2:
        kind = f"{inputs.dtype} {tuple(inputs.shape)}" if isinstance(inputs, Tensor) else type(inputs).__name__
        raise ValueError(f"{name} must have inputs that are float tensors (channels, *sizes), got {kind}")
    if shape is not None and inputs.shape != shape:
        raise ValueError(f"{name} must have inputs of one shape, {shape}, got {tuple(inputs.shape)}")
