"""What a backbone starts with: a run, a published checkpoint, or a model."""

import os
from pathlib import Path
from typing import Any

from torch import nn

from torchrope.backbones import Features, Swin, ViT
from torchrope.interop.pretrained import as_own, from_timm, transfer
from torchrope.interop.published import load_published
from torchrope.interop.saving import FILE
from torchrope.interop.saving import load as load_saved

_TIMM = "timm:"


def load_backbone(features: Features, source: nn.Module | str | os.PathLike[str], **options: Any) -> None:
    """Give a backbone the weights of a pre-trained model.

    Positions keep the distance of pre-training, so that larger images run past its lattice; a learned table of them,
    or of offsets, is resampled where the backbone was built for another lattice. Head, last norm, later layers stay
    behind, and the class token and registers where the backbone attends in windows.

    Args:
        features: The backbone, of the architecture and encoding of the source.
        source: The folder of a run that classified; the file of a published checkpoint; a model or folder that
            `torchrope.save` wrote; "timm:NAME", which timm fetches; a `ViT`, a `Swin`, or a model of timm.
        options: For checkpoints and models of timm, as `load_published` takes them.

    Raises:
        FileNotFoundError: no such file.
        ValueError: what does not fit, in one line, or what cannot be read.

    Example:
        >>> from torchrope import Features, ViT, load_backbone
        >>> settings = dict(patch_size=8, dim=32, depth=4, num_heads=2, encoding="mixed")
        >>> trained, backbone = ViT((32, 32), **settings), Features(ViT((64, 64), **settings), pyramid=True)
        >>> load_backbone(backbone, trained)
        >>> load_backbone(backbone, ViT((32, 32), **settings | {"encoding": "axial"}))  # doctest: +ELLIPSIS
        Traceback (most recent call last):
            ...
        ValueError: a backbone takes the weights of a model built like it, got encodings.0: AxialRoPE ... and 1 more
    """
    whole = as_own(source, **options) if isinstance(source, nn.Module) else as_own(_read(source, options))
    transfer(features.model, whole)


def _read(source: str | os.PathLike[str], options: dict[str, Any]) -> nn.Module:
    if str(source).startswith(_TIMM):
        return from_timm(str(source).removeprefix(_TIMM), **options)
    path = Path(source).expanduser()
    if path.name == FILE or (path / FILE).exists():
        return load_saved(path)
    return of_run(path) if path.is_dir() else load_published(path, **options)


def of_run(folder: Path) -> ViT | Swin:
    """The model of a run that classified, from its weights and configuration; its data need not be read.

    Raises:
        ValueError: the folder holds no run, or one that did not classify.
    """
    from torchrope.data.build import make_data
    from torchrope.files import read_mapping
    from torchrope.training.checkpoints import read_weights
    from torchrope.training.models import build_model
    from torchrope.training.run import CONFIG, read_config

    if not (folder / CONFIG).exists():
        raise ValueError(f"a backbone starts with the folder of a run, which holds {CONFIG}, got {folder}")
    config = read_config(read_mapping(folder / CONFIG, CONFIG))
    if config.model.task != "classify":
        raise ValueError(
            f"a backbone starts with a run that classified, got one with head {config.model.head} in {folder}"
        )
    stored = read_weights(folder)
    weights = {name.removeprefix("model."): value for name, value in stored.items() if name.startswith("model.")}
    data = make_data(config.data)
    data.classes = tuple(map(str, range(len(weights["head.weight"]))))
    model = build_model(config.encoding, config.model, data)
    try:
        model.load_state_dict(weights)
    except RuntimeError:
        raise ValueError(f"the weights of a run must be of its own model, got others in {folder}") from None
    return model.eval()
