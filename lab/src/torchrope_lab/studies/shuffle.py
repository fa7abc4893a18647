"""Accuracy drop with shuffled patches, frames or positions (LieRE tables 3 and 4)."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchrope_lab.conclusion import caveat
from torchrope_lab.data.datamodule import DataModule
from torchrope_lab.data.transforms import shuffle_patches
from torchrope_lab.engine.figures import ENCODING_AXIS, TOP1_AXIS, figure
from torchrope_lab.engine.long_table import (
    NONE_POSSIBLE,
    Columns,
    Quantity,
    RightOrWrong,
    name_columns,
    ranking,
    row_of,
    table_of,
    with_interval,
)
from torchrope_lab.engine.runs import Measure
from torchrope_lab.engine.study import Lab
from torchrope_lab.engine.trained_models import select_models
from torchrope_lab.results import Column, Findings, Table
from torchrope_lab.statistics import constant_accuracy
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
    labels = measured[0].stack("labels")
    top1 = RightOrWrong({
        each.at(kind): np.equal(labels[0], each.stack(kind, "predicted")).astype(float)
        for each in measured for kind in (INTACT, *kinds)
    })  # fmt: skip
    chance = f"Chance is {100 * constant_accuracy(labels[0]):.1f} %."
    tables, clauses = zip(*(_shuffled_by(kind, top1, chance) for kind in kinds), strict=True)
    rows = [
        {"name": cell.arm, "inputs": TITLES[str(cell.level)], **row_of([top1.column], cell)}
        for cell in sorted(top1.values, key=lambda cell: (INTACT, *kinds).index(cell.level))
    ]
    by_inputs = figure(
        "top1-shuffled",
        "Top-1 as trained and shuffled",
        TOP1_AXIS,
        ENCODING_AXIS,
        rows,
        f"Lines are 95 % intervals. {chance}",
        kind="points",
        series="inputs",
    )
    said = "; ".join(clauses)
    return Findings(f"{said[0].upper()}{said[1:]}.{caveat(len(lab.seeds))}", tables, [by_inputs])


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


def _shuffled_by(kind: str, top1: RightOrWrong, chance: str) -> tuple[Table, str]:
    """Build the table of the drops by one kind of shuffling, the largest first, and the clause about the largest."""
    intact = [cell for cell in top1.values if cell.level == INTACT]
    rights = {cell: (top1.values[cell], top1.values[cell._replace(level=kind)]) for cell in intact}
    drops = top1.changes({cell: cell._replace(level=kind) for cell in rights})
    drop = Quantity({cell: before - after for cell, (before, after) in rights.items()}, with_interval("drop", "Drop"))
    both = {cell: np.stack(pair, axis=-1) for cell, pair in rights.items() if pair[0].any()}
    lost = Quantity(both, with_interval("lost", "Share lost", "%", 1), share_lost)
    verdicts = drop.ranks(INTACT)
    columns: Columns = (
        *name_columns(),
        (with_interval("before", "Before", "%", 1), top1.interval),
        (with_interval("after", "After", "%", 1), lambda cell: top1.interval(cell._replace(level=kind))),
        (with_interval("drop", "Drop", "points", 1), drops.get),
        lost.column,
        (Column("verdict", "Drop, verdict"), lambda cell: VERDICTS.get(verdicts[cell], verdicts[cell])),
    )
    note = (
        f"{ABOUT[kind]} Drops are paired, with intervals that are simultaneous over all rows; verdicts are over all "
        f"pairs. The share lost is the drop over the accuracy before, as in papers. {chance}"
    )
    clause = f"with {kind} shuffled no drop of top-1 is significant"
    if any(each.low > 0 for each in drops.values()):
        clause = ranking(f"with {kind} shuffled top-1 drops most", verdicts, drops.__getitem__, " points")
    return table_of(f"Top-1 with {kind} shuffled", columns, verdicts, note), clause


def share_lost(before_and_after: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Compute the share of accuracy lost, (before - after) / before, of right or wrong `(examples, 2)`."""
    before, after = (weights @ before_and_after).T
    return 1 - np.divide(after, before, out=np.ones_like(before), where=before > 0)
