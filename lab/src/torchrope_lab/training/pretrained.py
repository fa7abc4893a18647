"""Initialise a backbone with the weights of a run, or of any source that `load_backbone` of integrations reads."""

import os
from pathlib import Path

from torchrope.integrations import FILE, load_backbone
from torchrope.models import Features, Swin, ViT
from torchrope_lab.data.build import make_data
from torchrope_lab.files import read_mapping
from torchrope_lab.training.checkpoints import read_weights
from torchrope_lab.training.config import CONFIG, read_config
from torchrope_lab.training.models import build_model, on_lattice


def load_pretrained_backbone(features: Features, source: str | os.PathLike[str]) -> None:
    """Load the weights of a pre-trained model into a backbone, as `torchrope.load_backbone` does.

    Args:
        features: The backbone, of the architecture and encoding of the source.
        source: The folder of a classification run, or any source that `torchrope.load_backbone` takes.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: weights that do not fit the backbone, or a source that cannot be read.
    """
    folder = Path(source).expanduser()
    load_backbone(features, model_of_run(folder) if folder.is_dir() and not (folder / FILE).exists() else source)


def model_of_run(folder: Path) -> ViT | Swin:
    """Build the model of a classification run from its weights and configuration, without reading its data.

    Raises:
        ValueError: the folder holds no run, or one of another task.
    """
    if not (folder / CONFIG).exists():
        raise ValueError(f"backbone_from must be the folder of a run, which holds {CONFIG}, got {folder}")
    config = read_config(read_mapping(folder / CONFIG, CONFIG))
    if config.model.task != "classify":
        raise ValueError(
            f"backbone_from must be a classification run, got one with head {config.model.head} in {folder}"
        )
    stored = read_weights(folder)
    weights = {name.removeprefix("model."): value for name, value in stored.items() if name.startswith("model.")}
    data = make_data(config.data)
    data.classes = tuple(map(str, range(len(weights["head.weight"]))))
    model = on_lattice(build_model(config.encoding, config.model, data))
    try:
        model.load_state_dict(weights)
    except RuntimeError:
        raise ValueError(f"weights must fit the model of the run's {CONFIG}, got others in {folder}") from None
    return model.eval()
