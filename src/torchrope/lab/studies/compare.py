"""Which encoding suits the data, and at what cost: the study behind `torchrope compare`."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from rich.console import Console

from torchrope.files import holds_files, read_mapping, write_whole
from torchrope.lab.data.config import NAMES_WITHOUT_LATTICE, data_config
from torchrope.lab.encodings import choose, load_modules
from torchrope.lab.results import StudyResult
from torchrope.lab.statistics import conclude
from torchrope.lab.studies.compare_findings import Comparison, findings
from torchrope.lab.studies.config import SCALES, CompareConfig
from torchrope.lab.studies.engine.estimates import by_encoding
from torchrope.lab.studies.engine.measured import (
    Measured,
    costs_of,
    measure_run,
    relative_costs,
    work_of_costs,
)
from torchrope.lab.studies.engine.runs import Run, Trained
from torchrope.lab.studies.engine.study import Lab, describe, facts_of
from torchrope.lab.training.config import CONFIG, MAY_CHANGE, check_spacing, differences, plain
from torchrope.lab.training.evaluate import scaled_sizes
from torchrope.lab.training.models import TokenClassifier

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
        measured[trained.run.name] = measure_run(trained, lab.data, asked.scales)
        lab.skipped |= trained.skipped
        _write(folder, lab, asked, runs, measured, {}, command)

    work = work_of_costs(folder / COSTS, asked.encodings, asked.data.batch_size)
    lab.train(runs, keep, passes=_passes(lab, runs[0], asked.scales), afterwards=work)
    costs = costs_of(lab, asked.encodings, folder / COSTS)
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


def _passes(lab: Lab, run: Run, scales: Sequence[float]) -> float:
    """Passes over the validation set in `measure_run`: one of shuffled patches, one at each other size."""
    model = lab.blueprint(run)
    if isinstance(model, TokenClassifier):
        return 1
    trained = math.prod(lab.data.input_size)
    sizes = scaled_sizes(lab.data, model.embed.patch_size, scales)
    return 1 + sum(math.prod(size) / trained for size in sizes if size != tuple(lab.data.input_size))


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
    relative = relative_costs({name: costs[name]["seconds"] for name in rights if name in costs})
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
