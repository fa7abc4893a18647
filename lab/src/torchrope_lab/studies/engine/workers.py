"""Train runs in this process, in several processes, or on a Slurm cluster."""

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch

from torchrope_lab.data.build import make_data
from torchrope_lab.data.datamodule import DataModule
from torchrope_lab.encodings import load_modules
from torchrope_lab.studies.engine.config import LabConfig
from torchrope_lab.studies.engine.processes import processes, receive
from torchrope_lab.studies.engine.runs import Run, Store
from torchrope_lab.studies.progress import StudyProgress
from torchrope_lab.studies.slurm import local_executor, parse_slurm, slurm_executor
from torchrope_lab.training.signals import interrupted_by_signals

_POLL_SECONDS = 1.0

Finish = Callable[[Run, tuple[str, float]], None]
"""Called with a run and what `_train` returned."""

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
        ValueError: the settings of a run are invalid; other runs that are training in processes are stopped.
        ChildProcessError: the process that trained a run was killed.
        Interrupted: a signal, SIGTERM or SIGUSR1, stopped the runs after saving; the same call resumes.
        KeyboardInterrupt: Ctrl-C stopped the runs; the same call resumes from their last checkpoints.
    """

    def finish(run: Run, trained: tuple[str, float]) -> None:
        quality, seconds = trained
        started = time.monotonic()
        on_finished(run)
        progress.end(run, quality, seconds + time.monotonic() - started)

    if config.slurm is not None:
        _train_on_slurm(runs, config.slurm, store, progress, finish)
    elif config.parallel > 1:
        _train_in_processes(runs, config.parallel, store, progress, finish)
    else:
        for run in runs:
            progress.begin(run)
            own = data if run.config.data == data.config else None
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
    if not _CACHED_DATA or _CACHED_DATA[0].config != run.config.data:
        _CACHED_DATA[:] = [make_data(run.config.data)]
        _CACHED_DATA[0].setup()
    return _CACHED_DATA[0]


def _train_in_processes(
    runs: Sequence[Run], parallel: int, store: Store, progress: StudyProgress, finish: Finish
) -> None:
    """Train in processes on this machine; a run is sent to a process that is free, so that no run waits in one."""
    waiting = list(runs)
    training: dict[Any, Run] = {}  # by connection
    prepare = partial(_take_share, parallel)
    with interrupted_by_signals(), processes(min(parallel, len(runs)), _train, prepare) as connections:
        while waiting or training:
            for connection in connections:
                if waiting and connection not in training:
                    training[connection] = waiting.pop(0)
                    with suppress(BrokenPipeError):  # its process has ended: receive raises
                        connection.send((training[connection], store.folder))
            ready: list[Any] = wait([*training], _POLL_SECONDS)
            for run in training.values():
                progress.follow(run, store.curve(run))
            for connection in ready:
                run = training.pop(connection)
                finish(run, receive(connection, f"the training of {run}"))


def _take_share(parallel: int, number: int) -> None:
    """Leave one device, or a share of the cores, to this process of `parallel`."""
    if torch.cuda.device_count():
        os.environ["CUDA_VISIBLE_DEVICES"] = str(number % torch.cuda.device_count())
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(max(1, cores // parallel))


def _train_on_slurm(runs: Sequence[Run], settings: str, store: Store, progress: StudyProgress, finish: Finish) -> None:
    """Submit a job array; an interrupted job resumes from its last checkpoint when it is restarted."""
    options, logs = parse_slurm(settings), store.folder / ".jobs"
    here = options.pop("cluster", "slurm") == "local"
    executor = local_executor(logs) if here else slurm_executor(logs, options, None, local="--slurm cluster=local")
    futures = dict(zip(executor.map_array(_train, runs, [store.folder] * len(runs)), runs, strict=True))
    while futures:
        ended = [future for future in futures if future.done()]
        for run in futures.values():
            progress.follow(run, store.curve(run))
        for future in ended:
            finish(futures[future], future.result())
            del futures[future]
        time.sleep(0 if ended else _POLL_SECONDS)
