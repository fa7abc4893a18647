"""Runs of a tiny ViT on digits, callbacks that act while they train, and comparisons of what they leave."""

import csv
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NoReturn

import torch
from processes import data_of
from pytorch_lightning.callbacks import Callback

from torchrope_lab.data.data_config import data_config
from torchrope_lab.settings.run_config import ModelConfig, OptimConfig, RunConfig
from torchrope_lab.training.run import train

DIGITS = RunConfig(
    encoding="liere:4",
    seed=1,
    data=data_config("digits", train_size=80, val_size=40, batch_size=10),
    model=ModelConfig(dim=16, depth=1, num_heads=2, mlp_dim=16, patch_size=[4], pool="mean"),
    optim=OptimConfig(epochs=2, warmup_epochs=1),
)
SWIN = ModelConfig(backbone="swin", dim=8, depths=[1, 1], stage_heads=[1, 2], window_size=[2], patch_size=[2])


def changed(config: RunConfig, **settings: Any) -> RunConfig:
    """The configuration with whole sections changed, or settings in the first section that has them."""
    own = {each.name for each in fields(config)}
    config = replace(config, **{name: settings.pop(name) for name in own & {*settings}})
    for name in ("data", "model", "optim", "run"):
        section = getattr(config, name)
        found = {each.name for each in fields(section)} & {*settings}
        config = replace(config, **{name: replace(section, **{each: settings.pop(each) for each in found})})
    assert not settings, f"no section has {[*settings]}"
    return config


def small_run(**settings: Any) -> RunConfig:
    """Eight batches of ten digits in each of two epochs, with settings changed."""
    return changed(DIGITS, **settings)


def trained(config: RunConfig, folder: Path, **options: Any) -> tuple[Any, Any]:
    """Train on the data of the configuration; returns the module and its history."""
    return train(config, data_of(config), folder, **options)


class Killed(Exception):
    """Ends a run like the death of its process: nothing is saved."""


def die(*_: object) -> NoReturn:
    raise Killed


def die_in_epoch_2(row: dict[str, float]) -> None:
    """Given as `on_epoch`: end a run before its second epoch is stored."""
    if row["epoch"] == 2:
        raise Killed


class AtBatch(Callback):
    """Call a function with the batch of a number, counted over epochs from 1."""

    def __init__(self, number: int = 0, action: Callable[[Any], object] = die) -> None:
        self.number, self.action, self.seen = number, action, 0

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.seen += 1
        if self.seen == self.number:
            self.action(batch)


class HeadWeights(Callback):
    """Keep the weights of the head after each step of so many batches."""

    def __init__(self, batches: int = 1) -> None:
        self.batches, self.after = batches, list[torch.Tensor]()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (batch_idx + 1) % self.batches == 0:
            self.after.append(pl_module.model.head.weight.detach().clone())


def same_weights(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    mine, theirs = one.state_dict(), other.state_dict()
    return mine.keys() == theirs.keys() and all(torch.equal(value, theirs[name]) for name, value in mine.items())


def without_times(history: Any) -> list[dict[str, float]]:
    return [{name: value for name, value in row.items() if name != "seconds"} for row in history.rows]


def logged(folder: Path) -> list[dict[str, str]]:
    """The rows of a run's table of metrics."""
    return list(csv.DictReader((folder / "logs/csv/version_0/metrics.csv").read_text().splitlines()))


def lab_process(*arguments: object, launcher: tuple[str, ...] = (), **options: Any) -> subprocess.Popen:
    """Start a command of the laboratory in a process of one thread, which keeps what it prints."""
    command = [sys.executable, *launcher, "-m", "torchrope_lab", *map(str, arguments)]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, **options}
    return subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, **options)
