"""The header of a saved file, which describes its model: JSON, validated as a whole before any of it is used."""

import json
import math
from dataclasses import dataclass
from importlib import import_module
from typing import Any, get_args

from torchrope.integrations.own_rotation import Divisor
from torchrope.integrations.settings import (
    FLAG,
    LABEL,
    MAPPING,
    NOTHING,
    NUMBER,
    NUMBERS,
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
    "timm": "torchrope.integrations.timm",
    "transformers": "torchrope.integrations.transformers",
    "torchrope": "torchrope.integrations.own",
}
"""The library that builds a model, and our module that builds it."""

_LONGEST = 2**24
_ANY = Kind("", lambda value, _: True)  # looked at on its own
_HEADER = {"format": _ANY, "torchrope": LABEL, "library": one_of(*REBUILDERS) | NOTHING, "recipe": _ANY, "swap": _ANY}
_SWAP = {"encodings": _ANY, "keep_ape": FLAG, "keep_rotation": FLAG, "lattices": _ANY, "channels": _ANY}
_ENCODING = {"class": matching(r"\w{1,200}", "a name"), "arguments": MAPPING}
_LATTICE: dict[str, Kind] = {
    "spacing": NUMBERS,
    "origin": NUMBERS,
    "offset": NUMBER,
    "per": one_of(*get_args(Divisor)),
    "shift": NUMBER,
    "stretch": NUMBER,
    "rescale": NUMBER,
}
_CHANNELS = each(WIDTH, most=2**16) | NOTHING


@dataclass(frozen=True)
class Header:
    """What rebuilds a model around its tensors.

    Attributes:
        library: Which one builds it, or None where the reader must.
        recipe: What that library builds it from, None without one.
        swap: The encodings that are put into it, and how; or None.
        towers: The same for each swapped part of a model that no library builds, by its name in the model.
    """

    library: str | None
    recipe: dict[str, Any] | None
    swap: dict[str, Any] | None
    towers: dict[str, dict[str, Any]]


def read_header(text: str, limits: Limits) -> Header:
    """The settings of a file, each of a kind that is known and of a size that its tensors explain.

    Raises:
        ValueError: the first that is not.
    """
    given = _parsed(text)
    if isinstance(given, dict) and (type(given.get("format")) is not int or given["format"] != FORMAT):
        raise ValueError(f"its settings must be of format {FORMAT}, got format {shown(given.get('format'))}")
    check("its settings", given, _HEADER, limits)
    if given["library"] is None:
        _check_towers(given["recipe"], given["swap"], limits)
        return Header(None, None, None, given["swap"])
    import_module(REBUILDERS[given["library"]]).check_recipe(given["recipe"], limits)
    swap = given["swap"]
    if isinstance(swap, dict) and isinstance(swap.get("encodings"), list):  # files of before have all in order
        swap = {"channels": [None for _ in swap["encodings"]], **swap}
    if swap is not None:
        _check_swap(swap, limits)
    return Header(given["library"], tuples(given["recipe"]), swap, {})


def _parsed(text: str) -> Any:
    """Read JSON whose numbers are finite and fit 64 bits, and whose names come once."""
    if len(text) > _LONGEST:
        raise ValueError(f"its settings must be up to {_LONGEST:,} characters, got {len(text):,}")
    try:
        return json.loads(
            text, object_pairs_hook=_once, parse_int=_fitting, parse_float=_finite, parse_constant=_finite
        )
    except json.JSONDecodeError as error:
        raise ValueError(f"its settings must be JSON, got {error}") from None
    except RecursionError:
        raise ValueError("its settings must be JSON as `save` writes it, got brackets within too many others") from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    settings = dict(pairs)
    if len(settings) < len(pairs):
        raise ValueError(
            f"its settings must come once each, got a name twice among {shown([name for name, _ in pairs])}"
        )
    return settings


def _fitting(digits: str) -> int:
    if len(digits) > 19:  # 64 bits hold no more
        raise ValueError(f"its settings must hold numbers of up to 18 digits, got {shown(digits)}")
    return int(digits)


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"its settings must hold finite numbers, got {shown(digits)}")
    return number


def _check_towers(recipe: Any, swaps: Any, limits: Limits) -> None:
    if recipe is not None:
        raise ValueError(f"its recipe must be null where no library builds it, got {shown(recipe)}")
    if not isinstance(swaps, dict) or len(swaps) > limits.layers:
        raise ValueError(f"its swap must be up to {limits.layers} by the names of parts, got {shown(swaps)}")
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
        check("each of the lattices of its swap", one, _LATTICE, limits, partly=True)
    for one in swap["channels"]:
        if not _CHANNELS.holds(one, limits):
            rule = limits.filled(_CHANNELS.rule)
            raise ValueError(f"each of the channels of its swap must be {rule}, got {shown(one)}")
    for name in ("lattices", "channels"):
        if len(swap[name]) != len(swap["encodings"]):
            came = f"{len(swap[name])} for {len(swap['encodings'])} encodings"
            raise ValueError(f"{name} of its swap must be one for each encoding, got {came}")


def tuples(value: Any) -> Any:
    """JSON has lists alone; sizes are tuples."""
    if isinstance(value, dict):
        return {name: tuples(part) for name, part in value.items()}
    return tuple(tuples(part) for part in value) if isinstance(value, list) else value
