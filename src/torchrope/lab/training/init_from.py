"""Starting with the weights of another run: a second stage, fine-tuning, another encoding."""

import re
from pathlib import Path

from torch import Tensor, nn

from torchrope.encodings import Encoding
from torchrope.lab.training.checkpoints import CHECKPOINT, WEIGHTS, read_weights

_ROTARY = re.compile(r"(.*\.)?encodings\.\d+\.")


def start_from(model: nn.Module, folder: Path) -> None:
    """Give a model the weights that a run has left.

    A rotary encoding that the run had not, or had of another kind, starts at zero, where rotary attention is plain
    attention, unless it is fixed; a head for other classes stays as it is drawn.

    Args:
        model: A `ViT` or a `Swin`.
        folder: That of the run.

    Raises:
        ValueError: there is no run, or its model is another.

    References:
        Yu et al., ComRoPE, supplement B.2.
    """
    if not (folder / WEIGHTS).exists() and not (folder / CHECKPOINT).exists():
        raise ValueError(f"start_from must be the folder of a run with {WEIGHTS}, got {folder}")
    stored = _of_model(read_weights(folder))
    mine = model.state_dict()
    others = [name for name in {**mine, **stored} if not _ROTARY.match(name)]
    kept = [name for name in others if not (name.startswith("head.") and _shape(mine, name) != _shape(stored, name))]
    wrong = [name for name in kept if _shape(mine, name) != _shape(stored, name)]
    if wrong:
        named = ", ".join(f"{name} {_shape(stored, name)} instead of {_shape(mine, name)}" for name in wrong[:3])
        raise ValueError(f"start_from must be a run of the same model but for its rotary encoding, got {named}")
    model.load_state_dict({name: stored[name] for name in kept}, strict=False)
    for name, encoding in model.named_modules():
        if isinstance(encoding, Encoding):
            _start(encoding, {key: value for key, value in stored.items() if key.startswith(f"{name}.")}, name)


def _start(encoding: Encoding, stored: dict[str, Tensor], name: str) -> None:
    """Load what is stored under the encoding's name where it fits; otherwise begin at zero, if it learns."""
    theirs = {key.removeprefix(f"{name}."): value for key, value in stored.items()}
    mine = encoding.state_dict()
    if {key: value.shape for key, value in theirs.items()} == {key: value.shape for key, value in mine.items()}:
        encoding.load_state_dict(theirs)
    elif hasattr(encoding, "init"):
        encoding.init = "zeros"  # type: ignore[assignment]
        encoding.reset_parameters()


def _of_model(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights of a run's model, among those of its metrics."""
    return {name.removeprefix("model."): value for name, value in weights.items() if name.startswith("model.")}


def _shape(weights: dict[str, Tensor], name: str) -> tuple[int, ...] | None:
    return tuple(weights[name].shape) if name in weights else None
