"""The choice of a data set, as plain values: imports no torch."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

DataName = Literal["digits", "motion", "fashion-mnist", "images", "videos", "ucf101", "volumes", "rsna"]
DATA_NAMES: tuple[str, ...] = get_args(DataName)
NAMES_WITH_ROOT = ("fashion-mnist", "images", "videos", "ucf101", "volumes", "rsna")
VIDEOS = ("videos", "ucf101")
VOLUMES = ("volumes", "rsna")
READ_BY = {
    "frames": VIDEOS + VOLUMES,
    "frame_stride": VIDEOS,
    "flip": VIDEOS + VOLUMES,
    "split": ("ucf101",),
    "test_views": VIDEOS,
    "labels": VOLUMES,
    "windows": VOLUMES,
}


@dataclass
class DataConfig:
    """Which data, how much of it, and in what batches.

    Attributes:
        name: The data set: "digits" (real 8x8 digits), "motion" (clips of moving digits), "fashion-mnist",
            "images" or "videos" (your own folder), "ucf101", "volumes" (your own DICOM series or NIfTI files), or
            "rsna" (CT of the head with and without haemorrhage).
        root: Folder that holds the files. "images" and "videos" need it: root/<class>/* or root/train/<class>/* with
            root/val/<class>/*. "fashion-mnist" may have it: the folder of its four idx files. The others need it as
            docs/data.md tells.
        size: Pixels per side; None is the data set's own (8, 20, 28 and 64 in the order of the names).
        train_size: Train on that many examples, as equally many of each class as there can be; None is all,
            and 2400 clips of "motion".
        val_size: Validate on that many examples, chosen likewise; None is all, and 600 clips of "motion".
        batch_size: Examples in one training step.
        split_seed: Decides what is trained on and what is held out, whatever the seed of the run.
        workers: Processes that load data beside the training; 0 loads in the training process.
        frames: Frames of a clip, or slices of a volume; None is 8 and 32.
        frame_stride: Frames of a video for each frame of a clip; None is 4.
        flip: Mirror half of the training clips or volumes, left to right; None is the data set's own: "ucf101" alone.
        split: Which of UCF101's three official splits; None is 1.
        test_views: Temporal segments and spatial crops of a video over which an evaluation averages logits; None is
            the centre alone.
        labels: CSV file with the labels of "volumes" or "rsna"; None is root/labels.csv and root/stage_2_train.csv.
        windows: [centre, width] of every channel of a volume, in the file's units, Hounsfield units for CT; None is
            brain, subdural and soft tissue for "rsna", and for "volumes" one channel, each volume from its 0.5th to
            its 99.5th percentile.
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
    frames: int | None = None
    frame_stride: int | None = None
    flip: bool | None = None
    split: int | None = None
    test_views: list[int] | None = None
    labels: str | None = None
    windows: list[list[float]] | None = None
    max_skipped: int = 100

    def __post_init__(self) -> None:
        if self.root is not None:
            self.root = os.path.abspath(os.path.expanduser(self.root))  # stored, it must mean the same from anywhere
        if self.name not in DATA_NAMES:
            raise ValueError(f"name must be one of {', '.join(DATA_NAMES)}, got {self.name!r}")
        if self.root is not None and self.name not in NAMES_WITH_ROOT:
            raise ValueError(
                f"root is read by {_and(NAMES_WITH_ROOT)} alone, got {self.root!r} with name {self.name!r}"
            )
        self._refuse_unread()
        if self.labels is not None:
            self.labels = os.path.abspath(os.path.expanduser(self.labels))
        for field in ("size", "train_size", "val_size", "batch_size", "frames", "frame_stride"):
            value = getattr(self, field)
            if value is not None and value < 1:
                raise ValueError(f"{field} must be at least 1, got {value}")
        for field in ("split_seed", "workers", "max_skipped"):
            if getattr(self, field) < 0:
                raise ValueError(f"{field} must be at least 0, got {getattr(self, field)}")
        if self.split not in (None, 1, 2, 3):
            raise ValueError(f"split must be 1, 2 or 3, got {self.split}")
        if self.test_views is not None and (len(self.test_views) != 2 or min(self.test_views) < 1):
            raise ValueError(f"test_views must be segments and crops, at least 1 each, got {self.test_views}")
        for window in [] if self.windows is None else self.windows or [[]]:
            if len(window) != 2 or not window[1] > 0:
                raise ValueError(f"windows must each be [centre, width above 0], got {self.windows}")

    def _refuse_unread(self) -> None:
        for field, readers in READ_BY.items():
            value = getattr(self, field)
            if value is not None and self.name not in readers:
                raise ValueError(f"{field} is read by {_and(readers)} alone, got {value!r} with name {self.name!r}")


def _and(names: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
