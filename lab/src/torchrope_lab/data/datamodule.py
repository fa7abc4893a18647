"""Base class of all data modules, and the order in which batches are drawn."""

import hashlib
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from copy import copy
from dataclasses import replace
from functools import cached_property, partial
from itertools import pairwise
from typing import Any, Literal, TypeVar

import pytorch_lightning as pl
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, Sampler

from torchrope.positions import Periods
from torchrope_lab.data.augment import EpochSet
from torchrope_lab.data.data_config import AugmentConfig, DataConfig
from torchrope_lab.data.draws import Draws
from torchrope_lab.data.faults import Fault, Skipping
from torchrope_lab.data.loading import Loader, ResumedSampler, SizedBatches
from torchrope_lab.data.mixed_sizes import MixedSizes, Resampled, Size
from torchrope_lab.data.repeated import Repeated
from torchrope_lab.data.tensors import TensorSet, folds_of, held_out_for_tuning
from torchrope_lab.mistakes import Mistake

HASHED = 100
"""Examples of each set whose inputs the fingerprint contains, evenly spaced."""

Made = TypeVar("Made", bound="DataModule")


def some_of(examples: Any) -> range:
    """Return the indices of about `HASHED` evenly spaced examples of a set."""
    return range(0, len(examples), max(1, len(examples) // HASHED))


class DataModule(pl.LightningDataModule, ABC):
    """A data set with its training and validation batches.

    A subclass MUST set the attributes below and define `datasets`. All are set after `setup()`.

    Attributes:
        name: Name in `DataConfig`.
        title: Name in reports.
        description: One sentence: the data, their number, whether they are real or synthetic, and the classes.
        axes: Names of the axes that positions have, ("height", "width") or ("time", "height", "width").
        in_channels: Channels of an input.
        lattice: Whether examples lie on a lattice. Others are tokens at any positions, and a batch of them is
            `(batch, n, in_channels + axes)`: tokens, then their positions; rows of padding are NaN.
        input_size: Extent of every axis, in pixels (and frames); () without a lattice.
        scale: Without a lattice, the length of one unit of position along each axis.
        extent: Without a lattice, the length of the training data along each axis.
        periods: Without a lattice, the period of each periodic axis, None for the others; None if no axis is periodic.
        classes: Names of the classes; a label is an index into them.
        tasks: "classify", "segment", "detect". Batches of the last two are lists, see `data.boxes_and_maps`.
        map_classes: Names of the classes of semantic maps, for "segment".
        val_batch_factor: Size of validation batches as a multiple of that of training batches.
        other_sizes: Source of validation examples of another size: by `at_size` "read" from their files at that size,
            or "cropped" at the files' scale; or "resampled" from the crop at the training size.
        generated: Whether examples are generated, so that there may be any number of them.
        views: Number of views per example in `test_dataloader`, over which logits are averaged; 1 for a single view.
        contents: Hashes of the examples' contents, if the source keeps any.
        unread: Files in the folder that are not read, in a sentence; empty if there are none.
        run_seed: Seed of the order and the augmentation of training examples; set by the caller before the run.
        returns_spacing: Whether batches of volumes contain the voxel spacing in mm `(batch, axes)` after inputs and
            labels; set by the caller.
        resume_at: Epoch, and number of its batches that a resumed run skips; set by the caller.
        train_sizes: Sizes of training batches, one drawn per optimiser step; set by the caller. If empty, all have
            `input_size`, as validation always has.
    """

    name: str
    title: str
    description: str
    axes: tuple[str, ...]
    in_channels: int
    input_size: tuple[int, ...]
    classes: tuple[str, ...]
    lattice: bool = True
    scale: tuple[float, ...] = ()
    extent: tuple[float, ...] = ()
    periods: Periods | None = None
    tasks: tuple[str, ...] = ("classify",)
    map_classes: tuple[str, ...] = ()
    val_batch_factor: int = 4  # no gradients are kept, so more examples fit
    other_sizes: Literal["read", "cropped", "resampled"] = "resampled"
    generated: bool = False
    views: int = 1
    contents: Sequence[str] = ()
    unread: str = ""
    run_seed: int = 0
    returns_spacing: bool = False
    resume_at: tuple[int, int] = (0, 0)
    train_sizes: Sequence[Size] = ()

    def __init__(self, config: DataConfig) -> None:
        super().__init__()
        self.config = config
        self._skipped: list[Fault] = []
        self._datasets: tuple[Dataset, Dataset] | None = None
        self._unfolded: tuple[Any, Any] | None = None

    @abstractmethod
    def datasets(self) -> tuple[Dataset, Dataset]:
        """Return the training and the validation set.

        Returns:
            Two sets of (float32 `(channels, *input_size)`, int label), inputs normalised per channel with mean and
            standard deviation of the training set. Optional attributes of a set:

            - `__getitems__` returns a batch as a tuple of tensors, which is not collated again.
            - `raw` is the same set with uint8 inputs and `normalise` converts them to float32; pixels are augmented
              between the two.

            Sets with boxes or maps are `torchrope_lab.data.boxes_and_maps.DenseSet`s.

        Raises:
            ValueError: the data is missing or cannot be used; the message is one line.
        """

    def at_size(self, size: int) -> "DataModule | None":
        """Return the same validation examples read at another size; None if they can only be resampled."""
        return None

    def groups(self, train: Any, val: Any) -> Sequence[Hashable] | None:
        """Return what examples must have in common to be in the same fold, such as the patient; None for nothing."""
        # `tuning` splits the training examples by it, too. Examples of the sets are numbered consecutively.
        return None

    @cached_property
    def fold_of_examples(self) -> Tensor:
        """Fold of every example, int64 `(examples,)`, training before validation examples; with `folds` only."""
        if self.generated:
            rule = "--data.folds is for data that is not generated (use --data.val_size for more validation examples)"
            raise Mistake(f"{rule}, got --data {self.name}")
        self._unfolded = self._unfolded or self.datasets()
        self._check_divisible("folds", self._unfolded)
        labels = torch.tensor([label for part in self._unfolded for label in _labels_of(part)])
        assert self.config.folds is not None
        return folds_of(labels, self.config.folds, self.config.split_seed, self.groups(*self._unfolded))

    def with_settings(self: Made, config: DataConfig) -> Made | None:
        """Return the data with settings that differ at most in the fold, without reading it again; None for others."""
        if config == self.config:
            return self
        if not config.folds or replace(config, fold=self.config.fold) != self.config:
            return None
        return self._copied(config)

    @property
    def slug(self) -> str:
        """Name used in result file names: `name`, with the task if the data set has several."""
        return self.name

    @property
    def enlarged(self) -> int:
        """Number of validation examples read so far whose original has fewer pixels than the input size."""
        return getattr(self._made_datasets()[1], "enlarged", 0)

    def _with_validation(self: Made, size: int, val: Dataset) -> Made:
        """Return a copy with other validation examples, of another size."""
        train, _ = self._made_datasets()
        other = self._copied(replace(self.config, size=size))
        other.input_size = (*self.input_size[:-2], size, size)
        other._datasets, other._unfolded = (train, val), None  # its folds are read at that size
        return other

    def _copied(self: Made, config: DataConfig) -> Made:
        """Return a copy with other settings, without what describes the sets of these."""
        other = copy(self)
        other.config, other._datasets = config, None
        for name in [name for name in vars(other) if isinstance(getattr(type(self), name, None), cached_property)]:
            del vars(other)[name]
        return other

    @property
    def skipped(self) -> list[Fault]:
        """Files skipped so far, found in `setup` or while reading."""
        return [*self._skipped, *(fault for reading in self.readings for fault in reading.found())]

    @skipped.setter
    def skipped(self, faults: list[Fault]) -> None:
        self._skipped = faults

    @property
    def readings(self) -> list[Skipping]:
        """Counters of unreadable files of the training and validation set."""
        found = [getattr(part, "reading", None) for part in self._datasets or ()]
        return [reading for reading in found if isinstance(reading, Skipping)]

    @property
    def num_axes(self) -> int:
        """Number of axes that positions have."""
        return len(self.axes)

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return len(self.classes)

    @property
    def counts(self) -> tuple[int, int]:
        """Numbers of training and of validation examples in use."""
        train, val = self._made_datasets()
        return len(train), len(val)  # type: ignore[arg-type]

    @property
    def val_labels(self) -> list[int]:
        """Classes of the examples that are validated: of the validation set, or of all with `folds`."""
        return [label for part in self._made_datasets()[0 if self.config.folds else 1 :] for label in _labels_of(part)]

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the examples."""
        # It contains `contents`, all samples' names and labels in order (for sets without `samples`, labels), and the
        # beginning and size of the files, or the tokens and positions, of some.
        sets = self._made_datasets()
        parts = [getattr(part, "samples", None) or part.labels.tolist() for part in sets]  # type: ignore[attr-defined]
        digest = hashlib.sha256(json.dumps([*parts, *self.contents]).encode())
        for part in sets:
            for index in some_of(part) if hasattr(part, "stored") else ():
                for stored in part.stored(index):  # type: ignore[attr-defined]
                    digest.update(stored)
        return digest.hexdigest()[:16]

    def setup(self, stage: str | None = None) -> None:
        """Build the training and validation sets on the first call; `stage` is ignored."""
        self._made_datasets()

    def train_dataloader(self) -> DataLoader:
        """Return the loader of training batches, whose order depends only on `run_seed` and the epoch."""
        # Called again for every epoch (`reload_dataloaders_every_n_epochs=1`), it draws nothing from torch's global
        # random state, so a resumed run gets the same batches as an uninterrupted one.
        train, _ = self._made_datasets()
        epoch, replicas, rank = self._position_in_training()
        seed, batch_size = self._seed + epoch, self.config.batch_size
        sampler = self._train_order(train, epoch, replicas, rank)
        if self.config.drop_last and len(sampler) < batch_size:  # type: ignore[arg-type]
            rule = "--data.batch_size with --data.drop_last must be at most the training examples of a device"
            raise Mistake(f"{rule}, {len(sampler)}, got {batch_size}")  # type: ignore[arg-type]
        if epoch == self.resume_at[0] and self.resume_at[1]:
            sampler = ResumedSampler(sampler, epoch, self.resume_at[1] * batch_size)
        if self.train_sizes:
            examples: Dataset = MixedSizes({size: self._examples(size, seed) for size in self.train_sizes})
            size_of = partial(self._size_of_batch, seed=seed)
            batches: BatchSampler = SizedBatches(sampler, batch_size, self.config.drop_last, size_of)
        else:
            examples = self._examples(self.input_size, seed)
            batches = BatchSampler(sampler, batch_size, self.config.drop_last)
        generator = torch.Generator().manual_seed(seed)  # seeds worker processes
        return self._loader(examples, batches, generator)

    def sampler(self, train: Dataset, seed: int, epoch: int, replicas: int, rank: int) -> Sampler:
        """Order one process's training examples of an epoch."""
        sampler: DistributedSampler = DistributedSampler(
            train, num_replicas=replicas, rank=rank, shuffle=True, seed=seed
        )
        sampler.set_epoch(epoch)
        return sampler

    def _examples(self, size: Size, seed: int) -> Dataset:
        """Return the augmented training examples of an epoch, resampled to a size."""
        trained = tuple(self.input_size)
        train = self._with_spacing(self._made_datasets()[0])
        examples = self._augmented(train, seed)
        return examples if size == trained else Resampled(examples, size)

    def _size_of_batch(self, number: int, seed: int) -> Size:
        """Return the input size of a batch; all batches of one optimiser step have the same size."""
        together = 1 if self.trainer is None else self.trainer.accumulate_grad_batches
        drawn = Draws(seed, [number // together]).uniform("size").item()
        return self.train_sizes[int(drawn * len(self.train_sizes))]

    def _augmented(self, train: Dataset, seed: int) -> Dataset:
        """Return the training set with the augmentation of an epoch; random numbers depend only on seed and index."""
        if isinstance(train, TensorSet) and not self.config.augment.enabled:
            return train
        augment = AugmentConfig(**vars(self.config.augment))
        if not isinstance(train, TensorSet):  # others are cropped when they are read
            augment = replace(augment, crop_scale=None, resize_crop=None)
        return EpochSet(train, augment, self.num_classes, seed)

    def val_dataloader(self) -> DataLoader:
        """Return the loader of validation batches, in the order of the set."""
        # With several devices, each process gets a disjoint part of the set, split into the same number of batches,
        # because DDP synchronises buffers in every forward pass. None is empty, so batches of one example may have two.
        val = self._with_spacing(self._made_datasets()[1])
        batch_size = self.val_batch_factor * self.config.batch_size
        devices = 1 if self.trainer is None else self.trainer.world_size
        rank, total = 0 if self.trainer is None else self.trainer.global_rank, len(val)  # type: ignore[arg-type]
        if total < devices:
            raise Mistake(f"validation must have an example for each of {devices} devices, got {total}")
        mine = range(rank, total, devices)
        count = min(math.ceil(math.ceil(total / devices) / batch_size), total // devices)
        ends = [len(mine) * number // count for number in range(count + 1)]
        if devices == 1:  # as large as possible
            ends = [*range(0, total, batch_size), total]
        batches = [list(mine[start:end]) for start, end in pairwise(ends)]
        return self._loader(val, batches)

    def _with_spacing(self, dataset: Dataset) -> Dataset:
        """Return the data set with voxel spacings in its samples if `returns_spacing` is set."""
        return dataset.changed(returns_spacing=True) if self.returns_spacing else dataset  # type: ignore[attr-defined]

    @property
    def _seed(self) -> int:
        """Base seed of the run; samplers add the epoch, so seeds of runs are a million apart."""
        return self.run_seed * 1_000_003

    def _position_in_training(self) -> tuple[int, int, int]:
        """Return the epoch, the world size and the rank of this process."""
        if self.trainer is None:
            return 0, 1, 0
        return self.trainer.current_epoch, self.trainer.world_size, self.trainer.global_rank

    def _train_order(self, train: Dataset, epoch: int, replicas: int, rank: int) -> Sampler[int]:
        """Return the order of the training examples, with repeats if `augment.repeats` is set."""
        repeats = self.config.augment.repeats
        if repeats == 1:
            return self.sampler(train, self._seed, epoch, replicas, rank)
        order = self.sampler(train, self._seed, epoch, 1, 0)
        return Repeated(order, repeats, len(train), self.config.batch_size, replicas, rank)  # type: ignore[arg-type]

    def _loader(self, dataset: Dataset, batches: Any, generator: torch.Generator | None = None) -> DataLoader:
        """Return a loader of batches of indices."""
        return Loader(dataset, batch_sampler=batches, generator=generator, num_workers=self.config.workers)

    def _made_datasets(self) -> tuple[Dataset, Dataset]:
        if self._datasets is None:
            if self.config.folds:
                self._datasets = self._folded()
            else:
                train, val = self.datasets()
                self._datasets = self._tuned(train, val) if self.config.tuning else (train, val)
        return self._datasets

    def _folded(self) -> tuple[Dataset, Dataset]:
        """Return the other folds, read as training examples, and the held-out one, read as validation examples."""
        held_out = self.fold_of_examples == self.config.fold
        assert self._unfolded is not None
        return self._divided(self._unfolded, self._unfolded, ~held_out, held_out)

    def _tuned(self, train: Any, val: Any) -> tuple[Dataset, Dataset]:
        """Hold out a part of the training examples, for `tuning`, by `groups` as for folds."""
        self._check_divisible("tuning", (train, val))
        groups = self.groups(train, val)
        of_train = None if groups is None else groups[: len(train)]
        held_out = held_out_for_tuning(torch.tensor(_labels_of(train)), self.config.split_seed, of_train)
        return self._divided((train, val), (train,), ~held_out, held_out)

    def _check_divisible(self, setting: str, parts: Sequence[Dataset]) -> None:
        if not all(hasattr(part, "with_examples") for part in parts):
            raise Mistake(f"--data.{setting} is for classification, got --data {self.name}")

    def _divided(self, parts: Sequence[Any], sets: Sequence[Any], first: Tensor, second: Tensor) -> tuple[Any, Any]:
        """Return examples of sets, read as training examples, and others of them, read as validation examples."""
        train, val = parts
        if isinstance(val, TensorSet):
            self.other_sizes = "resampled"  # `at_size` reads the original validation examples
        return train.with_examples(sets, first.nonzero()[:, 0]), val.with_examples(sets, second.nonzero()[:, 0])


def _labels_of(part: Any) -> Sequence[int]:
    return [label for _, label in part.samples] if hasattr(part, "samples") else part.labels.tolist()
