"""Convert encodings to plain data (class name and constructor arguments) and look up the class."""

import inspect
import json
from collections.abc import Iterable
from typing import Any

from torch import nn

from torchrope import encodings as families
from torchrope.encodings import Encoding


def describe(encoding: nn.Module) -> dict[str, Any]:
    """Return the class name and constructor arguments of an encoding.

    Raises:
        ValueError: an argument that the encoding does not store as an attribute of the same name.
    """
    accepted: dict[str, None] = {}
    for base in type(encoding).__mro__:
        if not issubclass(base, Encoding) or base is Encoding or "__init__" not in vars(base):
            continue
        parameters = inspect.signature(vars(base)["__init__"]).parameters.values()
        named = [parameter.name for parameter in parameters if parameter.kind is not inspect.Parameter.VAR_KEYWORD]
        accepted |= dict.fromkeys(name for name in named if name != "self")
        if len(named) == len(parameters):  # passes no further arguments to its base class
            break
    missing = next((name for name in accepted if not hasattr(encoding, name)), None)
    if missing is not None:
        rule = "each constructor argument of an encoding must be an attribute of the same name"
        raise ValueError(f"{rule}, got {type(encoding).__name__} without {missing}")
    return {"class": type(encoding).__name__, "arguments": {name: getattr(encoding, name) for name in accepted}}


def to_json(settings: dict[str, Any]) -> str:
    """Serialise settings as JSON.

    Raises:
        ValueError: a value that JSON cannot represent.
    """
    try:
        return json.dumps(settings)
    except TypeError as error:
        raise ValueError(f"save needs settings that JSON can represent, got: {error}") from None


def class_of(description: dict[str, Any], classes: Iterable[type[Encoding]]) -> type[Encoding]:
    """Return the class of a description, from `classes` or `torchrope.encodings`.

    Raises:
        ValueError: a class in neither.
    """
    name = description["class"]
    found = {cls.__name__: cls for cls in classes}.get(name, getattr(families, name, None))
    if not (isinstance(found, type) and issubclass(found, Encoding)):
        raise ValueError(f"custom encodings must be passed as classes=[...], got a model with {name}")
    return found
