"""Atomic writes, and bounded reading of JSON and YAML with one-line errors."""

import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

UNFINISHED = ".torchrope-unfinished-"
"""Prefix of the names of files that are being written."""
MAX_DEPTH = 100
"""Maximum nesting depth; Python's recursion limit is a few hundred levels."""
MAX_NODES = 100_000
"""Maximum number of values of a YAML file with aliases expanded."""
_TOO_DEEP = f"nesting must be at most {MAX_DEPTH} levels deep, got more"


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file atomically: if the process is killed or the disk is full, the old file, or none, remains.

    Any number of processes may write into one folder, and the same file. Unfinished files of killed processes in the
    folder are removed if the file system supports locks.

    Args:
        path: The file; missing folders are created.
        content: The content; text is encoded as UTF-8.

    Raises:
        OSError: the disk is full or the folder cannot be written; the message names the file.
    """
    _write(path, content, os.replace)


def write_new(path: Path, content: str | bytes) -> bool:
    """Write a file as `write_whole`, unless it exists: of several processes only one writes it.

    Returns:
        Whether it was written.

    Raises:
        OSError: as `write_whole`.
    """
    try:
        _write(path, content, _move_to_new)
    except _Exists:
        return False
    return True


class _Exists(Exception):
    """The new name of a file exists; mkdir's FileExistsError, for a folder that is a file, is another matter."""


def _write(path: Path, content: str | bytes, move: Callable[[str, Path], None]) -> None:
    data = content.encode() if isinstance(content, str) else content
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(path.parent)
        _write_and_move(path, data, move)
    except OSError as error:
        raise OSError(f"cannot write {path}: {error.strerror or error}") from error


def _move_to_new(unfinished: str, path: Path) -> None:
    """Rename a file; raise _Exists if the new name exists."""
    try:
        if os.name == "nt":
            os.rename(unfinished, path)  # raises on Windows alone
        else:
            _link(unfinished, path)
    except FileExistsError:
        raise _Exists from None


def _link(unfinished: str, path: Path) -> None:
    """Rename a file by a link, which fails if the new name exists."""
    try:
        os.link(unfinished, path)
    except FileExistsError:
        raise
    except OSError:  # the file system has no links
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
        os.replace(unfinished, path)
    else:
        os.unlink(unfinished)


def holds_files(folder: Path) -> bool:
    """Whether a folder exists and has files other than unfinished ones of `write_whole`."""
    return folder.is_dir() and any(not path.name.startswith(UNFINISHED) for path in folder.iterdir())


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
        raise ValueError(f"{what} must be a readable file, got {path}: {error.strerror}") from None
    except Exception as error:  # UnicodeDecodeError, JSONDecodeError, YAMLError
        raise ValueError(f"{what} must be valid JSON or YAML, got {path}: {' '.join(str(error).split())}") from None
    if not isinstance(value, dict):
        held = "nothing" if value is None else type(value).__name__
        raise ValueError(f"{what} must hold named settings, got {path} with {held}")
    return value


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
        raise ValueError(_TOO_DEEP) from None
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
        raise ValueError(_TOO_DEEP) from None
    if node is not None and _count_nodes(node, {}) > MAX_NODES:
        raise ValueError(f"values must be at most {MAX_NODES} with aliases expanded, got more")
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
        raise ValueError(
            f"a value must not contain itself, got an alias of an ancestor in line {node.start_mark.line + 1}"
        )
    return counts[node]


def _check_bounds(values: Any, levels: int) -> None:
    """Raise ValueError for nesting deeper than `levels`, or for integers beyond 64 bits."""
    for value in values:
        if isinstance(value, dict | list):
            if not levels:
                raise ValueError(_TOO_DEEP)
            _check_bounds(value.values() if isinstance(value, dict) else value, levels - 1)
        elif isinstance(value, int) and not -(2**63) <= value < 2**64:
            raise ValueError(f"integers must fit into 64 bits, got one of {value.bit_length()}")


def _write_and_move(path: Path, data: bytes, move: Callable[[str, Path], None]) -> None:
    with _unfinished(path.parent) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
        os.chmod(file.name, 0o644)
        if os.name == "nt":
            file.close()  # Windows cannot replace an open file
        move(file.name, path)


@contextmanager
def _unfinished(folder: Path) -> Iterator[IO[bytes]]:
    """Yield a new file, locked while this process runs; it is removed on an exception."""
    while True:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=UNFINISHED, delete=False) as file:
            try:
                lock(file, wait=True)
                if os.path.exists(file.name):  # else another process removed it as abandoned before the lock
                    yield file
                    return
            except BaseException:
                Path(file.name).unlink(missing_ok=True)  # an interrupt may arrive right after the replacement
                raise


def _remove_abandoned(folder: Path) -> None:
    """Remove unfinished files whose processes have ended."""
    for path in folder.glob(f"{UNFINISHED}*"):
        with suppress(OSError), path.open("r+b") as file:  # another process may finish or remove it at any time
            if lock(file, wait=False):
                path.unlink()


def lock(file: IO[bytes], *, wait: bool) -> bool:
    """Lock a file until it is closed or its process ends; return False if it is locked or locks are unsupported."""
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except (ImportError, OSError):
        return False
    return True
