"""Checks of a file: names, dtypes and shapes of its tensors, arguments that it may set and values of each."""

import math
import operator
import re
import textwrap
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from reprlib import repr as shown
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules

from torchrope.encodings import AbsoluteEncoding, Encoding, ScoreBias
from torchrope.encodings.names import annotations_of
from torchrope.lattice import Lattice

_LARGEST = 2**24
_REFUSALS = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


@dataclass(frozen=True)
class Limits:
    """Upper limits for numbers in settings, derived from the tensors of the file."""

    tensors: int = 0
    longest: int = 0  # extent of any tensor
    layers: int = 64  # or the number of tensors if larger; `Features` drops layers once built
    width: int = 2**16  # of channels, heads and classes; or the longest extent if larger


@dataclass(frozen=True)
class Kind:
    """A constraint on the value of a setting, in words, with {names} of `Limits`, and as a function of JSON values."""

    rule: str
    holds: Callable[[Any, Limits], bool]

    def __or__(self, other: "Kind") -> "Kind":
        return Kind(f"{self.rule}, or {other.rule}", lambda value, at: self.holds(value, at) or other.holds(value, at))


def whole(rule: str, allowed: Callable[[Limits], range]) -> Kind:
    """Constrain to an integer in a range."""
    return Kind(rule, lambda value, at: type(value) is int and value in allowed(at))


def one_of(*choices: Any) -> Kind:
    """Constrain to one of the given values."""
    return Kind(
        " or ".join(map(repr, choices)).replace("{", "{{").replace("}", "}}"),
        lambda value, _: any(type(value) is type(choice) and value == choice for choice in choices),
    )


def each(kind: Kind, most: int = 16) -> Kind:
    """Constrain to a list of values of one kind."""
    return Kind(
        f"a list of up to {most:,} of ({kind.rule})",
        lambda value, at: isinstance(value, list) and len(value) <= most and all(kind.holds(x, at) for x in value),
    )


def named(keys: Kind, values: Kind) -> Kind:
    """Constrain to a mapping with at most `Limits.width` entries."""
    return Kind(
        f"a mapping of up to {{width}} from ({keys.rule}) to ({values.rule})",
        lambda value, at: (
            isinstance(value, dict)
            and len(value) <= at.width
            and all(keys.holds(name, at) and values.holds(entry, at) for name, entry in value.items())
        ),
    )


def matching(pattern: str, rule: str) -> Kind:
    """Constrain to a string that matches a pattern."""
    return Kind(rule, lambda value, _: isinstance(value, str) and re.fullmatch(pattern, value) is not None)


def _is_data(value: Any, at: Limits) -> bool:
    parts = list(value.values()) if isinstance(value, dict) else value
    if isinstance(parts, list):
        return len(parts) <= at.width and all(_is_data(part, at) for part in parts)
    return value is None or isinstance(value, float) or (isinstance(value, int) and abs(value) <= _LARGEST)


def _is_lattice(value: Any, at: Limits) -> bool:
    kinds = settable(Lattice)
    known = isinstance(value, dict) and kinds.keys() >= value.keys()
    return known and all(kinds[name].holds(part, at) for name, part in value.items())


NOTHING = Kind("null", lambda value, _: value is None)
FLAG = Kind("true or false", lambda value, _: isinstance(value, bool))
NUMBER = Kind("a number", lambda value, _: type(value) in (int, float))
LAYERS = whole("a whole number from 0 to {layers}, for {tensors} tensors in the file", lambda at: range(at.layers + 1))
_FOR = ", for tensors of up to {longest} in the file"
WIDTH = whole("a whole number from 0 to {width}" + _FOR, lambda at: range(at.width + 1))
INTEGER = whole("a whole number from -{width} to {width}" + _FOR, lambda at: range(-at.width, at.width + 1))
EXTENT = whole(f"a whole number from 1 to {_LARGEST:,}", lambda _: range(1, _LARGEST + 1))
MAPPING = Kind("settings by name", lambda value, _: isinstance(value, dict))
LABEL = matching(r"(?s).{0,1000}", "text of up to 1,000 characters")
DATA = Kind(f"true, false, null or numbers, whole ones of up to {_LARGEST:,}, or lists or mappings of these", _is_data)
PART = Kind("an encoding", lambda value, _: isinstance(value, dict))
LATTICE = Kind("settings of a Lattice", _is_lattice)
PARTS = Kind(
    "a list of up to {layers} encodings, for {tensors} tensors in the file",
    lambda value, at: isinstance(value, list) and len(value) <= at.layers,
)
DEPTHS = Kind(
    "a list of up to 16 whole numbers that add up to {layers} at most, for {tensors} tensors in the file",
    lambda value, at: each(LAYERS).holds(value, at) and sum(value) <= at.layers,
)
_WHOLE = {"depth": LAYERS} | dict.fromkeys(("input_size", "patch_size", "window_size", "train_sizes"), EXTENT)
"""Limits of whole numbers that are not `INTEGER`, by the name of the argument."""


def settable(build: Callable[..., Any]) -> dict[str, Kind]:
    """Return the arguments that a file may set, plain data by their annotations, no text, functions or classes."""
    kinds = {name: _kind(hint, _WHOLE.get(name, INTEGER)) for name, hint in annotations_of(build).items()}
    return {name: kind for name, kind in kinds.items() if kind is not None}


def _kind(hint: Any, integer: Kind) -> Kind | None:
    """Return the constraint of an annotation, None if a file must not set its argument."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Literal:
        return one_of(*parts)
    if origin in (Union, UnionType, Sequence, list, tuple, Mapping, dict):
        kinds = [_kind(part, integer) for part in (parts[1:] if origin in (Mapping, dict) else parts)]
        allowed = [kind for kind in kinds if kind is not None]
        kind = reduce(operator.or_, allowed) if allowed else None
        if kind is None or origin in (Union, UnionType):
            return kind
        return named(LABEL, kind) if origin in (Mapping, dict) else each(kind, most=8 if integer is EXTENT else 1024)
    plain = {float: NUMBER, bool: FLAG, NoneType: NOTHING, Any: DATA, Lattice: LATTICE, Encoding: PART}
    return integer if hint is int else plain.get(hint)


def check(what: str, settings: Any, kinds: Mapping[str, Kind], limits: Limits, *, partly: bool = False) -> None:
    """Raise ValueError unless settings, parsed from JSON, are known, valid and, if not partly given, complete."""
    if not isinstance(settings, dict):
        raise ValueError(f"{what} must be settings by name, got {shown(settings)}")
    unknown = [name for name in settings if name not in kinds]
    missing = [] if partly else [name for name in kinds if name not in settings]
    if unknown or missing:
        rule = "among those that a file may set" if partly else f"{', '.join(kinds)}, all of them"
        raise ValueError(f"{what} must be {rule}, got {shown(unknown[0]) if unknown else f'no {missing[0]}'}")
    for name, value in settings.items():
        if not kinds[name].holds(value, limits):
            raise ValueError(f"{name} of {what} must be {kinds[name].rule.format(**vars(limits))}, got {shown(value)}")


def tuples(value: Any) -> Any:
    """Convert the lists of JSON to tuples, recursively."""
    if isinstance(value, dict):
        return {name: tuples(part) for name, part in value.items()}
    return tuple(tuples(part) for part in value) if isinstance(value, list) else value


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


FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
DTYPES = (*FLOATS, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
Manifest = Mapping[str, Tensor]
"""Tensors by name, of which only dtypes and shapes are used."""


def limits_of(manifest: Manifest) -> Limits:
    """Return the largest values allowed in settings of a model with these tensors, whose names are checked."""
    for name in manifest:
        check_name(name)
    filled = [tensor.shape for tensor in manifest.values() if tensor.numel()]  # empty ones may claim any extent
    count, longest = len(manifest), max((extent for shape in filled for extent in shape), default=0)
    return Limits(count, longest, max(count, Limits.layers), max(longest, Limits.width))


def check_name(name: Any) -> None:
    """Raise ValueError if a tensor's name is not printable or too long."""
    if not isinstance(name, str) or not name.isprintable() or len(name) > 500:
        raise ValueError(f"names of tensors must be printable text of up to 500 characters, got {shown(name)}")


@contextmanager
def budget(manifest: Manifest) -> Iterator[None]:
    """Raise ValueError if models register more tensors or numbers in this thread than the manifest permits."""
    stored = sum(math.prod(tensor.shape) for tensor in manifest.values())
    # More than the file holds, because `Features` drops layers once built, and buffers may not be saved.
    limits = {
        "tensors": max(4096, 4 * len(manifest)),
        "numbers in parameters": max(2**28, 32 * stored),
        "numbers in buffers": max(2**25, 4 * stored),
    }
    spent = dict.fromkeys(limits, 0)
    thread = threading.get_ident()

    def spend(tensor: Tensor | None, category: str) -> None:
        if tensor is None or threading.get_ident() != thread:
            return
        spent["tensors"] += 1
        spent[category] += tensor.numel()
        for what, limit in limits.items():
            if spent[what] > limit:
                held = f"a file of {len(manifest)} tensors with {stored:,} numbers"
                raise ValueError(f"a model for {held} must have at most {limit:,} {what}, got more")

    with (
        modules.register_module_parameter_registration_hook(lambda _, __, value: spend(value, "numbers in parameters")),
        modules.register_module_buffer_registration_hook(lambda _, __, value: spend(value, "numbers in buffers")),
    ):
        yield


def described(part: nn.Module) -> str:
    """Return the class of a part and the settings that its `repr` shows, without those of encodings and of training."""
    hidden = isinstance(part, nn.Dropout | Encoding | AbsoluteEncoding | ScoreBias)
    settings = "" if hidden else part.extra_repr()
    return f"{type(part).__name__}({settings})" if settings else type(part).__name__


def differences(received: Mapping[str, str], expected: Mapping[str, str]) -> list[str]:
    """Return the names at which two mappings differ, with both values."""
    names = [name for name in {**expected, **received} if received.get(name) != expected.get(name)]
    values = [(name or "the model", *(side.get(name, "nothing") for side in (received, expected))) for name in names]
    return [f"{name}: {came} instead of {needed}" for name, came, needed in values]


def check_fits(model: nn.Module, manifest: Manifest, rule: str = "its tensors must be those of its model") -> None:
    """Raise ValueError unless tensors match a model's in name, shape and dtype; floating-point dtypes may differ."""
    expected = model.state_dict()
    misfits = []
    for name in {**expected, **manifest}:
        part, stored = expected.get(name), manifest.get(name)
        if stored is None:
            misfits.append(f"no {name}")
        elif part is None:
            misfits.append(f"{name}, which is not in the model")
        elif part.shape != stored.shape:
            misfits.append(f"{name} of {tuple(stored.shape)} instead of {tuple(part.shape)}")
        elif part.dtype != stored.dtype and not {part.dtype, stored.dtype} <= {*FLOATS}:
            misfits.append(f"{name} of {stored.dtype} instead of {part.dtype}")
    if misfits:
        raise ValueError(f"{rule}, got {shortened(misfits)}")


def shortened(mismatches: Sequence[str]) -> str:
    """Return the first three of a list, and the number of the others."""
    more = [f"and {len(mismatches) - 3} more"] if len(mismatches) > 3 else []
    return "; ".join([*mismatches[:3], *more])
