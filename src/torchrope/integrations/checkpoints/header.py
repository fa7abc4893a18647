"""Parse and validate the JSON header of a saved file, which describes its model."""

import json
import math
from functools import partial
from importlib import import_module
from typing import Any

from torchrope.integrations.checkpoints import settings as kinds
from torchrope.integrations.checkpoints.settings import Kind, Limits, check, settable, shown
from torchrope.lattice import Lattice

FORMAT = 1
REBUILDERS = {
    "timm": "torchrope.integrations.checkpoints.builders.timm",
    "transformers": "torchrope.integrations.checkpoints.builders.transformers",
    "torchrope": "torchrope.integrations.checkpoints.builders.torchrope",
}
"""Module that rebuilds a model, by the library of the model."""

_LONGEST = 2**24
_ANY = Kind("", lambda value, _: True)  # validated separately
_LIST = Kind("a list of up to {layers}", lambda value, at: isinstance(value, list) and len(value) <= at.layers)
_HEADER = {
    "format": _ANY,
    "torchrope": kinds.LABEL,
    "library": kinds.one_of(*REBUILDERS) | kinds.NOTHING,
    "recipe": _ANY,
    "swap": _ANY,
    "frozen": kinds.each(kinds.EXTENT, most=8) | kinds.NOTHING,
}
_SWAP = {
    "encodings": _LIST,
    "keep_position_tables": kinds.FLAG,
    "keep_rotation": kinds.FLAG,
    "lattices": _LIST,
    "channels": kinds.each(kinds.each(kinds.WIDTH, most=2**16) | kinds.NOTHING, most=2**16),
}
_ENCODING = {"class": kinds.matching(r"\w{1,200}", "a name"), "arguments": kinds.MAPPING}


def read_header(text: str, limits: Limits) -> dict[str, Any]:
    """Parse settings and check their names, types and sizes; sizes are bounded by those of the tensors.

    Returns:
        "library", which builds the model from "recipe", "swap", None without encodings, and "frozen", the shape of the
        input that the swapped model was frozen for. Library and recipe are None if the caller must pass the model; the
        swap is then one for each submodule, by name.

    Raises:
        ValueError: the first invalid setting.
    """
    given = _parsed(text)
    if isinstance(given, dict) and (type(given.get("format")) is not int or given["format"] != FORMAT):
        raise ValueError(f"its settings must be of format {FORMAT}, got format {shown(given.get('format'))}")
    check("its settings", given, _HEADER, limits)
    library, recipe, swap = given["library"], given["recipe"], given["swap"]
    if library is not None:
        import_module(REBUILDERS[library]).check_recipe(recipe, limits)
    elif recipe is not None:
        raise ValueError(f"its recipe must be null if its library is null, got {shown(recipe)}")
    elif not isinstance(swap, dict) or len(swap) > limits.layers:
        raise ValueError(f"its swap must map up to {limits.layers} names of submodules to swaps, got {shown(swap)}")
    for one in swap.values() if library is None else [] if swap is None else [swap]:
        _check_swap(one, limits)
    return {**given, "recipe": tuples(recipe)}


def _parsed(text: str) -> Any:
    """Parse JSON with finite numbers of bounded length."""
    if len(text) > _LONGEST:
        raise ValueError(f"its settings must be up to {_LONGEST:,} characters, got {len(text):,}")
    reals = partial(_number, float)
    try:
        return json.loads(text, parse_int=partial(_number, int), parse_float=reals, parse_constant=reals)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"its settings must be JSON, got {error}") from None


def _number(kind: type, digits: str) -> Any:
    if len(digits) > 30 or not math.isfinite(float(digits)):
        raise ValueError(f"its settings must hold finite numbers of up to 30 characters, got {shown(digits)}")
    return kind(digits)


def _check_swap(swap: Any, limits: Limits) -> None:
    check("its swap", swap, _SWAP, limits)
    for one in swap["encodings"]:
        check("each of the encodings of its swap", one, _ENCODING, limits)
    for one in swap["lattices"]:
        check("each of the lattices of its swap", one, settable(Lattice), limits, partly=True)
    for name in ("lattices", "channels"):
        if len(swap[name]) != len(swap["encodings"]):
            received = f"{len(swap[name])} for {len(swap['encodings'])} encodings"
            raise ValueError(f"{name} of its swap must be one for each encoding, got {received}")


def tuples(value: Any) -> Any:
    """Convert the lists of JSON to tuples, recursively."""
    if isinstance(value, dict):
        return {name: tuples(part) for name, part in value.items()}
    return tuple(tuples(part) for part in value) if isinstance(value, list) else value
