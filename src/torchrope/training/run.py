"""One training run that survives being killed: a checkpoint after every epoch, written whole."""

import io
import logging
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from csv import DictWriter
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
import yaml
from lightning_fabric.plugins import TorchCheckpointIO
from pytorch_lightning.callbacks import Callback, ModelCheckpoint

from torchrope.data.build import make_data
from torchrope.data.config import DataConfig
from torchrope.data.datamodule import DataModule
from torchrope.files import read_mapping, write_whole
from torchrope.training.classifier import Classifier, build_vit
from torchrope.training.config import ModelConfig, OptimConfig, RunConfig, differences, plain

CHECKPOINT = "checkpoint.ckpt"
CONFIG = "config.yaml"
QUIET: dict[str, Any] = dict(
    accelerator="gpu" if torch.cuda.is_available() else "cpu",
    devices=1,
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    num_sanity_val_steps=0,
)

OnEpoch = Callable[[dict[str, float]], None]


def train(
    config: RunConfig,
    data: DataModule,
    folder: Path,
    *,
    on_epoch: OnEpoch | None = None,
    **trainer_settings: Any,
) -> tuple[Classifier, "History"]:
    """Train to the last epoch, from the checkpoint in `folder` where there is one.

    A run that was killed and goes on ends with the same weights as one that was not.

    Args:
        config: The model and its settings.
        data: Its data, set up.
        folder: Receives `config.yaml`, and `checkpoint.ckpt` and `curve.csv`, both whole after every epoch.
        on_epoch: Called with every finished epoch's row of the learning curve.
        trainer_settings: Passed on to Lightning's Trainer.

    Returns:
        The trained model, on the device it was trained on, and its learning curve.

    Raises:
        ValueError: the folder belongs to another configuration, or its checkpoint is damaged.
        KeyboardInterrupt: stopped by Ctrl-C; the same call goes on with the epoch that was under way.
    """
    pl.seed_everything(config.seed, verbose=False)
    classifier = build_classifier(config, data)
    data.run_seed = config.seed
    checkpoint = folder / CHECKPOINT
    resume = _checked(checkpoint) if checkpoint.exists() else None
    history = History(folder / "curve.csv", on_epoch)
    with lightning_quiet():
        trainer = pl.Trainer(
            max_epochs=config.optim.epochs,
            gradient_clip_val=config.optim.clip or None,
            callbacks=[
                SeedEpoch(config.seed),
                history,
                every_epoch(folder),
                *trainer_settings.pop("callbacks", []),
            ],
            plugins=[WholeCheckpoints()],
            default_root_dir=folder,
            reload_dataloaders_every_n_epochs=1,  # loaders are functions of seed and epoch
            **{**QUIET, **trainer_settings},
        )
        _claim(folder, config)
        try:
            trainer.fit(classifier, datamodule=data, ckpt_path=resume, weights_only=True)
        except SystemExit:  # Lightning's answer to Ctrl-C
            raise KeyboardInterrupt from None
    return classifier.to(trainer.strategy.root_device), history


def _claim(folder: Path, config: RunConfig) -> None:
    """Make the folder this configuration's; one of another configuration is refused, not overwritten."""
    file = folder / CONFIG
    if not file.exists() and folder.is_dir() and any(folder.iterdir()):
        raise ValueError(f"a run's folder must be new, empty or that of a run, got {folder} with other files")
    if file.exists():
        different = differences(plain(read_config(read_mapping(file, CONFIG))), plain(config))
        if different:
            rule = "a run's folder must be new or of the same configuration"
            raise ValueError(f"{rule}, got {folder} with {different}")
    write_whole(file, yaml.safe_dump(plain(config), sort_keys=False))


def load(folder: Path) -> tuple[RunConfig, DataModule, Classifier]:
    """Read a run back: its configuration, its data, and the model of its last finished epoch.

    Raises:
        ValueError: the folder holds no run, or its files are damaged or of another run.
    """
    if not (folder / CONFIG).exists() or not (folder / CHECKPOINT).exists():
        raise ValueError(f"a run's folder holds {CONFIG} and {CHECKPOINT}, got {folder}")
    config = read_config(read_mapping(folder / CONFIG, CONFIG))
    data = make_data(config.data)
    data.setup()
    classifier = build_classifier(config, data)
    saved = torch.load(_checked(folder / CHECKPOINT), map_location="cpu", weights_only=True)
    try:
        classifier.load_state_dict(saved["state_dict"])
    except RuntimeError as error:
        raise ValueError(f"the checkpoint must be of the run's own model, got another in {folder}") from error
    return config, data, classifier.to("cuda" if torch.cuda.is_available() else "cpu")


def build_classifier(config: RunConfig, data: DataModule) -> Classifier:
    """The untrained model of a configuration."""
    return Classifier(build_vit(config.encoding, config.model, data), data.num_classes, config.optim)


def read_config(stored: Any) -> RunConfig:
    """Turn a stored configuration back into its dataclasses."""
    try:
        return RunConfig(
            encoding=stored["encoding"],
            seed=stored["seed"],
            data=DataConfig(**stored["data"]),
            model=ModelConfig(**stored["model"]),
            optim=OptimConfig(**stored["optim"]),
        )
    except (KeyError, TypeError) as error:
        raise ValueError(f"{CONFIG} must be that of a torchrope run, got something else: {error!r}") from None


@contextmanager
def lightning_quiet() -> Iterator[None]:
    """Hush what Lightning says about itself: banners, tips, and advice that small data does not need."""
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        for chatter in (".*does not have many workers.*", ".*LeafSpec.*", ".*exists and is not empty.*"):
            warnings.filterwarnings("ignore", chatter)
        yield


def every_epoch(folder: Path) -> ModelCheckpoint:
    """Keep one checkpoint, that of the last finished epoch."""
    name = CHECKPOINT.removesuffix(".ckpt")
    return ModelCheckpoint(
        folder,
        filename=name,
        save_on_train_epoch_end=True,
        enable_version_counter=False,
        save_weights_only=False,
    )


class WholeCheckpoints(TorchCheckpointIO):
    """Write checkpoints whole or not at all."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Serialise in memory, then replace the file in one step."""
        buffer = io.BytesIO()
        torch.save(checkpoint, buffer)
        write_whole(Path(path), buffer.getvalue())


class SeedEpoch(Callback):
    """Make every epoch's randomness a function of seed and epoch alone, so that resuming repeats it."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Seed dropout and augmentation."""
        torch.manual_seed(self.seed * 1_000_003 + trainer.current_epoch)


class History(Callback):
    """The learning curve: one row per epoch, kept in the checkpoint and in a CSV file.

    Args:
        path: The CSV file.
        on_epoch: Called with every new row.
    """

    def __init__(self, path: Path, on_epoch: OnEpoch | None = None) -> None:
        self.path = path
        self.on_epoch = on_epoch
        self.rows: list[dict[str, float]] = []
        self.epoch_started = 0.0

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Start the epoch's clock."""
        self.epoch_started = time.perf_counter()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Add the epoch that ended, and write the file anew."""
        # Read from the metric itself: callbacks are called before the module can log the epoch that ends.
        known = {"train_loss": pl_module.train_loss.compute(), **trainer.callback_metrics}  # type: ignore[union-attr, operator]
        metrics = {name: round(float(known[name]), 6) for name in ("train_loss", "val_loss", "val_top1")}
        seconds = round(time.perf_counter() - self.epoch_started, 3)
        self.rows.append({"epoch": trainer.current_epoch + 1, **metrics, "seconds": seconds})
        self._write()
        if self.on_epoch is not None:
            self.on_epoch(self.rows[-1])

    def state_dict(self) -> dict[str, Any]:
        """What the checkpoint keeps."""
        return {"rows": self.rows}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up where the checkpoint was written."""
        self.rows = state_dict["rows"]

    def _write(self) -> None:
        text = io.StringIO()
        writer = DictWriter(text, fieldnames=list(self.rows[-1]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.rows)
        write_whole(self.path, text.getvalue())


def _checked(checkpoint: Path) -> Path:
    try:
        whole = {"state_dict", "pytorch-lightning_version"} <= set(
            torch.load(checkpoint, map_location="meta", weights_only=True)
        )
    except (OSError, MemoryError):
        raise
    except Exception:
        whole = False
    if not whole:
        raise ValueError(f"a checkpoint must be whole, got a damaged one; delete it: {checkpoint}")
    return checkpoint
