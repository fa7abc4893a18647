"""Trained models that a study measures: runs of encodings, and files of --checkpoint."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from math import isfinite
from operator import getitem
from typing import Any

import numpy as np
from torch import nn

from torchrope.encodings import Encoding
from torchrope_lab.data.datamodule import DataModule
from torchrope_lab.engine.checkpoint_option import Checkpoint, read_checkpoints
from torchrope_lab.engine.describe import label
from torchrope_lab.engine.estimates import NAMES, Columns, by_encoding
from torchrope_lab.engine.feasible import feasible
from torchrope_lab.engine.runs import Measure, Run
from torchrope_lab.engine.study import Lab

Result = Mapping[str, Any]
"""Measures of one model: values that JSON can represent."""


@dataclass(frozen=True)
class Measures:
    """Measures of the models of one encoding, or of one checkpoint."""

    name: str
    title: str
    results: Sequence[Result]  # one per seed
    part: str = ""  # key of the part of the results that these are, such as a state of the models; empty for all

    def at(self, part: str) -> "Measures":
        """Return the measures under a key of the results."""
        return replace(self, results=[result[part] for result in self.results], part=part)

    def stack(self, *keys: str) -> np.ndarray:
        """Stack the values under nested keys, `(seeds, ...)`; NaN where they are missing."""
        return np.array([reduce(getitem, keys, result) for result in self.results], dtype=float)

    def pool(self, *keys: str) -> np.ndarray:
        """Concatenate the lists under nested keys, `(seeds · entries, ...)`; NaN where a value is missing."""
        return np.array([entry for result in self.results for entry in reduce(getitem, keys, result)], dtype=float)


NAME_COLUMNS: Columns = ((NAMES[0], lambda measures: measures.title), (NAMES[1], lambda measures: measures.name))
"""Columns of a table whose items are `Measures`."""


@dataclass(frozen=True)
class Models:
    """The models that a study measures: runs whose model can be built, and models read from files."""

    lab: Lab
    runs: Sequence[Run]
    checkpoints: Sequence[Checkpoint]

    def select(self, condition: Callable[[Sequence[Encoding]], bool], reason: str) -> "Models":
        """Leave out models whose rotary encodings do not satisfy a condition, for a reason."""
        rotary = {
            run.encoding: [each for each in self.lab.blueprint(run).modules() if isinstance(each, Encoding)]
            for run in self.runs
        }
        rotary |= {file.name: [site.encoding for site in file.sites] for file in self.checkpoints}
        left_out = [name for name, encodings in rotary.items() if not condition(encodings)]
        runs = [run for run in self.runs if run.encoding not in left_out]
        files = [file for file in self.checkpoints if file.name not in left_out]
        self.lab.leave_out(*(f"{name} is left out: {reason}." for name in left_out))
        return Models(self.lab, runs, files)

    def measure(
        self, measure_of: Callable[[Run], Measure], checkpoint: Callable[[Checkpoint], Result] | None = None
    ) -> list[Measures]:
        """Train the runs, and measure all models; runs that diverged are left out."""
        found = []
        trained = self.lab.train(self.runs, lambda run: [_unless_diverged(measure_of(run))]) if self.runs else []
        for name, runs in by_encoding(trained).items():
            finite = [each for each in runs if each.val_loss is not None and isfinite(each.val_loss)]
            if len(finite) < len(runs):
                self.lab.leave_out(f"{name}: {len(runs) - len(finite)} of {len(runs)} runs diverged and are left out.")
            if finite:
                found.append(Measures(name, label(name), [each.measured(measure_of(each.run).name) for each in finite]))
        if checkpoint is not None:
            found += [Measures(each.name, each.title, [checkpoint(each)]) for each in self.checkpoints]
        return found

    def unmeasured(self, otherwise: str) -> str:
        """Return the answer of a study that has measured nothing: all runs diverged, or else another one."""
        return "All runs diverged." if self.runs else otherwise


def _unless_diverged(measure: Measure) -> Measure:
    return replace(measure, compute=partial(_of_finite, compute=measure.compute))


def _of_finite(model: nn.Module, data: DataModule, compute: Callable[[Any, DataModule], Any]) -> Any:
    """Compute a measure of a model; nothing if its weights are not finite."""
    return compute(model, data) if all(bool(each.isfinite().all()) for each in model.parameters()) else {}


def select_models(lab: Lab, encodings: Sequence[str], checkpoints: Sequence[str] = ()) -> Models:
    """Select the models of a study: files, and encodings that the model supports, with every seed of the lab."""
    files = read_checkpoints(checkpoints, encodings)
    return Models(lab, feasible(lab, lab.runs(encodings)), files)
