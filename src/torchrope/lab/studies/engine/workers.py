"""Train runs in this process, in several processes, or on a Slurm cluster."""

import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from torchrope.lab.data.build import make_data
from torchrope.lab.data.datamodule import DataModule
from torchrope.lab.encodings import load_modules
from torchrope.lab.studies.engine.config import LabConfig
from torchrope.lab.studies.engine.runs import Run, Store
from torchrope.lab.studies.progress import StudyProgress
from torchrope.lab.studies.slurm import local_executor, parse_slurm, slurm_executor

_POLL_SECONDS = 1.0

Submit = Callable[[Sequence[Run], Path], list[Any]]

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
        ValueError: the settings of a run are invalid; other runs that have started finish first.
    """

    def finish(run: Run, trained: tuple[str, float]) -> None:
        quality, seconds = trained
        started = time.monotonic()
        on_finished(run)
        progress.end(run, quality, seconds + time.monotonic() - started)

    if config.slurm is None and config.parallel == 1:
        for run in runs:
            progress.begin(run)
            own = data if run.config.data == data.config else None
            finish(run, _train(run, store.folder, own, partial(progress.epoch, run)))
        return
    with _on_slurm(config.slurm, store) if config.slurm else _in_processes(config.parallel) as submit:
        futures = dict(zip(submit(runs, store.folder), runs, strict=True))
        while futures:
            ended = [future for future in futures if future.done()]
            for run in futures.values():
                progress.follow(run, store.curve(run))
            for future in ended:
                finish(futures[future], future.result())
                del futures[future]
            time.sleep(0 if ended else _POLL_SECONDS)


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


@contextmanager
def _in_processes(parallel: int) -> Iterator[Submit]:
    """Start processes on this machine, each with one device, or with its share of the cores."""
    context = multiprocessing.get_context("spawn")
    numbers = context.SimpleQueue()
    for number in range(parallel):
        numbers.put((number, parallel))
    with ProcessPoolExecutor(parallel, mp_context=context, initializer=_take_number, initargs=(numbers,)) as pool:
        yield lambda runs, folder: [pool.submit(_train, run, folder) for run in runs]


def _take_number(numbers: Any) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    number, parallel = numbers.get()
    if torch.cuda.device_count():
        os.environ["CUDA_VISIBLE_DEVICES"] = str(number % torch.cuda.device_count())
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(max(1, cores // parallel))


def _end_with_parent() -> None:
    """End this process when the parent process ends, so that a killed study leaves no training processes."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


@contextmanager
def _on_slurm(settings: str, store: Store) -> Iterator[Submit]:
    """Submit a job array; an interrupted job resumes from its last checkpoint when it is restarted."""
    options, logs = parse_slurm(settings), store.folder / ".jobs"
    here = options.pop("cluster", "slurm") == "local"
    executor = local_executor(logs) if here else slurm_executor(logs, options, None, local="--slurm cluster=local")
    yield lambda runs, folder: executor.map_array(_train, runs, [folder] * len(runs))
