"""Run functions as Slurm jobs through submitit."""

from pathlib import Path
from typing import Any

from torchrope_lab.mistakes import Mistake


def slurm_executor(logs: Path, options: dict[str, Any], parallel: int | None = None) -> Any:
    """Return an executor that submits Slurm jobs, which get SIGUSR1 before their time limit and are requeued."""
    # `logs` must be on a file system that all nodes share; time is in minutes.
    if "time" not in options:
        raise Mistake(f"--slurm must include time=MINUTES, got {', '.join(options) or 'nothing'}")
    try:
        import submitit
    except ImportError:
        raise Mistake("--slurm requires submitit, which is not installed: pip install submitit") from None
    try:
        executor = submitit.SlurmExecutor(logs)
    except RuntimeError:
        raise Mistake("Slurm not found (no srun); --parallel N runs the jobs on this machine") from None
    valid = sorted(set(executor._valid_parameters()) - {"additional_parameters", "array_parallelism"})
    unknown = [name for name in options if name not in valid]
    if unknown:
        raise Mistake(f"--slurm options are {', '.join(valid)}, got {unknown[0]!r}")
    notice = options.pop("signal_delay_s", 120)  # seconds before the time limit
    signal = {"signal": f"SIGUSR1@{notice}", "requeue": True}  # handled by SaveOnSignal, instead of submitit's signal
    options = {"job_name": "torchrope", "array_parallelism": parallel or 10**6, **options}
    executor.update_parameters(**options, additional_parameters=signal)
    return executor
