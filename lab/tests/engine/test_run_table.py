"""The table and the page of a run of `torchrope train`."""

import json
from pathlib import Path

import pytest
import yaml
from small_runs import Killed, die_in_epoch_2, small_run, trained

from torchrope_lab.cli import main
from torchrope_lab.data.data_config import data_config
from torchrope_lab.engine.run_table import write_run
from torchrope_lab.results import StudyResult
from torchrope_lab.settings.compare_config import CompareConfig
from torchrope_lab.settings.run_config import OptimConfig, RunConfig, plain


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


@pytest.mark.parametrize(
    ("options", "own"),
    [
        ({"crop_ratio": 0.1}, False),
        ({"crop_ratio": 0.875}, True),  # the run's
        ({"flip": True}, False),
        ({"scales": [0.5, 1.0]}, False),
        ({"crop": 32}, False),
        ({"window_size": 4, "positions": "range"}, True),  # change other sizes only
    ],
)
def test_report_shows_an_evaluation_with_the_settings_of_the_run(
    options: dict[str, object], own: bool, tmp_path: Path
) -> None:
    out = run(tmp_path / "mine", [0.5, 0.75])
    settings = plain(RunConfig(data=data_config("imagenet", crop_ratio=0.875), optim=OptimConfig(epochs=2)))
    (out / "config.yaml").write_text(yaml.safe_dump(settings))
    measures = {"top1": 0.9, "interval": [0.8, 0.95], "val_loss": 1.0, **options}
    (out / "evaluation.json").write_text(json.dumps(measures))
    write_run(out)
    shown = StudyResult.read(out / "runs.json").findings.tables[0].rows[0]
    assert shown["quality"] == pytest.approx(90 if own else 75)
    assert (shown["low"] is not None) == own


def test_run_with_epochs_left_is_unfinished(tmp_path: Path) -> None:
    write_run(run(tmp_path / "mine", [0.3], epochs=2))
    result = StudyResult.read(tmp_path / "mine" / "runs.json")
    assert list(result.unfinished) == ["mine"]
    assert result.findings.tables[0].rows[0]["seconds"] == 3.5


def test_damaged_run_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = run(tmp_path / "mine", [0.5])
    (out / "config.yaml").write_text("- a\n")
    assert main(["report", str(out)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_comparison_without_results_is_no_run_of_train(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As one that was stopped before its first run had finished."""
    out = tmp_path / "mine"
    out.mkdir()
    (out / "config.yaml").write_text(yaml.safe_dump(plain(CompareConfig(data=data_config()))))
    assert main(["report", str(out)]) == 2
    assert "has no JSON file" in capsys.readouterr().err
    assert [*out.iterdir()] == [out / "config.yaml"]


def test_report_of_a_run_that_went_on_after_it_was_evaluated(tmp_path: Path) -> None:
    config, out = small_run(), tmp_path / "mine"
    with pytest.raises(Killed):
        trained(config, out, on_epoch=die_in_epoch_2)
    assert main(["evaluate", str(out)]) == 0
    of_one_epoch = (out / "evaluation.json").read_text()
    assert main(["report", str(out)]) == 0
    shown = StudyResult.read(out / "runs.json").findings.tables[0].rows[0]
    assert shown["quality"] == pytest.approx(100 * json.loads(of_one_epoch)["top1"])
    assert shown["low"] is not None
    _, history = trained(config, out)
    assert main(["report", str(out)]) == 0
    shown = StudyResult.read(out / "runs.json").findings.tables[0].rows[0]
    assert shown["quality"] == pytest.approx(100 * history.rows[-1]["val_top1"])
    assert shown["low"] is None
    (out / "evaluation.json").write_text(of_one_epoch)  # of these weights, after which a finished run trains no more
    trained(config, out)
    assert (out / "evaluation.json").exists()
