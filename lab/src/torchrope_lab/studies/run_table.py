"""Settings, quality and learning curves of the runs of `torchrope train`, or of a sweep. Does not import torch."""

from pathlib import Path
from typing import Any, NamedTuple

from torchrope_lab.files import CURVE, EVALUATION, read_curve, read_mapping
from torchrope_lab.results import Axis, Column, Figure, Findings, Row, RunFacts, StudyResult, Table
from torchrope_lab.studies.config import RESULTS
from torchrope_lab.training.config import CONFIG, flat

RESULT = "runs.json"
_QUALITIES = {"val_top1": "Top-1", "val_miou": "mIoU", "val_ap": "AP"}
_CHANGE_QUALITY = ("crop_ratio", "crop", "scales", "flip")
"""Options of `torchrope evaluate` that change the quality at the training size; it writes them if they are given."""


class _Run(NamedTuple):
    """A run of `torchrope train`, or a comparison: all settings by full name, cells of the table, learning curve."""

    settings: dict[str, Any]
    cells: dict[str, Any]
    curve: list[dict[str, float]]


def write_runs(folder: Path) -> Path | None:
    """Write `folder/runs.json` about the run in a folder, or the runs of a sweep in its subfolders.

    Args:
        folder: `--out` of `torchrope train`, or of `torchrope submit` with `--sweep`.

    Returns:
        The file; None if there are no such runs.

    Raises:
        ValueError: a file is damaged.
    """
    if (folder / RESULTS).exists():
        return None
    folders = [folder] if (folder / CONFIG).exists() else sorted(folder.glob("*"))
    if folders == [folder] and "encodings" in read_mapping(folder / CONFIG, CONFIG):
        return None  # a comparison that was stopped before its first result
    runs = [_read(path) for path in folders if (path / CONFIG).exists()]
    if not runs:
        return None
    names = list(dict.fromkeys(name for run in runs for name in run.settings))
    differing = [name for name in names if len({str(run.settings.get(name)) for run in runs}) > 1 and name != "out"]
    StudyResult(
        study="runs",
        title="Training runs",
        question="Which quality did the runs reach?",
        sources=(),
        findings=_findings(runs, differing or [name for name in ("encoding", "encodings", "seed") if name in names]),
        data=None,
        run=RunFacts(
            config={name: runs[0].settings.get(name) for name in names if name not in differing},
            seconds=sum(run.cells["seconds"] or 0 for run in runs),
        ),
        unfinished=[run.cells["name"] for run in runs if run.cells["epochs"] != run.settings.get("optim.epochs")],
    ).write(folder / RESULT)
    return folder / RESULT


def _read(folder: Path) -> _Run:
    settings = flat(read_mapping(folder / CONFIG, CONFIG))
    cells: dict[str, Any] = {"name": folder.name, **dict.fromkeys(("measure", "quality", "low", "high", "best"))}
    if (folder / RESULTS).exists():
        result = StudyResult.read(folder / RESULTS)
        highest: Any = max(result.findings.tables[0].rows, key=lambda row: row.get("top1") or 0, default={})
        cells |= {"measure": "Top-1", "best": highest.get("name"), "quality": highest.get("top1")}
        cells |= {"low": highest.get("low"), "high": highest.get("high"), "seconds": result.run.seconds}
        return _Run(settings, {**cells, "epochs": None if result.unfinished else settings.get("optim.epochs")}, [])
    curve = read_curve(folder / CURVE)
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
    seconds = sum(row.get("seconds", 0.0) for row in curve)
    return _Run(settings, {**cells, "epochs": len(curve), "seconds": seconds}, curve)


def _findings(runs: list[_Run], options: list[str]) -> Findings:
    """Build the table, the figure and the answer, in which runs are named by some of their settings."""
    columns = [
        Column("name", "Run"),
        *(Column(f"option-{name}", name) for name in options),
        *([Column("best", "Highest")] if any(run.cells["best"] for run in runs) else []),
        Column("measure", "Measure"),
        Column("quality", "Quality", "%", 1, low="low", high="high"),
        Column("epochs", "Epochs", digits=0),
        Column("seconds", "Training", "s", 0),
    ]
    rows = [{**run.cells, **{f"option-{name}": str(run.settings.get(name)) for name in options}} for run in runs]
    titles = [", ".join(f"{name.rpartition('.')[2]} {run.settings.get(name)}" for name in options) for run in runs]
    points: list[Row] = [
        {"run": title, "epoch": epoch["epoch"], "quality": 100 * epoch[key]}
        for title, run in zip(titles, runs, strict=True)
        for epoch in run.curve
        for key in _QUALITIES
        if key in epoch
    ]
    curves = Figure(
        name="curves-of-runs",
        kind="lines",
        title="Quality while training",
        alt="Quality on the validation examples after every epoch, one line per run.",
        x=Axis("epoch", "Epoch"),
        y=Axis("quality", "Quality", "%"),
        rows=points,
        series="run",
    )
    answer = "No run has finished an epoch."
    if measured := {i: run.cells["quality"] for i, run in enumerate(runs) if run.cells["quality"] is not None}:
        highest = max(measured.values())
        best, *equal = [index for index, quality in measured.items() if quality == highest]
        several = f", the highest of {len(measured)} runs" if len(measured) > 1 else ""
        ties = f", as {len(equal)} other{'s' * (len(equal) > 1)} did" if equal else ""
        answer = f"{titles[best]} reached {runs[best].cells['measure']} {highest:.1f} %{several}{ties}."
    evaluated = "where a run was evaluated with its own settings"
    note = f"Intervals are those of `torchrope evaluate`, {evaluated}, or of a comparison."
    return Findings(answer, [Table("Runs", columns, rows, note=note)], [curves] if points else [])
