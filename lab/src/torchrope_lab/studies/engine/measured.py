"""Measures of finished runs beside accuracy: with shuffled patches, at other input sizes, and costs of steps."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from torchrope_lab.data.datamodule import DataModule
from torchrope_lab.files import read_mapping
from torchrope_lab.results import write_json
from torchrope_lab.studies.engine.folds import groups_of_folds, in_order, pooled
from torchrope_lab.studies.engine.runs import Trained
from torchrope_lab.studies.engine.study import Lab
from torchrope_lab.training.cost import STEPS, measure_costs
from torchrope_lab.training.evaluate import cache_suffix, correct_at, correct_shuffled
from torchrope_lab.training.models import Model, build_for_costs
from torchrope_lab.training.progress import as_clock
from torchrope_lab.training.watch import BACKWARD_AND_FORWARD


@dataclass(frozen=True)
class Measured:
    """A finished run and its measures.

    Attributes:
        trained: The run.
        shuffled: Right or wrong for each validation example with its patches shuffled.
        sizes: Right or wrong at input sizes other than the training size.
    """

    trained: Trained
    shuffled: np.ndarray
    sizes: dict[tuple[int, ...], np.ndarray]


def measure_run(trained: Trained, data: DataModule, scales: Sequence[float]) -> Measured:
    """Evaluate a run with shuffled patches or positions and at other input sizes; the result is cached in its folder.

    Args:
        trained: The run.
        data: Its data, set up.
        scales: Input sizes, as multiples of the training size.
    """
    name = f"shuffled-and-scales-{'-'.join(f'{scale:g}' for scale in scales)}{cache_suffix(data)}"
    stored = trained.measure(name, partial(_evaluate, scales=scales), data)
    try:
        sizes = {tuple(size): _bits(right, len(trained.labels)) for size, right in stored["sizes"]}
        return Measured(trained, _bits(stored["shuffled"], len(trained.labels)), sizes)
    except (KeyError, TypeError, ValueError):
        rule = "a measure must contain the answers on every example, shuffled and at other sizes"
        file = trained.folder / "measures" / f"{name}.json"
        raise ValueError(f"{rule}, got {file} with missing or invalid entries; delete it to measure again") from None


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


def _bits(text: str, examples: int) -> np.ndarray:
    if len(text) != examples:
        raise ValueError(f"text must have one character per example, got {len(text)} for {examples}")
    return np.array([sign == "1" for sign in text], dtype=float)


def known_costs(file: Path, names: Sequence[str]) -> dict[str, Any] | None:
    """Read the costs of all encodings, None if they have not been measured together."""
    known = read_mapping(file, "costs") if file.exists() else {}
    return known if all(isinstance(known.get(name), dict) and "seconds" in known[name] for name in names) else None


def work_of_costs(file: Path, names: Sequence[str], batch_size: int) -> float:
    """Estimate the work of `costs_of`, in forward passes of one example."""
    steps = STEPS * len(names) if known_costs(file, names) is None else 0
    return BACKWARD_AND_FORWARD * batch_size * steps


def costs_of(lab: Lab, names: Sequence[str], file: Path) -> dict[str, Any]:
    """Measure the costs of a training step with each encoding together, or read them if they are stored."""
    known = known_costs(file, names)
    if known is not None:
        return known
    left = "" if lab.seconds_left is None else f"  (about {as_clock(lab.seconds_left)} left)"
    line = f"measuring the costs of a training step of {len(names)} models{left}"
    lab.console.print(line, highlight=False, soft_wrap=True)
    inputs, labels, *_ = next(iter(lab.data.train_dataloader()))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    builders = {name: partial(build_for_costs, name, lab.config.model, lab.data) for name in names}
    costs = measure_costs(builders, (inputs.to(device), labels.to(device)))
    known = {name: asdict(cost) for name, cost in costs.items()}
    write_json(file, known)
    return known


def relative_costs(seconds: Mapping[str, Sequence[float]]) -> dict[str, np.ndarray]:
    """Divide the seconds of a step in each round by those of "none", or of the first encoding without it."""
    if not seconds:
        return {}
    base = np.asarray(seconds["none"] if "none" in seconds else next(iter(seconds.values())))
    return {name: np.asarray(each) / base for name, each in seconds.items()}
