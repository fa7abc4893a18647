"""Initialise a model with the weights of another run: for a second stage, fine-tuning or another encoding."""

import re
from pathlib import Path

from torch import Tensor, nn

from torchrope.encodings import Encoding, ExpandingEncoding
from torchrope_lab.training.checkpoints import CHECKPOINT, WEIGHTS, read_weights

_ROTARY = re.compile(r"(.*\.)?encodings\.\d+\.")


def start_from(model: nn.Module, folder: Path) -> None:
    """Load the weights of a finished run into a model.

    A rotary encoding that the run lacks, or has with other parameters, starts at zero, where rotary attention equals
    plain attention, unless it is fixed; a head for a different number of classes keeps its random initialisation.

    Args:
        model: A `ViT` or a `Swin`.
        folder: The folder of the run.

    Raises:
        ValueError: the folder holds no run, or its model differs by more than encoding and head.

    References:
        Yu et al., ComRoPE, supplementary material (CVPR 2025, arXiv:2506.03737), section B.2.
    """
    if not (folder / WEIGHTS).exists() and not (folder / CHECKPOINT).exists():
        raise ValueError(f"start_from must be the folder of a run with {WEIGHTS}, got {folder}")
    stored = _of_model(read_weights(folder))
    current = model.state_dict()
    others = [name for name in {**current, **stored} if not _ROTARY.match(name)]
    differing = {name for name in others if _shape(current, name) != _shape(stored, name)}
    loaded = [name for name in others if not (name.startswith("head.") and name in differing)]
    wrong = [name for name in loaded if name in differing]
    if wrong:
        shapes = ", ".join(f"{name} {_shape(stored, name)} instead of {_shape(current, name)}" for name in wrong[:3])
        raise ValueError(f"start_from must be a run of the same model except for its rotary encoding, got {shapes}")
    model.load_state_dict({name: stored[name] for name in loaded}, strict=False)
    for name, encoding in model.named_modules():
        if isinstance(encoding, Encoding):
            _load_or_zero(encoding, {key: value for key, value in stored.items() if key.startswith(f"{name}.")}, name)


def _load_or_zero(encoding: Encoding, stored: dict[str, Tensor], name: str) -> None:
    """Load the encoding's stored parameters if their shapes fit; otherwise reset it to zero, if it is learned."""
    parameters = {key.removeprefix(f"{name}."): value for key, value in stored.items()}
    if _shapes(parameters) == _shapes(encoding.state_dict()):
        encoding.load_state_dict(parameters)
    elif next(encoding.parameters(recurse=False), None) is not None and not isinstance(encoding, ExpandingEncoding):
        encoding.zero_()


def _of_model(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Select the weights of a run's model, without those of its metrics, and strip their prefix."""
    return {name.removeprefix("model."): value for name, value in weights.items() if name.startswith("model.")}


def _shapes(weights: dict[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in weights.items()}


def _shape(weights: dict[str, Tensor], name: str) -> tuple[int, ...] | None:
    return tuple(weights[name].shape) if name in weights else None
