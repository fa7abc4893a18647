"""DICOM files: an index of their headers, slices sorted by position, values in Hounsfield units."""

import math
import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pydicom
import torch
from pydicom.errors import InvalidDicomError
from pydicom.pixels import apply_modality_lut

from torchrope_lab.data.cache import index_of, read_files
from torchrope_lab.data.faults import Fault
from torchrope_lab.mistakes import Mistake

INDEX_VERSION = "2"
NEEDED = [
    "SOPInstanceUID",
    "StudyInstanceUID",
    "ImagePositionPatient",
    "ImageOrientationPatient",
    "PixelSpacing",
    "Rows",
    "Columns",
]
OF_VOLUME = ["PatientID", "ImageType", "EchoNumbers", "TemporalPositionIdentifier", "DiffusionBValue"]
"""Values that all slices of a volume share, where they have them."""
OF_SLICE = ["EchoTime", "InversionTime", "FlipAngle", "TriggerTime", "AcquisitionNumber", "AcquisitionTime"]
"""Values that may tell volumes apart whose slices lie at the same positions."""
TAGS = [*NEEDED, "SeriesInstanceUID", "SliceThickness", *OF_VOLUME, *OF_SLICE]
SAME_DIRECTION = 1e-3


class Header(NamedTuple):
    """Header of a slice."""

    instance: str  # SOPInstanceUID
    study: str  # StudyInstanceUID
    series: str  # SeriesInstanceUID, or ""
    patient: str  # PatientID, or ""
    position: Sequence[float]  # of the first pixel in mm, (x, y, z) towards left, posterior and superior (LPS)
    orientation: Sequence[float]  # directions of a row and of a column, six numbers
    spacing: Sequence[float]  # mm between rows, mm between columns
    thickness: float  # in mm
    shape: Sequence[int]  # rows, columns
    told: Sequence[str]  # values of `OF_VOLUME` and `OF_SLICE`, "" for those that are not there


def read_header(path: Path) -> Header:
    """Read a slice's header, not its pixels."""
    dataset = _read_dataset(path, stop_before_pixels=True, specific_tags=TAGS)
    missing = [tag for tag in NEEDED if tag not in dataset or dataset.get_item(tag).value in (None, b"")]
    if missing:
        raise Mistake(f"no {', '.join(missing)} in the header")
    return Header(
        instance=_text(dataset, "SOPInstanceUID"),
        study=_text(dataset, "StudyInstanceUID"),
        series=_text(dataset, "SeriesInstanceUID"),
        patient=_text(dataset, "PatientID"),
        position=_floats(dataset, "ImagePositionPatient", 3),
        orientation=_floats(dataset, "ImageOrientationPatient", 6),
        spacing=_floats(dataset, "PixelSpacing", 2),
        thickness=_floats(dataset, "SliceThickness", 1)[0] if _text(dataset, "SliceThickness") else 1.0,
        shape=(int(dataset.Rows), int(dataset.Columns)),
        told=[_text(dataset, tag) for tag in (*OF_VOLUME, *OF_SLICE)],
    )


def index_headers(root: Path, paths: Sequence[str]) -> tuple[dict[str, Header], list[Fault]]:
    """Read the headers of all files once."""
    index, doing = index_of(root, "headers"), "Reading headers of slices"
    headers, faults = read_files(root, paths, read_header, index, version=INDEX_VERSION, doing=doing)
    return {path: Header(*header) for path, header in headers.items()}, faults


def sort_slices(
    paths: Sequence[str], headers: Mapping[str, Header]
) -> tuple[list[str], tuple[float, float, float], float]:
    """Return a series' paths along its normal, the spacing of (slices, rows, columns) and the largest step, in mm."""
    # The spacing of slices is the median distance of neighbours, or the thickness of a single slice; the largest
    # distance is then 0. Of a few slices that are repeated the first by name is kept.
    one = headers[paths[0]]
    normal = np.cross(one.orientation[:3], one.orientation[3:])
    shared: dict[str, tuple[str, str]] = {}  # value of a name, and the first slice that has it
    for path in paths:
        header = headers[path]
        if list(header.shape) != list(one.shape) or not np.allclose(
            header.orientation, one.orientation, atol=SAME_DIRECTION
        ):
            raise Mistake(
                f"slices of a series must have the same shape and orientation, got {path} with others than {paths[0]}"
            )
        for name, value in zip(OF_VOLUME, header.told, strict=False):
            first, where = shared.setdefault(name, (value, path)) if value else ("", "")
            if first != value:
                raise _several(f"{name} {first} and {value} in {where} and {path}")
    placed: dict[float, str] = {}
    repeated = []
    for path in sorted(paths):
        header = headers[path]
        earlier = placed.setdefault(round(float(np.dot(header.position, normal)), 3), path)
        if header.instance != headers[earlier].instance:
            values = zip((*OF_VOLUME, *OF_SLICE), headers[earlier].told, header.told, strict=True)
            differ = ", ".join(f"{name} {one or 'none'} and {two or 'none'}" for name, one, two in values if one != two)
            repeated.append((differ, f"{earlier} and {path} at one position"))
    told = [f"{where} with {differ}" for differ, where in repeated if differ]
    if told or 2 * len(repeated) > len(placed):
        raise _several(told[0] if told else repeated[0][1])
    places = sorted(placed)
    steps = [after - before for before, after in pairwise(places)]
    distance = statistics.median(steps) if steps else one.thickness
    if not min(distance, *one.spacing) > 0:
        raise Mistake(f"voxels must have a size in mm, got {distance:g}, {one.spacing[0]:g} and {one.spacing[1]:g}")
    spacing = distance, float(one.spacing[0]), float(one.spacing[1])
    return [placed[place] for place in places], spacing, max(steps, default=0.0)


def read_slice(path: Path, *, wrapped: bool = False) -> torch.Tensor:
    """Read a slice's values `(rows, columns)`, rescaled by its header: Hounsfield units for CT."""
    # With `wrapped`, unsigned 12-bit values with an intercept near 0 are HU + 1000 modulo 4096.
    dataset = _read_dataset(path)
    slope = _floats(dataset, "RescaleSlope", 1)[0] if "RescaleSlope" in dataset else 1.0
    intercept = _floats(dataset, "RescaleIntercept", 1)[0] if "RescaleIntercept" in dataset else 0.0
    if not slope:
        raise Mistake(f"RescaleSlope must not be 0, got {_text(dataset, 'RescaleSlope')}")
    samples, frames = (int(dataset.get(tag) or 1) for tag in ("SamplesPerPixel", "NumberOfFrames"))
    if (samples, frames) != (1, 1):
        raise Mistake(f"a slice must have one value per pixel and one frame, got {samples} and {frames}")
    values = dataset.pixel_array
    with np.errstate(over="ignore", invalid="ignore"):  # `finite` tells of them
        if wrapped and dataset.BitsStored == 12 and not dataset.PixelRepresentation and intercept > -100:
            values = (values.astype(np.int32) + 1000) % 4096 - 1000
        else:
            values = apply_modality_lut(values, dataset).astype(np.float32)
    return finite(torch.from_numpy(values.astype(np.float32)))


def read_head_ct(path: Path) -> torch.Tensor:
    """Read a slice of the RSNA set in Hounsfield units, correcting known wrong headers."""
    # Some scanners' 12-bit files store HU + 1000 modulo 4096 but declare an intercept near 0 (J. Howard, Cleaning the
    # data for rapid prototyping, Kaggle 2019).
    return read_slice(path, wrapped=True)


def finite(values: torch.Tensor, what: str = "values") -> torch.Tensor:
    """Return the values; raise ValueError if some are not finite."""
    if not values.isfinite().all():
        raise Mistake(f"{what} must be finite, got {int((~values.isfinite()).sum())} that are not")
    return values


def _several(what: str) -> Mistake:
    return Mistake(f"a series must be of one volume, so keep the slices of one and remove the others, got {what}")


def _read_dataset(path: Path, **options: Any) -> Any:
    try:
        return pydicom.dcmread(path, **options)
    except (InvalidDicomError, EOFError) as error:
        raise Mistake("a slice must be a complete DICOM file, got a damaged file or another format") from error


def _text(dataset: Any, tag: str) -> str:
    """Read a value without validation: published identifiers ("ID_1a2b") do not have the form that DICOM prescribes."""
    value = dataset.get_item(tag).value if tag in dataset else None
    if tag == "DiffusionBValue" and value:  # the only one that is stored in binary
        value = str(dataset[tag].value)
    return (value.decode("latin-1") if isinstance(value, bytes) else str(value or "")).strip("\0 ")


def _floats(dataset: Any, tag: str, number: int) -> tuple[float, ...]:
    try:
        numbers = tuple(float(value) for value in _text(dataset, tag).split("\\"))
    except ValueError:
        numbers = ()
    if len(numbers) != number or not all(math.isfinite(value) for value in numbers):
        wanted = "a finite number" if number == 1 else f"{number} finite numbers"
        raise Mistake(f"{tag} must be {wanted}, got {_text(dataset, tag)[:60]!r}")
    return numbers
