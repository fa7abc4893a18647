"""Parse and validate the JSON header of a saved file, which describes its model."""

import json
import math
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from torchrope.integrations.checkpoints.describing import updated
from torchrope.integrations.checkpoints.settings import (
    FLAG,
    LABEL,
    MAPPING,
    NOTHING,
    SWAP_LATTICE,
    WIDTH,
    Kind,
    Limits,
    check,
    each,
    matching,
    one_of,
    shown,
)

FORMAT = 1
REBUILDERS = {
    "timm": "torchrope.integrations.checkpoints.builders.timm",
    "transformers": "torchrope.integrations.checkpoints.builders.transformers",
    "torchrope": "torchrope.integrations.checkpoints.builders.torchrope",
}
"""Module that rebuilds a model, by the library of the model."""

_LONGEST = 2**24
_ANY = Kind("", lambda value, _: True)  # validated separately
_HEADER = {"format": _ANY, "torchrope": LABEL, "library": one_of(*REBUILDERS) | NOTHING, "recipe": _ANY, "swap": _ANY}
_SWAP = {"encodings": _ANY, "keep_position_tables": FLAG, "keep_rotation": FLAG, "lattices": _ANY, "channels": _ANY}
_ENCODING = {"class": matching(r"\w{1,200}", "a name"), "arguments": MAPPING}
_CHANNELS = each(WIDTH, most=2**16) | NOTHING


@dataclass(frozen=True)
class Header:
    """Data from which a model is rebuilt, apart from its tensors.

    Attributes:
        library: The library that builds the model, or None if the caller must pass the model.
        recipe: Arguments from which the library builds it; None without a library.
        swap: The swapped encodings and their settings, or None.
        towers: If library is None, the swap of each swapped submodule by its name in the model.
    """

    library: str | None
    recipe: dict[str, Any] | None
    swap: dict[str, Any] | None
    towers: dict[str, dict[str, Any]]


def read_header(text: str, limits: Limits) -> Header:
    """Parse settings and check their names, types and sizes; sizes are bounded by those of the tensors.

    Raises:
        ValueError: the first invalid setting.
    """
    given = _parsed(text)
    if isinstance(given, dict) and (type(given.get("format")) is not int or given["format"] != FORMAT):
        raise ValueError(f"its settings must be of format {FORMAT}, got format {shown(given.get('format'))}")
    check("its settings", given, _HEADER, limits)
    if given["library"] is None:
        _check_towers(given["recipe"], given["swap"], limits)
        return Header(None, None, None, {name: _updated(swap) for name, swap in given["swap"].items()})
    import_module(REBUILDERS[given["library"]]).check_recipe(given["recipe"], limits)
    swap = given["swap"]
    if isinstance(swap, dict) and isinstance(swap.get("encodings"), list):  # older files have no channels
        swap = {"channels": [None for _ in swap["encodings"]], **swap}
    if swap is not None:
        _check_swap(swap, limits)
        swap = _updated(swap)
    return Header(given["library"], tuples(given["recipe"]), swap, {})


def _updated(swap: dict[str, Any]) -> dict[str, Any]:
    return {**swap, "encodings": [updated(one) for one in swap["encodings"]]}


def _parsed(text: str) -> Any:
    """Parse JSON with finite numbers that fit 64 bits and without duplicate names."""
    if len(text) > _LONGEST:
        raise ValueError(f"its settings must be up to {_LONGEST:,} characters, got {len(text):,}")
    try:
        return json.loads(
            text, object_pairs_hook=_once, parse_int=_fitting, parse_float=_finite, parse_constant=_finite
        )
    except json.JSONDecodeError as error:
        raise ValueError(f"its settings must be JSON, got {error}") from None
    except RecursionError:
        raise ValueError("its settings must be JSON as `save` writes it, got brackets nested too deeply") from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    settings = dict(pairs)
    if len(settings) < len(pairs):
        raise ValueError(
            f"names of its settings must be unique, got a duplicate among {shown([name for name, _ in pairs])}"
        )
    return settings


def _fitting(digits: str) -> int:
    if len(digits) > 19:  # sign included; fits into 64 bits
        raise ValueError(f"its settings must hold integers of up to 19 characters, got {shown(digits)}")
    return int(digits)


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"its settings must hold finite numbers, got {shown(digits)}")
    return number


def _check_towers(recipe: Any, swaps: Any, limits: Limits) -> None:
    if recipe is not None:
        raise ValueError(f"its recipe must be null if its library is null, got {shown(recipe)}")
    if not isinstance(swaps, dict) or len(swaps) > limits.layers:
        raise ValueError(f"its swap must map up to {limits.layers} names of submodules to swaps, got {shown(swaps)}")
    for swap in swaps.values():
        _check_swap(swap, limits)


def _check_swap(swap: Any, limits: Limits) -> None:
    check("its swap", swap, _SWAP, limits)
    for name in ("encodings", "lattices", "channels"):
        if not isinstance(swap[name], list) or len(swap[name]) > limits.layers:
            raise ValueError(f"{name} of its swap must be a list of up to {limits.layers}, got {shown(swap[name])}")
    for one in swap["encodings"]:
        check("each of the encodings of its swap", one, _ENCODING, limits)
    for one in swap["lattices"]:
        check("each of the lattices of its swap", one, SWAP_LATTICE, limits, partly=True)
    for one in swap["channels"]:
        if not _CHANNELS.holds(one, limits):
            rule = limits.filled(_CHANNELS.rule)
            raise ValueError(f"each of the channels of its swap must be {rule}, got {shown(one)}")
    for name in ("lattices", "channels"):
        if len(swap[name]) != len(swap["encodings"]):
            received = f"{len(swap[name])} for {len(swap['encodings'])} encodings"
            raise ValueError(f"{name} of its swap must be one for each encoding, got {received}")


def tuples(value: Any) -> Any:
    """Convert the lists of JSON to tuples, recursively."""
    if isinstance(value, dict):
        return {name: tuples(part) for name, part in value.items()}
    return tuple(tuples(part) for part in value) if isinstance(value, list) else value
