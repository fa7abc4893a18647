"""Cross-validation: a run for each fold of the data, whose predictions are joined to those of all examples."""

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

import numpy as np

from torchrope_lab.data.datamodule import DataModule
from torchrope_lab.engine.runs import Run, Trained


def in_fold(run: Run, fold: int) -> Run:
    """Return the same run, and those that it starts from, with another fold held out."""
    config = replace(run.config, data=replace(run.config.data, fold=fold))
    return Run(config, run.after and in_fold(run.after, fold))


def in_folds(runs: Sequence[Run]) -> list[Run]:
    """Return a run for each fold of each run's data, in this order; the runs themselves without `data.folds`."""
    return [in_fold(run, fold) if run.config.data.folds else run for run in runs for fold in _folds(run)]


def groups_of_folds(runs: Sequence[Run]) -> list[list[int]]:
    """Return the indices of the runs of all folds, for each run that has them all, in the order of `in_folds`."""
    groups: list[list[int]] = []
    for index, run in enumerate(runs):
        if run.config.data.fold == 0 or not groups or in_fold(runs[groups[-1][0]], 0) != in_fold(run, 0):
            groups.append([])
        groups[-1].append(index)
    return [group for group in groups if len(group) == len(_folds(runs[group[0]]))]


def pooled(trained: Sequence[Trained], data: DataModule) -> list[Trained]:
    """Join the runs of all folds to one with a prediction of every example; those that lack a fold are left out."""
    # Labels and predictions are in the order of `DataModule.fold_of_examples`, curves and losses means over folds.
    joined = []
    for indices in groups_of_folds([one.run for one in trained]):
        folds = [trained[index] for index in indices]
        if len(folds) == 1:
            joined += folds
            continue
        losses = [one.val_loss for one in folds]
        weights = [len(one.labels) for one in folds]
        joined.append(
            replace(
                folds[0],
                labels=in_order([one.labels for one in folds], data).tolist(),
                predicted=in_order([one.predicted for one in folds], data).tolist(),
                val_loss=None if None in losses else float(np.average(np.array(losses, float), weights=weights)),
                curve=[_mean_row(rows) for rows in zip(*(one.curve for one in folds), strict=False)],
                seconds=sum(one.seconds for one in folds),
                skipped={path: reason for one in folds for path, reason in one.skipped.items()},
            )
        )
    return joined


def in_order(folds: Sequence[Any], data: DataModule) -> np.ndarray:
    """Concatenate a value per held-out example of each fold, in the order of `DataModule.fold_of_examples`."""
    values = np.concatenate([np.asarray(part) for part in folds])
    ordered = np.empty_like(values)
    ordered[data.fold_of_examples.argsort(stable=True).numpy()] = values
    return ordered


def _folds(run: Run) -> range:
    return range(run.config.data.folds or 1)


def _mean_row(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    return {key: fmean(row[key] for row in rows) for key in rows[0] if all(key in row for row in rows)}
