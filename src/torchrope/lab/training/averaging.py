"""An average of the weights, which is what is evaluated and kept."""

from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.callbacks import WeightAveraging
from torch.optim.swa_utils import get_ema_multi_avg_fn

from torchrope.lab.training.sharded_tensors import gather_full, local_shards


class AveragedWeights(WeightAveraging):
    """Average the weights over steps:  a ← d a + (1 - d) w,  a = w after the first.

    Validation sees the average, checkpoints hold both, and the average is what a finished run leaves.

    Args:
        decay: How much of the average stays at every step, d.

    References:
        Polyak and Juditsky, Acceleration of stochastic approximation by averaging; with decay, as in DeiT's code.
    """

    def __init__(self, decay: float) -> None:
        super().__init__(use_buffers=False, multi_avg_fn=get_ema_multi_avg_fn(decay))

    def average(self) -> Any:
        """The module that holds the average."""
        assert self._average_model is not None
        return self._average_model.module

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Keep the average, and the weights of now beside it, whole."""
        super().on_save_checkpoint(trainer, pl_module, checkpoint)
        checkpoint["state_dict"] = gather_full(checkpoint["state_dict"])

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Take up both; where they are sharded, this process's parts."""
        mine = pl_module.state_dict()
        both = {name: local_shards(checkpoint[name], mine) for name in ("state_dict", "current_model_state")}
        super().on_load_checkpoint(trainer, pl_module, {**checkpoint, **both})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up the step of the last update."""
        super().load_state_dict({"latest_update_step": int(state_dict["latest_update_step"])})

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Leave the average in the model, also where a finished run had nothing more to train."""
        self._copy_average_to_current(pl_module)
