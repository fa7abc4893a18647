"""Parse and validate the JSON header of a saved file, which describes its model."""

import json
import math
from functools import partial
from importlib import import_module
from typing import Any

from torchrope.integrations.checkpoints import settings as kinds
from torchrope.integrations.checkpoints.settings import Kind, Limits, check, shown, tuples

FORMAT = 1
REBUILDERS = {
    "timm": "torchrope.integrations.checkpoints.builders.timm",
    "transformers": "torchrope.integrations.checkpoints.builders.transformers",
    "torchrope": "torchrope.integrations.checkpoints.builders.torchrope",
}
"""Module that rebuilds a model, by the library of the model."""

_LONGEST = 2**24
_ANY = Kind("", lambda value, _: True)  # validated separately
_HEADER = {
    "format": _ANY,
    "torchrope": kinds.LABEL,
    "library": kinds.one_of(*REBUILDERS) | kinds.NOTHING,
    "recipe": _ANY,
    "swap": _ANY,
    "frozen": kinds.each(kinds.EXTENT, most=8) | kinds.NOTHING,
}


def read_header(text: str, limits: Limits) -> dict[str, Any]:
    """Parse settings and check their names, types and sizes; sizes are bounded by those of the tensors.

    Returns:
        "library", which builds the model from "recipe"; "swaps", not yet checked, by name of the submodule; and
        "frozen", the shape of the input that the swapped model was frozen for. Library and recipe are None if the
        caller must pass the model. Otherwise the name is None, for the submodule that `torchrope.swap` changes.

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
    swaps = swap if library is None else {} if swap is None else {None: swap}
    return {**given, "recipe": tuples(recipe), "swaps": swaps}


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
