"""Two training steps with torchrope's trainer, for tests of data sets."""

from pathlib import Path

from torchrope_lab.data.build import make_data
from torchrope_lab.data.data_config import DataConfig
from torchrope_lab.data.datamodule import DataModule
from torchrope_lab.settings.run_config import ModelConfig, OptimConfig, RunConfig
from torchrope_lab.training.classifier import Classifier
from torchrope_lab.training.run import train


def train_two_steps(config: DataConfig, folder: Path, *, epochs: int = 1) -> tuple[DataModule, Classifier, list]:
    """Train a tiny transformer; patches are a quarter of a side."""
    data = make_data(config)
    data.setup()
    settings = RunConfig(
        encoding="mixed",
        data=config,
        model=ModelConfig(dim=32, depth=2, num_heads=2, mlp_dim=32, patch_size=[data.input_size[-1] // 4], pool="mean"),
        optim=OptimConfig(epochs=epochs, warmup_epochs=0),
    )
    classifier, history = train(settings, data, folder)
    return data, classifier, history.rows
