"""A study: a question, the runs that it needs, and what is found in them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from functools import cached_property, partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from torchrope.lab.data.build import make_data
from torchrope.lab.data.config import NAMES_WITHOUT_LATTICE
from torchrope.lab.data.datamodule import DataModule
from torchrope.lab.provenance import provenance
from torchrope.lab.results import DataFacts, Findings, RunFacts, StudyResult
from torchrope.lab.studies.describe import describe_data, describe_skipped
from torchrope.lab.studies.engine.config import LabConfig, StudyConfig, fitting
from torchrope.lab.studies.engine.names import NAMES, file_of
from torchrope.lab.studies.engine.runs import Run, Store, Trained, in_order
from torchrope.lab.studies.engine.workers import train_runs
from torchrope.lab.studies.progress import StudyProgress, Workload
from torchrope.lab.training.config import RunConfig, plain
from torchrope.lab.training.models import Model, build_model, check_patches
from torchrope.lab.training.sizes import training_sizes
from torchrope.lab.training.watch import BACKWARD_AND_FORWARD


class Lab:
    """What a study works with: its settings, its data, and the runs.

    Args:
        config: Settings.
        console: Where progress goes.

    Attributes:
        encodings: Those asked for, or the study's own.
        reference: What the user wants the others compared with; None where that is the study's own choice.
        checkpoints: Files and folders of trained models that the user wants read.
        sizes: Input sizes, in pixels per side, that the user wants evaluated.
        seeds: 0, 1, ...
        skipped: Files that the runs asked for could not read, with the reason.
        seconds_left: Estimate for what follows the training; None where nothing was trained.
    """

    def __init__(self, config: LabConfig, encodings: Sequence[str], console: Console) -> None:
        self.config = config
        self.encodings = config.encodings or fitting(encodings, config.data)
        self.reference = config.reference if isinstance(config, StudyConfig) else None
        self.checkpoints = config.checkpoint if isinstance(config, StudyConfig) else []
        self.sizes = config.sizes if isinstance(config, StudyConfig) else []
        self.seeds = range(config.seeds)
        self.console = console
        self.store = Store(Path(config.out) / "runs")
        self.skipped: dict[str, str] = {}
        self.seconds_left: float | None = None

    @cached_property
    def data(self) -> DataModule:
        """The data, set up."""
        data = make_data(self.config.data)
        check_patches(self.config.model, data)
        training_sizes(self.config.optim, self.config.model, data)  # refuses those that patches do not divide
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
        """A run with the study's settings, some of them otherwise.

        Args:
            encoding: Its encoding.
            seed: Its seed.
            data, model, optim: Settings that differ, by name.
            after: A run whose weights it starts with.
        """
        config = RunConfig(
            encoding=encoding,
            seed=seed,
            data=replace(self.config.data, **(data or {})),
            model=replace(self.config.model, **(model or {})),
            optim=replace(self.config.optim, **(optim or {})),
            scale=self.config.scale,
        )
        return Run(config, after)

    def runs(self, encodings: Sequence[str], **settings: Any) -> list[Run]:
        """A run of each encoding with each seed, settings as `run` takes them."""
        return [self.run(encoding, seed, **settings) for encoding in encodings for seed in self.seeds]

    def train(
        self,
        runs: Sequence[Run],
        each: Callable[[Trained], None] = lambda _: None,
        *,
        passes: float = 0.0,
        afterwards: float | None = None,
    ) -> list[Trained]:
        """Train what is not finished yet, whichever study asked for it first.

        Args:
            runs: What is wanted; runs that they start from come along.
            each: Called with every run asked for as soon as it is finished, at once with those that are already.
            passes: Work of `each` for the estimate of the time left, in passes over the validation set.
            afterwards: Work that follows the training, in forward passes of one example; by default unknown, and the
                estimate is of the training alone.

        Returns:
            The runs asked for, in their order.

        Raises:
            ValueError: a setting that a run refuses, before any is trained; other data than finished runs saw.
        """
        rounds = in_order(runs)
        every = [run for together in rounds for run in together]
        for run in every:
            self.blueprint(run)
        unfinished = []
        for run in every:
            earlier = self.store.finished(run)
            if earlier is None:
                unfinished.append(run)
                continue
            if run.config.data == self.config.data:
                earlier.check_examples(self.data)
            if run in runs:
                each(earlier)
        if unfinished:
            begun = [(run, len(self.store.curve(run))) for run in unfinished]
            predicts = unfinished[0].config.model.task == "classify"  # a run keeps its predictions
            work = self._workload(passes + (self.data.views if predicts else 0), afterwards)
            tell = partial(self._report, runs, each)
            with StudyProgress(begun, len(every) - len(unfinished), work, self.console) as progress:
                for together in rounds:
                    if waiting := [run for run in together if run in unfinished]:
                        train_runs(waiting, self.store, self.data, self.config, progress, tell)
            self.seconds_left = progress.seconds_left()
        found = (self.store.finished(run) for run in runs)
        trained = [one for one in found if one is not None]
        for one in trained:
            self.skipped |= one.skipped
        return trained

    def _workload(self, passes: float, afterwards: float | None) -> Workload:
        """The work of runs on the study's data; how many processes of a cluster share it is not known."""
        train, val = self.data.counts
        left = "of machine time left" if self.config.slurm else "left" if afterwards is not None else "of training left"
        return Workload(
            epoch=BACKWARD_AND_FORWARD * train + val,
            evaluation=passes * val,
            afterwards=afterwards or 0.0,
            processes=1 if self.config.slurm else self.config.parallel,
            left=left,
        )

    def _report(self, wanted: Sequence[Run], each: Callable[[Trained], None], run: Run) -> None:
        trained = self.store.finished(run)
        if trained is not None and run in wanted:
            each(trained)

    def blueprint(self, run: Run) -> Model:
        """The model of a run without its numbers, on the meta device."""
        data = self.data  # read outside, or it would be made on the meta device
        with torch.device("meta"):
            return build_model(run.encoding, run.config.model, data)


@dataclass(frozen=True)
class Study:
    """A question that papers ask, made something that runs on any data.

    Attributes:
        title: For people.
        question: What it asks, in a sentence.
        sources: Papers with their tables and figures.
        find: Trains what it needs with `lab.train`, and returns what it found.
        encodings: Compared where the user names none.
        tasks: What its data must be for, one of them at least; see `DataModule.tasks`.
        needs_lattice: Whether it is about patches of a lattice, so that tokens at any positions are refused.
        needs_data: False where it is computed from formulas.
        takes: Settings that not all studies have a use for: "reference", "checkpoint", "sizes".
    """

    title: str
    question: str
    sources: Sequence[str]
    find: Callable[[Lab], Findings]
    encodings: Sequence[str] = field(default=("none", "learned", "axial", "mixed", "liere:8", "liere", "comrope-ld"))
    tasks: Sequence[str] = ("classify",)
    needs_lattice: bool = False
    needs_data: bool = True
    takes: Sequence[str] = ()

    def check(self, lab: Lab) -> None:
        """Raise ValueError where the data is for other tasks, or has no lattice and needs one."""
        name = lab.config.data.name
        if self.needs_lattice and name in NAMES_WITHOUT_LATTICE:
            rule = f"{self.title} is about patches on a lattice"
            raise ValueError(f"{rule}, got {name}, whose tokens are at any positions")
        if self.needs_data and not {*self.tasks} & {*lab.data.tasks}:
            rule = f"{self.title} needs data to {' or '.join(self.tasks)}"
            raise ValueError(f"{rule}, got {name}, to {' and '.join(lab.data.tasks)}")


def find_study(name: str) -> Study:
    """The study of that name.

    Raises:
        ValueError: there is none.
    """
    if name not in NAMES:
        raise ValueError(f"studies are {', '.join(NAMES)}, got {name!r}")
    return import_module(f"torchrope.lab.studies.{file_of(name).stem}").STUDY


def check_taken(names: Sequence[str], setting: str, option: str | None = None) -> None:
    """Raise ValueError where no study of those named takes a setting that not all take.

    Args:
        names: Of studies.
        setting: "reference", "checkpoint" or "sizes".
        option: The setting as the user wrote it.
    """
    if not any(setting in find_study(name).takes for name in names):
        takers = [name for name in NAMES if setting in find_study(name).takes]
        raise ValueError(f"{option or setting} is for the studies {', '.join(takers)}, got {', '.join(names)}")


def run_study(name: str, config: StudyConfig, *, command: str, console: Console) -> Path:
    """Run a study, and write what it found.

    Args:
        name: Of the study.
        config: On what, and where to leave it.
        command: How the user started it, for the report.
        console: Where progress goes.

    Returns:
        `config.out/<study>-<data>.json`, with the task of data that have several; `<study>.json` of a study that
        needs no data.

    Raises:
        ValueError: the name, a setting or the data is not as it must be.
        KeyboardInterrupt: stopped; the same call resumes.
    """
    study = find_study(name)
    instead = config.checkpoint and "checkpoint" in study.takes  # of runs, where no encoding is named
    lab = Lab(config, () if instead else study.encodings, console)
    study.check(lab)
    findings = study.find(lab)
    result = StudyResult(
        study=name,
        title=study.title,
        question=study.question,
        sources=study.sources,
        findings=findings,
        data=describe(lab) if study.needs_data else None,
        run=facts_of(command, _settings(lab, study)),
    )
    file = Path(config.out) / (f"{name}-{lab.data.slug}.json" if study.needs_data else f"{name}.json")
    result.write(file)
    return file


def describe(lab: Lab) -> DataFacts:
    """What results say of a study's data, with the files that its runs could not read."""
    return replace(describe_data(lab.data), skipped=describe_skipped(lab.skipped | dict(lab.data.skipped)))


def facts_of(command: str, settings: dict[str, Any], seconds: float | None = None) -> RunFacts:
    """How to run it again, here and today."""
    today = date.today().isoformat()
    return RunFacts(command=command, date=today, seconds=seconds, config=settings, **provenance())


def _settings(lab: Lab, study: Study) -> dict[str, Any]:
    settings = {**plain(lab.config), "encodings": list(lab.encodings)}
    return settings if study.needs_data else {name: settings[name] for name in ("encodings", *study.takes)}
