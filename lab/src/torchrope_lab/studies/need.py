"""Scores by offset that heads learn from data, and the part that no sum over axes explains (in no paper)."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from torchrope.encodings import RelativePositionBias
from torchrope_lab.conclusion import one_seed
from torchrope_lab.data.datamodule import DataModule
from torchrope_lab.results import Axis, Column, Figure, Findings
from torchrope_lab.studies.engine.estimates import (
    NONE_POSSIBLE,
    Columns,
    estimate_in,
    format_interval,
    mean_column,
    table_of,
)
from torchrope_lab.studies.engine.figures import map_figure
from torchrope_lab.studies.engine.models import Measures, select_models
from torchrope_lab.studies.engine.runs import Measure
from torchrope_lab.studies.engine.study import Lab

HEADS_DRAWN = 6
MEASURE = "need-1"
RATE = 20.0
"""Factor on the learning rate of the biases: at that of the model they hardly leave their random start."""


def find(lab: Lab) -> Findings:
    """Train with a learned bias for each head and offset, and describe the biases."""
    if len(lab.data.axes) < 2:
        raise ValueError(f"study need requires data of two axes or more, got {lab.data.name}, which has one")
    rate = RATE * lab.config.optim.encoding_lr
    models = select_models(lab, lab.encodings, optim={"encoding_lr": rate})
    learned = [
        run
        for run in models.runs
        if any(isinstance(part, RelativePositionBias) for part in lab.blueprint(run).modules())
    ]
    if not learned:
        why = models.notes[0] if models.notes else f"got {', '.join(lab.encodings)}"
        raise ValueError(f"study need requires an encoding with a learned bias, such as bias: {why}")
    models = replace(models, runs=learned)
    measured = models.measure(lambda _: Measure(MEASURE, _measure))
    if not measured:
        return Findings(models.unmeasured(NONE_POSSIBLE), notes=models.notes)
    table = table_of("What the scores of trained heads depend on", _columns(), measured, _NOTE)
    return Findings(
        answer=_answer(estimate_in(table.rows[0], "oblique"), len(lab.seeds)),
        tables=[table],
        figures=_maps(measured[0], lab.data.axes),
        notes=models.notes,
    )


def _measure(model: Any, data: DataModule) -> dict[str, Any]:
    """Describe each head's bias; heads are those of all layers."""
    return {"heads": [head for part in model.modules() for head in describe_heads(part)]}


def describe_heads(module: Any) -> list[dict[str, Any]]:
    """Describe the scores of each head of a `RelativePositionBias`; other modules have none."""
    if not isinstance(module, RelativePositionBias):
        return []
    table = module.table.detach().cpu().double().unflatten(0, [2 * size - 1 for size in module.sizes])
    return [describe(scores.numpy()) for scores in table.unbind(-1)]


def describe(scores: np.ndarray) -> dict[str, Any]:
    """Split a function of the offset T into a sum of functions of one axis each, and the rest.

    All are weighted by the number of pairs of tokens with an offset, Π (n_a - |o_a|), whose factors make the main
    effects of T its weighted means along the other axes.

    Args:
        scores: T by offset, `(2 n_1 - 1, ..., 2 n_N - 1)`.

    Returns:
        `spread`: root mean square of T around its mean, in units of a score, e-fold weights of attention; `oblique`:
        that of the rest; `distance`: mean Euclidean length of an offset under the weights of softmax(T); `scores`.
    """
    sizes = [(length + 1) // 2 for length in scores.shape]
    factors = [1 - np.abs(np.arange(1 - size, size)) / size for size in sizes]
    shares = [factor / factor.sum() for factor in factors]
    pairs = np.array(1.0)
    for share in shares:
        pairs = np.multiply.outer(pairs, share)
    centred = scores - (pairs * scores).sum()
    rest = centred.copy()
    for axis in range(scores.ndim):
        others = tuple(other for other in range(scores.ndim) if other != axis)
        weights = pairs / shares[axis].reshape([-1 if other == axis else 1 for other in range(scores.ndim)])
        rest -= (weights * centred).sum(axis=others, keepdims=True)
    attended = pairs * np.exp(scores - scores.max())
    steps = np.meshgrid(*(np.arange(1 - size, size) for size in sizes), indexing="ij")
    length = np.sqrt(sum(step.astype(float) ** 2 for step in steps))
    return {
        "spread": float(np.sqrt((pairs * centred**2).sum())),
        "oblique": float(np.sqrt((pairs * rest**2).sum())),
        "distance": float((attended * length).sum() / attended.sum()),
        "scores": scores.round(4).tolist(),
    }


def _pool(measures: Measures, key: str) -> np.ndarray:
    return np.array([head[key] for result in measures.results for head in result["heads"]])


def _columns() -> Columns:
    return (
        (Column("encoding", "Encoding"), lambda each: each.title),
        (Column("name", "Name"), lambda each: each.name),
        mean_column("spread", "Spread of scores", "nats", 2, lambda each: _pool(each, "spread")),
        mean_column("oblique", "Spread that no sum over axes explains", "nats", 2, lambda each: _pool(each, "oblique")),
        mean_column("distance", "Mean distance", "tokens", 2, lambda each: _pool(each, "distance")),
        (
            Column("most", "Largest oblique spread of a head", "nats", 2),
            lambda each: float(_pool(each, "oblique").max()),
        ),
        (Column("heads", "Heads", digits=0), lambda each: len(_pool(each, "spread"))),
    )


_NOTE = (
    "Encodings in which each pair of channels sees one axis, such as axial, have scores that are sums of functions of "
    "one axis each; the rest needs channels that see several. Spreads are root mean squares over pairs of tokens, in "
    "natural logarithms of attention weights. Intervals are over the heads of all layers and seeds."
)


def _answer(oblique: Sequence[float], seeds: int) -> str:
    spread = format_interval(oblique, " nats", 2)
    return f"The biases of trained heads have a spread of {spread} that no sum over axes explains.{one_seed(seeds)}"


def _maps(measures: Measures, axes: Sequence[str]) -> list[Figure]:
    """Show the biases of the heads with most spread of the first seed; of more than two axes at offset 0 of others."""
    heads = sorted(measures.results[0]["heads"], key=lambda head: -head["spread"])[:HEADS_DRAWN]
    maps = {}
    for number, head in enumerate(heads, start=1):
        scores = np.array(head["scores"])
        for length in scores.shape[:-2]:
            scores = scores[length // 2]
        maps[f"head {number}, oblique {head['oblique']:.2f} of {head['spread']:.2f}"] = scores
    x, y = (Axis(key, f"Offset along {axis}", "tokens") for key, axis in zip("xy", (axes[-1], axes[-2]), strict=True))
    first = (-(next(iter(maps.values())).shape[0] // 2), -(next(iter(maps.values())).shape[1] // 2))
    caption = "Heads of all layers with most spread, of the first seed; query minus key."
    colour = Axis("value", "Bias", "nats")
    return [map_figure(x, y, colour, maps, first, name="biases", title="Learned bias by offset", caption=caption)]
