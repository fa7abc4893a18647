"""Which encoding suits the data, and at what cost: the study behind `torchrope compare`."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from rich.console import Console

from torchrope.files import holds_files, read_mapping, write_whole
from torchrope.lab.data.config import NAMES_WITHOUT_LATTICE, data_config
from torchrope.lab.data.datamodule import DataModule
from torchrope.lab.encodings import choose, load_modules
from torchrope.lab.results import StudyResult, write_json
from torchrope.lab.statistics import conclude
from torchrope.lab.studies.compare_findings import Comparison, Measured, findings
from torchrope.lab.studies.config import SCALES, CompareConfig
from torchrope.lab.studies.engine.estimates import by_encoding
from torchrope.lab.studies.engine.runs import Run, Trained
from torchrope.lab.studies.engine.study import Lab, describe, facts_of
from torchrope.lab.training.config import CONFIG, MAY_CHANGE, check_spacing, differences, plain
from torchrope.lab.training.cost import STEPS, measure_costs
from torchrope.lab.training.evaluate import correct_at, correct_shuffled, of_other_sizes, scaled_sizes
from torchrope.lab.training.models import Model, TokenClassifier, build_for_costs
from torchrope.lab.training.progress import as_clock
from torchrope.lab.training.watch import BACKWARD_AND_FORWARD

RESULTS = "results.json"
COSTS = "runs/costs.json"
MAY_GROW = ("encodings", "seeds", "out", "parallel", "slurm", "margin")


def compare(config: CompareConfig, *, command: str, console: Console, allow: Sequence[str] = ()) -> Path:
    """Train, evaluate and measure every encoding; do nothing twice that is finished in the folder.

    `results.json` is written after every run, so that a stopped comparison can be reported.

    Args:
        config: What to compare, and where to leave it.
        command: How the user started it, for the report.
        console: Where progress goes.
        allow: Modules that may be imported for encodings that the folder was asked for before.

    Returns:
        The folder's `results.json`.

    Raises:
        ValueError: a setting, the data or the folder is not as it must be; nothing was trained then.
        KeyboardInterrupt: stopped; the same call resumes with the epoch that was interrupted.
    """
    check_spacing(config.model, config.data)
    check_scales(config)
    folder = Path(config.out)
    asked = _grown(folder, config)
    load_modules(asked.encodings, allow)
    for name in asked.encodings:
        choose(name)  # refuses what was allowed once and is not now
    lab = Lab(asked, asked.encodings, console)
    runs = [lab.run(name, seed) for seed in lab.seeds for name in asked.encodings]
    for run in runs:
        lab.blueprint(run)  # refuses a bad setting before anything is written
    write_whole(
        folder / CONFIG, yaml.safe_dump(plain(asked), sort_keys=False)
    )  # the folder now belongs to this comparison
    measured: dict[str, Measured] = {}

    def keep(trained: Trained) -> None:
        measured[trained.run.name] = _measure(trained, lab.data, asked.scales)
        lab.skipped |= trained.skipped
        _write(folder, lab, asked, runs, measured, {}, command)

    lab.train(runs, keep, passes=_passes(lab, runs[0], asked.scales), afterwards=_work_of_costs(folder, asked))
    costs = _costs(folder, asked, lab)
    return _write(folder, lab, asked, runs, measured, costs, command)


def check_scales(config: CompareConfig) -> None:
    """Refuse other input sizes of data that have none."""
    if config.data.name in NAMES_WITHOUT_LATTICE and config.scales != SCALES:
        raise ValueError(f"--scales is for data on a lattice, got {config.scales} with --data {config.data.name}")


def _grown(folder: Path, config: CompareConfig) -> CompareConfig:
    """The configuration with all encodings and seeds that the folder was ever asked for.

    Raises:
        ValueError: the folder belongs to another configuration, or holds files that nothing here wrote.
    """
    file = folder / CONFIG
    if not file.exists():
        if folder.is_file() or (holds_files(folder) and not (folder / "runs").is_dir()):
            raise ValueError(f"--out must be a new folder, an empty one, or one of torchrope compare, got {folder}")
        return config
    stored = read_mapping(file, CONFIG)
    known = {"encodings", "seeds", "data", "model", "optim"} <= set(stored)
    if not known or not isinstance(stored["data"], dict):
        raise ValueError(f"{file} must be a configuration of torchrope compare, got something else")
    data = data_config(stored["data"].get("name", "digits"))
    mine, defaults = plain(config), plain(CompareConfig(data=data))  # settings that are younger than the folder
    theirs = {**defaults, **{key: _over(defaults.get(key), value) for key, value in stored.items()}}
    if different := differences(theirs, mine, but=(*MAY_GROW, *MAY_CHANGE)):
        rule = "--out must be a new folder or one of the same configuration"
        raise ValueError(f"{rule}, got {folder} with {different}")
    encodings = list(dict.fromkeys([*theirs["encodings"], *config.encodings]))
    return replace(config, encodings=encodings, seeds=max(theirs["seeds"], config.seeds))


def _over(defaults: Any, stored: Any) -> Any:
    return {**defaults, **stored} if isinstance(defaults, dict) and isinstance(stored, dict) else stored


def _measure(trained: Trained, data: DataModule, scales: Sequence[float]) -> Measured:
    """What shuffled patches or positions, and other sizes, leave of a run's accuracy, kept in its folder."""
    name = f"shuffled-and-scales-{'-'.join(f'{scale:g}' for scale in scales)}{of_other_sizes(data)}"
    stored = trained.measure(name, partial(_evaluate, scales=scales), data)
    try:
        sizes = {tuple(size): _bits(right, len(trained.labels)) for size, right in stored["sizes"]}
        return Measured(trained, _bits(stored["shuffled"], len(trained.labels)), sizes)
    except (KeyError, TypeError, ValueError):
        rule = "a measure must hold right or wrong of every example, shuffled and at other sizes"
        raise ValueError(f"{rule}, got {trained.folder / 'measures' / name}.json without; delete it") from None


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
        raise ValueError(f"one sign an example, got {len(text)} for {examples}")
    return np.array([sign == "1" for sign in text], dtype=float)


def _passes(lab: Lab, run: Run, scales: Sequence[float]) -> float:
    """Passes over the validation set in `_evaluate`: one of shuffled patches, one at each other size."""
    model = lab.blueprint(run)
    if isinstance(model, TokenClassifier):
        return 1
    trained = math.prod(lab.data.input_size)
    sizes = scaled_sizes(lab.data, model.embed.patch_size, scales)
    return 1 + sum(math.prod(size) / trained for size in sizes if size != tuple(lab.data.input_size))


def _known_costs(folder: Path, config: CompareConfig) -> dict[str, Any] | None:
    """Costs of all encodings, where they have been measured together."""
    file = folder / COSTS
    known = read_mapping(file, "costs") if file.exists() else {}
    whole = all(isinstance(known.get(name), dict) and "seconds" in known[name] for name in config.encodings)
    return known if whole else None


def _work_of_costs(folder: Path, config: CompareConfig) -> float:
    """Work of `_costs`, in forward passes of one example."""
    steps = STEPS * len(config.encodings) if _known_costs(folder, config) is None else 0
    return BACKWARD_AND_FORWARD * config.data.batch_size * steps


def _costs(folder: Path, config: CompareConfig, lab: Lab) -> dict[str, Any]:
    """Costs of all encodings, measured together, unless that has been done."""
    known = _known_costs(folder, config)
    if known is not None:
        return known
    left = "" if lab.seconds_left is None else f"  (about {as_clock(lab.seconds_left)} left)"
    told = f"measuring what a training step of each of {len(config.encodings)} models costs{left}"
    lab.console.print(told, highlight=False, soft_wrap=True)
    inputs, labels, *_ = next(iter(lab.data.train_dataloader()))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    builders = {name: partial(build_for_costs, name, config.model, lab.data) for name in config.encodings}
    costs = measure_costs(builders, (inputs.to(device), labels.to(device)))
    known = {name: asdict(cost) for name, cost in costs.items()}
    write_json(folder / COSTS, known)
    return known


def _write(
    folder: Path,
    lab: Lab,
    config: CompareConfig,
    runs: Sequence[Run],
    measured: Mapping[str, Measured],
    costs: Mapping[str, Any],
    command: str,
) -> Path:
    """Write what has been measured as `results.json`."""
    done = [measured[run.name] for run in runs if run.name in measured]
    together = _with_common_seeds(done)
    rights = {name: np.stack([each.correct for each in each_seed]) for name, each_seed in together.items()}
    labels = done[0].trained.labels
    chance = max(np.bincount(labels)) / len(labels)
    relative = _relative_costs({name: costs[name]["seconds"] for name in rights if name in costs})
    conclusion = conclude(rights, chance=chance, margin=config.margin, costs=relative)
    blueprints = {run.encoding: lab.blueprint(run) for run in runs if run.name in measured}
    comparison = Comparison(conclusion, done, rights, costs, relative, blueprints, lab.data)
    result = StudyResult(
        study="compare",
        title="Comparison",
        question="Which position encoding suits the data, and at what cost?",
        sources=(),
        findings=findings(comparison),
        data=replace(describe(lab), chance=float(chance)),
        run=facts_of(command, plain(config), sum(each.trained.seconds for each in done)),
        conclusion=conclusion.as_dict(),
        unfinished=[str(run) for run in runs if run.name not in measured],
    )
    result.write(folder / RESULTS)
    return folder / RESULTS


def _with_common_seeds(done: Sequence[Measured]) -> dict[str, list[Trained]]:
    """Runs by encoding, of the seeds that all encodings have finished."""
    groups = by_encoding(each.trained for each in done)
    common = set.intersection(*({run.seed for run in group} for group in groups.values()))
    return {name: [run for run in group if run.seed in common] for name, group in groups.items()}


def _relative_costs(seconds: Mapping[str, Sequence[float]]) -> dict[str, np.ndarray]:
    """Seconds of a step in each round over those of "none", or of the first encoding without it."""
    if not seconds:
        return {}
    base = np.asarray(seconds["none"] if "none" in seconds else next(iter(seconds.values())))
    return {name: np.asarray(each) / base for name, each in seconds.items()}
