"""The study of `torchrope compare`: accuracy and cost of each encoding on the user's data."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from torchrope.files import write_whole
from torchrope_lab.data.data_config import data_config
from torchrope_lab.encodings import load_modules, resolve_encoding
from torchrope_lab.engine.comparison import compare_runs
from torchrope_lab.engine.dry_run import NotTrained
from torchrope_lab.engine.folds import in_folds
from torchrope_lab.engine.measured import (
    Measured,
    costs_of,
    pooled_measures,
    read_robustness,
    relative_costs,
    robustness,
)
from torchrope_lab.engine.runs import Run, Trained
from torchrope_lab.engine.study import Lab, describe, facts_of
from torchrope_lab.files import RESULTS, holds_files, read_mapping, write_new
from torchrope_lab.mistakes import Mistake
from torchrope_lab.results import StudyResult
from torchrope_lab.settings.compare_config import SCALES, CompareConfig
from torchrope_lab.settings.run_config import CONFIG, MAY_CHANGE, check_spacing, differences, plain
from torchrope_lab.studies.compare_findings import ComparisonResults, findings

COSTS = "runs/costs.json"
MAY_DIFFER = ("encodings", "seeds", "out", "parallel", "slurm", "margin")


def compare(
    config: CompareConfig, *, command: str, console: Console, allow: Sequence[str] = (), dry_run: bool = False
) -> Path:
    """Train, evaluate and measure every encoding that is not finished in the folder; return its `results.json`."""
    check_spacing(config.model, config.data)
    if not config.data.lattice and config.scales != SCALES:
        raise Mistake(f"--scales is for data on a lattice, got {config.scales} with --data {config.data.name}")
    folder = Path(config.out)
    asked, is_new = config, not (folder / CONFIG).exists()
    config = _extended(folder, config)
    load_modules(config.encodings, allow)
    for name in config.encodings:
        resolve_encoding(name)  # raises for modules that were allowed in an earlier call and are not now
    lab = Lab(config, config.encodings, console, dry_run=dry_run)
    runs = [lab.run(name, seed) for seed in lab.seeds for name in config.encodings]
    for run in runs:
        lab.blueprint(run)  # raises for a bad setting before anything is written
    settings = yaml.safe_dump(plain(config), sort_keys=False)
    if not dry_run:
        if is_new and not write_new(folder / CONFIG, settings):  # another command has taken the folder meanwhile
            return compare(asked, command=command, console=console, allow=allow)
        write_whole(folder / CONFIG, settings)
    counts = {"encoding": len(config.encodings), "seed": config.seeds, "fold": config.data.folds}
    all_runs = " x ".join(f"{count} {what}{'s' * (count != 1)}" for what, count in counts.items() if count)
    console.print(
        f"comparing {all_runs} on {config.data.name}; output folder: {config.out}", highlight=False, soft_wrap=True
    )
    measured: dict[str, Measured] = {}
    measure = robustness(lab.data, config.scales)

    def keep(trained: Trained) -> None:
        measured[trained.run.name] = read_robustness(trained, measure)
        lab.skipped |= trained.skipped

    try:
        with suppress(NotTrained):
            lab.train(runs, lambda _: [measure], keep)
    except BaseException:
        _write(folder, lab, config, runs, measured, {}, command)
        if not any(folder.glob("runs/*/*.ckpt")):
            (folder / CONFIG).unlink(missing_ok=True)  # other settings may start here
        raise
    if dry_run:
        return folder / RESULTS
    costs = costs_of(lab, config.encodings, folder / COSTS)
    return _write(folder, lab, config, runs, measured, costs, command)


def _extended(folder: Path, config: CompareConfig) -> CompareConfig:
    """Add the encodings and seeds of earlier calls on the folder to the configuration; refuse unrelated folders."""
    file = folder / CONFIG
    if not file.exists():
        if folder.is_file() or (holds_files(folder) and not (folder / "runs").is_dir()):
            raise Mistake(f"--out must be a new folder, an empty one, or one of torchrope compare, got {folder}")
        return config
    stored = read_mapping(file, CONFIG)
    is_of_compare = {"encodings", "seeds", "data", "model", "optim"} <= set(stored)
    if not is_of_compare or not isinstance(stored["data"], dict):
        rule = "must be a configuration of torchrope compare with encodings, seeds, data, model and optim"
        raise Mistake(f"{file} {rule}, got {', '.join(stored) or 'nothing'}")
    data = data_config(stored["data"].get("name", "digits"))
    defaults = plain(CompareConfig(data=data))  # for settings that were added after the folder was written
    earlier = {**defaults, **{key: _over(defaults.get(key), value) for key, value in stored.items()}}
    if different := differences(earlier, plain(config), ignored=(*MAY_DIFFER, *MAY_CHANGE)):
        rule = "--out must be a new folder or one of the same configuration"
        raise Mistake(f"{rule}, got {folder} with {different}")
    encodings = list(dict.fromkeys([*earlier["encodings"], *config.encodings]))
    return replace(config, encodings=encodings, seeds=max(earlier["seeds"], config.seeds))


def _over(defaults: Any, stored: Any) -> Any:
    return {**defaults, **stored} if isinstance(defaults, dict) and isinstance(stored, dict) else stored


def _write(
    folder: Path,
    lab: Lab,
    config: CompareConfig,
    runs: Sequence[Run],
    measured: Mapping[str, Measured],
    costs: Mapping[str, Any],
    command: str,
) -> Path:
    """Write the results of the finished runs to `results.json`."""
    done = pooled_measures([measured[run.name] for run in in_folds(runs) if run.name in measured], lab.data)
    if not done:  # a fold of every run is missing
        return folder / RESULTS
    trained = {each.trained.encoding for each in done}
    relative = relative_costs({name: cost["seconds"] for name, cost in costs.items() if name in trained})
    comparison = compare_runs([each.trained for each in done], margin=config.margin, costs=relative)
    by_run = {each.trained.run.name: each for each in done}
    found = findings(ComparisonResults(comparison, by_run, costs, relative, lab))
    result = StudyResult(
        study="compare",
        title="Comparison",
        question="Which position encoding suits the data, and at what cost?",
        sources=(),
        findings=found,
        data=describe(lab),
        run=facts_of(
            command,
            plain(config),
            [each.trained.provenance for each in measured.values()],
            sum(each.trained.seconds for each in measured.values()),
        ),
        conclusion=comparison.conclusion.as_dict(),
        unfinished=[str(run) for run in in_folds(runs) if run.name not in measured],
    )
    result.write(folder / RESULTS)
    return folder / RESULTS
