"""Training on tokens at any positions: padding, order, large sets, resuming, comparisons, studies."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from labs import QUIET
from miniatures import points, waves
from small_runs import Killed, die_in_epoch_2, same_weights, trained

from torchrope.models import Transformer
from torchrope_lab.cli import main
from torchrope_lab.data.build import make_data
from torchrope_lab.data.data_config import data_config, settings_of
from torchrope_lab.data.sets import DATA_NAMES
from torchrope_lab.data.tokens import TokensModule
from torchrope_lab.engine.registry import STUDIES, suitable
from torchrope_lab.engine.study import find_study, run_study
from torchrope_lab.results import StudyResult
from torchrope_lab.settings.compare_config import ENCODINGS, CompareConfig
from torchrope_lab.settings.run_config import ModelConfig, OptimConfig, RunConfig
from torchrope_lab.settings.study_config import StudyConfig
from torchrope_lab.studies.compare import compare
from torchrope_lab.training.evaluate import correct_shuffled, evaluate, predict
from torchrope_lab.training.models import TokenClassifier, build_model
from torchrope_lab.training.run import load

SMALL = ModelConfig(backbone="transformer", dim=24, depth=1, num_heads=1, mlp_dim=16)
LINEAR = replace(SMALL, attention="linear")
QUICK = OptimConfig(epochs=1, warmup_epochs=0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return points(tmp_path_factory.mktemp("points"))


def settings(folder: Path) -> dict[str, Any]:
    """Settings of a comparison or a study of points: one seed, one epoch, two encodings."""
    data = data_config("points", root=str(folder), batch_size=8)
    return dict(data=data, model=SMALL, optim=QUICK, encodings=["none", "liere:8"], seeds=1)


@pytest.fixture(scope="module")
def data(folder: Path) -> TokensModule:
    made = make_data(data_config("points", root=str(folder), batch_size=8))
    made.setup()
    assert isinstance(made, TokensModule)
    return made


def built(encoding: str, model: ModelConfig, data: TokensModule) -> TokenClassifier:
    torch.manual_seed(0)
    made = build_model(encoding, model, data)
    assert isinstance(made, TokenClassifier)
    return made.double().eval()


def padded(data: TokensModule) -> torch.Tensor:
    inputs, _ = next(iter(data.val_dataloader()))
    assert inputs.isnan().any(), "examples have as many points as they have"
    return inputs.double()


@pytest.mark.parametrize("model", [SMALL, LINEAR], ids=["softmax", "linear"])
@pytest.mark.parametrize("encoding", ["none", "sinusoidal+axial", "liere:8"])
def test_padded_packed_and_single_examples_agree(data: TokensModule, model: ModelConfig, encoding: str) -> None:
    classifier, inputs = built(encoding, model, data), padded(data)
    logits = classifier(inputs)
    alone = [one[~one.isnan().any(dim=1)] for one in inputs]
    torch.testing.assert_close(torch.cat([classifier(one[None]) for one in alone]), logits)
    tokens, positions = zip(*(one.split([classifier.channels, 3], dim=1) for one in alone), strict=True)
    torch.testing.assert_close(Transformer.forward(classifier, tokens, positions), logits)
    more = torch.cat([inputs, inputs.new_full((len(inputs), 5, inputs.shape[2]), torch.nan)], dim=1)
    torch.testing.assert_close(classifier(more), logits)


@pytest.mark.parametrize("encoding", ["none", "mixed", "liere", "sinusoidal"])
def test_outputs_depend_on_positions_and_not_on_order(data: TokensModule, encoding: str) -> None:
    classifier, inputs = built(encoding, SMALL, data), padded(data)
    order = torch.randperm(inputs.shape[1], generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(classifier(inputs[:, order]), classifier(inputs))
    _, before = predict(classifier.float(), data)
    _, after = predict(classifier, data, lambda batch: batch[:, torch.randperm(batch.shape[1])])
    torch.testing.assert_close(after, before, atol=1e-5, rtol=1e-5)
    moved = inputs.float().clone()
    moved[..., classifier.channels :] = moved[..., classifier.channels :].flip(-1) ** 2
    assert torch.allclose(classifier(moved), classifier(inputs.float()), atol=1e-6) == (encoding == "none")


def test_shuffling_does_not_change_a_model_without_encoding(data: TokensModule) -> None:
    classifier = built("none", SMALL, data).float()
    found = evaluate(classifier, data)
    assert found.shuffled_top1 == found.top1
    assert found.measures()["resolutions"][0]["size"] == []
    assert len(correct_shuffled(classifier, data)) == data.counts[1]


def test_linear_attention_runs_on_100_000_points(data: TokensModule) -> None:
    classifier = build_model("axial", LINEAR, data)
    inputs = torch.rand(1, 100_000, data.in_channels + 3, generator=torch.Generator().manual_seed(0))
    logits = classifier(inputs)
    logits.sum().backward()
    assert logits.isfinite().all()
    assert all(parameter.grad is None or parameter.grad.isfinite().all() for parameter in classifier.parameters())


def test_model_settings_are_passed_to_the_transformer(data: TokensModule) -> None:
    model = replace(SMALL, depth=2, num_heads=2, dim=32, share_layers=True, share_heads=True, layer_scale=0.1)
    classifier = built("sinusoidal+liere:4", model, data)
    assert (len(classifier.layers), len(classifier.encodings)) == (2, 1)
    assert classifier.absolute is not None
    assert tuple(classifier.unit) == data.scale
    assert classifier.encodings[0].generators().shape[1] == 1  # [axes, heads, blocks, b, b]


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("train --model.backbone vit", "--model.backbone must be transformer for --data points"),
        ("train --data digits --model.backbone transformer --model.patch_size 1", "be vit or swin for --data digits"),
        ("train --optim.train_sizes 8,16", "is for data on a lattice, got 8, 16 with --data points"),
        ("train --encoding learned", "encoding must not have a learned table or a score bias"),
        ("train --data.augment.flip true", "--data.augment.flip is for digits"),
        ("compare --scales 0.5,2", "--scales is for data on a lattice"),
        ("study accuracy,resolution", "Input size needs patches on a lattice, got points, whose tokens are at any"),
        ("study accuracy,dense", "needs data for the task segment or detect, got points"),
    ],
)
def test_options_that_need_a_lattice_raise_one_line(
    folder: Path, tmp_path: Path, typed: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command, *rest = typed.split()
    own = [] if "--data" in rest else ["--data=points", f"--data.root={folder}"]
    names = [rest.pop(0)] if command == "study" else []
    small = [] if "--data" in rest else ["--model.dim=24", "--model.depth=1", "--epochs=1"]
    assert main([command, *names, *own, *small, *rest, "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert message in error


def test_data_without_a_lattice_have_the_studies_that_need_none() -> None:
    for name in (name for name in DATA_NAMES if not settings_of(name).lattice):
        left_out = {"resolution", "pooling", "finetune", "attention", "dense"}
        assert {*suitable(name)} == {*STUDIES} - left_out
    assert {*STUDIES} - {*suitable("digits")} == {"dense"}
    assert suitable("segments") == ["dense"]


@pytest.mark.slow
def test_killed_run_resumes_to_the_same_weights(folder: Path, tmp_path: Path) -> None:
    changes = {"jitter": 0.2, "drop_points": 0.3, "rotate": ["x", "y"]}
    chosen = data_config("points", root=str(folder), batch_size=8, size=10, augment=changes)
    config = RunConfig("mixed", data=chosen, model=replace(SMALL, dropout=0.1), optim=replace(QUICK, epochs=3))
    whole, again = (trained(config, tmp_path / name)[0] for name in ("whole", "again"))
    with pytest.raises(Killed):
        trained(config, tmp_path / "killed", on_epoch=die_in_epoch_2)
    resumed, _ = trained(config, tmp_path / "killed")
    assert same_weights(whole, again)
    assert same_weights(whole, resumed)
    assert isinstance(load(tmp_path / "killed")[2].model, TokenClassifier)
    assert main(["evaluate", str(tmp_path / "killed")]) == 0
    measured = json.loads((tmp_path / "killed" / "evaluation.json").read_text())
    assert 0 <= measured["shuffled_top1"] <= 1
    assert main(["evaluate", str(tmp_path / "killed"), "--sizes", "8"]) == 2


@pytest.mark.slow
def test_compare_command_writes_a_report_for_time_series(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    waves(tmp_path / "waves")
    options = ["--model.dim=16", "--model.depth=1", "--model.num_heads=1", "--model.mlp_dim=16", "--epochs=1"]
    options += ["--seeds=1", "--encodings=none,sinusoidal,mixed", f"--data.root={tmp_path / 'waves'}", f"--out={out}"]
    assert main(["compare", "--data=points", *options]) == 0
    assert "top-1" in capsys.readouterr().out.lower()
    page = (out / "report" / "index.html").read_text()
    assert "waves" in page
    result = StudyResult.read(out / "results.json")
    titles = [table.title for table in result.findings.tables]
    assert "Costs" in titles
    assert not any("input sizes" in title for title in titles)
    assert not result.findings.pictures
    assert "permuted among its tokens" in (result.findings.tables[0].note or "")


def test_default_encodings_fit_tokens_without_a_lattice(folder: Path) -> None:
    config = CompareConfig(data=data_config("points", root=str(folder)), model=SMALL)
    assert config.encodings == ["sinusoidal" if name == "learned" else name for name in ENCODINGS]
    assert CompareConfig().encodings == ENCODINGS


OTHERS = ["data-efficiency", "capacity", "sharing", "model-size", "generators", "learning"]


@pytest.mark.parametrize(
    "name",
    ["accuracy", "shuffle", "training-efficiency", *(pytest.param(each, marks=pytest.mark.slow) for each in OTHERS)],
)
def test_studies_of_tokens_have_findings(folder: Path, tmp_path: Path, name: str) -> None:
    config = StudyConfig(**settings(folder), out=str(tmp_path))
    result = StudyResult.read(run_study(find_study(name), config, command="torchrope study", console=QUIET))
    assert result.findings.answer
    assert result.findings.tables[0].rows


@pytest.mark.slow
def test_compare_caches_measures_of_points(folder: Path, tmp_path: Path) -> None:
    config = CompareConfig(**settings(folder), out=str(tmp_path))
    first, again = (compare(config, command="torchrope compare", console=QUIET).read_text() for _ in range(2))
    assert json.loads(first)["findings"] == json.loads(again)["findings"]
