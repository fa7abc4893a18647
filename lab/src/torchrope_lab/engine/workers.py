"""Train and measure runs where the settings say: in this process, in several processes, or as Slurm jobs."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torchrope_lab.data.build import make_data
from torchrope_lab.data.data_config import DataConfig
from torchrope_lab.data.datamodule import DataModule
from torchrope_lab.encodings import load_modules
from torchrope_lab.engine.executors import Item, Processes, run_all, run_in_job
from torchrope_lab.engine.runs import Job, Run, Store
from torchrope_lab.engine.slurm import slurm_executor
from torchrope_lab.engine.study_progress import StudyProgress
from torchrope_lab.settings.study_config import LabConfig, parse_slurm
from torchrope_lab.training.signals import interrupted_by_signals, raise_if_interrupted

_CACHED_DATA: list[DataModule] = []
"""The data that this process read last, for the next job: those of a run, and others that it is measured on."""


def run_calls(
    calls: Sequence[tuple[Item, Callable[[], Any]]],
    config: LabConfig,
    on_result: Callable[[Item, Any], None],
    on_poll: Callable[[Sequence[Item]], None] = lambda _: None,
) -> None:
    """Run independent calls where `parallel` and `slurm` say; `on_result` gets what each is about and its result."""
    # An error of a call cancels the others, which may save first. For other processes calls and results are pickled.

    def keep(item: Item, result: Any) -> None:
        on_result(item, result)
        raise_if_interrupted()

    with interrupted_by_signals():
        if config.slurm is not None:
            logs = Path(config.out) / "runs" / ".jobs"
            executor = slurm_executor(logs, parse_slurm(config.slurm), config.parallel)
            jobs = executor.map_array(run_in_job, [call for _, call in calls])
            run_all(dict(zip(jobs, (item for item, _ in calls), strict=True)), keep, on_poll)
        elif not here(config):
            with Processes(min(config.parallel or 1, len(calls)) or 1) as processes:
                run_all({processes.submit(call, str(item)): item for item, call in calls}, keep, on_poll)
        else:
            for item, call in calls:
                keep(item, call())


def run_jobs(
    jobs: Sequence[Job],
    store: Store,
    data: DataModule,
    config: LabConfig,
    progress: StudyProgress,
    on_finished: Callable[[Run], None],
) -> None:
    """Train and measure runs that do not depend on each other, and report each that is finished."""

    def finish(job: Job, trained: tuple[str, float]) -> None:
        on_finished(job.run)
        progress.end(job.run, *trained)

    def follow(waiting: Sequence[Job]) -> None:
        for job in waiting:
            progress.follow(job.run, store.curve(job.run))

    calls = []
    for job in jobs:
        call = partial(run_job, job, store.folder)
        if here(config):
            call = partial(call, data=data, on_epoch=partial(progress.epoch, job.run))
        calls.append((job, call))
    run_calls(calls, config, finish, follow)


def here(config: LabConfig) -> bool:
    """Whether calls run in this process."""
    return config.slurm is None and config.parallel in (None, 1)


def run_job(job: Job, folder: Path, *, data: DataModule | None = None, on_epoch: Any = None) -> tuple[str, float]:
    """Train and measure one run, also in a process of its own; return its quality in words and its seconds."""
    started = time.monotonic()
    load_modules([job.run.encoding])  # allowed: the parent process has loaded them to build the model
    store = Store(folder)
    store.complete(job, lambda config: (data and data.with_settings(config)) or data_of(config), on_epoch)
    return store.get(job.run).quality, time.monotonic() - started


def data_of(config: DataConfig) -> DataModule:
    """Return data, set up, and cached until two others have been asked for."""
    shared = (data.with_settings(config) for data in _CACHED_DATA)
    data = next((data for data in shared if data is not None), None)
    if data is None:
        data = make_data(config)
        data.setup()
    _CACHED_DATA[:] = [data, *(other for other in _CACHED_DATA[:2] if other is not data)][:2]
    return data
