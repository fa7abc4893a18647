"""Classifiers with each encoding: their conclusion, main table and figures."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean

import numpy as np

from torchrope_lab.conclusion import BASELINE, Conclusion
from torchrope_lab.engine.estimates import (
    by_encoding,
    correct,
    in_percent,
    last_train_losses,
    loss,
    spread,
    verdict,
)
from torchrope_lab.engine.figures import top1_by_encoding, top1_curves
from torchrope_lab.engine.grid import about_intervals
from torchrope_lab.engine.long_table import (
    VERDICT,
    Cell,
    Columns,
    RightOrWrong,
    name_columns,
    table_of,
    with_interval,
)
from torchrope_lab.engine.runs import Trained
from torchrope_lab.results import Column, Figure, Table
from torchrope_lab.statistics import balanced_accuracy, conclude, constant_accuracy

UNEQUAL = 1.5
"""Size of the largest class relative to the smallest from which balanced accuracies are shown."""


@dataclass(frozen=True)
class Comparison:
    """Trained classifiers with each encoding, and the conclusion about them."""

    groups: Mapping[str, Sequence[Trained]]  # by encoding, by decreasing accuracy, with the seeds that all have
    conclusion: Conclusion  # about distinct functions
    same: Mapping[str, str]  # another encoding that is the same function on the data, by encoding

    @cached_property
    def top1(self) -> RightOrWrong:
        """The answers with each encoding."""
        return RightOrWrong({Cell(name): correct(runs) for name, runs in self.groups.items()})

    @property
    def runs(self) -> list[Trained]:
        """All runs."""
        return [run for runs in self.groups.values() for run in runs]

    @property
    def labels(self) -> np.ndarray:
        """Class of every validation example."""
        return np.asarray(self.runs[0].labels)


def compare_runs(
    trained: Iterable[Trained], *, margin: float = 0.01, costs: Mapping[str, np.ndarray] | None = None
) -> Comparison:
    """Conclude, as `conclude` does, which encoding is most accurate on the same data, over the seeds that all have."""
    groups = with_common_seeds(by_encoding(trained))
    rights = {name: correct(runs) for name, runs in groups.items()}
    ordered = {name: groups[name] for name in sorted(groups, key=lambda name: (-rights[name].mean(), name))}
    same = same_functions(groups)
    distinct = {name: right for name, right in rights.items() if name not in same}
    labels = next(iter(groups.values()))[0].labels
    conclusion = conclude(
        distinct,
        chance=constant_accuracy(labels),
        margin=margin,
        costs={name: cost for name, cost in (costs or {}).items() if name in distinct},
    )
    return Comparison(ordered, conclusion, same)


def with_common_seeds(groups: Mapping[str, Sequence[Trained]]) -> dict[str, list[Trained]]:
    """Keep the seeds that all encodings have, or the one that most have and the encodings that have it."""
    seeds = [run.seed for runs in groups.values() for run in runs]
    common = set.intersection(*({run.seed for run in runs} for runs in groups.values())) or {
        max(seeds, key=seeds.count)
    }
    kept = {name: [run for run in runs if run.seed in common] for name, runs in groups.items()}
    return {name: runs for name, runs in kept.items() if runs}


def same_functions(groups: Mapping[str, Sequence[Trained]]) -> dict[str, str]:
    """Map encodings to the first one that is the same function on the data, such as `mrope` to `axial` on one axis."""
    # The evidence is training itself, which is deterministic on a CPU: predictions, losses and learning curve of an
    # encoding equal those of another, bit by bit, with every seed. "none" is first.
    first: dict[object, str] = {}
    same = {}
    for name in sorted(groups, key=lambda name: name != BASELINE):
        key = tuple((run.seed, run.val_loss, tuple(run.predicted), _untimed(run.curve)) for run in groups[name])
        if all(run.val_loss is not None for run in groups[name]) and first.setdefault(key, name) != name:
            same[name] = first[key]
    return same


def _untimed(curve: Sequence[Mapping[str, float]]) -> tuple[tuple[tuple[str, float], ...], ...]:
    return tuple(tuple((name, value) for name, value in row.items() if name != "seconds") for row in curve)


def main_table(comparison: Comparison, title: str, extra: Columns = (), note: str = "") -> Table:
    """Build the table of accuracy, verdicts, losses and extra columns, whose rows are cells."""
    conclusion, groups, same = comparison.conclusion, comparison.groups, comparison.same
    labels, (_, counts) = comparison.labels, np.unique(comparison.labels, return_counts=True)
    losses = {name: last_train_losses(runs) for name, runs in groups.items()}

    def gap(cell: Cell) -> Sequence[float] | None:
        return in_percent(conclusion.gaps[name]) if (name := same.get(cell.arm, cell.arm)) in conclusion.gaps else None

    def decided(cell: Cell) -> str:
        return f"same as {same[cell.arm]}" if cell.arm in same else verdict(conclusion, cell.arm)

    def balanced(cell: Cell) -> float | None:
        return 100 * balanced_accuracy(comparison.top1.values[cell], labels) if unequal else None

    def train_loss(cell: Cell) -> float | None:
        return fmean(losses[cell.arm]) if losses[cell.arm] else None

    unequal = counts.max() >= UNEQUAL * counts.min()
    columns: Columns = [
        *name_columns(),
        *comparison.top1.columns,
        (Column("balanced", "Balanced accuracy", "%", 1), balanced),
        (VERDICT, decided),
        (with_interval("gap", "Behind the best", "points", 1), gap),
        (Column("val_loss", "Validation loss", digits=3), lambda cell: loss(groups[cell.arm])),
        (Column("train_loss", "Training loss, last epoch", digits=3), train_loss),
        (Column("train_spread", "± over seeds", digits=3), lambda cell: spread(losses[cell.arm])),
        *extra,
    ]
    told = [
        f"{about_intervals(conclusion.seeds)} {conclusion.examples:,} examples.",
        "Behind the best: paired differences, with intervals that are simultaneous over all pairs (max-T, nominally "
        "95 %). An encoding is behind if and only if its interval excludes 0.",
        "Balanced accuracy: the mean over classes of the accuracy on each." if unequal else "",
        note,
        "Training loss is the mean over the last epoch before each step, augmented and regularised.",
    ]
    return table_of(title, columns, comparison.top1.values, " ".join(filter(None, told)))


def accuracy_figures(comparison: Comparison) -> list[Figure]:
    """Build the figures of accuracy: at the end of training, and after every epoch."""
    return [top1_by_encoding(comparison.top1, comparison.conclusion.chance), top1_curves(comparison.groups)]
