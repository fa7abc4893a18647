"""Build the data module of a data set from its configuration."""

from importlib import import_module

from torchrope_lab.data.config import DataConfig
from torchrope_lab.data.datamodule import DataModule
from torchrope_lab.mistakes import Mistake


def make_data(config: DataConfig) -> DataModule:
    """Build the data module that `config.module` names; only its Python module is imported."""
    module, _, kind = config.module.partition(":")
    try:
        return getattr(import_module(f"torchrope_lab.data.{module}"), kind)(config)
    except ModuleNotFoundError as error:
        rule = f"{config.name} requires {error.name} (pip install {error.name}), which is not installed"
        raise Mistake(rule) from error
