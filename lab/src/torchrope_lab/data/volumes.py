"""Volumes from DICOM series or NIfTI files, in folders of classes or with a CSV file of labels."""

import csv
import logging
import math
import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pydicom
import torch
from nibabel.openers import ImageOpener
from torch import Tensor

from torchrope_lab.data.cache import ExampleCache
from torchrope_lab.data.data_config import DataConfig
from torchrope_lab.data.datamodule import DataModule
from torchrope_lab.data.dicom import Header, finite, index_headers, read_slice, sort_slices
from torchrope_lab.data.faults import Fault, name_some, reason, warn_skipped
from torchrope_lab.data.folders import files_below, warn_unread
from torchrope_lab.data.images import (
    existing_folder,
    find_classes,
    require_each,
    select_examples,
    split_by_group,
)
from torchrope_lab.data.streamed import StreamedSet
from torchrope_lab.data.table_files import Columns, read_csv
from torchrope_lab.data.tensors import Normalise
from torchrope_lab.data.transforms import resize
from torchrope_lab.mistakes import Mistake

PERCENTILES = (0.5, 99.5)
ENLARGED = 2  # voxels of an input / of the median volume beyond which a warning is due
GAP = 1.5  # distance of neighbouring slices / the median one, above which a slice between them may be missing
NIFTI_EXTENSIONS = (".nii", ".nii.gz")
DICOM_EXTENSIONS = (".dcm", ".dicom", ".ima", "")
EXTENSIONS = " ".join((*NIFTI_EXTENSIONS, *filter(None, DICOM_EXTENSIONS), "or none"))
NOT_SLICES = ("DICOMDIR", "LICENSE", "README")
LABELS = "labels.csv"
COLUMNS = {  # alternative names, without spaces and underscores; the last two are optional
    "study": ("file", "path", "id", "name"),
    "label": ("class", "target"),
    "part": ("split",),
    "patient": ("patientid", "subject", "subjectid"),
}
OPTIONAL = ("part", "patient")
LAYOUT = (
    f"DICOM series or NIfTI files with root/{LABELS}, columns study (path below root or StudyInstanceUID), "
    "label (class) and optionally part (train or val) and patient; or without a table, root/<class>/* with NIfTI files "
    "or folders of one series"
)
EXPECTED = f"volumes ({LAYOUT})"

logger = logging.getLogger(__name__)

Spacing = tuple[float, float, float]
Window = Sequence[float]  # centre, width
ReadSlice = Callable[[Path], Tensor]


@dataclass(frozen=True)
class Volume:
    """Files and voxel spacing of a volume."""

    name: str  # in sample lists and messages
    paths: tuple[str, ...]  # a NIfTI file, or the slices of a DICOM series in their order, below root
    spacing: Spacing  # mm between slices, rows and columns
    shape: tuple[int, int, int]  # slices, rows and columns
    patient: str  # id; volumes of one patient are in the same part of the split
    largest_step: float = 0.0  # largest distance in mm of neighbouring slices; 0 if evenly spaced by definition


class VolumeSet(StreamedSet):
    """Volumes read on access, windows as channels, resampled to one size.

    Args:
        root: Folder that the paths are relative to.
        volumes: The volumes.
        labels: Their labels.
        size: (slices, rows, columns) of an input.
        windows: (centre, width) of every channel; None is one channel from percentiles.
        cache: Cache of the inputs.
        max_skipped: Maximum number of unreadable volumes.
        read_slice: Reads the values `(rows, columns)` of a DICOM file.

    Attributes:
        returns_spacing: Whether samples are (input, label, spacing).
        spacings: mm between the voxels of every input along (slices, rows, columns), float32 `(volumes, 3)`.
    """

    def __init__(
        self,
        root: Path,
        volumes: Sequence[Volume],
        labels: Sequence[int],
        size: tuple[int, int, int],
        *,
        windows: Sequence[Window] | None,
        cache: ExampleCache,
        max_skipped: int,
        read_slice: ReadSlice = read_slice,
    ) -> None:
        names = [volume.name for volume in volumes]
        super().__init__(list(zip(names, labels, strict=True)), max_skipped, "volumes")
        self.root = root
        self.volumes = list(volumes)
        self.size = size
        self.windows = windows
        self.cache = cache
        self.read_slice = read_slice
        self.returns_spacing = False
        extents = torch.tensor([volume.shape for volume in volumes]) * torch.tensor([v.spacing for v in volumes])
        self.spacings = extents / torch.tensor(size)

    def files(self, index: int) -> list[Path]:
        """Return the paths of a volume's slices, or of its file."""
        return [self.root / path for path in self.volumes[index].paths]

    def with_examples(self, sets: Sequence[Any], indices: Tensor) -> "VolumeSet":
        """Return volumes of several sets, numbered consecutively."""
        same, volumes = super().with_examples(sets, indices), [volume for part in sets for volume in part.volumes]
        same.volumes = [volumes[index] for index in indices.tolist()]
        same.spacings = torch.cat([part.spacings for part in sets])[indices]
        return same

    def load(self, index: int) -> Tensor:
        """Read a volume `(channels, *size)` in [0, 1]."""
        paths = self.volumes[index].paths
        packages = pydicom.__version__, nibabel.__version__
        settings = ("volume", packages, self.read_slice.__name__, self.size, self.windows)
        return self.cache.get([self.root / path for path in paths], settings, partial(self._read, paths))

    def _read(self, paths: Sequence[str]) -> Tensor:
        values = read_volume(self.root, paths, self.read_slice)  # [slices, rows, columns]
        windows = [percentile_window(values)] if self.windows is None else self.windows
        slices = [resize(apply_windows(plane, windows)[None], self.size[1:])[0] for plane in values]
        channels = torch.stack(slices, dim=1)  # [channels, slices, height, width]
        # resized as images (slices, pixels): resizing over one or three axes is not antialiased
        flat = resize(channels.flatten(2)[None], (self.size[0], channels[0, 0].numel()))[0]
        return flat.unflatten(2, self.size[1:])

    def sample(self, index: int) -> Any:
        """Return input and label, and the spacing if requested."""
        sample = super().sample(index)
        return (*sample, self.spacings[index]) if self.returns_spacing else sample


class Volumes(DataModule):
    """Volumes below `root`, DICOM series or NIfTI files, labelled by a CSV file with the columns study and label."""

    # Without `labels` and without root/labels.csv the class is the folder: root/<class>/* or root/train/<class>/* with
    # root/val/<class>/*, where each NIfTI file, at any depth, and each folder or study of DICOM files is a volume. A
    # study is the path of a NIfTI file or of a folder with one series, a StudyInstanceUID (of several series the one
    # with most slices is taken) or a SeriesInstanceUID. An optional column part contains train or val, for all volumes
    # of the patient; of patients without it, a fifth of each class is held out by a hash of patient and `split_seed`.
    # Volumes are oriented as in DICOM: slices towards the head, rows towards the back, columns towards the patient's
    # left (axial series and all NIfTI files). They are read during training; unreadable ones are skipped, up to
    # `max_skipped`.

    name = "volumes"
    axes = ("depth", "height", "width")
    read_slice: ReadSlice = staticmethod(read_slice)

    def __init__(self, config: DataConfig) -> None:
        super().__init__(config)
        if isinstance(config.augment.randaugment, str):
            rule = "--data.augment.randaugment of volumes must be operations,magnitude"
            raise Mistake(f"{rule}, got {config.augment.randaugment}")
        self.input_size = (config.frames, config.size, config.size)
        self.windows = config.windows
        self.in_channels = 1 if self.windows is None else len(self.windows)
        self.rows: list[tuple[str, str, str, str]] = []
        self.folders: dict[str, Path] = {}
        self.root = self.find_root()

    def find_root(self) -> Path:
        """Return the folder that paths are relative to, and set classes and title."""
        root = existing_folder(self.config.root, "volumes", LAYOUT)
        self.title = f"Volumes in {root.name}"
        self.table = Path(self.config.labels) if self.config.labels else root / LABELS
        if self.config.labels or self.table.exists():
            self.rows = read_labels(self.table)
            self.classes = tuple(sorted({label for _, label, _, _ in self.rows}, key=_numbers_first))
            if len(self.classes) < 2:
                raise Mistake(f"labels must be of at least two classes, got {', '.join(self.classes) or 'none'}")
            return root
        try:
            self.folders, self.classes = find_classes(root)
        except ValueError as error:
            raise Mistake(f"--data.root must hold {EXPECTED}; there is no {LABELS}, and: {error}") from error
        return root

    def labelled(self) -> list[tuple[Volume, int, str]]:
        """Find the volumes with their labels and parts ("train", "val", or "" to be split here), and set `skipped`."""
        folders = [folder / name for folder in self.folders.values() for name in self.classes] or [self.root]
        files = [path for folder in folders for path in files_below(folder, self.root)]
        read = [path for path in files if _is_nifti(path) or Path(path).suffix.lower() in DICOM_EXTENSIONS]
        table = [self.table.relative_to(self.root).as_posix()] if self.table.is_relative_to(self.root) else []
        kind = f"volumes{' of a class' if self.folders else ''} ({EXTENSIONS})"
        self.unread = warn_unread(self.root, read + table, kind)
        volumes, faults = find_volumes(self.root, files, by_folder=bool(self.folders))
        rows = self.rows or [
            (name, label, part, "")
            for part, folder in self.folders.items()
            for label in self.classes
            for name in volumes
            if (self.root / name).is_relative_to(folder / label)
        ]
        damaged = {_without_extension(path) for path, _ in faults}
        labelled = []
        row_of: dict[str, str] = {}
        for study, label, part, patient in rows:
            volume = volumes.get(study, volumes.get(_without_extension(study)))
            if volume is not None:
                if volume.name in row_of:
                    rule = "each volume must have one label"
                    raise Mistake(f"{rule}, got rows {row_of[volume.name]} and {study} in {self.table} for one volume")
                row_of[volume.name] = study
                volume = replace(volume, patient=patient or volume.patient)
                labelled.append((volume, self.classes.index(label), part))
            elif _without_extension(study) not in damaged:
                faults.append((study, "not there"))
        self.skipped = faults
        if not labelled:
            named = f": {name_some(faults)}" if faults else ""
            kind = "none of the labelled ones" if self.rows else "none"
            raise Mistake(f"--data.root must hold {EXPECTED}, got {kind} in {str(self.root)!r}{named}")
        total = len(self.rows) or len(labelled) + len(faults)
        warn_skipped(faults, total, self.config.max_skipped, "volumes and slices")
        _warn_gaps([volume for volume, _, _ in labelled])
        if "" in self.folders:
            samples = [(volume.name, label) for volume, label, _ in labelled]
            require_each(samples, self.classes, 2, "volumes", f" if there is no {LABELS}")
        return labelled

    def describe(self, count: int) -> None:
        """Set `description` from the number of volumes."""
        slices, side, _ = self.input_size
        self.description = (
            f"{count:,} volumes from the folder {self.root.name}, resampled to {slices} slices of "
            f"{side}×{side} voxels; the class is {'the sub-folder' if self.folders else 'a column of a table'}."
        )

    def datasets(self) -> tuple[VolumeSet, VolumeSet]:
        """Read the headers, split, choose `train_size` and `val_size` volumes, measure mean and std."""
        config, cache = self.config, ExampleCache(self.config.cache_gib)
        found = {volume.name: (volume, label, part) for volume, label, part in self.labelled()}
        patients = {volume.patient for volume, _, _ in found.values()}
        if len(patients) == 1 < len(found):
            rule = "volumes must be of two patients or more, as no patient is in both parts"
            instead = f"a column patient of {LABELS} names others"
            raise Mistake(f"{rule}, got patient {patients.pop()!r} for all {len(found)}: {instead}")
        grouped = {name: (label, volume.patient, part) for name, (volume, label, part) in found.items()}
        train, val = split_by_group(grouped, config.split_seed, "patient")
        require_each(train, self.classes, 1, "volumes", " to train on")
        require_each(val, self.classes, 1, "volumes", " to validate on")
        train = select_examples(train, config.train_size, config.split_seed, "train_size")
        val = select_examples(val, config.val_size, config.split_seed, "val_size")
        self.describe(len(train) + len(val))
        self._warn_enlarged([found[name][0].shape for name, _ in train])
        train_set, val_set = (
            VolumeSet(
                self.root,
                [found[name][0] for name, _ in part],
                [label for _, label in part],
                (config.frames, config.size, config.size),
                windows=self.windows,
                cache=cache,
                max_skipped=config.max_skipped,
                read_slice=type(self).read_slice,
            )
            for part in (train, val)
        )
        normalise = Normalise(*train_set.statistics())
        return train_set.changed(normalise=normalise), val_set.changed(normalise=normalise)

    def _warn_enlarged(self, shapes: Sequence[Sequence[int]]) -> None:
        """Warn if an input has more than twice the voxels of the median volume."""
        frames, *sides = (round(statistics.median(extents)) for extents in zip(*shapes, strict=True))
        times = math.prod(self.input_size) / (frames * math.prod(sides))
        if times > ENLARGED:
            sizes = ("x".join(map(str, size)) for size in ((frames, *sides), self.input_size))
            advice = f"--data.frames {frames} --data.size {max(sides)} keeps their size"
            logger.warning("volumes of %s voxels are enlarged to %s, %.0f times as many: %s", *sizes, times, advice)

    def groups(self, train: Any, val: Any) -> list[str]:
        """Return the patient of every volume."""
        return [volume.patient for part in (train, val) for volume in part.volumes]


def apply_windows(values: Tensor, windows: Sequence[Window]) -> Tensor:
    """Map [centre - width / 2, centre + width / 2] linearly to [0, 1], clipped: `(windows, *shape)`."""
    return torch.stack([((values - centre) / width + 0.5).clamp(0, 1) for centre, width in windows])


def percentile_window(values: Tensor) -> Window:
    """Compute the window from the 0.5th to the 99.5th percentile of the values."""
    low, high = np.percentile(values.numpy(), PERCENTILES)
    return float((low + high) / 2), float(max(high - low, 1e-6))


def read_volume(root: Path, paths: Sequence[str], read_slice: ReadSlice = read_slice) -> Tensor:
    """Read a NIfTI file or the slices of a series: float32 `(slices, rows, columns)`."""
    if _is_nifti(paths[0]):
        with np.errstate(over="ignore", invalid="ignore"):
            # from (right, front, head) to (slices up, rows to the back, columns to the left)
            voxels = nibabel.as_closest_canonical(_load_nifti(root / paths[0])).get_fdata(dtype=np.float32)
        return finite(torch.from_numpy(voxels.T[:, ::-1, ::-1].copy()), "voxels")
    planes = []
    for path in paths:
        try:
            planes.append(read_slice(root / path))
        except MemoryError:
            raise
        except Exception as error:  # pydicom's decoders raise many kinds
            raise Mistake(f"{path}: {reason(error)}") from error
    return torch.stack(planes)


def find_volumes(
    root: Path, files: Sequence[str] | None = None, *, by_folder: bool = False
) -> tuple[dict[str, Volume], list[Fault]]:
    """Return volumes by every name that a table may use, and unusable files and studies, from headers below `root`."""
    # Names are path, folder, StudyInstanceUID, SeriesInstanceUID. With `by_folder`, a series in several folders is
    # several volumes. A volume then has one name, its folder, with the study if the folder has several; of several
    # series of a study the one with most slices is taken.
    files = files_below(root, root) if files is None else files
    volumes: dict[str, Volume] = {}
    faults: list[Fault] = []
    for path in filter(_is_nifti, files):
        try:
            volume = nifti_volume(root, path)
            if (other := volumes.setdefault(volume.name, volume)) is not volume:
                raise Mistake(f"files of one folder must have different names, got another {other.paths[0]}")
        except Exception as error:  # nibabel raises many kinds
            faults.append((path, reason(error)))
    headers, unreadable = index_headers(root, list(filter(_is_slice, files)))
    series, disordered = series_volumes(headers, by_folder=by_folder)
    contents: dict[str, set[Any]] = defaultdict(set)  # studies, or series, of every folder
    for volume in series:
        header = headers[volume.paths[0]]
        for folder in _folders(volume):
            contents[folder].add(header.study if by_folder else (header.study, header.series))
    for volume in series:  # in increasing length: the longest series replaces the others of its study
        header = headers[volume.paths[0]]
        names = [folder for folder in _folders(volume) if len(contents[folder]) == 1]
        if by_folder:
            [name] = names or [f"{folder}/{header.study}" for folder in _folders(volume)]
            volumes[name] = replace(volume, name=name)
        else:
            volumes |= {name: volume for name in (header.study, header.series, *names) if name}
    return volumes, faults + unreadable + disordered


def _warn_gaps(volumes: Sequence[Volume]) -> None:
    """Warn of series whose slices are unevenly spaced."""
    gaps = [
        (volume.name, f"{volume.largest_step:g} mm between two slices, otherwise {volume.spacing[0]:g}")
        for volume in volumes
        if volume.largest_step > GAP * volume.spacing[0]
    ]
    if gaps:
        counts = f"{len(gaps)} of {len(volumes)} volumes"
        logger.warning("slices of %s are unevenly spaced, so some may be missing: %s", counts, name_some(gaps))


def series_volumes(headers: Mapping[str, Header], *, by_folder: bool = False) -> tuple[list[Volume], list[Fault]]:
    """Build a volume from every series (in every folder), sorted by number of slices, and list the invalid ones."""
    groups: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for path, header in headers.items():
        groups[Path(path).parent.as_posix() if by_folder else "", header.study, header.series].append(path)
    volumes: list[Volume] = []
    faults: list[Fault] = []
    for (folder, study, series), paths in groups.items():
        try:
            ordered, spacing, largest_step = sort_slices(paths, headers)
        except ValueError as error:
            faults.append((f"{folder}/{study}" if folder else study, str(error)))
            continue
        rows, columns = headers[ordered[0]].shape
        patient = headers[ordered[0]].patient or study
        shape = len(ordered), rows, columns
        volumes.append(Volume(series or study, tuple(ordered), spacing, shape, patient, largest_step))
    return sorted(volumes, key=lambda volume: (len(volume.paths), volume.name)), faults


def nifti_volume(root: Path, path: str) -> Volume:
    """Read the header of a NIfTI file."""
    image = _load_nifti(root / path)
    if len(image.shape) != 3 or 0 in image.shape:
        raise Mistake(f"a volume must have voxels along three axes, got the shape {image.shape}")
    if image.get_data_dtype().kind not in "fiu":
        raise Mistake(f"voxels must be real numbers, got {image.get_data_dtype()}")
    sizes = nibabel.affines.voxel_sizes(image.affine)
    if not all(0 < size < math.inf for size in sizes):
        raise Mistake(f"voxels must have a size in mm, got {', '.join(f'{size:g}' for size in sizes)}")
    image = nibabel.as_closest_canonical(image)
    x, y, z = (float(size) for size in image.header.get_zooms())
    columns, rows, slices = image.shape
    return Volume(_without_extension(path), (path,), (z, y, x), (slices, rows, columns), _without_extension(path))


def read_labels(path: Path) -> list[tuple[str, str, str, str]]:
    """Read a table of studies: (study, label, part, patient), the last two "" if the table has none."""
    # The columns may have other names, in any case and with spaces or underscores: file, path, id or name; class or
    # target; split; PatientID, subject or subject_id. A warning names columns that are not read.
    table = read_columns(path, EXPECTED)
    columns = [_column(name, list(table), path) for name in COLUMNS]
    if unread := [repr(name) for name in table if name not in columns]:
        logger.warning("columns of %s that are not read: %s", path.name, ", ".join(unread))
    cells = [table[column].tolist() if column else repeat("") for column in columns]
    labels = list(zip(*cells, strict=False))
    for study, label, part, _ in labels:
        if not study or not label:
            raise Mistake(f"each row must have a study and a label, got {study!r} and {label!r} in {path}")
        if part not in ("", "train", "val"):
            raise Mistake(f"part must be train or val, got {part!r} for {study!r} in {path}")
    return labels


def _column(name: str, columns: Sequence[str], path: Path) -> str:
    """Find the column of this name, or else that of one of the alternative names; "" if there is no optional column."""
    for names in ((name,), COLUMNS[name]):
        found = [column for column in columns if re.sub(r"[\s_]", "", column.lower()) in names]
        if len(found) > 1:
            received = " and ".join(map(repr, found))
            raise Mistake(f"labels must have one column for the {name}, named {name!r}, got {received} in {path}")
        if found:
            return found[0]
    if name in OPTIONAL:
        return ""
    *others, last = COLUMNS[name]
    rule = f"labels must have a column {', '.join((name, *others))} or {last}"
    raise Mistake(f"{rule}, got {path} with {', '.join(columns) or 'none'}")


def read_columns(path: Path, expected: str) -> Columns:
    """Read a CSV file of text whose first line names the columns."""
    try:
        return read_csv(path, lambda _: True)
    except (OSError, ValueError, csv.Error) as error:
        raise Mistake(f"--data.labels must be a readable table of {expected}, got {path}: {reason(error)}") from error


def _load_nifti(path: Path) -> Any:
    """Open a NIfTI file, after checking its scaling."""
    image: Any = nibabel.load(path)
    with ImageOpener(str(path)) as file:
        slope = float(type(image).header_class.from_fileobj(file, check=False)["scl_slope"])
    if math.isinf(slope):  # nibabel reads it as no scaling, like NaN and 0
        raise Mistake(f"scl_slope must be finite, got {slope}")
    return image


def _is_nifti(path: str) -> bool:
    return path.lower().endswith(NIFTI_EXTENSIONS)


def _is_slice(path: str) -> bool:
    name = Path(path).name
    return Path(path).suffix.lower() in DICOM_EXTENSIONS and name.upper() not in NOT_SLICES


def _folders(volume: Volume) -> set[str]:
    return {Path(path).parent.as_posix() for path in volume.paths}


def _without_extension(path: str) -> str:
    for extension in reversed(NIFTI_EXTENSIONS):
        path = path.removesuffix(extension)
    return path.rstrip("/").removeprefix("./")


def _numbers_first(label: str) -> tuple[int, int, str]:
    return (0, int(label), label) if label.isdecimal() else (1, 0, label)
