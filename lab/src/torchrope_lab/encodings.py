"""Encodings by name in the laboratory: those of the library, and user-defined ones as "mypackage.module:Class".

After the colon may also be a name that the module gives to `torchrope.register_encoding`.

Importing a module runs its code. `load_modules` imports the modules that a command line names or allows;
`resolve_encoding` imports nothing and only finds classes in loaded modules, so that a stored configuration cannot run
code.
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
    BUILT_IN,
    AbsoluteEncoding,
    Choice,
    Encoding,
    ScoreBias,
    builders,
    parse_encoding,
    register_encoding,
)
from torchrope_lab.spelling import closest, suggestion

_OWN = re.compile(r"((?:[^\W\d]\w*\.)*[^\W\d]\w*):([^\W\d][\w-]*)(?::\d+)?")
_KINDS: dict[type, tuple[str, ...]] = {
    Encoding: ("num_axes", "num_heads", "head_dim"),
    AbsoluteEncoding: ("sizes", "dim"),
    ScoreBias: ("sizes", "num_heads"),
}
"""Base classes of user-defined encodings, and the keyword arguments that each is built with."""

PoseUse = Literal["action", "numbers"]
POSES: dict[str, PoseUse] = {"pose": "action", "camera-numbers": "numbers"}
"""Encoding names for tokens of camera views, with the value of `torchrope.Transformer`'s argument for each."""


def pose_use(name: str) -> PoseUse | None:
    """Return how an encoding such as "pose+axial" uses the poses of camera views; None if it does not."""
    uses = [POSES[part.strip()] for part in name.split("+") if part.strip() in POSES]
    if len(uses) > 1:
        raise ValueError(f"an encoding names {' or '.join(POSES)} at most once, got {name!r}")
    return uses[0] if uses else None


def resolve_encoding(name: str) -> Choice:
    """Parse a name as `torchrope.parse_encoding` does, also classes of loaded modules as "mypackage.module:Class".

    Names of `POSES` are ignored here; `pose_use` reads them.

    Args:
        name: For example "mixed", "learned+mypackage.module:Class", or "mypackage.module:Class:8" for a class that
            takes a block_size.

    Raises:
        ValueError: `torchrope.parse_encoding` rejects the name, its module is not loaded, or the module has no such
            class or one that is not an encoding.
    """
    if pose_use(name) is not None:
        others = [part for part in name.split("+") if part.strip() not in POSES]
        return replace(resolve_encoding("+".join(others) or "none"), name=name)
    user_defined = user_defined_parts(name)
    if not user_defined:
        _check_colon(name)
    for module, kind in user_defined:
        register_encoding(f"{module}:{kind}", _builder(module, kind), exist_ok=True)
    return parse_encoding(name)


def user_defined_parts(name: str) -> list[tuple[str, str]]:
    """Return module and class of each part of a name that is a user-defined class.

    Example:
        >>> user_defined_parts("learned+mypackage.rotations:Spiral:8"), user_defined_parts("learned+liere:8")
        ([('mypackage.rotations', 'Spiral')], [])
    """
    matches = [_OWN.fullmatch(part.strip()) for part in name.split("+")]
    return [(match[1], match[2]) for match in matches if match and match[1] not in BUILT_IN]


def load_modules(encodings: Iterable[str], allow: Sequence[str] | None = None) -> None:
    """Import the modules of user-defined encodings; the working directory is searched last.

    Args:
        encodings: Names as `resolve_encoding` takes them.
        allow: Modules and packages that may be imported; others are skipped. None, for names that the user typed,
            allows all.

    Raises:
        ValueError: a module cannot be imported.
    """
    for name in encodings:
        for module, _ in user_defined_parts(name):
            if module not in sys.modules and (allow is None or _allowed(module, allow)):
                import_user_module(module)


def _allowed(module: str, allow: Sequence[str]) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in allow if name)


def import_user_module(module: str, what: str = "user-defined encodings") -> ModuleType:
    """Import a module that the user named or allowed; the working directory is searched last.

    Args:
        module: Its name.
        what: What it defines, for the message of an error.

    Raises:
        ValueError: it cannot be imported.
    """
    here = os.getcwd()
    added = here not in sys.path
    if added:
        sys.path.append(here)
    try:
        importlib.invalidate_caches()
        return importlib.import_module(module)
    except Exception as error:  # user code may raise anything
        rule = f"{what} must be in a module that can be imported, got {module}"
        raise ValueError(f"{rule}: {_describe_error(error)}{_near_module(module, error)}") from error
    finally:
        if added and here in sys.path:
            sys.path.remove(here)


def _describe_error(error: Exception) -> str:
    """Format an error of a user's module, with the line that raised it."""
    line = traceback.extract_tb(error.__traceback__)[-1]
    raised_by_module = not isinstance(error, SyntaxError) and "importlib" not in line.filename
    location = f" ({os.path.basename(line.filename)}, line {line.lineno})" if raised_by_module else ""
    return f"{type(error).__name__}: {error}{location}"


def _near_module(module: str, error: Exception) -> str:
    """Suggest an existing module that is spelled like the first missing part of a module's name."""
    missing = error.name if isinstance(error, ModuleNotFoundError) else None
    if not missing or not f"{module}.".startswith(f"{missing}."):
        return ""
    above = missing.rpartition(".")[0]
    path = getattr(sys.modules.get(above), "__path__", None) if above else None
    if above and path is None:
        return ""
    modules = [f"{above}." * bool(above) + each.name for each in pkgutil.iter_modules(path)]
    return suggestion(closest(missing, modules, cutoff=0.7))


def _builder(module: str, name: str) -> Any:
    """Return a class of a loaded module, or what it registered; nothing is imported, not by `__getattr__` either."""
    full, loaded = f"{module}:{name}", sys.modules.get(module)
    if loaded is None:
        rule = f"the module of {full!r} must be named on the command line or in --allow {module}"
        raise ValueError(f"{rule}, got neither")
    found = vars(loaded).get(name)
    if found is None and name in builders() and name not in BUILT_IN:
        return builders()[name]
    if found is None:
        raise ValueError(
            f"{module} must have a class {name}, got none{suggestion(closest(name, _encodings_of(loaded)))}"
        )
    kind = next((kind for kind in _KINDS if isinstance(found, type) and issubclass(found, kind)), None)
    if kind is None:
        kinds = "Encoding, AbsoluteEncoding or ScoreBias of torchrope.encodings"
        what = "an unrelated class" if isinstance(found, type) else type(found).__name__
        raise ValueError(
            f"{full} must be a subclass of {kinds}, got {what}{suggestion(closest(name, _encodings_of(loaded)))}"
        )
    if inspect.isabstract(found):
        missing = ", ".join(sorted(found.__abstractmethods__))
        raise ValueError(f"{full} must implement all abstract methods, got a class without {missing}")
    try:
        inspect.signature(found).bind(**dict.fromkeys(_KINDS[kind]))
    except TypeError as error:
        raise ValueError(f"{full} must be built from {', '.join(_KINDS[kind])} only, got: {error}") from None
    return found


def _encodings_of(module: ModuleType) -> list[str]:
    return [name for name, one in vars(module).items() if isinstance(one, type) and issubclass(one, tuple(_KINDS))]


def _check_colon(name: str) -> None:
    """Raise ValueError with a hint for "mypackage.module.Class"."""
    for part in name.split("+"):
        if part.strip() in builders():
            continue
        module, dot, kind = part.strip().partition(":")[0].rpartition(".")
        if dot and module and kind:
            raise ValueError(
                f"a user-defined encoding is named module:Class, got {part!r}; did you mean '{module}:{kind}'?"
            )
