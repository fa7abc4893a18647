"""Descriptions of encodings as plain data: write them as JSON, check them, build encodings."""

import json
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from torchrope import encodings as families
from torchrope.encodings import Encoding
from torchrope.encodings.names import arguments_of, builders, built_as, built_class
from torchrope.inference import Frozen, FrozenAbsolute
from torchrope.integrations.checkpoints import settings as kinds
from torchrope.integrations.checkpoints.settings import Limits, check, errors_in_one_line, settable, tuples
from torchrope.lattice import Lattice

_ENCODING = {"class": kinds.matching(r"\w{1,200}", "a name"), "arguments": kinds.MAPPING}


def describe(part: Any) -> dict[str, Any]:
    """Return the class name and constructor arguments of an encoding or bias, or of the encoding that was frozen."""
    build = part if isinstance(part, partial) else build_of(part)
    cls: Any = build.func
    for name in arguments_of(cls):
        if name not in build.keywords:
            rule = "each constructor argument of an encoding must be an attribute of the same name"
            raise ValueError(f"{rule}, got {cls.__name__} without {name}")
    return {"class": cls.__name__, "arguments": build.keywords}


def build_of(part: nn.Module) -> partial[Any]:
    """Return the class of an encoding or bias, or of the encoding that was frozen, with its arguments."""
    return part.build if isinstance(part, Frozen | FrozenAbsolute) else built_as(part)


def to_json(settings: dict[str, Any]) -> str:
    """Serialise settings as JSON; ValueError if it cannot represent a value."""
    try:
        return json.dumps(settings, default=_plain)
    except TypeError as error:
        raise ValueError(f"save needs settings that JSON can represent, got: {error}") from None


def build(
    described: Any, kind: type, sizes: Mapping[str, Any], classes: Iterable[type], limits: Limits, device: Any
) -> Any:
    """Build an encoding or bias of these sizes, of torchrope or, with a device on the CPU, custom."""
    check("each of its encodings", described, _ENCODING, limits)
    name, arguments, known = described["class"], described["arguments"], getattr(families, described["class"], None)
    registered = [cls for cls in map(built_class, builders().values()) if cls is not None]
    cls = {cls.__name__: cls for cls in (*registered, *classes)}.get(name, known)
    if not (isinstance(cls, type) and issubclass(cls, kind)):
        raise ValueError(f"custom encodings must be passed as classes=[...] or registered, got a model with {name}")
    choices = {key: sorted({1, value}) if key == "num_heads" else [value] for key, value in sizes.items()}
    allowed = settable(cls) | {key: kinds.one_of(*values) for key, values in choices.items()}
    check(f"the arguments of {name}", arguments, allowed, limits, partly=True)
    nested = [key for key in arguments if allowed[key] is kinds.PART]
    parts = {key: build(arguments[key], Encoding, sizes, classes, limits, device) for key in nested}
    place = nullcontext() if device is None else device if cls is known else torch.device("cpu")
    with place, errors_in_one_line(f"{name} rejects its settings"):
        lattices = {key: Lattice(**tuples(arguments[key])) for key in arguments if allowed[key] is kinds.LATTICE}
        return cls(**tuples(arguments) | lattices | parts)


def _plain(value: Any) -> dict[str, Any]:
    if isinstance(value, Lattice):
        return value.settings()
    if isinstance(value, partial) and isinstance(value.func, type):  # an encoding within another
        return describe(value)
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")
