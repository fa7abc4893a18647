"""Volumes: real DICOM and NIfTI files, their order in space, their units and spacings, and what damaged ones do."""

import gzip
import logging
import math
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import nibabel
import numpy as np
import pydicom
import pytest
import torch
from data_sets import load_data, refused
from pydicom.config import disable_value_validation
from torch.utils.data import DataLoader, default_collate
from volume_files import (
    AXIAL,
    COLUMNS,
    ROWS,
    affine_of,
    head,
    nifti_content,
    nifti_folder,
    rsna_folder,
    write_nifti,
    write_series,
    write_slice,
)

from torchrope.encodings.names import ROTARY, takes
from torchrope_lab.cli import main
from torchrope_lab.data.cache import index_of
from torchrope_lab.data.data_config import AugmentConfig, data_config
from torchrope_lab.data.dicom import Header, index_headers, read_head_ct, read_header, read_slice, sort_slices
from torchrope_lab.data.faults import TooManyFaults
from torchrope_lab.data.rsna import read_haemorrhages
from torchrope_lab.data.transforms import resize
from torchrope_lab.data.volumes import _numbers_first, apply_windows, find_volumes, percentile_window, read_volume
from torchrope_lab.settings.run_config import ModelConfig, OptimConfig, RunConfig
from torchrope_lab.studies import attention
from torchrope_lab.training.evaluate import evaluate, predict
from torchrope_lab.training.models import build_for_costs, build_model
from torchrope_lab.training.run import load as load_run
from torchrope_lab.training.run import train

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
]

MODEL = ModelConfig(dim=48, depth=1, num_heads=2, mlp_dim=32, patch_size=[2, 4, 4], pool="mean")


load = partial(load_data, frames=4, size=8, batch_size=4)


def unlabelled(root: Path) -> dict:
    return find_volumes(root)[0]


# Space


@pytest.mark.parametrize("direction", [AXIAL, (0.0, 1.0, 0.0, 0.0, 0.0, -1.0), (0.8, 0.6, 0.0, 0.0, 0.0, -1.0)])
def test_slices_lie_in_the_order_of_space_whatever_their_names(tmp_path, direction):
    normal = np.cross(direction[:3], direction[3:])
    order = [3, 0, 4, 1, 2]
    for name, number in enumerate(order):
        plane = np.full((ROWS, COLUMNS), number)
        write_slice(
            tmp_path / f"{name}.dcm", plane, np.array([5.0, -7.0, 2.0]) + 2.5 * number * normal, study="1.2",
            orientation=direction,
        )  # fmt: skip
    volume = unlabelled(tmp_path)["1.2"]
    values = read_volume(tmp_path, volume.paths)
    assert values[:, 0, 0].tolist() == [-1024 + number for number in range(5)]
    assert volume.spacing == pytest.approx((2.5, 0.5, 0.75))
    assert volume.shape == (5, ROWS, COLUMNS)


def test_gap_between_slices_leaves_the_spacing_and_a_repeated_slice_is_read_once(tmp_path):
    for name, place in (("a", 0.0), ("b", 3.0), ("c", 6.0), ("again", 6.0), ("d", 20.0)):
        write_slice(tmp_path / f"{name}.dcm", np.zeros((ROWS, COLUMNS)), (0, 0, place), study="1.2")
    headers = {path.name: read_header(path) for path in tmp_path.glob("*.dcm")}
    paths, spacing, largest_step = sort_slices(list(headers), headers)
    assert paths == ["a.dcm", "b.dcm", "again.dcm", "d.dcm"]
    assert spacing == (3.0, 0.5, 0.75)
    assert largest_step == 14.0


def test_missing_slices_of_a_series_are_reported(tmp_path, caplog):
    write_series(classes_of_volumes(tmp_path) / "ill" / "cut", head(6, True, 9), "1.9")
    sorted((tmp_path / "ill" / "cut").iterdir(), key=lambda path: read_header(path).position[2])[2].unlink()
    load("volumes", tmp_path)
    assert caplog.messages == [
        "slices of 1 of 11 volumes are unevenly spaced, so some may be missing: "
        "ill/cut (10 mm between two slices, otherwise 5)"
    ]


def test_single_slice_is_as_thick_as_it_says(tmp_path):
    write_slice(tmp_path / "a.dcm", np.zeros((ROWS, COLUMNS)), (0, 0, 0), study="1.2")
    assert unlabelled(tmp_path)["1.2"].spacing == (9.0, 0.5, 0.75)


def test_nifti_and_dicom_of_one_head_are_one_volume(tmp_path):
    values = head(5, True, 1)
    write_series(tmp_path / "series", values, "1.2")
    write_nifti(tmp_path / "scan.nii.gz", values)
    flipped = nibabel.Nifti1Image(values.transpose(2, 1, 0)[::-1].copy(), affine_of((5, 0.5, 0.75)))
    flipped.affine[:3, 0] *= -1  # columns counted from the other side
    flipped.affine[0, 3] -= (COLUMNS - 1) * 0.75
    nibabel.save(nibabel.Nifti1Image(flipped.get_fdata(), flipped.affine), tmp_path / "flipped.nii")
    found = unlabelled(tmp_path)
    for name in ("series", "1.2", "scan", "flipped"):
        volume = found[name]
        assert volume.spacing == pytest.approx((5.0, 0.5, 0.75)), name
        torch.testing.assert_close(read_volume(tmp_path, volume.paths), torch.from_numpy(values).float())


SEVERAL = {
    "echoes": ({"EchoNumbers": [1, 2]}, 0.0, "EchoNumbers 1 and 2 in "),
    "echo times": ({"EchoTime": [10.0, 80.0]}, 0.0, " at one position with EchoTime 10.0 and 80.0"),
    "phases": ({"TemporalPositionIdentifier": [1, 2]}, 0.0, "TemporalPositionIdentifier 1 and 2 in "),
    "phases, moved": ({"TemporalPositionIdentifier": [1, 2]}, 0.4, "TemporalPositionIdentifier 1 and 2 in "),
    "cardiac phases": ({"TriggerTime": [0.0, 40.0]}, 0.0, " at one position with TriggerTime 0.0 and 40.0"),
    "diffusion": ({"DiffusionBValue": [0.0, 1000.0]}, 0.0, "DiffusionBValue 0.0 and 1000.0 in "),
    "magnitude": (
        {"ImageType": [["ORIGINAL", "PRIMARY", "M"], ["ORIGINAL", "PRIMARY", "P"]]},
        0.0,
        r"ImageType ORIGINAL\PRIMARY\M and ORIGINAL\PRIMARY\P in ",
    ),
    "acquisitions": ({"AcquisitionNumber": [3, 4]}, 0.0, " at one position with AcquisitionNumber 3 and 4"),
    "unknown": ({}, 0.0, "1.0.dcm at one position"),
    "patients": ({"PatientID": ["A", "B"]}, 0.4, "PatientID A and B in "),
    "sagittal": ({"ImageOrientationPatient": [list(AXIAL), [0, 1, 0, 0, 0, -1]]}, 0.0, "same shape and orientation"),
}


@pytest.mark.parametrize("kind", SEVERAL)
def test_series_of_two_volumes_is_named_and_left_out(tmp_path, kind):
    tags, moved, message = SEVERAL[kind]
    for number in range(8):
        second, place = divmod(number, 4)
        path = tmp_path / "series" / f"{second}.{place}.dcm"
        write_slice(path, head(4, False, 1)[place], (0, 0, 5.0 * place + moved * second), study="1.2")
        dataset = pydicom.dcmread(path)
        for tag, values in tags.items():
            setattr(dataset, tag, values[second])
        dataset.save_as(path)
    write_series(tmp_path / "other", head(3, False, 1), "1.3")
    volumes, faults = find_volumes(tmp_path)
    assert {name for name, _ in faults} == {"1.2"}
    assert message in faults[0][1]
    assert {len(volume.paths) for volume in volumes.values()} == {3}


def test_copies_of_slices_and_numbers_of_acquisitions_along_a_volume_are_one_volume(tmp_path):
    names = write_series(tmp_path / "series", head(4, False, 1), "1.2")
    for number, name in enumerate(names):  # CT: an acquisition at each place of the table
        dataset = pydicom.dcmread(tmp_path / "series" / f"{name}.dcm")
        dataset.AcquisitionNumber = number
        dataset.save_as(tmp_path / "series" / f"{name}.dcm")
        dataset.save_as(tmp_path / "series" / f"copy of {name}.dcm")
    volumes, faults = find_volumes(tmp_path)
    assert faults == []
    assert len(volumes["1.2"].paths) == 4


def test_files_of_one_name_are_named(tmp_path):
    for suffix in (".nii", ".nii.gz"):
        write_nifti(tmp_path / f"scan{suffix}", head(3, False, 1))
    volumes, faults = find_volumes(tmp_path)
    assert len(volumes) == 1
    assert "files of one folder must have different names, got another scan.nii" in faults[0][1]


def test_longest_series_has_the_name_of_its_study(tmp_path):
    write_series(tmp_path / "scout", head(2, False, 1), "1.2", series="1.2.1")
    write_series(tmp_path / "scan", head(5, False, 1), "1.2", series="1.2.2", prefix="x")
    found = unlabelled(tmp_path)
    assert len(found["1.2"].paths) == len(found["scan"].paths) == len(found["1.2.2"].paths) == 5
    assert len(found["scout"].paths) == 2


# Units


def test_values_are_hounsfield_units(tmp_path):
    stored = np.arange(ROWS * COLUMNS).reshape(ROWS, COLUMNS)
    path = write_slice(tmp_path / "a.dcm", stored, (0, 0, 0), study="1.2", slope=2.0, intercept=-1000.0)
    assert torch.equal(read_slice(path), torch.from_numpy(2.0 * stored - 1000).float())
    assert torch.equal(read_head_ct(path), read_slice(path))


def test_wrong_headers_of_unsigned_12_bit_slices_are_put_right(tmp_path):
    true = np.array([[-1000, 0, 40, 3000, -1]])
    stored = true % 4096  # negative values wrapped around, and an intercept that says nothing
    path = write_slice(tmp_path / "a.dcm", stored, (0, 0, 0), study="1.2", intercept=1.0, bits=12, signed=0)
    assert read_head_ct(path).tolist() == true.tolist()


def test_windows_are_what_one_computes_by_hand():
    values = torch.tensor([-1000.0, -20.0, 0.0, 40.0, 80.0, 180.0, 230.0, 3000.0])
    brain, subdural, tissue = apply_windows(values, [(40, 80), (80, 200), (40, 380)])
    torch.testing.assert_close(brain, torch.tensor([0, 0, 0, 0.5, 1, 1, 1, 1]))
    torch.testing.assert_close(subdural, torch.tensor([0, 0, 0.1, 0.3, 0.5, 1, 1, 1]))
    torch.testing.assert_close(tissue, torch.tensor([0, 130, 150, 190, 230, 330, 380, 380]) / 380)


def test_volumes_without_windows_are_scaled_by_their_percentiles():
    values = torch.linspace(-3, 997, 1001).reshape(7, 11, 13)
    centre, width = percentile_window(values)
    assert (centre - width / 2, centre + width / 2) == pytest.approx((2, 992))


# RSNA


def test_slices_are_grouped_into_studies_with_windows_as_channels(tmp_path):
    data = load("rsna", rsna_folder(tmp_path))
    train, val = data.datasets()
    assert data.axes == ("depth", "height", "width")
    assert data.counts == (8, 2)
    assert {name for name, _ in train.samples + val.samples} == {f"{number:04}" for number in range(10)}
    assert all(label == int(name) % 2 for name, label in train.samples + val.samples)
    inputs, label = train[0]
    assert inputs.shape == (data.in_channels, *data.input_size) == (3, 4, 8, 8)
    assert inputs.dtype == torch.float32
    assert type(label) is int
    assert data.description.startswith("10 CT studies")


def test_input_of_the_size_of_the_file_is_the_windowed_file(tmp_path):
    rsna_folder(tmp_path, 10)
    data = load("rsna", tmp_path)
    train, _ = data.datasets()
    index = [name for name, _ in train.samples].index("0003")
    train.size = (3, ROWS, COLUMNS)
    expected = apply_windows(torch.from_numpy(head(3, True, 3)).float(), [(40, 80), (80, 200), (40, 380)])
    torch.testing.assert_close(train[index][0], train.normalise(expected))


def test_inputs_are_normalised_with_what_training_volumes_measure(tmp_path):
    train, _ = load("rsna", rsna_folder(tmp_path)).datasets()
    inputs = torch.stack([train[index][0] for index in range(len(train))])
    torch.testing.assert_close(inputs.mean((0, 2, 3, 4)), torch.zeros(3), atol=1e-5, rtol=0)
    torch.testing.assert_close(inputs.std((0, 2, 3, 4), correction=0), torch.ones(3), atol=1e-4, rtol=0)


def test_patients_of_both_parts_are_disjoint(tmp_path):
    train, val = load("rsna", rsna_folder(tmp_path, 24, patients=8)).datasets()
    parts = [{volume.patient for volume in part.volumes} for part in (train, val)]
    assert parts[0].isdisjoint(parts[1])
    assert len(parts[0] | parts[1]) == 8
    assert len(train) + len(val) == 24
    other = load("rsna", tmp_path, split_seed=1).datasets()[1]
    assert other.samples != val.samples


def test_any_kind_of_haemorrhage_in_any_slice_counts(tmp_path):
    table = tmp_path / "stage_2_train.csv"
    table.write_text("ID,Label\nID_a_epidural,0\nID_a_any,1\nID_b_any,0\nID_b_epidural,0\nID_a_any,0\n")
    assert read_haemorrhages(table) == {"ID_a": True, "ID_b": False}


def test_slices_without_a_label_are_no_part_of_it(tmp_path):
    rsna_folder(tmp_path)
    write_series(tmp_path / "stage_2_train", head(3, False, 0), "test")
    data = load("rsna", tmp_path)
    assert sum(data.counts) == 10
    assert data.skipped == []


# The index of headers


@pytest.mark.parametrize("content", [b"", b"{", b'{"version": 0, "files": {"a.dcm": 3}}', b'{"version": 1}'])
def test_damaged_index_is_made_anew(tmp_path, content):
    path = write_slice(tmp_path / "a.dcm", np.zeros((ROWS, COLUMNS)), (1, 2, 3), study="1.2")
    index_of(tmp_path, "headers").parent.mkdir(exist_ok=True)
    index_of(tmp_path, "headers").write_bytes(content)
    headers, faults = index_headers(tmp_path, ["a.dcm"])
    assert headers == {"a.dcm": read_header(path)}
    assert faults == []
    again, _ = index_headers(tmp_path, ["a.dcm"])
    assert again["a.dcm"].position == [1.0, 2.0, 3.0], "not from the index"


# Volumes with a table


def test_table_of_nifti_files(tmp_path):
    data = load("volumes", nifti_folder(tmp_path))
    train, val = data.datasets()
    assert data.classes == ("ill", "well")
    assert data.counts == (8, 2)
    assert data.in_channels == 1
    assert train[0][0].shape == (1, *data.input_size)
    assert {label for _, label in val.samples} == {0, 1}
    assert all(label == (int(name.partition("/")[2]) % 2 == 0) for name, label in train.samples)


def test_table_of_dicom_series_and_nifti_files_with_windows(tmp_path):
    root = nifti_folder(tmp_path, 4)
    for number in range(6):
        write_series(root / "series" / str(number), head(4, number % 2 == 1, number), f"1.{number}")
    rows = [
        f"{f'1.{number}' if number < 3 else f'series/{number}'},{'ill' if number % 2 else 'well'}"
        for number in range(6)
    ]
    with (root / "labels.csv").open("a") as table:
        table.write("\n".join(rows) + "\n")
    data = load("volumes", root, windows=[[40, 80], [600, 2800]])
    assert sum(data.counts) == 10
    assert data.in_channels == 2
    assert data.datasets()[0][0][0].shape == (2, 4, 8, 8)


@pytest.mark.parametrize(
    "names", ["file,label", "File,Class", "path,target", " ID ,LABEL", "name,class", "study,label,id", "label,name"]
)
def test_columns_have_their_usual_names(tmp_path, names):
    expected = load("volumes", nifti_folder(tmp_path)).fingerprint
    table = tmp_path / "labels.csv"
    rows = [line.split(",") for line in table.read_text().splitlines()[1:]]
    order = [1, 0] if names.startswith("label") else [0, 1]
    lines = [names, *(",".join([row[order[0]], row[order[1]], "x"][: names.count(",") + 1]) for row in rows)]
    table.write_text("\n".join(lines) + "\n")
    assert load("volumes", tmp_path).fingerprint == expected


def classes_of_volumes(root: Path, count: int = 5, study: str = "1") -> Path:
    """Folders of classes with a NIfTI file, a series in a folder, and one deeper, in turn."""
    for number in range(2 * count):
        folder = root / ("ill" if number % 2 else "well")
        values = head(4, number % 2 == 1, number)
        if number // 2 % 3 == 0:
            write_nifti(folder / f"{number}.nii.gz", values)
        else:
            write_series(
                folder / ("deeper" if number // 2 % 3 == 2 else "") / f"scan{number}", values, f"{study}.{number}"
            )
    return root


def test_class_without_a_table_is_the_folder(tmp_path, caplog):
    data = load("volumes", classes_of_volumes(tmp_path))
    train, val = data.datasets()
    assert data.classes == ("ill", "well")
    assert data.counts == (8, 2)
    assert data.skipped == []
    assert caplog.messages == []
    names = {name for name, _ in train.samples + val.samples}
    assert {"well/0", "ill/scan3", "ill/deeper/scan5", "ill/7"} < names
    assert all(data.classes[label] == name.partition("/")[0] for name, label in train.samples + val.samples)
    assert train[0][0].shape == (1, 4, 8, 8)
    assert data.description.endswith("the class is the sub-folder.")


def test_class_folders_use_the_longest_series_of_each_study(tmp_path):
    classes_of_volumes(tmp_path)
    write_series(tmp_path / "ill" / "loose", head(2, True, 1), "2.1", series="2.1.1", prefix="scout")
    write_series(tmp_path / "ill" / "loose", head(5, True, 1), "2.1", series="2.1.2")
    write_series(tmp_path / "ill" / "loose", head(3, True, 1), "2.2")
    data = load("volumes", tmp_path)
    volumes = {volume.name: volume for part in data.datasets() for volume in part.volumes}
    assert len(volumes) == 12
    assert len(volumes["ill/loose/2.1"].paths) == 5
    assert len(volumes["ill/loose/2.2"].paths) == 3


def test_series_in_folders_of_two_classes_is_two_volumes_of_one_patient(tmp_path):
    classes_of_volumes(tmp_path)
    for name in ("ill", "well"):
        write_series(tmp_path / name / "same", head(3, True, 1), "2.1")
    train, val = load("volumes", tmp_path).datasets()
    parts = [{name for name, _ in part.samples if name.endswith("same")} for part in (train, val)]
    assert sorted(parts, key=len) == [set(), {"ill/same", "well/same"}]


def test_files_without_a_class_are_named(tmp_path, caplog):
    classes_of_volumes(tmp_path)
    (tmp_path / "ill" / "notes.txt").write_text("not looked at")
    (tmp_path / "ill" / "broken.nii").write_bytes(b"broken")
    (tmp_path / "loose.nii").write_bytes(b"not looked at")
    data = load("volumes", tmp_path)
    others, skipped = caplog.messages
    assert others == (
        "1 .txt, 1 .nii not read because they are not volumes of a class (.nii .nii.gz .dcm .dicom .ima or none): "
        "ill/notes.txt, loose.nii"
    )
    assert skipped.startswith("skipped 1 of 11 volumes and slices: ill/broken.nii (")
    assert [path for path, _ in data.skipped] == ["ill/broken.nii"]


def test_parts_of_a_table_are_kept(tmp_path):
    train, val = load("volumes", nifti_folder(tmp_path, part=True)).datasets()
    assert [name for name, _ in val.samples] == [f"scans/{number}" for number in range(4)]
    assert len(train) == 6


def series_of(root: Path, rows: str, patients: str) -> Path:
    """A series of two slices for each letter of patients, in folders 0, 1, ..., with a table."""
    for number, patient in enumerate(patients):
        write_series(root / str(number), head(2, number % 2 == 1, number), f"1.{number}", patient=patient)
    (root / "labels.csv").write_text(f"study,label,part\n{rows}\n")
    return root


def test_study_without_a_part_is_in_that_of_its_patient(tmp_path):
    rows = "0,a,train\n1,b,train\n2,a,val\n3,b,val\n" + "\n".join(f"{row},{'ab'[row % 2]}," for row in range(4, 24))
    root = series_of(tmp_path, rows, "ABCD" * 2 + "EFGHIJKLABCDABCD")
    for seed in range(3):
        train, val = load("volumes", root, split_seed=seed).datasets()
        parts = [{volume.patient for volume in part.volumes} for part in (train, val)]
        assert parts[0].isdisjoint(parts[1])
        assert (len(train) + len(val), {"A", "B"} <= parts[0], {"C", "D"} <= parts[1]) == (24, True, True)


def test_patient_of_both_parts_is_refused(tmp_path):
    rows = "0,a,train\n1,b,train\n2,a,val\n3,b,val"
    message = r"^a patient must be in one part, got train and val for patient 'B' \(1\.1_series and 1\.3_series\)$"
    with refused(message):
        load("volumes", series_of(tmp_path, rows, "ABCB"))


def test_patient_of_both_folders_is_refused(tmp_path):
    classes_of_volumes(tmp_path / "train", 3)
    classes_of_volumes(tmp_path / "val", 2)
    message = r"^a patient must be in one part, got train and val for patient 'patient of 1\.3' \(train/ill/.*\)$"
    with refused(message):
        load("volumes", tmp_path)


@pytest.mark.parametrize("part", ["", "train"])
def test_one_patient_for_all_volumes_is_named_as_the_cause(tmp_path, part):
    rows = "\n".join(f"{row},{'ab'[row % 2]},{part}" for row in range(4))
    rule = "volumes must be of two patients or more, as no patient is in both parts"
    message = f"^{rule}, got patient 'X' for all 4: a column patient of labels.csv names others$"
    with refused(message):
        load("volumes", series_of(tmp_path, rows, "XXXX"))


def test_columns_that_are_not_read_are_named(tmp_path, caplog):
    nifti_folder(tmp_path)
    table = tmp_path / "labels.csv"
    header, *rows = table.read_text().splitlines()
    table.write_text("\n".join([f"{header},age", *(f"{row},40" for row in rows)]) + "\n")
    load("volumes", tmp_path)
    assert caplog.messages == ["columns of labels.csv that are not read: 'age'"]


def test_classes_of_equal_number_have_one_order():
    for names in (["01", "1", "001", "2", "x"], ["x", "2", "001", "1", "01"]):
        assert sorted(names, key=_numbers_first) == ["001", "01", "1", "2", "x"]


@pytest.mark.parametrize("column", ["patient", "PatientID", "subject", "Patient ID", "subject_id"])
@pytest.mark.parametrize("kind", ["DICOM", "NIfTI"])
def test_volumes_of_a_patient_of_the_table_are_in_one_part(tmp_path, kind, column):
    rows = "\n".join(f"{row},{'ab'[row % 2]}," for row in range(20))
    root = series_of(tmp_path, rows, "X" * 20) if kind == "DICOM" else nifti_folder(tmp_path, 20, part=True)
    header, *rows = (root / "labels.csv").read_text().replace("train", "").replace("val", "").splitlines()
    with_patients = [f"{row},p{number // 4}" for number, row in enumerate(rows)]
    (root / "labels.csv").write_text("\n".join([f"{header},{column}", *with_patients]) + "\n")
    data = load("volumes", root)
    train, val = data.datasets()
    of_train, of_val = ({volume.patient for volume in part.volumes} for part in (train, val))
    assert (len(train) + len(val), of_train | of_val) == (20, {f"p{number}" for number in range(5)})
    assert of_train.isdisjoint(of_val)
    assert {*data.groups(train, val)} == of_train | of_val


@pytest.mark.parametrize("other", ["0", "1.0", "1.0_series"])
def test_volume_of_two_rows_is_refused(tmp_path, other):
    rows = f"0,a,\n1,b,\n2,a,\n3,b,\n{other},b,"
    message = rf"^each volume must have one label, got rows 0 and {other} in .*labels\.csv for one volume$"
    with refused(message):
        load("volumes", series_of(tmp_path, rows, "ABCD"))


def test_spacing_of_an_input_is_that_of_its_file_by_the_change_of_size(tmp_path):
    train, _ = load("rsna", rsna_folder(tmp_path)).datasets()
    for volume, spacing in zip(train.volumes, train.spacings.tolist(), strict=True):
        assert volume.spacing == (5.0, 0.5, 0.75), "not what was written"
        slices = len(volume.paths)
        assert spacing == pytest.approx([5.0 * slices / 4, 0.5 * ROWS / 8, 0.75 * COLUMNS / 8])


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_carry_spacings_for_positions_of_each_sample(tmp_path, workers):
    root = nifti_folder(tmp_path)
    other = load("volumes", root).datasets()[0].samples[3][0]
    write_nifti(root / f"{other}.nii.gz", head(5, True, 3), spacing=(2.0, 1.0, 1.5))
    train, _ = load("volumes", root).datasets()
    loader = DataLoader(
        train.changed(returns_spacing=True), batch_size=len(train), num_workers=workers, collate_fn=default_collate
    )
    inputs, labels, spacings = next(iter(loader))
    assert torch.equal(spacings, train.spacings)
    assert spacings.shape == (len(labels), 3)
    assert len(spacings.unique(dim=0)) == 2
    assert torch.equal(inputs[0], train[0][0])


def spaced_nifti_folder(root: Path, count: int = 10) -> Path:
    """Volumes of which every other one has larger voxels."""
    nifti_folder(root, count)
    for number in range(0, count, 2):
        write_nifti(root / "scans" / f"{number}.nii.gz", head(5, True, number), spacing=(8.0, 2.0, 1.5))
    return root


def spaced_model(encoding: str, data, unit: float = 10.0):
    torch.manual_seed(0)
    return build_model(encoding, replace(MODEL, unit_mm=unit), data).eval()


OF_OTHER_SIZES = ("spiral", "mhrope", "nd")  # two axes, as many heads as axes, channels in eights


@pytest.mark.parametrize("encoding", [*(name for name in ROTARY if name not in OF_OTHER_SIZES), "learned+golden"])
def test_positions_at_the_reference_spacing_equal_those_without_millimetres(tmp_path, encoding):
    data = load("volumes", nifti_folder(tmp_path))
    encoding += ":4" if encoding in ROTARY and takes(ROTARY[encoding], "block_size") else ""
    model = spaced_model(encoding, data, unit=12.0)
    without = build_model(encoding, MODEL, data).eval()
    without.load_state_dict(model.state_dict())
    reference = torch.tensor([[12 / 2, 12 / 4, 12 / 4]])
    for sizes in ((2, 2, 2), (2, 4, 3)):
        assert torch.equal(model.positions(sizes, spacing=reference)[0], without.positions(sizes))
    inputs = torch.randn(1, 1, 4, 8, 8)
    torch.testing.assert_close(model(inputs, reference), without(inputs))
    assert build_for_costs(encoding, replace(MODEL, unit_mm=12.0), data).spacing == [6.0, 3.0, 3.0]


@pytest.mark.parametrize("encoding", ["axial", "mixed", "liere:8", "comrope-ld", "learned+golden"])
def test_distances_are_in_proportion_to_millimetres(tmp_path, encoding):
    data = load("volumes", nifti_folder(tmp_path))
    model = spaced_model(encoding, data, unit=10.0)
    without = build_model(encoding, MODEL, data).positions((2, 2, 2))
    voxels = torch.tensor([[5.0, 1.0, 1.5], [5.0, 2.0, 1.5]])
    positions = model.positions((2, 2, 2), spacing=voxels)
    apart = voxels * torch.tensor([2, 4, 4]) / 10  # steps between patches
    torch.testing.assert_close(positions[:, 0], without[:1].expand(2, -1))
    expected = (without - without[0]) * apart[:, None]
    torch.testing.assert_close(positions - positions[:, :1], expected)

    inputs = torch.randn(1, 1, 4, 8, 8).expand(2, -1, -1, -1, -1)
    logits = model(inputs, voxels)
    assert (logits[0] - logits[1]).abs().max() > 1e-6, "voxels of another size change nothing"
    torch.testing.assert_close(spaced_model(encoding, data, unit=30.0)(inputs, 3 * voxels), logits)
    torch.testing.assert_close(model(list(inputs), voxels), logits)


@pytest.mark.parametrize("setting", [{"spacing": [0.5]}, {"input_size": [8, 16, 16]}])
def test_lattice_of_the_configuration_is_that_of_one_step(tmp_path, setting):
    data = load("volumes", nifti_folder(tmp_path))
    model = build_model("comrope-ld:4", replace(MODEL, unit_mm=12.0, **setting), data)
    without = build_model("comrope-ld:4", replace(MODEL, **setting), data)
    reference = torch.tensor([[12 / 2, 12 / 4, 12 / 4]])
    assert torch.equal(model.positions((2, 2, 2), spacing=reference)[0], without.positions((2, 2, 2)))


def test_model_by_voxels_needs_a_voxel_per_axis(tmp_path):
    model = spaced_model("mixed", load("volumes", nifti_folder(tmp_path)))
    with refused(r"^spacing must be voxel spacings \(batch, 3\), a tensor, got \(2, 2\)$"):
        model(torch.randn(2, 1, 4, 8, 8), torch.ones(2, 2))


def test_validation_and_evaluation_know_the_voxels_at_every_size(tmp_path):
    root = spaced_nifti_folder(tmp_path / "data")
    data = load("volumes", root, augment=AugmentConfig(flip=True, randaugment=(2, 14), erasing=0.5))
    config = RunConfig("mixed", data=data.config, model=replace(MODEL, unit_mm=10.0), optim=OptimConfig(epochs=1))
    classifier, history = train(config, data, tmp_path / "run")
    evaluation = evaluate(classifier.model, data, [(4, 8, 8), (8, 16, 16)])
    assert evaluation.val_loss == pytest.approx(history.rows[-1]["val_loss"], rel=1e-5)
    assert [(at.size, at.inputs) for at in evaluation.resolutions] == [
        ((4, 8, 8), "trained"),
        ((8, 16, 16), "resampled"),
    ]

    _, val = data.datasets()
    inputs = torch.stack([val[index][0] for index in range(len(val))])
    asked = []
    classifier.model.register_forward_pre_hook(lambda _, given: asked.append(given[1]))
    _, logits = predict(classifier.model, data)
    torch.testing.assert_close(logits, classifier.model(inputs, val.spacings))
    predict(classifier.model, data, lambda pixels: resize(pixels, (8, 16, 16)))
    torch.testing.assert_close(asked[0], val.spacings)
    torch.testing.assert_close(asked[2], val.spacings / 2)

    settings, again, loaded = load_run(tmp_path / "run")
    assert settings.model.unit_mm == 10.0
    torch.testing.assert_close(predict(loaded.model, again)[1], logits)


@pytest.mark.parametrize(
    ("data", "model", "message"),
    [
        ({"name": "digits"}, {}, r"--model\.unit_mm is for --data volumes and rsna only, got --data digits"),
        (
            {"augment": {"mixup": 0.8}},
            {},
            r"--model\.unit_mm needs one voxel spacing .*, got --data\.augment\.mixup 0\.8",
        ),
        ({}, {"unit_mm": 0.0}, r"unit_mm must be above 0, got 0\.0"),
        ({}, {"jitter": 1.0}, r"jitter must be 0 with unit_mm, got 1\.0"),
        ({}, {"backbone": "swin", "depth": None}, r"unit_mm is a setting of backbone vit only, got 10\.0"),
    ],
)
def test_positions_in_mm_are_refused_where_they_mean_nothing(tmp_path, data, model, message):
    with refused(f"^{message}$"):
        RunConfig(
            data=data_config(**{"name": "volumes", **data}),
            model=ModelConfig(**{"dim": 48, "num_heads": None, "unit_mm": 10.0, **model}),
        )


@pytest.mark.slow
def test_volumes_are_trained_and_compared_in_mm_from_the_command_line(tmp_path, capsys):
    root = spaced_nifti_folder(tmp_path / "data")
    asked = f"--data volumes --data.root {root} --data.size 8 --data.frames 4 --epochs 1 --model.unit_mm 20"
    shape = "--model.patch_size [2,4,4] --model.dim 48 --model.depth 1 --model.num_heads 2 --model.mlp_dim 32"
    out = f"{asked} {shape} --out {tmp_path}"
    assert main(f"train {out}/train --encoding mixed".split()) == 0, capsys.readouterr().err
    assert main(f"evaluate {tmp_path}/train".split()) == 0, capsys.readouterr().err
    compared = f"compare {out}/compare --encodings mixed --seeds 1 --scales [1.0]"
    assert main(compared.split()) == 0, capsys.readouterr().err


def test_attention_is_measured_with_positions_in_mm(tmp_path):
    data = load("volumes", spaced_nifti_folder(tmp_path))
    data.returns_spacing = True
    model = spaced_model("axial", data)
    size = tuple(data.input_size)
    found = attention.measure(model, data, sizes=[size, (4, 16, 16)])
    alone = [attention.attention_statistics(model, x, spacing) for x, _, spacing in data.val_dataloader()]
    assert found["x".join(map(str, size))]["entropy"] == torch.cat([x["entropy"] for x in alone], dim=1).tolist()
    # A volume of twice the size in the same extent has voxels of half the size.
    inputs, _, spacing = next(iter(data.val_dataloader()))
    larger = attention.attention_statistics(model, resize(inputs, (4, 16, 16)), spacing / torch.tensor([1, 2, 2]))
    assert found["4x16x16"]["entropy"][0][: len(inputs)] == larger["entropy"][0].tolist()


def test_substitute_brings_its_own_spacing(tmp_path):
    root = nifti_folder(tmp_path)
    train, _ = load("volumes", root).datasets()
    train.volumes[1] = replace(train.volumes[1], paths=("scans/absent.nii",))
    train.spacings[2] = torch.tensor([7.0, 8.0, 9.0])
    inputs, label, spacing = train.changed(returns_spacing=True)[1]
    assert torch.equal(inputs, train[2][0])
    assert label == train.samples[2][1]
    assert spacing.tolist() == [7.0, 8.0, 9.0]


# Damage


def test_damaged_headers_are_named_and_left_out(tmp_path, caplog):
    root = rsna_folder(tmp_path)
    slices = sorted((root / "stage_2_train").glob("*.dcm"))
    slices[0].write_bytes(b"no DICOM")
    slices[7].write_bytes(slices[7].read_bytes()[:200])
    with disable_value_validation():
        dataset = pydicom.dcmread(slices[14])
        del dataset.ImagePositionPatient
        dataset.save_as(slices[14])
    with caplog.at_level(logging.WARNING):
        data = load("rsna", root)
    faults = dict(data.skipped)
    assert set(faults) == {path.name for path in (slices[0], slices[7], slices[14])}
    assert faults[slices[0].name] == "a slice must be a complete DICOM file, got a damaged file or another format"
    assert faults[slices[14].name] == "no ImagePositionPatient in the header"
    assert caplog.messages[0].startswith(f"skipped 3 of {len(slices)} slices and studies: ")
    assert sum(data.counts) == 10
    with refused(r"--data\.max_skipped = 2 slices and studies may be unreadable, got 3: ", TooManyFaults):
        load("rsna", root, max_skipped=2)


def test_pixels_found_damaged_while_training_are_named_with_their_file(tmp_path):
    root = rsna_folder(tmp_path)
    train, _ = load("rsna", root).datasets()
    path = train.volumes[2].paths[1]
    file = root / "stage_2_train" / path
    file.write_bytes(file.read_bytes()[:-60])
    assert torch.equal(train[2][0], train[3][0])
    assert train.reading.found()[0][0] == train.samples[2][0]
    assert train.reading.found()[0][1].startswith(f"{path}: ")
    with refused(f"at most --data.max_skipped = 0 volumes may be unreadable, got 1: .*{path}: ", TooManyFaults):
        load("rsna", root, max_skipped=0)


def test_slices_of_two_sizes_are_no_volume(tmp_path):
    root = rsna_folder(tmp_path)
    wide = np.zeros((ROWS, 2 * COLUMNS))
    name = load("rsna", root).datasets()[0].volumes[0].paths[0]
    study = read_header(root / "stage_2_train" / name).study
    write_slice(root / "stage_2_train" / name, wide, (0, 0, 0), study=study)
    data = load("rsna", root)
    assert [fault[0] for fault in data.skipped] == [study]
    assert "slices of a series must have the same shape and orientation" in data.skipped[0][1]


AXES = r"a volume must have voxels along three axes, got .*"
NIFTI = {
    "NaN": (np.full((4, 4, 4), np.nan, np.float32), "voxels must be finite, got 64 that are not"),
    "complex": (np.zeros((4, 4, 4), np.complex64), "voxels must be real numbers, got complex64"),
    "two axes": (np.zeros((4, 4), np.float32), rf"{AXES}\(4, 4\)"),
    "four axes": (np.zeros((4, 4, 4, 3), np.float32), rf"{AXES}\(4, 4, 4, 3\)"),
    "empty": (np.zeros((4, 4, 0), np.float32), rf"{AXES}\(4, 4, 0\)"),
    "no size": ({"sform_code": 1, "srow_y": [0, 0, 0, 0]}, "voxels must have a size in mm, got 1, 0, 1"),
    "infinite slope": ({"scl_slope": math.inf, "scl_inter": 0}, "scl_slope must be finite, got inf"),
    "no intercept": ({"scl_slope": 1, "scl_inter": math.nan}, "Valid slope but invalid intercept nan"),
    "large slope": ({"scl_slope": 1e38, "scl_inter": 0}, "voxels must be finite, got 60 that are not"),
    "no bytes": (b"", ".*"),
    "another file": (b"no NIfTI", ".*"),
    "no file": (None, "not there"),
}


@pytest.mark.parametrize("extension", [".nii", ".nii.gz"])
@pytest.mark.parametrize("fault", NIFTI)
def test_nifti_file_that_cannot_be_is_named_and_left_out(tmp_path, fault, extension):
    content, why = NIFTI[fault]
    root = nifti_folder(tmp_path)
    (root / "scans" / "3.nii.gz").unlink()
    path = root / "scans" / f"3{extension}"
    if isinstance(content, np.ndarray):
        nibabel.save(nibabel.Nifti1Image(content, np.eye(4)), path)
    elif isinstance(content, dict):
        stored = nifti_content(**content)
        path.write_bytes(gzip.compress(stored) if extension == ".nii.gz" else stored)
    elif content is not None:
        path.write_bytes(content)
    data = load("volumes", root)
    assert sum(data.counts) == 10 - len(data.skipped)
    train, val = data.datasets()
    assert all(inputs.isfinite().all() for part in (train, val) for inputs, _ in (part[i] for i in range(len(part))))
    (named,) = {*data.skipped, *train.reading.found(), *val.reading.found()}
    assert named[0].startswith("scans/3")
    assert re.fullmatch(why, named[1])


def test_volumes_take_torchvisions_operations_only(tmp_path):
    with refused(r"^--data\.augment\.randaugment of volumes must be .*, got liere$"):
        load("volumes", tmp_path, augment={"randaugment": "liere"})


def test_slices_without_a_size_are_no_volume():
    header = Header("1", "2", "3", "", (0.0, 0.0, 0.0), AXIAL, (0.0, 0.5), 1.0, (4, 4), ())
    with refused(r"^voxels must have a size in mm, got 1, 0 and 0\.5$"):
        sort_slices(["a"], {"a": header})


def test_slices_that_a_table_forgets_are_counted(tmp_path, caplog):
    root = rsna_folder(tmp_path)
    table = root / "stage_2_train.csv"
    lines = table.read_text().splitlines()
    table.write_text("\n".join(lines[: 1 + 3 * (len(lines) // 4)]))
    load("rsna", root)
    assert any(re.search(r"\d+ of \d+ slices have no label in stage_2_train.csv: left out", m) for m in caplog.messages)


def rewritten(path: Path, tag: bytes, value: bytes) -> Path:
    """A slice with other bytes under a tag of kind DS."""
    content = path.read_bytes()
    at = content.index(tag + b"DS")
    end = at + 8 + int.from_bytes(content[at + 6 : at + 8], "little")
    value += b" " * (len(value) % 2)
    path.write_bytes(content[: at + 6] + len(value).to_bytes(2, "little") + value + content[end:])
    return path


SLOPE, INTERCEPT, POSITION = b"\x28\x00\x53\x10", b"\x28\x00\x52\x10", b"\x20\x00\x32\x00"


@pytest.mark.parametrize("read", [read_slice, read_head_ct])
@pytest.mark.parametrize(
    ("tag", "value", "why"),
    [
        (SLOPE, b"nan", "RescaleSlope must be a finite number, got 'nan'"),
        (SLOPE, b"", "RescaleSlope must be a finite number, got ''"),
        (SLOPE, b"1\\2", r"RescaleSlope must be a finite number, got '1\\\\2'"),
        (SLOPE, b"0", "RescaleSlope must not be 0, got 0"),
        (SLOPE, b"1e300", "values must be finite, got 119 that are not"),
        (INTERCEPT, b"nan", "RescaleIntercept must be a finite number, got 'nan'"),
        (INTERCEPT, b"1,5", "RescaleIntercept must be a finite number, got '1,5'"),
    ],
)
def test_read_slice_refuses_a_scale_that_gives_no_values(tmp_path, read, tag, value, why):
    stored = np.arange(ROWS * COLUMNS).reshape(ROWS, COLUMNS)
    path = write_slice(tmp_path / "a.dcm", stored, (0, 0, 0), study="1.2", intercept=-1000.0, bits=12, signed=0)
    rewritten(path, tag, value)
    with refused(f"^{why}$"):
        read(path)


@pytest.mark.parametrize("value", [b"a\\b\\c", b"1\\2", b"1\\nan\\3"])
def test_slice_without_a_place_is_named_with_what_came(tmp_path, value):
    path = write_slice(tmp_path / "a.dcm", np.zeros((ROWS, COLUMNS)), (0, 0, 0), study="1.2")
    rewritten(path, POSITION, value)
    _, ((name, why),) = index_headers(tmp_path, ["a.dcm"])
    assert name == "a.dcm"
    assert why == f"ImagePositionPatient must be 3 finite numbers, got {value.decode()!r}"


def test_read_slice_refuses_several_frames(tmp_path):
    path = write_slice(tmp_path / "a.dcm", np.zeros((ROWS, COLUMNS)), (0, 0, 0), study="1.2")
    dataset = pydicom.dcmread(path)
    dataset.NumberOfFrames = 10
    dataset.save_as(path)
    with refused(r"^a slice must have one value per pixel and one frame, got 1 and 10$"):
        read_slice(path)


@pytest.mark.parametrize("slope", [0, math.nan])
def test_nifti_file_without_a_scale_has_its_own_values(tmp_path, slope):
    (tmp_path / "a.nii").write_bytes(nifti_content(scl_slope=slope, scl_inter=0))
    assert sorted(read_volume(tmp_path, ["a.nii"]).flatten().tolist()) == list(range(64))


# Folders and tables that are not as they must be


TABLES = {
    "study,label\nscans/0,a\nscans/1,\n": "each row must have a study and a label, got 'scans/1' and '' in .*csv",
    "study,label\nscans/0,a,train\n": "--data.labels .* rows must have 2 cells like the first line, got 3 in row 2",
    "File,id,label\nscans/0,0,well\nscans/1,1,ill\n": (
        "labels must have one column for the study, named 'study', got 'File' and 'id' in .*labels.csv"
    ),
    "scan,kind\na,b\n": "labels must have a column study, file, path, id or name, got .*labels.csv with scan, kind",
    "study,label\nscans/0,well\nscans/2,well\n": "labels must be of at least two classes, got well",
    "study,label,part\nscans/0,well,test\n": "part must be train or val, got 'test' for 'scans/0' in .*labels.csv",
    "study,label\na,well\nb,ill\n": (
        r"--data.root must hold volumes .*, got none of the labelled ones in '.*': a \(not there\), .*"
    ),
    None: r"--data.root must hold volumes \(DICOM .*\); there is no labels.csv, and: --data.root must hold one .*",
}
RSNA_TABLES = {
    None: r"--data.labels must be a readable table of the RSNA .*kaggle.*, got .*: .*No such file or .*",
    "name,kind\na,b\n": "labels must have the columns ID and Label, got .*stage_2_train.csv without ID",
    "ID,Label\n": "--data.root must hold the RSNA .*, found 0 labelled slices in '.*'",
    "": "--data.labels must be a readable table of .*: the first line must name the columns, each once, got ''",
}
REFUSED = [("volumes", *told) for told in TABLES.items()] + [("rsna", *told) for told in RSNA_TABLES.items()]


@pytest.mark.parametrize(("name", "table", "message"), REFUSED)
def test_table_is_refused_with_what_it_must_hold(tmp_path, name, table, message):
    make, file = {"volumes": (nifti_folder, "labels.csv"), "rsna": (rsna_folder, "stage_2_train.csv")}[name]
    path = make(tmp_path, 4) / file
    path.unlink() if table is None else path.write_text(table)
    with refused(f"^{message}$"):
        load(name, tmp_path)


def test_table_without_its_slices_is_refused(tmp_path):
    (tmp_path / "stage_2_train").mkdir()
    (tmp_path / "stage_2_train.csv").write_text("ID,Label\nID_1_any,1\n")
    with refused(r"^--data.root must hold the RSNA .*stage_2_train/\*.dcm.*, found 0 labelled slices in '.*'$"):
        load("rsna", tmp_path)


def test_class_of_one_volume_is_refused(tmp_path):
    message = "readable volumes of each class must number at least 2 if there is no labels.csv, got 1 for 'ill'"
    with refused(f"^{message}$"):
        load("volumes", classes_of_volumes(tmp_path, 1))
