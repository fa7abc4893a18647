"""Slurm, through submitit: settings as users write them, and what runs functions as jobs."""

from pathlib import Path
from typing import Any

SIGNAL_SECONDS = 120
"""Notice that a job gets before its time is up."""
_FOREVER = 10**6  # minutes


def parse_slurm(text: str) -> dict[str, Any]:
    """Read options of sbatch, as in "partition=gpu,time=1440,gpus_per_node=8".

    Example:
        >>> parse_slurm("partition=gpu,time=1440")
        {'partition': 'gpu', 'time': 1440}
    """
    options: dict[str, Any] = {}
    for part in text.split(","):
        name, equals, value = part.strip().partition("=")
        if not equals or not name or not value:
            raise ValueError(f"--slurm must be NAME=VALUE,..., got {text!r}")
        options[name.replace("-", "_")] = int(value) if value.isdecimal() else value
    return options


def slurm_executor(logs: Path, options: dict[str, Any], parallel: int | None) -> Any:
    """What submits functions as Slurm's jobs, which get SIGUSR1 before their time is up and go into the queue again.

    Args:
        logs: Folder of submitit's files and of what jobs print; all machines must see it.
        options: Of sbatch, by the names that submitit gives them; time in minutes.
        parallel: So many run at once at most.

    Raises:
        ValueError: submitit or Slurm is missing, or an option is not known.
    """
    if "time" not in options:
        raise ValueError(f"--slurm must say time=MINUTES, got {', '.join(options) or 'nothing'}")
    try:
        executor = _submitit().SlurmExecutor(logs)
    except RuntimeError:
        raise ValueError("jobs need Slurm, got a machine without srun; cluster local runs here") from None
    known = sorted(set(executor._valid_parameters()) - {"additional_parameters", "array_parallelism"})
    unknown = [name for name in options if name not in known]
    if unknown:
        raise ValueError(f"--slurm knows {', '.join(known)}, got {unknown[0]!r}")
    notice = options.pop("signal_delay_s", SIGNAL_SECONDS)
    ours = {"signal": f"SIGUSR1@{notice}", "requeue": True}  # as SaveOnSignal listens; submitit's own signal stays away
    executor.update_parameters(**{"job_name": "torchrope", **options}, additional_parameters=ours)
    if parallel is not None:
        executor.update_parameters(array_parallelism=parallel)
    return executor


def local_executor(logs: Path) -> Any:
    """What runs functions as jobs on this machine, each in a process of its own."""
    executor = _submitit().LocalExecutor(logs)
    executor.update_parameters(timeout_min=_FOREVER)
    return executor


def _submitit() -> Any:
    try:
        import submitit
    except ImportError:
        raise ValueError(
            "jobs are submitted with submitit (pip install 'torchrope[slurm]'), got a machine without it"
        ) from None
    return submitit
