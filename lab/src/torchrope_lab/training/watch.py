"""Loggers of a run, and a callback that logs loss, learning rate and throughput."""

import csv
import hashlib
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.callbacks import Callback
from pytorch_lightning.loggers import CSVLogger, Logger, MLFlowLogger, TensorBoardLogger, WandbLogger
from pytorch_lightning.loggers.csv_logs import ExperimentWriter
from pytorch_lightning.loggers.logger import rank_zero_experiment

from torchrope.files import write_whole
from torchrope_lab.mistakes import Mistake
from torchrope_lab.settings.run_config import RunConfig, flat, plain
from torchrope_lab.training.checkpoints import completes_step

BACKWARD_AND_FORWARD = 3
"""Cost of a training step in forward passes: a backward pass costs two (Kaplan et al. 2020, section 2.1)."""


_MLFLOW_RUN = "mlflow-run"


def loggers(config: RunConfig, folder: Path) -> list[Logger]:
    """Build the configured loggers; a resumed run continues the logs of `folder`."""
    # Runs are named as their folder. CSV, TensorBoard and MLflow write to `folder/logs`; MLflow follows
    # MLFLOW_TRACKING_URI if it is set.
    return [_logger(name, folder) for name in config.run.logs]


def log_settings(loggers: Sequence[Logger], config: RunConfig, folder: Path) -> None:
    """Log all settings of a run, and keep the identifier that MLflow gives it, for a resume."""
    for logger in loggers:
        logger.log_hyperparams(flat(plain(config)))
        if isinstance(logger, MLFlowLogger):
            write_whole(folder / "logs" / _MLFLOW_RUN, str(logger.run_id))


class Speed(Callback):
    """Log loss, learning rate and throughput in examples per second."""

    def __init__(self) -> None:
        self.examples = 0
        self.since = 0.0

    def on_train_start(self, *_: Any) -> None:
        """Reset the clock and the number of examples."""
        self.examples, self.since = 0, time.perf_counter()

    def on_train_epoch_start(self, *_: Any) -> None:
        """Reset the clock, so that validation is not timed."""
        self.on_train_start()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log every `log_every_n_steps` steps, and at the end of an epoch."""
        self.examples += len(batch[1]) * trainer.world_size
        due = trainer.global_step % trainer.log_every_n_steps == 0 and completes_step(trainer, batch_idx)  # type: ignore[attr-defined]
        if not (due or trainer.is_last_batch):
            return
        rate = self.examples / max(time.perf_counter() - self.since, 1e-9)
        self.on_train_start()
        if trainer.is_global_zero and trainer.loggers:
            measures = {
                **{name: float(part) for name, part in outputs.items()},  # the loss and its terms
                "loss": float(pl_module.batch_loss),  # type: ignore[arg-type]  # Lightning's is divided
                "lr": max(group["lr"] for group in trainer.optimizers[0].param_groups),
                "samples_per_second": rate,
            }
            for logger in trainer.loggers:
                logger.log_metrics(measures, step=trainer.global_step)


class _Continued(ExperimentWriter):
    """Writer that keeps the rows of an earlier start, where Lightning's deletes them."""

    def _check_log_dir_exists(self) -> None:
        if os.path.exists(self.metrics_file_path):
            with open(self.metrics_file_path, newline="", encoding="utf-8") as file:
                self.metrics_keys = next(csv.reader(file), [])


class _ContinuedLogger(CSVLogger):
    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        self._experiment = self._experiment or _Continued(self.log_dir)
        return self._experiment


def _logger(name: str, folder: Path) -> Logger:
    logs, title = folder / "logs", folder.absolute().name
    identity = hashlib.sha256(str(folder.absolute()).encode()).hexdigest()[:16]  # the same after a resume
    try:
        match name:
            case "csv":
                return _ContinuedLogger(logs, name="csv", version=0)
            case "tensorboard":
                return TensorBoardLogger(logs, name="tensorboard", version="")
            case "wandb":
                return WandbLogger(name=title, save_dir=logs, project="torchrope", version=identity, resume="allow")
            case "mlflow":
                run_id = (logs / _MLFLOW_RUN).read_text() if (logs / _MLFLOW_RUN).exists() else None
                uri = os.environ.get("MLFLOW_TRACKING_URI", f"sqlite:///{logs.absolute() / 'mlflow.db'}")
                return MLFlowLogger("torchrope", run_name=title, tracking_uri=uri, run_id=run_id)
    except ModuleNotFoundError:
        raise Mistake(f"logger {name!r} needs a package that is not installed: pip install {name}") from None
    raise Mistake(f"logs must be csv, tensorboard, wandb or mlflow, got {name!r}")
