"""Data sets as tests read them, and what they refuse."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from miniatures import noise

from torchrope_lab.data.build import make_data
from torchrope_lab.data.data_config import data_config
from torchrope_lab.data.draws import Draws


def load_data(name: str, root: Path | None = None, **settings: Any) -> Any:
    """The data set of a name in a folder, of which the files are read."""
    data = make_data(data_config(name, **({} if root is None else {"root": str(root)}), **settings))
    data.setup()
    return data


def place(data: Any, epoch: int, rank: int = 0, ranks: int = 1) -> Any:
    """The data set in an epoch of a training, in one of its processes."""
    strategy = SimpleNamespace(root_device=torch.device("cpu"))
    data.trainer = SimpleNamespace(current_epoch=epoch, world_size=ranks, global_rank=rank, strategy=strategy)
    return data


def pictures_of(count: int, side: int = 32) -> torch.Tensor:
    """Coloured noise, bytes `(count, 3, side, side)`."""
    return torch.from_numpy(noise(count, side))


def draws(count: int, seed: int = 0) -> Draws:
    """What is drawn for the first examples of a set."""
    return Draws(seed, list(range(count)))


def spoil(file: Path, content: str | None) -> None:
    """Write another content, or take a file or folder away."""
    if content is None:
        file.rename(file.with_name(f"{file.name}.away"))
    else:
        file.write_text(content)


@contextmanager
def refused(message: str, kind: Any = ValueError) -> Iterator[None]:
    """What is inside raises an error of one line that matches."""
    with pytest.raises(kind, match=message) as error:
        yield
    assert "\n" not in str(error.value)


class Recorder(pl.LightningModule):
    """Records what it is trained on; the loss has no meaning."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.batches: list[Any] = []

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        self.batches.append(batch)
        return self.weight * sum(inputs.mean() for inputs in batch[0])

    def validation_step(self, batch: Any, _: int) -> None:
        assert len(batch[0]) == len(batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def batches_of_training(data: Any, epochs: int, **settings: Any) -> list[Any]:
    """The batches of a training by Lightning."""
    recorder = Recorder()
    quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    pl.Trainer(max_epochs=epochs, accelerator="cpu", **quiet, **settings).fit(recorder, data)
    return recorder.batches
