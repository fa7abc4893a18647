"""Answers of all studies stay within the word limit for any number of encodings, seeds and axes, and long names."""

import sys
from collections.abc import Sequence
from io import StringIO
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from sentences import MOST_WORDS, is_short

import torchrope as tr
from torchrope_lab.data.data_config import data_config
from torchrope_lab.engine.registry import STUDIES
from torchrope_lab.engine.runs import Measure, MeasuresOf, Run, Trained
from torchrope_lab.engine.study import Lab, find_study
from torchrope_lab.results import Findings
from torchrope_lab.settings.run_config import ModelConfig, OptimConfig
from torchrope_lab.settings.study_config import StudyConfig
from torchrope_lab.statistics import conclude
from torchrope_lab.studies import finetune, fourier
from torchrope_lab.training.models import build_model

EXAMPLES = 60
OWN = "mypackage.encodings.learned:Blocks"
ENCODINGS = [
    "none",
    "learned",
    "axial",
    "mixed",
    "liere:4",
    "liere:12",
    "comrope-ap:2",
    "learned+mixed",
    OWN,
    f"{OWN}:4",
]
MODELS = {
    "digits": ModelConfig(dim=24, depth=1, num_heads=2, mlp_dim=8, patch_size=[4]),
    "motion": ModelConfig(dim=24, depth=1, num_heads=2, mlp_dim=8, patch_size=[5, 10, 10]),
}


class Untrained(Trained):
    """A run whose model is the one at the start; what it predicts is random, better for some encodings than others."""

    data: Any
    measures: Sequence[Measure]

    def load(self, data: Any = None) -> tuple[Any, Any]:
        torch.manual_seed(self.run.seed)
        return build_model(self.encoding, self.run.config.model, self.data), self.data

    def measured(self, name: str) -> Any:
        return next(measure for measure in self.measures if measure.name == name).compute(*self.load())


class FakeLab(Lab):
    """Trains nothing."""

    def train(self, runs: Sequence[Run], measures: MeasuresOf = lambda _: (), *_: Any, **__: Any) -> list[Trained]:
        return [self.faked(run, measures(run)) for run in runs]

    def faked(self, run: Run, measures: Sequence[Measure]) -> Trained:
        labels = [target for _, targets in self.data.val_dataloader() for target in targets.tolist()]
        known = list(dict.fromkeys([*ENCODINGS, run.encoding])).index(run.encoding)
        random = np.random.default_rng([run.seed, known])
        accuracy = 0.3 if run.encoding in ("none", "learned") else 0.5 + 0.4 * (known % 3) / 2
        right = random.random(len(labels)) < accuracy
        predicted = [label if each else (label + 1) % 10 for label, each in zip(labels, right, strict=True)]
        epochs = run.config.optim.epochs
        curve = [{"epoch": e, "val_top1": accuracy * e / epochs, "seconds": 1.0} for e in range(1, epochs + 1)]
        trained = Untrained(run, Path("nowhere"), labels, predicted, 1.0, curve, 1.0)
        trained.data, trained.measures = self.data, measures
        return trained


@pytest.fixture(autouse=True)
def own_encoding(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType(OWN.partition(":")[0])
    module.Blocks = type("Blocks", (tr.LieRE,), {"__module__": module.__name__})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)


def lab(folder: Path, data: str, seeds: int) -> Lab:
    config = StudyConfig(
        data=data_config(data, train_size=100, val_size=EXAMPLES),
        model=MODELS[data],
        optim=OptimConfig(epochs=4, warmup_epochs=0),
        encodings=list(ENCODINGS),
        seeds=seeds,
        out=str(folder),
    )
    return FakeLab(config, (), Console(file=StringIO()))


def check(found: Findings) -> None:
    assert is_short(found.answer)
    assert found.answer.endswith(".")
    assert all(len(each.caption.split()) <= MOST_WORDS for each in (*found.figures, *found.pictures))


ON_MOTION = ("shuffle", "finetune")  # the others wait for `make slow` with three axes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "data", "seeds"),
    [
        pytest.param(name, data, seeds, marks=pytest.mark.slow if data == "motion" and name not in ON_MOTION else ())
        for name in STUDIES
        if name not in ("dense", "complexity", "probes")
        for data, seeds in (("digits", 3), ("motion", 1))
    ],
)
def test_answers_are_short(name: str, data: str, seeds: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finetune, "initialise", lambda model, source: None)
    monkeypatch.setattr(fourier, "LATTICE", (4, 5))
    check(find_study(name).find(lab(tmp_path, data, seeds)))


@pytest.mark.parametrize(
    ("answer", "allowed"),
    [
        ("a.b:C gains 1.5 points [0.5, 2.5] over liere:8. With one training each.", True),
        ("One. Two. Three.", False),
        ("One? Two! Three.", False),
        (f"{'word ' * MOST_WORDS}.", False),
        ("word " * MOST_WORDS, True),
        ("", True),
    ],
)
def test_long_answers_are_found(answer: str, allowed: bool) -> None:
    assert is_short(answer) == allowed
    assert Findings(answer).answer == answer  # a long one does not lose the results of a study


@pytest.mark.parametrize("seeds", [1, 2, 3])
@pytest.mark.parametrize("accuracy", [0.1, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("examples", [8, 60, 2000])
def test_sentences_of_conclusions_are_short_with_their_gain(seeds: int, accuracy: float, examples: int) -> None:
    random = np.random.default_rng(0)
    names = ["none", "learned", "axial", "mixed", "liere:8", "liere", "comrope-ap", OWN]
    for spread in (0.0, 0.02, 0.3):
        shares = {name: min(1.0, accuracy + spread * at / 7) for at, name in enumerate(names)}
        right = {name: random.random((seeds, examples)) < share for name, share in shares.items()}
        found = conclude(right, chance=0.1)
        said = found.sentence()
        check(Findings(said))
        if found.best not in (None, "none"):
            assert "over none" in said or "whether anything was learned" in said
