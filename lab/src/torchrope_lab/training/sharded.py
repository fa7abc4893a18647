"""Lightning strategy for FSDP2: every process holds a shard of the weights, gradients and optimiser moments."""

from collections.abc import Mapping
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.strategies import ModelParallelStrategy, ParallelStrategy
from pytorch_lightning.trainer.states import TrainerFn
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from torchrope_lab.training.averaging import AveragedWeights
from torchrope_lab.training.sharded_tensors import gather_full, local_shard, local_shards


class Sharded(ModelParallelStrategy):
    """Train one model, sharded over all processes; a layer is gathered only while it computes.

    Checkpoints hold full tensors, as those of an unsharded run, so that a run may resume with another strategy.

    References:
        Zhao et al., PyTorch FSDP, arXiv:2304.11277; `torch.distributed.fsdp.fully_shard`.
    """

    def __init__(self) -> None:
        super().__init__(save_distributed_checkpoint=False)

    @property
    def lightning_restore_optimizer(self) -> bool:
        """True, so that Lightning calls `load_optimizer_state_dict`."""
        return True

    def setup_environment(self) -> None:
        """Use all processes for data parallelism."""
        self._data_parallel_size, self._tensor_parallel_size = self.num_nodes * self.num_processes, 1
        super().setup_environment()

    def setup(self, trainer: pl.Trainer) -> None:
        """Shard the model and, if there is one, its average, before the optimiser is built."""
        assert self.accelerator is not None
        assert self.lightning_module is not None
        self.accelerator.setup(trainer)
        self.model_to_device()
        averages = [callback.average() for callback in trainer.callbacks if isinstance(callback, AveragedWeights)]  # type: ignore[attr-defined]
        for module in (self.lightning_module, *averages):
            shard(module.model, self.device_mesh["data_parallel"])
        self.barrier()
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the full weights on rank 0; other ranks get empty tensors."""
        assert self.lightning_module is not None
        return gather_full(self.lightning_module.state_dict())

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return the full moments on rank 0; other ranks get empty tensors."""
        state = optimizer.state_dict()
        return {**state, "state": {number: gather_full(moments) for number, moments in state["state"].items()}}

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read the file in every process."""
        return ParallelStrategy.load_checkpoint(self, checkpoint_path, weights_only=weights_only)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load this process's shards of the weights."""
        assert self.lightning_module is not None
        current = self.lightning_module.state_dict()
        self.lightning_module.load_state_dict(local_shards(checkpoint["state_dict"], current), strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load this process's shards of the moments."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            stored = [number for group in state["param_groups"] for number in group["params"]]
            weights = [weight for group in optimizer.param_groups for weight in group["params"]]
            like = dict(zip(stored, weights, strict=True))
            moments = {
                number: {name: local_shard(value, like[number]) for name, value in of_one.items()}
                for number, of_one in state["state"].items()
            }
            optimizer.load_state_dict({**state, "state": moments})


def shard(model: nn.Module, mesh: DeviceMesh) -> None:
    """Shard each layer of a `ViT` or `Swin` as a unit, and all other modules as one more unit.

    Encodings belong to the last unit: a rotation is used after the call that computed it, while the parameters of a
    unit of its own would be freed after that call.

    Args:
        model: The model, changed in place.
        mesh: Processes to shard over, 1-d.
    """
    for parameter in model.parameters():
        if parameter.numel() == 0:
            parameter.requires_grad_(False)  # an empty gradient cannot be sharded
    for stage in getattr(model, "stages", [model]):
        for layer in stage.layers:
            fully_shard(layer, mesh=mesh)
    # Reshard the root too: otherwise validation leaves full weights that ignore later updates of the shards.
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
