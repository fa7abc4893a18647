"""Measures of finished runs beside accuracy: with shuffled patches, at other input sizes, and costs of steps."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from torchrope_lab.data.data_config import DataConfig
from torchrope_lab.data.datamodule import DataModule
from torchrope_lab.encodings import load_modules
from torchrope_lab.engine.folds import groups_of_folds, in_order, pooled
from torchrope_lab.engine.provenance import machine
from torchrope_lab.engine.runs import Measure, Trained
from torchrope_lab.engine.study import Lab
from torchrope_lab.engine.workers import data_of, here, run_calls
from torchrope_lab.files import read_mapping
from torchrope_lab.results import write_json
from torchrope_lab.settings.run_config import ModelConfig
from torchrope_lab.training.cost import measure_costs
from torchrope_lab.training.evaluate import cache_suffix, correct_at, correct_shuffled
from torchrope_lab.training.models import Model, build_for_costs


@dataclass(frozen=True)
class Measured:
    """A finished run, and whether it is right for each validation example, shuffled and at other input sizes."""

    trained: Trained
    shuffled: np.ndarray
    sizes: dict[tuple[int, ...], np.ndarray]


def robustness(data: DataModule, scales: Sequence[float]) -> Measure:
    """Return the measure of answers with shuffled patches or positions, and at multiples of the training size."""
    name = f"shuffled-and-scales-{'-'.join(f'{scale:g}' for scale in scales)}{cache_suffix(data)}"
    return Measure(name, partial(_evaluate, scales=scales))


def read_robustness(trained: Trained, measure: Measure) -> Measured:
    """Read a run's `robustness`."""
    stored = trained.measured(measure.name)
    return Measured(trained, _bits(stored["shuffled"]), {tuple(size): _bits(right) for size, right in stored["sizes"]})


def pooled_measures(measured: Sequence[Measured], data: DataModule) -> list[Measured]:
    """Join the measures of all folds of a run, as `pooled` joins its predictions."""
    together = []
    for indices in groups_of_folds([each.trained.run for each in measured]):
        folds = [measured[index] for index in indices]
        [trained] = pooled([each.trained for each in folds], data)
        if len(folds) == 1:
            together += folds
            continue
        sizes = {size: in_order([each.sizes[size] for each in folds], data) for size in folds[0].sizes}
        together.append(Measured(trained, in_order([each.shuffled for each in folds], data), sizes))
    return together


def _evaluate(model: Model, data: DataModule, scales: Sequence[float]) -> dict[str, Any]:
    sizes = correct_at(model, data, scales)
    return {
        "shuffled": _text(correct_shuffled(model, data)),
        "sizes": [[list(size), _text(right)] for size, right in sizes.items()],
    }


def _text(right: Sequence[bool]) -> str:
    return "".join("1" if each else "0" for each in right)


def _bits(text: str) -> np.ndarray:
    return np.array([sign == "1" for sign in text], dtype=float)


def known_costs(file: Path, names: Sequence[str], *, precision: str, anywhere: bool = False) -> dict[str, Any] | None:
    """Read the costs of all encodings; None unless they were measured together, with this torch on this machine."""
    # `anywhere` accepts another machine, where jobs of a cluster run.
    stored = read_mapping(file, "costs") if file.exists() else {}
    if stored.get("torch") != torch.__version__ or not (anywhere or stored.get("machine") == machine()):
        return None
    costs = stored["costs"] if stored.get("precision", "float32") == precision else {}
    return costs if {*names} <= {*costs} else None


def costs_of(lab: Lab, names: Sequence[str], file: Path) -> dict[str, Any]:
    """Measure the costs of a training step with each encoding in one job, or read them if they are stored."""
    on_cluster = lab.config.slurm is not None
    known = known_costs(file, names, precision=lab.config.run.precision, anywhere=on_cluster)
    if known is not None:
        return known
    line = f"measuring the costs of a training step of {len(names)} models"
    lab.console.print(line, highlight=False, soft_wrap=True)
    data = lab.data if here(lab.config) else None
    call = partial(_measure_costs, tuple(names), lab.config.model, lab.config.data, data, lab.config.run.precision)
    run_calls([(file, call)], lab.config, write_json)
    return read_mapping(file, "costs")["costs"]


def _measure_costs(
    names: Sequence[str], model: ModelConfig, config: DataConfig, data: DataModule | None, precision: str
) -> dict[str, Any]:
    """Measure the costs of a training step, with the machine and the version of torch."""
    load_modules(names)  # allowed: the parent process has loaded them
    data = data or data_of(config)
    inputs, labels, *_ = next(iter(data.train_dataloader()))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    builders = {name: partial(build_for_costs, name, model, data) for name in names}
    costs = measure_costs(builders, (inputs.to(device), labels.to(device)), precision=precision)
    return {
        "torch": torch.__version__,
        "machine": machine(),
        "precision": precision,
        "costs": {name: asdict(cost) for name, cost in costs.items()},
    }


def relative_costs(seconds: Mapping[str, Sequence[float]]) -> dict[str, np.ndarray]:
    """Divide the seconds of a step in each round by those of "none", or of the first encoding without it."""
    if not seconds:
        return {}
    base = np.asarray(seconds["none"] if "none" in seconds else next(iter(seconds.values())))
    return {name: np.asarray(each) / base for name, each in seconds.items()}
