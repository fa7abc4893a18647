"""Devices and strategy of a run, and the batches that an optimiser step accumulates."""

import os
from typing import Any

import torch
from lightning_fabric.plugins.environments import SLURMEnvironment, TorchElasticEnvironment

from torchrope_lab.mistakes import Mistake
from torchrope_lab.settings.run_config import RunConfig


def with_devices(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the Trainer's settings, with the world size of torchrun or Slurm's srun if either started this process."""
    counts = _launched()
    strategy = settings.get("strategy", "auto")
    if strategy == "auto" and counts.get("devices", 1) * counts.get("num_nodes", 1) > 1:
        strategy = "ddp"
    return {**settings, **counts, "strategy": strategy}


def _launched() -> dict[str, int]:
    """Return the numbers of processes per machine and of machines; an empty dict if not started by a launcher."""
    if TorchElasticEnvironment.detect():
        world_size, local_size = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
    elif SLURMEnvironment.detect():
        world_size = int(os.environ["SLURM_NTASKS"])
        local_size = world_size // int(os.environ.get("SLURM_NNODES", 1))
    else:
        return {}
    return {"devices": local_size, "num_nodes": world_size // local_size}


def accumulation_steps(config: RunConfig, devices: int) -> int:
    """Return how many batches per device add up to the effective batch: the gradient accumulation steps."""
    batch = config.data.batch_size * devices
    effective = config.optim.effective_batch or batch
    if effective % batch:
        what = f"batch_size · devices = {config.data.batch_size} · {devices}"
        raise Mistake(f"effective_batch must be a multiple of {what}, got {effective}")
    return effective // batch


def slow_without_gpu(config: Any) -> str:
    """Return the options with which a recipe for GPUs is less slow without one; "" for other settings."""
    if torch.cuda.is_available() or not (config.run.compile or config.run.precision == "bf16"):
        return ""
    cores = os.cpu_count() or 1
    options = {
        "--run.compile false": config.run.compile,
        "--run.precision float32": config.run.precision == "bf16",
        f"--data.workers {cores}": config.data.workers > cores,
        "--data.batch_size 64": config.data.batch_size > 64,
        "--optim.effective_batch 64": (config.optim.effective_batch or 0) > 64,
    }
    return f"this machine has no GPU; less slow: {' '.join(option for option, slow in options.items() if slow)}"
