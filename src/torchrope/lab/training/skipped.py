"""The files that a run could not read, kept in its folder and counted over all its starts and processes."""

import json
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.callbacks import Callback

from torchrope.files import read_mapping, write_whole
from torchrope.lab.data.datamodule import DataModule
from torchrope.lab.training.history import of_all_processes

SKIPPED = "skipped.json"


class KeepSkipped(Callback):
    """Write down what could not be read with every checkpoint, and begin with what is written there.

    What a run sees does not depend on it: a file known to be damaged is tried again whenever it comes up. It decides
    when there are too many.

    Args:
        folder: The run's.
        data: What it reads.
    """

    def __init__(self, folder: Path, data: DataModule) -> None:
        self.path = folder / SKIPPED
        self.data = data

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Count what earlier starts found, where it still cannot be read."""
        self._share(read_skipped(self.path.parent))

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Bring together what all processes have found."""
        found = {name: why for of_one in of_all_processes(self._found()) for name, why in of_one.items()}
        if trainer.is_global_zero:
            self._write(found)
        self._share(found)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write what the last validation found."""
        if trainer.is_global_zero:
            self._write(self._found())

    def on_exception(self, trainer: pl.Trainer, *_: Any) -> None:
        """Write the list that the run may have stopped with."""
        if trainer.is_global_zero:
            self._write(self._found())

    def _found(self) -> dict[str, str]:
        return {name: why for reading in self.data.readings for name, why in reading.found()}

    def _share(self, found: dict[str, str]) -> None:
        if set(found) - set(self._found()):
            for reading in self.data.readings:
                reading.remember(found)

    def _write(self, found: dict[str, str]) -> None:
        if found and found != read_skipped(self.path.parent):
            write_whole(self.path, json.dumps(found, indent=1, sort_keys=True) + "\n")


def read_skipped(folder: Path) -> dict[str, str]:
    """The files that a run could not read, with what is wrong with them; none where nothing is written down.

    Raises:
        ValueError: the list is damaged.
    """
    file = folder / SKIPPED
    return read_mapping(file, SKIPPED) if file.exists() else {}
