"""Data of a user's own function or class: tensors on a lattice, or tokens with positions."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, Subset

from torchrope_lab.data.data_config import DataConfig
from torchrope_lab.data.datamodule import DataModule, some_of
from torchrope_lab.data.images import Sample
from torchrope_lab.data.tensors import balanced_subset
from torchrope_lab.data.tokens import Cloud, CloudSet, TokensModule
from torchrope_lab.mistakes import Mistake

AXES = {1: ("x",), 2: ("height", "width"), 3: ("depth", "height", "width")}
FARTHEST = 2**20
"""Units of position from 0 up to which float32 resolves an eighth of a unit."""
_PARTS = ("train", "val")
_NAMES = (*_PARTS, "classes", "axes", "title", "description", "features", "scale", "extent", "periods")


@dataclass(eq=False)
class SourceSet(Dataset):
    """Examples of a user's data set, checked when they are read."""

    examples: Any  # a sequence of (float tensor `(channels, *sizes)`, label)
    labels: Tensor  # int64
    shape: tuple[int, ...]  # of every input
    name: str  # in error messages

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        inputs, label = self.examples[index]
        _check_input(inputs, self.name, self.shape)
        known = int(self.labels[index])
        _check_label(label, known, self.name)
        return inputs.float(), known

    def part(self, indices: Tensor) -> "SourceSet":
        """Return the subset with the given indices."""
        return replace(self, examples=Subset(self.examples, indices.tolist()), labels=self.labels[indices])

    def with_examples(self, sets: Sequence["SourceSet"], indices: Tensor) -> "SourceSet":
        """Return examples of several sets, numbered consecutively."""
        examples: Any = ConcatDataset([part.examples for part in sets])
        return replace(self, examples=examples, labels=torch.cat([part.labels for part in sets])).part(indices)


class UserData(DataModule):
    """Base class of data that a user's function or class returns, `mypackage.module:source` or `FILE.py:source`."""

    # Called with its settings, it returns a pair (train, val), or both by name: a dict, or an object with attributes.
    # Names of classes and axes, a title and a description are optional.

    def __init__(self, config: DataConfig, made: Any) -> None:
        super().__init__(config)
        self.name = config.name
        self.returned = _by_name(made)
        if not {*_PARTS} <= {*self.returned}:
            rule = f"--data {self.name} must return a pair (train, val), or train and val by name"
            raise Mistake(f"{rule}, got {type(made).__name__}")
        self.part_labels = [read_labels(self.returned[part], f"{part} of {self.name}") for part in _PARTS]
        largest = max(int(labels.max()) for labels in self.part_labels)
        self.classes = tuple(map(str, self.returned.get("classes") or range(largest + 1)))
        if largest >= len(self.classes):
            raise Mistake(f"labels of {self.name} must be below its {len(self.classes)} classes, got {largest}")
        if len({*self.classes}) < max(2, len(self.classes)):
            rule = f"--data {self.name} must have two classes or more, of different names"
            raise Mistake(f"{rule}, got {', '.join(self.classes)}")
        self.title = str(self.returned.get("title") or self.name)
        self.description = str(self.returned.get("description") or f"Data of {self.name}.")

    @property
    def slug(self) -> str:
        """Name used in result file names."""
        return self.name.rpartition("/")[2].replace(".py:", ":").replace(":", "-")

    @cached_property
    def fingerprint(self) -> str:
        """Hash of all labels and of some inputs."""
        digest = hashlib.sha256()
        for part in self._made_datasets():
            digest.update(str(part.labels.tolist()).encode())  # type: ignore[attr-defined]
            for index in some_of(part):
                digest.update(part[index][0].cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()[:16]

    def name_axes(self, count: int, default: Mapping[int, tuple[str, ...]]) -> None:
        """Set `axes` to the names that the source returned, otherwise to default ones."""
        self.axes = tuple(self.returned.get("axes") or default.get(count) or (f"axis {i}" for i in range(count)))
        if len(self.axes) != count:
            raise Mistake(f"axes of {self.name} must name {count}, got {', '.join(self.axes)}")


class Source(UserData):
    """Data on a lattice: sequences of (float tensor `(channels, *sizes)`, label from 0), used as they are."""

    def __init__(self, config: DataConfig, made: Any) -> None:
        super().__init__(config, made)
        if config.size and "size" not in config.parameters:
            raise Mistake(f"--data.size is for sources with a parameter size, got --data {self.name}")
        first = self.returned["train"][0]
        if not isinstance(first, tuple | list) or len(first) != 2:
            got = f"{len(first)} values" if isinstance(first, tuple | list) else type(first).__name__
            hint = f" (for tokens with positions set {self.name.partition(':')[2]}.lattice = False)"
            raise Mistake(f"train of {self.name} must have examples (tensor, label), got {got}{hint}")
        _check_input(first[0], f"train of {self.name}")
        shape = tuple(first[0].shape)
        self.in_channels, *sizes = shape
        self.input_size = tuple(sizes)
        self.name_axes(len(sizes), AXES)
        self._whole = [
            SourceSet(self.returned[part], labels, shape, f"{part} of {self.name}")
            for part, labels in zip(_PARTS, self.part_labels, strict=True)
        ]

    def datasets(self) -> tuple[SourceSet, SourceSet]:
        """Select `train_size` and `val_size` examples."""
        seed, (train, val) = self.config.split_seed, self._whole
        chosen = balanced_subset(train.labels, self.config.train_size, seed, "train_size")
        return train.part(chosen), val.part(balanced_subset(val.labels, self.config.val_size, seed, "val_size"))


class PointSource(UserData, TokensModule):
    """Tokens with positions: sequences of (tokens `(n, channels)`, positions `(n, axes)`, label from 0)."""

    # They are read once and held in memory. Tokens are normalised and missing values flagged as in `points`; rows whose
    # position is NaN are padding. Positions are used as they are. Names of features, `scale`, `extent` and `periods`
    # are optional.

    def __init__(self, config: DataConfig, made: Any) -> None:
        super().__init__(config, made)
        self._widths: tuple[int, int] | None = None
        tokens, positions = self._example("train", 0)
        self.name_axes(positions.shape[1], {count: tuple("xyz"[:count]) for count in (1, 2, 3)})
        names = self.returned.get("features") or (f"feature {index}" for index in range(tokens.shape[1]))
        self.features = tuple(names)
        self.periods = None if self.returned.get("periods") is None else tuple(self.returned["periods"])
        for what, values, count in (
            ("features", self.features, tokens.shape[1]),
            ("periods", self.periods, len(self.axes)),
            ("extent", self.returned.get("extent"), len(self.axes)),
        ):
            if values is not None and len(values) != count:
                raise Mistake(f"{what} of {self.name} must be {count} values, got {len(values)}")

    @property
    def unit(self) -> list[float] | None:
        """Length of one unit of position, if the source returned it."""
        scale = self.returned.get("scale")
        return scale if scale is None else np.atleast_1d(scale).astype(float).tolist()

    @property
    def with_coordinates(self) -> bool:
        """Whether tokens include coordinates, because they have no features."""
        return not self.features

    def clouds(self) -> tuple[list[Cloud], list[Sample], list[Cloud], list[Sample]]:
        """Read all examples, and select `train_size` and `val_size` of them."""
        clouds: dict[str, Cloud] = {}
        samples: list[list[Sample]] = []
        for part, labels in zip(_PARTS, self.part_labels, strict=True):
            samples.append([(f"{part} {index}", label) for index, label in enumerate(labels.tolist())])
            for index, (name, label) in enumerate(samples[-1]):
                tokens, positions = self._example(part, index, label)
                try:
                    clouds[name] = Cloud.of(positions.double(), tokens.double(), relative=False)
                except ValueError as error:
                    raise Mistake(f"example {index} of {part} of {self.name}: {error}") from None
        return self.select(clouds, *samples)

    def datasets(self) -> tuple[CloudSet, CloudSet]:
        """Build both sets; `extent` is that of the source if it returned one."""
        train, val = super().datasets()
        farthest = torch.stack([cloud.positions.abs().amax(0) for cloud in (*train.clouds, *val.clouds)]).amax(0)
        for axis, distance, unit in zip(self.axes, farthest.tolist(), self.scale, strict=True):
            if distance > FARTHEST * unit:
                rule = (
                    f"positions of {self.name} along {axis} must be within {FARTHEST:,} units of 0 (subtract an origin)"
                )
                raise Mistake(f"{rule}, got {distance:g} with units of {unit:g}")
        if self.returned.get("extent") is not None:
            self.extent = tuple(map(float, self.returned["extent"]))
        return train, val

    def _example(self, part: str, index: int, label: int | None = None) -> tuple[Tensor, Tensor]:
        """Return tokens and positions of an example, which must be as wide as the first one's, and have `label`."""
        example = self.returned[part][index]
        whole = isinstance(example, tuple | list) and len(example) == 3
        pair: Any = example[:2] if whole else (None, None)
        tokens, positions = pair
        if all(isinstance(x, Tensor) and x.is_floating_point() and x.ndim == 2 for x in pair):
            widths = (tokens.shape[1], positions.shape[1])
            self._widths = self._widths or widths
            if len(tokens) == len(positions) and widths == self._widths:
                if label is not None:
                    _check_label(example[2], label, f"{part} of {self.name}")
                return tokens, positions
        shown = example if isinstance(example, tuple | list) else (example,)
        kinds = [f"{x.dtype} {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__ for x in shown[:2]]
        channels, axes = self._widths or ("channels", "axes")
        rule = f"{part} of {self.name} must have examples (float tokens (n, {channels}), positions (n, {axes}), label)"
        raise Mistake(f"{rule}, got {', '.join(kinds)}{'' if whole else f' in {len(shown)} values'}")


def read_labels(examples: Any, name: str) -> Tensor:
    """Read int64 `(examples,)`: the attribute `labels` or `targets` of the set, otherwise labels of its examples."""
    # With an attribute `target_transform`, as sets of torchvision have it, labels are read from the examples.
    if not hasattr(examples, "__len__") or not hasattr(examples, "__getitem__") or not len(examples):
        raise Mistake(f"{name} must be a sequence of examples with len(), got {type(examples).__name__}")
    if not isinstance(examples[0], tuple | list):
        raise Mistake(f"{name} must have examples with a label, got {type(examples[0]).__name__}")
    known = getattr(examples, "labels", getattr(examples, "targets", None))
    if getattr(examples, "target_transform", None) is not None:
        known = None
    labels = [examples[index][-1] for index in range(len(examples))] if known is None else known
    try:
        values = labels.cpu().numpy() if isinstance(labels, Tensor) else np.asarray(labels)
    except (ValueError, TypeError):  # of different lengths
        values = np.array([None])
    if values.ndim > 1:
        got = f"{tuple(values.shape[1:])} numbers: multi-label classification is not supported"
    elif values.dtype.kind == "f":
        got = f"{values.dtype}: regression is not supported"
    elif values.dtype.kind not in "iub" or len(values) != len(examples):
        got = f"{len(values)} labels of type {values.dtype} for {len(examples)} examples"
    elif values.min() < 0:
        got = str(values.min())
    else:
        return torch.from_numpy(values.astype(np.int64))
    raise Mistake(f"{name} must have examples, each with a whole number of 0 or more as label, got {got}")


def _by_name(made: Any) -> dict[str, Any]:
    """Return what a source returned by name."""
    if isinstance(made, Mapping):
        return dict(made)
    if isinstance(made, tuple | list):
        return dict(zip(_PARTS, made, strict=True)) if len(made) == 2 else {}
    return {name: getattr(made, name) for name in _NAMES if hasattr(made, name)}


def _check_label(label: Any, known: int, name: str) -> None:
    try:
        same = bool(label == known)
    except (RuntimeError, ValueError):  # several values
        same = False
    if not same:
        got = f"{label!r}".split("\n")[0]
        rule = f"{name} must have the labels of its attribute labels or targets in its examples, too"
        raise Mistake(f"{rule}, got {got} instead of {known}")


def _check_input(inputs: Any, name: str, shape: tuple[int, ...] | None = None) -> None:
    if not isinstance(inputs, Tensor) or not inputs.is_floating_point() or inputs.ndim < 2:
        kind = f"{inputs.dtype} {tuple(inputs.shape)}" if isinstance(inputs, Tensor) else type(inputs).__name__
        raise Mistake(f"{name} must have inputs that are float tensors (channels, *sizes), got {kind}")
    if shape is not None and inputs.shape != shape:
        raise Mistake(f"{name} must have inputs of one shape, {shape}, got {tuple(inputs.shape)}")
