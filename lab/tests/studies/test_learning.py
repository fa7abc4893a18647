"""The study of learned generators: its runs, and differences computed from their predictions."""

from io import StringIO
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from torchrope.encodings import Encoding
from torchrope.models import ViT
from torchrope_lab.data.build import make_data
from torchrope_lab.data.config import data_config
from torchrope_lab.studies.engine.config import StudyConfig
from torchrope_lab.studies.engine.study import Lab, find_study
from torchrope_lab.studies.learning import (
    FROZEN,
    LEVELS,
    best_start,
    num_generator_parameters,
    restarts,
    runs_at,
    wider_mlp,
)
from torchrope_lab.training.config import ModelConfig, OptimConfig, RunConfig
from torchrope_lab.training.models import build_model
from torchrope_lab.training.optim import learning_rates
from torchrope_lab.training.run import train

MODEL = ModelConfig(dim=32, depth=2, num_heads=2, mlp_dim=8, patch_size=[4], pool="mean")
NAMES = ("mixed", "liere:8", "comrope-ld", "string:8")


def a_lab(tmp_path: Path, **settings: object) -> Lab:
    given: dict = {
        "data": data_config(train_size=40, val_size=20),
        "model": MODEL,
        "optim": OptimConfig(epochs=1),
        "out": str(tmp_path),
        "seeds": 2,
    }
    return Lab(StudyConfig(**{**given, **settings}), [], Console(file=StringIO()))


def generators(config: ModelConfig, encoding: str, seed: int = 0) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Generators and all other weights of an untrained model."""
    data = make_data(data_config())
    data.setup()
    torch.manual_seed(seed)
    model = build_model(encoding, config, data)
    drawn = [each.generators().detach() for each in model.modules() if isinstance(each, Encoding)]
    others = [value for name, value in model.state_dict().items() if not name.startswith("encodings.")]
    return drawn, others


@pytest.mark.parametrize("name", NAMES)
def test_another_start_changes_the_generators_and_nothing_else(name: str) -> None:
    before, weights = generators(MODEL, name)
    random_state = torch.get_rng_state()
    after, same = generators(ModelConfig(**{**vars(MODEL), "encoding_seed": 5}), name)
    assert all(not torch.equal(one, other) for one, other in zip(before, after, strict=True))
    assert all(torch.equal(one, other) for one, other in zip(weights, same, strict=True))
    assert torch.equal(torch.get_rng_state(), random_state)  # dropout and the like draw what they would have


@pytest.mark.parametrize("name", NAMES)
def test_as_many_parameters_in_the_mlp_as_in_the_generators(name: str, tmp_path: Path) -> None:
    lab = a_lab(tmp_path)
    width = wider_mlp(lab, name)
    added = sum(p.numel() for p in lab.blueprint(lab.run(name, model={"mlp_dim": width})).parameters())
    added -= sum(p.numel() for p in lab.blueprint(lab.run(name)).parameters())
    of_one_channel = 2 * (2 * 32 + 1)
    assert 0 <= added - num_generator_parameters(lab, name) < of_one_channel


def test_frozen_generators_stay_and_faster_ones_move_further(tmp_path: Path) -> None:
    def moved(factor: float) -> float:
        config = RunConfig(
            "mixed", 0, data_config(train_size=40, val_size=20), MODEL, OptimConfig(epochs=1, encoding_lr=factor)
        )
        data = make_data(config.data)
        data.setup()
        torch.manual_seed(0)
        module, _ = train(config, data, tmp_path / f"{factor}")
        torch.manual_seed(0)
        start = next(iter(generators(MODEL, "mixed")[0]))
        return (module.model.encodings[0].generators().detach() - start).norm().item()

    frozen, slow, fast = moved(0.0), moved(1.0), moved(50.0)
    assert frozen == 0.0
    assert 0 < 10 * slow < fast


def test_rate_of_generators_is_a_factor_on_that_of_their_layer() -> None:
    model = ViT((8, 8), patch_size=4, dim=32, depth=3, num_heads=2, encoding="learned+bias+comrope-ld")
    plain = learning_rates(model, OptimConfig(lr=1e-3, layer_decay=0.5))
    faster = learning_rates(model, OptimConfig(lr=1e-3, layer_decay=0.5, encoding_lr=20.0))
    for name, parameter in model.named_parameters():
        factor = 20.0 if name.startswith(("encodings.", "biases.")) else 1.0
        assert faster[parameter] == pytest.approx(factor * plain[parameter]), name
    assert len({faster[each.upper] for each in model.encodings}) == 3


def test_arms_differ_only_in_the_named_setting(tmp_path: Path) -> None:
    lab = a_lab(tmp_path)
    plan = {level: runs_at(lab, "mixed", level, settings) for level, settings in LEVELS.items()}
    assert {level: runs[0].config.optim.encoding_lr for level, runs in plan.items()} == {
        FROZEN: 0.0,
        "× 0.1": 0.1,
        "× 1": 1.0,
        "× 10": 10.0,
        "× 50": 50.0,
        "× 200": 200.0,
        "frozen, wider MLP": 0.0,
    }
    assert plan["× 1"][0].key == lab.run("mixed").key  # the run that every study has
    assert len({runs[0].key for runs in plan.values()}) == len(plan)
    starts = restarts(lab, ["mixed"])["mixed"]
    assert starts[0][1].key == plan[FROZEN][1].key
    assert len({run.key for runs in starts.values() for run in runs}) == 3 * 2


def test_best_start_is_measured_on_other_examples() -> None:
    rng = np.random.default_rng(0)
    chance = rng.integers(0, 2, (6, 4, 20_000)).astype(float)  # (starts, seeds, examples), all starts alike
    assert abs(best_start(chance).mean() - 0.5) < 0.005  # 2 standard deviations are 0.0035
    better = np.where(rng.random((3, 2, 4000)) < np.array([0.5, 0.7, 0.4])[:, None, None], 1.0, 0.0)
    assert np.array_equal(best_start(better), better[1])


@pytest.mark.slow
def test_study_of_tiny_models(tmp_path: Path) -> None:
    lab = a_lab(tmp_path, encodings=["mixed", "axial"])
    findings = find_study("learning").find(lab)
    tables = {table.title: table for table in findings.tables}
    pooled = next(table for title, table in tables.items() if title.startswith("Gain"))
    by_rate = {row["rate"]: row for row in pooled.rows}
    of_rates = {row["rate"]: row for row in tables["Top-1 by the rate of the generators"].rows}
    for rate in ("× 1", "× 200"):  # the mean over one encoding is that encoding
        gain = of_rates[rate]["top1"] - of_rates[FROZEN]["top1"]
        assert by_rate[rate]["ahead"] == pytest.approx(gain, abs=1e-9)
        assert of_rates[rate]["ahead"] == pytest.approx(gain, abs=1e-9)
    assert of_rates[FROZEN]["moved"] == 0
    assert 0 < of_rates["× 0.1"]["moved"] < of_rates["× 10"]["moved"] < of_rates["× 200"]["moved"]
    tuned = tables["Fine-tuned after a swap, by the rate of the generators"]
    assert [row["rate"] for row in tuned.rows] == ["× 1", "× 10", "× 50", "× 200", "none"]
    assert any("axial" in note for note in findings.notes)


def test_study_without_learned_generators_has_an_answer(tmp_path: Path) -> None:
    findings = find_study("learning").find(a_lab(tmp_path, encodings=["axial", "none"]))
    assert "axial" in findings.answer
    assert not findings.tables
