"""Epochs until each encoding reaches the final top-1 of a reference (LieRE figure 3; second version, figure 4b)."""

from collections.abc import Mapping, Sequence
from functools import partial
from math import ceil, isinf
from typing import Any

import numpy as np

from torchrope_lab.conclusion import Interval, join_names, one_seed
from torchrope_lab.results import Advice, Axis, Figure, Findings, Row, Table
from torchrope_lab.studies.engine.estimates import (
    NAMES,
    RESAMPLES,
    VERDICT,
    by_encoding,
    cells,
    correct,
    drawn_means,
    ends,
    first_reach,
    format_interval,
    named,
    simultaneous_intervals,
    verdict_of,
    with_interval,
)
from torchrope_lab.studies.engine.published import LIERE_1, LIERE_2, published
from torchrope_lab.studies.engine.reference import (
    WITH_SAME,
    all_but,
    described,
    mixed_counterparts,
    mixed_notes,
    reference_of,
)
from torchrope_lab.studies.engine.runs import Trained
from torchrope_lab.studies.engine.study import Lab, Study

MEASURES = ("epochs", "steps", "seconds", "factor", "time_factor", "sooner")

PUBLISHED = (
    published(
        "Ratio of the absolute encoding's 200 epochs to those needed, CIFAR-100, from the texts",
        f"{LIERE_1}, section 5.4 and figure 3; {LIERE_2}, section 5.4 and figure 4b",
        """
        liere, first version | 3.5
        liere, second version | 3.9
        """,
        ("Encoding", "Factor"),
        unit="×",
        note="Other encodings are only in the figures, without numbers. The second version's conclusion still says "
        "3.5. Neither reports when the absolute encoding itself first reaches its final top-1.",
    ),
)


def find(lab: Lab) -> Findings:
    """Evaluate the learning curves of the runs of the accuracy study."""
    reference = reference_of(lab)
    names = list(dict.fromkeys([reference, *lab.encodings]))
    groups = by_encoding(lab.train(lab.runs(names)))
    means = drawn_means(np.stack([correct(runs).mean(axis=0) for runs in groups.values()]))
    drawn = dict(zip(groups, means.T, strict=True))
    reached = {name: _Reached(runs, groups[reference], drawn[name], drawn[reference]) for name, runs in groups.items()}
    steps = _steps_per_epoch(lab)
    sooner = _sooner(reached, all_but(reference, reached))
    rows = [_row(name, each, reached[reference], steps, sooner.get(name)) for name, each in reached.items()]
    counterparts = {name: other for name, other in mixed_counterparts(reached).items() if other != reference}
    over_mixed = _sooner(reached, counterparts)
    epochs = lab.config.optim.epochs
    return Findings(
        answer=_answer(rows, reference, len(lab.seeds)),
        tables=[
            _table(rows, reference),
            *([_mixed_table(reached, counterparts, over_mixed, reference)] if counterparts else []),
        ],
        figures=[_curves(groups, reached[reference], reference), _factors(rows, reference)],
        published=PUBLISHED,
        notes=[
            f"All learning rates decay over the same {epochs} epochs; shorter schedules may give other results.",
            "Times depend on the machine and its load; epochs and steps do not.",
            *mixed_notes(over_mixed.values()),
        ],
        advice=_advice(rows, reference, lab),
    )


class _Reached:
    """Epoch at which the curve of an encoding first reaches the reference's final top-1, with bootstrap draws.

    Every draw resamples seeds and validation examples. Predictions are stored only for the last epoch of a run: the
    change of its top-1 by a draw of examples is applied to all epochs, scaled by their standard errors.

    Args:
        runs: Runs of the encoding, over seeds.
        reference: Runs of the reference.
        drawn, drawn_reference: Top-1 of both in every draw of examples, `(draws,)`.
    """

    def __init__(
        self, runs: Sequence[Trained], reference: Sequence[Trained], drawn: np.ndarray, drawn_reference: np.ndarray
    ) -> None:
        curves, target = _top1_curves(runs), _top1_curves(reference)
        self.seconds = np.cumsum([[epoch["seconds"] for epoch in run.curve] for run in runs], axis=1).mean(axis=0)
        self.epochs = np.arange(1.0, curves.shape[1] + 1)
        self.target = float(target[:, -1].mean())
        drawn_curves = _draw_seeds(curves) + _shifts(runs, drawn)
        drawn_targets = _draw_seeds(target) + _shifts(reference, drawn_reference)
        [self.measured] = first_reach(self.epochs, curves.mean(axis=0)[None], target.mean(axis=0)[None, -1])
        self.draws = first_reach(self.epochs, drawn_curves, drawn_targets[:, -1])

    def time(self, epochs: np.ndarray) -> np.ndarray:
        """Convert epochs to seconds; infinite for infinitely many."""
        seconds = np.concatenate([[0.0], self.seconds])
        return np.where(np.isinf(epochs), np.inf, np.interp(epochs, np.arange(len(seconds)), seconds))


def _top1_curves(runs: Sequence[Trained]) -> np.ndarray:
    """Return top-1 after every epoch, `(seeds, epochs)`; 0 if a run diverged."""
    return np.nan_to_num(np.array([[epoch["val_top1"] for epoch in run.curve] for run in runs], dtype=float))


def _draw_seeds(curves: np.ndarray) -> np.ndarray:
    """Draw seeds with replacement and return their mean curves, `(draws, epochs)`."""
    chosen = np.random.default_rng(0).integers(len(curves), size=(RESAMPLES, len(curves)))
    return curves[chosen].mean(axis=1)


def _shifts(runs: Sequence[Trained], drawn: np.ndarray) -> np.ndarray:
    """Compute the change of top-1 of every epoch by each draw of examples, `(draws, epochs)`."""
    right = correct(runs).mean(axis=0)
    errors = _standard_error(_top1_curves(runs).mean(axis=0), len(right))
    return (drawn - right.mean())[:, None] * (errors / errors[-1])


def _standard_error(top1: np.ndarray, examples: int) -> np.ndarray:
    """Compute the standard error of accuracies; two added examples, one right and one wrong, keep it above zero."""
    share = (top1 * examples + 1) / (examples + 2)
    return np.sqrt(share * (1 - share) / examples)


def _steps_per_epoch(lab: Lab) -> int:
    batch = lab.config.optim.effective_batch or lab.config.data.batch_size
    return ceil(lab.data.counts[0] / batch)


def _sooner(reached: Mapping[str, _Reached], others: Mapping[str, str]) -> dict[str, Interval]:
    """Compute log ratios of epochs to reach the reference's final top-1, for pairs of encodings that both reach it.

    Args:
        reached: Results by encoding.
        others: Encoding to compare with, by encoding.
    """

    def interval(name: str, other: str, level: float) -> Interval:
        own, theirs = reached[name], reached[other]
        neither = np.isinf(own.draws) & np.isinf(theirs.draws)
        ratios = np.divide(theirs.draws, own.draws, out=np.ones_like(own.draws), where=~neither)
        with np.errstate(divide="ignore"):
            low, high = ends(np.log(ratios), level)
        return Interval(float(np.log(theirs.measured / own.measured)), low, high)

    both = {name: other for name, other in others.items() if not _missed(reached, name, other)}
    return simultaneous_intervals({name: partial(interval, name, other) for name, other in both.items()})


def _missed(reached: Mapping[str, _Reached], *names: str) -> list[str]:
    """Return the encodings that do not reach the reference's final top-1."""
    return [name for name in names if isinf(reached[name].measured)]


def _row(name: str, reached: _Reached, reference: _Reached, steps: int, sooner: Interval | None) -> dict[str, Any]:
    if isinf(reached.measured):
        empty = {key: value for each in MEASURES for key, value in cells(each, None).items()}
        never = isinf(ends(reached.draws)[0])
        return {**named(name), **empty, "verdict": "does not reach it" if never else "not significant"}
    total, last = len(reached.epochs), float(reference.seconds[-1])
    measured, draws = np.array([reached.measured]), reached.draws
    measures = {
        **_cells("epochs", measured, draws, most=total),
        **_cells("steps", measured * steps, draws * steps, most=total * steps),
        **_cells("seconds", reached.time(measured), reached.time(draws), most=float(reached.seconds[-1])),
        **_cells("factor", total / measured, total / draws, least=1.0),
        **_cells("time_factor", last / reached.time(measured), last / reached.time(draws)),
    }
    if sooner is None:
        return {**named(name), **measures, **cells("sooner", (1.0, 1.0, 1.0)), "verdict": "the reference"}
    verdict = verdict_of(sooner, "sooner", "later", "not significant")
    return {**named(name), **measures, **cells("sooner", np.exp(sooner).tolist()), "verdict": verdict}


def _cells(
    key: str, measured: np.ndarray, draws: np.ndarray, *, least: float = 0.0, most: float = np.inf
) -> dict[str, float | None]:
    low, high = (min(max(end, least), most) for end in ends(draws))
    return cells(key, (float(measured[0]), low, high))


def _table(rows: Sequence[dict[str, Any]], reference: str) -> Table:
    columns = (
        *NAMES,
        with_interval("epochs", "Epochs", digits=1),
        with_interval("steps", "Steps", digits=0),
        with_interval("seconds", "Time", "s", 1),
        with_interval("factor", "Fewer epochs than the whole training", "×", 1),
        with_interval("time_factor", "Less time than the whole training", "×", 1),
        with_interval("sooner", f"Times as early as {reference}", "×", 1),
        VERDICT,
    )
    note = (
        f"Epoch at which validation top-1 first reaches the final value of {described(reference, 'the')}, interpolated "
        "between epochs. The papers' factors divide the total epochs by that; but a noisy curve reaches its own final "
        "value before the end, so verdicts are on the last factor, at 5 % over all rows (Bonferroni). Intervals are "
        "bootstrap intervals over validation examples and seeds; a draw that never reaches it counts as all epochs."
    )
    return Table(f"When the final top-1 of {described(reference)} is reached", columns, rows, note=note)


def _mixed_table(
    reached: Mapping[str, _Reached], others: Mapping[str, str], sooner: Mapping[str, Interval], reference: str
) -> Table:
    """Build a table of how many times sooner than RoPE-Mixed encodings reach the reference's final top-1."""
    rows: list[Row] = []
    for name, other in others.items():
        found, missed = sooner.get(name), _missed(reached, name, other)
        rows.append(
            {
                **named(name),
                **cells("sooner", None if found is None else np.exp(found).tolist()),
                "verdict": f"not reached by {join_names(missed)}"
                if found is None
                else verdict_of(found, "sooner", "later", "not significant"),
            }
        )
    title = f"Sooner than RoPE-Mixed at the final top-1 of {described(reference)}"
    columns = (*NAMES, with_interval("sooner", "Sooner than RoPE-Mixed", "×", 1), VERDICT)
    return Table(title, columns, rows, note=f"At 5 % over all rows (Bonferroni). {WITH_SAME}")


def _answer(rows: Sequence[dict[str, Any]], reference: str, seeds: int) -> str:
    sooner, others = _by_verdict(rows, "sooner"), len(rows) - 1
    if not sooner:
        claim = f"This run cannot tell whether any encoding reaches the final accuracy of {described(reference)} sooner"
        return f"{claim} than that one itself.{one_seed(seeds)}"
    first = sooner[0]
    claim = (
        f"{len(sooner)} of {others} encodings reach the final accuracy of {described(reference)} significantly sooner"
    )
    return f"{claim} than it does, {first['name']} {_written(first, 'sooner')} times.{one_seed(seeds)}"


def _by_verdict(rows: Sequence[dict[str, Any]], verdict: str) -> list[dict[str, Any]]:
    """Return the rows of a verdict, the fewest epochs first."""
    return sorted((row for row in rows if row["verdict"] == verdict), key=lambda row: row["epochs"])


def _written(row: dict[str, Any], key: str) -> str:
    return format_interval([row[key], row[f"{key}_low"], row[f"{key}_high"]])


def _curves(groups: dict[str, list[Trained]], end: _Reached, reference: str) -> Figure:
    means = {name: _top1_curves(runs).mean(axis=0) for name, runs in groups.items()}
    rows: list[Row] = [
        {"name": name, "epoch": epoch, "top1": 100 * float(value)}
        for name, values in means.items()
        for epoch, value in enumerate(values, start=1)
    ]
    mark: list[Row] = [
        {"name": f"end of {reference}", "epoch": epoch, "top1": 100 * end.target} for epoch in (1, len(end.epochs))
    ]
    return Figure(
        name="top1-by-epoch",
        kind="lines",
        title=f"Top-1 while training, and the final value of {described(reference)}",
        alt=f"Validation top-1 after every epoch of {len(groups)} encodings, and a horizontal line at "
        f"{100 * end.target:.1f} %, the final value of {described(reference, 'the')}.",
        x=Axis("epoch", "Epoch"),
        y=Axis("top1", "Top-1", "%"),
        rows=rows + mark,
        series="name",
        caption="Mean over seeds.",
    )


def _factors(rows: Sequence[dict[str, Any]], reference: str) -> Figure:
    shown = [row for row in rows if row["factor"] is not None]
    bars: list[Row] = [
        {"name": row["name"], "factor": row["factor"], "low": row["factor_low"], "high": row["factor_high"]}
        for row in shown
    ]
    return Figure(
        name="factor",
        kind="bars",
        title="Total epochs over epochs needed",
        alt=f"A bar for each of {len(shown)} encodings that reach the final accuracy of {described(reference, 'the')}, "
        "which is among them.",
        x=Axis("name", "Encoding", scale="category"),
        y=Axis("factor", "Fewer epochs", "×"),
        rows=bars,
        series="name",
        low="low",
        high="high",
        caption=f"The bar of {described(reference, 'the')} shows the effect of variation between epochs.",
    )


def _advice(rows: Sequence[dict[str, Any]], reference: str, lab: Lab) -> list[Advice]:
    sooner = _by_verdict(rows, "sooner")
    if not sooner:
        return []
    best = sooner[0]
    factor = _written(best, "sooner")
    because = f"{best['name']} reaches the final top-1 of {described(reference)} {factor} times as early"
    names = [row["name"] for row in sooner if row["epochs"] <= best["epochs_high"]]
    return [Advice("Little time to train", names, f"{because}, on {lab.data.title}")]


STUDY = Study(
    title="Training efficiency",
    question="How much training does each encoding need to reach the accuracy of a reference?",
    sources=(f"{LIERE_1}, figure 3", f"{LIERE_2}, figure 4b"),
    find=find,
    optional_settings=("reference",),
)
