"""From the choice of a data set to the data module."""

from torchrope.lab.data.config import DATA_NAMES, DataConfig
from torchrope.lab.data.datamodule import DataModule


def make_data(config: DataConfig) -> DataModule:
    """Make the data module that `config.name` names, importing that one alone.

    Raises:
        ValueError: the name is unknown, the data set refuses its configuration, or what decodes it is not installed.
    """
    try:
        return _make(config)
    except ModuleNotFoundError as error:
        rule, extra = f"{config.name} is read with {error.name}", "dense" if error.name == "pycocotools" else "data"
        raise ValueError(f"{rule} (pip install 'torchrope[{extra}]'), got a machine without it") from error


def _make(config: DataConfig) -> DataModule:
    match config.name:
        case "digits":
            from torchrope.lab.data.digits import Digits

            return Digits(config)
        case "motion":
            from torchrope.lab.data.motion import Motion

            return Motion(config)
        case "fashion-mnist":
            from torchrope.lab.data.fashion import FashionMNIST

            return FashionMNIST(config)
        case "images":
            from torchrope.lab.data.images import Images

            return Images(config)
        case "videos":
            from torchrope.lab.data.videos import Videos

            return Videos(config)
        case "ucf101":
            from torchrope.lab.data.ucf101 import UCF101

            return UCF101(config)
        case "volumes":
            from torchrope.lab.data.volumes import Volumes

            return Volumes(config)
        case "rsna":
            from torchrope.lab.data.rsna import RSNA

            return RSNA(config)
        case "cifar10":
            from torchrope.lab.data.cifar import Cifar10

            return Cifar10(config)
        case "cifar100":
            from torchrope.lab.data.cifar import Cifar100

            return Cifar100(config)
        case "tiny-imagenet":
            from torchrope.lab.data.imagenet import TinyImageNet

            return TinyImageNet(config)
        case "imagenet":
            from torchrope.lab.data.imagenet import ImageNet

            return ImageNet(config)
        case "scenes":
            from torchrope.lab.data.scenes import Scenes

            return Scenes(config)
        case "coco":
            from torchrope.lab.data.coco import Coco

            return Coco(config)
        case "ade20k":
            from torchrope.lab.data.ade20k import ADE20k

            return ADE20k(config)
        case "segments":
            from torchrope.lab.data.segments import Segments

            return Segments(config)
    raise ValueError(f"name must be one of {', '.join(DATA_NAMES)}, got {config.name!r}")
