"""The data set `globe`: contents of examples, places of training and validation, and the kinds of positions."""

import io
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from miniatures import globe, npz_content, write
from torch import Tensor

import torchrope as tr
from torchrope_lab.data.build import make_data
from torchrope_lab.data.config import data_config
from torchrope_lab.data.globe import CELL, land_at, land_map
from torchrope_lab.training.config import ModelConfig
from torchrope_lab.training.models import build_model


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return globe(tmp_path_factory.mktemp("globe"))


def load(root: Path, **options: Any) -> Any:
    data = make_data(
        data_config("globe", root=str(root), **{"train_size": 40, "val_size": 20, "points": 30, **options})
    )
    data.setup("fit")
    return data


def cells(places: Tensor) -> set[tuple[int, ...]]:
    return {tuple(each) for each in (places / CELL).floor().int().tolist()}


def test_example_omits_the_value_of_the_queried_place(root: Path) -> None:
    data = load(root)
    land = land_map(str(root))
    for part in data._made_datasets():
        for cloud, (_, label) in zip(part.clouds, part.samples, strict=True):
            known, asked = cloud.features.unbind(-1)
            assert asked.tolist() == [1.0] + [0.0] * 29
            assert known[0] == 0
            assert torch.equal(known[1:] > 0, land_at(land, cloud.positions.double())[1:])
            assert bool(land_at(land, cloud.positions.double())[0]) == bool(label)
        assert sum(label for _, label in part.samples) == len(part.samples) // 2


def test_validation_places_are_not_training_places_and_draws_are_fixed(root: Path) -> None:
    train, val = load(root)._made_datasets()
    of_train, of_val = (torch.stack([cloud.positions[0] for cloud in part.clouds]) for part in (train, val))
    assert not cells(of_train) & cells(of_val)
    again, _ = load(root)._made_datasets()
    assert all(torch.equal(a.positions, b.positions) for a, b in zip(train.clouds, again.clouds, strict=True))
    other, _ = load(root, split_seed=1)._made_datasets()
    assert not torch.equal(other.clouds[0].positions, train.clouds[0].positions)


@pytest.mark.parametrize("radius", [5.0, 80.0])
def test_positions_of_all_kinds_are_equal_places_within_the_radius(root: Path, radius: float) -> None:
    kinds = {kind: load(root, coordinates=kind, radius=radius) for kind in ("degrees", "vectors", "plane")}
    of = {kind: data._made_datasets()[0].clouds for kind, data in kinds.items()}
    for degrees, vectors, plane in zip(*of.values(), strict=True):
        places = tr.positions.latlon_to_unit(degrees.positions.double())
        assert torch.allclose(vectors.positions.double(), places, atol=1e-6)
        assert torch.acos((places @ places.T).clamp(-1, 1)).max() <= math.radians(2 * radius) + 1e-3
        assert plane.positions[1:].norm(dim=-1).max() <= math.degrees(2 * math.tan(math.radians(radius) / 2)) + 1e-3
    assert kinds["degrees"].periods == (None, 360.0)
    assert kinds["vectors"].periods is kinds["plane"].periods is load(root, periodic_longitude=False).periods is None
    assert kinds["degrees"].scale[0] == pytest.approx(math.degrees(kinds["vectors"].scale[0]))
    assert {data.slug for data in kinds.values()} == {"globe-degrees", "globe-vectors", "globe-plane"}


def test_places_are_spread_evenly(root: Path) -> None:
    data = load(root, points=2000, radius=180.0, train_size=2, val_size=1)
    cloud = data._made_datasets()[0].clouds[0]
    z = tr.positions.latlon_to_unit(cloud.positions.double())[:, 2]
    assert abs(z.mean()) < 0.05
    assert z.square().mean().item() == pytest.approx(1 / 3, abs=0.03)


@pytest.mark.parametrize("encoding", ["none", "mixed", "sphere:4", "liere:4", "sinusoidal", "pape", "drope"])
def test_models_accept_the_data_and_the_date_line_is_no_edge(root: Path, encoding: str) -> None:
    data = load(root)
    config = ModelConfig(backbone="transformer", dim=16, depth=1, num_heads=2)
    model = build_model(encoding, config, data).double()
    inputs, _ = data._made_datasets()[0].__getitems__([0, 1, 2])
    inputs = inputs.double()
    around = inputs.clone()
    around[:, ::2, -1] += 360
    assert (model(around) - model(inputs)).abs().max() < 1e-6


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"nothing", "must be a .npz file with a mask of the earth, true at sea"),
        (npz_content(other=np.zeros(3)), "mask.npy"),
        (npz_content(mask=np.zeros(3, bool)), r"mask must be boolean \(rows, columns\), got bool \(3,\)"),
        (
            npz_content(mask=np.zeros((6, 12), bool)),
            r"land and sea in most cells of 15 degrees, got no match for \d+ of \d+ queries in 256 draws each",
        ),
    ],
)
def test_invalid_map_raises_one_line(tmp_path: Path, content: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message) as told:
        load(write(tmp_path / "map.npz", content))
    assert "\n" not in str(told.value)


def test_truncated_file_raises_one_line(tmp_path: Path) -> None:
    whole = io.BytesIO()
    np.lib.format.write_array(whole, np.zeros((6, 12), bool))
    from zipfile import ZipFile

    with ZipFile(tmp_path / "map.npz", "w") as archive:
        archive.writestr("mask.npy", whole.getvalue()[:-5])
    with pytest.raises(ValueError, match="mask must have 6 rows, got 5"):
        load(tmp_path / "map.npz")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(points=1), "--data.points must be 2 or more, got 1"),
        (dict(radius=0.0), "--data.radius must be above 0 and at most 180 degrees, got 0.0"),
        (dict(coordinates="miles"), "--data.coordinates must be one of degrees, vectors, plane, got 'miles'"),
        (dict(coordinates="plane", radius=90.0), "at most 80 degrees with --data.coordinates plane, got 90.0"),
    ],
)
def test_settings_out_of_range_raise_one_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        data_config("globe", **options)
