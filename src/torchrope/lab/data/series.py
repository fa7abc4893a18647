"""Time series to be classified, at regular or irregular times."""

from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import torch

from torchrope.lab.data.config import SeriesConfig
from torchrope.lab.data.folders import matching
from torchrope.lab.data.images import Sample, existing_folder, hold_out, select_examples
from torchrope.lab.data.series_files import READERS, TimeSeries, read_series
from torchrope.lab.data.tokens import Cloud, TokensModule, point_counts

PACKAGE = "aeon"
"""Brings some small sets of the archives along."""
EXTENSIONS = tuple(READERS)
LAYOUT = "root/NAME_TRAIN.ts and root/NAME_TEST.ts, or .arff or .npz; or one such file alone"


class Series(TokensModule):
    """Time series of the UCR and UEA archives, or of your own in their formats: a token at each time.

    Of a file with _TRAIN in its name and one with _TEST the second is held out; of one file alone a fifth of each
    class, by a hash of its place in the file and `split_seed`. Times count from the first one of a series. Times
    and values that are missing stay missing: where no channel is known there is no token, and a channel that is missing
    is told to the model.

    Raises:
        ValueError: root is missing, holds no such files or several sets of them, or one violates its format.
    """

    name = "series"
    axes = ("time",)

    config: SeriesConfig

    def __init__(self, config: SeriesConfig) -> None:
        super().__init__(config)
        self.root = find_folder(config.root, config.problem)
        self.files = find_files(self.root, config.problem)
        title = self.files[0].stem.removesuffix("_TRAIN")
        self.title = f"Time series, {title}"
        self.description = f"Time series of {title}, a token at each time."

    def clouds(self) -> tuple[list[Cloud], list[Sample], list[Cloud], list[Sample]]:
        """Read both files, choose `train_size` and `val_size` of them."""
        config = self.config
        parts = [read_series(file) for file in self.files]
        self.classes = classes_of(parts, self.files)
        found = {
            f"{file.name}, series {number}": (cloud_of(one, f"{file.name}, series {number}"), one.label)
            for file, part in zip(self.files, parts, strict=True)
            for number, one in enumerate(part, start=1)
        }
        channels = {cloud.features.shape[1] for cloud, _ in found.values()}
        if len(channels) > 1:
            raise ValueError(f"both parts must have as many channels, got {sorted(channels)} in {str(self.root)!r}")
        self.features = tuple(f"channel {number}" for number in range(1, max(channels) + 1))
        samples = [(name, self.classes.index(label)) for name, (_, label) in found.items()]
        first = len(parts[0])
        train, val = (samples[:first], samples[first:]) if len(parts) == 2 else hold_out(samples, config.split_seed)
        train = select_examples(train, config.train_size, config.split_seed, "train_size")
        val = select_examples(val, config.val_size, config.split_seed, "val_size")
        shown = [found[name][0] for name, _ in (*train, *val)]
        several = f" of {len(self.features)} channels" if len(self.features) > 1 else ""
        self.description = f"{len(shown):,} time series{several} with {point_counts(shown)}, a token at each time."
        return [found[name][0] for name, _ in train], train, [found[name][0] for name, _ in val], val


def find_folder(root: str | None, problem: str | None) -> Path:
    """Find the folder of the files: `root`, or where none is given that of a problem in the package aeon.

    Raises:
        ValueError: the folder is missing, or neither it nor a problem of the package is named.
    """
    if root is not None or problem is None:
        return existing_folder(root, f"time series, or --data.problem for one of the package {PACKAGE}", LAYOUT)
    try:
        everything = Path(str(distribution(PACKAGE).locate_file("aeon/datasets/data")))
    except PackageNotFoundError:
        rule = (
            f"--data.root must be given for time series, or the package {PACKAGE} be installed, which has {problem!r}"
        )
        raise ValueError(f"{rule} (pip install --no-deps aeon), got a machine without it") from None
    known = sorted(folder.name for folder in everything.iterdir() if any(folder.glob("*_TRAIN.ts")))
    if problem not in known:
        raise ValueError(f"--data.problem must be one of {', '.join(known)} where no root is given, got {problem!r}")
    return everything / problem


def find_files(root: Path, problem: str | None = None) -> list[Path]:
    """Find the training and the test file of a set, or its only file; of several formats the first of `EXTENSIONS`.

    Args:
        root: The folder.
        problem: Name of the set; None if there is only one.

    Raises:
        ValueError: there are none, several, or a test file alone.
    """
    there = [path for path in matching(root, "*") if path.suffix.lower() in EXTENSIONS and path.is_file()]
    sets: dict[str, list[Path]] = {}
    for path in there:
        sets.setdefault(path.stem.removesuffix("_TRAIN").removesuffix("_TEST"), []).append(path)
    if problem is not None and problem not in sets:
        rule = "--data.problem must be a set of time series in --data.root"
        raise ValueError(f"{rule}, got {problem!r} in {str(root)!r} with {', '.join(sets) or 'none'}")
    names = [problem] if problem is not None else list(sets)
    if len(names) > 1:
        rule = "--data.root must hold one set of time series, or --data.problem must name one"
        raise ValueError(f"{rule}, got {', '.join(names)} in {str(root)!r}")
    for name, extension in ((name, extension) for name in names for extension in EXTENSIONS):
        of_format = {path.stem: path for path in sets[name] if path.suffix.lower() == extension}
        if {f"{name}_TRAIN", f"{name}_TEST"} <= {*of_format}:
            return [of_format[f"{name}_TRAIN"], of_format[f"{name}_TEST"]]
        if name in of_format:
            return [of_format[name]]
    came = ", ".join(path.name for path in there) or "none"
    raise ValueError(f"--data.root must hold time series ({LAYOUT}), got {came} in {str(root)!r}")


def classes_of(parts: list[list[TimeSeries]], files: list[Path]) -> tuple[str, ...]:
    """The classes trained on, in order.

    Raises:
        ValueError: they are fewer than two, one of a single file has one series, or a class is held out alone.
    """
    labels = [[one.label for one in part] for part in parts]
    classes = sorted({*labels[0]}, key=lambda name: (float(name) if name.isdecimal() else float("inf"), name))
    if len(classes) < 2:
        raise ValueError(f"{files[0].name} must have two classes or more, got {', '.join(classes)}")
    single = [name for name in classes if len(parts) == 1 and labels[0].count(name) < 2]
    if single:
        rule = f"series of each class in {files[0].name} must number at least 2, one to train on and one to hold out"
        raise ValueError(f"{rule}, got 1 for {single[0]!r}")
    alone = sorted({*labels[-1]} - {*classes})
    if alone:
        raise ValueError(
            f"{files[1].name} must have the classes of {files[0].name}, got {', '.join(alone)} in it alone"
        )
    return tuple(classes)


def cloud_of(series: TimeSeries, name: str) -> Cloud:
    """A series as points in time."""
    try:
        return Cloud.of(torch.from_numpy(series.times)[:, None], torch.from_numpy(series.values))
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
