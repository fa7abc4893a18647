"""Epochs until each encoding reaches the final top-1 of a reference (LieRE figure 3; second version, figure 4b)."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from torchrope_lab.conclusion import Interval
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
    lab, reference, the_reference = results.lab, results.reference, described(results.reference, "the")
    groups = {cell.arm: runs for cell, runs in results.runs.items()}
    if results.top1.interval(Cell(reference)).low <= 100 * results.chance:
        return Section(answer=f"{not_learned(f'The reference, {reference},', results.chance)}.")
    reach, epochs = _reach(groups, reference), len(groups[reference][0].curve)
    sooner = factors(reach, all_but(reference, reach))
    seconds = {name: _seconds(runs) for name, runs in groups.items()}
    time = {name: each.map(seconds[name]) for name, each in reach.items()}

    def reached(value: Callable[[str], Interval]) -> Callable[[Cell], Interval | None]:
        return lambda cell: None if reach[cell.arm].missed else value(cell.arm)

    factor = (
        with_interval("factor", "Fewer epochs than the whole training", "×", 1),
        reached(lambda name: reach[name].map(lambda x: epochs / x).interval(least=1.0)),
    )
    columns = (
        (with_interval("epochs", "Epochs", digits=1), reached(lambda name: reach[name].interval(most=epochs))),
        (
            with_interval("seconds", "Time", "s", 1),
            reached(lambda name: time[name].interval(most=float(seconds[name](np.array(epochs))))),
        ),
        factor,
        (
            with_interval("sooner", f"Times as early as {reference}", "×", 1),
            reached(lambda name: times(sooner.get(Cell(name), Interval(0.0, 0.0, 0.0)))),
        ),
        (VERDICT, lambda cell: reach_verdict(reach, sooner, cell, WORDS)),
    )
    note = (
        f"Epoch at which validation top-1 first reaches the final value of {the_reference}, interpolated between "
        "epochs. The papers' factors divide the total epochs by that; but a noisy curve reaches its own final value "
        "before the end, so verdicts are on the last factor, whose intervals are simultaneous over all rows."
    )
    title = f"When the final top-1 of {described(reference)} is reached"
    bars = figure(
        "factor",
        "Total epochs over epochs needed",
        ENCODING_AXIS,
        Axis("factor", "Fewer epochs", "×"),
        marks([cell for cell in results.runs if not reach[cell.arm].missed], [factor]),
        f"The bar of {the_reference} shows the effect of variation between epochs.",
        kind="bars",
    )
    return Section(
        answer=reach_sentence("sooner", reference, sooner, len(reach) - 1, len(lab.seeds)),
        tables=[results.table(title, columns, note), _mixed(reach, reference)],
        figures=[_curves(groups, reference), bars],
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


def _mixed(reach: Mapping[str, Reach], reference: str) -> Table:
    """Compare encodings that learn more than frequencies with RoPE-Mixed, where both reach the target."""
    sooner = factors(reach, mixed_counterparts(reach, reference))
    columns: Columns = (
        *name_columns(),
        (with_interval("sooner", "Sooner than RoPE-Mixed", "×", 1), lambda cell: times(sooner[cell])),
        (VERDICT, lambda cell: verdict_of(sooner[cell], *WORDS)),
    )
    title = f"Sooner than RoPE-Mixed at the final top-1 of {described(reference)}"
    return table_of(title, columns, sooner, f"{SIMULTANEOUS} {WITH_SAME}")


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


find = OneFactor(sections=[_sections], reference=True)
