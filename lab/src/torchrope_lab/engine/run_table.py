"""Settings, quality and learning curve of a run of `torchrope train`. Does not import torch."""

from pathlib import Path
from typing import Any

from torchrope_lab.files import CURVE, EVALUATION, RESULTS, read_curve, read_mapping
from torchrope_lab.results import Axis, Column, Figure, Findings, RunFacts, StudyResult, Table
from torchrope_lab.settings.run_config import CONFIG, flat

RESULT = "runs.json"
_QUALITIES = {"val_top1": "Top-1", "val_miou": "mIoU", "val_ap": "AP"}
_CHANGE_QUALITY = ("crop_ratio", "crop", "scales", "flip")
"""Options of `torchrope evaluate` that change the quality at the training size; it writes them if they are given."""


def write_run(folder: Path) -> None:
    """Write `folder/runs.json` about the run of `torchrope train` in a folder, if there is one."""
    if (folder / RESULTS).exists() or not (folder / CONFIG).exists():
        return
    stored = read_mapping(folder / CONFIG, CONFIG)
    if "encoding" not in stored:
        return  # a comparison that was stopped before its first result, or settings of another program
    settings, curve = flat(stored), read_curve(folder / CURVE)
    seconds = sum(row.get("seconds", 0.0) for row in curve)
    StudyResult(
        study="runs",
        title="Training run",
        question="Which quality did the run reach?",
        sources=(),
        findings=_findings({**_quality(folder, settings, curve), "seconds": seconds}, settings, curve),
        data=None,
        run=RunFacts(config=settings, seconds=seconds),
        unfinished=[] if len(curve) == settings.get("optim.epochs") else [folder.name],
    ).write(folder / RESULT)


def _quality(folder: Path, settings: dict[str, Any], curve: list[dict[str, float]]) -> dict[str, Any]:
    """Return the cells of the run's quality: after the last epoch, or evaluated with its own settings."""
    cells: dict[str, Any] = dict.fromkeys(("measure", "quality", "low", "high"))
    for key, title in _QUALITIES.items():
        if curve and key in curve[-1]:
            cells |= {"measure": title, "quality": 100 * curve[-1][key]}
    if (folder / EVALUATION).exists():
        evaluated = read_mapping(folder / EVALUATION, EVALUATION)
        own = all(evaluated[name] == settings.get(f"data.{name}") for name in _CHANGE_QUALITY if name in evaluated)
        share = next((evaluated[name] for name in ("top1", "miou", "ap") if own and name in evaluated), None)
        match share, evaluated.get("interval"):
            case int() | float(), [int() | float() as low, int() | float() as high]:
                cells |= {"quality": 100 * share, "low": 100 * low, "high": 100 * high}
    return cells


def _findings(cells: dict[str, Any], settings: dict[str, Any], curve: list[dict[str, float]]) -> Findings:
    """Build the table, the figure and the answer."""
    columns = [
        Column("name", "Encoding"),
        Column("seed", "Seed", digits=0),
        Column("measure", "Measure"),
        Column("quality", "Quality", "%", 1, low="low", high="high"),
        Column("epochs", "Epochs", digits=0),
        Column("seconds", "Training", "s", 0),
    ]
    named = {"name": settings.get("encoding"), "seed": settings.get("seed")}
    figure = Figure(
        name="curve-of-run",
        kind="lines",
        title="Quality while training",
        alt="Quality on the validation examples after every epoch.",
        x=Axis("epoch", "Epoch"),
        y=Axis("quality", "Quality", "%"),
        rows=[{"epoch": row["epoch"], "quality": 100 * row[key]} for row in curve for key in _QUALITIES if key in row],
    )
    answer = "The run has not finished an epoch."
    if cells["quality"] is not None:
        answer = f"encoding {named['name']}, seed {named['seed']} reached {cells['measure']} {cells['quality']:.1f} %."
    note = "The interval is that of `torchrope evaluate`, where the run was evaluated with its own settings."
    rows = [{**named, **cells, "epochs": len(curve)}]
    return Findings(answer, [Table("Run", columns, rows, note=note)], [figure])
