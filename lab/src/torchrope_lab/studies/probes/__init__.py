"""Attention weights that an encoding makes possible in one layer, on tasks whose optimum is known (in no paper)."""

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib import resources
from math import isfinite, nan
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import yaml
from rich.progress import Progress

from torchrope.files import write_whole
from torchrope.positions import grid
from torchrope_lab.encodings import load_modules
from torchrope_lab.engine.descriptions import label
from torchrope_lab.engine.dry_run import NotTrained
from torchrope_lab.engine.figures import cells_figure, map_figure
from torchrope_lab.engine.long_table import (
    SIMULTANEOUS,
    Cell,
    Quantity,
    at_levels,
    name_columns,
    table_of,
    with_interval,
)
from torchrope_lab.engine.published import cite
from torchrope_lab.engine.study import Lab
from torchrope_lab.engine.workers import run_calls
from torchrope_lab.files import read_mapping
from torchrope_lab.mistakes import Mistake
from torchrope_lab.results import Axis, Column, Figure, Findings, Table
from torchrope_lab.settings.probes_config import ProbesConfig
from torchrope_lab.studies.probes.abilities import ABILITIES, Ability, weights_of
from torchrope_lab.studies.probes.layer import CONDITIONS, TRAINED, Probe, score, train_probe

VERSION = 1
"""Raised when the numbers of a probe change."""
_EXPLAINED = Axis("score", "Explained", "%")
DEFAULT_ABILITIES = ("far", "pair", "diagonal", "ellipse", "ring", "place")


@dataclass(frozen=True)
class Job:
    """A probe to train and to score: names of encoding and ability, channels of a head, seed."""

    encoding: str
    ability: str
    head_dim: int
    seed: int

    def file(self, folder: Path, config: ProbesConfig) -> Path:
        """Return the file of its scores."""
        shared = {name: value for name, value in vars(config).items() if name not in ("abilities", "head_dims")}
        text = json.dumps([VERSION, vars(self), shared], sort_keys=True)
        return folder / f"{self.ability}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"


def run_job(job: Job, folder: Path, config: ProbesConfig) -> None:
    """Train a probe and write its scores."""
    load_modules([job.encoding])  # allowed: the parent process has loaded them
    started, ability = time.monotonic(), ABILITIES[job.ability]
    probe = train_probe(job.encoding, ability, config, job.head_dim, job.seed)
    scores = {condition.name: score(probe, ability, condition, config.examples) for condition in CONDITIONS}
    content = {**vars(job), "seconds": time.monotonic() - started, "scores": scores}
    write_whole(job.file(folder, config), json.dumps(content))


def scores_of(measured: Mapping[Job, Mapping[str, Any]], head_dim: int, condition: str = TRAINED.name) -> Quantity:
    """Return the share explained of each encoding and ability, where the condition applies."""
    values: dict[Cell, list[list[float]]] = {}
    for job, each in measured.items():
        if job.head_dim == head_dim:
            score = each["scores"][condition]
            values.setdefault(Cell(job.encoding, job.ability), []).append([nan if score is None else score])
    known = {cell: np.array(seeds) for cell, seeds in values.items() if np.isfinite(seeds).all()}
    return Quantity(known, Column("score", "Explained", "%", 0))


def find(lab: Lab) -> Findings:
    """Train and score a probe for each encoding, ability, number of channels and seed."""
    config = lab.config.probes  # type: ignore[attr-defined]
    abilities = [ABILITIES[name] for name in config.abilities or DEFAULT_ABILITIES]
    if too_many := [ability.name for ability in abilities if ability.axes > config.axes]:
        if config.abilities:
            rule = f"--probes.abilities {too_many[0]} needs {ABILITIES[too_many[0]].axes} axes or more"
            raise Mistake(f"{rule}, got --probes.axes {config.axes}")
        abilities = [ability for ability in abilities if ability.name not in too_many]
    encodings = _buildable(lab, config)
    jobs = [
        Job(encoding, ability.name, head_dim, seed)
        for seed in lab.seeds
        for ability in abilities
        for encoding in encodings
        for head_dim in config.channels
    ]
    measured = _run(lab, jobs, config)
    diverged = {job.encoding: job for job, each in measured.items() if not isfinite(each["scores"][TRAINED.name])}
    for name, job in diverged.items():
        lab.leave_out(f"{label(name)} is left out: its training diverged ({job.ability}, seed {job.seed}).")
    if not (encodings := [name for name in encodings if name not in diverged]):
        raise Mistake(f"none of the encodings can be probed: {' '.join(lab.left_out)}")
    measured = {job: each for job, each in measured.items() if job.encoding in encodings}
    scores = scores_of(measured, config.channels[0])
    predicted = _predictions(scores)
    return Findings(
        answer=_answer(scores, encodings, abilities, predicted),
        tables=[
            *_tables(measured, encodings, abilities, config),
            _of_predictions(scores, predicted),
            _claims(scores),
        ],
        figures=[
            _matrix(scores, encodings, abilities),
            _transfer(measured, scores, encodings, config),
            _masks(abilities, config),
        ],
    )


def _buildable(lab: Lab, config: ProbesConfig) -> list[str]:
    """Return the encodings that a probe can have."""
    built = []
    for encoding in lab.encodings:
        try:
            with torch.device("meta"):
                for head_dim in config.channels:
                    Probe(encoding, config.sizes, head_dim, config.num_heads)
            built.append(encoding)
        except ValueError as error:
            lab.leave_out(f"{label(encoding)} is left out: {error}.")
    if not built:
        raise Mistake(f"none of the encodings can be probed: {' '.join(lab.left_out) or 'none is given'}")
    return built


def _run(lab: Lab, jobs: Sequence[Job], config: ProbesConfig) -> dict[Job, dict[str, Any]]:
    """Return what is measured of all jobs, of finished ones from their files."""
    folder = Path(lab.config.out) / "probes"
    missing = [job for job in jobs if not job.file(folder, config).exists()]
    if lab.dry_run:
        lab.console.print(f"probes to train: {len(missing)} of {len(jobs)}")
        raise NotTrained
    folder.mkdir(parents=True, exist_ok=True)
    with Progress(console=lab.console, transient=True) as progress:
        task = progress.add_task("probes", total=len(missing))
        calls = [(job, partial(run_job, job, folder, config)) for job in missing]
        run_calls(calls, lab.config, lambda *_: progress.advance(task))
    return {job: read_mapping(job.file(folder, config), "scores of a probe") for job in jobs}


# ---- what is measured


def _matrix(scores: Quantity, encodings: Sequence[str], abilities: Sequence[Ability]) -> Figure:
    cells = [
        (ability.title, label(encoding), round(scores.interval(cell).estimate, 2))
        for encoding in encodings
        for ability in abilities
        if (cell := Cell(encoding, ability.name)) in scores.values
    ]
    title, caption = (
        "What each encoding lets attention gather",
        "0 % is attention without positions, 100 % the optimum.",
    )
    return cells_figure(_names("ability"), _names("encoding"), _EXPLAINED, cells, name="matrix", title=title,
                        caption=caption)  # fmt: skip


def _names(key: str) -> Axis:
    return Axis(key, key.capitalize(), scale="category")


def _tables(
    measured: Mapping[Job, Any], encodings: Sequence[str], abilities: Sequence[Ability], config: ProbesConfig
) -> list[Table]:
    """Show the scores under every condition that applies, and by the number of channels of a head."""
    tables, titles = [], {each.name: each.title for each in abilities}
    for condition in CONDITIONS:
        scores = scores_of(measured, config.channels[0], condition.name)
        if scores.values:
            more = "" if condition is TRAINED else " without more training"
            columns = (*name_columns(), *at_levels(scores.column[1], titles, "%", 0, prefix=""))
            title, note = f"Explained{more}: {condition.title.lower()}", "Means over seeds with 95 % intervals."
            tables.append(table_of(title, columns, map(Cell, encodings), note))
    if len(config.channels) > 1:
        by_channels = {size: scores_of(measured, size) for size in sorted(config.channels)}
        columns = (
            *name_columns(),
            (Column("ability", "Ability"), lambda cell: ABILITIES[cell.level].title),
            *((with_interval(f"d{size}", f"{size} channels", "%", 0), scores.column[1])
              for size, scores in by_channels.items()),
        )  # fmt: skip
        cells = [Cell(encoding, ability.name) for encoding in encodings for ability in abilities]
        tables.append(table_of("Explained by the number of channels of a head", columns, cells))
    return tables


def _transfer(measured: Mapping[Job, Any], scores: Quantity, encodings: Sequence[str], config: ProbesConfig) -> Figure:
    """Show the mean over the abilities that an encoding has, under each condition."""
    cells = []
    for condition in CONDITIONS:
        found = scores_of(measured, config.channels[0], condition.name).values
        for encoding in encodings:
            able = [cell for cell in _able(scores) if cell.arm == encoding]
            if able and all(cell in found for cell in able):
                share = 100 * float(np.clip([found[cell] for cell in able], 0, 1).mean())
                cells.append((condition.title, label(encoding), round(share, 2)))
    title = "What is kept without more training"
    caption = f"Mean over the abilities of which an encoding explains {100 * _threshold():.0f} % or more in training."
    axes = (_names("condition"), _names("encoding"), replace(_EXPLAINED, key="kept"))
    return cells_figure(*axes, cells, name="transfer", title=title, caption=caption)


def _able(scores: Quantity) -> list[Cell]:
    """Return the encodings with their abilities."""
    return [cell for cell, values in scores.values.items() if values.mean() >= _threshold()]


def _masks(abilities: Sequence[Ability], config: ProbesConfig) -> Figure:
    """Show what each ability asks of a query in the middle of the lattice, with two axes."""
    places = grid(*config.sizes, dtype=torch.float64)
    middle = int(np.ravel_multi_index([size // 2 for size in config.sizes], config.sizes))
    maps = {
        ability.title: weights_of(ability, places)[middle].view(config.sizes).numpy()
        for ability in abilities
        if not ability.marked and config.axes == 2
    }
    x, y, colour = Axis("x", "x"), Axis("y", "y"), Axis("weight", "Weight")
    middle_of = f"Of the query at row and column {config.sizes[0] // 2}, counted from 0."
    return map_figure(x, y, colour, maps, name="masks", title="What is gathered", caption=middle_of)


# ---- predictions


@cache
def _file() -> dict[str, Any]:
    return yaml.safe_load(
        resources.files("torchrope_lab.studies.probes").joinpath("predictions.yaml").read_text("utf-8")
    )


def _threshold() -> float:
    return _file()["threshold"]


class Prediction(NamedTuple):
    """What theory says of an encoding's ability and why, and whether it was measured."""

    can: bool
    because: str
    verdict: str


def _predictions(scores: Quantity) -> dict[Cell, Prediction]:
    """Compare predictions with the side of the threshold on which the measured interval lies."""
    family = {encoding: family for family in _file()["families"] for encoding in family["encodings"]}
    predicted = {}
    for cell in scores.values:
        of_family = family.get(cell.arm, {"can": [], "cannot": []})
        if cell.level not in (*of_family["can"], *of_family["cannot"]):
            continue
        can, (_, low, high) = cell.level in of_family["can"], scores.interval(cell)
        above, below = low > 100 * _threshold(), high < 100 * _threshold()
        held = "as predicted" if above == can else "not as predicted"
        predicted[cell] = Prediction(can, of_family["because"], held if above or below else "undecided")
    return predicted


def _of_predictions(scores: Quantity, predicted: Mapping[Cell, Prediction]) -> Table:
    columns = [
        *name_columns(),
        (Column("ability", "Ability"), lambda cell: ABILITIES[cell.level].title),
        (Column("predicted", "Predicted"), lambda cell: "can" if predicted[cell].can else "cannot"),
        (with_interval("score", "Explained", "%", 0), scores.interval),
        (Column("verdict", "Verdict"), lambda cell: predicted[cell].verdict),
        (Column("because", "Because"), lambda cell: predicted[cell].because),
    ]
    ordered = sorted(predicted, key=lambda cell: predicted[cell].verdict, reverse=True)  # those that failed come second
    note = (
        f"Written before the runs. ‘Can’ means that an encoding explains {100 * _threshold():.0f} % or more. "
        "Each verdict is at 5 % by itself: of many, some are wrong by chance."
    )
    return table_of("Predictions", columns, ordered, note)


def _claims(scores: Quantity) -> Table:
    """Compare claims of papers with what was measured."""
    claims = {Cell(claim["higher"], claim["ability"]): claim for claim in _file()["claims"]}
    leads = scores.changes({cell: cell._replace(arm=claim["lower"]) for cell, claim in claims.items()})
    columns = [
        (Column("claim", "Claim"), lambda cell: claims[cell]["says"]),
        (Column("source", "Source"), lambda cell: cite(claims[cell]["source"])),
        (Column("ability", "Ability"), lambda cell: ABILITIES[cell.level].title),
        (Column("pair", "Difference of"), lambda cell: f"{label(cell.arm)} − {label(claims[cell]['lower'])}"),
        (with_interval("points", "Difference", "points", 0), leads.get),
    ]
    return table_of("Claims of papers", columns, leads, f"Paired by seed. {SIMULTANEOUS}")


def _answer(
    scores: Quantity, encodings: Sequence[str], abilities: Sequence[Ability], predicted: Mapping[Cell, Prediction]
) -> str:
    """Name the encoding that has most abilities, and how many predictions failed."""
    counts = {encoding: sum(cell.arm == encoding for cell in _able(scores)) for encoding in encodings}
    most = max(counts, key=lambda encoding: counts[encoding])
    threshold = f"{100 * _threshold():.0f} % or more"
    said = f"{label(most)} explains {threshold} of {counts[most]} of {len(abilities)} abilities"
    others = f", the most of {len(encodings)} encodings" if len(encodings) > 1 else ""
    failed = sum(each.verdict == "not as predicted" for each in predicted.values())
    return f"{said}{others}.{f' Of {len(predicted)} predictions {failed} failed.' if predicted else ''}"
