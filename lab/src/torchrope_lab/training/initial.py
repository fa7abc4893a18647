"""Initialise a model with the weights of a run, a published checkpoint, or a model of timm or transformers."""

import os
import re
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from torchrope.checkpoints import convert
from torchrope.checkpoints.convert import HUBS, fitted_state, load_backbone, to_torchrope
from torchrope.encodings import Encoding
from torchrope.integrations import FILE
from torchrope.models import ACTIVATIONS, Swin, ViT
from torchrope_lab.data.build import make_data
from torchrope_lab.files import read_mapping
from torchrope_lab.mistakes import Mistake, as_mistake
from torchrope_lab.settings.run_config import CONFIG, RunConfig, read_config
from torchrope_lab.training.checkpoints import CHECKPOINT, WEIGHTS, read_weights
from torchrope_lab.training.models import Model, build_model

_ROTARY = re.compile(r"(.*\.)?encodings\.\d+\.")
_SETTINGS = (
    *("patch_size", "dim", "depth", "num_heads", "depths", "window_size", "mlp_dim", "pool", "num_registers"),
    *("qkv_bias", "layer_scale", "norm_eps", "activation", "embedding_norm", "in_channels"),
)
"""Arguments of `ViT` and `Swin` that decide what weights compute."""


@as_mistake()
def initialise(model: nn.Module, source: str) -> None:
    """Load the weights of a run or of a public checkpoint into a model."""
    # A rotary encoding that the source lacks, or has with other parameters, starts at zero, where rotary attention
    # equals plain attention, unless it is fixed (Yu et al., ComRoPE, supplementary material (CVPR 2025,
    # arXiv:2506.03737), section B.2); a head for a different number of classes keeps its random initialisation. A model
    # for segmentation or detection gets its backbone from a classifier, or everything from a run of its own kind.
    # `source` is "timm:NAME" or "hf:FOLDER_OR_NAME", which timm or transformers downloads if it is not on this machine;
    # the file of a published checkpoint; a file or folder that `torchrope.save` wrote; the folder of a run.
    path, backbone = Path(source).expanduser(), getattr(model, "backbone", None)
    if is_run(path) and (backbone is None or config_of_run(path).model.task != "classify"):
        stored = weights_of_run(path)
    elif backbone is not None:
        load_backbone(backbone, read_model(source))
        return
    else:
        trained = to_torchrope(read_model(source))
        _check_settings(model, trained, source)
        stored = fitted_state(model, trained)  # type: ignore[arg-type]
    _load_weights(model, stored, source)


def read_model(source: str | os.PathLike[str]) -> Any:
    """Load a trained model, in evaluation mode, from any source that `initialise` names."""
    path = Path(source).expanduser()
    if path.name in (WEIGHTS, CHECKPOINT) and is_run(path.parent):
        path = path.parent
    if is_run(path):
        return model_of_run(path)
    if path.is_dir() and not (path / FILE).exists():
        hint = f"; a folder of transformers is hf:{path}" if (path / "config.json").exists() else ""
        raise Mistake(f"a folder must contain {FILE}, or {CONFIG} and {WEIGHTS}, got {path} without them{hint}")
    return convert.read_model(source)


def is_run(path: Path) -> bool:
    """Return whether a path is the folder of a run."""
    return (path / CONFIG).exists() and not (path / FILE).exists()


def model_of_run(folder: Path) -> Model:
    """Build the model of a classification run from its weights and configuration, without reading its data."""
    config = config_of_run(folder)
    if config.model.task != "classify":
        raise Mistake(f"a run must be of model.head classify, got {config.model.head} in {folder}")
    weights = weights_of_run(folder)
    data = make_data(config.data)
    data.classes = tuple(map(str, range(len(weights["head.weight"]))))
    model = build_model(config.encoding, config.model, data)
    try:
        model.load_state_dict(weights)
    except RuntimeError:
        raise Mistake(f"weights must fit the model of the run's {CONFIG}, which those in {folder} do not") from None
    return model.eval()


def weights_of_run(folder: Path) -> dict[str, Tensor]:
    """Read the weights of a run's model, without those of its metrics."""
    weights = read_weights(folder)
    return {name.removeprefix("model."): value for name, value in weights.items() if name.startswith("model.")}


def config_of_run(folder: Path) -> RunConfig:
    """Read the configuration of a run."""
    return read_config(read_mapping(folder / CONFIG, CONFIG))


def _check_settings(model: Any, trained: Any, source: str) -> None:
    """Raise ValueError if a model computes another function of the same weights, with the settings to give."""
    if type(model) is not type(trained):
        raise Mistake(f"init must be a {type(model).__name__}, got a {type(trained).__name__} in {source}")
    mine, theirs = _settings(model), _settings(trained)
    if not source.startswith(HUBS) and "activation" in theirs:
        theirs["activation"] = mine["activation"]  # not in the files of most checkpoints
    differing = [name for name in theirs if mine[name] != theirs[name]]
    if differing:
        options = ", ".join(f"{name} {theirs[name]} instead of {mine[name]}" for name in differing)
        raise Mistake(f"the model must have the settings of {source}, got {options}")
    encodings = [[type(part) for part in one.modules() if isinstance(part, Encoding)] for one in (model, trained)]
    if isinstance(model, ViT) and {*encodings[0]} & {*encodings[1]}:
        sizes = model.embed.lattice(model.arguments["input_size"])
        own, given = (one.position_map.spaced(*sizes) for one in (model, trained))
        if own != given:
            wanted = " and ".join(f"model.{name} {value}" for name, value in given.items())
            raise Mistake(f"positions must be those of {source}, which has {wanted}, got {own}")


def _settings(model: ViT | Swin) -> dict[str, Any]:
    """Return the settings of a model that decide what its weights compute, as the configuration names them."""
    settings = {name: value for name, value in model.arguments.items() if name in _SETTINGS}
    settings = {name: tuple(value) if isinstance(value, list) else value for name, value in settings.items()}
    settings["patch_size"] = tuple(model.embed.patch_size)
    if isinstance(model, ViT):
        settings["mlp_dim"] = settings["mlp_dim"] or 4 * settings["dim"]
        settings["layer_scale"] = settings["layer_scale"] is not None
        settings["activation"] = next(name for name, kind in ACTIVATIONS.items() if kind is settings["activation"])
    else:
        stages: Any = model.stages
        settings["window_size"] = tuple(tuple(stage.window) for stage in stages)
    return settings


def _load_weights(model: nn.Module, stored: dict[str, Tensor], source: str) -> None:
    current = model.state_dict()
    others = [name for name in {**current, **stored} if not _ROTARY.match(name)]
    differing = {name for name in others if _shape(current, name) != _shape(stored, name)}
    loaded = [name for name in others if not (name.startswith("head.") and name in differing)]
    wrong = [name for name in loaded if name in differing]
    if wrong:
        shapes = ", ".join(f"{name} {_shape(stored, name)} instead of {_shape(current, name)}" for name in wrong[:3])
        raise Mistake(f"init must be the same model except for its rotary encoding, got {shapes} in {source}")
    model.load_state_dict({name: stored[name] for name in loaded}, strict=False)
    for name, encoding in model.named_modules():
        if not isinstance(encoding, Encoding):
            continue
        parameters = {
            key.removeprefix(f"{name}."): value for key, value in stored.items() if key.startswith(f"{name}.")
        }
        if _shapes(parameters) == _shapes(encoding.state_dict()):
            encoding.load_state_dict(parameters)
        elif next(encoding.parameters(recurse=False), None) is not None:
            encoding.zero_()


def _shapes(weights: dict[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in weights.items()}


def _shape(weights: dict[str, Tensor], name: str) -> tuple[int, ...] | None:
    return tuple(weights[name].shape) if name in weights else None
