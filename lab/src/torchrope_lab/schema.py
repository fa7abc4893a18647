"""Build dataclasses from parsed JSON: every value is checked against its type; errors name the invalid entry."""

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

Kind = TypeVar("Kind")

_LARGEST = {int: 10**15, float: 1e300}  # larger values overflow in plots
_WORDS = {float: "a number", int: "a whole number", str: "text", bool: "true or false", dict: "an object"}
_SCALARS = {float, int, str, bool}


def build(kind: type[Kind], value: Any, where: str) -> Kind:
    """Build a dataclass, and nested ones, from a parsed JSON object. Unknown names are ignored.

    Args:
        kind: The dataclass. Fields with a default may be absent or null.
        value: The object.
        where: Name of the object in error messages.

    Raises:
        ValueError: a name is missing, a value is of another type, or the dataclass raises ValueError; the message is
            one line.
    """
    check_type(value, dict, where)
    hints = get_type_hints(kind)
    given = {}
    for each in fields(kind):  # type: ignore[arg-type]
        optional = each.default is not MISSING or each.default_factory is not MISSING
        stored = value.get(each.name)
        if each.name not in value and not optional:
            raise ValueError(f"{where} must have {each.name!r}, got {short(sorted(value))}")
        if stored is not None or not optional:
            given[each.name] = _convert(hints[each.name], stored, f"{where}.{each.name}")
    try:
        return kind(**given)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def check_type(value: Any, kind: type, where: str) -> None:
    """Raise ValueError unless a value is of a type, and a number finite; true and false are not numbers."""
    accepted = (int, float) if kind is float else kind
    is_bool_for_number = isinstance(value, bool) and kind is not bool
    if not isinstance(value, accepted) or is_bool_for_number:
        raise ValueError(f"{where} must be {_WORDS[kind]}, got {short(value)}")
    if isinstance(value, int | float):
        largest = _LARGEST[float if isinstance(value, float) else int]
        if not abs(value) <= largest:  # also rejects NaN
            raise ValueError(f"{where} must be within ±{largest:g}, got {short(value)}")


def short(value: Any) -> str:
    """Format a value for an error message: one line of at most 60 characters."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else text[:57] + "..."


def _convert(hint: Any, value: Any, where: str) -> Any:
    if hint is Any:
        return value
    if isinstance(hint, type) and is_dataclass(hint):
        return build(hint, value, where)
    origin, inner = get_origin(hint), get_args(hint)
    if origin is UnionType:
        return _convert_union(inner, value, where)
    if origin is Literal:
        if value not in inner:
            raise ValueError(f"{where} must be one of {', '.join(inner)}, got {short(value)}")
        return value
    is_named = isinstance(hint, type) and issubclass(hint, tuple) and hasattr(hint, "_fields")
    if is_named or (origin is tuple and Ellipsis not in inner):  # of fixed length
        kinds = [*get_type_hints(hint).values()] if is_named else [*inner]
        if not isinstance(value, list) or len(value) != len(kinds):
            raise ValueError(f"{where} must be a list of {len(kinds)}, got {short(value)}")
        items = [
            _convert(kind, item, f"{where}[{at}]") for at, (kind, item) in enumerate(zip(kinds, value, strict=True))
        ]
        return hint(*items) if is_named else tuple(items)
    if origin in (Sequence, tuple):
        if not isinstance(value, list):
            raise ValueError(f"{where} must be a list, got {short(value)}")
        return (tuple if origin is tuple else list)(
            _convert(inner[0], item, f"{where}[{index}]") for index, item in enumerate(value)
        )
    if origin in (Mapping, dict):
        check_type(value, dict, where)
        return {key: _convert(inner[1], item, f"{where}.{key}") for key, item in value.items()}
    check_type(value, hint, where)
    return value


def _convert_union(kinds: Sequence[Any], value: Any, where: str) -> Any:
    """Convert to the first type that fits; a union of scalars accepts any of them."""
    if value is None and NoneType in kinds:
        return None
    others = [kind for kind in kinds if kind is not NoneType]
    if len(others) > 1 and set(others) <= _SCALARS:
        if not isinstance(value, tuple(others)):
            raise ValueError(f"{where} must be a number, text, true, false or null, got {short(value)}")
        return value
    for kind in others[:-1]:
        try:
            return _convert(kind, value, where)
        except ValueError:
            continue
    return _convert(others[-1], value, where)
