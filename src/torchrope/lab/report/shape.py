"""Check values read from JSON against the shape that a report can show, and name the place that differs."""

from typing import Any

_WORDS = {float: "a number", int: "a whole number", str: "text", bool: "true or false", dict: "an object"}
_LARGEST = {int: 10**15, float: 1e300}  # beyond, drawing overflows


def check(value: Any, shape: Any, where: str) -> None:
    """Raise ValueError, naming the place, unless a value has a shape.

    Args:
        value: What was read.
        shape: A type; `{key: shape}`, where a key that ends in "?" may be absent or null; `[shape]`, a list of any
            length; `(a, b)`, a list of exactly those; `object`, anything.
        where: What the value is called.
    """
    if isinstance(shape, dict):
        _check_object(value, shape, where)
    elif isinstance(shape, list | tuple):
        _check_list(value, shape, where)
    elif shape is not object:
        check_kind(value, shape, where)


def check_kind(value: Any, kind: type, where: str) -> None:
    """Raise ValueError unless a value is of a type, and a number finite; true and false are no numbers."""
    accepted = (int, float) if kind is float else kind
    is_bool_for_number = isinstance(value, bool) and kind is not bool
    if not isinstance(value, accepted) or is_bool_for_number:
        raise ValueError(f"{where} must be {_WORDS[kind]}, got {short(value)}")
    if isinstance(value, int | float):
        largest = _LARGEST[float if isinstance(value, float) else int]
        if not abs(value) <= largest:  # nor NaN
            raise ValueError(f"{where} must lie within ±{largest:g}, got {short(value)}")


def short(value: Any) -> str:
    """A value for an error: at most 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _check_object(value: Any, shape: dict[str, Any], where: str) -> None:
    check_kind(value, dict, where)
    for key, inner in shape.items():
        name = key.removesuffix("?")
        if value.get(name) is not None:
            check(value[name], inner, f"{where}.{name}")
        elif name == key:
            raise ValueError(f"{where} must have {name!r}, got {short(sorted(value))}")


def _check_list(value: Any, shape: list[Any] | tuple[Any, ...], where: str) -> None:
    if not isinstance(value, list):
        raise ValueError(f"{where} must be a list, got {short(value)}")
    if isinstance(shape, tuple) and len(value) != len(shape):
        raise ValueError(f"{where} must hold {len(shape)} items, got {len(value)}")
    for index, item in enumerate(value):
        check(item, shape[0], f"{where}[{index}]")
