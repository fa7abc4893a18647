"""Settings, quality and learning curves of the runs of `torchrope train`, or of a sweep. Does not import torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchrope_lab.files import CURVE, read_curve, read_mapping
from torchrope_lab.results import Axis, Column, Figure, Findings, Row, RunFacts, StudyResult, Table
from torchrope_lab.studies.config import RESULTS
from torchrope_lab.training.config import CONFIG, flat

RESULT = "runs.json"
EVALUATION = "evaluation.json"
_QUALITIES = {"val_top1": "Top-1", "val_miou": "mIoU", "val_ap": "AP"}


@dataclass(frozen=True)
class _Row:
    """A run of `torchrope train`, or the best encoding of a comparison.

    Attributes:
        name: Name of its folder.
        settings: All settings by full name.
        values: Cells of the table that are no settings.
        curve: Rows of its learning curve.
        is_finished: Whether it has ended.
    """

    name: str
    settings: dict[str, Any]
    values: dict[str, Any]
    curve: Sequence[dict[str, float]] = ()
    is_finished: bool = True


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
    inside = sorted(path for path in folder.glob("*") if (path / CONFIG).exists())
    rows = [_row(path) for path in ([folder] if (folder / CONFIG).exists() else inside)]
    if not rows:
        return None
    options = _options(rows)
    common = {key: value for key, value in rows[0].settings.items() if key not in options}
    StudyResult(
        study="runs",
        title="Training runs",
        question="Which quality did the runs reach?",
        sources=(),
        findings=_findings(rows, options),
        data=None,
        run=RunFacts(config=common, seconds=sum(row.values["seconds"] or 0 for row in rows)),
        unfinished=[row.name for row in rows if not row.is_finished],
    ).write(folder / RESULT)
    return folder / RESULT


def _row(folder: Path) -> _Row:
    settings = flat(read_mapping(folder / CONFIG, CONFIG))
    if (folder / RESULTS).exists():
        result = StudyResult.read(folder / RESULTS)
        best = (result.conclusion or {}).get("best")
        found = next((row for row in result.findings.tables[0].rows if row.get("name") == best), {})
        quality = {"measure": "Top-1", "quality": found.get("top1"), "low": found.get("low"), "high": found.get("high")}
        values = {**quality, "best": best, "epochs": settings.get("optim.epochs"), "seconds": result.run.seconds}
        return _Row(folder.name, settings, values, is_finished=not result.unfinished)
    curve = read_curve(folder / CURVE)
    values = {"measure": None, "quality": None, "low": None, "high": None, "best": None}
    for key, title in _QUALITIES.items():
        if curve and key in curve[-1]:
            values |= {"measure": title, "quality": 100 * curve[-1][key]}
    if (folder / EVALUATION).exists():
        evaluated = read_mapping(folder / EVALUATION, EVALUATION)
        share = next((evaluated[name] for name in ("top1", "miou", "ap") if name in evaluated), None)
        ends = evaluated.get("interval")
        if isinstance(share, int | float) and isinstance(ends, list) and len(ends) == 2:
            values |= {"quality": 100 * share, "low": 100 * ends[0], "high": 100 * ends[1]}
    values |= {"epochs": len(curve), "seconds": sum(row.get("seconds", 0.0) for row in curve)}
    return _Row(folder.name, settings, values, curve, len(curve) == settings.get("optim.epochs"))


def _options(rows: Sequence[_Row]) -> list[str]:
    """Return the settings in which the runs differ; the encoding and the seed of a single run."""
    if len(rows) == 1:
        return [name for name in ("encoding", "seed") if name in rows[0].settings]
    names = dict.fromkeys(name for row in rows for name in row.settings)
    return [name for name in names if name != "out" and len({str(row.settings.get(name)) for row in rows}) > 1]


def _title(row: _Row, options: Sequence[str]) -> str:
    """Return the options of a run: "encoding mixed, seed 0"."""
    return ", ".join(f"{name.rpartition('.')[2]} {row.settings.get(name)}" for name in options) or row.name


def _findings(rows: Sequence[_Row], options: Sequence[str]) -> Findings:
    titles = {row.name: _title(row, options) for row in rows}
    columns = [
        Column("name", "Run"),
        *(Column(f"option-{name}", name) for name in options),
        *([Column("best", "Best encoding")] if any(row.values["best"] for row in rows) else []),
        Column("measure", "Measure"),
        Column("quality", "Quality", "%", 1, low="low", high="high"),
        Column("epochs", "Epochs", digits=0),
        Column("seconds", "Training", "s", 0),
    ]
    cells = [
        {
            "name": row.name,
            **{f"option-{name}": str(row.settings.get(name)) for name in options},
            **row.values,
        }
        for row in rows
    ]
    trained = [row for row in rows if row.values["quality"] is not None]
    answer = "No run has finished an epoch."
    if trained:
        best = max(trained, key=lambda row: row.values["quality"])
        reached = f"{best.values['measure']} {best.values['quality']:.1f} %"
        several = f", the highest of {len(trained)} runs" if len(trained) > 1 else ""
        answer = f"{titles[best.name]} reached {reached}{several}."
    points: list[Row] = [
        {"run": titles[row.name], "epoch": epoch["epoch"], "quality": 100 * epoch[key]}
        for row in rows
        for epoch in row.curve
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
    note = "Intervals are those of `torchrope evaluate`, where a run was evaluated, or of a comparison."
    return Findings(answer, [Table("Runs", columns, cells, note=note)], [curves] if points else [])
