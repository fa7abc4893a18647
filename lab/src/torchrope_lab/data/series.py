"""Time series classification, with regularly or irregularly sampled series."""

from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import torch

from torchrope_lab.data.config import SeriesConfig
from torchrope_lab.data.folders import matching
from torchrope_lab.data.images import Sample, existing_folder, hold_out, select_examples
from torchrope_lab.data.series_files import READERS, TimeSeries, read_series
from torchrope_lab.data.tokens import Cloud, TokensModule, point_counts

PACKAGE = "aeon"
"""Package that contains some small sets of the archives."""
EXTENSIONS = tuple(READERS)
LAYOUT = "root/NAME_TRAIN.ts and root/NAME_TEST.ts, or .arff or .npz; or a single such file"


class Series(TokensModule):
    """Time series of the UCR and UEA archives, or others in their formats, with one token per time step.

    With a _TRAIN and a _TEST file, the latter is the validation set; of a single file, a fifth of each class is held
    out by a hash of the index in the file and `split_seed`. Times are relative to the first one of a series. A time
    step without any value has no token; tokens flag the channels that are missing.

    Raises:
        ValueError: root is missing, holds no such files or several sets of them, or a file violates its format.
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
        self.description = f"Time series of {title}, one token per time step."

    def clouds(self) -> tuple[list[Cloud], list[Sample], list[Cloud], list[Sample]]:
        """Read the files, and select `train_size` and `val_size` series."""
        config = self.config
        parts = [read_series(file) for file in self.files]
        self.classes = classes_of(parts, self.files)
        series = {
            f"{file.name}, series {number}": (cloud_of(one, f"{file.name}, series {number}"), one.label)
            for file, part in zip(self.files, parts, strict=True)
            for number, one in enumerate(part, start=1)
        }
        channels = {cloud.features.shape[1] for cloud, _ in series.values()}
        if len(channels) > 1:
            rule = "both parts must have the same number of channels"
            raise ValueError(f"{rule}, got {sorted(channels)} in {str(self.root)!r}")
        self.features = tuple(f"channel {number}" for number in range(1, max(channels) + 1))
        samples = [(name, self.classes.index(label)) for name, (_, label) in series.items()]
        first = len(parts[0])
        train, val = (samples[:first], samples[first:]) if len(parts) == 2 else hold_out(samples, config.split_seed)
        train = select_examples(train, config.train_size, config.split_seed, "train_size")
        val = select_examples(val, config.val_size, config.split_seed, "val_size")
        selected = [series[name][0] for name, _ in (*train, *val)]
        several = f" of {len(self.features)} channels" if len(self.features) > 1 else ""
        points = point_counts(selected)
        self.description = f"{len(selected):,} time series{several} with {points}, one token per time step."
        return [series[name][0] for name, _ in train], train, [series[name][0] for name, _ in val], val


def find_folder(root: str | None, problem: str | None) -> Path:
    """Return the folder of the files: `root` if given, else that of a problem in the package aeon.

    Raises:
        ValueError: the folder does not exist, or neither root nor a problem of the package is given.
    """
    if root is not None or problem is None:
        return existing_folder(root, f"time series, or --data.problem for one of the package {PACKAGE}", LAYOUT)
    try:
        folder = Path(str(distribution(PACKAGE).locate_file("aeon/datasets/data")))
    except PackageNotFoundError:
        rule = f"--data.root must be given for time series, or the package {PACKAGE} be installed for {problem!r}"
        raise ValueError(f"{rule} (pip install --no-deps aeon), got neither") from None
    problems = sorted(child.name for child in folder.iterdir() if any(child.glob("*_TRAIN.ts")))
    if problem not in problems:
        rule = f"--data.problem must be one of {', '.join(problems)} if --data.root is not given"
        raise ValueError(f"{rule}, got {problem!r}")
    return folder / problem


def find_files(root: Path, problem: str | None = None) -> list[Path]:
    """Find the training and test file of a set, or its only file; `EXTENSIONS` are in order of preference.

    Args:
        root: The folder.
        problem: Name of the set; may be None if there is only one.

    Raises:
        ValueError: there is none, there are several, or only a test file.
    """
    files = [path for path in matching(root, "*") if path.suffix.lower() in EXTENSIONS and path.is_file()]
    sets: dict[str, list[Path]] = {}
    for path in files:
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
    received = ", ".join(path.name for path in files) or "none"
    raise ValueError(f"--data.root must hold time series ({LAYOUT}), got {received} in {str(root)!r}")


def classes_of(parts: list[list[TimeSeries]], files: list[Path]) -> tuple[str, ...]:
    """Return the classes of the training series, numbers first, sorted.

    Raises:
        ValueError: there are fewer than two, a class of a single file has one series, or a test class is missing.
    """
    labels = [[one.label for one in part] for part in parts]
    classes = sorted({*labels[0]}, key=lambda name: (float(name) if name.isdecimal() else float("inf"), name))
    if len(classes) < 2:
        raise ValueError(f"{files[0].name} must have at least two classes, got {', '.join(classes)}")
    single = [name for name in classes if len(parts) == 1 and labels[0].count(name) < 2]
    if single:
        rule = f"series of each class in {files[0].name} must number at least 2, one to train on and one to hold out"
        raise ValueError(f"{rule}, got 1 for {single[0]!r}")
    unknown = sorted({*labels[-1]} - {*classes})
    if unknown:
        raise ValueError(
            f"{files[1].name} must have the classes of {files[0].name}, got {', '.join(unknown)} in it only"
        )
    return tuple(classes)


def cloud_of(series: TimeSeries, name: str) -> Cloud:
    """Convert a series to points with one position axis, time."""
    try:
        return Cloud.of(torch.from_numpy(series.times)[:, None], torch.from_numpy(series.values))
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
