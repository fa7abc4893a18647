"""List of the files that a run could not read, saved in its folder and merged over processes and resumed runs."""

import json
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.callbacks import Callback

from torchrope.files import write_whole
from torchrope_lab.data.datamodule import DataModule
from torchrope_lab.files import read_mapping
from torchrope_lab.training.history import of_all_processes

SKIPPED = "skipped.json"


class KeepSkipped(Callback):
    """Save the list of unreadable files with every checkpoint, and load it at the start."""

    # Listed files count towards `max_skipped`. Files are read again whenever they are drawn, so the list does not
    # affect which examples are used.

    def __init__(self, folder: Path, data: DataModule) -> None:
        self.path = folder / SKIPPED
        self.data = data

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Load the list of earlier starts, without files that can be read now."""
        self._share(read_skipped(self.path.parent))

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Merge and save the lists of all processes."""
        found = {name: why for of_one in of_all_processes(self._found()) for name, why in of_one.items()}
        if trainer.is_global_zero:
            self._write(found)
        self._share(found)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save the list after the last validation."""
        if trainer.is_global_zero:
            self._write(self._found())

    def on_exception(self, trainer: pl.Trainer, *_: Any) -> None:
        """Save the list; the exception may be due to too many unreadable files."""
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
    """Read the files that a run could not read, and why; an empty dict if no list was saved."""
    file = folder / SKIPPED
    return read_mapping(file, SKIPPED) if file.exists() else {}
