"""Convert encodings to plain data (class name and constructor arguments) and look up the class."""

import json
from collections.abc import Iterable
from typing import Any

from torch import nn

from torchrope import encodings as families
from torchrope.encodings import Encoding, baselines
from torchrope.encodings.names import arguments_of, builders, built_class

_FORMER: dict[str, Any] = {
    "DINOv3RoPE": baselines.dinov3,
    "InterleavedMRoPE": baselines.mrope_interleaved,
    "NormalLieRE": baselines.comrope_liere,
    "VanillaRoPE": baselines.comrope_rope,
    "VideoRoPE": baselines.videorope,
    "VisionLLaMARoPE": baselines.visionllama,
}
"""Classes in older files that are settings of another class."""


def describe(encoding: nn.Module) -> dict[str, Any]:
    """Return the class name and constructor arguments of an encoding.

    Raises:
        ValueError: an argument that the encoding does not store as an attribute of the same name.
    """
    accepted = arguments_of(type(encoding))
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


def updated(description: dict[str, Any]) -> dict[str, Any]:
    """Return the description of an encoding in an older file by the classes and arguments of today."""
    name, arguments = description["class"], dict(description["arguments"])
    if name in _FORMER:
        preset = _FORMER[name]
        name, arguments = preset.func.__name__, {**preset.keywords, **arguments}
    cls = getattr(families, name, None)
    if isinstance(cls, type) and issubclass(cls, Encoding):
        former = {key: arguments.pop(key, None) for key in {"init", "shared_heads"} - {*arguments_of(cls)}}
        if former.get("shared_heads"):
            arguments["num_heads"] = 1
    return {"class": name, "arguments": arguments}


def class_of(description: dict[str, Any], classes: Iterable[type[Encoding]]) -> type[Encoding]:
    """Return the class of a description, from `classes`, `torchrope.encodings` or `register_encoding`.

    Raises:
        ValueError: a class in none of them.
    """
    name = description["class"]
    registered = {cls.__name__: cls for cls in map(built_class, builders().values()) if cls is not None}
    found = {**registered, **{cls.__name__: cls for cls in classes}}.get(name, getattr(families, name, None))
    if not (isinstance(found, type) and issubclass(found, Encoding)):
        raise ValueError(f"custom encodings must be passed as classes=[...] or registered, got a model with {name}")
    return found
