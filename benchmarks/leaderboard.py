"""Train eight encodings on five data sets to convergence, each at its own learning rates, and print one table.

    python benchmarks/leaderboard.py --parallel 2 --out runs/leaderboard

The same command resumes it. docs/leaderboard.md has the protocol, the time it takes and the committed results. Writes
OUT/entry.json after each data set: the answers on every example, in the format that benchmarks/readme.py reads. Run it
in the root of a clone; the three sets of kanji are sources of examples/ that need the package kanjivg.
"""

import argparse
import base64
import math
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import date
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from readme import has_converged, table
from rich.console import Console

from torchrope_lab.engine.descriptions import describe_data
from torchrope_lab.engine.provenance import provenance
from torchrope_lab.engine.runs import Run, Trained
from torchrope_lab.engine.study import Lab
from torchrope_lab.results import write_json
from torchrope_lab.settings.parser import parse
from torchrope_lab.settings.study_config import StudyConfig
from torchrope_lab.training.optim import encoding_parameters

TITLE = "Eight encodings, small models trained to convergence, two cores"
ENCODINGS = ("none", "learned", "axial", "golden", "mixed", "string", "comrope-ld", "liere:8")
SETS = {
    "digits": "--data digits --data.train_size 1000 --epochs 15",
    "motion": "--data motion --data.train_size 1200 --epochs 10",
    "kanji-radical": "--data examples/sources.py:radicals --model.patch_size 4 --epochs 8",
    "kanji-strokes": "--data examples/sources.py:strokes --data.size 48 --data.batch_size 64 --data.augment.shift 0.5 "
    "--data.augment.drop_points 0 --model.dim 72 --model.depth 3 --model.num_heads 3 --model.mlp_dim 144 "
    "--model.share_layers true --optim.lr 2e-3 --optim.warmup_epochs 2 --epochs 8",
    "kanji-layout": "--data examples/sources.py:layouts --data.train_size 2400 --model.patch_size 4 --epochs 8",
}
"""Options of `torchrope compare` for data, model and schedule; epochs are those to begin with. head_dim is 16, 24 for
three axes, so that every family fits, blocks of 8 included."""
SEEDS = 5
RATES = (0.1, 0.3, 1.0, 3.0, 10.0)
"""Factors on each set's learning rate."""
ENCODING_RATES = (0.1, 1.0, 10.0, 100.0)
"""Factors on `optim.encoding_lr`, for encodings that have parameters."""
LONGEST = 4
"""Limit of the epochs, as a multiple of each set's."""

Tuning = list[dict[str, float]]
"""Trainings for choosing learning rates: factors `rate` and `encoding_rate`, and `top1` on held-out examples."""
Train = Callable[[Sequence[Run]], list[Trained]]


def main() -> None:
    options = _options()
    command = shlex.join(["python", "benchmarks/leaderboard.py", *sys.argv[1:]])
    sets = []
    for name in options.only:
        print(f"{name}: {SETS[name]}", flush=True)
        sets.append(measure(name, options, command))
        write_json(options.out / "entry.json", {"title": TITLE, "sets": sets})
    print(table({"sets": sets}), f"{options.out / 'entry.json'}", sep="\n\n")


def measure(name: str, options: argparse.Namespace, command: str) -> dict[str, Any]:
    """Tune and train every encoding on one data set; runs that are finished are read."""
    asked = [f"--out={options.out}", f"--parallel={options.parallel}", f"--seeds={options.seeds}"]
    config = parse("compare", "", StudyConfig, [*shlex.split(SETS[name]), *asked]).config
    lab = Lab(config, options.encodings, Console())
    all_runs: dict[str, Trained] = {}

    def train(runs: Sequence[Run]) -> list[Trained]:
        trained = lab.train(runs)
        all_runs.update((each.run.key, each) for each in trained)
        return trained

    tuning = tune(lab, train)
    lengths = lengthen(lab, {each: best_rates(tuning[each]) for each in tuning}, train)
    return {
        "name": name,
        "arguments": SETS[name],
        "data": asdict(describe_data(lab.data)),
        "encodings": {
            each: {
                "right": [pack(run.correct) for run in trained[-1]],
                "half": [pack(run.correct) for run in trained[-2]] if trained[1:] else [],
                "epochs": trained[-1][0].run.config.optim.epochs,
                **dict(zip(("rate", "encoding_rate"), best_rates(tuning[each]), strict=True)),
                "tuning": tuning[each],
            }
            for each, trained in lengths.items()
        },
        "command": command,
        "date": date.today().isoformat(),
        **provenance(),
        "trainings": len(all_runs),
        "core_seconds": round(sum(each.seconds * each.provenance["threads"] for each in all_runs.values()), 1),
    }


def tune(lab: Lab, train: Train) -> dict[str, Tuning]:
    """Search for each encoding's learning rate, then for that of its parameters, on held-out training examples.

    Neighbours of the best rate, at first 1, are trained with one seed, until both have been tried or the list ends.
    """
    tuning: dict[str, Tuning] = {name: [] for name in lab.encodings}
    learned = [name for name in tuning if encoding_parameters(lab.blueprint(lab.run(name)))]
    for axis, (factors, tuned) in enumerate([(RATES, [*tuning]), (ENCODING_RATES, learned)]):
        while cells := [(name, rates) for name in tuned for rates in _untried(tuning[name], axis, factors)]:
            runs = [lab.run(name, data={"tuning": True}, optim=_optim(lab, *rates)) for name, rates in cells]
            for (name, (rate, encoding_rate)), trained in zip(cells, train(runs), strict=True):
                tuning[name].append({"rate": rate, "top1": trained.top1, "encoding_rate": encoding_rate})
    return tuning


def _untried(tuning: Tuning, axis: int, factors: Sequence[float]) -> list[tuple[float, float]]:
    """Return the best factors and their neighbours on an axis, without those that were tried."""
    best, tried = best_rates(tuning), {(each["rate"], each["encoding_rate"]) for each in tuning}
    at = factors.index(best[axis])
    around = [(best[0], each) if axis else (each, best[1]) for each in factors[max(at - 1, 0) : at + 2]]
    return [each for each in around if each not in tried]


def best_rates(tuning: Tuning) -> tuple[float, float]:
    """Return the factors on both learning rates of the highest accuracy; of equal ones, those nearest to 1."""

    def order(run: Mapping[str, float]) -> tuple[float, ...]:
        distance = abs(math.log(run["rate"])) + abs(math.log(run["encoding_rate"]))
        return -round(run["top1"], 9), distance, run["rate"]

    best = min(tuning, key=order, default={"rate": 1.0, "encoding_rate": 1.0})
    return best["rate"], best["encoding_rate"]


def _optim(lab: Lab, rate: float, encoding_rate: float) -> dict[str, float]:
    optim = lab.config.optim
    return {"lr": optim.lr * rate, "encoding_lr": optim.encoding_lr * encoding_rate}


def lengthen(lab: Lab, chosen: Mapping[str, tuple[float, float]], train: Train) -> dict[str, list[list[Trained]]]:
    """Train every encoding with all seeds, and again with twice the epochs while that changes accuracy.

    Returns the runs of each encoding for each number of epochs, increasing.
    """
    lengths: dict[str, list[list[Trained]]] = {name: [] for name in chosen}
    growing, multiple = list(chosen), 1
    while growing and multiple <= LONGEST:
        epochs = lab.config.optim.epochs * multiple
        runs = {
            name: [lab.run(name, seed, optim={**_optim(lab, *chosen[name]), "epochs": epochs}) for seed in lab.seeds]
            for name in growing
        }
        trained = iter(train([run for of_name in runs.values() for run in of_name]))
        for name, of_name in runs.items():
            lengths[name].append([next(trained) for _ in of_name])
        growing = [name for name in growing if not _is_done(lengths[name])]
        multiple *= 2
    return lengths


def _is_done(lengths: Sequence[Sequence[Trained]]) -> bool:
    accuracy = [fmean(each.top1 for each in trained) for trained in lengths]
    return len(accuracy) > 1 and has_converged(accuracy[-1] - accuracy[-2])


def pack(right: np.ndarray) -> str:
    """Pack right (1) or wrong (0) of every example into one bit each, in base64."""
    return base64.b64encode(np.packbits(right.astype(bool)).tobytes()).decode("ascii")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=SETS, default=[*SETS], help="data sets (default: all)")
    parser.add_argument("--encodings", nargs="+", default=ENCODINGS, help="encodings (default: all eight)")
    parser.add_argument("--seeds", type=int, default=SEEDS, help=f"trainings of each encoding (default: {SEEDS})")
    parser.add_argument("--parallel", type=int, default=1, help="runs at a time (default: 1)")
    parser.add_argument("--out", type=Path, default=Path("runs/leaderboard"), help="folder of the runs and entry.json")
    return parser.parse_args()


if __name__ == "__main__":
    main()
