"""On how many devices a run goes on, and how many batches make a step there."""

import os
from typing import Any

from lightning_fabric.plugins.environments import SLURMEnvironment, TorchElasticEnvironment

from torchrope.training.config import RunConfig


def launched() -> dict[str, Any]:
    """The Trainer's settings for the processes that torchrun or Slurm's srun has started; none where neither did."""
    if TorchElasticEnvironment.detect():
        total, here = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
    elif SLURMEnvironment.detect():
        total = int(os.environ["SLURM_NTASKS"])
        here = total // int(os.environ.get("SLURM_NNODES", 1))
    else:
        return {}
    return {"devices": here, "num_nodes": total // here, **({"strategy": "ddp"} if total > 1 else {})}


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
