"""The study of learned generators: its runs, and differences computed from their predictions."""

from functools import partial
from pathlib import Path

import labs
import pytest
import torch

from torchrope.models import ViT
from torchrope_lab.data.build import make_data
from torchrope_lab.data.data_config import data_config
from torchrope_lab.engine.study import find_study
from torchrope_lab.settings.run_config import ModelConfig, OptimConfig, RunConfig
from torchrope_lab.studies.learning import FROZEN, LEARNED, find
from torchrope_lab.training.models import build_model
from torchrope_lab.training.optim import learning_rates
from torchrope_lab.training.run import train

MODEL = ModelConfig(dim=32, depth=2, num_heads=2, mlp_dim=8, patch_size=[4], pool="mean")


lab = partial(labs.lab, model=MODEL, data=data_config(train_size=40, val_size=20), seeds=2)


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
        start = build_model("mixed", MODEL, data)
        ends = (model.encodings[0].generators().detach() for model in (start, module.model))
        return torch.dist(*ends).item()

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


def test_levels_differ_only_in_the_rate_of_the_generators(tmp_path: Path) -> None:
    here = lab(tmp_path)
    plan = {level: here.run("mixed", **settings) for level, settings in find.levels.items()}  # type: ignore[union-attr]
    assert plan[LEARNED].key == here.run("mixed").key  # the run that every study has
    assert plan[FROZEN].key == here.run("mixed", optim={"encoding_lr": 0.0}).key != plan[LEARNED].key


@pytest.mark.slow
def test_study_of_tiny_models(tmp_path: Path) -> None:
    here = lab(tmp_path, "mixed", "axial")
    findings = find_study("learning").find(here)
    ahead, accuracy = findings.tables
    [row] = ahead.rows
    top1 = {row["generators"]: row["top1"] for row in accuracy.rows}
    assert (row["name"], row["generators"]) == ("mixed", LEARNED)
    assert row["change"] == pytest.approx(top1[LEARNED] - top1[FROZEN], abs=1e-9)
    assert list(here.left_out) == ["Left out: axial, whose generators are not learned."]


def test_study_without_learned_generators_has_an_answer(tmp_path: Path) -> None:
    findings = find_study("learning").find(lab(tmp_path, "axial", "none"))
    assert "axial" in findings.answer
    assert not findings.tables
