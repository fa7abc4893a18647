"""User-defined objects by name, as "mypackage.module:Object" or "path/file.py:Object": encodings, sources and studies.

Importing a module runs its code. `load_module` imports what a command line names or allows; `find_object` imports
nothing and only looks into loaded modules, so that a stored configuration cannot run code.
"""

import importlib.util
import os
import re
import sys
import traceback
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from torchrope_lab.mistakes import Mistake, closest, suggestion

NAME = re.compile(r"(?!(?:hf|webdataset):)([^:]+\.py|(?:[^\W\d]\w*\.)*[^\W\d]\w*):([^\W\d][\w-]*)")


def load_module(name: str, allow: Sequence[str] | None = None) -> None:
    """Import the module of "mypackage.module:Object" or "path/file.py:Object", the working directory last."""
    # Modules that `allow` does not name are skipped; None, for names that the user typed, allows all.
    match = NAME.fullmatch(name)
    module = match[1] if match else ""
    allowed = allow is None or any(
        module == package or module.startswith(f"{package}.") for package in allow if package
    )
    if not module or _key(module) in sys.modules or not allowed:
        return
    here = os.getcwd()
    added = here not in sys.path
    if added:
        sys.path.append(here)
    try:
        importlib.invalidate_caches()
        _run_file(module) if module.endswith(".py") else importlib.import_module(module)
    except Exception as error:  # user code may raise anything
        rule = f"user-defined names must be in a module that can be imported, got {module}"
        raise Mistake(f"{rule}: {_describe_error(error)}") from error
    finally:
        if added and here in sys.path:
            sys.path.remove(here)


def loaded_module(name: str) -> ModuleType:
    """Return the module of "mypackage.module:Object"."""
    module = name.partition(":")[0]
    if _key(module) not in sys.modules:
        raise Mistake(f"{name!r} is imported only if the command line names it: add --allow {module} (several: A,B)")
    return sys.modules[_key(module)]


def find_object(name: str, what: str, suitable: Callable[[Any], bool]) -> Any:
    """Return an object of a loaded module; its `__getattr__` is not called."""
    module, _, attribute = name.partition(":")
    objects = vars(loaded_module(name))
    if attribute not in objects:
        near = suggestion(closest(attribute, (key for key, value in objects.items() if suitable(value))))
        raise Mistake(f"{module} has no {what} {attribute}{near}")
    return objects[attribute]


def _key(module: str) -> str:
    """Return a module's name in sys.modules; that of a file has no dots, so that pickle finds its objects by name."""
    return re.sub(r"\W", "_", module) if module.endswith(".py") else module


def _run_file(path: str) -> None:
    """Import a file by its path."""
    spec = importlib.util.spec_from_file_location(_key(path), path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[spec.name]
        raise


def _describe_error(error: Exception) -> str:
    """Format an error of a user's module, with the line that raised it."""
    line = traceback.extract_tb(error.__traceback__)[-1]
    raised_by_module = not isinstance(error, SyntaxError) and "importlib" not in line.filename
    location = f" ({os.path.basename(line.filename)}, line {line.lineno})" if raised_by_module else ""
    return f"{type(error).__name__}: {error}{location}"
