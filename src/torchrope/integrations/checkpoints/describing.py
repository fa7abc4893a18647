"""Convert encodings to plain data (class name and constructor arguments) and look up the class."""

import json
from collections.abc import Iterable
from typing import Any

from torch import nn

from torchrope import encodings as families
from torchrope.encodings import Encoding, ExpandingEncoding
from torchrope.encodings.names import arguments_of, builders, built_class, given_arguments
from torchrope.inference import Frozen


def describe(encoding: nn.Module) -> dict[str, Any]:
    """Return the class name and constructor arguments of an encoding, or of the one that was frozen.

    Raises:
        ValueError: an argument that the encoding does not store as an attribute of the same name.
    """
    cls = family_of(encoding)
    given = encoding.build.keywords if isinstance(encoding, Frozen) else given_arguments(encoding)
    missing = next((name for name in arguments_of(cls) if name not in given), None)
    if missing is not None:
        rule = "each constructor argument of an encoding must be an attribute of the same name"
        raise ValueError(f"{rule}, got {cls.__name__} without {missing}")
    return {"class": cls.__name__, "arguments": given}


def family_of(encoding: nn.Module) -> Any:
    """Return the class of an encoding, or of the one that was frozen."""
    return encoding.build.func if isinstance(encoding, Frozen) else type(encoding)


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
    """Return the class of a description, from `classes`, `torchrope.encodings` or `register_encoding`.

    Raises:
        ValueError: a class in none of them, or whose encodings are not rotations.
    """
    name = description["class"]
    registered = {cls.__name__: cls for cls in map(built_class, builders().values()) if cls is not None}
    found = {**registered, **{cls.__name__: cls for cls in classes}}.get(name, getattr(families, name, None))
    if not (isinstance(found, type) and issubclass(found, Encoding)):
        raise ValueError(f"custom encodings must be passed as classes=[...] or registered, got a model with {name}")
    if issubclass(found, ExpandingEncoding):
        raise ValueError(f"encodings of its swap must be rotations, got {name}")
    return found
