"""Sweeps: the product of several settings, with one folder per run, run as Slurm jobs or on this machine."""

import itertools
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torchrope_lab.files import as_file_name
from torchrope_lab.studies.engine.executors import Handle, LocalExecutor, run_all
from torchrope_lab.training.signals import interrupted_by_signals, replace_handlers, restore_handlers

DEFAULT_OUT = {"train": "torchrope-train", "compare": "torchrope-compare"}


@dataclass(frozen=True)
class Job:
    """One run of a sweep.

    Attributes:
        arguments: Arguments of `torchrope`.
        out: Output folder.
    """

    arguments: list[str]
    out: Path


def parse_sweep(text: str) -> tuple[str, list[str]]:
    """Parse an axis of a sweep.

    Args:
        text: Option and values, as in "encoding=mixed,liere:8" or "optim.betas=[0.9,0.99],[0.9,0.95]".

    Returns:
        The option's name, without dashes, and its values.

    Example:
        >>> parse_sweep("seed=0,1,2")
        ('seed', ['0', '1', '2'])
    """
    name, equals, values = text.partition("=")
    several = [value.strip() for value in re.split(r",(?![^\[]*\])", values)]
    if not equals or not name.strip("-") or not all(several) or len(set(several)) < len(several):
        raise ValueError(f"--sweep must be NAME=A,B,... with values named once each, got {text!r}")
    return name.strip("-"), several


def sweep(command: Sequence[str], axes: Sequence[tuple[str, Sequence[str]]], out: Path | None = None) -> list[Job]:
    """List the runs of a sweep: every combination of the values of all axes.

    Args:
        command: "train" or "compare" with its options; `--out` is replaced.
        axes: Names and values, see `parse_sweep`. Without any there is one run, in `out` itself.
        out: Parent folder of the runs, by default that of the command.

    Returns:
        The runs; the last axis varies fastest.

    Raises:
        ValueError: the command is another one, or `--out` has no value.

    Example:
        >>> jobs = sweep(["train"], [("encoding", ["mixed", "liere:8"]), ("seed", ["0"])], Path("runs"))
        >>> [str(job.out) for job in jobs]
        ['runs/encoding=mixed,seed=0', 'runs/encoding=liere-8,seed=0']
    """
    if not command or command[0] not in DEFAULT_OUT:
        raise ValueError(f"submit runs {' or '.join(DEFAULT_OUT)}, got {' '.join(command[:1]) or 'nothing'!r}")
    rest, parent = _without_out(command), out or Path(DEFAULT_OUT[command[0]])
    jobs = []
    for values in itertools.product(*(values for _, values in axes)):
        chosen = [(name, value) for (name, _), value in zip(axes, values, strict=True)]
        folder = parent / ",".join(f"{name}={as_file_name(value)}" for name, value in chosen)
        jobs.append(Job([*rest, *(f"--{name}={value}" for name, value in chosen), f"--out={folder}"], folder))
    folders = [job.out for job in jobs]
    if len(set(folders)) < len(folders):
        twice = next(folder for folder in folders if folders.count(folder) > 1)
        raise ValueError(f"runs of a sweep must have different folders, got {twice} twice")
    return jobs


def run_locally(jobs: Sequence[Job], logs: Path, parallel: int, report: Callable[[str], None]) -> list[Job]:
    """Run a sweep on this machine; Ctrl-C and signals cancel all runs, which may save first.

    Args:
        jobs: The runs.
        logs: Folder of the runs' output.
        parallel: Runs at a time, each on one GPU or on its share of the cores.
        report: Called with a line for every run that has ended.

    Returns:
        The runs that failed.
    """
    failed = []

    def ended(job: Job, status: int) -> None:
        if status:
            failed.append(job)
        report(f"failed: {job.out}, see {_log(logs, job)}" if status else f"done: {job.out}")

    logs.mkdir(parents=True, exist_ok=True)
    with interrupted_by_signals(), LocalExecutor(parallel) as executor:
        handles: dict[Handle, Job] = {
            executor.submit(partial(_run, job.arguments, _log(logs, job))): job for job in jobs
        }
        run_all(handles, ended, wait=partial(executor.wait, 1.0))
    return failed


def _log(logs: Path, job: Job) -> Path:
    return logs / f"{job.out.name}.log"


def _run(arguments: list[str], log: Path) -> int:
    """Run `torchrope` as a command of its own, and pass SIGTERM on; return its exit status."""
    with log.open("wb") as output:
        command = [sys.executable, "-m", "torchrope_lab", *arguments]
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        before = replace_handlers(lambda number, _: process.send_signal(number))
        try:
            return process.wait()
        finally:
            restore_handlers(before)


def _without_out(command: Sequence[str]) -> list[str]:
    rest, words = [], iter(command)
    for word in words:
        if word == "--out":
            value = next(words, "")
            if not value or value.startswith("--"):
                raise ValueError(f"--out requires a value, got {value!r}")
        elif not word.startswith("--out="):
            rest.append(word)
    return rest
