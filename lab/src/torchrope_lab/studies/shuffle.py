"""Accuracy drop with shuffled patches, frames or positions (LieRE tables 3 and 4)."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchrope_lab.conclusion import NOT_DIFFERENT, Interval, caveat
from torchrope_lab.data.datamodule import DataModule
from torchrope_lab.data.transforms import shuffle_patches
from torchrope_lab.engine.estimates import (
    NONE_POSSIBLE,
    Columns,
    contrasts,
    drawn_mean,
    estimate_in,
    points,
    rank,
    table_of,
    tied_with,
    top1,
    with_interval,
)
from torchrope_lab.engine.figures import ENCODING_AXIS, TOP1_AXIS, figure
from torchrope_lab.engine.runs import Measure
from torchrope_lab.engine.study import Lab
from torchrope_lab.engine.trained_models import NAME_COLUMNS, Measures, select_models
from torchrope_lab.results import Column, Figure, Findings, Table
from torchrope_lab.statistics import constant_accuracy, draw
from torchrope_lab.training.evaluate import predict, shuffler
from torchrope_lab.training.models import Model, TokenClassifier

INTACT, PATCHES, FRAMES, POSITIONS = "intact", "patches", "frames", "positions"
TITLES = {name: f"{name.capitalize()} shuffled" for name in (PATCHES, FRAMES, POSITIONS)} | {INTACT: "As they are"}
VERDICTS = {"best": "largest", "behind": "smaller"}
SEED = 0

ABOUT = {
    PATCHES: "Every example's patches are permuted at random over the whole lattice; pixels within them are not.",
    FRAMES: "Every example's frames are permuted at random along time, in groups of the patch size along time.",
    POSITIONS: "The positions of every example are permuted at random among its tokens; contents are unchanged.",
}


def find(lab: Lab) -> Findings:
    """Evaluate the runs of the accuracy study on shuffled inputs."""
    models, kinds = select_models(lab, lab.encodings), _kinds(lab)
    name = "-".join(["shuffled", *kinds, str(SEED)])
    measured = models.measure(lambda _: Measure(name, partial(shuffled, kinds=kinds)))
    if not measured:
        return Findings(models.unmeasured(NONE_POSSIBLE))
    chance = constant_accuracy(measured[0].stack("labels")[0])
    tables = {kind: _table(measured, kind, chance) for kind in kinds}
    return Findings(
        answer=_answer(tables, len(lab.seeds)),
        tables=list(tables.values()),
        figures=[_figure(tables, chance)],
    )


def _kinds(lab: Lab) -> list[str]:
    """Return the kinds of shuffling for the data."""
    if not lab.data.lattice:
        return [POSITIONS]
    return [PATCHES, FRAMES] if "time" in lab.data.axes else [PATCHES]


def shuffled(model: Model, data: DataModule, *, kinds: Sequence[str]) -> dict[str, Any]:
    """Predict the validation set as it is and shuffled, on one view: `labels`, and `predicted` by kind of shuffling."""
    labels, intact = predict(model, data)
    found: dict[str, Any] = {"labels": labels.tolist(), INTACT: {"predicted": intact.argmax(dim=-1).tolist()}}
    for kind in kinds:
        _, logits = predict(model, data, _shuffler_of(kind, model, data.axes))
        found[kind] = {"predicted": logits.argmax(dim=-1).tolist()}
    return found


def _shuffler_of(kind: str, model: Model, axes: Sequence[str]) -> Callable[[Tensor], Tensor]:
    """Return a function that shuffles batches: patches or positions of tokens, or frames in whole patches."""
    if kind != FRAMES or isinstance(model, TokenClassifier):
        return shuffler(model, SEED)
    frames = [extent if axis == "time" else None for axis, extent in zip(axes, model.embed.patch_size, strict=True)]
    return partial(shuffle_patches, patch_size=frames, generator=torch.Generator().manual_seed(SEED))


def _table(measured: Sequence[Measures], kind: str, chance: float) -> Table:
    """Build the table of the accuracy drop of every encoding by one kind of shuffling, the largest first."""
    right = {each.name: (_right(each, INTACT), _right(each, kind)) for each in measured}
    drops = contrasts(right)
    verdicts = rank({name: drawn_mean(before - after) for name, (before, after) in right.items()})
    columns: Columns = (
        *NAME_COLUMNS,
        (with_interval("before", "Before", "%", 1), lambda each: top1(right[each.name][0])),
        (with_interval("after", "After", "%", 1), lambda each: top1(right[each.name][1])),
        (with_interval("drop", "Drop", "points", 1), lambda each: drops[each.name]),
        (with_interval("lost", "Share lost", "%", 1), lambda each: share_lost(*right[each.name])),
        (Column("verdict", "Drop, verdict"), lambda each: VERDICTS.get(verdicts[each.name], verdicts[each.name])),
    )
    note = (
        f"{ABOUT[kind]} Drops are paired, with intervals that are simultaneous over all rows; verdicts are over all "
        f"pairs. The share lost is the drop over the accuracy before, as in papers. Chance is {100 * chance:.1f} %."
    )
    largest_first = sorted(measured, key=lambda each: list(verdicts).index(each.name))
    return table_of(f"Top-1 with {kind} shuffled", columns, largest_first, note)


def share_lost(before: np.ndarray, after: np.ndarray) -> Interval | None:
    """Compute the share of accuracy lost, (before - after) / before in percent, with its 95 % interval."""
    # Arrays are right or wrong, `(seeds, examples)`; None if no example was right before.
    if not before.any():
        return None

    def lost(before: np.ndarray, after: np.ndarray, weights: np.ndarray) -> np.ndarray:
        right = weights @ before
        return 100 * (1 - np.divide(weights @ after, right, out=np.ones_like(right), where=right > 0))

    each_seed = [partial(lost, *pair) for pair in zip(before, after, strict=True)]
    return draw(each_seed, before.shape[1]).interval()


def _right(measured: Measures, kind: str) -> np.ndarray:
    """Return correct (1) and wrong (0) answers, `(seeds, examples)`."""
    return np.equal(measured.stack("labels"), measured.stack(kind, "predicted")).astype(float)


def _answer(tables: Mapping[str, Table], seeds: int) -> str:
    text = "; ".join(_clause(kind, table.rows) for kind, table in tables.items())
    return f"{text[0].upper()}{text[1:]}.{caveat(seeds)}"


def _clause(kind: str, rows: Sequence[Mapping[str, Any]]) -> str:
    first, *others = rows
    drop = points(estimate_in(first, "drop"))
    if not any(row["drop_low"] > 0 for row in rows):
        return f"with {kind} shuffled this run shows no drop: at most {drop}, of {first['name']}"
    tied = [row["name"] for row in others if row["verdict"] == NOT_DIFFERENT]
    return f"with {kind} shuffled {first['name']} drops most, {drop}{tied_with(tied)}"


def _figure(tables: Mapping[str, Table], chance: float) -> Figure:
    states = [(INTACT, "before", next(iter(tables.values()))), *((kind, "after", at) for kind, at in tables.items())]
    rows = [
        {
            "name": row["name"],
            "inputs": TITLES[kind],
            **dict(zip(("top1", "low", "high"), estimate_in(row, key), strict=True)),
        }
        for kind, key, table in states
        for row in table.rows
    ]
    return figure(
        "top1-shuffled",
        "Top-1 as trained and shuffled",
        TOP1_AXIS,
        ENCODING_AXIS,
        rows,
        f"Lines are 95 % intervals. Chance is {100 * chance:.1f} %.",
        kind="points",
        series="inputs",
        low="low",
        high="high",
    )
