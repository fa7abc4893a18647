"""Small volumes as DICOM and NIfTI files, in the folder layouts of data sets."""

import random
from collections.abc import Sequence
from pathlib import Path

import nibabel
import numpy as np
from pydicom.config import disable_value_validation
from pydicom.dataset import FileDataset, FileMetaDataset
from pydicom.uid import CTImageStorage, ExplicitVRLittleEndian

ROWS, COLUMNS = 10, 12

AXIAL = (1.0, 0.0, 0.0, 0.0, 1.0, 0.0)


@disable_value_validation()  # identifiers as the RSNA set has them, which DICOM does not allow
def write_slice(
    path: Path,
    stored: np.ndarray,
    position: Sequence[float],
    *,
    study: str,
    series: str = "",
    patient: str = "",
    orientation=AXIAL,
    slope: float = 1.0,
    intercept: float = -1024.0,
    bits: int = 16,
    signed: int = 1,
) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    meta = FileMetaDataset()
    meta.TransferSyntaxUID = ExplicitVRLittleEndian
    meta.MediaStorageSOPClassUID = CTImageStorage
    meta.MediaStorageSOPInstanceUID = "1.2.3"
    dataset = FileDataset(str(path), {}, file_meta=meta, preamble=b"\0" * 128)
    dataset.SOPInstanceUID = path.stem
    dataset.SOPClassUID = CTImageStorage
    dataset.StudyInstanceUID, dataset.SeriesInstanceUID = study, series or f"{study}_series"
    dataset.PatientID = patient or f"patient of {study}"
    dataset.ImagePositionPatient, dataset.ImageOrientationPatient = list(position), list(orientation)
    dataset.PixelSpacing, dataset.SliceThickness = [0.5, 0.75], 9.0
    dataset.RescaleSlope, dataset.RescaleIntercept = slope, intercept
    dataset.Rows, dataset.Columns = stored.shape
    dataset.SamplesPerPixel, dataset.PhotometricInterpretation = 1, "MONOCHROME2"
    dataset.BitsAllocated, dataset.BitsStored, dataset.HighBit = 16, bits, bits - 1
    dataset.PixelRepresentation = signed
    dataset.PixelData = stored.astype(np.int16 if signed else np.uint16).tobytes()
    dataset.save_as(path, enforce_file_format=True)
    return path


def head(slices: int, bleeding: bool, seed: int) -> np.ndarray:
    """Hounsfield units of a made-up head: air around, tissue that brightens upwards, blood in one slice of some."""
    values = np.full((slices, ROWS, COLUMNS), -1000.0)
    noise = np.random.default_rng(seed).integers(0, 4, values.shape)
    values[:, 2:-2, 2:-2] = (20 + noise + np.arange(slices)[:, None, None])[:, 2:-2, 2:-2]
    if bleeding:
        values[slices // 2, 3:6, 3:6] = 75
    return values


def write_series(folder: Path, values: np.ndarray, study: str, *, distance=5.0, prefix="ID_", **options) -> list[str]:
    """A series whose file names are in no order; returns the identifiers of its slices, from the lowest up."""
    names = [f"{prefix}{study}{number:03}" for number in range(len(values))]
    random.Random(study).shuffle(names)
    for name, plane, number in zip(names, values, range(len(values)), strict=True):
        position = (-10.0, -20.0, -30.0 + distance * number)
        write_slice(folder / f"{name}.dcm", plane + 1024, position, study=study, **options)
    return names


def rsna_folder(root: Path, studies: int = 10, patients: int | None = None) -> Path:
    """As Kaggle unpacks it: one folder of slices and one table."""
    lines = ["ID,Label"]
    for number in range(studies):
        bleeding = number % 2 == 1
        values = head(3 + number % 3, bleeding, number)
        patient = f"P{number % patients if patients else number}"
        names = write_series(root / "stage_2_train", values, f"{number:04}", patient=patient)
        for place, name in enumerate(names):
            here = bleeding and place == len(values) // 2
            lines += [f"{name}_epidural,0", f"{name}_subdural,{int(here)}", f"{name}_any,{int(here)}"]
    random.Random(1).shuffle(lines[1:])
    (root / "stage_2_train.csv").write_text("\n".join(lines) + "\n")
    return root


def affine_of(spacing: Sequence[float]) -> np.ndarray:
    """From (column, row, slice) to NIfTI's mm, for a series as `write_series` writes it."""
    depth, rows, columns = spacing
    affine = np.diag([-columns, -rows, depth, 1.0])
    affine[:3, 3] = (10.0, 20.0, -30.0)
    return affine


def write_nifti(path: Path, values: np.ndarray, spacing=(5.0, 0.5, 0.75)) -> Path:
    """The same (slices, rows, columns) as a DICOM series, in NIfTI's order and signs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    nibabel.save(nibabel.Nifti1Image(values.transpose(2, 1, 0).astype(np.float32), affine_of(spacing)), path)
    return path


def nifti_folder(root: Path, count: int = 10, part: bool = False) -> Path:
    lines = ["study,label,part" if part else "study,label"]
    for number in range(count):
        write_nifti(root / "scans" / f"{number}.nii.gz", head(5, number % 2 == 1, number))
        told = f",{'val' if number < 4 else 'train'}" if part else ""
        lines.append(f"scans/{number}.nii.gz,{'ill' if number % 2 else 'well'}{told}")
    (root / "labels.csv").write_text("\n".join(lines) + "\n")
    return root


def nifti_content(**fields: object) -> bytes:
    """A NIfTI file of 4 x 4 x 4 integers from 0 up, with fields of its header that no library would write."""
    header = nibabel.Nifti1Image(np.zeros((4, 4, 4), np.int16), np.eye(4)).header
    for name, value in {"vox_offset": 352, **fields}.items():
        header[name] = value
    content = header.binaryblock.replace(b"ni1\0", b"n+1\0")
    return content + bytes(4) + np.arange(64, dtype=np.int16).tobytes()
