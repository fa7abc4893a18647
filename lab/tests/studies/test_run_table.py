"""The table and the page of runs of `torchrope train`, of a sweep, and of a sweep of comparisons."""

import json
from pathlib import Path

import pytest
import yaml

from torchrope_lab.cli import main
from torchrope_lab.data.config import data_config
from torchrope_lab.results import StudyResult
from torchrope_lab.studies.run_table import write_runs
from torchrope_lab.training.config import OptimConfig, RunConfig, plain


def run(folder: Path, top1s: list[float], encoding: str = "mixed", seed: int = 0, epochs: int = 2) -> Path:
    """Write what a run of `torchrope train` writes, without weights."""
    folder.mkdir(parents=True)
    config = RunConfig(encoding=encoding, seed=seed, data=data_config(), optim=OptimConfig(epochs=epochs))
    (folder / "config.yaml").write_text(yaml.safe_dump(plain(config)))
    rows = [f"{epoch},0.5,{top1},3.5" for epoch, top1 in enumerate(top1s, 1)]
    (folder / "curve.csv").write_text("\n".join(["epoch,train_loss,val_top1,seconds", *rows]) + "\n")
    return folder


def test_report_shows_a_run_of_train(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = run(tmp_path / "mine", [0.5, 0.75])
    (out / "evaluation.json").write_text(json.dumps({"top1": 0.75, "interval": [0.7, 0.8], "val_loss": 1.0}))
    assert main(["report", str(out)]) == 0
    text = capsys.readouterr().out
    assert "encoding mixed, seed 0 reached Top-1 75.0 %." in text
    assert "75.0 [70.0, 80.0]" in text
    page = (out / "report" / "index.html").read_text()
    assert "Quality while training" in page
    assert "&#34;optim.epochs&#34;: 2" in page or '"optim.epochs": 2' in page


def test_table_of_a_sweep_has_what_differs(tmp_path: Path) -> None:
    out = tmp_path / "sweep"
    for encoding in ("mixed", "axial"):
        for seed in (0, 1):
            run(
                out / f"encoding={encoding},seed={seed}",
                [0.4, 0.5 + 0.1 * seed + 0.2 * (encoding == "axial")],
                encoding,
                seed,
            )
    run(out / "encoding=none,seed=0", [0.3], "none")
    file = write_runs(out)
    assert file == out / "runs.json"
    result = StudyResult.read(file)
    table = result.findings.tables[0]
    assert [column.title for column in table.columns][1:3] == ["encoding", "seed"]
    values = {(row["option-encoding"], row["option-seed"]): row for row in table.rows}
    assert {key: row["quality"] for key, row in values.items()} == pytest.approx(
        {("mixed", "0"): 50, ("mixed", "1"): 60, ("axial", "0"): 70, ("axial", "1"): 80, ("none", "0"): 30}
    )
    assert values["axial", "1"]["seconds"] == 7.0
    assert result.findings.answer == "encoding axial, seed 1 reached Top-1 80.0 %, the highest of 5 runs."
    assert list(result.unfinished) == ["encoding=none,seed=0"]
    assert result.run.config["optim.epochs"] == 2
    assert "seed" not in result.run.config
    assert {row["run"] for row in result.findings.figures[0].rows} >= {
        "encoding axial, seed 0",
        "encoding none, seed 0",
    }
    assert write_runs(out) == file  # again, with its own file there


def test_folder_without_runs_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert write_runs(tmp_path) is None
    assert main(["report", str(tmp_path)]) == 2
    assert "has no JSON file: run one of them with --out" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_damaged_run_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = run(tmp_path / "mine", [0.5])
    (out / "config.yaml").write_text("- a\n")
    assert main(["report", str(out)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
