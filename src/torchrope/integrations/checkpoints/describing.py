"""Descriptions of models and encodings as plain data: write them as JSON, read and check them, build encodings."""

import json
import math
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import nn

from torchrope import encodings as families
from torchrope.encodings import Encoding
from torchrope.encodings.names import arguments_of, builders, built_class, given_arguments
from torchrope.inference import Frozen
from torchrope.integrations.checkpoints import settings as kinds
from torchrope.integrations.checkpoints.recipes import check_recipe
from torchrope.integrations.checkpoints.settings import Limits, check, errors_in_one_line, settable, shown, tuples
from torchrope.integrations.family import AttentionShape
from torchrope.lattice import Lattice

FORMAT = 1

_LONGEST = 2**24
_ANY = kinds.Kind("", lambda value, _: True)  # validated separately
_HEADER = {
    "format": _ANY,
    "torchrope": kinds.LABEL,
    "model": kinds.matching(r"[\w.<>]{1,1000}", "the name of a class"),
    "recipe": _ANY,
    "swap": _ANY,
    "frozen": kinds.each(kinds.EXTENT, most=8) | kinds.NOTHING,
}
_ENCODING = {"class": kinds.matching(r"\w{1,200}", "a name"), "arguments": kinds.MAPPING}


def describe(encoding: nn.Module) -> dict[str, Any]:
    """Return the class name and constructor arguments of an encoding, or of the one that was frozen."""
    cls = family_of(encoding)
    given = encoding.build.keywords if isinstance(encoding, Frozen) else given_arguments(encoding)
    for name in arguments_of(cls):
        if name not in given:
            rule = "each constructor argument of an encoding must be an attribute of the same name"
            raise ValueError(f"{rule}, got {cls.__name__} without {name}")
    return {"class": cls.__name__, "arguments": given}


def family_of(encoding: nn.Module) -> Any:
    """Return the class of an encoding, or of the one that was frozen."""
    return encoding.build.func if isinstance(encoding, Frozen) else type(encoding)


def to_json(settings: dict[str, Any]) -> str:
    """Serialise settings as JSON; ValueError if it cannot represent a value."""
    try:
        return json.dumps(settings, default=_plain)
    except TypeError as error:
        raise ValueError(f"save needs settings that JSON can represent, got: {error}") from None


def build(
    described: Any, site: AttentionShape, classes: Iterable[type[Encoding]], limits: Limits, device: torch.device
) -> Encoding:
    """Build an encoding of an attention layer: of `torchrope.encodings`, or on the CPU of `classes` or registered."""
    check("each of the encodings of its swap", described, _ENCODING, limits)
    name, arguments, known = described["class"], described["arguments"], getattr(families, described["class"], None)
    registered = [cls for cls in map(built_class, builders().values()) if cls is not None]
    cls = {cls.__name__: cls for cls in (*registered, *classes)}.get(name, known)
    if not (isinstance(cls, type) and issubclass(cls, Encoding)):
        raise ValueError(f"custom encodings must be passed as classes=[...] or registered, got a model with {name}")
    shape = {"num_axes": {len(site.lattice)}, "num_heads": {1, site.num_heads}, "head_dim": {site.head_dim}}
    allowed = settable(cls) | {key: kinds.one_of(*values) for key, values in shape.items()}
    check(f"the arguments of {name}", arguments, allowed, limits, partly=True)
    with device if cls is known else torch.device("cpu"), errors_in_one_line(f"{name} rejects its settings"):
        lattices = {key: Lattice(**tuples(arguments[key])) for key in arguments if allowed[key] is kinds.LATTICE}
        return cls(**tuples(arguments) | lattices)


def read_header(text: str, limits: Limits) -> dict[str, Any]:
    """Parse the settings of a file and check them, except for its swaps, against limits from its tensors.

    Returns:
        "model", the name of its class; "recipe", which builds a model of torchrope, or None; "swap", the swaps of a
        model of another library by the name of the submodule, or None; and "frozen", the shape of the input that a
        swapped model was frozen for, or None.
    """
    if len(text) > _LONGEST:
        raise ValueError(f"its settings must be up to {_LONGEST:,} characters, got {len(text):,}")
    reals = partial(_number, float)
    try:
        given = json.loads(text, parse_int=partial(_number, int), parse_float=reals, parse_constant=reals)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"its settings must be JSON, got {error}") from None
    if isinstance(given, dict) and (type(given.get("format")) is not int or given["format"] != FORMAT):
        raise ValueError(f"its settings must be of format {FORMAT}, got format {shown(given.get('format'))}")
    check("its settings", given, _HEADER, limits)
    recipe, swap = given["recipe"], given["swap"]
    if recipe is not None:
        check_recipe(recipe, limits)
        check("its settings", {"swap": swap}, {"swap": kinds.NOTHING}, limits)
    elif not isinstance(swap, dict) or len(swap) > limits.layers:
        raise ValueError(f"its swap must map up to {limits.layers} names of submodules to swaps, got {shown(swap)}")
    return {**given, "recipe": tuples(recipe)}


def _plain(value: Any) -> dict[str, Any]:
    if isinstance(value, Lattice):
        return value.settings()
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")


def _number(kind: type, digits: str) -> Any:
    if len(digits) > 30 or not math.isfinite(float(digits)):
        raise ValueError(f"its settings must hold finite numbers of up to 30 characters, got {shown(digits)}")
    return kind(digits)
