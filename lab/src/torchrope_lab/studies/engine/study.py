"""Studies: a question of the papers, the runs that answer it, and their findings."""

import json
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import date
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from torchrope_lab.data.build import make_data
from torchrope_lab.data.config import NAMES_WITHOUT_LATTICE
from torchrope_lab.data.datamodule import DataModule
from torchrope_lab.provenance import provenance
from torchrope_lab.results import DataFacts, Findings, RunFacts, StudyResult
from torchrope_lab.studies.describe import describe_data, describe_skipped
from torchrope_lab.studies.engine.config import LabConfig, StudyConfig, fitting
from torchrope_lab.studies.engine.dry_run import NotTrained, print_plan
from torchrope_lab.studies.engine.names import NAMES, file_of
from torchrope_lab.studies.engine.runs import Job, MeasuresOf, Run, Store, Trained, dependency_rounds
from torchrope_lab.studies.engine.workers import run_jobs
from torchrope_lab.studies.progress import StudyProgress, Workload
from torchrope_lab.training.config import RunConfig, plain
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
        seconds_left: Estimated time of the work after training; None if nothing was trained.
        left_out: Notes on encodings whose model cannot be built.
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
        self.seconds_left: float | None = None
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

    def runs(self, encodings: Sequence[str], **settings: Any) -> list[Run]:
        """Return a run of each encoding with each seed, settings as in `run`."""
        return [self.run(encoding, seed, **settings) for encoding in encodings for seed in self.seeds]

    def train(
        self,
        runs: Sequence[Run],
        measures: MeasuresOf = lambda _: (),
        on_finished: Callable[[Trained], None] = lambda _: None,
        *,
        afterwards: float | None = None,
    ) -> list[Trained]:
        """Train the runs that no study has finished yet, and compute their measures where they train.

        Args:
            runs: The runs; runs that they start from are trained first.
            measures: Returns what is measured of each of these runs, read by `Trained.measured`.
            on_finished: Called with each of these runs when it is finished, immediately for finished ones.
            afterwards: Work after training, in forward passes of one example; by default unknown, and the estimate
                covers the training only.

        Returns:
            The trained runs, in order.

        Raises:
            ValueError: a setting of a run is invalid, before any is trained, or finished runs were trained on other
                data.
            NotTrained: in a dry run, there are unfinished runs.
        """
        requested = {run.key for run in runs}
        rounds = [
            [Job(run, measures(run) if run.key in requested else ()) for run in of_round]
            for of_round in dependency_rounds(runs)
        ]
        jobs = [job for of_round in rounds for job in of_round]
        for job in jobs:
            self.blueprint(job.run)
        unfinished = []
        for job in jobs:
            earlier = self.store.finished(job.run)
            if earlier is not None and job.run.config.data == self.config.data:
                earlier.check_examples(self.data)
            if earlier is None or not self.store.is_done(job):
                unfinished.append(job)
            elif job.run.key in requested and not self.dry_run:
                on_finished(earlier)
        work = self._workload(unfinished, afterwards)
        if self.dry_run:
            print_plan(self, jobs, unfinished, work)
            if unfinished:
                raise NotTrained
        if unfinished:
            begun = [(job.run, self.store.epochs(job.run)) for job in unfinished]

            def on_run(run: Run) -> None:
                if run.key in requested:
                    on_finished(self.store.get(run))

            with StudyProgress(begun, len(jobs) - len(unfinished), work, self.console) as progress:
                for of_round in rounds:
                    if waiting := [job for job in of_round if job in unfinished]:
                        run_jobs(waiting, self.store, self.data, self.config, progress, on_run)
            self.seconds_left = progress.seconds_left()
        trained = [self.store.get(run) for run in runs]
        for each in trained:
            self.skipped |= each.skipped
            self.trained[each.run.key] = each.provenance
        return trained

    def _workload(self, jobs: Sequence[Job], afterwards: float | None) -> Workload:
        """Estimate the work of runs on the study's data; on a cluster the number of processes is unknown."""
        train, val = self.data.counts
        predicts = self.config.model.task == "classify"  # a classifier's run stores its predictions
        passes = max((sum(measure.passes for measure in job.measures) for job in jobs), default=0.0)
        return Workload(
            epoch=BACKWARD_AND_FORWARD * train + val,
            evaluation=(passes + (self.data.views if predicts else 0)) * val,
            afterwards=afterwards or 0.0,
            processes=1 if self.config.slurm else self.config.parallel,
            left="machine time" if self.config.slurm else "left" if afterwards is not None else "to train",
        )

    def blueprint(self, run: Run) -> Model:
        """Build the model of a run on the meta device."""
        data = self.data  # loaded outside of the meta device
        with torch.device("meta"):
            return build_model(run.encoding, run.config.model, data)


@dataclass(frozen=True)
class Study:
    """A question of the papers that can be studied on any data.

    Attributes:
        title: Title shown in the report.
        question: The question, in a sentence.
        sources: Papers with their tables and figures.
        find: Trains the runs that it needs with `lab.train`, and returns the findings.
        encodings: Default encodings.
        tasks: The data must be for at least one of these; see `DataModule.tasks`.
        needs_lattice: Whether it needs patches on a lattice, so that data with tokens at any positions is rejected.
        needs_data: False if it is computed from formulas.
        optional_settings: Optional settings that it supports: "reference", "checkpoint", "sizes".
    """

    title: str
    question: str
    sources: Sequence[str]
    find: Callable[[Lab], Findings]
    encodings: Sequence[str] = field(default=("none", "learned", "axial", "mixed", "liere:8", "liere", "comrope-ld"))
    tasks: Sequence[str] = ("classify",)
    needs_lattice: bool = False
    needs_data: bool = True
    optional_settings: Sequence[str] = ()

    def check(self, lab: Lab) -> None:
        """Raise ValueError if the data is for other tasks, or lacks a lattice that the study needs."""
        name = lab.config.data.name
        if self.needs_lattice and name in NAMES_WITHOUT_LATTICE:
            rule = f"{self.title} needs patches on a lattice"
            raise ValueError(f"{rule}, got {name}, whose tokens are at any positions")
        if self.needs_data and not {*self.tasks} & {*lab.data.tasks}:
            rule = f"{self.title} needs data for the task {' or '.join(self.tasks)}"
            raise ValueError(f"{rule}, got {name}, for {' and '.join(lab.data.tasks)}")


def find_study(name: str) -> Study:
    """Import a study by name.

    Raises:
        ValueError: there is none.
    """
    if name not in NAMES:
        raise ValueError(f"studies are {', '.join(NAMES)}, got {name!r}")
    return import_module(f"torchrope_lab.studies.{file_of(name).stem}").STUDY


def check_supported(names: Sequence[str], setting: str, option: str | None = None) -> None:
    """Raise ValueError if none of some studies supports a setting.

    Args:
        names: Names of studies.
        setting: "reference", "checkpoint" or "sizes".
        option: The setting as the user wrote it.
    """
    if not any(setting in find_study(name).optional_settings for name in names):
        supporting = [name for name in NAMES if setting in find_study(name).optional_settings]
        raise ValueError(f"{option or setting} is for the studies {', '.join(supporting)}, got {', '.join(names)}")


def run_study(name: str, config: StudyConfig, *, command: str, console: Console, dry_run: bool = False) -> Path | None:
    """Run a study, and write its findings.

    Args:
        name: Name of the study.
        config: Settings.
        command: The user's command line, for the report.
        console: For progress.
        dry_run: Print what would be trained; train and write nothing.

    Returns:
        `config.out/<study>-<data>.json`, with the task for data that have several; `<study>.json` for a study that
        needs no data; None in a dry run.

    Raises:
        ValueError: the name, a setting or the data is invalid.
        KeyboardInterrupt: interrupted; the same call resumes.
    """
    study = find_study(name)
    only_checkpoints = config.checkpoint and "checkpoint" in study.optional_settings  # unless --encodings names runs
    lab = Lab(config, () if only_checkpoints else study.encodings, console, dry_run=dry_run)
    study.check(lab)
    if dry_run:
        with suppress(NotTrained):
            if study.needs_data:
                study.find(lab)
            console.print("nothing to train")
        return None
    findings = study.find(lab)
    result = StudyResult(
        study=name,
        title=study.title,
        question=study.question,
        sources=study.sources,
        findings=findings,
        data=describe(lab) if study.needs_data else None,
        run=facts_of(command, _settings(lab, study), lab.trained.values()),
    )
    file = Path(config.out) / (f"{name}-{lab.data.slug}.json" if study.needs_data else f"{name}.json")
    result.write(file)
    return file


def describe(lab: Lab) -> DataFacts:
    """Describe a study's data, with the files that its runs could not read."""
    return replace(describe_data(lab.data), skipped=describe_skipped(lab.skipped | dict(lab.data.skipped)))


def facts_of(
    command: str, settings: dict[str, Any], trained: Iterable[dict[str, Any]] = (), seconds: float | None = None
) -> RunFacts:
    """Describe how to repeat a study, where and when its results were written, and where its runs were trained.

    Args:
        command: The user's command line.
        settings: All settings.
        trained: Provenance of each run, as `Trained.provenance`.
        seconds: Sum over the runs.
    """
    groups: dict[str, list[dict[str, Any]]] = {}
    for one in trained:
        groups.setdefault(json.dumps({**one, "date": None}, sort_keys=True), []).append(one)
    runs = []
    for group in groups.values():
        dates = sorted({one["date"] for one in group})
        runs.append({**group[0], "runs": len(group), "date": " to ".join(dict.fromkeys([dates[0], dates[-1]]))})
    today = date.today().isoformat()
    return RunFacts(command=command, date=today, seconds=seconds, config=settings, trained=runs, **provenance())


def _settings(lab: Lab, study: Study) -> dict[str, Any]:
    settings = {**plain(lab.config), "encodings": list(lab.encodings)}
    return settings if study.needs_data else {name: settings[name] for name in ("encodings", *study.optional_settings)}
