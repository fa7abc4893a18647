"""Typed values: dataclasses from parsed JSON and YAML, and dataclasses of settings that check their values.

Type hints are the schema; `Annotated` adds rules, as in `lr: PositiveFloat` or `betas: Annotated[list[int], DISTINCT]`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass, make_dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from torchrope_lab.mistakes import Mistake, closest, suggestion

Kind = TypeVar("Kind")

_LARGEST = {int: 10**15, float: 1e300}  # larger values overflow in plots
_WORDS = {float: "a number", int: "a whole number", str: "text", bool: "true or false", dict: "an object"}
_SCALARS = {float, int, str, bool}


@dataclass(frozen=True)
class Rule:
    """A rule about a value of a type."""

    text: str  # what the value must be: "above 0"
    holds: Callable[[Any], bool]  # whether a value of the type follows the rule


def at_least(low: float, high: float = math.inf) -> Rule:
    """Return the rule of finite numbers from `low` to `high`."""
    text = f"{low} or more" if high == math.inf else f"between {low} and {high}"
    return Rule(text, lambda value: low <= value <= high and abs(value) != math.inf)


PositiveInt = Annotated[int, at_least(1)]
NonNegativeInt = Annotated[int, at_least(0)]
PositiveFloat = Annotated[float, Rule("above 0", lambda value: 0 < value < math.inf)]
NonNegativeFloat = Annotated[float, at_least(0)]
ClosedUnit = Annotated[float, at_least(0, 1)]
OpenUnit = Annotated[float, Rule("above 0 and below 1", lambda value: 0 < value < 1)]
Fraction = Annotated[float, Rule("above 0 and at most 1", lambda value: 0 < value <= 1)]
Probability = Annotated[float, Rule("at least 0 and below 1", lambda value: 0 <= value < 1)]
DISTINCT = Rule("different values", lambda values: len(set(values)) == len(values))
NOT_EMPTY = Rule("one value or more", bool)


@dataclass
class Settings:
    """Base class of dataclasses of settings, which checks their values when it is built.

    Attributes:
        prefix: Prefix of the names of settings in errors.

    Raises:
        ValueError: a value is not of its type, or does not follow a rule of its annotation.
    """

    prefix: ClassVar[str] = ""

    def __post_init__(self) -> None:
        for name, hint in get_type_hints(type(self), include_extras=True).items():
            if get_origin(hint) is not ClassVar:
                setattr(self, name, convert(hint, getattr(self, name), f"{self.prefix}{name}"))


def build(kind: type[Kind], value: Any, where: str, *, strict: bool = False) -> Kind:
    """Build a dataclass, and nested ones, from a parsed JSON object; `strict` refuses unknown names."""
    # Fields with a default may be absent, or null. `kind_of` of the dataclass, if it has one, returns the subclass to
    # build from the object.
    check_type(value, dict, where or "a file")
    kind_of: Callable[[Any], type[Kind]] | None = getattr(kind, "kind_of", None)
    kind = kind if kind_of is None else kind_of(value)
    hints = get_type_hints(kind, include_extras=True)
    names = {attribute.name: attribute for attribute in fields(kind)}  # type: ignore[arg-type]
    above = f"{where}." if where else ""
    if unknown := [name for name in value if strict and name not in names]:
        raise Mistake(f"{above}{unknown[0]} must be one of {', '.join(names)}")
    given = {}
    for name, attribute in names.items():
        optional = attribute.default is not MISSING or attribute.default_factory is not MISSING
        stored = value.get(name)
        if name not in value and not optional:
            raise Mistake(f"{where} must have {name!r}, got {short(sorted(value))}")
        if stored is not None or (name in value and (not optional or NoneType in get_args(hints[name]))):
            given[name] = convert(hints[name], stored, f"{above}{name}", strict=strict)
    try:
        return kind(**given)
    except ValueError as error:
        if str(error).startswith("--"):
            raise
        raise Mistake(f"{above}{error}" if issubclass(kind, Settings) else f"{where}: {error}") from None


def check_type(value: Any, kind: type, where: str) -> None:
    """Raise ValueError unless a value is of a type, and a number finite; true and false are not numbers."""
    accepted = (int, float) if kind is float else kind
    is_bool_for_number = isinstance(value, bool) and kind is not bool
    if not isinstance(value, accepted) or is_bool_for_number:
        raise Mistake(f"{where} must be {_WORDS.get(kind, kind.__name__)}, got {short(value)}")
    if isinstance(value, int | float):
        largest = _LARGEST[float if isinstance(value, float) else int]
        if not abs(value) <= largest:  # also rejects NaN
            raise Mistake(f"{where} must be within ±{largest:g}, got {short(value)}")


def require(holds: bool, rule: str, value: Any) -> None:
    """Raise ValueError with a rule and a value unless the rule holds; text is shown without quotes."""
    if not holds:
        raise Mistake(f"{rule}, got {value if isinstance(value, str) else short(value)}")


def short(value: Any) -> str:
    """Format a value for an error message: one line of at most 60 characters."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else text[:57] + "..."


def convert(hint: Any, value: Any, where: str, *, strict: bool = False) -> Any:
    """Convert a parsed value to a type, and check the rules of its annotation."""
    # The type is a scalar, `Literal`, list, tuple, dict, union, dataclass or NamedTuple, or `Annotated` of these;
    # values are lists for tuples, objects for dataclasses unless they are one already.
    origin, inner = get_origin(hint), get_args(hint)
    if hint is Any:
        return value
    if origin is Annotated:
        converted = convert(inner[0], value, where, strict=strict)
        for rule in inner[1:]:
            if isinstance(rule, Rule) and not rule.holds(converted):
                names = isinstance(converted, list) and converted and all(isinstance(item, str) for item in converted)
                got = ",".join(converted) if names else short(converted)
                raise Mistake(f"{where} must be {rule.text}, got {got}")
        return converted
    if isinstance(hint, type) and is_dataclass(hint):
        return value if isinstance(value, hint) else build(hint, value, where, strict=strict)
    if origin in (UnionType, Union):
        return _convert_union(inner, value, where, strict)
    if origin is Literal:
        if value not in inner:
            names = [name for name in inner if isinstance(name, str)]
            near = suggestion(closest(value, names, cutoff=0.6)) if isinstance(value, str) else ""
            one_of = "one of " if len(inner) > 1 else ""
            raise Mistake(f"{where} must be {one_of}{', '.join(map(str, inner))}, got {short(value)}{near}")
        return value
    named = isinstance(hint, type) and issubclass(hint, tuple) and hasattr(hint, "_fields")
    if named or origin in (Sequence, list, tuple):
        if not isinstance(value, list | tuple):
            raise Mistake(f"{where} must be a list, got {short(value)}")
        kinds = [*get_type_hints(hint).values()] if named else inner
        if (named or origin is tuple) and kinds[-1] is not ...:
            if len(value) != len(kinds):
                raise Mistake(f"{where} must be {len(kinds)} values, got {short(value)}")
        else:
            kinds = [kinds[0]] * len(value)
        pairs = enumerate(zip(kinds, value, strict=True))
        converted = [convert(kind, item, f"{where}[{index}]", strict=strict) for index, (kind, item) in pairs]
        return hint(*converted) if named else tuple(converted) if origin is tuple else converted
    if origin in (Mapping, dict):
        check_type(value, dict, where)
        return {key: convert(inner[1], item, f"{where}.{key}", strict=strict) for key, item in value.items()}
    check_type(value, hint, where)
    return float(value) if hint is float else value


def without_rules(hint: Any) -> Any:
    """Return a type without the rules of its annotations, and of those inside it."""
    return get_type_hints(make_dataclass("Plain", [("value", hint)]))["value"]


def _convert_union(kinds: Sequence[Any], value: Any, where: str, strict: bool) -> Any:
    """Convert to the first type that fits; a union of scalars accepts any of them."""
    if value is None and NoneType in kinds:
        return None
    others = [kind for kind in kinds if kind is not NoneType]
    if len(others) > 1 and set(others) <= _SCALARS:
        if not isinstance(value, tuple(others)):
            raise Mistake(f"{where} must be a number, text, true, false or null, got {short(value)}")
        return value
    errors: list[str] = []
    for kind in others:
        try:
            return convert(kind, value, where, strict=strict)
        except ValueError as error:
            errors.append(str(error))
    begin = f"{where} must be "
    if len(errors) == 1 or not all(error.startswith(begin) for error in errors):
        raise Mistake(errors[-1])
    rules = [error.removeprefix(begin).rpartition(", got ")[0] for error in errors]
    raise Mistake(f"{begin}{' or '.join(rules)}, got {short(value)}")
