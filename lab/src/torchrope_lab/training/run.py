"""Train a model and read trained runs; a run saves a checkpoint after every epoch and can be resumed."""

import json
import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
import yaml
from pytorch_lightning.callbacks import Callback

from torchrope.files import write_whole
from torchrope_lab.data.build import make_data
from torchrope_lab.data.data_config import CropRatio, with_crop_ratio
from torchrope_lab.data.datamodule import DataModule
from torchrope_lab.encodings import load_modules
from torchrope_lab.files import CURVE, holds_files, read_mapping, write_new
from torchrope_lab.mistakes import Mistake, as_mistake
from torchrope_lab.settings.run_config import CONFIG, MAY_CHANGE, PLACES, RunConfig, differences, plain, read_config
from torchrope_lab.training.averaging import AveragedWeights
from torchrope_lab.training.checkpoints import (
    CHECKPOINT,
    WEIGHTS,
    WITHIN_EPOCH,
    SaveCheckpoints,
    WholeCheckpoints,
    newest,
    read_weights,
)
from torchrope_lab.training.classifier import Classifier
from torchrope_lab.training.dense_models import build_dense_module
from torchrope_lab.training.devices import accumulation_steps, with_devices
from torchrope_lab.training.guards import DIVERGED, LossGuard
from torchrope_lab.training.history import History, OnEpoch, SeedEpoch
from torchrope_lab.training.initial import initialise
from torchrope_lab.training.interruption import Interrupted, SaveOnSignal
from torchrope_lab.training.models import build_model
from torchrope_lab.training.module import Module
from torchrope_lab.training.signals import interrupted_by_signals
from torchrope_lab.training.sizes import training_sizes
from torchrope_lab.training.skipped import KeepSkipped
from torchrope_lab.training.watch import Speed, log_settings, loggers

QUIET: dict[str, Any] = dict(
    accelerator="gpu" if torch.cuda.is_available() else "cpu",
    devices=1,
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    num_sanity_val_steps=0,
)

IGNORED_WARNINGS = (
    ".*does not have many workers.*",
    ".*LeafSpec.*",
    ".*dataloader is not resumable.*",  # it is: DataModule.resume_at
    ".*smaller than the logging interval.*",
)
"""Warnings of Lightning that do not apply."""
logger = logging.getLogger(__name__)
EXAMPLES = "data.json"
"""File of a run's classes and the fingerprint of its examples."""
PRECISIONS: dict[str, Any] = {"float32": "32-true", "bf16": "bf16-mixed"}


@interrupted_by_signals()
def train(
    config: RunConfig,
    data: DataModule,
    folder: Path,
    *,
    on_epoch: OnEpoch | None = None,
    may_change: Sequence[str] = (),
    **trainer_settings: Any,
) -> tuple[Module, History]:
    """Train to the last epoch; resume from the checkpoint in `folder` if there is one."""
    # A run that was killed and resumed ends with the same weights as an uninterrupted one. The folder receives
    # `config.yaml`, `data.json`, and after every epoch `checkpoint.ckpt`, `weights.safetensors` (only the model) and
    # `curve.csv`, each written atomically; also `within-epoch.ckpt` if `run.checkpoint_every` is set. `may_change` are
    # settings that may differ from those of an earlier call on the folder, beside `MAY_CHANGE`.
    pl.seed_everything(config.seed, verbose=False)
    module = build_module(config, data)
    if config.run.compile:
        (module.model if config.model.task == "classify" else module.model.backbone).compile()
    data.run_seed = config.seed
    data.returns_spacing = config.model.unit_mm is not None
    data.train_sizes = training_sizes(config.optim, config.model, data)
    checkpoint = newest(folder)
    if config.init is not None and checkpoint is None:
        initialise(module.model, config.init)
    resume, data.resume_at = checkpoint or (None, (0, 0))
    history = History(folder / CURVE, on_epoch)
    with lightning_quiet():
        with as_mistake():
            trainer = pl.Trainer(
                max_epochs=config.optim.epochs,
                gradient_clip_val=config.optim.clip or None,
                callbacks=[
                    SeedEpoch(config.seed),
                    history,
                    KeepSkipped(folder, data),
                    *callbacks(config, folder, module.chance_loss),
                    *trainer_settings.pop("callbacks", []),
                ],
                plugins=[WholeCheckpoints(plain(config))],
                default_root_dir=folder,
                reload_dataloaders_every_n_epochs=1,  # loaders are functions of seed and epoch
                use_distributed_sampler=False,  # loaders already select their rank's examples
                **with_devices(
                    {
                        **QUIET,
                        "precision": PRECISIONS[config.run.precision],
                        "logger": loggers(config, folder) or False,
                        **trainer_settings,
                    }
                ),
            )
        if config.optim.effective_batch is not None:
            trainer.accumulate_grad_batches = accumulation_steps(config, trainer.world_size)
        if trainer.is_global_zero:
            _write_config(folder, config, data, may_change)
            if resume is not None:
                _check_examples(folder, data, "training goes on with these")
            write_whole(folder / EXAMPLES, json.dumps(_examples_of(data)))
            log_settings(trainer.loggers, config, folder)
        try:
            trainer.fit(module, datamodule=data, ckpt_path=resume, weights_only=True)
        except Interrupted:
            raise
        except SystemExit:  # raised by Lightning on Ctrl-C
            raise KeyboardInterrupt from None
        except torch.OutOfMemoryError:
            raise Mistake(_out_of_memory(config, trainer.world_size)) from None
        finally:  # later loaders are those of no run
            data.run_seed, data.resume_at, data.train_sizes, data.trainer = 0, (0, 0), (), None
            if trainer.is_global_zero and not any((folder / name).exists() for name in (CHECKPOINT, WITHIN_EPOCH)):
                for name in (CONFIG, EXAMPLES):  # other settings may start here
                    (folder / name).unlink(missing_ok=True)
    return module.to(trainer.strategy.root_device), history


def callbacks(config: RunConfig, folder: Path, chance_loss: float) -> list[Callback]:
    """Build the configured callbacks."""
    execution = config.run
    configured: list[Callback] = [SaveOnSignal(folder), SaveCheckpoints(folder, execution.checkpoint_every)]
    if execution.on_nan != "ignore":
        configured.append(LossGuard(folder, DIVERGED * chance_loss, skip=execution.on_nan == "skip"))
    if execution.logs:
        configured.append(Speed())
    if config.optim.ema_decay is not None:
        configured.append(AveragedWeights(config.optim.ema_decay))
    return configured


def _out_of_memory(config: RunConfig, devices: int) -> str:
    """Return a one-line error with the options that reduce memory and keep the optimiser's step the same."""
    batch_size = config.data.batch_size
    effective = config.optim.effective_batch or batch_size * devices
    return (
        f"a step must fit into memory, got batch_size {batch_size}; a smaller --data.batch_size with "
        f"--optim.effective_batch {effective}, or --model.checkpoint_layers true, needs less"
    )


def _write_config(folder: Path, config: RunConfig, data: DataModule, may_change: Sequence[str]) -> None:
    """Write the configuration to the folder; raise ValueError if it holds another configuration or other files."""
    file = folder / CONFIG
    if not file.exists() and holds_files(folder, ignored=["logs"]):  # a logger may have begun
        raise Mistake(f"a run's folder must be new, empty or that of a run, got {folder} with other files")
    settings = yaml.safe_dump(plain(config), sort_keys=False)
    if file.exists() or not write_new(file, settings):  # of two commands at once, the second finds the first's
        stored, now = plain(read_config(read_mapping(file, CONFIG))), plain(config)
        same = not (folder / EXAMPLES).exists() or read_mapping(folder / EXAMPLES, EXAMPLES) == _examples_of(data)
        ignored = [name for name in (*MAY_CHANGE, *may_change) if same or name not in PLACES]
        if different := differences(stored, now, ignored=ignored):
            rule = "a run's folder must be new or of the same configuration"
            raise Mistake(f"{rule}, got {folder} with {different}")
        write_whole(file, settings)


def _examples_of(data: DataModule) -> dict[str, Any]:
    return {"classes": list(data.classes), "fingerprint": data.fingerprint}


def _check_examples(folder: Path, data: DataModule, what_follows: str) -> None:
    """Raise ValueError if data have other classes than those of a run's training, and warn of other examples."""
    if not (folder / EXAMPLES).exists():
        return
    trained, now = read_mapping(folder / EXAMPLES, EXAMPLES), _examples_of(data)
    if trained.get("classes") != now["classes"]:
        classes = ", ".join(map(str, trained.get("classes") or ["none"]))
        raise Mistake(f"data of {folder} must have the classes {classes}, got {', '.join(now['classes'])}")
    if trained.get("fingerprint") != now["fingerprint"]:
        logger.warning("the data have other examples than in the training of %s: %s", folder, what_follows)


def load(
    folder: Path, data: DataModule | None = None, *, allow: Sequence[str] = (), crop_ratio: CropRatio | None = None
) -> tuple[RunConfig, DataModule, Module]:
    """Read a trained run: its configuration, its data, and the model of its last finished epoch."""
    # `crop_ratio` replaces the run's. `allow` names modules that may be imported for an encoding or data of users.
    trained = (folder / CHECKPOINT).exists() or (folder / WEIGHTS).exists()
    if not (folder / CONFIG).exists() or not trained:
        if runs := sorted(path.parent for path in folder.glob(f"runs/*/{CONFIG}")):
            raise Mistake(f"{folder} holds several runs; name one of them, as {runs[0]}")
        missing = WEIGHTS if (folder / CONFIG).exists() else CONFIG
        raise Mistake(
            f"a run's folder must contain {CONFIG} and {WEIGHTS} or {CHECKPOINT}, got {folder} without {missing}"
        )
    config = read_config(read_mapping(folder / CONFIG, CONFIG), allow)
    load_modules([config.encoding], allow)
    if crop_ratio is not None:
        config = replace(config, data=with_crop_ratio(config.data, crop_ratio))
    if data is None:
        data = make_data(config.data)
        data.setup()
        _check_examples(folder, data, "those that are validated may have been trained on")
    data.returns_spacing = config.model.unit_mm is not None
    module = build_module(config, data)
    weights = read_weights(folder)
    try:
        module.load_state_dict(weights)
    except RuntimeError as error:
        raise Mistake(f"weights must fit the model of the run's config.yaml, which those in {folder} do not") from error
    return config, data, module.to("cuda" if torch.cuda.is_available() else "cpu")


def build_module(config: RunConfig, data: DataModule) -> Module:
    """Build the untrained model of a configuration."""
    if config.model.task != "classify":
        return build_dense_module(config, data)
    return Classifier(build_model(config.encoding, config.model, data), data.num_classes, config.optim)


@contextmanager
def lightning_quiet() -> Iterator[None]:
    """Suppress Lightning's banners and tips, and its warnings that do not apply."""
    levels = {log: log.level for log in map(logging.getLogger, ("pytorch_lightning", "lightning_fabric"))}
    for log in levels:
        log.setLevel(logging.ERROR)
    with warnings.catch_warnings():
        for chatter in IGNORED_WARNINGS:
            warnings.filterwarnings("ignore", chatter)
        try:
            yield
        finally:
            for log, level in levels.items():
                log.setLevel(level)
