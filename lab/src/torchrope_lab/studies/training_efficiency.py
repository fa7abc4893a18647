"""Epochs until each encoding reaches the final top-1 of a reference (LieRE figure 3; second version, figure 4b)."""

from collections.abc import Callable, Mapping, Sequence
from math import ceil

import numpy as np

from torchrope_lab.conclusion import Interval, caveat, join_names
from torchrope_lab.engine.estimates import (
    SIMULTANEOUS,
    VERDICT,
    Columns,
    correct,
    drawn_means,
    estimate_in,
    format_interval,
    not_learned,
    simultaneous_intervals,
    table_of,
    top1,
    verdict_of,
    with_interval,
)
from torchrope_lab.engine.figures import ENCODING_AXIS, TOP1_AXIS, figure
from torchrope_lab.engine.grid import NAME_COLUMNS, ONLY, Cell, OneFactor, Results, Section
from torchrope_lab.engine.reach import Reach
from torchrope_lab.engine.reference import WITH_SAME, all_but, described, mixed_counterparts
from torchrope_lab.engine.runs import Trained
from torchrope_lab.results import Axis, Figure, Row, Table
from torchrope_lab.statistics import moved_by_seeds


def _sections(results: Results) -> Section:
    """Estimate when the learning curve of every encoding first reaches the reference's final top-1."""
    lab, reference = results.lab, results.reference
    groups = {name: levels[ONLY] for name, levels in results.grid.items()}
    if top1(correct(groups[reference])).low <= 100 * results.chance:
        return Section(answer=f"{not_learned(f'The reference, {reference},', results.chance)}.")
    reach = _reach(groups, reference)
    table = _table(results, groups, reach)
    rows = sorted((row for row in table.rows if row["verdict"] == "sooner"), key=lambda row: row["epochs"])  # type: ignore[arg-type, return-value]
    accuracy = f"the final accuracy of {described(reference)}"
    answer = f"This run cannot tell whether any encoding reaches {accuracy} sooner than that one itself"
    if rows:
        first, factor = rows[0], format_interval(estimate_in(rows[0], "sooner"))
        answer = f"{len(rows)} of {len(reach) - 1} encodings reach {accuracy} significantly sooner than it does, "
        answer += f"{first['name']} {factor} times"
    return Section(
        answer=f"{answer}.{caveat(len(lab.seeds))}",
        tables=[table, *_mixed(reach, reference)],
        figures=[_curves(groups, reference), _factors(table.rows, reference)],
    )


# ---- estimates


def _reach(groups: Mapping[str, Sequence[Trained]], reference: str) -> dict[str, Reach]:
    """Estimate the epoch at which each mean curve first reaches the reference's final top-1."""
    # Predictions are stored for the last epoch only: the change of its top-1 by a draw of examples is applied to all
    # epochs, scaled by their standard errors.
    rights = [correct(runs).mean(axis=0) for runs in groups.values()]
    curves, drawn = {}, {}
    for (name, runs), right, means in zip(groups.items(), rights, drawn_means(rights).T, strict=True):
        curves[name] = _top1_curves(runs)
        errors = _standard_error(curves[name].mean(axis=0), len(right))
        shifts = (means - right.mean())[:, None] * (errors / errors[-1])
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


def _sooner(reach: Mapping[str, Reach], others: Mapping[str, str]) -> dict[str, Interval]:
    """Compute how many times as early encodings reach the target as others, of pairs that both do, as logarithms."""
    pairs = {name: other for name, other in others.items() if not (reach[name].missed or reach[other].missed)}
    return simultaneous_intervals({name: reach[name].log_ratio(reach[other]) for name, other in pairs.items()})


def _seconds(runs: Sequence[Trained]) -> Callable[[np.ndarray], np.ndarray]:
    """Return a function that converts epochs to seconds; infinite for infinitely many."""
    of_epochs = np.cumsum([[epoch["seconds"] for epoch in run.curve] for run in runs], axis=1).mean(axis=0)
    seconds = np.concatenate([[0.0], of_epochs])
    return lambda epochs: np.where(np.isinf(epochs), np.inf, np.interp(epochs, np.arange(len(seconds)), seconds))


# ---- tables and figures


def _table(results: Results, groups: Mapping[str, Sequence[Trained]], reach: Mapping[str, Reach]) -> Table:
    lab, reference = results.lab, results.reference
    seconds = {name: _seconds(runs) for name, runs in groups.items()}
    epochs = len(groups[reference][0].curve)
    steps = ceil(lab.data.counts[0] / (lab.config.optim.effective_batch or lab.config.data.batch_size))
    whole = {name: float(of_epochs(np.array(epochs))) for name, of_epochs in seconds.items()}
    sooner = _sooner(reach, all_but(reference, reach))

    def reached(value: Callable[[str], Sequence[float]]) -> Callable[[Cell], Sequence[float] | None]:
        return lambda cell: None if reach[cell.name].missed else value(cell.name)

    def written(cell: Cell) -> str:
        if reach[cell.name].missed:
            return "does not reach it" if reach[cell.name].never else "not significant"
        if cell.name not in sooner:
            return "the reference"
        return verdict_of(sooner[cell.name], "sooner", "later", "not significant")

    time = {name: at.map(seconds[name]) for name, at in reach.items()}
    columns: Columns = (
        (with_interval("epochs", "Epochs", digits=1), reached(lambda name: reach[name].interval(most=epochs))),
        (
            with_interval("steps", "Steps", digits=0),
            reached(lambda name: reach[name].map(lambda x: x * steps).interval(most=epochs * steps)),
        ),
        (with_interval("seconds", "Time", "s", 1), reached(lambda name: time[name].interval(most=whole[name]))),
        (
            with_interval("factor", "Fewer epochs than the whole training", "×", 1),
            reached(lambda name: reach[name].map(lambda x: epochs / x).interval(least=1.0)),
        ),
        (
            with_interval("time_factor", "Less time than the whole training", "×", 1),
            reached(lambda name: time[name].map(lambda x: whole[reference] / x).interval()),
        ),
        (
            with_interval("sooner", f"Times as early as {reference}", "×", 1),
            reached(lambda name: np.exp(sooner.get(name, (0.0, 0.0, 0.0))).tolist()),
        ),
        (VERDICT, written),
    )
    note = (
        f"Epoch at which validation top-1 first reaches the final value of {described(reference, 'the')}, interpolated "
        "between epochs. The papers' factors divide the total epochs by that; but a noisy curve reaches its own final "
        "value before the end, so verdicts are on the last factor, whose intervals are simultaneous over all rows. "
        "Intervals are over validation examples and seeds; a draw that never reaches it counts as all epochs."
    )
    title = f"When the final top-1 of {described(reference)} is reached"
    return results.table(title, columns, note)


def _mixed(reach: Mapping[str, Reach], reference: str) -> list[Table]:
    """Compare encodings that learn more than frequencies with RoPE-Mixed: a table, none without any."""
    others = mixed_counterparts(reach, reference)
    sooner = _sooner(reach, others)

    def written(cell: Cell) -> str:
        if cell.name in sooner:
            return verdict_of(sooner[cell.name], "sooner", "later", "not significant")
        return f"not reached by {join_names([name for name in (cell.name, others[cell.name]) if reach[name].missed])}"

    columns = (
        *NAME_COLUMNS,
        (
            with_interval("sooner", "Sooner than RoPE-Mixed", "×", 1),
            lambda cell: np.exp(sooner[cell.name]).tolist() if cell.name in sooner else None,
        ),
        (VERDICT, written),
    )
    title = f"Sooner than RoPE-Mixed at the final top-1 of {described(reference)}"
    cells = [Cell(name, ONLY) for name in others]
    return [table_of(title, columns, cells, f"{SIMULTANEOUS} {WITH_SAME}")] if others else []


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


def _factors(rows: Sequence[Row], reference: str) -> Figure:
    shown = [dict(zip(("factor", "low", "high"), estimate_in(row, "factor"), strict=True)) for row in rows]
    return figure(
        "factor",
        "Total epochs over epochs needed",
        ENCODING_AXIS,
        Axis("factor", "Fewer epochs", "×"),
        [{"name": row["name"], **bar} for row, bar in zip(rows, shown, strict=True) if bar["factor"] is not None],
        f"The bar of {described(reference, 'the')} shows the effect of variation between epochs.",
        kind="bars",
        low="low",
        high="high",
    )


find = OneFactor(sections=[_sections], reference=True)
