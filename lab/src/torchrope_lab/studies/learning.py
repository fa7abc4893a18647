"""Accuracy with frozen generators, several learning rates of generators, and several seeds (reviews of LieRE)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from statistics import fmean
from typing import Any

import numpy as np

from torchrope.encodings import Encoding
from torchrope.models import Swin
from torchrope_lab.conclusion import NOT_DIFFERENT, Interval, join_names, one_seed
from torchrope_lab.encodings import resolve_encoding
from torchrope_lab.results import Advice, Column, Findings, Table
from torchrope_lab.statistics import BootstrapEstimate
from torchrope_lab.studies import generators
from torchrope_lab.studies.engine.estimates import (
    HOLM,
    NAMES,
    OVER_SEEDS,
    TOP1,
    VERDICT,
    about_intervals,
    cells,
    contrasts,
    correct,
    drawn_mean,
    named,
    named_holm_intervals,
    points,
    spread,
    top1,
    verdict_of,
    with_interval,
)
from torchrope_lab.studies.engine.grid import Factor, Grid, Level, Plan, top1_figure, train_grid
from torchrope_lab.studies.engine.published import LIERE_REVIEWS
from torchrope_lab.studies.engine.runs import Run, Trained
from torchrope_lab.studies.engine.study import Lab, Study
from torchrope_lab.studies.finetune import BASELINE, TURN, fine_tuned

FROZEN, AS_MODEL, WIDER = "frozen", "× 1", "frozen, wider MLP"
RATES = (0.1, 1, 10, 50, 200)
"""Factors on the learning rate of the generators."""
TUNED_RATES = (1, 10, 50, 200)
STARTS = 3
"""Initialisations of the generators for each seed of the model."""
FIXED = "axial"
FACTOR = Factor("rate", "Rate of the generators", scale="category")
_LEVEL = Column("rate", "Rate of the generators")
_MOVED = Column("moved", "Change by training / initial norm", "%", 1)
_AHEAD = with_interval("ahead", "Ahead of frozen generators", "points", 1)


@dataclass(frozen=True)
class Pooled:
    """Differences averaged over encodings, in points, by rate.

    Attributes:
        frozen: Relative to frozen generators.
        model: Relative to generators trained at the model's rate.
    """

    frozen: Mapping[Level, Interval]
    model: Mapping[Level, Interval]


def find(lab: Lab) -> Findings:
    """Train each encoding with frozen and learned generators, with several initialisations, and after a swap."""
    names = [name for name in lab.encodings if num_generator_parameters(lab, name)]
    fixed = [name for name in lab.encodings if name not in names]
    if not names:
        return Findings(f"There are no learned generators in {join_names(fixed)}.")
    plan: Plan = {**rates(lab, names), FIXED: {FROZEN: lab.runs([FIXED])}}
    grid, notes = train_grid(lab, plan, lambda run: [generators.movement(run)] if run.encoding in names else [])
    reference = grid.pop(FIXED, {}).get(FROZEN, [])
    complete = {name: levels for name, levels in grid.items() if {FROZEN, AS_MODEL} <= {*levels}}
    starts, _ = train_grid(lab, restarts(lab, list(complete)))
    tuned = fine_tunings(lab, list(complete))
    pooled = averaged(complete)
    seeds = len(lab.seeds)
    left_out = [f"Left out: {join_names(fixed)}, whose generators are not learned."] if fixed else []
    return Findings(
        answer=answer(pooled, list(complete), seeds),
        tables=[
            _pooled_table(pooled, list(complete), seeds),
            _rates_table(complete, seeds),
            *([_fixed_table(complete, reference)] if reference else []),
            _starts_table(starts, seeds),
            *([_tuned_table(tuned, seeds)] if tuned else []),
        ],
        figures=[
            top1_figure(complete, FACTOR),
        ],
        notes=[*_NOTES, *left_out, *notes],
        advice=[_advice(pooled, lab)],
    )


# ---- runs


def rates(lab: Lab, names: Sequence[str]) -> Plan:
    """Plan runs of each encoding with frozen generators, at each rate, and frozen with a parameter-matched MLP."""
    plan: dict[str, dict[Level, Sequence[Run]]] = {}
    for name in names:
        plan[name] = {FROZEN: lab.runs([name], optim={"encoding_lr": 0.0})}
        plan[name] |= {level_of(rate): lab.runs([name], optim={"encoding_lr": float(rate)}) for rate in RATES}
        wider = wider_mlp(lab, name)
        if wider is not None:
            plan[name][WIDER] = lab.runs([name], optim={"encoding_lr": 0.0}, model={"mlp_dim": wider})
    return plan


def restarts(lab: Lab, names: Sequence[str]) -> Plan:
    """Plan runs with frozen generators that differ only in the generators' seed, the model's seed first."""
    frozen: dict[str, Any] = {"optim": {"encoding_lr": 0.0}}

    def started(name: str, start: int) -> list[Run]:
        if not start:
            return lab.runs([name], **frozen)
        return [lab.run(name, seed, **frozen, model={"encoding_seed": 1000 * start + seed}) for seed in lab.seeds]

    return {name: {start: started(name, start) for start in range(STARTS)} for name in names}


def fine_tunings(lab: Lab, names: Sequence[str]) -> Grid:
    """Fine-tune a model with a learned absolute encoding after adding a zero-initialised rotary one, at each rate.

    Empty without a lattice, where there is no such model.
    """
    if not lab.data.lattice:
        return {}
    rotary = [name for name in names if resolve_encoding(name).absolute is None and resolve_encoding(name).bias is None]
    if not rotary:
        return {}
    plan: dict[str, dict[Level, Sequence[Run]]] = {
        f"{BASELINE}+{name}": {
            level_of(rate): [fine_tuned(lab, f"{BASELINE}+{name}", seed, encoding_lr=float(rate)) for seed in lab.seeds]
            for rate in TUNED_RATES
        }
        for name in rotary
    }
    plan[BASELINE] = {FROZEN: [fine_tuned(lab, BASELINE, seed) for seed in lab.seeds]}
    return train_grid(lab, plan, lambda _: [TURN])[0]


def level_of(rate: float) -> str:
    """Name the level of a factor on the rate."""
    return f"× {rate:g}"


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


# ---- differences


def averaged(grid: Grid) -> Pooled:
    """Average the gain of each rate over encodings, each at 5 % over all rates (Holm).

    For one encoding these are the differences of its accuracies, with Tango's intervals.
    """
    levels = [level for level in next(iter(grid.values())) if all(level in of_one for of_one in grid.values())]
    mean = {level: _mean_right([of_one[level] for of_one in grid.values()]) for level in levels}

    def against(base: str) -> dict[Level, Interval]:
        others = [level for level in levels if level != base]
        if len(grid) == 1:
            (one,) = grid.values()
            pairs = [(correct(one[level]), correct(one[base])) for level in others]
            return dict(zip(others, contrasts(pairs), strict=True))
        drawn = {level: drawn_mean(100 * (mean[level] - mean[base])) for level in others}
        found = named_holm_intervals({str(level): each.interval for level, each in drawn.items()})
        return {level: found[str(level)] for level in drawn}

    return Pooled(against(FROZEN), against(AS_MODEL))


def _mean_right(groups: Sequence[Sequence[Trained]]) -> np.ndarray:
    """Compute the share of the encodings that are right, `(seeds, examples)`, over the seeds that all have."""
    seeds = min(len(runs) for runs in groups)
    return np.mean([correct(runs)[:seeds] for runs in groups], axis=0)


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


def _percent_moved(runs: Sequence[Trained]) -> float:
    return 100 * fmean(share for each in runs for share in each.measured(generators.MOVED)["path"])


# ---- tables


def _pooled_table(pooled: Pooled, names: Sequence[str], seeds: int) -> Table:
    columns = (
        _LEVEL,
        _AHEAD,
        VERDICT,
        with_interval("model", "Ahead of the model's rate", "points", 1),
        Column("against_model", "Verdict"),
    )
    rows = []
    for level in dict.fromkeys([FROZEN, *pooled.frozen]):
        frozen, model = pooled.frozen.get(level), pooled.model.get(level)
        rows.append(
            {
                "rate": level,
                **cells("ahead", frozen),
                "verdict": "the baseline" if frozen is None else verdict_of(frozen),
                **cells("model", model),
                "against_model": "the baseline" if model is None else verdict_of(model),
            }
        )
    note = f"{_of(names)}. {about_intervals(seeds)} Each column of differences: {HOLM}"
    return Table("Gain by the rate of the generators", columns, rows, note=note)


def _rates_table(grid: Grid, seeds: int) -> Table:
    keys = [(name, level) for name, levels in grid.items() for level in levels if level != FROZEN]
    pairs = [(correct(grid[name][level]), correct(grid[name][FROZEN])) for name, level in keys]
    ahead = dict(zip(keys, contrasts(pairs), strict=True))
    rows = []
    for name, levels in grid.items():
        for level, runs in levels.items():
            found = ahead.get((name, level))
            rows.append(
                {
                    **named(name),
                    "rate": level,
                    **top1(correct(runs)),
                    **cells("ahead", found),
                    "verdict": "the baseline" if found is None else verdict_of(found),
                    "moved": _percent_moved(runs),
                }
            )
    columns = (*NAMES, _LEVEL, TOP1, OVER_SEEDS, _AHEAD, VERDICT, _MOVED)
    return Table(
        "Top-1 by the rate of the generators", columns, rows, note=f"{about_intervals(seeds)} {HOLM} {_ABOUT_DISTANCE}"
    )


def _fixed_table(grid: Grid, reference: Sequence[Trained]) -> Table:
    levels = (FROZEN, AS_MODEL)
    keys = [(name, level) for name in grid for level in levels]
    found = contrasts([(correct(grid[name][level]), correct(reference)) for name, level in keys])
    rows = [
        {**named(name), "rate": level, **cells("ahead", each), "verdict": verdict_of(each)}
        for (name, level), each in zip(keys, found, strict=True)
    ]
    columns = (*NAMES, _LEVEL, with_interval("ahead", f"Ahead of {FIXED}", "points", 1), VERDICT)
    note = f"A gain with frozen generators is due to the random initialisation, not to learning. {HOLM}"
    return Table(f"Against fixed generators: {FIXED}", columns, rows, note=note)


def _starts_table(grid: Grid, seeds: int) -> Table:
    rights = {name: np.stack([correct(runs) for runs in of_one.values()]) for name, of_one in grid.items()}
    gains: dict[str, BootstrapEstimate] = {
        name: drawn_mean(100 * (best_start(right) - right.mean(axis=0))) for name, right in rights.items()
    }
    found = named_holm_intervals({name: each.interval for name, each in gains.items()})
    rows = []
    for name, right in rights.items():
        accuracies = 100 * right.mean(axis=2)  # (starts, seeds)
        over_seeds = [each for of_start in accuracies if (each := spread(of_start.tolist())) is not None]
        over_starts = [each for of_seed in accuracies.T if (each := spread(of_seed.tolist())) is not None]
        rows.append(
            {
                **named(name),
                "mean": float(accuracies.mean()),
                "starts": fmean(over_starts) if over_starts else None,
                "seeds": fmean(over_seeds) if over_seeds else None,
                **cells("gain", found[name]),
                "verdict": verdict_of(found[name]),
            }
        )
    columns = (
        *NAMES,
        Column("mean", "Top-1, mean over starts", "%", 1),
        Column("starts", "± over starts", "%", 1),
        Column("seeds", "± over seeds", "%", 1),
        with_interval("gain", f"Gain of the best of {STARTS}", "points", 1),
        VERDICT,
    )
    note = (
        f"Frozen generators, initialised {STARTS} times for each seed, all else the same. The best initialisation is "
        f"chosen on one half of the validation examples and measured on the other. {about_intervals(seeds)} {HOLM}"
    )
    return Table("Random restarts", columns, rows, note=note)


def _tuned_table(grid: Grid, seeds: int) -> Table:
    without = grid[BASELINE][FROZEN]
    keys = [(name, level) for name, levels in grid.items() if name != BASELINE for level in levels]
    ahead = dict(zip(keys, contrasts([(correct(grid[n][level]), correct(without)) for n, level in keys]), strict=True))
    rows = []
    for name, levels in grid.items():
        for level, runs in levels.items():
            found = ahead.get((name, level))
            rows.append(
                {
                    **named(name),
                    "rate": "none" if name == BASELINE else level,
                    **top1(correct(runs)),
                    **cells("ahead", found),
                    "verdict": "the baseline" if found is None else verdict_of(found),
                    "angle": None if found is None else fmean(each.measured(TURN.name)["radians"] for each in runs),
                }
            )
    columns = (
        *NAMES,
        _LEVEL,
        TOP1,
        OVER_SEEDS,
        with_interval("ahead", "Ahead of fine-tuning without it", "points", 1),
        VERDICT,
        Column("angle", "Angle across the input", "rad", 2),
    )
    return Table(
        "Fine-tuned after a swap, by the rate of the generators", columns, rows, note=f"{about_intervals(seeds)} {HOLM}"
    )


_ABOUT_DISTANCE = "The distance is ‖A′ − A‖ / ‖A‖, A at the start and A′ trained, the mean over layers and heads."
_NOTES = (
    "Frozen generators keep their initial values; × r is r times the model's learning rate (optim.encoding_lr). The "
    "wider MLP has as many additional parameters as the generators have.",
)


# ---- sentences


def answer(pooled: Pooled, names: Sequence[str], seeds: int) -> str:
    """Describe the gain of learned over frozen generators, at the model's rate and at the best rate."""
    usual = pooled.frozen[AS_MODEL]
    learned = {level: found for level, found in pooled.frozen.items() if level != WIDER}
    best = max(learned, key=lambda level: learned[level].estimate)
    significant = verdict_of(
        usual, "are significantly better than frozen ones", "are significantly worse than frozen ones", ""
    )
    compared = significant or f"are {NOT_DIFFERENT} from frozen ones"
    first = f"{_of(names)}: generators trained at the model's rate {compared}, {points(usual)}"
    if best == AS_MODEL:
        return f"{first}.{one_seed(seeds)}"
    adverb = "significantly " * bool(learned[best].low > 0)
    factor = str(best).removeprefix("× ")
    return f"{first}; at {factor} times that rate {adverb}{points(learned[best])}.{one_seed(seeds)}"


def _of(names: Sequence[str]) -> str:
    return f"{'Mean over ' * (len(names) > 1)}{join_names(names)}"


def _advice(pooled: Pooled, lab: Lab) -> Advice:
    rates_of = {level: found for level, found in pooled.model.items() if level not in (FROZEN, WIDER)}
    better = [level for level, found in rates_of.items() if found.low > 0]
    case = f"Learning rate of generators on {lab.data.title}"
    if not better:
        return Advice(case, lab.encodings, "no other rate than the model's is significantly better")
    best = max(better, key=lambda level: rates_of[level].estimate)
    because = f"{best} the model's rate is better by {points(rates_of[best])} than that rate"
    return Advice(case, lab.encodings, because)


STUDY = Study(
    title="Learning",
    question="Do learned generators improve over frozen ones, and at which learning rate?",
    sources=(f"{LIERE_REVIEWS}, additional parameters",),
    find=find,
    encodings=("mixed", "liere:8", "comrope-ld"),
)
