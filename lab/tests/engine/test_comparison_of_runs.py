"""What a comparison of trained runs says: its scope and verdicts, and encodings that count once."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from miniatures import waves
from rich.console import Console

from torchrope_lab.data.data_config import data_config
from torchrope_lab.engine.comparison import compare_runs, main_table
from torchrope_lab.engine.runs import Run, Trained
from torchrope_lab.results import Row, StudyResult
from torchrope_lab.settings.compare_config import CompareConfig
from torchrope_lab.settings.run_config import ModelConfig, OptimConfig, RunConfig
from torchrope_lab.studies.compare import compare

EXAMPLES = 300


def trained(
    encoding: str,
    accuracy: float,
    seed: int = 0,
    *,
    labels: Sequence[int] = tuple(range(3)) * (EXAMPLES // 3),
    among: int = 3,
) -> Trained:
    """A run whose accuracy is this; wrong predictions are of the next class, among the first of all classes."""
    random = np.random.default_rng([seed, *encoding.encode()])
    right = random.random(len(labels)) < accuracy
    predicted = [
        label if hit and label < among else (label + 1) % among for label, hit in zip(labels, right, strict=True)
    ]
    rows = [{"epoch": 1, "val_top1": accuracy, "val_loss": 1 - accuracy}]
    run = Run(RunConfig(encoding=encoding, seed=seed))
    return Trained(run, Path("nowhere"), list(labels), predicted, float(random.random()), rows, 1.0)


def runs(seeds: int, **accuracies: float) -> list[Trained]:
    return [trained(name, share, seed) for name, share in accuracies.items() for seed in range(seeds)]


def rows_of(found: list[Trained]) -> dict[str, Row]:
    return {str(row["name"]): row for row in main_table(compare_runs(found), "Results").rows}


@pytest.mark.parametrize(("seeds", "scope", "verdict"), [
    (1, "models", "behind (provisional)"), (3, "encodings", "behind (provisional)"), (5, "encodings", "behind"),
])  # fmt: skip
def test_verdict_is_provisional_below_five_seeds(seeds: int, scope: str, verdict: str) -> None:
    found = runs(seeds, none=0.3, mixed=0.9)
    assert compare_runs(found).conclusion.as_dict()["scope"] == scope
    assert rows_of(found)["none"]["verdict"] == verdict


def test_equal_functions_count_once_and_are_named() -> None:
    found = runs(3, none=0.3, axial=0.9, mixed=0.6)
    copies = [replace(each, run=Run(replace(each.run.config, encoding="mrope"))) for each in found[3:6]]
    comparison = compare_runs([*found, *copies])
    assert comparison.same == {"mrope": "axial"}
    assert comparison.conclusion == compare_runs(found).conclusion, "the same tests and the same level"
    shown = rows_of([*found, *copies])
    assert shown["mrope"]["verdict"] == "same as axial"
    assert shown["mrope"]["gap"] == shown["axial"]["gap"]


@pytest.mark.parametrize("change", ["loss", "answer", "curve", "diverged"])
def test_a_different_loss_or_prediction_is_another_function(change: str) -> None:
    found = runs(2, none=0.3, axial=0.9)
    copies = [replace(each, run=Run(replace(each.run.config, encoding="mrope"))) for each in found[2:]]
    if change == "loss":
        copies[1] = replace(copies[1], val_loss=0.123)
    elif change == "answer":
        copies[1] = replace(copies[1], predicted=[(kind + 1) % 3 for kind in copies[1].predicted])
    elif change == "curve":  # losses that are rounded to 0 at the end
        copies[1] = replace(copies[1], curve=[{**row, "train_loss": 0.5} for row in copies[1].curve])
    else:  # two models that diverged, with the same constant answer
        found, copies = ([replace(each, val_loss=None) for each in part] for part in (found, copies))
    assert compare_runs([*found, *copies]).same == {}


@pytest.mark.slow
def test_runs_of_axial_and_mrope_on_one_axis_are_the_same_function(tmp_path: Path) -> None:
    waves(tmp_path / "waves")
    config = CompareConfig(
        data=data_config("points", root=str(tmp_path / "waves")),
        model=ModelConfig(backbone="transformer", dim=16, depth=1, num_heads=1, mlp_dim=16),
        optim=OptimConfig(epochs=1, warmup_epochs=0),
        encodings=["axial", "mrope", "mixed"],
        seeds=1,
        out=str(tmp_path / "out"),
    )
    result = StudyResult.read(compare(config, command="torchrope compare", console=Console(quiet=True)))
    verdicts = {row["name"]: row["verdict"] for row in result.findings.tables[0].rows}
    assert verdicts["mrope"] == "same as axial"
    assert result.conclusion is not None
    assert set(result.conclusion["intervals"]) == {"axial", "mixed"}


def test_balanced_accuracy_is_beside_top1_where_classes_are_unequal() -> None:
    labels = [0] * 200 + [1] * 100
    found = runs(1, none=0.3)
    found = [replace(each, labels=labels, predicted=[0] * 250 + [1] * 50) for each in found]
    assert rows_of(found)["none"]["balanced"] == pytest.approx(100 * (1 + 0.5) / 2)
    assert "balanced" not in [column.key for column in main_table(compare_runs(runs(1, none=0.3)), "Results").columns]


def test_runs_that_finish_without_a_common_seed_are_no_error() -> None:
    early = [trained("none", 0.3, 0), trained("mixed", 0.9, 1), trained("axial", 0.9, 1)]
    comparison = compare_runs(early)
    assert set(comparison.groups) == {"mixed", "axial"}
    assert comparison.conclusion.seeds == 1
