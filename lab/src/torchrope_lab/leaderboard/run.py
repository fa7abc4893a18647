"""Run a plan: tune, train and measure every encoding on every data set, and write the entry and the report."""

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from statistics import fmean

import torch
from rich.console import Console

from torchrope_lab.conclusion import BASELINE
from torchrope_lab.data.build import make_data
from torchrope_lab.leaderboard.answers import has_converged
from torchrope_lab.leaderboard.entry import (
    DataSetResults,
    EncodingResults,
    Entry,
    TuningRun,
    best_rates,
    merge,
    pack,
    require_same,
    updated,
)
from torchrope_lab.leaderboard.findings import cost_of, find
from torchrope_lab.leaderboard.plan import Plan
from torchrope_lab.options import parse
from torchrope_lab.provenance import provenance
from torchrope_lab.results import StudyResult
from torchrope_lab.schema import require
from torchrope_lab.statistics import constant_accuracy
from torchrope_lab.studies.engine.config import StudyConfig
from torchrope_lab.studies.engine.estimates import by_encoding
from torchrope_lab.studies.engine.feasible import feasible
from torchrope_lab.studies.engine.measured import costs_of, read_robustness, relative_costs, robustness
from torchrope_lab.studies.engine.runs import Measure, Run, Trained
from torchrope_lab.studies.engine.study import Lab, describe, facts_of
from torchrope_lab.training.optim import encoding_parameters

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
    """Train the runs of a plan that are not finished yet, and compare the encodings on its data sets.

    Results are written after each data set, so that an interrupted plan can be reported. What an earlier command of the
    plan has measured in `out`, of other data sets or encodings, remains in the entry.

    Args:
        plan: The plan.
        out: Output folder of the runs, the entry and the page.
        author: Author that the entry names; "" for that of the entry in `out`.
        command: The user's command line.
        console: For progress.
        parallel, slurm: See `LabConfig`.
        others: Entries to compare with.
        allow: Modules and packages from which sources of data may be imported.

    Returns:
        `out/leaderboard.json`.

    Raises:
        ValueError: a setting, the data or another entry is invalid, before anything is trained.
        KeyboardInterrupt: interrupted; the same call resumes.
    """
    configs = {name: plan.config(name, out=out, parallel=parallel, slurm=slurm, allow=allow) for name in plan.sets}
    labs = {name: Lab(config, config.encodings, console) for name, config in configs.items()}
    earlier = _earlier(plan, out)
    author, own = author or earlier.author, {each.name: each for each in earlier.sets}
    for name, lab in [*labs.items()]:
        names = _fitting(name, plan, lab, others)
        if not names:
            console.print(f"{name} is left out. {' '.join(lab.left_out)}", highlight=False, soft_wrap=True)
            del labs[name]
        else:
            if name in own and any(getattr(own[name], what) != value for what, value in _identity(name, plan, lab)):
                del own[name]
            _check_apart(name, names, own.get(name), others)
    if not labs:
        raise ValueError(f"no encoding fits a data set of the plan: {next(iter(lab.left_out))}")
    merge([Entry(plan.title, author, [*own.values()]), *others])  # raises if they contradict each other
    found: list[DataSetResults] = []
    for name, lab in labs.items():
        console.print(f"[bold]{name}[/]: {plan.sets[name]}", highlight=False, soft_wrap=True)
        found.append(run_set(name, plan, lab, command))
        own[name] = updated(found[-1], own[name]) if name in own else found[-1]
        Entry(plan.title, author, [own[name]]).write(out / SETS / f"{name}.json")
        sets = [own[each] for each in dict.fromkeys([*labs, *own]) if each in own]
        write_results(out, Entry(plan.title, author, sets), others, command, unfinished=[*labs][len(found) :])
    console.print(cost_of(found), highlight=False, soft_wrap=True)
    return out / RESULT


def _earlier(plan: Plan, out: Path) -> Entry:
    """Read what earlier commands of a plan have measured in a folder."""
    entries = [entry for file in sorted((out / SETS).glob("*.json")) if (entry := Entry.read(file)).title == plan.title]
    author = next((entry.author for entry in entries if entry.author), "")
    return Entry(plan.title, author, [each for entry in entries for each in entry.sets])


def _identity(name: str, plan: Plan, lab: Lab) -> list[tuple[str, object]]:
    """Return what results of a data set must have in common to be compared."""
    return [("fingerprint", lab.data.fingerprint), ("arguments", plan.sets[name]), ("seeds", plan.seeds)]


def _check_apart(name: str, names: Sequence[str], own: DataSetResults | None, others: Sequence[Entry]) -> None:
    """Raise ValueError if others have a set's encodings too, except with the answers that this folder has already."""
    done = {} if own is None else {each: results.right for each, results in own.encodings.items()}
    both = [
        (each, of_set.encodings[each].right)
        for entry in others
        for of_set in entry.sets
        if of_set.name == name
        for each in dict.fromkeys([*names, *done])
        if each in of_set.encodings
    ]
    twice = ", ".join(dict.fromkeys(each for each, right in both if done.get(each) != right))
    advice = "leave them out by --encodings, or choose another --out"
    require(not twice, f"set {name} must have other encodings than --entries ({advice})", twice)


def _fitting(name: str, plan: Plan, lab: Lab, others: Sequence[Entry]) -> list[str]:
    """Return the encodings that fit a data set.

    Raises:
        ValueError: the data is for other tasks or in folds, or another entry has the set with other data or settings.
    """
    folds, tasks = lab.config.data.folds, lab.data.tasks
    require(not folds, f"sets.{name} of the plan must not have --data.folds", str(folds))
    require("classify" in tasks, f"sets.{name} of the plan must be data for the task classify", " and ".join(tasks))
    for other in (each for entry in others for each in entry.sets if each.name == name):
        for what, value in _identity(name, plan, lab):
            require_same(name, what, value, getattr(other, what))
    return list(dict.fromkeys(run.encoding for run in feasible(lab, lab.runs(lab.encodings))))


def write_results(
    out: Path, own: Entry | None, others: Sequence[Entry], command: str, unfinished: Sequence[str] = ()
) -> Path:
    """Write the entry of a run, or the merged entry of others, and what all of them show."""
    together = merge([*([own] if own else []), *others])
    (own or together).write(out / ENTRY)
    published = {name for entry in others for each in entry.sets for name in each.encodings}
    added = dict.fromkeys(name for each in own.sets for name in each.encodings) if own and others else {}
    result = StudyResult(
        study="leaderboard",
        title="Leaderboard",
        question="Which encodings differ, each trained to convergence or a limit, at its best learning rates?",
        sources=(),
        findings=find(together, [name for name in added if name not in published]),
        data=None,
        run=facts_of(command, {}),
        unfinished=list(unfinished),
    )
    result.write(out / RESULT)
    return out / RESULT


def run_set(name: str, plan: Plan, lab: Lab, command: str) -> DataSetResults:
    """Tune, train and measure every encoding on one data set; runs that are finished are read."""
    runs = feasible(lab, lab.runs(lab.encodings))
    names = list(dict.fromkeys(run.encoding for run in runs))
    all_runs: dict[str, Trained] = {}

    def train(runs: Sequence[Run], *measures: Measure) -> list[Trained]:
        trained = lab.train(runs, lambda _: measures)
        all_runs.update((each.run.key, each) for each in trained)
        return trained

    tuning = _tune(plan, lab, names, train)
    lengths = _lengthen(plan, lab, {each: _chosen(tuning[each]) for each in names}, train)
    measure = robustness(lab.data, plan.scales if lab.data.lattice else [1.0])
    final = by_encoding(train([each.run for of in lengths.values() for each in of[-1]], measure))
    costed = list(dict.fromkeys([BASELINE, *names]))
    costs = costs_of(lab, costed, Path(lab.config.out) / "runs" / f"costs-{name}-{lab.run(BASELINE).key}.json")
    steps = relative_costs({each: costs[each]["seconds"] for each in costed})
    labels, facts = final[names[0]][0].labels, provenance()
    threads = max(1, torch.get_num_threads() // lab.config.parallel)  # of runs that do not say theirs
    return DataSetResults(
        name=name,
        arguments=plan.sets[name],
        data=describe(lab),
        fingerprint=lab.data.fingerprint,
        chance=constant_accuracy(labels),
        encodings={
            each: replace(
                _measure(final[each], measure, lengths[each][-2] if lengths[each][1:] else []),
                rate=_chosen(tuning[each])[0],
                encoding_rate=_chosen(tuning[each])[1],
                tuning=tuning[each],
                steps=[round(float(step), 4) for step in steps[each]],
            )
            for each in names
        },
        command=command,
        commit=facts["commit"],
        date=date.today().isoformat(),
        machine=facts["machine"],
        versions=facts["versions"],
        notes=list(lab.left_out),
        protocol=plan.protocol,
        trainings=len(all_runs),
        core_seconds=round(
            sum(each.seconds * each.provenance.get("threads", threads) for each in all_runs.values()), 1
        ),
    )


Train = Callable[[Sequence[Run]], list[Trained]]


def _rates(lab: Lab, rate: float, encoding_rate: float) -> dict[str, float]:
    optim = lab.config.optim
    return {"lr": optim.lr * rate, "encoding_lr": optim.encoding_lr * encoding_rate}


def _chosen(tuning: Sequence[TuningRun]) -> tuple[float, float]:
    return best_rates(tuning) if tuning else (1.0, 1.0)


def _tune(plan: Plan, lab: Lab, names: Sequence[str], train: Train) -> dict[str, list[TuningRun]]:
    """Search for each encoding's learning rate, then for that of its parameters, on held-out training examples.

    Neighbours of the best rate are trained with one seed, until both have been tried or the plan's list ends.
    """
    tuning: dict[str, list[TuningRun]] = {name: [] for name in names}
    learned = [name for name in names if encoding_parameters(lab.blueprint(lab.run(name)))]
    for axis, (factors, tuned) in enumerate([(plan.rates, names), (plan.encoding_rates, learned)]):

        def untried(name: str, axis: int = axis, factors: Sequence[float] = factors) -> list[tuple[float, float]]:
            best, tried = _chosen(tuning[name]), {(each.rate, each.encoding_rate) for each in tuning[name]}
            at = factors.index(best[axis])
            around = [(best[0], each) if axis else (each, best[1]) for each in factors[max(at - 1, 0) : at + 2]]
            return [each for each in around if each not in tried]

        while cells := [(name, each) for name in tuned for each in untried(name)] if len(factors) > 1 else []:
            runs = [lab.run(name, data={"tuning": True}, optim=_rates(lab, *rates)) for name, rates in cells]
            for (name, (rate, encoding_rate)), trained in zip(cells, train(runs), strict=True):
                tuning[name].append(TuningRun(rate, trained.top1, encoding_rate))
    return tuning


def _lengthen(
    plan: Plan, lab: Lab, chosen: Mapping[str, tuple[float, float]], train: Train
) -> dict[str, list[list[Trained]]]:
    """Train every encoding with all seeds, and again with twice the epochs while that changes accuracy.

    Returns:
        By encoding, the runs of each number of epochs, increasing.
    """
    lengths: dict[str, list[list[Trained]]] = {name: [] for name in chosen}

    def is_done(of: Sequence[Sequence[Trained]]) -> bool:
        accuracy = [fmean(each.top1 for each in trained) for trained in of]
        return 2 ** len(of) > plan.longest or (len(of) > 1 and has_converged(accuracy[-1] - accuracy[-2]))

    growing = list(chosen)
    while growing:
        epochs = lab.config.optim.epochs * 2 ** len(lengths[growing[0]])
        runs = [
            lab.run(name, seed, optim={**_rates(lab, *chosen[name]), "epochs": epochs})
            for name in growing
            for seed in lab.seeds
        ]
        for name, trained in by_encoding(train(runs)).items():
            lengths[name].append(trained)
        growing = [name for name in growing if not is_done(lengths[name])]
    return lengths


def _measure(trained: Sequence[Trained], measure: Measure, half: Sequence[Trained]) -> EncodingResults:
    measured = [read_robustness(each, measure) for each in trained]
    return EncodingResults(
        right=[pack(each.correct) for each in trained],
        losses=[each.val_loss for each in trained],
        seconds=[each.seconds for each in trained],
        runs=[each.folder.name for each in trained],
        epochs=trained[0].run.config.optim.epochs,
        half=[pack(each.correct) for each in half],
        shuffled=[pack(each.shuffled) for each in measured],
        sizes={"×".join(map(str, size)): [pack(each.sizes[size]) for each in measured] for size in measured[0].sizes},
    )


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
