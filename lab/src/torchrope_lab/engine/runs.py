"""Runs that studies share: each is trained once and each of its measures is computed once."""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import date
from math import nan
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from torchrope.files import lock
from torchrope_lab.data.data_config import DataConfig
from torchrope_lab.data.datamodule import DataModule
from torchrope_lab.engine.provenance import provenance
from torchrope_lab.files import CURVE, LONGEST, as_file_name, read_curve, read_mapping
from torchrope_lab.mistakes import Mistake
from torchrope_lab.results import write_json
from torchrope_lab.settings.run_config import MAY_CHANGE, RunConfig, flat, plain
from torchrope_lab.training.classifier import Classifier
from torchrope_lab.training.evaluate import class_measures, predict
from torchrope_lab.training.history import OnEpoch
from torchrope_lab.training.models import Model, build_model
from torchrope_lab.training.module import Module
from torchrope_lab.training.progress import describe_quality
from torchrope_lab.training.run import load, train
from torchrope_lab.training.skipped import read_skipped

RESULT = "result.json"
NUMERICS = 3
"""Raised by hand where a change of the code changes the numbers of runs, so that earlier runs are not reused."""


@dataclass(frozen=True)
class Measure:
    """What is computed of a trained model besides its predictions, once, and stored in the run's folder."""

    name: str  # identifies the measure and its settings
    compute: Callable[[Any, DataModule], dict[str, Any]]  # returns JSON's types, changes nothing, can be pickled
    data: DataConfig | None = None  # to measure on; by default those that the run is trained on


@dataclass(frozen=True)
class Run:
    """One model to train, from the weights of the run `after` if there is one."""

    config: RunConfig
    after: "Run | None" = None

    @property
    def encoding(self) -> str:
        """Its encoding's name."""
        return self.config.encoding

    @property
    def seed(self) -> int:
        """Its seed."""
        return self.config.seed

    @property
    def key(self) -> str:
        """Hash of `NUMERICS` and of all settings that change numbers, with defaults: a changed default changes it."""
        settings = flat(plain(self.config))
        hashed = {key: value for key, value in settings.items() if key not in ("init", *MAY_CHANGE)}
        hashed |= {"numerics": NUMERICS, "after": self.after.key if self.after else None}
        return hashlib.sha256(json.dumps(hashed, sort_keys=True).encode()).hexdigest()[:10]

    @property
    def kind(self) -> str:
        """Key of the run without its seed and fold; runs of the same kind have epochs of the same duration."""
        return Run(replace(self.config, seed=0, data=replace(self.config.data, fold=0))).key

    @property
    def name(self) -> str:
        """Name of its folder."""
        data, encoding = as_file_name(self.config.data.name, LONGEST), as_file_name(self.encoding.replace("+", "-and-"))
        return f"{data}-{encoding}-seed{self.seed}-{self.key}"

    def __str__(self) -> str:
        data = self.config.data
        return f"{self.encoding} seed {self.seed}{f' fold {data.fold}' if data.folds else ''}"


MeasuresOf = Callable[[Run], Sequence[Measure]]
"""The measures that a study needs of each of its runs."""


@dataclass(frozen=True)
class Job:
    """A run to train, unless it is finished, and the measures to compute that are not stored yet."""

    run: Run
    measures: Sequence[Measure] = ()

    def __str__(self) -> str:
        return str(self.run)


@dataclass
class Trained:
    """A finished run."""

    run: Run
    folder: Path
    labels: list[int]  # of every validation example; empty for segmentation and detection
    predicted: list[int]  # class of every validation example; empty as labels are
    val_loss: float | None  # mean; None if it is not finite or unknown
    curve: list[dict[str, float]]  # a row per epoch: epoch, train_loss, the names of `Module.curve`, seconds
    seconds: float  # of training
    fingerprint: str = ""  # hash of its data
    skipped: dict[str, str] = field(default_factory=dict)  # files that could not be read, with the reason
    provenance: dict[str, Any] = field(default_factory=dict)  # values of `provenance`, threads and the date

    @property
    def encoding(self) -> str:
        """Its encoding's name."""
        return self.run.encoding

    @property
    def seed(self) -> int:
        """Its seed."""
        return self.run.seed

    @property
    def quality(self) -> str:
        """Its quality in words: "top-1 97.2 %"."""
        return f"top-1 {100 * self.top1:.1f} %" if self.labels else describe_quality(self.curve[-1])

    @property
    def correct(self) -> np.ndarray:
        """1.0 for right and 0.0 for wrong predictions, `(examples,)`."""
        return np.equal(self.labels, self.predicted).astype(float)

    @property
    def top1(self) -> float:
        """Share of right predictions."""
        return float(self.correct.mean())

    def check_examples(self, fingerprint: str) -> None:
        """Raise ValueError if the run was trained on other examples than those of a `DataModule.fingerprint`."""
        if self.fingerprint != fingerprint:
            rule = "the data must be what the runs in --out were trained on"
            raise Mistake(f"{rule}, got other examples than those of {self.folder}")

    def load(self, data: DataModule | None = None) -> tuple[Model, DataModule]:
        """Load the trained model in evaluation mode, and its data if not given."""
        _, data, module = load(self.folder, data)
        return module.model.eval(), data

    def measured(self, name: str) -> dict[str, Any]:
        """Read a measure that `Lab.train` was asked for."""
        return read_mapping(measure_file(self.folder, name), "a measure")


def measure_file(folder: Path, name: str) -> Path:
    """Return the file of a measure of the run in a folder."""
    return folder / "measures" / f"{name}.json"


def untrained(run: Run, data: DataModule) -> Model:
    """Build the model of a run at initialisation, from the run's seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(run.seed)
        return build_model(run.encoding, run.config.model, data)


class Store:
    """The folder of runs, which contains one folder per run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def of(self, run: Run) -> Path:
        """Return the folder of a run."""
        return self.folder / run.name

    def finished(self, run: Run) -> Trained | None:
        """Read a run that is trained and evaluated; None if it is not."""
        file = self.of(run) / RESULT
        if not file.exists():
            return None
        result = read_mapping(file, "a result")
        required = ("labels", "predicted", "val_loss", "curve", "seconds", "fingerprint", "provenance")
        if missing := [name for name in required if name not in result]:
            received = f"{file} without {', '.join(missing)}; delete it to train again"
            raise Mistake(f"a result must contain {', '.join(required)}, got {received}")
        measured = {name: result[name] for name in required}
        measured["curve"] = [  # JSON has null for a loss that is not finite
            {name: nan if value is None else value for name, value in row.items()} for row in measured["curve"]
        ]
        return Trained(run, self.of(run), **measured, skipped=read_skipped(self.of(run)))

    def get(self, run: Run) -> Trained:
        """Read a finished run."""
        trained = self.finished(run)
        if trained is None:
            raise Mistake(f"{self.of(run)} must contain {RESULT}, which was removed; the same command trains again")
        return trained

    def curve(self, run: Run) -> list[dict[str, float]]:
        """Read the learning curve of a run up to its last finished epoch."""
        return read_curve(self.of(run) / CURVE)

    def epochs(self, run: Run) -> int:
        """Count the epochs that a run has finished."""
        return run.config.optim.epochs if (self.of(run) / RESULT).exists() else len(self.curve(run))

    def is_done(self, job: Job) -> bool:
        """Whether a run is finished and its measures are stored."""
        folder = self.of(job.run)
        files = [folder / RESULT, *(measure_file(folder, measure.name) for measure in job.measures)]
        return all(file.exists() for file in files)

    def complete(self, job: Job, data_of: Callable[[DataConfig], DataModule], on_epoch: OnEpoch | None = None) -> None:
        """Train and evaluate a run and compute its measures, unless another process has done so in the meantime."""
        run, folder = job.run, self.of(job.run)
        with self._alone(run):
            model: Any = None
            if self.finished(run) is None:
                data = data_of(run.config.data)
                start = None if run.after is None else str(self.of(run.after))
                config = replace(run.config, init=start)
                module, history = train(config, data, folder, on_epoch=on_epoch, may_change=("init",))
                write_json(folder / RESULT, _result(module, history.rows, data))
                model = None if run.config.run.compile else module.model.eval()  # measures change sizes and layers
            for measure in job.measures:
                file = measure_file(folder, measure.name)
                if not file.exists():
                    data = data_of(measure.data or run.config.data)
                    model = load(folder, data)[2].model.eval() if model is None else model
                    data.returns_spacing = run.config.model.unit_mm is not None
                    write_json(file, measure.compute(model, data))

    @contextmanager
    def _alone(self, run: Run) -> Iterator[None]:
        """Wait for another process that trains the same run; the lock ends with its process."""
        locks = self.folder / ".locks"
        locks.mkdir(parents=True, exist_ok=True)
        with open(locks / run.name, "wb") as file:
            lock(file, wait=True)
            yield


def dependency_rounds(runs: Sequence[Run]) -> list[list[Run]]:
    """Sort distinct runs into rounds, so that a run starts from a run of an earlier round."""
    rounds: list[dict[str, Run]] = []
    for run in runs:
        chain = [run]
        while chain[0].after is not None:
            chain.insert(0, chain[0].after)
        rounds += [{} for _ in range(len(chain) - len(rounds))]
        for depth, each in enumerate(chain):
            rounds[depth].setdefault(each.key, each)
    return [list(each.values()) for each in rounds]


def _result(module: Module, curve: list[dict[str, float]], data: DataModule) -> dict[str, Any]:
    predicted: dict[str, Any] = {"labels": [], "predicted": [], "val_loss": curve[-1].get("val_loss")}
    if isinstance(module, Classifier):
        labels, logits = predict(module.model, data, views=data.views)
        predicted = {
            "labels": labels.tolist(),
            "predicted": logits.argmax(dim=-1).tolist(),
            "val_loss": functional.cross_entropy(logits, labels).item(),
            **class_measures(labels, logits, data.classes),
        }
    return {
        **predicted,
        "curve": curve,
        "seconds": sum(row["seconds"] for row in curve),
        "fingerprint": data.fingerprint,
        "provenance": {**provenance(), "threads": torch.get_num_threads(), "date": date.today().isoformat()},
    }
