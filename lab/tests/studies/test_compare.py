"""The comparison: its conclusion, cost claims under noise, and examples."""

import io
import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from rich.console import Console

from torchrope.files import write_whole
from torchrope_lab.conclusion import Conclusion
from torchrope_lab.data.data_config import data_config
from torchrope_lab.engine.measured import known_costs, relative_costs
from torchrope_lab.engine.provenance import machine
from torchrope_lab.results import Findings, StudyResult
from torchrope_lab.settings.compare_config import CompareConfig
from torchrope_lab.settings.run_config import ExecutionConfig, ModelConfig, OptimConfig, plain
from torchrope_lab.statistics import conclude
from torchrope_lab.studies import compare as compare_module
from torchrope_lab.studies.compare import compare
from torchrope_lab.studies.compare_findings import _images


def small(out: Path, **changes: object) -> CompareConfig:
    given: dict = dict(
        data=data_config("digits", train_size=80, val_size=40),
        model=ModelConfig(dim=16, depth=1, num_heads=1, mlp_dim=16, patch_size=[2]),
        optim=OptimConfig(epochs=1, warmup_epochs=0),
        encodings=["none", "mixed"],
        seeds=1,
        scales=[1.0],
        out=str(out),
    )
    return CompareConfig(**{**given, **changes})


def run(config: CompareConfig) -> StudyResult:
    return StudyResult.read(compare(config, command="torchrope compare", console=Console(file=io.StringIO())))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A comparison with one seed; tests that let it grow take a copy."""
    out = tmp_path_factory.mktemp("trained") / "out"
    run(small(out))
    return out


@pytest.fixture
def compared(trained: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(trained, tmp_path / "compared"))


def test_folder_that_another_comparison_takes_at_the_same_time_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = yaml.safe_dump(plain(small(tmp_path, optim=OptimConfig(epochs=2, warmup_epochs=0))))
    extended = compare_module._extended

    def take(folder: Path, config: CompareConfig) -> CompareConfig:
        found = extended(folder, config)
        if not (tmp_path / "config.yaml").exists():
            write_whole(tmp_path / "config.yaml", other)
        return found

    monkeypatch.setattr(compare_module, "_extended", take)
    with pytest.raises(ValueError, match=r"of the same configuration, got .* with optim.epochs 2 instead of 1$"):
        run(small(tmp_path))
    assert (tmp_path / "config.yaml").read_text() == other
    assert [*tmp_path.iterdir()] == [tmp_path / "config.yaml"]


def test_costs_are_relative_to_none_where_it_is_there() -> None:
    seconds = {"mixed": [2.0, 4.0], "none": [1.0, 2.0]}
    assert relative_costs(seconds)["mixed"].tolist() == [2.0, 2.0]
    assert relative_costs({"mixed": [2.0, 4.0]})["mixed"].tolist() == [1.0, 1.0]
    assert relative_costs({}) == {}


@pytest.mark.slow
def test_costs_of_another_machine_or_torch_are_measured_again(compared: Path) -> None:
    file, names = compared / "runs" / "costs.json", ["none", "mixed"]
    stored = json.loads(file.read_text())
    assert known_costs(file, names, precision="float32") == stored["costs"]
    assert known_costs(file, [*names, "axial"], precision="float32") is None
    file.write_text(json.dumps({**stored, "machine": {**stored["machine"], "cpu": "another"}}))
    assert known_costs(file, names, precision="float32") is None
    assert known_costs(file, names, precision="float32", anywhere=True) == stored["costs"]  # on a cluster
    file.write_text(json.dumps({**stored, "torch": "1.0"}))
    assert known_costs(file, names, precision="float32", anywhere=True) is None
    file.write_text(json.dumps(stored["costs"]))  # as it was stored without a machine
    assert known_costs(file, names, precision="float32") is None
    run(small(compared))
    assert json.loads(file.read_text())["machine"] == machine()


@pytest.mark.slow
def test_costs_are_measured_in_the_precision_of_the_runs(tmp_path: Path) -> None:
    run(small(tmp_path, encodings=["none"], run=ExecutionConfig(on_nan="ignore", precision="bf16")))
    file = tmp_path / "runs" / "costs.json"
    assert json.loads(file.read_text())["precision"] == "bf16"
    assert known_costs(file, ["none"], precision="bf16") is not None
    assert known_costs(file, ["none"], precision="float32") is None


def test_dry_run_of_a_comparison_writes_nothing(trained: Path, tmp_path: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in trained.rglob("*")}
    for out, changes, counts in [
        (trained, {"seeds": 2}, "2 of 4"),
        (trained, {}, "0 of 2"),
        (tmp_path / "new", {}, "2 of 2"),
    ]:
        console = Console(file=io.StringIO(), width=80)
        compare(small(out, **changes), command="torchrope compare", console=console, dry_run=True)
        text = console.file.getvalue()  # type: ignore[attr-defined]
        assert f"runs to train or measure: {counts}, " in text
        assert ("seed 1" in text) == ("seeds" in changes)
    assert {path: path.stat().st_mtime_ns for path in trained.rglob("*")} == before
    assert not (tmp_path / "new").exists()


def test_answer_follows_from_the_predictions_that_are_kept(compared: Path) -> None:
    found = run(small(compared, seeds=2))
    assert found.conclusion is not None
    conclusion = Conclusion.from_dict(found.conclusion)
    assert found.findings.answer == conclusion.sentence()
    assert (conclusion.seeds, conclusion.examples) == (2, 40)
    shown = {row["name"]: (row["low"], row["high"]) for row in found.findings.tables[0].rows}
    for name, ends in conclusion.intervals.items():
        assert shown[name] == pytest.approx([100 * end for end in ends], abs=20)  # of all pairs, and of one by itself
    assert found.data is not None
    assert found.data.chance == pytest.approx(conclusion.chance)
    assert conclusion.margin == 0.01
    assert Conclusion.from_dict(run(small(compared, seeds=2, margin=0.2)).conclusion).margin == 0.2


def test_stored_answer_cannot_contradict_the_conclusion(tmp_path: Path) -> None:
    right = {"a": [1] * 380 + [0] * 20, "b": [0] * 20 + [1] * 380, "none": [1] * 160 + [0] * 240}
    conclusion = conclude(right, chance=0.1)
    result = StudyResult("compare", "t", "q?", (), Findings("Another answer."), None, conclusion=conclusion.as_dict())
    assert result.findings.answer == conclusion.sentence()
    stored = result.plain()
    stored["findings"]["answer"] = "b is best."
    (tmp_path / "results.json").write_text(json.dumps(stored))
    assert StudyResult.read(tmp_path / "results.json").findings.answer == conclusion.sentence()
    stored["conclusion"]["kind"] = "clear"
    (tmp_path / "results.json").write_text(json.dumps(stored))
    with pytest.raises(ValueError, match="kind must be one of best"):
        StudyResult.read(tmp_path / "results.json")


def test_results_of_a_finished_comparison_are_the_same_in_every_call(trained: Path, compared: Path) -> None:
    before = StudyResult.read(trained / "results.json").findings
    assert run(small(compared)).findings.plain() == before.plain()


def test_results_name_classes_confusions_and_examples(trained: Path) -> None:
    found = StudyResult.read(trained / "results.json")
    tables = {table.title: table for table in found.findings.tables}
    assert [row["class"] for row in tables["Accuracy by class"].rows] == [str(digit) for digit in range(10)]
    assert sum(row["examples"] for row in tables["Accuracy by class"].rows) == 40
    [confusion] = [figure for figure in found.findings.figures if figure.name == "confusion"]
    by_class: dict = {}
    for row in confusion.rows:
        by_class[row["true"]] = by_class.get(row["true"], 0) + row["share"]
    assert all(share == pytest.approx(100) for share in by_class.values())
    assert [figure.name for figure in found.findings.figures] == ["top1", "costs", "curves", "losses", "confusion"]
    [examples] = found.findings.pictures
    for index, row in enumerate(examples.rows):
        lines = []
        for name in [row["name"] for row in tables["Results"].rows]:
            [file] = (trained / "runs").glob(f"digits-{name}-seed0-*/result.json")
            lines.append(f"{name}: {json.loads(file.read_text())['predicted'][index]} (1 of 1)")
        assert row.panels == {"\n".join(lines): ""}


def test_examples_of_any_data_are_pictures() -> None:
    assert _images(torch.rand(3, 1, 8, 8)).shape == (3, 1, 40, 40)
    assert _images(torch.rand(3, 7, 64, 48)).shape == (3, 1, 64, 48)
    clips = torch.rand(2, 1, 12, 20, 30)
    strips = _images(clips).unflatten(-1, (4, 32))  # frames 0, 3, 6 and 9
    torch.testing.assert_close(strips[..., 1:-1], clips[:, :, ::3].movedim(2, 3))
