"""Run a plan: train and measure every encoding on every data set, and write the entry and the ranks."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from datetime import date
from itertools import chain
from pathlib import Path
from typing import Any

from rich.console import Console

from torchrope_lab.conclusion import BASELINE
from torchrope_lab.leaderboard.entry import (
    DataSetResults,
    EncodingResults,
    Entry,
    Tuned,
    best_rate,
    check_set,
    merge,
    pack,
)
from torchrope_lab.leaderboard.findings import find
from torchrope_lab.leaderboard.plan import Plan
from torchrope_lab.provenance import provenance
from torchrope_lab.results import StudyResult
from torchrope_lab.studies.engine.config import fitting
from torchrope_lab.studies.engine.estimates import by_encoding
from torchrope_lab.studies.engine.feasible import feasible
from torchrope_lab.studies.engine.measured import (
    Measured,
    costs_of,
    read_robustness,
    relative_costs,
    robustness,
)
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

    Returns:
        `out/leaderboard.json`.

    Raises:
        ValueError: a setting, the data or another entry is invalid.
        KeyboardInterrupt: interrupted; the same call resumes.
    """
    configs = {name: plan.config(name, out=out, parallel=parallel, slurm=slurm) for name in plan.sets}
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
    tuned = _tune(lab, plan, names) if rate is None else {}
    tuning = {name: {factor: each.top1 for factor, each in of.items()} for name, of in tuned.items()}
    rate = rate or (best_rate(list(tuning.values())) if tuning else 1.0)
    measure = robustness(lab.data, plan.scales if lab.data.lattice else [1.0])
    trained = _at_rate(lab, names, rate, [measure])
    measured = {name: [read_robustness(each, measure) for each in group] for name, group in trained.items()}
    small = _small(lab, plan, names, rate)
    own = {name: best_rate([tuned]) for name, tuned in tuning.items()}
    own_runs = {name: _at_rate(lab, [name], best)[name] for name, best in own.items() if best != rate}
    all_runs = [
        *(each for of in tuned.values() for each in of.values()),
        *chain(*trained.values(), *small.values(), *own_runs.values()),
    ]
    costed = list(dict.fromkeys([BASELINE, *names]))
    costs = costs_of(lab, costed, Path(lab.config.out) / "runs" / f"costs-{name}.json")
    relative = relative_costs({each: costs[each]["seconds"] for each in costed})
    labels = next(iter(trained.values()))[0].labels
    found = DataSetResults(
        name=name,
        arguments=plan.sets[name],
        data=describe(lab),
        fingerprint=lab.data.fingerprint,
        chance=max(Counter(labels).values()) / len(labels),
        rate=rate,
        encodings={
            each: replace(
                _of_encoding(measured[each]),
                small=_rights(small.get(each, [])),
                tuning=[Tuned(factor, top1) for factor, top1 in tuning.get(each, {}).items()],
                own_rate=own[each] if each in own_runs else None,
                own=_rights(own_runs.get(each, [])),
                steps=[round(float(step), 4) for step in relative[each]],
                parameters=costs[each]["encoding_parameters"],
            )
            for each in names
        },
        command=command,
        date=date.today().isoformat(),
        notes=notes,
        trainings=len(all_runs),
        seconds=round(sum(each.seconds for each in all_runs), 1),
        **{key: value for key, value in provenance().items() if key in ("commit", "machine", "versions")},
    )
    check_set(found)
    return found


def _tune(lab: Lab, plan: Plan, names: Sequence[str]) -> dict[str, dict[float, Trained]]:
    """Train one run at each learning rate and evaluate it on held-out training examples, by encoding."""
    tuned = fitting(plan.tuned, lab.config.data)
    wanted = [name for name in names if not tuned or name in tuned]
    if len(plan.rates) == 1 or not wanted:
        return {}
    base = lab.config.optim.lr
    cells = [(name, rate) for rate in plan.rates for name in wanted]
    trained = lab.train([lab.run(name, data={"tuning": True}, optim={"lr": base * rate}) for name, rate in cells])
    found: dict[str, dict[float, Trained]] = {name: {} for name in wanted}
    for (name, rate), run in zip(cells, trained, strict=True):
        found[name][rate] = run
    return found


def _at_rate(
    lab: Lab, names: Sequence[str], rate: float, measures: Sequence[Measure] = (), **settings: Any
) -> dict[str, list[Trained]]:
    runs = lab.runs(names, optim={"lr": lab.config.optim.lr * rate}, **settings)
    return by_encoding(lab.train(runs, lambda _: measures))


def _small(lab: Lab, plan: Plan, names: Sequence[str], rate: float) -> dict[str, list[Trained]]:
    """Train with a share of the training examples, at least one per class."""
    if not plan.small:
        return {}
    count = max(round(plan.small * lab.data.counts[0]), lab.data.num_classes)
    return _at_rate(lab, names, rate, data={"train_size": count})


def _of_encoding(measured: Sequence[Measured]) -> EncodingResults:
    trained = [each.trained for each in measured]
    return EncodingResults(
        right=_rights(trained),
        losses=[each.val_loss for each in trained],
        seconds=[each.seconds for each in trained],
        runs=[each.folder.name for each in trained],
        shuffled=[pack(each.shuffled) for each in measured],
        sizes={"×".join(map(str, size)): [pack(each.sizes[size]) for each in measured] for size in measured[0].sizes},
    )


def _rights(trained: Sequence[Trained]) -> list[str]:
    return [pack(each.correct) for each in trained]
