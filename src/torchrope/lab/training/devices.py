"""On how many devices a run goes on, and how many batches make a step there."""

import os
from typing import Any

from lightning_fabric.plugins.environments import SLURMEnvironment, TorchElasticEnvironment

from torchrope.lab.training.config import RunConfig


def placed(settings: dict[str, Any]) -> dict[str, Any]:
    """The Trainer's settings, with the processes that torchrun or Slurm's srun has started where either did.

    Args:
        settings: With a strategy that may be "fsdp2", see `Sharded`.
    """
    counts = _launched()
    strategy = settings.get("strategy", "auto")
    if strategy == "fsdp2":
        from torchrope.lab.training.sharded import Sharded

        strategy = Sharded()
    elif strategy == "auto" and counts.get("devices", 1) * counts.get("num_nodes", 1) > 1:
        strategy = "ddp"
    return {**settings, **counts, "strategy": strategy}


def _launched() -> dict[str, int]:
    """Numbers of processes on this machine and of machines; none where no launcher has started this one."""
    if TorchElasticEnvironment.detect():
        total, here = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
    elif SLURMEnvironment.detect():
        total = int(os.environ["SLURM_NTASKS"])
        here = total // int(os.environ.get("SLURM_NNODES", 1))
    else:
        return {}
    return {"devices": here, "num_nodes": total // here}


def batches_in_a_step(config: RunConfig, devices: int) -> int:
    """How many batches of every device add up to the effective batch.

    Raises:
        ValueError: no whole number of them does.
    """
    together = config.data.batch_size * devices
    wanted = config.optim.effective_batch or together
    if wanted % together:
        what = f"batch_size · devices = {config.data.batch_size} · {devices}"
        raise ValueError(f"effective_batch must be a multiple of {what}, got {wanted}")
    return wanted // together
