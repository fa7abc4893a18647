"""Time series classification, with regularly or irregularly sampled series."""

from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from torchrope_lab.data.config import SeriesConfig
from torchrope_lab.data.folders import matching
from torchrope_lab.data.images import Sample, existing_folder, split_parts
from torchrope_lab.data.tables import SERIES_EXTENSIONS, read_series
from torchrope_lab.data.tokens import Cloud, TokensModule, classes_of, point_counts

PACKAGE = "aeon"
"""Package that contains some small sets of the archives."""
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
        parts = [
            {f"{file.name}, series {number}": series for number, series in enumerate(read_series(file), start=1)}
            for file in self.files
        ]
        clouds = {name: cloud for part in parts for name, (cloud, _) in part.items()}
        channels = {cloud.features.shape[1] for cloud in clouds.values()}
        if len(channels) > 1:
            rule = "both parts must have the same number of channels"
            raise ValueError(f"{rule}, got {sorted(channels)} in {str(self.root)!r}")
        self.features = tuple(f"channel {number}" for number in range(1, max(channels) + 1))
        labels = [{label for _, label in part.values()} for part in parts]
        self.classes = classes_of(labels[0], self.files[0].name)
        if unknown := sorted(labels[-1] - labels[0]):
            rule = f"{self.files[-1].name} must have the classes of {self.files[0].name}"
            raise ValueError(f"{rule}, got {', '.join(unknown)} in it only")
        samples = [[(name, self.classes.index(label)) for name, (_, label) in part.items()] for part in parts]
        train, val = (
            samples
            if len(samples) == 2
            else split_parts({"": samples[0]}, self.classes, self.config.split_seed, "time series")
        )
        selected = self.select(clouds, train, val)
        shown = [*selected[0], *selected[2]]
        several = f" of {len(self.features)} channels" if len(self.features) > 1 else ""
        self.description = f"{len(shown):,} time series{several} with {point_counts(shown)}, one token per time step."
        return selected


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
    """Find the training and test file of a set, or its only file; `SERIES_EXTENSIONS` are in order of preference.

    Args:
        root: The folder.
        problem: Name of the set; may be None if there is only one.

    Raises:
        ValueError: there is none, there are several, or only a test file.
    """
    files = [path for path in matching(root, "*") if path.suffix.lower() in SERIES_EXTENSIONS and path.is_file()]
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
    for name, extension in ((name, extension) for name in names for extension in SERIES_EXTENSIONS):
        of_format = {path.stem: path for path in sets[name] if path.suffix.lower() == extension}
        if {f"{name}_TRAIN", f"{name}_TEST"} <= {*of_format}:
            return [of_format[f"{name}_TRAIN"], of_format[f"{name}_TEST"]]
        if name in of_format:
            return [of_format[name]]
    received = ", ".join(path.name for path in files) or "none"
    raise ValueError(f"--data.root must hold time series ({LAYOUT}), got {received} in {str(root)!r}")
