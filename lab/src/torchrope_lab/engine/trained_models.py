"""Trained models that a study measures: runs of encodings, and files of --checkpoint."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from math import isfinite
from operator import getitem
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from torchrope.encodings import Encoding, NoEncoding
from torchrope.integrations import Rotary, adapt
from torchrope.models import Swin, Transformer, ViT
from torchrope.positions import PerAxis
from torchrope_lab.data.datamodule import DataModule
from torchrope_lab.engine.descriptions import label, label_of
from torchrope_lab.engine.estimates import by_encoding
from torchrope_lab.engine.long_table import Cell
from torchrope_lab.engine.runs import Measure, Run
from torchrope_lab.engine.study import Lab, feasible
from torchrope_lab.mistakes import Mistake
from torchrope_lab.settings.run_config import CONFIG
from torchrope_lab.training.checkpoints import CHECKPOINT, WEIGHTS
from torchrope_lab.training.initial import config_of_run, is_run, read_model


@dataclass(frozen=True)
class Site:
    """An encoding of a model, and the lattice that it is applied to."""

    encoding: Encoding  # of one layer, or of all layers that share it
    sizes: tuple[int, ...]  # tokens per axis at the training size; in a Swin of the stage's window; none off a lattice
    spacing: PerAxis
    origin: PerAxis


@dataclass(frozen=True)
class Checkpoint:
    """A trained model that was read from a file."""

    name: str  # of its file, without blanks, unique
    path: Path  # as the user gave it
    model: nn.Module  # on the CPU, in evaluation mode
    sites: list[Site]  # rotary encodings, the first layer first; empty if it has none

    @property
    def title(self) -> str:
        """Display name of its encodings, which are the same in all layers."""
        return label_of(self.model, self.sites[0].encoding if self.sites else None)


def read_checkpoints(paths: Sequence[str], others: Collection[str] = ()) -> list[Checkpoint]:
    """Load published checkpoints, files and folders of `torchrope.save`, and folders of runs, with unique names."""
    places = [_place(path) for path in paths]
    return [_read(place, name) for place, name in zip(places, _short_names(places, others), strict=True)]


def encodings_of_runs(paths: Sequence[str]) -> list[str]:
    """Return the names of the encodings of the run folders among some paths, whose modules may need importing."""
    places = [_place(path) for path in paths]
    return [config_of_run(place).encoding for place in places if is_run(place)]


def _place(path: str) -> Path:
    """Resolve a path: for a weights file of a run, return the run's folder."""
    place = Path(path).expanduser()
    if not place.exists():
        raise Mistake(f"--checkpoint must be an existing file or folder, got {path}")
    is_of_run = place.name in (WEIGHTS, CHECKPOINT) and (place.parent / CONFIG).exists()
    return place.parent if is_of_run else place


def _short_names(places: Sequence[Path], others: Collection[str]) -> list[str]:
    """Return the last parts of paths, as many as make the names distinct."""
    parts = [["-".join(part.split()) for part in place.resolve().parts] for place in places]
    for count in range(1, max(map(len, parts), default=1) + 1):
        names = ["/".join(each[-count:]) for each in parts]
        if len({*names, *others}) == len(names) + len(set(others)):
            return names
    raise Mistake(f"--checkpoint must not name a model twice, got {', '.join(map(str, places))}")


def _read(place: Path, name: str) -> Checkpoint:
    try:
        model = read_model(place)
        sites = sites_of(model)
    except ValueError as error:
        raise Mistake(f"--checkpoint {place} cannot be read: {error}") from None
    if all(isinstance(site.encoding, NoEncoding) for site in sites):
        sites = []
    return Checkpoint(name, place, model.eval(), sites)


def sites_of(model: nn.Module) -> list[Site]:
    """Collect the encodings of a model's layers, the first layer first; of other libraries' models those of `swap`."""
    if isinstance(model, ViT):
        sizes = model.embed.lattice(model.arguments["input_size"])
        found = [Site(each, sizes, **model.position_map.spaced(*sizes)) for each in _encodings(model)]
    elif isinstance(model, Swin):
        stages: list[Any] = list(model.stages)
        found = [
            Site(each, part.window, **part.position_map.spaced(*part.window))
            for part in stages
            for each in _encodings(part)
        ]
    elif isinstance(model, Transformer):
        lattice: Any = model.position_map
        found = [Site(each, (), lattice.spacing, lattice.origin) for each in _encodings(model)]
    else:
        rotary = next((module for module in model.modules() if isinstance(module, Rotary)), None)
        sites = adapt(model).shapes() if rotary is not None else []
        pairs = zip(_encodings(rotary), sites, rotary.lattices, strict=False) if rotary is not None else ()
        found = [Site(each, site.lattice, **lattice.spaced(*site.lattice)) for each, site, lattice in pairs]
    return found


def _encodings(part: Any) -> list[Any]:
    return list(part.encodings)


Result = Mapping[str, Any]
"""Measures of one model: values that JSON can represent."""


@dataclass(frozen=True)
class Measures:
    """Measures of the models of one encoding, or of one checkpoint."""

    name: str
    title: str
    results: Sequence[Result]  # one per seed

    def at(self, level: str = "") -> Cell:
        """Return the cell of these models at a level."""
        return Cell(self.name, level)

    def stack(self, *keys: str) -> np.ndarray:
        """Stack the values under nested keys, `(seeds, ...)`; NaN where they are missing."""
        return np.array([reduce(getitem, keys, result) for result in self.results], dtype=float)

    def pool(self, *keys: str) -> np.ndarray:
        """Concatenate the lists under nested keys, `(seeds · entries, ...)`; NaN where a value is missing."""
        return np.array([entry for result in self.results for entry in reduce(getitem, keys, result)], dtype=float)


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
