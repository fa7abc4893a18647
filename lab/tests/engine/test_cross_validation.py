"""Comparisons and studies in folds: each example is predicted by a model that was not trained on it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from labs import QUIET

from torchrope_lab.cli import main
from torchrope_lab.data.build import make_data
from torchrope_lab.data.data_config import data_config
from torchrope_lab.engine import study as study_module
from torchrope_lab.engine.folds import in_folds, pooled
from torchrope_lab.engine.runs import Job, Run
from torchrope_lab.engine.study import Lab, find_study, run_study
from torchrope_lab.engine.workers import run_job
from torchrope_lab.results import StudyResult
from torchrope_lab.settings.compare_config import CompareConfig
from torchrope_lab.settings.run_config import ModelConfig, OptimConfig, RunConfig
from torchrope_lab.settings.study_config import StudyConfig
from torchrope_lab.studies.compare import compare

DATA = data_config("digits", train_size=60, val_size=30, folds=3)
SETTINGS: dict[str, Any] = dict(
    data=DATA,
    model=ModelConfig(dim=16, depth=1, num_heads=1, mlp_dim=16, patch_size=[2]),
    optim=OptimConfig(epochs=1, warmup_epochs=0),
    encodings=["none", "mixed"],
    seeds=2,
)


def lab_of(out: Path, **settings: Any) -> Lab:
    return Lab(StudyConfig(**{**SETTINGS, **settings}, out=str(out)), (), QUIET)


def compared(out: Path) -> StudyResult:
    config = CompareConfig(**SETTINGS, scales=[1.0, 2.0], out=str(out))
    return StudyResult.read(compare(config, command="torchrope compare --folds 3", console=QUIET))


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("folds")
    compared(folder)
    return folder


def numbers(result: StudyResult) -> list[Any]:
    untimed = [table for table in result.findings.plain()["tables"] if table["title"] != "Costs"]
    return [
        [{key: cell for key, cell in row.items() if "ratio" not in key} for row in table["rows"]] for table in untimed
    ]


def test_conclusion_is_over_all_examples_of_every_seed(out: Path) -> None:
    result = StudyResult.read(out / "results.json")
    assert len(list(out.glob("runs/*/result.json"))) == 2 * 2 * 3
    assert result.conclusion is not None
    assert result.conclusion["seeds"] == 2
    assert result.conclusion["examples"] == 90
    assert result.unfinished == []
    [by_class] = [table for table in result.findings.tables if table.title == "Accuracy by class"]
    assert sum(row["examples"] for row in by_class.rows) == 90  # type: ignore[misc]


def test_predictions_of_folds_are_joined_in_the_order_of_the_examples(out: Path) -> None:
    lab = lab_of(out, seeds=1)
    [run] = lab.runs(["none"])
    [trained] = lab.train([run])
    whole = make_data(replace(DATA, folds=None))._made_datasets()
    assert trained.labels == [label for part in whole for label in part.labels.tolist()]  # type: ignore[attr-defined]
    folds = [lab.store.finished(fold) for fold in in_folds([run])]
    for fold, one in enumerate(folds):
        assert one is not None
        held_out = (lab.data.fold_of_examples == fold).numpy()
        assert np.array(trained.predicted)[held_out].tolist() == one.predicted
    assert trained.seconds == pytest.approx(sum(one.seconds for one in folds if one))
    losses = [one.val_loss for one in folds if one and one.val_loss is not None]
    assert trained.val_loss == pytest.approx(sum(losses) / 3)  # folds of 30 examples each
    assert pooled([one for one in folds[:2] if one], lab.data) == []


def test_interrupted_folds_resume_to_the_same_numbers(out: Path) -> None:
    before = numbers(StudyResult.read(out / "results.json"))
    files = sorted(out.glob("runs/*/result.json"))
    kept = {file: file.stat().st_mtime_ns for file in files[1:]}
    files[0].unlink()
    assert numbers(compared(out)) == before
    assert files[0].exists()
    assert {file: file.stat().st_mtime_ns for file in kept} == kept


def test_folds_that_other_processes_trained_in_any_order_are_resumed(tmp_path: Path) -> None:
    lab = lab_of(tmp_path, seeds=1)
    for run in reversed(in_folds(lab.runs(["none"]))):
        run_job(Job(run), lab.store.folder)  # as in a process that has read the data for another fold
    [trained] = lab.train(lab.runs(["none"]))
    assert len(trained.labels) == 90


def test_run_with_a_fold_missing_is_left_out(out: Path) -> None:
    lab = lab_of(out)
    finished = [lab.store.finished(run) for run in in_folds(lab.runs(["none"]))]
    assert [one.seed for one in pooled([one for one in finished[:-1] if one], lab.data)] == [0]
    assert [one.seed for one in pooled([one for one in finished[1:] if one], lab.data)] == [1]


def test_study_of_accuracy_uses_the_runs_of_the_comparison(out: Path) -> None:
    times = {file: file.stat().st_mtime_ns for file in out.glob("runs/*/result.json")}
    file = run_study(find_study("accuracy"), lab_of(out).config, command="torchrope study", console=QUIET)
    assert {each: each.stat().st_mtime_ns for each in out.glob("runs/*/result.json")} == times
    found = json.loads(file.read_text())["findings"]
    top1 = {row["name"]: row["top1"] for row in found["tables"][0]["rows"]}
    results = StudyResult.read(out / "results.json").findings.tables[0].rows
    assert top1 == {row["name"]: row["top1"] for row in results}


def test_fold_is_part_of_the_key() -> None:
    plain, first, second = (
        Run(RunConfig("mixed", seed=0, data=data_config("digits", folds=folds, fold=fold)))
        for folds, fold in ((None, 0), (3, 0), (3, 1))
    )
    assert len({plain.key, first.key, second.key}) == 3
    assert first.kind == second.kind != plain.kind


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["compare", "--folds", "1"], "--folds must be 2 or more, got 1"),
        (["compare", "--folds", "500"], "at most 174, the examples of the smallest class, got 500"),
        (["study", "shuffle", "--folds", "3"], "Shuffled patches does not support --data.folds, got 3"),
        (["study", "accuracy,shuffle", "--folds", "2"], "Shuffled patches does not support --data.folds, got 2"),
    ],
)
def test_folds_that_are_impossible_end_in_one_line(
    command: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, "--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.strip().endswith(message)
    assert not (tmp_path / "out" / "runs").exists()


def test_all_studies_in_folds_are_those_that_support_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run: list[str] = []
    monkeypatch.setattr(study_module, "run_study", lambda study, *_, **__: run.append(study.name))
    assert main(["study", "all", "--folds", "2", "--dry-run", "--out", str(tmp_path)]) == 0
    assert {"accuracy", "pooling", "complexity"} <= {*run}
    assert not {"shuffle", "resolution"} & {*run}
    told = capsys.readouterr().out.splitlines()[0]
    assert told.startswith("left out, which do not support --folds: data-efficiency, ")
    assert "shuffle" in told
