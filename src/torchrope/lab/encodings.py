"""Encodings by name in the laboratory: those of the library, and user-defined classes as "mypackage.module:Class".

Importing a module runs it. `load_modules` imports those that a command line names or allows; `choose` imports nothing
and finds classes in modules that are loaded, so that a stored configuration cannot start code.
"""

import importlib
import inspect
import os
import pkgutil
import re
import sys
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any, Literal

from torchrope.encodings import (
    ABSOLUTE,
    BIAS,
    EXPANDING,
    ROTARY,
    AbsoluteEncoding,
    Choice,
    Encoding,
    ScoreBias,
)
from torchrope.encodings import choose as choose_with
from torchrope.lab.spelling import closest, suggestion

_OWN = re.compile(r"((?:[^\W\d]\w*\.)*[^\W\d]\w*):([^\W\d]\w*)(?::\d+)?")
_KINDS: dict[type, tuple[str, ...]] = {
    Encoding: ("num_axes", "num_heads", "head_dim"),
    AbsoluteEncoding: ("sizes", "dim"),
    ScoreBias: ("sizes", "num_heads"),
}
"""The classes that an encoding of one's own may be of, and what it is built from."""

OfPoses = Literal["action", "numbers"]
POSES: dict[str, OfPoses] = {"pose": "action", "camera-numbers": "numbers"}
"""Names for tokens of views: what `torchrope.Transformer` calls each."""


def of_poses(name: str) -> OfPoses | None:
    """What the poses of views do under a name such as "pose+axial"; None where it says nothing of them."""
    found = [POSES[part.strip()] for part in name.split("+") if part.strip() in POSES]
    if len(found) > 1:
        raise ValueError(f"an encoding names {' or '.join(POSES)} at most once, got {name!r}")
    return found[0] if found else None


def choose(name: str) -> Choice:
    """Find encodings by name as `torchrope.choose` does, and classes of loaded modules as "mypackage.module:Class".

    What names of `POSES` stand for is told by `of_poses`; here they are left out.

    Args:
        name: Such as "mixed", "learned+mypackage.module:Class", or "mypackage.module:Class:8" for a class that takes a
            block_size.

    Raises:
        ValueError: what `torchrope.choose` refuses; a module that nothing has imported; no such class in it, or one
            that is no encoding.
    """
    if of_poses(name) is not None:
        others = [part for part in name.split("+") if part.strip() not in POSES]
        return replace(choose("+".join(others) or "none"), name=name)
    own = own_parts(name)
    if not own:
        _check_colon(name)
    return choose_with(name, {f"{module}:{kind}": _class(module, kind) for module, kind in own})


def own_parts(name: str) -> list[tuple[str, str]]:
    """Module and class of each part of a name that is a class of one's own.

    Example:
        >>> own_parts("learned+mypackage.rotations:Spiral:8"), own_parts("learned+liere:8")
        ([('mypackage.rotations', 'Spiral')], [])
    """
    found = [_OWN.fullmatch(part.strip()) for part in name.split("+")]
    known = {*ROTARY, *EXPANDING, *ABSOLUTE, *BIAS}
    return [(match[1], match[2]) for match in found if match and match[1] not in known]


def load_modules(encodings: Iterable[str], allow: Sequence[str] | None = None) -> None:
    """Import the modules of encodings of one's own; the working directory is looked at last.

    Args:
        encodings: Names as `choose` takes them.
        allow: Modules and packages that may be imported; others are left alone. None is for names that the user has
            typed: all of them.

    Raises:
        ValueError: a module that cannot be imported.
    """
    for name in encodings:
        for module, _ in own_parts(name):
            if module not in sys.modules and (allow is None or _allowed(module, allow)):
                _load(module)


def _allowed(module: str, allow: Sequence[str]) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in allow if name)


def _load(module: str) -> None:
    here = os.getcwd()
    added = here not in sys.path
    if added:
        sys.path.append(here)
    try:
        importlib.invalidate_caches()
        importlib.import_module(module)
    except Exception as error:  # it may raise anything
        rule = f"encodings of your own must be in a module that can be imported, got {module}"
        raise ValueError(f"{rule}: {_told(error)}{_near_module(module, error)}") from error
    finally:
        if added and here in sys.path:
            sys.path.remove(here)


def _told(error: Exception) -> str:
    """An error of somebody's module, and the line that raised it."""
    line = traceback.extract_tb(error.__traceback__)[-1]
    own = not isinstance(error, SyntaxError) and "importlib" not in line.filename
    place = f" ({os.path.basename(line.filename)}, line {line.lineno})" if own else ""
    return f"{type(error).__name__}: {error}{place}"


def _near_module(module: str, error: Exception) -> str:
    """The nearest name beside the first part of a module's name that there is not."""
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    if not missing or not f"{module}.".startswith(f"{missing}."):
        return ""
    above = missing.rpartition(".")[0]
    path = getattr(sys.modules.get(above), "__path__", None) if above else None
    if above and path is None:
        return ""
    there = [f"{above}." * bool(above) + each.name for each in pkgutil.iter_modules(path)]
    return suggestion(closest(missing, there, cutoff=0.7))


def _class(module: str, name: str) -> Any:
    """A class of a loaded module; nothing is imported, not by a module's `__getattr__` either."""
    full, loaded = f"{module}:{name}", sys.modules.get(module)
    if loaded is None:
        rule = f"{full!r} is code of {module}, which is imported where the command line names it"
        raise ValueError(f"{rule} or says --allow {module}, got neither")
    found = vars(loaded).get(name)
    if found is None:
        raise ValueError(
            f"{module} must have a class {name}, got none{suggestion(closest(name, _encodings_of(loaded)))}"
        )
    kind = next((kind for kind in _KINDS if isinstance(found, type) and issubclass(found, kind)), None)
    if kind is None:
        kinds = "Encoding, AbsoluteEncoding or ScoreBias of torchrope.encodings"
        what = "a class of others" if isinstance(found, type) else type(found).__name__
        raise ValueError(
            f"{full} must be a subclass of {kinds}, got {what}{suggestion(closest(name, _encodings_of(loaded)))}"
        )
    if inspect.isabstract(found):
        raise ValueError(f"{full} must have all methods, got no {', '.join(sorted(found.__abstractmethods__))}")
    try:
        inspect.signature(found).bind(**dict.fromkeys(_KINDS[kind]))
    except TypeError as error:
        raise ValueError(f"{full} must be built from {', '.join(_KINDS[kind])} alone, got: {error}") from None
    return found


def _encodings_of(module: ModuleType) -> list[str]:
    return [name for name, one in vars(module).items() if isinstance(one, type) and issubclass(one, tuple(_KINDS))]


def _check_colon(name: str) -> None:
    """Refuse "mypackage.module.Class" with a hint."""
    for part in name.split("+"):
        module, dot, kind = part.strip().partition(":")[0].rpartition(".")
        if dot and module and kind:
            raise ValueError(
                f"an encoding of your own is named module:Class, got {part!r}; did you mean '{module}:{kind}'?"
            )
