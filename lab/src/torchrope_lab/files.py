"""Files that one of several processes writes, and bounded reading of JSON and YAML with one-line errors."""

import json
import os
import re
from collections.abc import Callable, Sequence
from csv import DictReader
from pathlib import Path
from typing import Any

from torchrope_lab.mistakes import Mistake

CURVE = "curve.csv"
EVALUATION = "evaluation.json"
LONGEST = 60
"""Characters of a data set's name, which may be a path, in the names of files."""
MAX_DEPTH = 100
"""Maximum nesting depth; Python's recursion limit is a few hundred levels."""
MAX_NODES = 100_000
"""Maximum number of values of a YAML file with aliases expanded."""
_TOO_DEEP = f"nesting must be at most {MAX_DEPTH} levels deep, got more"


def write_new(path: Path, content: str | bytes) -> bool:
    """Write a file as `write_whole` unless it exists, and return whether: of several processes only one writes it.

    Raises:
        OSError: as `write_whole`.
    """
    from torchrope.files import write_whole  # imports torch, which help needs not

    try:
        write_whole(path, content, _move_to_new)
    except _Exists:
        return False
    return True


class _Exists(Exception):
    """The new name of a file exists; mkdir's FileExistsError, for a folder that is a file, is another matter."""


def _move_to_new(unfinished: str, path: Path) -> None:
    """Rename a file by a link, which fails if the new name exists."""
    try:
        os.link(unfinished, path)
    except FileExistsError:
        raise _Exists from None
    except OSError:  # the file system has no links
        try:
            path.touch(exist_ok=False)
        except FileExistsError:
            raise _Exists from None
        os.replace(unfinished, path)
    else:
        os.unlink(unfinished)


def holds_files(folder: Path, ignored: Sequence[str] = ()) -> bool:
    """Whether a folder exists and has files other than the ignored ones and unfinished ones of `write_whole`."""
    from torchrope.files import UNFINISHED

    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return any(name not in ignored and not name.startswith(UNFINISHED) for name in names)


def as_file_name(text: str, longest: int = 0) -> str:
    """Replace what is not safe in the name of a file by hyphens, such as slashes and colons.

    Args:
        text: The text.
        longest: Number of characters at its end to keep; 0 for all.
    """
    return re.sub(r"[^\w.=+\-]+", "-", text)[-longest:].strip("-") or "-"


def read_mapping(path: Path, what: str) -> dict[str, Any]:
    """Read a JSON or YAML file that holds a mapping.

    Args:
        path: The file; its name ends in .json, otherwise it is read as YAML.
        what: Description of the file for error messages.

    Raises:
        ValueError: it is not readable, not JSON or YAML, not a mapping, or exceeds the bounds of `parse_json` or
            `parse_yaml`.
    """
    try:
        text = path.read_text(encoding="utf-8")
        value = parse_json(text) if path.suffix == ".json" else parse_yaml(text)
    except OSError as error:
        raise Mistake(f"{what} must be a readable file, got {path}: {error.strerror}") from None
    except Exception as error:  # UnicodeDecodeError, JSONDecodeError, YAMLError
        raise Mistake(f"{what} must be valid JSON or YAML, got {path}: {' '.join(str(error).split())}") from None
    if not isinstance(value, dict):
        held = "nothing" if value is None else type(value).__name__
        raise Mistake(f"{what} must hold named settings, got {path} with {held}")
    return value


def read_curve(path: Path) -> list[dict[str, float]]:
    """Read the learning curve of a run; an empty list if the file is missing or damaged."""
    if not path.exists():
        return []
    try:
        return [
            {name: float(value) for name, value in row.items()} for row in DictReader(path.read_text().splitlines())
        ]
    except (TypeError, ValueError):
        return []  # the file only shows progress; a run resumes from its checkpoint


def parse_json(text: str, parse_constant: Callable[[str], Any] | None = None) -> Any:
    """Parse JSON of at most 100 levels of nesting and integers of at most 64 bits.

    Args:
        text: JSON.
        parse_constant: Converts the names NaN, Infinity and -Infinity; to floats by default.

    Raises:
        ValueError: it is not JSON, or exceeds those bounds.
    """
    try:
        value = json.loads(text, parse_constant=parse_constant)
    except RecursionError:
        raise Mistake(_TOO_DEEP) from None
    _check_bounds([value], MAX_DEPTH)
    return value


def parse_yaml(text: str, load: Callable[[str], Any] | None = None) -> Any:
    """Parse YAML within the bounds of `parse_json`, and of at most 100,000 values with aliases expanded.

    Args:
        text: YAML.
        load: Converts the text to a value, `yaml.safe_load` by default.

    Raises:
        ValueError: it exceeds those bounds, or an alias refers to a value that contains it.
        yaml.YAMLError: it is not YAML.
    """
    import yaml

    try:
        node = yaml.compose(text, yaml.SafeLoader)
    except RecursionError:
        raise Mistake(_TOO_DEEP) from None
    if node is not None and _count_nodes(node, {}) > MAX_NODES:
        raise Mistake(f"values must be at most {MAX_NODES} with aliases expanded, got more")
    value = (load or yaml.safe_load)(text)
    _check_bounds([value], MAX_DEPTH)
    return value


def _count_nodes(node: Any, counts: dict[Any, int]) -> int:
    """Count the nodes of a YAML document with aliases expanded."""
    if not isinstance(node.value, list):
        return 1
    if node not in counts:
        counts[node] = 0  # while it is being counted
        parts = [part for item in node.value for part in (item if isinstance(item, tuple) else (item,))]
        counts[node] = 1 + sum(_count_nodes(part, counts) for part in parts)
    if not counts[node]:
        raise Mistake(
            f"a value must not contain itself, got an alias of an ancestor in line {node.start_mark.line + 1}"
        )
    return counts[node]


def _check_bounds(values: Any, levels: int) -> None:
    """Raise ValueError for nesting deeper than `levels`, or for integers beyond 64 bits."""
    for value in values:
        if isinstance(value, dict | list):
            if not levels:
                raise Mistake(_TOO_DEEP)
            _check_bounds(value.values() if isinstance(value, dict) else value, levels - 1)
        elif isinstance(value, int) and not -(2**63) <= value < 2**64:
            raise Mistake(f"integers must fit into 64 bits, got one of {value.bit_length()}")
