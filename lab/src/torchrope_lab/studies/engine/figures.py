"""Figures of accuracy by encoding and by epoch."""

from collections.abc import Mapping, Sequence
from math import isfinite
from statistics import fmean

import numpy as np

from torchrope_lab.results import Axis, Figure, Row
from torchrope_lab.studies.engine.estimates import top1
from torchrope_lab.studies.engine.runs import Trained

_TOP1 = Axis("top1", "Top-1", "%")


def top1_by_encoding(rights: Mapping[str, np.ndarray], chance: float) -> Figure:
    """Build a figure of top-1 with intervals, in decreasing order.

    Args:
        rights: Right or wrong by encoding, `(seeds, examples)`.
        chance: Accuracy of the best constant prediction.
    """
    ordered = sorted(rights, key=lambda name: (-rights[name].mean(), name))
    return Figure(
        name="top1",
        kind="points",
        title="Accuracy",
        alt=f"Top-1 in percent of {len(ordered)} encodings with 95 % intervals; {ordered[0]} is highest.",
        x=_TOP1,
        y=Axis("name", "Encoding", scale="category"),
        rows=[{"name": name, **top1(rights[name])} for name in ordered],
        series="name",
        low="low",
        high="high",
        caption=f"Lines are 95 % intervals. The best constant prediction has {100 * chance:.1f} %.",
    )


def top1_curves(groups: Mapping[str, Sequence[Trained]]) -> Figure:
    """Build a figure of validation top-1 after every epoch."""
    rows: list[Row] = [
        {"name": name, "epoch": epoch, "top1": 100 * mean, "low": 100 * low, "high": 100 * high}
        for name, runs in groups.items()
        for epoch, mean, low, high in over_epochs(runs, "val_top1")
    ]
    return Figure(
        name="curves",
        kind="lines",
        title="Accuracy while training",
        alt="Validation top-1 after every epoch, one line per encoding.",
        x=Axis("epoch", "Epoch"),
        y=_TOP1,
        rows=rows,
        series="name",
        low="low",
        high="high",
        caption="Mean over training runs; bands are from the lowest to the highest.",
    )


def over_epochs(runs: Sequence[Trained], key: str) -> list[tuple[int, float, float, float]]:
    """Return epoch, mean, lowest and highest over runs, for epochs in which all have a finite value."""
    found = []
    for epochs in zip(*(each.curve for each in runs), strict=False):
        values = [epoch.get(key) for epoch in epochs]
        finite = [value for value in values if value is not None and isfinite(value)]
        if len(finite) == len(values):
            found.append((int(epochs[0]["epoch"]), fmean(finite), min(finite), max(finite)))
    return found
