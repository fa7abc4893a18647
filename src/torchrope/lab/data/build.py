"""From the choice of a data set to the data module."""

from importlib import import_module

from torchrope.lab.data.config import DataConfig
from torchrope.lab.data.datamodule import DataModule

_MODULES = {
    "digits": "digits:Digits",
    "motion": "motion:Motion",
    "fashion-mnist": "fashion:FashionMNIST",
    "images": "images:Images",
    "cifar10": "cifar:Cifar10",
    "cifar100": "cifar:Cifar100",
    "tiny-imagenet": "imagenet:TinyImageNet",
    "imagenet": "imagenet:ImageNet",
    "videos": "videos:Videos",
    "ucf101": "ucf101:UCF101",
    "volumes": "volumes:Volumes",
    "rsna": "rsna:RSNA",
    "kanji": "kanji:Kanji",
    "scenes": "scenes:Scenes",
    "kanji-components": "components:KanjiComponents",
    "coco": "coco:Coco",
    "ade20k": "ade20k:ADE20k",
    "segments": "segments:Segments",
}


def make_data(config: DataConfig) -> DataModule:
    """Make the data module that `config.name` names, importing that one alone.

    Raises:
        ValueError: the data set refuses its configuration, or what decodes it is not installed.
    """
    module, _, kind = _MODULES[config.name].partition(":")
    try:
        return getattr(import_module(f"torchrope.lab.data.{module}"), kind)(config)
    except ModuleNotFoundError as error:
        rule, extra = f"{config.name} is read with {error.name}", "dense" if error.name == "pycocotools" else "data"
        raise ValueError(f"{rule} (pip install 'torchrope[{extra}]'), got a machine without it") from error
