"""Run a study: its settings, data and runs, and its results file."""

import json
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import date
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from torchrope_lab.data.build import make_data
from torchrope_lab.data.datamodule import DataModule
from torchrope_lab.data.sets import NAMES_DENSE
from torchrope_lab.encodings import resolve_encoding
from torchrope_lab.engine.descriptions import describe_data, describe_skipped
from torchrope_lab.engine.dry_run import NotTrained, print_plan
from torchrope_lab.engine.folds import in_folds, pooled
from torchrope_lab.engine.provenance import provenance
from torchrope_lab.engine.published import cite, published
from torchrope_lab.engine.registry import STUDIES, Study
from torchrope_lab.engine.runs import Job, MeasuresOf, Run, Store, Trained, dependency_rounds
from torchrope_lab.engine.study_progress import StudyProgress, Workload
from torchrope_lab.engine.workers import data_of, run_jobs
from torchrope_lab.mistakes import Mistake
from torchrope_lab.modules import load_module, loaded_module
from torchrope_lab.results import DataFacts, RunFacts, StudyResult, TrainedFacts
from torchrope_lab.schema import build
from torchrope_lab.settings.run_config import RunConfig, plain
from torchrope_lab.settings.study_config import LabConfig, StudyConfig, fitting
from torchrope_lab.training.models import Model, build_model, check_patches
from torchrope_lab.training.sizes import training_sizes
from torchrope_lab.training.watch import BACKWARD_AND_FORWARD


class Lab:
    """Settings, data and runs of a study.

    Args:
        config: Settings.
        encodings: The study's default encodings.
        console: For progress.
        dry_run: Print what would be trained, and raise `NotTrained` instead.

    Attributes:
        encodings: Those of the settings, or the study's default.
        reference: Encoding of --reference; None for the study's default.
        checkpoints: Files and folders of --checkpoint.
        sizes: Input sizes of --sizes, in pixels per side.
        seeds: 0, 1, ...
        skipped: Files that the runs could not read, with the reason.
        trained: Provenance of the runs, by key.
        left_out: What was asked for and is left out, with the reason.
    """

    def __init__(self, config: LabConfig, encodings: Sequence[str], console: Console, *, dry_run: bool = False) -> None:
        self.config = config
        self.encodings = config.encodings or fitting(encodings, config.data)
        self.reference = config.reference if isinstance(config, StudyConfig) else None
        self.checkpoints = config.checkpoint if isinstance(config, StudyConfig) else []
        self.sizes = config.sizes if isinstance(config, StudyConfig) else []
        self.seeds = range(config.seeds)
        self.console = console
        self.store = Store(Path(config.out) / "runs")
        self.skipped: dict[str, str] = {}
        self.trained: dict[str, dict[str, Any]] = {}
        self.dry_run = dry_run
        self.left_out: dict[str, None] = {}

    @cached_property
    def data(self) -> DataModule:
        """The data, set up."""
        data = make_data(self.config.data)
        check_patches(self.config.model, data)
        training_sizes(self.config.optim, self.config.model, data)  # raises for sizes that patches do not divide
        data.setup()
        return data

    def run(
        self,
        encoding: str,
        seed: int = 0,
        *,
        data: dict[str, Any] | None = None,
        model: dict[str, Any] | None = None,
        optim: dict[str, Any] | None = None,
        after: Run | None = None,
    ) -> Run:
        """Return a run with the study's settings, some of them replaced.

        Args:
            encoding: Encoding of the run.
            seed: Seed of the run.
            data, model, optim: Settings that differ, by name.
            after: A run from whose weights it starts.
        """
        config = RunConfig(
            encoding=encoding,
            seed=seed,
            data=replace(self.config.data, **(data or {})),
            model=replace(self.config.model, **(model or {})),
            optim=replace(self.config.optim, **(optim or {})),
            run=self.config.run,
        )
        return Run(config, after)

    def leave_out(self, *reasons: str) -> None:
        """Say in the results what was asked for and is left out, and why."""
        self.left_out |= dict.fromkeys(reasons)

    def runs(self, encodings: Sequence[str], **settings: Any) -> list[Run]:
        """Return a run of each encoding with each seed, settings as in `run`."""
        return [self.run(encoding, seed, **settings) for encoding in encodings for seed in self.seeds]

    def train(
        self,
        runs: Sequence[Run],
        measures: MeasuresOf = lambda _: (),
        on_finished: Callable[[Trained], None] = lambda _: None,
        *,
        further: bool = False,
    ) -> list[Trained]:
        """Train the runs that no study has finished yet, each once per fold of the data, and measure where they train.

        Args:
            runs: The runs; runs that they start from are trained first.
            measures: Returns what is measured of each of these runs, read by `Trained.measured`.
            on_finished: Called with each of these runs, or each of its folds, when it is finished, immediately for
                finished ones.
            further: Whether the study trains further runs after these, which a dry run says.

        Returns:
            The trained runs, in order, with the predictions of all folds.

        Raises:
            ValueError: a setting of a run is invalid, before any is trained, or finished runs were trained on other
                data.
            NotTrained: in a dry run, there are unfinished runs.
        """
        runs = in_folds(runs)
        requested = {run.key for run in runs}
        rounds = [
            [Job(run, measures(run) if run.key in requested else ()) for run in of_round]
            for of_round in dependency_rounds(runs)
        ]
        jobs = [job for of_round in rounds for job in of_round]
        for job in jobs:
            self.blueprint(job.run)
        unfinished: dict[str, Job] = {}  # by key
        fingerprints: dict[str, str] = {}  # by settings of the data, which are read anew for other than the study's
        for job in jobs:
            earlier = self.store.finished(job.run)
            if earlier is not None:
                config = job.run.config.data
                if (settings := repr(config)) not in fingerprints:
                    fingerprints[settings] = (self.data.with_settings(config) or data_of(config)).fingerprint
                earlier.check_examples(fingerprints[settings])
            if earlier is None or not self.store.is_done(job):
                unfinished[job.run.key] = job
            elif job.run.key in requested and not self.dry_run:
                on_finished(earlier)
        work = self._workload()
        if self.dry_run:
            print_plan(self, jobs, [*unfinished.values()], work, further)
            if unfinished:
                raise NotTrained
        if unfinished:
            begun = [(job.run, self.store.epochs(job.run)) for job in unfinished.values()]

            def on_run(run: Run) -> None:
                if run.key in requested:
                    on_finished(self.store.get(run))

            with StudyProgress(begun, len(jobs) - len(unfinished), work, self.console) as progress:
                for of_round in rounds:
                    if waiting := [job for job in of_round if job.run.key in unfinished]:
                        run_jobs(waiting, self.store, self.data, self.config, progress, on_run)
        trained = [self.store.get(run) for run in runs]
        for each in trained:
            self.skipped |= each.skipped
            self.trained[each.run.key] = each.provenance
        return pooled(trained, self.data)

    def _workload(self) -> Workload:
        """Estimate the work of runs on the study's data; on a cluster the number of processes is unknown."""
        train, val = self.data.counts
        predicts = self.config.model.task == "classify"  # a classifier's run stores its predictions
        return Workload(
            epoch=BACKWARD_AND_FORWARD * train + val,
            evaluation=self.data.views * val if predicts else 0,
            processes=1 if self.config.slurm else self.config.parallel or 1,
            left="machine time" if self.config.slurm else "to train",
        )

    def blueprint(self, run: Run) -> Model:
        """Build the model of a run on the meta device."""
        data = self.data  # loaded outside of the meta device
        with torch.device("meta"):
            return build_model(run.encoding, run.config.model, data)


def find_study(name: str) -> Study:
    """Return a study of the registry, or a user's own, "mypackage.module:STUDY", with the function that computes it."""
    if name in STUDIES:
        module = import_module(f"torchrope_lab.studies.{name.replace('-', '_')}")
        return replace(STUDIES[name], find=module.find)
    if ":" not in name:
        raise Mistake(f"studies are {', '.join(STUDIES)}, or mypackage.module:STUDY, got {name!r}")
    load_module(name)
    study = vars(loaded_module(name)).get(name.partition(":")[2])
    if not isinstance(study, Study) or study.find is None:
        raise Mistake(f"{name} must be a torchrope_lab.engine.registry.Study with a function find, got {study!r}")
    if not re.fullmatch(r"[\w-]+", study.name) or study.name in STUDIES:
        rule = f"{name} must have a name of letters, digits and hyphens that no built-in study has"
        raise Mistake(f"{rule}, got {study.name!r}")
    return study


def check_studies(studies: Sequence[Study], config: StudyConfig) -> None:
    """Raise ValueError if the data is for other tasks, in folds, or lacks a lattice that one of the studies needs."""
    name, folds = config.data.name, config.data.folds
    needing = [study for study in studies if study.needs_data]
    for study in needing:
        if not study.supports(config.data):
            raise Mistake(f"{study.title} does not support --data.folds, got {folds}")
        if study.lattice and not config.data.lattice:
            raise Mistake(f"{study.title} needs patches on a lattice, got {name}, whose tokens are at any positions")
    tasks = make_data(config.data).tasks if name in NAMES_DENSE else ("classify",)
    for study in needing:
        if not {*study.tasks} & {*tasks}:
            rule = f"{study.title} needs data for the task {' or '.join(study.tasks)}"
            raise Mistake(f"{rule}, got {name}, for {' and '.join(tasks)}")


def run_study(
    study: Study, config: StudyConfig, *, command: str, console: Console, dry_run: bool = False
) -> Path | None:
    """Run a study; return the file of its findings, `config.out/<study>-<data>.json`, None in a dry run."""
    # Its name has the task for data that have several; a study that needs no data has `<study>.json`.
    assert study.find is not None
    only_checkpoints = config.checkpoint and "checkpoint" in study.optional_settings  # unless --encodings names runs
    lab = Lab(config, () if only_checkpoints else study.encodings, console, dry_run=dry_run)
    check_studies([study], config)
    if study.needs_data:
        lab.data.setup()  # raises before the first line is printed
    console.print(f"{study.name}:", highlight=False)
    if dry_run:
        with suppress(NotTrained):
            study.find(lab)
            console.print("nothing to train")
        return None
    findings = replace(study.find(lab), published=published(study.name))
    result = StudyResult(
        study=study.name,
        title=study.title,
        question=study.question,
        sources=[cite(source) for source in study.sources.split("; ")],
        findings=findings,
        data=describe(lab) if study.needs_data else None,
        run=facts_of(command, _settings(lab, study), lab.trained.values()),
        left_out=list(lab.left_out),
    )
    file = Path(config.out) / (f"{study.name}-{lab.data.slug}.json" if study.needs_data else f"{study.name}.json")
    result.write(file)
    return file


def describe(lab: Lab) -> DataFacts:
    """Describe a study's data, with the files that its runs could not read."""
    return replace(describe_data(lab.data), skipped=describe_skipped(lab.skipped | dict(lab.data.skipped)))


def facts_of(
    command: str, settings: dict[str, Any], trained: Iterable[dict[str, Any]] = (), seconds: float | None = None
) -> RunFacts:
    """Describe how to repeat a study, where and when its results were written, and where its runs were trained."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for one in trained:
        groups.setdefault(json.dumps({**one, "date": None}, sort_keys=True), []).append(one)
    runs = []
    for group in groups.values():
        dates = sorted({one["date"] for one in group})
        of_group = {**group[0], "runs": len(group), "date": " to ".join(dict.fromkeys([dates[0], dates[-1]]))}
        runs.append(build(TrainedFacts, of_group, "provenance"))
    today = date.today().isoformat()
    return RunFacts(command=command, date=today, seconds=seconds, config=settings, trained=runs, **provenance())


def _settings(lab: Lab, study: Study) -> dict[str, Any]:
    settings = {**plain(lab.config), "encodings": list(lab.encodings)}
    return settings if study.needs_data else {name: settings[name] for name in ("encodings", *study.optional_settings)}


def feasible(lab: Lab, runs: Iterable[Run], where: str = "") -> list[Run]:
    """Return the runs whose model can be built; `lab.left_out` gets a reason, beginning with `where`, for others."""
    feasible_runs = []
    for run in runs:
        resolve_encoding(run.encoding)
        try:
            lab.blueprint(run)
        except ValueError as error:
            lab.leave_out(f"{where}{run.encoding} is left out: {error}.")
        else:
            feasible_runs.append(run)
    return feasible_runs
