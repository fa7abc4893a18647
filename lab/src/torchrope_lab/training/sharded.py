"""Lightning strategy for FSDP2: every process holds a shard of the weights, gradients and optimiser moments."""

from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.strategies import ModelParallelStrategy, ParallelStrategy
from pytorch_lightning.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from torchrope_lab.training.averaging import AveragedWeights


class Sharded(ModelParallelStrategy):
    """Train one model, sharded over all processes; a layer is gathered only while it computes.

    Checkpoints hold full tensors, as those of an unsharded run, so that a run may resume with another strategy: states
    stay sharded until a checkpoint is saved. `ModelParallelStrategy` numbers moments in the order of the model instead
    of the optimiser's groups, and cannot shard an average.

    References:
        Zhao et al., PyTorch FSDP, arXiv:2304.11277; `torch.distributed.fsdp.fully_shard`.
    """

    lightning_restore_optimizer = True
    lightning_module_state_dict = ParallelStrategy.lightning_module_state_dict
    load_model_state_dict = ParallelStrategy.load_model_state_dict
    optimizer_state = ParallelStrategy.optimizer_state
    load_optimizer_state_dict = ParallelStrategy.load_optimizer_state_dict

    def __init__(self) -> None:
        super().__init__(save_distributed_checkpoint=False)

    def setup(self, trainer: pl.Trainer) -> None:
        """Shard the model and, if there is one, its average, before the optimiser is built."""
        assert self.accelerator is not None
        assert self.lightning_module is not None
        self.accelerator.setup(trainer)
        self.model_to_device()
        mesh = init_device_mesh(self.root_device.type, (self.world_size,))
        averages = [callback.average() for callback in trainer.callbacks if isinstance(callback, AveragedWeights)]  # type: ignore[attr-defined]
        for module in (self.lightning_module, *averages):
            shard(module.model, mesh)
        self.barrier()
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Save full tensors."""
        super().save_checkpoint(gather_full(checkpoint), filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read full tensors, and keep this process's shards of weights, average and moments."""
        assert self.lightning_module is not None
        saved = self.checkpoint_io.load_checkpoint(checkpoint_path, weights_only=weights_only)
        weights = self.lightning_module.state_dict()
        # In one order on all processes, which exchange the shards.
        for name in [name for name in ("state_dict", "current_model_state") if name in saved]:
            saved[name] = {key: local_shard(value, weights[key]) for key, value in saved[name].items()}
        for optimizer, state in zip(self.optimizers, saved["optimizer_states"], strict=True):
            stored = [number for group in state["param_groups"] for number in group["params"]]
            parameters = [weight for group in optimizer.param_groups for weight in group["params"]]
            for number, parameter in zip(stored, parameters, strict=True):
                moments = state["state"].get(number, {})
                moments.update({name: local_shard(value, parameter) for name, value in moments.items()})
        return saved


def gather_full(value: Any) -> Any:
    """Gather the full tensors of nested dicts and lists on the CPU of rank 0; other ranks get empty ones.

    All processes must call it.
    """
    if isinstance(value, DTensor):
        full = value.full_tensor()
        return full.cpu() if torch.distributed.get_rank() == 0 else torch.empty(0)
    if isinstance(value, dict):
        return {name: gather_full(part) for name, part in value.items()}
    return [gather_full(part) for part in value] if type(value) is list else value


def local_shard(value: Any, like: Tensor) -> Any:
    """Return this process's shard of a tensor, sharded like `like`; the value itself if their shapes differ."""
    if not isinstance(like, DTensor) or not isinstance(value, Tensor) or value.shape != like.shape:
        return value
    return distribute_tensor(value, like.device_mesh, like.placements)


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
