"""Accuracy drop with shuffled patches, frames or positions (LieRE tables 3 and 4)."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchrope_lab.conclusion import NOT_DIFFERENT, Interval, one_seed
from torchrope_lab.data.datamodule import DataModule
from torchrope_lab.data.transforms import shuffle_along
from torchrope_lab.results import Axis, Check, Column, Figure, Findings, Table
from torchrope_lab.statistics import accuracy_interval, draw
from torchrope_lab.studies.engine.estimates import (
    NAMES,
    NONE_POSSIBLE,
    RESAMPLES,
    by_encoding,
    cells,
    contrasts,
    drawn_mean,
    in_percent,
    named,
    points,
    rank,
    tied_with,
    with_interval,
)
from torchrope_lab.studies.engine.feasible import feasible
from torchrope_lab.studies.engine.published import LIERE_1, LIERE_2, published
from torchrope_lab.studies.engine.runs import Trained
from torchrope_lab.studies.engine.study import Lab, Study
from torchrope_lab.training.evaluate import predict, shuffler
from torchrope_lab.training.models import Model, TokenClassifier

INTACT, PATCHES, FRAMES, POSITIONS = "intact", "patches", "frames", "positions"
TITLES = {name: f"{name.capitalize()} shuffled" for name in (PATCHES, FRAMES, POSITIONS)} | {INTACT: "As they are"}
VERDICTS = {"best": "largest", NOT_DIFFERENT: NOT_DIFFERENT, "behind": "smaller"}
SEED = 0
ROUNDING = 1e-4  # relative to the largest class score

COLUMNS = (
    *NAMES,
    with_interval("before", "Before", "%", 1),
    with_interval("after", "After", "%", 1),
    with_interval("drop", "Drop", "points", 1),
    with_interval("lost", "Share lost", "%", 1),
    Column("verdict", "Drop, verdict"),
)

_SHARE = "The drop is (before - after) / before, one number without interval."
PUBLISHED = (
    published(
        "Patches shuffled, CIFAR-100, first version",
        f"{LIERE_1}, table 3",
        """
        absolute | 63.9 | 19.6 | 69.3
        axial (VisionLlama RoPE) | 65.8 | 29.7 | 54.8
        mixed (RoPE-Mixed) | 66.7 | 16.5 | 75.4
        liere | 69.4 | 15.9 | 77.1
        """,
        ("Encoding", "Before", "After", "Drop"),
        note=f"{_SHARE} The two accuracies of VisionLlama give 54.9 and those of RoPE-Mixed 75.3.",
    ),
    published(
        "Patches shuffled, UCF101, first version",
        f"{LIERE_1}, table 4",
        """
        absolute | 44.4 | 44.0 | 0.1
        mixed (RoPE-Mixed) | 48.6 | 36.6 | 24.7
        liere | 51.1 | 32.2 | 36.9
        """,
        ("Encoding", "Before", "After", "Drop"),
        note=f"{_SHARE} That of the absolute encoding cannot be right: its two accuracies give 0.9; those of LieRE "
        "give 37.0. The paper mentions patches and frames and does not report their results separately.",
    ),
    published(
        "Patches shuffled, second version",
        f"{LIERE_2}, table 3",
        """
        absolute | 63.9 | 19.6 | 69.3 | 40.9 | 39.5 | 0.0
        axial (VisionLlama RoPE) | 65.5 | 29.7 | 54.8 | 45.0 | 37.0 | 17.7
        mixed (RoPE-Mixed) | 68.8 | 17.1 | 75.1 | 46.3 | 28.2 | 39.1
        liere:8 | 70.3 | 12.3 | 82.5 | 47.0 | 27.8 | 40.9
        liere | 70.0 | 10.8 | 84.6 | 44.7 | 28.0 | 37.4
        """,
        (
            "Encoding",
            "Before, CIFAR-100",
            "After, CIFAR-100",
            "Drop, CIFAR-100",
            "Before, UCF101",
            "After, UCF101",
            "Drop, UCF101",
        ),
        note=f"{_SHARE} That of the absolute encoding on UCF101 cannot be right: its two accuracies give 3.4. "
        "VisionLlama's drop on CIFAR-100 is that of the first version, with 65.8 before; 65.5 gives 54.7.",
    ),
)


def find(lab: Lab) -> Findings:
    """Evaluate the runs of the accuracy study on shuffled inputs."""
    runs, notes = feasible(lab, lab.runs(lab.encodings))
    if not runs:
        return Findings(NONE_POSSIBLE, notes=notes)
    trained = lab.train(runs)
    kinds = _kinds(lab)
    measured = {each.run.key: each.measure(_measure_name(kinds), partial(shuffled, kinds=kinds)) for each in trained}
    groups = {name: [measured[each.run.key] for each in each_run] for name, each_run in by_encoding(trained).items()}
    rows = {kind: losses(groups, kind) for kind in kinds}
    return Findings(
        answer=_answer(rows, len(lab.seeds)),
        tables=[_table(kind, rows[kind], lab) for kind in kinds],
        figures=[_figure(rows, lab)],
        published=PUBLISHED,
        checks=_checks(trained, measured, kinds),
        notes=[*notes, *_notes(lab)],
    )


def _kinds(lab: Lab) -> list[str]:
    """Return the kinds of shuffling for the data."""
    if not lab.data.lattice:
        return [POSITIONS]
    return [PATCHES, FRAMES] if "time" in lab.data.axes else [PATCHES]


def shuffled(model: Model, data: DataModule, *, kinds: Sequence[str]) -> dict[str, Any]:
    """Predict the validation set as it is and shuffled, on one view of each example.

    Args:
        model: Trained model.
        data: Its data.
        kinds: Kinds of shuffling.

    Returns:
        `labels`, and by kind `predicted` and `apart`, the largest change of a class score over the largest score.
    """
    labels, intact = predict(model, data)
    found: dict[str, Any] = {"labels": labels.tolist(), INTACT: {"predicted": intact.argmax(dim=-1).tolist()}}
    for kind in kinds:
        _, logits = predict(model, data, shuffler_of(kind, model, data.axes))
        apart = (logits - intact).abs().max() / intact.abs().max()
        found[kind] = {"predicted": logits.argmax(dim=-1).tolist(), "apart": apart.item()}
    return found


def shuffler_of(kind: str, model: Model, axes: Sequence[str]) -> Callable[[Tensor], Tensor]:
    """Return a function that shuffles batches.

    Args:
        kind: "patches" over the lattice, "frames" along time in whole patches, or "positions" of tokens.
        model: The model evaluated.
        axes: Names of the axes.
    """
    if kind != FRAMES or isinstance(model, TokenClassifier):
        return shuffler(model, SEED)
    time = list(axes).index("time")
    extent = model.embed.patch_size[time]
    return partial(shuffle_along, axis=time, extent=extent, generator=torch.Generator().manual_seed(SEED))


def losses(groups: dict[str, list[dict[str, Any]]], kind: str) -> list[dict[str, Any]]:
    """Compute the rows of a table: accuracy drop of every encoding by one kind of shuffling, the largest first.

    Args:
        groups: Results of `shuffled` by encoding, one per seed.
        kind: Kind of shuffling.
    """
    right = {name: (_right(runs, INTACT), _right(runs, kind)) for name, runs in groups.items()}
    drops = dict(zip(right, contrasts(list(right.values())), strict=True))
    verdicts = rank({name: drawn_mean(before - after) for name, (before, after) in right.items()})
    return [
        {
            **named(name),
            **cells("before", in_percent(accuracy_interval(right[name][0]))),
            **cells("after", in_percent(accuracy_interval(right[name][1]))),
            **cells("drop", drops[name]),
            **cells("lost", share_lost(*right[name])),
            "verdict": VERDICTS[found],
        }
        for name, found in verdicts.items()
    ]


def share_lost(before: np.ndarray, after: np.ndarray) -> Interval | None:
    """Compute the share of accuracy lost, (before - after) / before in percent, with its 95 % interval.

    Args:
        before, after: Right or wrong, of the same examples, `(seeds, examples)`.

    Returns:
        The share; None if no example was right before.
    """
    if not before.any():
        return None

    def lost(before: np.ndarray, after: np.ndarray, weights: np.ndarray) -> np.ndarray:
        right = weights @ before
        return 100 * (1 - np.divide(weights @ after, right, out=np.ones_like(right), where=right > 0))

    each_seed = [partial(lost, *pair) for pair in zip(before, after, strict=True)]
    return draw(each_seed, before.shape[1], draws=RESAMPLES).interval()


def _right(runs: list[dict[str, Any]], kind: str) -> np.ndarray:
    """Stack correct (1) and wrong (0) answers, `(seeds, examples)`."""
    return np.stack([np.equal(each["labels"], each[kind]["predicted"]).astype(float) for each in runs])


def _measure_name(kinds: Sequence[str]) -> str:
    return "-".join(["shuffled", *kinds, str(SEED)])


def _checks(trained: list[Trained], measured: dict[str, Any], kinds: Sequence[str]) -> list[Check]:
    """Check that shuffling does not change a ViT without positions, whose tokens are a set, beyond rounding."""
    unordered = [each for each in trained if each.encoding == "none" and each.run.config.model.backbone != "swin"]
    if not unordered:
        return []
    results = [measured[each.run.key] for each in unordered]
    pairs = [pair for found in results for kind in kinds for pair in _before_and_after(found, kind)]
    changed = sum(a != b for a, b in pairs)
    apart = max(found[kind]["apart"] for found in results for kind in kinds)
    return [
        Check(
            'Shuffling leaves "none" unchanged: the same predictions, up to ties within rounding',
            apart <= ROUNDING,
            f"{changed} of {len(pairs)} predictions changed, class scores by at most {apart:.1g} of the largest",
        )
    ]


def _before_and_after(found: dict[str, Any], kind: str) -> list[tuple[int, int]]:
    return list(zip(found[INTACT]["predicted"], found[kind]["predicted"], strict=True))


def _answer(rows: dict[str, list[dict[str, Any]]], seeds: int) -> str:
    clauses = [_clause(kind, of_kind) for kind, of_kind in rows.items()]
    text = "; ".join(clauses)
    return f"{text[0].upper()}{text[1:]}.{one_seed(seeds)}"


def _clause(kind: str, rows: list[dict[str, Any]]) -> str:
    first, *others = rows
    drop = points([first[key] for key in ("drop", "drop_low", "drop_high")])
    if not any(row["drop_low"] > 0 for row in rows):
        return f"with {kind} shuffled this run shows no drop: at most {drop}, of {first['name']}"
    tied = [row["name"] for row in others if row["verdict"] == NOT_DIFFERENT]
    return f"with {kind} shuffled {first['name']} drops most, {drop}{tied_with(tied)}"


def _table(kind: str, rows: list[dict[str, Any]], lab: Lab) -> Table:
    what = {
        PATCHES: "Every example's patches are permuted at random over the whole lattice; pixels within them are not.",
        FRAMES: "Every example's frames are permuted at random along time, in groups of the patch size along time.",
        POSITIONS: "The positions of every example are permuted at random among its tokens; contents are unchanged.",
    }[kind]
    return Table(
        f"Top-1 with {kind} shuffled",
        COLUMNS,
        rows,
        note=f"{what} Drops are paired, at 5 % over all rows, and verdicts over all pairs (Holm). The share lost is "
        f"the drop over the accuracy before, the papers' measure. Chance is {100 / lab.data.num_classes:.1f} %.",
    )


def _figure(rows: dict[str, list[dict[str, Any]]], lab: Lab) -> Figure:
    marks: list[dict[str, Any]] = []
    for kind, of_kind in rows.items():
        states = [(TITLES[kind], "after")] if marks else [(TITLES[INTACT], "before"), (TITLES[kind], "after")]
        marks += [
            {
                "name": row["name"],
                "inputs": title,
                "top1": row[key],
                "low": row[f"{key}_low"],
                "high": row[f"{key}_high"],
            }
            for title, key in states
            for row in of_kind
        ]
    first = next(iter(rows.values()))[0]
    return Figure(
        name="top1-shuffled",
        kind="points",
        title="Top-1 as trained and shuffled",
        alt=f"Top-1 in percent of {len(next(iter(rows.values())))} encodings before and after shuffling; "
        f"{first['name']} falls furthest, from {first['before']:.1f} to {first['after']:.1f}.",
        x=Axis("top1", "Top-1", "%"),
        y=Axis("name", "Encoding", scale="category"),
        rows=marks,
        series="inputs",
        low="low",
        high="high",
        caption=f"Lines are 95 % intervals. Chance is {100 / lab.data.num_classes:.1f} %.",
    )


def _notes(lab: Lab) -> list[str]:
    notes = [
        "Each example has its own random permutation, so that the intervals include variation between permutations.",
        "The drop measures how much a model depends on positions, not how well it uses them.",
    ]
    if lab.data.views > 1:
        notes.append("Before and after are on one view of each example, not averaged over views.")
    if lab.config.model.backbone == "swin":
        notes.append("A Swin's windows and merging depend on positions without any encoding, so that none drops too.")
    patch = math.prod(lab.config.model.patch_size)
    if patch > 1:
        notes.append("Pixels within a patch stay in order.")
    return notes


STUDY = Study(
    title="Shuffled patches",
    question="How much does each encoding's model depend on the positions of its patches or tokens?",
    sources=(f"{LIERE_1}, tables 3 and 4", f"{LIERE_2}, table 3"),
    find=find,
)
