"""This library's own models, as `save` and `load` rebuild them."""

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
from torchrope.models import Swin, ViT

_MODELS = {model.__name__: model for model in (ViT, Swin)}

# What a file may say to each; functions and classes it cannot name.
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


def recipe(model: Any) -> dict[str, Any]:
    """The class of a model and the arguments that differ from its defaults."""
    name = type(model).__name__
    if _MODELS.get(name) is not type(model):
        raise ValueError(f"save knows torchrope's {' and '.join(_MODELS)}, got {name}")
    defaults = {name: one.default for name, one in inspect.signature(type(model)).parameters.items()}
    given = {name: value for name, value in model.arguments.items() if value is not defaults[name]}
    return {"class": name, "arguments": given}


def check_recipe(recipe: Any, limits: Limits) -> None:
    """Refuse a recipe of a file that names more than a class and the data which builds it.

    Raises:
        ValueError: the first setting that is wrong.
    """
    check("its recipe", recipe, {"class": one_of(*_MODELS), "arguments": MAPPING}, limits)
    name = recipe["class"]
    check(f"the arguments of {name}", recipe["arguments"], _ARGUMENTS[name], limits, partly=True)


def rebuild(recipe: dict[str, Any], device: str) -> nn.Module:
    """The model of a recipe, its weights initialised at random."""
    with torch.device(device):
        return _MODELS[recipe["class"]](**recipe["arguments"])
