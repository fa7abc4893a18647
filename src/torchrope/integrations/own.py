"""Recipes from which `load` rebuilds `ViT`, `Swin` and `Features`, and their validation."""

import inspect
from typing import Any

import torch
from torch import nn

from torchrope.integrations.settings import (
    DEPTHS,
    ENCODING,
    EXTENT,
    EXTENTS,
    FLAG,
    LAYER,
    LAYERS,
    MAPPING,
    NOTHING,
    NUMBER,
    NUMBERS,
    SHARE,
    WIDTH,
    WORD,
    Kind,
    Limits,
    check,
    each,
    one_of,
)
from torchrope.models import Features, Swin, ViT

_MODELS: dict[str, type[ViT | Swin]] = {"ViT": ViT, "Swin": Swin}

# Arguments that a file may set; functions and classes are not among them.
_SHARED: dict[str, Kind] = {
    "input_size": each(EXTENT, most=8),
    "patch_size": EXTENTS,
    "in_channels": WIDTH,
    "num_classes": WIDTH,
    "dim": WIDTH,
    "encoding": ENCODING,
    "spacing": NUMBERS | NOTHING,
    "origin": NUMBERS | NOTHING,
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
        raise ValueError(f"save supports {', '.join(_MODELS)} and Features of torchrope, got {name}")
    defaults = {key: parameter.default for key, parameter in inspect.signature(type(model)).parameters.items()}
    given = {key: value for key, value in model.arguments.items() if value is not defaults[key]}
    return {"class": name, "arguments": given}


def check_recipe(recipe: Any, limits: Limits) -> None:
    """Check that a recipe of a file holds only a class and valid arguments.

    Raises:
        ValueError: the first invalid setting.
    """
    features = {"features": MAPPING} if isinstance(recipe, dict) and "features" in recipe else {}
    check("its recipe", recipe, {"class": one_of(*_MODELS), "arguments": MAPPING, **features}, limits)
    name = recipe["class"]
    check(f"the arguments of {name}", recipe["arguments"], _ARGUMENTS[name], limits, partly=True)
    if features:
        check("the arguments of Features", recipe["features"], FEATURES, limits, partly=True)


def rebuild(recipe: dict[str, Any], device: str) -> nn.Module:
    """Build the model of a recipe with randomly initialised weights."""
    with torch.device(device):
        model = _MODELS[recipe["class"]](**recipe["arguments"])
        return Features(model, **recipe["features"]) if "features" in recipe else model
