"""Data of a user's own function or class: `--data mypackage.module:source`."""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml
from data_sets import refused

from torchrope_lab.cli import main
from torchrope_lab.data.build import make_data
from torchrope_lab.data.data_config import data_config
from torchrope_lab.modules import load_module
from torchrope_lab.settings.run_config import RunConfig, plain, read_config

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

    augment = like = recipe = print  # names that mean nothing here

    def __init__(self, size: int = 4):
        inputs = torch.randn(40, 2, size, size, size, generator=torch.Generator().manual_seed(1))
        inputs[::2] += 1
        self.train = [(each, index % 2) for index, each in enumerate(inputs[:30])]
        self.val = [(each, index % 2) for index, each in enumerate(inputs[30:])]
        self.classes, self.axes = ["high", "low"], ["z", "y", "x"]

def needs(length):
    return [], []

def one_class():
    examples = TensorDataset(torch.zeros(4, 1, 4), torch.zeros(4, dtype=torch.long))
    return examples, examples

def same_names():
    examples = TensorDataset(torch.zeros(4, 1, 4), torch.tensor([0, 1, 0, 1]))
    return {"train": examples, "val": examples, "classes": ["a", "a"]}

def nothing():
    return None

def texts():
    return [("a", 0)], [("b", 1)]

def integers():
    return [(torch.zeros(1, 4, dtype=torch.uint8), 0)], [(torch.zeros(1, 4, dtype=torch.uint8), 1)]

def ragged():
    return [(torch.zeros(1, 4), 0), (torch.zeros(1, 5), 1)], [(torch.zeros(1, 4), 0)]

def unlabelled():
    return [(torch.zeros(1, 4), -1)], [(torch.zeros(1, 4), 0)]

def regression():
    return [(torch.zeros(1, 4), 0.5)], [(torch.zeros(1, 4), 1.5)]

def several():
    return [(torch.zeros(1, 4), torch.tensor([0, 1]))], [(torch.zeros(1, 4), torch.tensor([1, 1]))]

class Parity(torch.utils.data.Dataset):
    """Digits labelled by parity, with the attributes of torchvision's sets."""

    def __init__(self, count, transform=lambda target: target % 2):
        self.targets, self.target_transform = torch.arange(count) % 10, transform

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, index):
        target = int(self.targets[index])
        label = target if self.target_transform is None else self.target_transform(target)
        return torch.full((1, 4), float(index)), label

def parity():
    return Parity(40), Parity(20)

def digits():
    return Parity(40, None), Parity(20, None)

class Contradictory(Parity):
    def __getitem__(self, index):
        return torch.zeros(1, 4), int(self.targets[index]) % 2

def contradictory():
    return Contradictory(40, None), Contradictory(20, None)

class ContradictoryTokens(Parity):
    def __getitem__(self, index):
        return torch.zeros(3, 1), torch.zeros(3, 2), int(self.targets[index]) % 2

def contradictory_tokens():
    return ContradictoryTokens(40, None), ContradictoryTokens(20, None)

contradictory_tokens.lattice = False

def walks(steps: int = 12, far: float = 0.0, channels: int = 1):
    """Random walks in a plane, to the right or upwards, with gaps."""
    generator = torch.Generator().manual_seed(2)

    def part(count):
        labels = torch.arange(count) % 2
        moves = torch.randn(count, steps, 2, generator=generator) + torch.stack([1 - labels, labels], dim=1)[:, None]
        positions = moves.cumsum(dim=1) + far
        positions[:, steps - 2 :] = torch.where(labels[:, None, None] == 1, torch.nan, positions[:, steps - 2 :])
        return TensorDataset(torch.randn(count, steps, channels, generator=generator), positions, labels)

    return {"train": part(40), "val": part(20), "classes": ["right", "up"], "axes": ["u", "v"]}

walks.lattice = False

class Clock:
    """Hours of a day."""

    lattice = False

    def __init__(self, size: int = 5):
        hours = torch.arange(6.0)[:, None]
        self.train = self.val = [(torch.ones(6, 0), hours * (4 - index % 2), index % 2) for index in range(8)]
        self.scale, self.extent, self.periods = 0.5, [24.0], [24.0]

def untold():
    return walks()

def mixed_widths():
    plane, space = (torch.zeros(4, 1), torch.zeros(4, 2), 0), (torch.zeros(4, 1), torch.zeros(4, 3), 1)
    return [plane, space], [plane]

mixed_widths.lattice = False

def integer_tokens():
    return [(torch.zeros(4, 1, dtype=torch.long), torch.zeros(4, 2), 0)], [(torch.zeros(4, 1), torch.zeros(4, 2), 1)]

integer_tokens.lattice = False
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
    for name in [name for name in sys.modules if name.startswith("own_data")]:
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


def test_file_of_a_source_must_be_typed_or_allowed(package: Path) -> None:
    with refused(r"add --allow own_data/waves\.py \(several: A,B\)$"):
        data_config("own_data/waves.py:waves")
    load_module("own_data/waves.py:waves", ["own_data"])
    assert not (package / "imported").exists()
    load_module("own_data/waves.py:waves", ["own_data/waves.py"])
    assert data_config("own_data/waves.py:waves", length=8).length == 8


def test_class_names_its_classes_and_axes(package: Path) -> None:
    load_module("own_data.waves:Cubes")
    data = make_data(data_config("own_data.waves:Cubes", size=6))
    assert (data.input_size, data.in_channels) == ((6, 6, 6), 2)
    assert (data.axes, data.classes) == (("z", "y", "x"), ("high", "low"))


@pytest.mark.parametrize(("name", "classes"), [("parity", 2), ("digits", 10)])
def test_labels_are_those_of_the_examples(name: str, classes: int, package: Path) -> None:
    load_module(f"own_data.waves:{name}")
    data = make_data(data_config(f"own_data.waves:{name}", batch_size=40))
    assert data.num_classes == classes
    (inputs, labels), *_ = data.train_dataloader()
    assert labels.tolist() == [int(value) % classes for value in inputs[:, 0, 0]]


def test_tokens_with_positions_are_padded_and_normalised(package: Path) -> None:
    load_module("own_data.waves:walks")
    data = make_data(data_config("own_data.waves:walks", steps=9, train_size=10, batch_size=10, workers=1))
    data.setup()
    assert (data.counts, data.axes, data.classes, data.in_channels) == ((10, 20), ("u", "v"), ("right", "up"), 1)
    inputs, labels = next(iter(data.val_dataloader()))
    assert inputs.shape == (20, 9, 3)
    points = (~inputs[..., 0].isnan()).sum(dim=1)
    assert points.tolist() == [9 - 2 * label for label in labels.tolist()]
    train = torch.cat([cloud.features for cloud in data._made_datasets()[0].clouds])
    shown = torch.cat([example[:, 0] for example, _ in (data._made_datasets()[0][index] for index in range(10))])
    torch.testing.assert_close(shown, ((train - train.mean()) / train.std(correction=0)).flatten())
    first = type(data.config).source(steps=9)["val"][0]
    torch.testing.assert_close(inputs[0, :, 1:], first[1])  # positions are unchanged
    others = [make_data(data_config("own_data.waves:walks", steps=9, train_size=10, far=far)) for far in (0.0, 1.0)]
    assert data.fingerprint == others[0].fingerprint != others[1].fingerprint


def test_source_tells_scale_extent_and_periods(package: Path) -> None:
    load_module("own_data.waves:Clock")
    data = make_data(data_config("own_data.waves:Clock", size=4))
    data.setup()
    assert (data.scale, data.extent, data.periods, data.features) == ((0.5,), (24.0,), (24.0,), ())
    inputs, _ = data.val_dataloader().dataset[0]
    assert inputs.shape == (4, 2)  # a coordinate instead of features; `size` is the largest number of points
    assert make_data(data_config("own_data.waves:Clock", scale=[2.0])).config.scale == [2.0]


@pytest.mark.parametrize("name", ["own_data.waves:waves", "own_data.waves:walks"])
def test_folds_and_tuning_of_a_source(package: Path, name: str) -> None:
    load_module(name)
    whole = [make_data(data_config(name, folds=3, fold=fold)) for fold in range(3)]
    counts = [data.counts for data in whole]
    total = sum(make_data(data_config(name)).counts)
    assert sum(val for _, val in counts) == total == sum(counts[0])
    held_out = [example for data in whole for example, _ in data.val_dataloader().dataset]
    assert len({tuple(example.nan_to_num().flatten().tolist()) for example in held_out}) == total
    assert make_data(data_config(name, tuning=True)).counts == {"waves": (48, 12), "walks": (32, 8)}[name[15:]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("own_data.waves:wave", "--data must be one of|own_data.waves has no function or class wave"),
        ("own_data.wave:waves", "No module named 'own_data.wave'"),
        ("own_data.waves:number", "--data own_data.waves:number must be a function or a class, got int"),
        ("own_data.waves:needs", "parameters must have a default and another name, got length"),
        ("own_data.waves:nothing", "must return a pair .train, val., or train and val by name, got NoneType"),
        ("own_data.waves:texts", "train of .* must have inputs that are float tensors .channels, .sizes., got str"),
        ("own_data.waves:integers", r"float tensors .channels, .sizes., got torch.uint8 \(1, 4\)"),
        ("own_data.waves:one_class", "must have two classes or more, of different names, got 0"),
        ("own_data.waves:same_names", "must have two classes or more, of different names, got a, a"),
        ("own_data.waves:unlabelled", "train of .* each with a whole number of 0 or more as label, got -1"),
        ("own_data.waves:regression", "whole number of 0 or more as label, got float64: regression is not supported"),
        ("own_data.waves:several", "whole number .* as label, got .* multi-label classification is not supported"),
        (
            "own_data.waves:contradictory",
            "train of .* must have the labels of its attribute .* got [01] instead of [2-9]",
        ),
        ("own_data.waves:contradictory_tokens", "train of .* must have the labels of its attribute .* 0 instead of 2"),
        ("own_data.waves:untold", "examples .tensor, label., got 3 values .* set untold.lattice = False"),
        ("own_data.waves:mixed_widths", r"examples .float tokens .n, 1., positions .n, 2., .* \(4, 3\)"),
        ("own_data.waves:integer_tokens", r".float tokens .n, channels., positions .n, axes., label., got torch.int64"),
        ("own_data.waves:walks --data.far 1e9", r"along u must be within 1,048,576 units of 0 .subtract an origin."),
        ("own_data.waves:walks --data.augment.flip true", "--data.augment.flip is for digits"),
        ("own_data.waves:ragged --epochs 1", r"must have inputs of one shape, \(1, 4\), got \(1, 5\)"),
        ("own_data.waves:waves --data.length x", "--data.length must be a whole number, got 'x'"),
        ("own_data.waves:waves --data.kind square", "--data.kind must be one of sine, step, got 'square'"),
        ("own_data.waves:waves --data.size 8", "--data.size is for sources with a parameter size"),
        ("own_data.waves:waves --model.patch_size 3", "multiples of --model.patch_size 3, got 16"),
    ],
)
def test_mistake_is_one_line(arguments: str, message: str, package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    patches = (
        []
        if "walks" in arguments or "tokens" in arguments or "integer" in arguments or "mixed" in arguments
        else ["--model.patch_size=2"]
    )
    assert main(["train", "--encoding=none", QUIET, *patches, "--data", *arguments.split()]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert re.search(message, error)


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
            assert (
                "is imported only if the command line names it: add --allow own_data.waves" in capsys.readouterr().err
            )
            assert not (package / "imported").exists()
    forget()
    assert main(["evaluate", "run", "--allow=own_data", "--json"]) == 0
    measured = json.loads(capsys.readouterr().out)
    assert 0 <= measured["top1"] <= 1
    forget()
    assert main(["train", QUIET, "--config=run/config.yaml", "--allow=own_data", "--out=run"]) == 0
    assert main([*train[:1], "--data.noise=0.5", *train[1:]]) == 2
    assert "data.noise 0.1 instead of 0.5" in capsys.readouterr().err


def test_run_on_tokens_has_the_recipe_of_points_and_is_evaluated(
    package: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = [option for option in SMALL if "patch" not in option]
    train = ["train", "--data=own_data.waves:walks", *small, QUIET, "--encoding=sinusoidal+mixed"]
    assert main([*train, "--out=whole", "--epochs=2"]) == 0, capsys.readouterr().err
    stored = yaml.safe_load(Path("whole/config.yaml").read_text())
    assert stored["model"]["backbone"] == "transformer"  # of the recipe points
    forget()
    assert main(["evaluate", "whole", "--allow=own_data", "--json"]) == 0, capsys.readouterr().err


@pytest.mark.slow
def test_source_of_the_documentation_trains_as_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (Path(__file__).parents[3] / "docs" / "data.md").read_text()
    [block] = re.findall(r"```python\n(# mydata\.py\n.*?)```", page, re.DOTALL)
    Path(tmp_path / "mydata.py").write_text(block)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "mydata", raising=False)
    [command] = re.findall(r"^torchrope (compare --data mydata:waves .*)$", page, re.MULTILINE)
    small = [option for option in SMALL if "patch" not in option]
    quick = ["--seeds=1", "--encodings=none,axial", "--data.train_size=64", "--data.val_size=32", "--out=out"]
    assert main([*command.split(), *small, *quick]) == 0, capsys.readouterr().err
    assert json.loads(Path("out/results.json").read_text())["data"]["name"] == "mydata:waves"
    del sys.modules["mydata"]


@pytest.mark.slow
@pytest.mark.parametrize("source", ["own_data.waves:waves", "own_data/more-waves.py:waves"])
def test_comparison_trains_in_other_processes(source: str, package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (package / "more-waves.py").write_text(MODULE)
    options = [f"--data={source}", "--data.length=24", *SMALL, "--seeds=1", "--encodings=none,axial", "--out=out"]
    assert main(["compare", *options, "--parallel=2"]) == 0, capsys.readouterr().err
    results = json.loads(Path("out/results.json").read_text())
    assert results["data"]["name"] == source
    slug = re.sub("[/:]", "-", source)
    folders = sorted(path.name.rpartition("-")[0] for path in Path("out/runs").glob("own_data*"))
    assert folders == [f"{slug}-{name}-seed0" for name in ("axial", "none")]
    assert main(["compare", *options]) == 0
    assert "run 1 of" not in capsys.readouterr().out.partition("run 2 of 2")[2]


@pytest.mark.slow
def test_study_of_volumes_of_a_users_class(package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = [*SMALL[:-1], "--seeds=1", "--model.patch_size=2", "--model.dim=24"]
    command = ["study", "accuracy", "--data=own_data.waves:Cubes", *small, "--encodings=none,axial", "--out=out"]
    assert main(command) == 0, capsys.readouterr().err
    assert Path("out/accuracy-own_data.waves-Cubes.json").exists()
