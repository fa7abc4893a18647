"""The choice of a data set, as plain values: imports no torch."""

import os
from dataclasses import dataclass
from typing import Literal, get_args

DataName = Literal["digits", "motion", "fashion-mnist", "images"]
DATA_NAMES: tuple[str, ...] = get_args(DataName)
NAMES_WITH_ROOT = ("fashion-mnist", "images")


@dataclass
class DataConfig:
    """Which data, how much of it, and in what batches.

    Attributes:
        name: The data set: "digits" (real 8x8 digits), "motion" (clips of moving digits), "fashion-mnist", or
            "images" (your own folder).
        root: Folder that holds the files. "images" needs it: root/<class>/* or root/train/<class>/* with
            root/val/<class>/*. "fashion-mnist" may have it: the folder of its four idx files.
        size: Pixels per side; None is the data set's own (8, 20, 28 and 64 in the order of the names).
        train_size: Train on that many examples, as equally many of each class as there can be; None is all,
            and 2400 clips of "motion".
        val_size: Validate on that many examples, chosen likewise; None is all, and 600 clips of "motion".
        batch_size: Examples in one training step.
        split_seed: Decides what is trained on and what is held out, whatever the seed of the run.
        workers: Processes that load data beside the training; 0 loads in the training process.
        max_skipped: Files that may be left out because they cannot be read; one more stops the run with their list.

    Raises:
        ValueError: a number is out of range, or root is given to a data set that reads no files.
    """

    name: DataName = "digits"
    root: str | None = None
    size: int | None = None
    train_size: int | None = None
    val_size: int | None = None
    batch_size: int = 64
    split_seed: int = 0
    workers: int = 0
    max_skipped: int = 100

    def __post_init__(self) -> None:
        if self.root is not None:
            self.root = os.path.abspath(os.path.expanduser(self.root))  # stored, it must mean the same from anywhere
        if self.name not in DATA_NAMES:
            raise ValueError(f"name must be one of {', '.join(DATA_NAMES)}, got {self.name!r}")
        if self.root is not None and self.name not in NAMES_WITH_ROOT:
            readers = " and ".join(NAMES_WITH_ROOT)
            raise ValueError(f"root is read by {readers} alone, got {self.root!r} with name {self.name!r}")
        for field in ("size", "train_size", "val_size", "batch_size"):
            value = getattr(self, field)
            if value is not None and value < 1:
                raise ValueError(f"{field} must be at least 1, got {value}")
        for field in ("split_seed", "workers", "max_skipped"):
            if getattr(self, field) < 0:
                raise ValueError(f"{field} must be at least 0, got {getattr(self, field)}")
