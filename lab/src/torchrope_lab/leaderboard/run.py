"""Run a plan: train and measure every encoding on every data set, and write the entry and the ranks."""

import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from datetime import date
from itertools import chain
from math import isfinite, nan
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console

from torchrope_lab.conclusion import BASELINE, rise
from torchrope_lab.data.build import make_data
from torchrope_lab.leaderboard.entry import (
    DataSetResults,
    EncodingResults,
    Entry,
    TuningRun,
    best_rate,
    merge,
    pack,
)
from torchrope_lab.leaderboard.findings import find
from torchrope_lab.leaderboard.plan import Plan
from torchrope_lab.options import parse
from torchrope_lab.provenance import provenance
from torchrope_lab.results import StudyResult
from torchrope_lab.schema import require
from torchrope_lab.studies.engine.config import StudyConfig, fitting
from torchrope_lab.studies.engine.estimates import by_encoding
from torchrope_lab.studies.engine.feasible import feasible
from torchrope_lab.studies.engine.measured import costs_of, read_robustness, relative_costs, robustness
from torchrope_lab.studies.engine.runs import Measure, Trained
from torchrope_lab.studies.engine.study import Lab, describe, facts_of

RESULT = "leaderboard.json"
ENTRY = "entry/entry.json"
SETS = "entry/sets"


def measure_plan(
    plan: Plan,
    out: Path,
    *,
    author: str,
    command: str,
    console: Console,
    parallel: int = 1,
    slurm: str | None = None,
    others: Sequence[Entry] = (),
    allow: Sequence[str] = (),
) -> Path:
    """Train the runs of a plan that are not finished yet, and rank the encodings over its data sets.

    Results are written after each data set, so that an interrupted plan can be reported.

    Args:
        plan: The plan.
        out: Output folder of the runs, the entry and the page.
        author: Author that the entry names.
        command: The user's command line.
        console: For progress.
        parallel, slurm: See `LabConfig`.
        others: Entries to rank as well. On their data sets their learning rates are used, without tuning, so that
            entries can be merged.
        allow: Modules and packages from which sources of data may be imported.

    Returns:
        `out/leaderboard.json`.

    Raises:
        ValueError: a setting, the data or another entry is invalid.
        KeyboardInterrupt: interrupted; the same call resumes.
    """
    configs = {name: plan.config(name, out=out, parallel=parallel, slurm=slurm, allow=allow) for name in plan.sets}
    rates = {each.name: each.rate for entry in others for each in entry.sets}
    found: list[DataSetResults] = []
    for name, config in configs.items():
        console.print(f"[bold]{name}[/]: {plan.sets[name]}", highlight=False, soft_wrap=True)
        found.append(run_set(name, plan, Lab(config, config.encodings, console), command, rates.get(name)))
        Entry(plan.title, author, [found[-1]]).write(out / SETS / f"{name}.json")
        write_results(out, Entry(plan.title, author, found), others, command, unfinished=[*configs][len(found) :])
    return out / RESULT


def write_results(
    out: Path, own: Entry | None, others: Sequence[Entry], command: str, unfinished: Sequence[str] = ()
) -> Path:
    """Write the entry of a run, or the merged entry of others, and the ranks over all of them."""
    together = merge([*([own] if own else []), *others])
    (own or together).write(out / ENTRY)
    published = {name for entry in others for each in entry.sets for name in each.encodings}
    added = dict.fromkeys(name for each in own.sets for name in each.encodings) if own and others else {}
    result = StudyResult(
        study="leaderboard",
        title="Leaderboard",
        question="Which encoding is best over several data sets, each with the same model and budget for all?",
        sources=(),
        findings=find(together, [name for name in added if name not in published]),
        data=None,
        run=facts_of(command, {}, seconds=sum(found.seconds for found in together.sets) or None),
        unfinished=list(unfinished),
    )
    result.write(out / RESULT)
    return out / RESULT


def run_set(name: str, plan: Plan, lab: Lab, command: str, rate: float | None = None) -> DataSetResults:
    """Train and measure every encoding on one data set, at the learning rate given or else the best of tuning."""
    runs, notes = feasible(lab, lab.runs(lab.encodings))
    names = list(dict.fromkeys(run.encoding for run in runs))
    lr, (train, _), classes = lab.config.optim.lr, lab.data.counts, lab.data.num_classes

    measure = robustness(lab.data, plan.scales if lab.data.lattice else [1.0])

    def train_at(
        names: Sequence[str], rate: float, measures: Sequence[Measure] = (), **settings: Any
    ) -> dict[str, list[Trained]]:
        runs = lab.runs(names, optim={"lr": lr * rate}, **settings)
        return by_encoding(lab.train(runs, lambda _: measures))

    tuned = {} if rate is not None else _tune(lab, plan, names)
    tuning = {name: {factor: each.top1 for factor, each in of.items()} for name, of in tuned.items()}
    rate = rate or (best_rate(list(tuning.values())) if tuning else 1.0)
    trained = train_at(names, rate, [measure])
    small = train_at(names, rate, data={"train_size": max(round(plan.small * train), classes)}) if plan.small else {}
    own_rates = {name: best for name, tries in tuning.items() if (best := best_rate([tries])) != rate}
    own = {name: train_at([name], best)[name] for name, best in own_rates.items()}
    costed = list(dict.fromkeys([BASELINE, *names]))
    costs = costs_of(lab, costed, Path(lab.config.out) / "runs" / f"costs-{name}.json")
    steps = relative_costs({each: costs[each]["seconds"] for each in costed})
    all_runs = [
        *chain.from_iterable(of.values() for of in tuned.values()),
        *chain(*trained.values(), *small.values(), *own.values()),
    ]
    labels, options = next(iter(trained.values()))[0].labels, plan.sets[name]
    facts = provenance()
    return DataSetResults(
        name=name,
        arguments=options if "epochs" in options else f"{options} --epochs {lab.config.optim.epochs}",
        data=describe(lab),
        fingerprint=lab.data.fingerprint,
        chance=max(Counter(labels).values()) / len(labels),
        rate=rate,
        encodings={
            each: replace(
                _measure(trained[each], measure),
                small=_pack(small.get(each, [])),
                tuning=[TuningRun(*pair) for pair in tuning.get(each, {}).items()],
                own_rate=own_rates.get(each),
                own=_pack(own.get(each, [])),
                steps=[round(float(step), 4) for step in steps[each]],
                parameters=costs[each]["encoding_parameters"],
            )
            for each in names
        },
        command=command,
        commit=facts["commit"],
        date=date.today().isoformat(),
        machine=facts["machine"],
        versions=facts["versions"],
        notes=notes,
        trainings=len(all_runs),
        seconds=round(sum(each.seconds for each in all_runs), 1),
    )


def _tune(lab: Lab, plan: Plan, names: Sequence[str]) -> dict[str, dict[float, Trained]]:
    """Train one run at each learning rate and evaluate it on held-out training examples, by encoding."""
    tuned = fitting(plan.tuned, lab.config.data)
    cells = [(name, rate) for rate in plan.rates for name in names if not tuned or name in tuned]
    if len(plan.rates) == 1 or not cells:
        return {}
    lr = lab.config.optim.lr
    trained = lab.train([lab.run(name, data={"tuning": True}, optim={"lr": lr * rate}) for name, rate in cells])
    found: dict[str, dict[float, Trained]] = {}
    for (name, rate), run in zip(cells, trained, strict=True):
        found.setdefault(name, {})[rate] = run
    return found


def _measure(trained: Sequence[Trained], measure: Measure) -> EncodingResults:
    measured = [read_robustness(each, measure) for each in trained]
    rises = [rise([top1 for epoch in each.curve if isfinite(top1 := epoch.get("val_top1", nan))]) for each in trained]
    return EncodingResults(
        right=_pack(trained),
        losses=[each.val_loss for each in trained],
        seconds=[each.seconds for each in trained],
        runs=[each.folder.name for each in trained],
        shuffled=[pack(each.shuffled) for each in measured],
        sizes={"×".join(map(str, size)): [pack(each.sizes[size]) for each in measured] for size in measured[0].sizes},
        rise=None if None in rises else fmean(each for each in rises if each is not None),
    )


def _pack(trained: Sequence[Trained]) -> list[str]:
    return [pack(each.correct) for each in trained]


def check_against_data(measured: DataSetResults) -> str:
    """Compare an entry's data set with the same data on this machine.

    Returns:
        The outcome in words: the data is the same, or the reason why it was not checked.

    Raises:
        ValueError: the data on this machine differs.
    """
    try:
        data = make_data(parse("leaderboard", "", StudyConfig, shlex.split(measured.arguments), allow=()).config.data)
        data.setup()
    except (ValueError, OSError, ImportError) as error:
        return f"not checked, because the data set cannot be loaded here: {' '.join(str(error).split())}"
    for name, stored, local in (
        ("fingerprint", measured.fingerprint, data.fingerprint),
        ("validation examples", measured.data.val, data.counts[1]),
        ("classes", measured.data.num_classes, data.num_classes),
    ):
        require(stored == local, f"set {measured.name}: {name} must be {local} as in the local data", str(stored))
    return "same data as on this machine"
