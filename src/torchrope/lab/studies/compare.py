"""Train the same model once per encoding and seed, measure it, and write down what came out."""

import math
from dataclasses import asdict
from datetime import date
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from rich.console import Console

from torchrope.encodings import Encoding, NoEncoding, choose
from torchrope.files import read_mapping
from torchrope.lab.data.build import make_data
from torchrope.lab.data.datamodule import DataModule
from torchrope.lab.provenance import provenance
from torchrope.lab.studies.config import CompareConfig
from torchrope.lab.studies.describe import describe_data, describe_skipped, label
from torchrope.lab.studies.folder import Run, StudyFolder, write_json
from torchrope.lab.studies.progress import StudyProgress
from torchrope.lab.studies.ranking import Accuracy, Place, not_behind, rank, spread
from torchrope.lab.training.config import RunConfig, check_spacing, plain
from torchrope.lab.training.cost import measure_costs
from torchrope.lab.training.evaluate import evaluate, interval
from torchrope.lab.training.models import build_for_costs, build_model
from torchrope.lab.training.run import train
from torchrope.lab.training.skipped import read_skipped
from torchrope.models import Swin, ViT

CLEARLY_CHEAPER = 1.05
"""Times per step closer than this are no reason to choose."""


def compare(config: CompareConfig, *, command: str, console: Console) -> Path:
    """Train, evaluate and measure every encoding; do nothing twice that is finished in the folder.

    Args:
        config: What to compare, and where to leave it.
        command: How the user started it, for the report.
        console: Where progress goes.

    Returns:
        The folder's `results.json`.

    Raises:
        ValueError: a setting, the data or the folder is not as it must be; nothing was trained then.
        KeyboardInterrupt: stopped; the same call goes on with the epoch that was under way.
    """
    check_spacing(config.model, config.data)
    data = make_data(config.data)
    data.setup()
    for name in config.encodings:
        _blueprint(name, config, data)  # refuses a bad setting before hours of training
    folder = StudyFolder(Path(config.out))
    asked = folder.claim(config, data.fingerprint)

    runs = [Run(name, seed) for seed in range(config.seeds) for name in config.encodings]
    unfinished = [run for run in runs if folder.result(run) is None]
    with StudyProgress(len(unfinished), len(unfinished) * config.optim.epochs, console) as progress:
        for run in unfinished:
            progress.begin(run, config.optim.epochs)
            result = _train_and_evaluate(run, data, config, folder, progress)
            folder.write_result(run, result)
            progress.end(f"top-1 {100 * result['top1']:.1f} %")

    measured = {name: _finished(folder, name, asked.seeds) for name in asked.encodings}
    measured = {name: results for name, results in measured.items() if results}
    costs = _costs(folder, list(measured), data, config)
    run_again = {"command": command, "date": date.today().isoformat(), "config": plain(asked), **provenance()}
    results = _results(asked, data, measured, costs, run_again)
    results["data"]["skipped"] = _skipped(data, folder, asked)
    write_json(folder.results_file, results)
    return folder.results_file


def _blueprint(name: str, config: CompareConfig, data: DataModule) -> ViT | Swin:
    """The model without its numbers."""
    with torch.device("meta"):
        return build_model(name, config.model, data)


def _train_and_evaluate(
    run: Run, data: DataModule, config: CompareConfig, folder: StudyFolder, progress: StudyProgress
) -> dict[str, Any]:
    settings = RunConfig(
        encoding=run.encoding,
        seed=run.seed,
        data=config.data,
        model=config.model,
        optim=config.optim,
        scale=config.scale,
    )
    classifier, history = train(settings, data, folder.run_folder(run), on_epoch=progress.epoch)
    evaluation = evaluate(classifier.model, data, config.scales)
    return {
        "seed": run.seed,
        **evaluation.measures(),
        "curve": history.rows,
        "seconds": sum(row["seconds"] for row in history.rows),
        "labels": evaluation.labels,
        "predicted": evaluation.predicted,
    }


def _finished(folder: StudyFolder, name: str, seeds: int) -> list[dict[str, Any]]:
    results = (folder.result(Run(name, seed)) for seed in range(seeds))
    return [result for result in results if result is not None]


def _skipped(data: DataModule, folder: StudyFolder, asked: CompareConfig) -> list[str]:
    """What could not be read, now and in the runs that an earlier start finished."""
    runs = [Run(name, seed) for name in asked.encodings for seed in range(asked.seeds)]
    earlier = {path: why for run in runs for path, why in read_skipped(folder.run_folder(run)).items()}
    return describe_skipped({**earlier, **dict(data.skipped)})


def _costs(folder: StudyFolder, names: list[str], data: DataModule, config: CompareConfig) -> dict[str, Any]:
    """Measure all encodings in one sitting, unless that has been done."""
    if folder.costs_file.exists():
        known = read_mapping(folder.costs_file, "costs")
        if set(names) <= set(known):
            return known
    inputs, labels, *_ = next(iter(data.train_dataloader()))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    builders = {name: partial(build_for_costs, name, config.model, data) for name in names}
    costs = measure_costs(builders, (inputs.to(device), labels.to(device)))
    known = {name: asdict(cost) for name, cost in costs.items()}
    write_json(folder.costs_file, known)
    return known


def _results(
    asked: CompareConfig,
    data: DataModule,
    measured: dict[str, list[dict[str, Any]]],
    costs: dict[str, Any],
    run_again: dict[str, Any],
) -> dict[str, Any]:
    """Everything that a report shows, as `results.json` keeps it."""
    blueprints = {name: _blueprint(name, asked, data) for name in measured}
    places = rank([Accuracy(name, _correct(results)) for name, results in measured.items()])
    runs = [Run(name, seed) for name in asked.encodings for seed in range(asked.seeds)]
    done = {Run(name, result["seed"]) for name, results in measured.items() for result in results}
    seconds = sum(result["seconds"] for results in measured.values() for result in results)
    return {
        "schema": 1,
        "study": "compare",
        "data": _describe_data(data, blueprints),
        "encodings": [
            _describe_encoding(name, results, costs[name], blueprints[name]) for name, results in measured.items()
        ],
        "ranking": [asdict(place) for place in places],
        "answer": _answer(places, costs, data, asked.seeds),
        "run": {**run_again, "seeds": list(range(asked.seeds)), "seconds": seconds},
        "unfinished": [str(run) for run in runs if run not in done],
    }


def _describe_data(data: DataModule, blueprints: dict[str, ViT | Swin]) -> dict[str, Any]:
    embed = next(iter(blueprints.values())).embed
    return {
        **describe_data(data),
        "patch_size": list(embed.patch_size),
        "tokens": math.prod(embed.lattice(data.input_size)),
    }


def _describe_encoding(
    name: str, results: list[dict[str, Any]], cost: dict[str, Any], blueprint: ViT | Swin
) -> dict[str, Any]:
    parts = choose(name).parts
    rotary = [part for part in parts if issubclass(part, Encoding) and part is not NoEncoding]
    correct = _correct(results)
    return {
        "name": name,
        "label": label(name),
        "summary": " ".join(part.summary for part in parts),
        "formula": ";  ".join(part.formula for part in parts),
        "source": "; ".join(part.source for part in parts),
        "rotary": bool(rotary),
        "relative": _is_relative(blueprint) if rotary else None,
        "seeds": [{key: value for key, value in r.items() if key not in ("labels", "predicted")} for r in results],
        "top1": {**_over_seeds(correct.mean(axis=1).tolist()), "interval": interval(correct.mean(axis=0))},
        "val_loss": _over_seeds([result["val_loss"] for result in results]),
        "shuffled_top1": _over_seeds([result["shuffled_top1"] for result in results]),
        "resolutions": [
            {"size": at["size"], **_over_seeds([result["resolutions"][i]["top1"] for result in results])}
            for i, at in enumerate(results[0]["resolutions"])
        ],
        "cost": cost,
    }


def _is_relative(blueprint: ViT | Swin) -> bool:
    return next(part.relative for part in blueprint.modules() if isinstance(part, Encoding))


def _correct(results: list[dict[str, Any]]) -> np.ndarray:
    """Right or not, `(seeds, examples)`."""
    return np.array([np.equal(result["labels"], result["predicted"]) for result in results], dtype=float)


def _over_seeds(values: list[float | None]) -> dict[str, float | None]:
    """Mean and standard deviation; None where a run diverged."""
    finite = [value for value in values if value is not None]
    if len(finite) < len(values):
        return {"mean": None, "spread": None}
    return {"mean": fmean(finite), "spread": spread(finite)}


def _answer(places: list[Place], costs: dict[str, Any], data: DataModule, seeds: int) -> str:
    """Recommend the best, or a clearly cheaper one that no measured difference sets apart from it."""
    best = places[0].name
    equals = not_behind(places)
    seconds = {name: costs[name]["step_seconds"] for name in equals}
    caveat = "" if seeds > 1 else ", in one training; more seeds would tell luck from difference"
    cheapest = min(equals, key=lambda name: seconds[name])
    if len(places) == 1:
        return f"Only {best} was measured: name several encodings to compare them."
    if "none" in equals:
        return f"Position does not matter here: no encoding is measurably better than none on {data.title}."
    if len(equals) == 1:
        return f"Use {best}: it is measurably better than all others on {data.title}{caveat}."
    if seconds[best] <= CLEARLY_CHEAPER * seconds[cheapest]:
        others = ", ".join(equals[1:])
        return f"Use {best}: it has the highest top-1, and no equal ({others}) takes clearly less time per step."
    saved = f"{100 * (1 - seconds[cheapest] / seconds[best]):.0f} % less time per training step"
    rest = ", ".join(name for name in equals if name not in (best, cheapest))
    also = f" Not told apart either: {rest}." if rest else ""
    return f"Use {cheapest}: it cannot be told apart from {best}, which has the highest top-1, and takes {saved}.{also}"
