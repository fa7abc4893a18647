"""Tokens at any positions: files of points, what is missing, and how batches are made."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data_sets import load_data as load
from data_sets import refused
from miniatures import csv_text, npz_content, point_columns, points, write
from torch import Tensor

from torchrope_lab.data.data_config import AugmentConfig
from torchrope_lab.data.draws import Draws
from torchrope_lab.data.faults import find_faults
from torchrope_lab.data.table_files import read_table
from torchrope_lab.data.tokens import Cloud, CloudSet, RotationPlane, augment_points, measure_tokens, normal
from torchrope_lab.data.transforms import shuffle_positions


def cloud(count: int, seed: int = 0, axes: int = 2, features: int = 1) -> Cloud:
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.rand(count, axes + features, generator=generator, dtype=torch.float64)
    return Cloud.of(drawn[:, :axes], drawn[:, axes:])


def cloud_set(clouds: list[Cloud], size: int = 100, coordinates: bool = False, **options: Any) -> CloudSet:
    tokens = measure_tokens(clouds, clouds, coordinates=coordinates, scale=None)
    return CloudSet(clouds, [(str(n), n % 2) for n in range(len(clouds))], tokens, size, seed=0, **options)


# Files of points


@pytest.mark.parametrize("kind", ["csv", "npz"])
def test_formats_give_the_same_columns(tmp_path: Path, kind: str) -> None:
    columns = {name: column.astype(np.float32).astype(float) for name, column in point_columns(3).items()}
    content = csv_text(columns) if kind == "csv" else npz_content(**columns)
    read = read_table(write(tmp_path / f"a.{kind}", content))
    assert list(read) == list(columns)
    for name, column in columns.items():
        np.testing.assert_allclose(read[name], column, rtol=1e-7)


def test_array_of_positions_is_x_y_z(tmp_path: Path) -> None:
    places, normals = np.random.default_rng(0).random((2, 5, 3))
    read = read_table(write(tmp_path / "a.npz", npz_content(positions=places, normals=normals)))
    assert list(read) == ["x", "y", "z", "normals.0", "normals.1", "normals.2"]
    np.testing.assert_array_equal(np.stack([read[name] for name in "xyz"], axis=1), places)


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_csv_has_any_of_three_delimiters_and_empty_cells(tmp_path: Path, delimiter: str) -> None:
    text = "\ufeffx,y,kind\n1,2,a\n\n3,,a\n".replace(",", delimiter)
    read = read_table(write(tmp_path / "a.csv", text), ["kind"])
    np.testing.assert_array_equal(read["x"], [1, 3])
    np.testing.assert_array_equal(read["y"], [2, np.nan])
    assert read["kind"].tolist() == ["a", "a"]


BAD_TABLES = {
    "empty.csv": ("", "first line must name"),
    "numbers.csv": ("1,2\n3,4\n", "first line must name"),
    "twice.csv": ("x,x\n1,2\n", "first line must name"),
    "ragged.csv": ("x,y\n1,2\n3\n", "rows must have 2 cells like the first line, got 1 in row 3"),
    "text.csv": ("x,y\n1,two\n", "column y must hold numbers"),
    "bytes.csv": (b"x,y\n\xff\xfe,1\n", "decode"),
    "empty.npz": (b"", ""),
    "text.npz": (b"no archive", ""),
    "object.npz": (npz_content(x=np.array([{}], dtype=object)), "Object arrays cannot be loaded"),
    "cube.npz": (npz_content(x=np.zeros((2, 2, 2))), "arrays must be numbers"),
    "complex.npz": (npz_content(x=np.zeros(2, complex)), "arrays must be numbers"),
    "lengths.npz": (npz_content(x=np.zeros(2), y=np.zeros(3)), "one row per point, got x 2, y 3"),
}


@pytest.mark.parametrize("name", BAD_TABLES)
def test_damaged_file_of_points_is_named_with_the_reason_and_left_out(tmp_path: Path, name: str) -> None:
    content, why = BAD_TABLES[name]
    write(points(tmp_path) / "tall" / name, content)
    data = load("points", tmp_path)
    (skipped,) = data.skipped
    assert skipped[0] == f"tall/{name}"
    assert "\n" not in skipped[1]
    assert why in skipped[1]
    assert sum(data.counts) == 54
    with refused(f"^at most --data.max_skipped = 0 .* got 1: tall/{name}"):
        load("points", tmp_path, max_skipped=0)


def test_damaged_header_bytes_raise_an_error(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    columns = point_columns(0)
    for suffix, content in (("npz", npz_content(**columns)), ("csv", csv_text(columns))):
        whole = bytearray(content.encode() if isinstance(content, str) else content)
        for _ in range(60):
            damaged = bytearray(whole)
            damaged[int(rng.integers(min(len(whole), 200)))] = int(rng.integers(256))
            path = write(tmp_path / f"a.{suffix}", bytes(damaged[: int(rng.integers(1, len(whole)))]))
            find_faults([str(path)], lambda name: read_table(Path(name)))  # lets a MemoryError through alone


# Sets of points


def test_class_is_the_folder_or_a_column(tmp_path: Path) -> None:
    by_folder = load("points", points(tmp_path / "folders"))
    assert by_folder.classes == ("tall", "wide")
    assert (by_folder.axes, by_folder.features) == (("x", "y", "z"), ("grey",))
    for number in range(12):
        columns = point_columns(number, 5, tall=number % 2 == 1)
        write(tmp_path / "columns" / f"{number}.npz", npz_content(**columns, kind=np.array(10 - number % 2)))
    write(tmp_path / "columns" / "short.npz", npz_content(**point_columns(0, 5), kind=np.array([9, 9])))
    by_column = load("points", tmp_path / "columns", label="kind")
    assert by_column.classes == ("9", "10")
    assert by_column.skipped == [("short.npz", "column kind must have a value for each of 5 points, got 2")]
    assert by_column.features == ("grey",)
    for path, label in by_column.train_dataloader().dataset.samples:
        assert by_column.classes[label] == str(10 - int(Path(path).stem) % 2)


def test_folders_of_points_are_split_like_those_of_pictures(tmp_path: Path) -> None:
    first, again, other = (
        load("points", points(tmp_path), split_seed=seed).val_dataloader().dataset.samples for seed in (0, 0, 1)
    )
    assert first == again != other
    assert [label for _, label in first].count(0) == round(0.2 * 27)
    for part in ("train", "val"):
        points(tmp_path / "parts" / part)
    data = load("points", tmp_path / "parts")
    assert data.counts == (54, 54)
    assert all(path.startswith("val/") for path, _ in data.val_dataloader().dataset.samples)


def long_table() -> str:
    """Two readings on each of two days, of twelve patients in turn."""
    rows = ["patient,Time,pulse,note,kind"]
    for time, pulse in (("01T00", 60), ("01T01", ""), ("02T02", 62), ("02T03", 63)):
        for patient in range(12):
            zone = "Z" * (patient % 2)
            rows.append(f"{patient},2024-01-{time}:00:00{zone},{pulse},x,{'ab'[patient % 2]}")
    return "\n".join([*rows, "99,,60,x,a", "98,2024-01-01,60,x,a", "98,2024-01-02,60,x,b\n"])


def test_rows_of_a_long_table_are_grouped_by_a_column(tmp_path: Path) -> None:
    write(tmp_path / "visits.csv", long_table())
    settings = {"example": "patient", "label": "kind", "features": ["pulse"]}
    data = load("points", tmp_path, **settings)
    assert data.counts == (10, 2)
    assert (data.axes, data.features, data.classes) == (("Time",), ("pulse",), ("a", "b"))
    assert [name for name, _ in data.skipped] == ["visits.csv, patient 98", "visits.csv, patient 99"]
    train = data.train_dataloader().dataset
    for (name, label), cloud in zip(train.samples, train.clouds, strict=True):
        assert label == int(name.rpartition(" ")[2]) % 2
        assert cloud.positions.flatten().tolist() == [0, 3600, 93600, 97200]  # seconds
        np.testing.assert_array_equal(cloud.features.flatten(), [60, np.nan, 62, 63])
    write(tmp_path / "more.csv", "patient,time,pulse,kind\n100,1,2,a\n,2,3,a\n")
    reasons = dict(load("points", tmp_path, axes=["Time"], **settings).skipped)
    assert reasons["more.csv"] == "there is no column 'Time' among patient, time, pulse, kind; did you mean 'time'?"
    write(tmp_path / "more.csv", "patient,Time,pulse,kind\n100,1,2,a\n,2,3,a\n")
    reasons = dict(load("points", tmp_path, **settings).skipped)
    assert reasons["more.csv"] == "column patient must name the example of every row, got an empty cell"
    write(tmp_path / "more.csv", "patient,Time,pulse,kind\n")
    assert dict(load("points", tmp_path, **settings).skipped)["more.csv"] == "a table must have 1 row or more, got 0"
    with refused(r"visits\.csv \(column note must hold numbers: 'x' is neither .* in row 2;"):
        load("points", tmp_path, **{**settings, "features": None})
    with refused(r"no column twice with features, label and example, got pulse,pulse"):
        load("points", tmp_path, features=["pulse"], example="pulse")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"example": "id"}, r"--data\.root must hold readable .*there is no column 'id' among x, y, z, grey\)"),
        ({"axes": ["x", "w"]}, r"--data\.root must hold readable .*there is no column 'w' among x, y"),
        ({"axes": []}, r"--data\.axes must name one column or more"),
        ({"features": ["x", "x"]}, r"--data\.axes must name one column or more, and no column twice"),
        ({"scale": [1.0, 2.0]}, r"--data\.scale must be one number or one for each of 3 axes, got \[1\.0, 2\.0\]"),
        ({"scale": [0.0]}, r"--data\.scale\[0\] must be above 0"),
        ({"label": "Grey"}, r"--data\.root must hold readable .*'Grey' among x, y, z, grey; did you mean 'grey'\?"),
        ({"label": "grey"}, r"--data\.root must hold readable .*column grey must have one value in a file"),
        ({"augment": {"rotate": ["x"]}}, r"--data\.augment\.rotate must be two different axes as in x,y, got x"),
        ({"augment": {"rotate": ["x", "w"]}}, r"--data\.augment\.rotate must name two of the axes x, y, z, got x,w"),
        ({"augment": {"drop_points": 2}}, r"--data\.augment\.drop_points must be between 0 and 1, got 2"),
        ({"augment": {"flip": True}}, r"--data\.augment\.flip is for digits, .*, got --data points"),
    ],
)
def test_mistake_in_a_setting_of_points_is_one_line(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    points(tmp_path)
    with refused(f"^{message}"):
        load("points", tmp_path, **options)


def test_table_without_class_folders_needs_the_column_of_classes(tmp_path: Path) -> None:
    write(tmp_path / "scans.csv", "scan,x,y,label\ns1,1,2,a\ns2,1,2,b\n")
    with refused(r"without class folders --data\.label names a column of classes, and --data\.ex"):
        load("points", tmp_path)
    with refused(r"column scan must hold numbers: 's1' .*; columns of text are .*--data\.example"):
        load("points", tmp_path, label="label")


def test_files_without_columns_of_positions_are_refused(tmp_path: Path) -> None:
    for name in ("a", "b"):
        for number in range(2):
            write(tmp_path / name / f"{number}.csv", "u,v\n1,2\n")
    with refused(r"^--data\.axes must name the columns of positions .*, got u, v in a/0\.csv"):
        load("points", tmp_path)
    assert load("points", tmp_path, axes=["v", "u"]).axes == ("v", "u")


def test_missing_values_of_points_are_dropped_or_flagged(tmp_path: Path) -> None:
    missing = {
        "x": np.array([0.0, 1.0, np.nan, 3.0]),
        "y": np.array([5.0, 6.0, 7.0, 8.0]),
        "grey": np.array([1.0, np.nan, 2.0, 4.0]),
    }
    for name in ("a", "b"):
        for number in range(4):
            write(tmp_path / name / f"{number}.csv", csv_text(missing))
    write(tmp_path / "a" / "nowhere.csv", "x,y,grey\n,1,2\n3,,4\n")
    write(tmp_path / "a" / "nothing.csv", "x,y,grey\n")
    write(tmp_path / "b" / "infinite.csv", "x,y,grey\n1,inf,2\n3,3,4\n")
    write(tmp_path / "b" / "huge.csv", "x,y,grey\n1,1,1e300\n")
    data = load("points", tmp_path)
    assert [path for path, _ in data.skipped] == ["a/nothing.csv", "a/nowhere.csv", "b/huge.csv", "b/infinite.csv"]
    inputs, _ = data.train_dataloader().dataset[0]
    grey, is_missing, x, y = inputs.unbind(dim=1)
    assert is_missing.tolist() == [0, 1, 0]
    assert grey[1] == 0
    torch.testing.assert_close(grey[[0, 2]], torch.tensor([-1.0, 1.0]))  # (1 - 2.5) / 1.5
    assert x.tolist() == [0, 1, 3]
    assert y.tolist() == [0, 1, 3]


def test_times_in_seconds_since_1970_keep_their_differences(tmp_path: Path) -> None:
    for name in ("a", "b"):
        for number in range(2):
            times = 1_795_386_937 + np.array([0.0, 0.001, 0.002])
            write(tmp_path / name / f"{number}.npz", npz_content(t=times, value=np.arange(3.0)))
    inputs, _ = load("points", tmp_path).train_dataloader().dataset[0]
    torch.testing.assert_close(inputs[:, 1], torch.tensor([0.0, 0.001, 0.002]), rtol=1e-3, atol=0)


def test_degenerate_point_sets_have_a_unit() -> None:
    one = Cloud.of(torch.tensor([[3.0, 4.0]]).double(), torch.tensor([[1.0]]).double())
    same = Cloud.of(torch.full((5, 2), 7.0).double(), torch.ones(5, 1).double())
    tokens = measure_tokens([one, same], [], coordinates=True, scale=None)
    assert tokens.scale == tokens.extent == (1.0, 1.0)
    inputs, _ = cloud_set([one, same], coordinates=True)[0]
    assert inputs.tolist() == [[0.0, 0.0, 0.0, 0.0, 0.0]]


def test_each_axis_has_a_separate_unit_by_default(tmp_path: Path) -> None:
    data = load("points", points(tmp_path))
    wide, _, high = data.scale
    assert wide == pytest.approx(high, rel=0.3)
    assert data.extent[0] / data.scale[0] == pytest.approx(data.extent[2] / data.scale[2])  # √n units along each
    assert load("points", tmp_path, scale=[0.5]).scale == (0.5, 0.5, 0.5)
    assert load("points", tmp_path, scale=[0.5, 0.5, 60.0]).scale == (0.5, 0.5, 60.0)


def test_points_without_features_hold_their_coordinates(tmp_path: Path) -> None:
    points(tmp_path)
    data = load("points", tmp_path, features=[])
    inputs, _ = data.train_dataloader().dataset[0]
    assert inputs.shape[1] == 6
    halves = torch.tensor(data.extent) / 2
    torch.testing.assert_close(inputs[:, :3] * halves, inputs[:, 3:] - inputs[:, 3:].mean(dim=0))
    assert load("points", tmp_path, coordinates=True).in_channels == 4
    assert load("points", tmp_path).in_channels == 1


# Batches


def test_batch_is_padded_and_its_examples_are_what_they_are_alone() -> None:
    made = cloud_set([cloud(n, seed=n) for n in (3, 7, 1)])
    inputs, labels = made.__getitems__([2, 0, 1])
    assert inputs.shape == (3, 7, 3)
    assert labels.tolist() == [0, 0, 1]
    for row, index, count in zip(inputs, (2, 0, 1), (1, 3, 7), strict=True):
        assert torch.equal(row[:count], made[index][0])
        assert row[count:].isnan().all()


def test_subsampled_points_are_fixed_in_validation_and_vary_by_epoch() -> None:
    whole = cloud(50)
    made = cloud_set([whole, cloud(4)], size=8)
    first, second = made[0][0], made[0][0]
    assert first.shape == (8, 3)
    assert torch.equal(first, second)
    assert {tuple(row) for row in first[:, 1:].tolist()} <= {tuple(row) for row in whole.positions.tolist()}
    epochs = [made.in_epoch(AugmentConfig(), None, seed)[0][0] for seed in (1, 2, 1)]
    assert torch.equal(epochs[0], epochs[2])
    assert not torch.equal(epochs[0], epochs[1])


CHANGES = AugmentConfig(rotate=["x", "y"], degrees=90, shift=1.0, jitter=0.5, drop_points=0.5)


def test_example_is_changed_alike_in_any_batch_and_otherwise_in_another_epoch() -> None:
    made = cloud_set([cloud(n, seed=n) for n in (20, 30, 25)])
    plane = RotationPlane.of(CHANGES, ("x", "y"), ("grey",))
    epoch = made.in_epoch(CHANGES, plane, 5)
    together = epoch.__getitems__([0, 1, 2])[0]
    for index, count in enumerate((20, 30, 25)):
        torch.testing.assert_close(epoch[index][0], together[index, :count], equal_nan=True, rtol=1e-4, atol=1e-5)
    repeated = epoch.__getitems__([0, 3])[0]  # beyond the end: a repeat, changed otherwise
    assert not torch.equal(repeated[0].nan_to_num(), repeated[1].nan_to_num())
    assert not torch.equal(made.in_epoch(CHANGES, plane, 6)[0][0].nan_to_num(), epoch[0][0].nan_to_num())


def changed(positions: Tensor, features: Tensor | None = None, **settings: Any) -> tuple[Tensor, Tensor]:
    augment = AugmentConfig(**settings)
    given = torch.zeros(*positions.shape[:2], 0) if features is None else features
    plane = RotationPlane.of(augment, ("x", "y", "z"), ("nx", "ny", "nz"))
    draws = Draws(0, range(len(positions)))
    return augment_points(given, positions, augment, plane, (1.0, 1.0, 10.0), draws)


def test_rotation_preserves_distances_and_the_third_axis_and_rotates_normals() -> None:
    positions, normals = torch.rand(4, 10, 3), torch.rand(4, 10, 3)
    turned, with_them = changed(positions, normals, rotate=["x", "y"], degrees=180)[::-1]
    torch.testing.assert_close(torch.cdist(turned, turned), torch.cdist(positions, positions), rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(turned.mean(dim=1), positions.mean(dim=1))
    torch.testing.assert_close(turned[..., 2], positions[..., 2])
    one, other = positions - positions.mean(dim=1, keepdim=True), turned - turned.mean(dim=1, keepdim=True)
    torch.testing.assert_close((one * normals).sum(-1), (other * with_them).sum(-1), rtol=1e-3, atol=1e-4)
    assert (turned - positions).abs().amax(dim=(1, 2)).min() > 1e-3


def test_shift_jitter_and_drop_do_what_they_say() -> None:
    positions = torch.rand(200, 30, 3)
    moved = changed(positions, shift=2.0)[1] - positions
    torch.testing.assert_close(moved, moved[:, :1].expand_as(moved), rtol=0, atol=1e-5)
    assert 1.8 < moved[..., 0].abs().max() <= 2
    assert 18 < moved[..., 2].abs().max() <= 20  # a unit is 10 there
    noise = changed(positions, jitter=0.5)[1] - positions
    torch.testing.assert_close(noise.std(dim=(0, 1)), torch.tensor([0.5, 0.5, 5.0]), rtol=0.05, atol=0)
    dropped = changed(positions, drop_points=0.6)[1].isnan().any(dim=-1).float().mean(dim=1)
    assert 0.2 < dropped.mean() < 0.4
    left = changed(positions, drop_points=1.0)[1].isnan().any(dim=-1)
    assert not left.all(dim=1).any(), "one point stays"


def test_normal_numbers_are_normal() -> None:
    drawn = normal(Draws(0, range(100)), "jitter", 1000).double().flatten()
    assert drawn.mean().abs() < 0.02
    assert drawn.std() == pytest.approx(1, abs=0.01)
    assert (drawn.abs() < 1.96).double().mean() == pytest.approx(0.95, abs=0.005)


def test_shuffled_positions_are_of_their_example_and_exclude_padding() -> None:
    made = cloud_set([cloud(n, seed=n) for n in (30, 50, 1)])
    inputs, _ = made.__getitems__([0, 1, 2])
    shuffled = shuffle_positions(inputs, 1, torch.Generator().manual_seed(0))
    assert torch.equal(shuffled.isnan(), inputs.isnan())
    torch.testing.assert_close(shuffled[..., :1], inputs[..., :1], equal_nan=True)
    for before, after, count in zip(inputs, shuffled, (30, 50, 1), strict=True):
        assert sorted(map(tuple, before[:count, 1:].tolist())) == sorted(map(tuple, after[:count, 1:].tolist()))
        assert count == 1 or not torch.equal(before[:count], after[:count])


def visits(folder: Path, files: tuple[str, ...]) -> Path:
    """Tables with the same 20 patients of two classes in each."""
    rows = [f"P{patient},{time},{patient % 2},{'ab'[patient % 2]}" for patient in range(20) for time in range(3)]
    for name in files:
        write(folder / name, "\n".join(["patient,time,pulse,diagnosis", *rows]) + "\n")
    return folder


def test_example_of_several_files_is_in_one_part_and_fold(tmp_path: Path) -> None:
    root = visits(tmp_path, ("v0.csv", "v1.csv"))
    options = {"example": "patient", "label": "diagnosis"}
    for fold in ({}, {"folds": 2, "fold": 1}):
        train, val = load("points", root, **options, **fold)._made_datasets()
        of_train, of_val = ({name.rpartition(" ")[2] for name, _ in part.samples} for part in (train, val))
        assert of_train.isdisjoint(of_val)
        assert (len(of_train | of_val), len(train) + len(val)) == (20, 40)


def test_example_of_both_parts_is_refused(tmp_path: Path) -> None:
    root = visits(tmp_path, ("train/v0.csv", "val/v1.csv"))
    with refused(r"^a patient must be in one part, got train and val for patient 'P0'"):
        load("points", root, example="patient", label="diagnosis")


@pytest.mark.parametrize("parts", [("train", "test"), ("Train", "Val")])
def test_parts_of_other_names_are_refused(tmp_path: Path, parts: tuple[str, ...]) -> None:
    root = visits(tmp_path, tuple(f"{part}/v.csv" for part in parts))
    with refused(r"^parts must be called train and val, got "):
        load("points", root, example="patient", label="diagnosis")
