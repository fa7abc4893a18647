"""An average of the weights, which is what is evaluated and kept."""

import pytorch_lightning as pl
from pytorch_lightning.callbacks import WeightAveraging
from torch.optim.swa_utils import get_ema_multi_avg_fn


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

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Leave the average in the model, also where a finished run had nothing more to train."""
        self._copy_average_to_current(pl_module)
