"""Validation of a file's settings for model builders: allowed names, types and sizes, checked before use."""

import re
import reprlib
import textwrap
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, get_args

from torchrope.lattice import Divisor

_MOST_LAYERS = 64
_WIDEST = 2**16
_LARGEST = 2**24
_REFUSALS = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


@dataclass(frozen=True)
class Limits:
    """Upper limits for numbers in settings, derived from the tensors of the file.

    Attributes:
        tensors: Number of tensors.
        longest: The largest extent of any tensor.
    """

    tensors: int = 0
    longest: int = 0

    @property
    def layers(self) -> int:
        """Largest number of layers: that of tensors, at least 64, because feature models remove layers once built."""
        return max(self.tensors, _MOST_LAYERS)

    @property
    def width(self) -> int:
        """Limit of channels, heads and classes: the longest extent, or 65,536 if larger."""
        return max(self.longest, _WIDEST)

    def filled(self, rule: str) -> str:
        """Substitute these numbers for their {names} in a rule."""
        return rule.format(tensors=self.tensors, longest=self.longest, layers=self.layers, width=self.width)


@dataclass(frozen=True)
class Kind:
    """A constraint on the value of a setting.

    Attributes:
        rule: Description of the constraint, with {names} of `Limits`.
        holds: Returns whether a JSON value satisfies it.
    """

    rule: str
    holds: Callable[[Any, Limits], bool]

    def __or__(self, other: "Kind") -> "Kind":
        return Kind(f"{self.rule}, or {other.rule}", lambda value, at: self.holds(value, at) or other.holds(value, at))


def whole(rule: str, least: Callable[[Limits], int], most: Callable[[Limits], int]) -> Kind:
    """Constrain to an integer between two limits."""
    return Kind(rule, lambda value, at: type(value) is int and least(at) <= value <= most(at))


def one_of(*choices: Any) -> Kind:
    """Constrain to one of the given values."""
    return Kind(
        " or ".join(map(repr, choices)),
        lambda value, _: any(type(value) is type(choice) and value == choice for choice in choices),
    )


def each(kind: Kind, most: int = 16) -> Kind:
    """Constrain to a list of values of one kind."""
    return Kind(
        f"a list of up to {most} of ({kind.rule})",
        lambda value, at: isinstance(value, list) and len(value) <= most and all(kind.holds(one, at) for one in value),
    )


def named(keys: Kind, values: Kind) -> Kind:
    """Constrain to a mapping with at most `Limits.width` entries."""
    return Kind(
        f"a mapping of up to {{width}} from ({keys.rule}) to ({values.rule})",
        lambda value, at: (
            isinstance(value, dict)
            and len(value) <= at.width
            and all(keys.holds(name, at) and values.holds(one, at) for name, one in value.items())
        ),
    )


def matching(pattern: str, rule: str) -> Kind:
    """Constrain to a string that matches a pattern."""
    return Kind(rule, lambda value, _: isinstance(value, str) and re.fullmatch(pattern, value) is not None)


NOTHING = Kind("null", lambda value, _: value is None)
FLAG = Kind("true or false", lambda value, _: isinstance(value, bool))
NUMBER = Kind("a number", lambda value, _: type(value) in (int, float))
SHARE = Kind("a number from 0 to 1", lambda value, _: type(value) in (int, float) and 0 <= value <= 1)
LAYERS = whole(
    "a whole number from 0 to {layers}, for {tensors} tensors in the file", lambda _: 0, lambda at: at.layers
)
LAYER = whole("a layer from -{layers} to {layers}", lambda at: -at.layers, lambda at: at.layers)
WIDTH = whole(
    "a whole number from 0 to {width}, for tensors of up to {longest} in the file", lambda _: 0, lambda at: at.width
)
EXTENT = whole(f"a whole number from 1 to {_LARGEST:,}", lambda _: 1, lambda _: _LARGEST)
TOKEN = whole("a whole number of 32 bits", lambda _: -(2**31), lambda _: 2**31)
MAPPING = Kind("settings by name", lambda value, _: isinstance(value, dict))
WORD = matching(r"[A-Za-z0-9_]{0,64}", "a name of up to 64 letters and digits")
LABEL = matching(r"(?s).{0,1000}", "text of up to 1,000 characters")
ENCODING = matching(r"[A-Za-z0-9:+ ._-]{1,256}", "the name of an encoding")
EXTENTS = EXTENT | each(EXTENT)
WIDTHS = WIDTH | each(WIDTH, most=1024)
NUMBERS = NUMBER | each(NUMBER)
DEPTHS = Kind(
    "a list of up to 16 whole numbers that add up to {layers} at most, for {tensors} tensors in the file",
    lambda value, at: each(LAYERS).holds(value, at) and sum(value) <= at.layers,
)

ENCODINGS: dict[str, Kind] = {
    "block_size": WIDTH | NOTHING,
    "rotary_dim": WIDTH | NOTHING,
    "shared_heads": FLAG,
    "base": NUMBER | NOTHING,
    "distribution": one_of("uniform", "normal"),
    "interval": one_of("[0, 1)", "[0, 1]", "[-1, 1]") | NOTHING,
    "grouped": FLAG,
    "order": one_of("chunked", "interleaved", "video"),
    "init_scale": NUMBER,
    "min_frequency": NUMBER | NOTHING,
    "max_frequency": NUMBER,
    "zero_fraction": SHARE,
    "sections": each(WIDTH) | NOTHING,
    "heading_pairs": WIDTH | NOTHING,
    "num_directions": WIDTH,
}
"""Arguments of torchrope's encodings, other than the axes, heads and channels of their layer."""
SWAP_LATTICE: dict[str, Kind] = {
    "spacing": NUMBERS,
    "origin": NUMBERS,
    "offset": NUMBER,
    "per": one_of(*get_args(Divisor)),
    "shift": NUMBER,
    "stretch": NUMBER,
    "rescale": NUMBER,
}
"""Settings of `Lattice` for the tokens of a swapped model."""
_DIVISOR = one_of(*get_args(Divisor)) | whole("an axis from -8 to 7", lambda _: -8, lambda _: 7)
LATTICE: dict[str, Kind] = SWAP_LATTICE | {
    "offset": NUMBERS,
    "per": _DIVISOR | each(_DIVISOR, most=8),
    "train_sizes": each(EXTENT, most=8),
    "unit": NUMBERS,
    "patch_size": EXTENTS,
    "periods": each(NUMBER | NOTHING, most=8),
    "cell": NUMBERS,
    "intensity": NUMBER,
}
"""Settings of `Lattice` for the tokens of a model of torchrope."""


class UnknownModel(ValueError):
    """Raised for a model of a class, or built in a way, that no library rebuilds from a description."""


def check(what: str, given: Any, kinds: Mapping[str, Kind], limits: Limits, *, partly: bool = False) -> None:
    """Check that settings are complete, known, of the right type and within limits.

    Args:
        what: Name of the settings in the error.
        given: The settings, parsed from JSON.
        kinds: Constraint of each setting.
        limits: Upper limits for numbers.
        partly: Whether settings may be omitted.

    Raises:
        ValueError: the first invalid setting, with its constraint.
    """
    if not isinstance(given, dict):
        raise ValueError(f"{what} must be settings by name, got {shown(given)}")
    unknown = [name for name in given if name not in kinds]
    missing = [] if partly else [name for name in kinds if name not in given]
    if unknown or missing:
        rule = "among those that a file may set" if partly else f"{', '.join(kinds)}, all of them"
        raise ValueError(f"{what} must be {rule}, got {shown(unknown[0]) if unknown else f'no {missing[0]}'}")
    for name, value in given.items():
        if not kinds[name].holds(value, limits):
            raise ValueError(f"{name} of {what} must be {limits.filled(kinds[name].rule)}, got {shown(value)}")


def shown(value: Any) -> str:
    """Return a shortened repr of a value of a file."""
    return reprlib.repr(value)


def one_line(error: BaseException) -> str:
    """Return the message of an error in one line of bounded length."""
    kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
    return kind + textwrap.shorten(str(error), 500, placeholder=" ...")


@contextmanager
def errors_in_one_line(what: str) -> Iterator[None]:
    """Convert errors raised by a library's constructor to ValueError with a message of one line."""
    try:
        yield
    except _REFUSALS as error:
        raise ValueError(f"{what}: {one_line(error)}") from None
