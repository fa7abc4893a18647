"""Encodings as plain data, their class and the arguments that build them, and built again from that."""

import inspect
import json
from collections.abc import Iterable
from typing import Any

from torch import nn

from torchrope import encodings as families
from torchrope.encodings import Encoding


def describe(encoding: nn.Module) -> dict[str, Any]:
    """An encoding as plain data: its class and the arguments that build it.

    Raises:
        ValueError: an argument that the encoding does not keep as an attribute of that name.
    """
    accepted = {
        name: parameter
        for base in type(encoding).__mro__
        if issubclass(base, Encoding) and base is not Encoding and "__init__" in vars(base)
        for name, parameter in inspect.signature(vars(base)["__init__"]).parameters.items()
        if name != "self" and parameter.kind is not inspect.Parameter.VAR_KEYWORD
    }
    lost = next((name for name in accepted if not hasattr(encoding, name)), None)
    if lost is not None:
        rule = "an encoding is saved by its arguments, each an attribute of the same name"
        raise ValueError(f"{rule}, got {type(encoding).__name__} without {lost}")
    return {"class": type(encoding).__name__, "arguments": {name: getattr(encoding, name) for name in accepted}}


def written(settings: dict[str, Any]) -> str:
    """Settings as JSON.

    Raises:
        ValueError: what JSON cannot hold.
    """
    try:
        return json.dumps(settings)
    except TypeError as error:
        raise ValueError(f"save writes settings as JSON, got a model built with another: {error}") from None


def class_of(description: dict[str, Any], classes: Iterable[type[Encoding]]) -> type[Encoding]:
    """The class that was described, of torchrope's and those given.

    Raises:
        ValueError: neither.
    """
    name = description["class"]
    found = {one.__name__: one for one in classes}.get(name, getattr(families, name, None))
    if not (isinstance(found, type) and issubclass(found, Encoding)):
        raise ValueError(f"encodings of your own must be given as classes=[...], got a model with {name}")
    return found
