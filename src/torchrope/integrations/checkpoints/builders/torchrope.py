"""Recipes from which `load` rebuilds `ViT`, `Swin` and `Features`, and their validation."""

import inspect
from functools import partial
from typing import Any

import torch
from torch import nn

from torchrope.inference import Frozen, FrozenAbsolute, freeze
from torchrope.integrations.checkpoints.settings import (
    DEPTHS,
    ENCODING,
    EXTENT,
    EXTENTS,
    FLAG,
    LATTICE,
    LAYER,
    LAYERS,
    MAPPING,
    NOTHING,
    NUMBER,
    SHARE,
    WIDTH,
    WORD,
    Kind,
    Limits,
    UnknownModel,
    check,
    each,
    one_of,
)
from torchrope.lattice import Lattice
from torchrope.models import Features, Swin, ViT
from torchrope.positions import patch_centers

_MODELS: dict[str, type[ViT | Swin]] = {"ViT": ViT, "Swin": Swin}

# Arguments that a file may set; functions and classes are not among them.
_SHARED: dict[str, Kind] = {
    "input_size": each(EXTENT, most=8),
    "patch_size": EXTENTS,
    "in_channels": WIDTH,
    "num_outputs": WIDTH,
    "dim": WIDTH,
    "encoding": ENCODING,
    "positions": MAPPING,
    "qkv_bias": FLAG,
    "dropout": SHARE,
    "attention_dropout": SHARE,
    "drop_path": SHARE,
    "drop_path_schedule": one_of("linear", "constant"),
    "checkpoint_layers": FLAG,
}
_ARGUMENTS: dict[str, dict[str, Kind]] = {
    "ViT": _SHARED
    | {
        "depth": LAYERS,
        "num_heads": WIDTH,
        "mlp_dim": WIDTH | NOTHING,
        "share_layers": FLAG,
        "pool": WORD,
        "num_registers": WIDTH,
        "layer_scale": NUMBER | NOTHING,
        "norm_eps": NUMBER,
        "weight_init": one_of("xavier", "truncated-normal", "torch"),
        "embedding_norm": FLAG,
    },
    "Swin": _SHARED | {"depths": DEPTHS, "num_heads": each(WIDTH), "window_size": EXTENTS, "mlp_ratio": NUMBER},
}
_POSITIONS: dict[str, tuple[Any, dict[str, Kind]]] = {
    "Lattice": (Lattice, LATTICE),
    "patch_centers": (patch_centers, {"normalize": one_of("separate", "max", "min")}),
}
"""Positions of a model that a file may set, by name, with their arguments."""
FEATURES: dict[str, Kind] = {
    "indices": each(LAYER, most=64) | NOTHING,
    "pyramid": FLAG,
    "out_channels": WIDTH,
    "window_size": EXTENTS | NOTHING,
    "global_layers": each(LAYER, most=64) | NOTHING,
}
"""Arguments of `Features`, other than the model, that a file may set."""


def recipe(model: Any) -> dict[str, Any]:
    """Return the class and non-default arguments of a model; for `Features`, those of both itself and its model.

    Raises:
        ValueError: a model of another class.
    """
    if type(model) is Features:
        return {**recipe(model.model), "features": model.arguments}
    name = type(model).__name__
    if _MODELS.get(name) is not type(model):
        raise UnknownModel(f"save supports {', '.join(_MODELS)} and Features of torchrope, got {name}")
    defaults = {key: parameter.default for key, parameter in inspect.signature(type(model)).parameters.items()}
    given = {key: value for key, value in model.arguments.items() if value is not defaults[key]}
    if "positions" in given:
        given["positions"] = _described(given["positions"])
    frozen = {} if model.embed.frozen_size is None else {"frozen": model.embed.frozen_size}
    return {"class": name, "arguments": given, **frozen}


def check_recipe(recipe: Any, limits: Limits) -> None:
    """Check that a recipe of a file holds only a class and valid arguments.

    Raises:
        ValueError: the first invalid setting.
    """
    kinds = {"features": MAPPING, "frozen": _SHARED["input_size"]}
    optional = {name: kind for name, kind in kinds.items() if isinstance(recipe, dict) and name in recipe}
    check("its recipe", recipe, {"class": one_of(*_MODELS), "arguments": MAPPING, **optional}, limits)
    name = recipe["class"]
    check(f"the arguments of {name}", recipe["arguments"], _ARGUMENTS[name], limits, partly=True)
    if "positions" in recipe["arguments"]:
        _check_positions(recipe["arguments"]["positions"], limits)
    if "features" in recipe:
        check("the arguments of Features", recipe["features"], FEATURES, limits, partly=True)


def _described(positions: Any) -> dict[str, Any]:
    """Return the name and arguments of a model's positions.

    Raises:
        ValueError: positions that are not in `_POSITIONS`.
    """
    with_arguments = isinstance(positions, partial) and positions.func is patch_centers and not positions.args
    if positions is patch_centers or with_arguments:
        return {"name": "patch_centers", "arguments": getattr(positions, "keywords", {})}
    if type(positions) is not Lattice:
        raise ValueError(f"save supports positions of {', '.join(_POSITIONS)}, got {positions!r}")
    return {"name": "Lattice", "arguments": positions.settings()}


def _check_positions(described: Any, limits: Limits) -> None:
    check("positions", described, {"name": one_of(*_POSITIONS), "arguments": MAPPING}, limits)
    name = described["name"]
    check(f"the arguments of {name}", described["arguments"], _POSITIONS[name][1], limits, partly=True)


def _positions(described: dict[str, Any]) -> Any:
    """Build the positions of a recipe."""
    build, arguments = _POSITIONS[described["name"]][0], described["arguments"]
    if build is not patch_centers:
        return build(**arguments)
    return partial(build, **arguments) if arguments else build


def rebuild(recipe: dict[str, Any], device: str) -> nn.Module:
    """Build the model of a recipe with randomly initialised weights."""
    arguments = dict(recipe["arguments"])
    if "positions" in arguments:
        arguments["positions"] = _positions(arguments["positions"])
    build, size = _MODELS[recipe["class"]], recipe.get("frozen")
    with torch.device(device):
        model = build(**arguments)
    if size is not None:
        with torch.device("meta"):  # computes shapes only, of which the file limits those that are then allocated
            frozen = freeze(build(**arguments), size)
        model.embed.frozen_size = size
        for name, part in frozen.named_modules():
            if isinstance(part, Frozen | FrozenAbsolute):
                parent, _, child = name.rpartition(".")
                model.get_submodule(parent)._modules[child] = part.to_empty(device=device)
    with torch.device(device):
        return Features(model, **recipe["features"]) if "features" in recipe else model
