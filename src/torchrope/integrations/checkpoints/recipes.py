"""Recipes from which `load` rebuilds `ViT`, `Swin` and `Features`, and their validation."""

import copy
import inspect
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from torchrope.inference import Frozen, FrozenAbsolute, freeze
from torchrope.integrations.checkpoints import settings as kinds
from torchrope.integrations.checkpoints.settings import Limits, check, settable
from torchrope.lattice import Lattice
from torchrope.models import Features, Swin, ViT

_MODELS: dict[str, type[ViT | Swin]] = {"ViT": ViT, "Swin": Swin}
_LARGEST_INPUT = 2**30
# Arguments whose annotations allow functions too, and numbers that must not add up to more layers than tensors.
_SPECIAL = {"encoding": kinds.ENCODING, "positions": kinds.LATTICE, "depths": kinds.DEPTHS}


def recipe(model: Any) -> dict[str, Any]:
    """Return the class and non-default arguments of a model; for `Features`, those of both itself and its model."""
    if type(model) is Features:
        return {**recipe(model.model), "features": model.arguments}
    name = type(model).__name__
    if _MODELS.get(name) is not type(model):
        raise ValueError(f"save supports {', '.join(_MODELS)}, Features and swapped models, got {name}")
    defaults = {key: parameter.default for key, parameter in inspect.signature(type(model)).parameters.items()}
    given = {key: value for key, value in model.arguments.items() if value is not defaults[key]}
    if "positions" in given and type(given["positions"]) is not Lattice:
        raise ValueError(f"save supports positions of a Lattice, got {given['positions']!r}")
    frozen = {} if model.embed.frozen_size is None else {"frozen": model.embed.frozen_size}
    return {"class": name, "arguments": given, **frozen}


def check_recipe(recipe: Any, limits: Limits) -> None:
    """Raise ValueError for the first invalid setting of a recipe."""
    allowed = {"class": kinds.one_of(*_MODELS), "arguments": kinds.MAPPING}
    if isinstance(recipe, dict):
        optional = {"features": kinds.MAPPING, "frozen": settable(ViT)["input_size"]}
        allowed |= {name: optional[name] for name in optional.keys() & recipe}
    check("its recipe", recipe, allowed, limits)
    name, arguments = recipe["class"], recipe["arguments"]
    check(f"the arguments of {name}", arguments, settable(_MODELS[name]) | _SPECIAL, limits, partly=True)
    if "features" in recipe:
        check_features(recipe["features"], limits)


def check_features(arguments: Any, limits: Limits) -> None:
    """Raise ValueError for the first invalid argument of `Features`."""
    check("the arguments of Features", arguments, settable(Features), limits, partly=True)


def rebuild(recipe: dict[str, Any], device: str) -> nn.Module:
    """Build the model of a recipe with randomly initialised weights."""
    arguments = dict(recipe["arguments"])
    if "positions" in arguments:
        arguments["positions"] = Lattice(**arguments["positions"])
    with torch.device(device):
        model = _MODELS[recipe["class"]](**arguments)
        if "frozen" in recipe:
            freeze_again(model, recipe["frozen"], device)
        return Features(model, **recipe["features"]) if "features" in recipe else model


def freeze_again(model: nn.Module, size: Sequence[int], device: str | torch.device) -> None:
    """Freeze a model in place, without values: at an input size, or for an input of this shape.

    The model runs on the meta device, where shapes alone are computed; the file limits those that are then allocated.
    """
    if math.prod(size) > _LARGEST_INPUT:
        raise ValueError(f"a frozen input must have up to {_LARGEST_INPUT:,} numbers, got {tuple(size)}")
    empty = copy.deepcopy(model).to("meta")
    with torch.device("meta"):
        example = size if isinstance(model, ViT | Swin) else next(empty.parameters()).new_empty(tuple(size))
        frozen = freeze(empty, example)
    if isinstance(model, ViT | Swin):
        model.embed.frozen_size = tuple(size)
    for name, part in frozen.named_modules():
        if isinstance(part, Frozen | FrozenAbsolute):
            parent, _, child = name.rpartition(".")
            model.get_submodule(parent)._modules[child] = part.to_empty(device=device)
