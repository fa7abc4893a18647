"""This library's own models, as `save` and `load` rebuild them."""

import inspect
from typing import Any

import torch
from torch import nn

from torchrope import backbones

_MODELS = {model.__name__: model for model in (backbones.ViT, backbones.Swin)}


def recipe(model: Any) -> dict[str, Any]:
    """The class of a model and the arguments that differ from its defaults."""
    name = type(model).__name__
    if _MODELS.get(name) is not type(model):
        raise ValueError(f"save knows torchrope's {' and '.join(_MODELS)}, got {name}")
    defaults = {name: one.default for name, one in inspect.signature(type(model)).parameters.items()}
    given = {name: value for name, value in model.arguments.items() if value is not defaults[name]}
    return {"class": name, "arguments": given}


def rebuild(recipe: dict[str, Any], device: str) -> nn.Module:
    """The model of a recipe, its weights drawn anew."""
    with torch.device(device):
        return _MODELS[recipe["class"]](**recipe["arguments"])
