"""Convert encodings to plain data (class name and constructor arguments), and build them from it."""

import json
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from torchrope import encodings as families
from torchrope.encodings import Encoding, ExpandingEncoding
from torchrope.encodings.names import arguments_of, builders, built_class, given_arguments
from torchrope.inference import Frozen
from torchrope.integrations.checkpoints import settings as kinds
from torchrope.integrations.checkpoints.settings import Limits, check, errors_in_one_line, settable, tuples
from torchrope.integrations.family import AttentionShape

_DESCRIPTION = {"class": kinds.matching(r"\w{1,200}", "a name"), "arguments": kinds.MAPPING}


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


def build(
    described: Any, site: AttentionShape, classes: Iterable[type[Encoding]], limits: Limits, device: torch.device
) -> Encoding:
    """Build an encoding of an attention layer: of `torchrope.encodings`, or on the CPU of `classes` or registered.

    Raises:
        ValueError: an invalid description; a class in none of them, or whose encodings are not rotations.
    """
    check("each of the encodings of its swap", described, _DESCRIPTION, limits)
    name, arguments, known = described["class"], described["arguments"], getattr(families, described["class"], None)
    registered = [cls for cls in map(built_class, builders().values()) if cls is not None]
    cls = {cls.__name__: cls for cls in (*registered, *classes)}.get(name, known)
    if not (isinstance(cls, type) and issubclass(cls, Encoding)):
        raise ValueError(f"custom encodings must be passed as classes=[...] or registered, got a model with {name}")
    if issubclass(cls, ExpandingEncoding):
        raise ValueError(f"encodings of its swap must be rotations, got {name}")
    shape = {"num_axes": {len(site.lattice)}, "num_heads": {1, site.num_heads}, "head_dim": {site.head_dim}}
    allowed = settable(cls) | {key: kinds.one_of(*values) for key, values in shape.items()}
    check(f"the arguments of {name}", arguments, allowed, limits, partly=True)
    with device if cls is known else torch.device("cpu"), errors_in_one_line(f"{name} rejects its settings"):
        return cls(**tuples(arguments))
