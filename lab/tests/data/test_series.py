"""Tests of time series from the package aeon."""

from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from torchrope_lab.data import series
from torchrope_lab.data.build import make_data
from torchrope_lab.data.config import data_config


def test_problem_without_root_is_read_from_the_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Distribution:
        def locate_file(self, path: str) -> Path:
            return tmp_path / path

    folder = tmp_path / "aeon/datasets/data/Waves"
    folder.mkdir(parents=True)
    for part in ("TRAIN", "TEST"):
        (folder / f"Waves_{part}.ts").write_text("@problemName Waves\n@classLabel true a b\n@data\n1,2,3:a\n3,2,1:b\n")
    monkeypatch.setattr(series, "distribution", lambda _: Distribution())
    data = make_data(data_config("series", problem="Waves"))
    data.setup()
    assert data.counts == (2, 2)
    with pytest.raises(ValueError, match=r"problem must be one of Waves if --data\.root is not given, got 'Tides'"):
        make_data(data_config("series", problem="Tides"))

    def missing(name: str) -> None:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(series, "distribution", missing)
    with pytest.raises(ValueError, match="or the package aeon be installed for 'Waves'"):
        make_data(data_config("series", problem="Waves"))
