"""Encodings by name in the laboratory: those of the library, and user-defined ones as "mypackage.module:Class".

After the colon may also be a name that the module gives to `torchrope.register_encoding`.

`load_modules` imports the modules that a command line names or allows; `resolve_encoding` imports nothing and only
finds classes in loaded modules, so that a stored configuration cannot run code.
"""

import inspect
import re
from collections.abc import Iterable, Sequence
from typing import Any

from torchrope.encodings import (
    BUILT_IN,
    AbsoluteEncoding,
    Choice,
    Encoding,
    ScoreBias,
    builders,
    parse_encoding,
    register_encoding,
)
from torchrope_lab.mistakes import Mistake, as_mistake, closest, suggestion
from torchrope_lab.modules import NAME, find_object, load_module, loaded_module

_KINDS: dict[type, tuple[str, ...]] = {
    Encoding: ("num_axes", "num_heads", "head_dim"),
    AbsoluteEncoding: ("sizes", "dim"),
    ScoreBias: ("sizes", "num_heads"),
}
"""Base classes of user-defined encodings, and the keyword arguments that each is built with."""


@as_mistake()
def resolve_encoding(name: str) -> Choice:
    """Parse a name of an encoding, in which a class of a loaded module is "mypackage.module:Class"."""
    # For example "learned+mypackage.module:Class", or "mypackage.module:Class:8" for a class that takes a block_size.
    for module, kind in user_defined_parts(name):
        register_encoding(f"{module}:{kind}", _builder(module, kind), exist_ok=True)
    return parse_encoding(name)


def user_defined_parts(name: str) -> list[tuple[str, str]]:
    """Return module and class of each part of a name that is a user-defined class."""
    parts = [part.strip() for part in name.split("+")]
    matches = [NAME.fullmatch(re.sub(r":(\d+|base=.*)$", "", part)) for part in parts]
    return [(match[1], match[2]) for match in matches if match and match[1] not in BUILT_IN]


def load_modules(encodings: Iterable[str], allow: Sequence[str] | None = None) -> None:
    """Import the modules of user-defined encodings that `allow` names; None, for typed names, allows all."""
    for name in encodings:
        for module, kind in user_defined_parts(name):
            load_module(f"{module}:{kind}", allow)


def _builder(module: str, name: str) -> Any:
    """Return a class of a loaded module, or what it registered; nothing is imported, not by `__getattr__` either."""
    full = f"{module}:{name}"
    loaded = vars(loaded_module(full))
    if name not in loaded and name in builders() and name not in BUILT_IN:
        return builders()[name]
    found = find_object(full, "class", _is_encoding)
    kind = next((kind for kind in _KINDS if isinstance(found, type) and issubclass(found, kind)), None)
    if kind is None:
        kinds = "Encoding, AbsoluteEncoding or ScoreBias of torchrope.encodings"
        what = "an unrelated class" if isinstance(found, type) else type(found).__name__
        near = suggestion(closest(name, (each for each, value in loaded.items() if _is_encoding(value))))
        raise Mistake(f"{full} must be a subclass of {kinds}, got {what}{near}")
    if inspect.isabstract(found):
        missing = ", ".join(sorted(found.__abstractmethods__))
        raise Mistake(f"{full} must implement all abstract methods, got a class without {missing}")
    try:
        inspect.signature(found).bind(**dict.fromkeys(_KINDS[kind]))
    except TypeError as error:
        raise Mistake(f"{full} must be built from {', '.join(_KINDS[kind])} only, got: {error}") from None
    return found


def _is_encoding(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, tuple(_KINDS))
