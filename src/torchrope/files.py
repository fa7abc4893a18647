"""Files: written whole or not at all, read with one clear line where they are not what they should be."""

import json
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file so that a killed process or a full disk leaves the old one, or none, never a part.

    Args:
        path: Where; missing folders are made.
        content: Text is written as UTF-8.

    Raises:
        OSError: the disk is full or the folder cannot be written; the message names the file.
    """
    data = content.encode() if isinstance(content, str) else content
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _replace(path, data)
    except OSError as error:
        raise OSError(f"cannot write {path}: {error.strerror or error}") from error


def remove_unfinished(folder: Path, names: Iterable[str]) -> None:
    """Remove what a process that was killed while it wrote left beside files of these names."""
    for name in names:
        for unfinished in folder.glob(f".{name}-{'?' * 8}"):
            unfinished.unlink(missing_ok=True)


def read_mapping(path: Path, what: str) -> dict[str, Any]:
    """Read a JSON or YAML file that holds a mapping.

    Args:
        path: The file; its name ends in .json or is taken for YAML.
        what: What it should be, for the error.

    Raises:
        ValueError: it is not readable text, not JSON or YAML, or holds something else.
    """
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".json":
            value = json.loads(text)
        else:
            import yaml

            value = yaml.safe_load(text)
    except OSError as error:
        raise ValueError(f"{what} must be a readable file, got {path}: {error.strerror}") from None
    except Exception as error:  # UnicodeDecodeError, JSONDecodeError, YAMLError
        raise ValueError(f"{what} must be whole, got {path}: {' '.join(str(error).split())}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{what} must hold named settings, got {path} with {type(value).__name__}")
    return value


def _replace(path: Path, data: bytes) -> None:
    handle, unfinished = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(unfinished, 0o644)
        os.replace(unfinished, path)
    except BaseException:
        Path(unfinished).unlink(missing_ok=True)  # Ctrl-C may come right after the replacement
        raise
