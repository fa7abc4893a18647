"""Build the data module of a data set from its configuration."""

from importlib import import_module

from torchrope.lab.data.config import DataConfig
from torchrope.lab.data.datamodule import DataModule


def make_data(config: DataConfig) -> DataModule:
    """Make the data module that `config.module` names, importing that one alone.

    Raises:
        ValueError: the data set refuses its configuration, or what decodes it is not installed.
    """
    module, _, kind = config.module.partition(":")
    try:
        return getattr(import_module(f"torchrope.lab.data.{module}"), kind)(config)
    except ModuleNotFoundError as error:
        rule, extra = f"{config.name} is read with {error.name}", "dense" if error.name == "pycocotools" else "data"
        raise ValueError(f"{rule} (pip install 'torchrope[{extra}]'), got a machine without it") from error
