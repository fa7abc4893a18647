"""Data of a user's own function or class: `--data mypackage.module:source`."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml

from torchrope_lab.cli import main
from torchrope_lab.data.build import make_data
from torchrope_lab.data.config import data_config
from torchrope_lab.modules import load_module
from torchrope_lab.options import parse
from torchrope_lab.studies.engine.config import StudyConfig
from torchrope_lab.training.config import RunConfig, plain, read_config

MODULE = '''
from pathlib import Path
from typing import Literal

import torch
from torch.utils.data import TensorDataset

Path(__file__).with_name("imported").touch()


def waves(length: int = 16, noise: float = 0.1, kind: Literal["sine", "step"] = "sine"):
    """Waves of one or two periods."""
    generator = torch.Generator().manual_seed(0)

    def part(count):
        labels = torch.arange(count) % 2
        phases = torch.arange(length) / length * 6.28 * (1 + labels[:, None])
        waves = phases.sin() if kind == "sine" else phases.sin().sign()
        return TensorDataset(waves[:, None] + noise * torch.randn(count, 1, length, generator=generator), labels)

    return part(60), part(40)


class Cubes:
    """Cubes of voxels."""

    def __init__(self, size: int = 4):
        inputs = torch.randn(40, 2, size, size, size, generator=torch.Generator().manual_seed(1))
        inputs[::2] += 1
        self.train = [(each, index % 2) for index, each in enumerate(inputs[:30])]
        self.val = [(each, index % 2) for index, each in enumerate(inputs[30:])]
        self.classes, self.axes = ["high", "low"], ["z", "y", "x"]


def needs(length):
    return [], []


def nothing():
    return None


def texts():
    return [("a", 0)], [("b", 1)]


def integers():
    return [(torch.zeros(1, 4, dtype=torch.uint8), 0)], [(torch.zeros(1, 4, dtype=torch.uint8), 0)]


def ragged():
    return [(torch.zeros(1, 4), 0), (torch.zeros(1, 5), 1)], [(torch.zeros(1, 4), 0)]


def unlabelled():
    return [(torch.zeros(1, 4), -1)], [(torch.zeros(1, 4), 0)]


number = 3
'''
SMALL = [
    "--epochs=1",
    "--optim.warmup_epochs=0",
    "--model.dim=16",
    "--model.depth=1",
    "--model.num_heads=1",
    "--model.mlp_dim=16",
    "--model.patch_size=[4]",
]
WAVES = ["--data=own_data.waves:waves", "--data.length=24"]
QUIET = "--trainer.enable_progress_bar=false"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package `own_data` in the working directory, which is not on the path."""
    folder = tmp_path / "own_data"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "waves.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    yield folder
    forget()


def forget() -> None:
    """As in a process that has imported none of it."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "own_data"]:
        del sys.modules[name]


def test_pair_of_sets_is_batched_with_its_settings(package: Path) -> None:
    load_module("own_data.waves:waves")
    config = data_config("own_data.waves:waves", length=8, train_size=10, batch_size=4)
    data = make_data(config)
    data.setup()
    assert (data.counts, data.input_size, data.in_channels, data.axes) == ((10, 40), (8,), 1, ("x",))
    assert data.classes == ("0", "1")
    inputs, labels = next(iter(data.train_dataloader()))
    assert (inputs.shape, inputs.dtype, labels.dtype) == ((4, 1, 8), torch.float32, torch.int64)
    other = make_data(data_config("own_data.waves:waves", length=8, train_size=10, noise=0.2))
    assert other.fingerprint != data.fingerprint == make_data(config).fingerprint
    run = RunConfig(data=config)
    assert read_config(json.loads(json.dumps(plain(run)))) == run


def test_class_names_its_classes_and_axes(package: Path) -> None:
    load_module("own_data.waves:Cubes")
    data = make_data(data_config("own_data.waves:Cubes", size=6))
    assert (data.input_size, data.in_channels) == ((6, 6, 6), 2)
    assert (data.axes, data.classes) == (("z", "y", "x"), ("high", "low"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("own_data.waves:wave", "--data must be one of|own_data.waves must have a function or class wave, got none"),
        ("own_data.wave:waves", "No module named 'own_data.wave'; did you mean 'own_data.waves'"),
        ("own_data.waves:number", "--data own_data.waves:number must be a function or a class, got int"),
        ("own_data.waves:needs", "parameters must have a default and another name, got length"),
        ("own_data.waves:nothing", "must return a pair .train, val., or train and val by name, got NoneType"),
        ("own_data.waves:texts", "train of .* must have inputs that are float tensors .channels, .sizes., got str"),
        ("own_data.waves:integers", r"float tensors .channels, .sizes., got torch.uint8 \(1, 4\)"),
        ("own_data.waves:unlabelled", "train of .* each with a whole number of 0 or more as label"),
        ("own_data.waves:ragged --epochs 1", r"must have inputs of one shape, \(1, 4\), got \(1, 5\)"),
        ("own_data.waves:waves --data.lenth 3", "no option --data.lenth; did you mean '--data.length'"),
        ("own_data.waves:waves --data.length x", "--data.length must be a whole number, got 'x'"),
        ("own_data.waves:waves --data.kind square", "--data.kind must be one of sine, step, got 'square'"),
        ("own_data.waves:waves --data.size 8", "--data.size is for sources with a parameter size"),
        ("own_data.waves:waves --data.train_size 100", "--data.train_size must be between 2"),
        ("own_data.waves:waves --data.augment.erasing 1", "--data.augment.erasing is for images"),
        ("own_data.waves:waves --model.patch_size 3", "multiples of --model.patch_size 3, got 16"),
    ],
)
def test_mistake_is_one_line(arguments: str, message: str, package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--encoding=none", QUIET, "--model.patch_size=2", "--data", *arguments.split()]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    with pytest.raises(ValueError, match=message):
        raise ValueError(error)


def test_arguments_of_a_file_import_nothing(package: Path) -> None:
    with pytest.raises(ValueError, match=r"the module of 'own_data.waves:waves' must be named on the command line"):
        parse("leaderboard", "", StudyConfig, [*WAVES, "--allow=own_data"], imports=False)
    assert not (package / "imported").exists()


def test_help_shows_the_parameters(package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["compare", *WAVES, "--help", "data"])
    shown = capsys.readouterr().out
    assert "--data.length LENGTH" in shown
    assert "--data.kind {sine,step}" in shown


def test_run_is_resumed_and_evaluated_and_imports_only_what_is_allowed(
    package: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train = ["train", *WAVES, *SMALL, QUIET, "--encoding=mixed", "--out=run"]
    assert main(train) == 0
    stored = yaml.safe_load(Path("run/config.yaml").read_text())["data"]
    assert (stored["name"], stored["length"]) == ("own_data.waves:waves", 24)
    assert main(train) == 0  # finished already
    (package / "imported").unlink()
    for command in (["evaluate", "run"], ["train", *SMALL, QUIET, "--config=run/config.yaml", "--out=run"]):
        for allow in ([], ["--allow=own,own_data.other"]):
            forget()
            capsys.readouterr()
            assert main([*command, *allow]) == 2
            assert "must be named on the command line or in --allow own_data.waves" in capsys.readouterr().err
            assert not (package / "imported").exists()
    forget()
    assert main(["evaluate", "run", "--allow=own_data", "--json"]) == 0
    measured = json.loads(capsys.readouterr().out)
    assert 0 <= measured["top1"] <= 1
    forget()
    assert main(["train", QUIET, "--config=run/config.yaml", "--allow=own_data", "--out=run"]) == 0
    assert main([*train[:1], "--data.noise=0.5", *train[1:]]) == 2
    assert "data.noise 0.1 instead of 0.5" in capsys.readouterr().err


@pytest.mark.slow
def test_comparison_trains_in_other_processes(package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    compare = ["compare", *WAVES, *SMALL, "--seeds=1", "--encodings=none,axial", "--out=out"]
    assert main([*compare, "--parallel=2"]) == 0, capsys.readouterr().err
    results = json.loads(Path("out/results.json").read_text())
    assert results["data"]["name"] == "own_data.waves:waves"
    folders = sorted(path.name.rpartition("-")[0] for path in Path("out/runs").glob("own_data*"))
    assert folders == [f"own_data.waves-waves-{name}-seed0" for name in ("axial", "none")]
    assert main(compare) == 0
    assert "run 1 of" not in capsys.readouterr().out.partition("run 2 of 2")[2]


@pytest.mark.slow
def test_study_of_volumes_of_a_users_class(package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = [*SMALL[:-1], "--seeds=1", "--model.patch_size=2", "--model.dim=24"]
    command = ["study", "accuracy", "--data=own_data.waves:Cubes", *small, "--encodings=none,axial", "--out=out"]
    assert main(command) == 0, capsys.readouterr().err
    assert Path("out/accuracy-own_data.waves-Cubes.json").exists()
