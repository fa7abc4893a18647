"""`torchrope train`: one run, with every option of Lightning's Trainer."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.callbacks import Callback
from pytorch_lightning.cli import LightningArgumentParser, LightningCLI

from torchrope.lab.data.build import make_data
from torchrope.lab.training.config import RunConfig
from torchrope.lab.training.models import check_patches
from torchrope.lab.training.progress import RunProgress
from torchrope.lab.training.run import train

# Set from the other options, so that resuming works and settings have one name each.
_OURS = {
    "max_epochs",
    "gradient_clip_val",
    "default_root_dir",
    "plugins",
    "reload_dataloaders_every_n_epochs",
    "use_distributed_sampler",
}


class TrainCLI(LightningCLI):
    """Lightning's command line over our configuration: encoding, seed, data, model, optim, out, trainer.

    Attributes:
        settings_type: `RunConfig`, or a subclass with the settings of one data set.
    """

    settings_type: type[RunConfig] = RunConfig

    def add_core_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add our settings, and the Trainer's beside them."""
        parser.add_class_arguments(self.settings_type)
        parser.set_defaults({"scale.logs": ["csv", "tensorboard"]})
        parser.add_argument("--recipe", type=str, default=None, help="Settings by name, see torchrope recipes.")
        parser.add_argument("--out", type=str, default="torchrope-train", help="Folder of everything it leaves.")
        parser.add_class_arguments(pl.Trainer, "trainer", instantiate=False, skip=_OURS)

    def instantiate_classes(self) -> None:
        """Turn the configuration into settings; `fit` builds from them."""
        config: Any = self.parser.instantiate(self.config)
        self.settings = RunConfig(**{field.name: config[field.name] for field in fields(RunConfig)})
        self.out = Path(config["out"])
        self.trainer_settings = {key: value for key, value in config["trainer"].as_dict().items() if value is not None}

    def fit(self) -> None:
        """Train, from the checkpoint in `out` where there is one."""
        data = make_data(self.settings.data)
        check_patches(self.settings.model, data)
        data.setup()
        settings = {"enable_progress_bar": True, **self.trainer_settings}
        if settings["enable_progress_bar"]:
            settings["callbacks"] = [*_as_list(settings.get("callbacks")), RunProgress()]
        train(self.settings, data, self.out, **settings)


def _as_list(callbacks: Any) -> list[Callback]:
    return callbacks if isinstance(callbacks, list) else [callbacks] if callbacks else []
