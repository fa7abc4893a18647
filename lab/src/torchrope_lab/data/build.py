"""Build the data module of a data set from its configuration."""

from torchrope_lab.data.data_config import DataConfig
from torchrope_lab.data.datamodule import DataModule
from torchrope_lab.mistakes import Mistake


def make_data(config: DataConfig) -> DataModule:
    """Build the data module of a source: of the class that it returns, or of the sets that a user's returns."""
    kind = type(config)
    try:
        made = kind.source(**{name: getattr(config, name) for name in kind.parameters})
        if isinstance(made, type) and issubclass(made, DataModule):
            return made(config)
        from torchrope_lab.data.source import PointSource, Source

        return (Source if kind.lattice else PointSource)(config, made)
    except ModuleNotFoundError as error:
        rule = f"{config.name} requires {error.name} (pip install {error.name}), which is not installed"
        raise Mistake(rule) from error
