"""Files that one of several processes writes, and reading of JSON and YAML with one-line errors."""

import json
import os
import re
from collections.abc import Sequence
from csv import DictReader
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from torchrope_lab.mistakes import Mistake

CURVE = "curve.csv"
EVALUATION = "evaluation.json"
RESULTS = "results.json"
LONGEST = 60
"""Characters of a data set's name, which may be a path, in the names of files."""


def write_new(path: Path, content: str | bytes) -> bool:
    """Write a file as `write_whole` unless it exists, and return whether: of several processes only one writes it."""
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


def check_writable(folder: Path) -> None:
    """Raise Mistake if files cannot be written to a folder, or it cannot be created; leaves nothing behind."""
    try:
        existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        TemporaryFile(dir=existing).close()  # os.access is true for root even where the kernel refuses
    except OSError as error:
        raise Mistake(f"--out must be a folder that can be written to, got {folder}: {error.strerror}") from None


def holds_files(folder: Path, ignored: Sequence[str] = ()) -> bool:
    """Whether a folder exists and has files other than the ignored ones and unfinished ones of `write_whole`."""
    from torchrope.files import UNFINISHED

    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return any(name not in ignored and not name.startswith(UNFINISHED) for name in names)


def as_file_name(text: str, longest: int = 0) -> str:
    """Replace what is not safe in a file's name by hyphens; keep the last `longest` characters, 0 for all."""
    return re.sub(r"[^\w.=+\-]+", "-", text)[-longest:].strip("-") or "-"


def read_mapping(path: Path, what: str) -> dict[str, Any]:
    """Read a JSON or YAML file that holds a mapping."""
    import yaml

    try:
        text = path.read_text(encoding="utf-8")
        value = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except OSError as error:
        raise Mistake(f"{what} must be a readable file, got {path}: {error.strerror}") from None
    except Exception as error:  # of several kinds, RecursionError among them
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
