"""Epochs until each encoding reaches the final top-1 of a reference (LieRE figure 3; second version, figure 4b)."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import ceil
from typing import Any

import numpy as np

from torchrope_lab.conclusion import Interval, join_names
from torchrope_lab.engine.estimates import correct, drawn_mean, verdict_of
from torchrope_lab.engine.figures import ENCODING_AXIS, TOP1_AXIS, figure, marks
from torchrope_lab.engine.grid import OneFactor, Results, Section
from torchrope_lab.engine.long_table import (
    SIMULTANEOUS,
    VERDICT,
    Cell,
    Columns,
    name_columns,
    not_learned,
    table_of,
    with_interval,
)
from torchrope_lab.engine.reach import Reach, factors, reach_sentence, reach_verdict, times
from torchrope_lab.engine.reference import WITH_SAME, all_but, described, mixed_counterparts
from torchrope_lab.engine.runs import Trained
from torchrope_lab.results import Axis, Figure, Row, Table
from torchrope_lab.statistics import moved_by_seeds

WORDS = ("sooner", "later")


def _sections(results: Results) -> Section:
    """Estimate when the learning curve of every encoding first reaches the reference's final top-1."""
    lab, reference = results.lab, results.reference
    groups = {cell.arm: runs for cell, runs in results.runs.items()}
    if results.top1.interval(Cell(reference)).low <= 100 * results.chance:
        return Section(answer=f"{not_learned(f'The reference, {reference},', results.chance)}.")
    reach = _reach(groups, reference)
    sooner = factors(reach, all_but(reference, reach))
    columns = _columns(results, groups, reach)
    ahead = (
        with_interval("sooner", f"Times as early as {reference}", "×", 1),
        lambda cell: None if reach[cell.arm].missed else times(sooner.get(cell, Interval(0.0, 0.0, 0.0))),
    )
    decided = (VERDICT, lambda cell: reach_verdict(reach, sooner, cell, WORDS))
    note = (
        f"Epoch at which validation top-1 first reaches the final value of {described(reference, 'the')}, interpolated "
        "between epochs. The papers' factors divide the total epochs by that; but a noisy curve reaches its own final "
        "value before the end, so verdicts are on the last factor, whose intervals are simultaneous over all rows."
    )
    title = f"When the final top-1 of {described(reference)} is reached"
    return Section(
        answer=reach_sentence("sooner", reference, sooner, len(reach) - 1, len(lab.seeds)),
        tables=[results.table(title, (*columns.values(), ahead, decided), note), *_mixed(reach, reference)],
        figures=[_curves(groups, reference), _factors(results, reach, columns["factor"], reference)],
    )


# ---- estimates


def _reach(groups: Mapping[str, Sequence[Trained]], reference: str) -> dict[str, Reach]:
    """Estimate the epoch at which each mean curve first reaches the reference's final top-1."""
    # Predictions are stored for the last epoch only: the change of its top-1 by a draw of examples is applied to all
    # epochs, scaled by their standard errors.
    curves, drawn = {}, {}
    for name, runs in groups.items():
        curves[name], right = _top1_curves(runs), correct(runs).mean(axis=0)
        errors = _standard_error(curves[name].mean(axis=0), len(right))
        shifts = (drawn_mean(right).drawn - right.mean())[:, None] * (errors / errors[-1])
        drawn[name] = curves[name].mean(axis=0) + moved_by_seeds(curves[name]) + shifts
    target, drawn_targets = curves[reference].mean(axis=0)[-1], drawn[reference][:, -1]
    return {
        name: Reach.of(np.arange(1.0, each.shape[1] + 1), each.mean(axis=0), target, drawn[name], drawn_targets)
        for name, each in curves.items()
    }


def _top1_curves(runs: Sequence[Trained]) -> np.ndarray:
    """Return top-1 after every epoch, `(seeds, epochs)`; 0 if a run diverged."""
    return np.nan_to_num(np.array([[epoch["val_top1"] for epoch in run.curve] for run in runs], dtype=float))


def _standard_error(top1: np.ndarray, examples: int) -> np.ndarray:
    """Compute the standard error of accuracies; two added examples, one right and one wrong, keep it above zero."""
    share = (top1 * examples + 1) / (examples + 2)
    return np.sqrt(share * (1 - share) / examples)


def _seconds(runs: Sequence[Trained]) -> Callable[[np.ndarray], np.ndarray]:
    """Return a function that converts epochs to seconds; infinite for infinitely many."""
    of_epochs = np.cumsum([[epoch["seconds"] for epoch in run.curve] for run in runs], axis=1).mean(axis=0)
    seconds = np.concatenate([[0.0], of_epochs])
    return lambda epochs: np.where(np.isinf(epochs), np.inf, np.interp(epochs, np.arange(len(seconds)), seconds))


# ---- tables and figures


def _columns(results: Results, groups: Mapping[str, Sequence[Trained]], reach: Mapping[str, Reach]) -> dict[str, Any]:
    """Return columns of the epoch at which the target is reached, in several units, by key."""
    lab, epochs = results.lab, len(groups[results.reference][0].curve)
    steps = ceil(lab.data.counts[0] / (lab.config.optim.effective_batch or lab.config.data.batch_size))
    seconds = {name: _seconds(runs) for name, runs in groups.items()}
    whole = {name: float(of_epochs(np.array(epochs))) for name, of_epochs in seconds.items()}
    time = {name: at.map(seconds[name]) for name, at in reach.items()}
    units: dict[str, tuple[str, str, int, Callable[[str], Interval]]] = {
        "epochs": ("Epochs", "", 1, lambda name: reach[name].interval(most=epochs)),
        "steps": ("Steps", "", 0, lambda name: reach[name].map(lambda x: x * steps).interval(most=epochs * steps)),
        "seconds": ("Time", "s", 1, lambda name: time[name].interval(most=whole[name])),
        "factor": ("Fewer epochs than the whole training", "×", 1,
                   lambda name: reach[name].map(lambda x: epochs / x).interval(least=1.0)),
        "time_factor": ("Less time than the whole training", "×", 1,
                        lambda name: time[name].map(lambda x: whole[results.reference] / x).interval()),
    }  # fmt: skip

    def reached(value: Callable[[str], Interval], cell: Cell) -> Interval | None:
        return None if reach[cell.arm].missed else value(cell.arm)

    return {
        key: (with_interval(key, title, unit, digits), partial(reached, value))
        for key, (title, unit, digits, value) in units.items()
    }


def _mixed(reach: Mapping[str, Reach], reference: str) -> list[Table]:
    """Compare encodings that learn more than frequencies with RoPE-Mixed: a table, none without any."""
    others = mixed_counterparts(reach, reference)
    sooner = factors(reach, others)

    def written(cell: Cell) -> str:
        if cell in sooner:
            return verdict_of(sooner[cell], *WORDS)
        return f"not reached by {join_names([name for name in (cell.arm, others[cell.arm]) if reach[name].missed])}"

    columns: Columns = (
        *name_columns(),
        (
            with_interval("sooner", "Sooner than RoPE-Mixed", "×", 1),
            lambda cell: times(sooner[cell]) if cell in sooner else None,
        ),
        (VERDICT, written),
    )
    title = f"Sooner than RoPE-Mixed at the final top-1 of {described(reference)}"
    return [table_of(title, columns, map(Cell, others), f"{SIMULTANEOUS} {WITH_SAME}")] if others else []


def _curves(groups: Mapping[str, Sequence[Trained]], reference: str) -> Figure:
    means = {name: 100 * _top1_curves(runs).mean(axis=0) for name, runs in groups.items()}
    last = float(means[reference][-1])
    rows: list[Row] = [
        {"name": name, "epoch": epoch, "top1": float(value)}
        for name, values in means.items()
        for epoch, value in enumerate(values, start=1)
    ]
    rows += [{"name": f"end of {reference}", "epoch": epoch, "top1": last} for epoch in (1, len(means[reference]))]
    title = f"Top-1 while training, and the final value of {described(reference)}"
    return figure("top1-by-epoch", title, Axis("epoch", "Epoch"), TOP1_AXIS, rows, "Mean over seeds.")


def _factors(results: Results, reach: Mapping[str, Reach], factor: Any, reference: str) -> Figure:
    return figure(
        "factor",
        "Total epochs over epochs needed",
        ENCODING_AXIS,
        Axis("factor", "Fewer epochs", "×"),
        marks([cell for cell in results.runs if not reach[cell.arm].missed], [factor]),
        f"The bar of {described(reference, 'the')} shows the effect of variation between epochs.",
        kind="bars",
        low="factor_low",
        high="factor_high",
    )


find = OneFactor(sections=[_sections], reference=True)
