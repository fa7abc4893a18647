"""Accuracy with frozen generators, several learning rates of generators, and several seeds (reviews of LieRE)."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import ceil
from statistics import fmean
from typing import Any

import numpy as np

from torchrope.encodings import Encoding
from torchrope.models import Swin
from torchrope_lab.conclusion import NOT_DIFFERENT, Interval, join_names, one_seed
from torchrope_lab.encodings import resolve_encoding
from torchrope_lab.results import Advice, Column
from torchrope_lab.studies import generators
from torchrope_lab.studies.engine.estimates import (
    SIMULTANEOUS,
    VERDICT,
    contrasts,
    correct,
    drawn_mean,
    points,
    simultaneous_intervals,
    spread,
    table_of,
    verdict_of,
    with_interval,
)
from torchrope_lab.studies.engine.finetuning import ANGLE_COLUMN, BASELINE, TURN, fine_tuned
from torchrope_lab.studies.engine.grid import (
    NAME_COLUMNS,
    TOP1_COLUMNS,
    Cell,
    Factor,
    Grid,
    Level,
    Levels,
    OneFactor,
    Plan,
    Results,
    Section,
    baseline_changes,
    change_columns,
    top1_figure,
    train_grid,
)
from torchrope_lab.studies.engine.runs import Run
from torchrope_lab.studies.engine.study import Lab

FROZEN, AS_MODEL, WIDER = "frozen", "× 1", "frozen, wider MLP"
RATES = (0.1, 1, 10, 50, 200)
"""Factors on the learning rate of the generators."""
TUNED_RATES = (1, 10, 50, 200)
LEVELS: Levels = {
    FROZEN: {"optim": {"encoding_lr": 0.0}},
    **{f"× {rate:g}": {"optim": {"encoding_lr": float(rate)}} for rate in RATES},
    WIDER: {"optim": {"encoding_lr": 0.0}},
}
STARTS = 3
"""Initialisations of the generators for each seed of the model."""
FIXED = "axial"
Gains = Mapping[str, Interval]
"""Differences from one level by level, in points, averaged over encodings."""


# ---- runs


def learning_encodings(lab: Lab) -> tuple[list[str], list[str]]:
    """Return the encodings with learned generators, and a note on the others."""
    names = [name for name in lab.encodings if num_generator_parameters(lab, name)]
    fixed = [name for name in lab.encodings if name not in names]
    return names, [f"Left out: {join_names(fixed)}, whose generators are not learned."] if fixed else []


def runs_at(lab: Lab, name: str, level: Level, settings: Mapping[str, Any]) -> Sequence[Run]:
    """Plan the runs of a level; that of a wider MLP has none with a Swin."""
    if level != WIDER:
        return lab.runs([name], **settings)
    width = wider_mlp(lab, name)
    return [] if width is None else lab.runs([name], **settings, model={"mlp_dim": width})


def restarts(lab: Lab, names: Sequence[str]) -> Plan:
    """Plan runs with frozen generators that differ only in the generators' seed, the model's seed first."""

    def model(start: int, seed: int) -> dict[str, int]:
        return {"encoding_seed": 1000 * start + seed} if start else {}

    return {
        name: {
            start: [lab.run(name, seed, **LEVELS[FROZEN], model=model(start, seed)) for seed in lab.seeds]
            for start in range(STARTS)
        }
        for name in names
    }


def num_generator_parameters(lab: Lab, name: str) -> int:
    """Count the learned parameters of a model's rotary encodings, over all layers and heads."""
    model = lab.blueprint(lab.run(name))
    found = {each for module in model.modules() if isinstance(module, Encoding) for each in module.parameters()}
    return sum(parameter.numel() for parameter in found)


def wider_mlp(lab: Lab, name: str) -> int | None:
    """Compute the MLP width that adds as many parameters as the generators have, rounded up; None for a Swin."""
    model = lab.blueprint(lab.run(name))
    if isinstance(model, Swin):
        return None
    first: Any = model.layers[0]
    hidden, dim = first.mlp[0].out_features, first.mlp[0].in_features
    of_one_channel = len(model.layers) * (2 * dim + 1)  # a row, a bias and a column in each layer
    return hidden + ceil(num_generator_parameters(lab, name) / of_one_channel)


# ---- sections


def _gain_by_rate(results: Results) -> Section:
    """Average the gain of each rate over encodings, relative to frozen generators and to those at the model's rate."""
    frozen, model = _gains(results, FROZEN), _gains(results, AS_MODEL)

    def columns(gains: Gains, key: str, heading: str, verdict: Column) -> Any:
        shown, (_, written) = change_columns({("", level): gain for level, gain in gains.items()}, heading, key)
        return shown, (verdict, written)

    names = f"{'Mean over ' * (len(results.grid) > 1)}{join_names(list(results.grid))}"
    table = table_of(
        "Gain by the rate of the generators",
        (
            results.factor.columns[-1],
            *columns(frozen, "ahead", "Ahead of frozen generators", VERDICT),
            *columns(model, "model", "Ahead of the model's rate", Column("against_model", "Verdict")),
        ),
        [Cell("", level) for level in dict.fromkeys([FROZEN, *frozen])],
        f"{names}. {results.about_top1} Each column of differences: {SIMULTANEOUS}",
    )
    answer = f"{names}: {_sentence(frozen)}.{one_seed(len(results.lab.seeds))}"
    return Section(answer=answer, tables=[table], advice=[_advice(model, results.lab, list(results.grid))])


def _gains(results: Results, base: str) -> Gains:
    """Average the differences from a level over encodings, at 5 % over all levels (Bonferroni).

    For one encoding these are the differences of its accuracies, with Tango's intervals.
    """
    grid = list(results.grid.values())
    levels = [str(level) for level in grid[0] if all(level in of_one for of_one in grid)]
    others = [level for level in levels if level != base]
    if len(grid) == 1:
        return contrasts({level: (correct(grid[0][level]), correct(grid[0][base])) for level in others})
    seeds = {level: min(len(of_one[level]) for of_one in grid) for level in levels}
    mean = {level: np.mean([correct(of_one[level])[: seeds[level]] for of_one in grid], axis=0) for level in levels}
    return simultaneous_intervals({level: drawn_mean(100 * (mean[level] - mean[base])).interval for level in others})


def _sentence(frozen: Gains) -> str:
    """Describe the gain of learned over frozen generators, at the model's rate and at the best rate."""
    usual = frozen[AS_MODEL]
    learned = {level: gain for level, gain in frozen.items() if level != WIDER}
    best = max(learned, key=lambda level: learned[level].estimate)
    compared = verdict_of(usual, "significantly better than", "significantly worse than", f"{NOT_DIFFERENT} from")
    first = f"generators trained at the model's rate are {compared} frozen ones, {points(usual)}"
    if best == AS_MODEL:
        return first
    adverb = "significantly " * bool(learned[best].low > 0)
    return f"{first}; at {best.removeprefix('× ')} times that rate {adverb}{points(learned[best])}"


def _advice(model: Gains, lab: Lab, names: Sequence[str]) -> Advice:
    better = {level: gain for level, gain in model.items() if level not in (FROZEN, WIDER) and gain.low > 0}
    because = "no other rate than the model's is significantly better"
    if better:
        best = max(better, key=lambda level: better[level].estimate)
        because = f"{best} the model's rate is better by {points(better[best])} than that rate"
    return Advice(f"Learning rate of generators on {lab.data.title}", names, because)


def _rates(results: Results) -> Section:
    """Show top-1 at each rate, and how far the generators moved."""
    changes = results.changes(lambda name, _: (name, FROZEN))
    moved = Column("moved", "Change by training / initial norm", "%", 1)

    def change(cell: Cell) -> float | None:
        shares = [share for each in cell.runs for share in each.measured(generators.MOVED)["path"]]
        return None if None in shares else 100 * fmean(shares)  # of a run that diverged

    columns = (*TOP1_COLUMNS, *change_columns(changes, "Ahead of frozen generators", "ahead"), (moved, change))
    note = (
        f"{results.about_top1} {SIMULTANEOUS} The distance is ‖A′ − A‖ / ‖A‖, A at the start and A′ "
        "trained, the mean over layers and heads."
    )
    table = results.table("Top-1 by the rate of the generators", columns, note)
    return Section(tables=[table], figures=[top1_figure(results)])


def _against_fixed(results: Results) -> Section:
    """Compare frozen generators, and those trained at the model's rate, with a fixed encoding."""
    both: Grid = {name: {level: levels[level] for level in (FROZEN, AS_MODEL)} for name, levels in results.grid.items()}
    changes, refused = baseline_changes(replace(results, grid=both), FIXED)
    note = "A gain with frozen generators is due to the random initialisation, not to learning."
    title, heading = f"Against fixed generators: {FIXED}", f"Ahead of {FIXED}"
    return Section(tables=results.change_table(title, changes, heading, note, "ahead"), notes=refused)


def _restarts(results: Results) -> Section:
    """Compare several initialisations of frozen generators, and estimate the gain of choosing the best."""
    grid, _ = train_grid(results.lab, restarts(results.lab, list(results.grid)))
    rights = {name: np.stack([correct(runs) for runs in starts.values()]) for name, starts in grid.items()}
    gains = simultaneous_intervals(
        {name: drawn_mean(100 * (best_start(right) - right.mean(axis=0))).interval for name, right in rights.items()}
    )

    def mean_spread(groups: np.ndarray) -> float | None:
        spreads = [deviation for each in 100 * groups if (deviation := spread(each.tolist())) is not None]
        return fmean(spreads) if spreads else None

    columns = (
        *NAME_COLUMNS,
        (Column("mean", "Top-1, mean over starts", "%", 1), lambda at: float((100 * rights[at.name].mean(2)).mean())),
        (Column("starts", "± over starts", "%", 1), lambda at: mean_spread(rights[at.name].mean(axis=2).T)),
        (Column("seeds", "± over seeds", "%", 1), lambda at: mean_spread(rights[at.name].mean(axis=2))),
        (with_interval("gain", f"Gain of the best of {STARTS}", "points", 1), lambda cell: gains[cell.name]),
        (VERDICT, lambda cell: verdict_of(gains[cell.name])),
    )
    note = (
        f"Frozen generators, initialised {STARTS} times for each seed, all else the same. The best initialisation is "
        "chosen on one half of the validation examples and measured on the other. "
        f"{results.about_top1} {SIMULTANEOUS}"
    )
    return Section(tables=[table_of("Random restarts", columns, [Cell(name, FROZEN) for name in grid], note)])


def best_start(right: np.ndarray) -> np.ndarray:
    """Return answers with the best of several initialisations, chosen on the other half of the examples.

    Args:
        right: `(starts, seeds, examples)`.

    Returns:
        `(seeds, examples)`; even examples with the initialisation that is best on the odd ones, and vice versa.
    """
    _, seeds, examples = right.shape
    halves = np.arange(examples) % 2
    chosen = np.empty((seeds, examples))
    for half in (0, 1):
        best = right[:, :, halves != half].mean(axis=2).argmax(axis=0)
        for seed in range(seeds):
            chosen[seed, halves == half] = right[best[seed], seed, halves == half]
    return chosen


def _after_a_swap(results: Results) -> Section:
    """Fine-tune a model with a learned absolute encoding after adding a zero-initialised rotary one, at each rate.

    Empty without a lattice, where there is no such model.
    """
    lab = results.lab
    choices = {name: resolve_encoding(name) for name in results.grid}
    rotary = [f"{BASELINE}+{name}" for name, choice in choices.items() if not (choice.absolute or choice.bias)]
    if not lab.data.lattice or not rotary:
        return Section()
    plan: dict[str, dict[Level, Sequence[Run]]] = {
        name: {f"× {rate:g}": fine_tuned(lab, name, encoding_lr=float(rate)) for rate in TUNED_RATES} for name in rotary
    }
    plan[BASELINE] = {"none": fine_tuned(lab, BASELINE)}
    tuned = replace(results, grid=train_grid(lab, plan, lambda _: [TURN])[0])
    changes = tuned.changes(lambda *_: (BASELINE, "none"))
    columns = (
        *TOP1_COLUMNS,
        *change_columns(changes, "Ahead of fine-tuning without it", "ahead"),
        *ANGLE_COLUMN,
    )
    title = "Fine-tuned after a swap, by the rate of the generators"
    return Section(tables=[tuned.table(title, columns, f"{results.about_top1} {SIMULTANEOUS}")])


find = OneFactor(
    factor=Factor("rate", "Rate of the generators", scale="category"),
    levels=LEVELS,
    sections=[_gain_by_rate, _rates, _against_fixed, _restarts, _after_a_swap],
    arms=learning_encodings,
    runs=runs_at,
    measures=lambda run: [generators.movement(run)],
    further=lambda _: True,  # of a fixed encoding, restarts and fine-tuning
    notes=[
        "Frozen generators keep their initial values; × r is r times the model's learning rate (optim.encoding_lr). "
        "The wider MLP has as many additional parameters as the generators have.",
    ],
)
