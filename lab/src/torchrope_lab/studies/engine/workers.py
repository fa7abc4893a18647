"""Train runs in this process, in several processes, or on a Slurm cluster."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torchrope_lab.data.build import make_data
from torchrope_lab.data.datamodule import DataModule
from torchrope_lab.encodings import load_modules
from torchrope_lab.studies.engine.config import LabConfig
from torchrope_lab.studies.engine.executors import Handle, LocalExecutor, run_all
from torchrope_lab.studies.engine.runs import Run, Store
from torchrope_lab.studies.progress import StudyProgress
from torchrope_lab.studies.slurm import parse_slurm, slurm_executor
from torchrope_lab.training.signals import interrupted_by_signals

_POLL_SECONDS = 1.0

_CACHED_DATA: list[DataModule] = []
"""The data that this process read last, for the next run."""


def train_runs(
    runs: Sequence[Run],
    store: Store,
    data: DataModule,
    config: LabConfig,
    progress: StudyProgress,
    on_finished: Callable[[Run], None],
) -> None:
    """Train runs that do not depend on each other, and report each that is finished.

    Args:
        runs: Unfinished runs.
        store: Folder for their results.
        data: Data of the study; a run on other data loads its own.
        config: Settings, of which `parallel` and `slurm` choose where runs train.
        progress: Receives epochs and finished runs.
        on_finished: Called with every finished run.

    Raises:
        ValueError: the settings of a run are invalid; other runs that are training are cancelled, and may save first.
        ChildProcessError: the process that trained a run was killed.
        Interrupted: a signal, SIGTERM or SIGUSR1, stopped the runs after saving; the same call resumes.
        KeyboardInterrupt: Ctrl-C stopped the runs; the same call resumes from their last checkpoints.
    """

    def finish(run: Run, trained: tuple[str, float]) -> None:
        quality, seconds = trained
        started = time.monotonic()
        on_finished(run)
        progress.end(run, quality, seconds + time.monotonic() - started)

    def follow(training: Sequence[Run]) -> None:
        for run in training:
            progress.follow(run, store.curve(run))

    if config.slurm is not None:
        executor = slurm_executor(store.folder / ".jobs", parse_slurm(config.slurm), None, local="--parallel N")
        jobs = executor.map_array(_train, runs, [store.folder] * len(runs))
        run_all(dict(zip(jobs, runs, strict=True)), finish, wait=partial(time.sleep, _POLL_SECONDS), on_poll=follow)
    elif config.parallel > 1:
        with interrupted_by_signals(), LocalExecutor(min(config.parallel, len(runs))) as local:
            handles: dict[Handle, Run] = {local.submit(_train, run, store.folder): run for run in runs}
            run_all(handles, finish, wait=partial(local.wait, _POLL_SECONDS), on_poll=follow)
    else:
        for run in runs:
            progress.begin(run)
            own = data.with_settings(run.config.data)
            finish(run, _train(run, store.folder, own, partial(progress.epoch, run)))


def _train(run: Run, folder: Path, data: DataModule | None = None, on_epoch: Any = None) -> tuple[str, float]:
    """Train one run, also in a process of its own.

    Returns:
        Its quality in words, and the seconds that it took.
    """
    started = time.monotonic()
    load_modules([run.encoding])  # allowed: the parent process has loaded them to build the model
    store = Store(folder)
    store.train(run, data or _data_of(run), on_epoch)
    trained = store.finished(run)
    assert trained is not None
    return trained.quality, time.monotonic() - started


def _data_of(run: Run) -> DataModule:
    """Return the data of a run, set up, and cached until a run on other data."""
    data = _CACHED_DATA[0].with_settings(run.config.data) if _CACHED_DATA else None
    if data is None:
        data = make_data(run.config.data)
        data.setup()
    _CACHED_DATA[:] = [data]
    return data
