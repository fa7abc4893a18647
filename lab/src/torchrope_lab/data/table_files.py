"""Readers of tables of points (.csv, .npz)."""

import csv
import math
import re
import threading
from array import array
from collections.abc import Callable, Collection, Iterable
from datetime import datetime, timezone
from pathlib import Path

import numpy as np

from torchrope_lab.mistakes import Mistake, closest, suggestion

Columns = dict[str, np.ndarray]
"""Columns of equal length by name: float64, or text."""
SECOND = np.timedelta64(1, "s")
_PARSE_LOCK = threading.Lock()
"""numpy parses headers with `ast`, which fails at random in threads before CPython 3.13 (python/cpython#106905)."""
_NUMBER = re.compile(r"[-+.]*\d[-+.\deE]*")


def read_table(path: Path, text: Collection[str] = (), needed: Iterable[str] | None = None) -> Columns:
    """Read the columns of a .csv or .npz file by name; those in `text`, or not `needed`, are text."""
    # Dates are seconds since 1970. `needed` names are in any case; None is all.
    numbers = None if needed is None else {name.lower() for name in needed}
    return READERS[path.suffix.lower()](
        path, lambda name: name in text or (numbers is not None and name.lower() not in numbers), text
    )


def check_columns(required: Iterable[str], names: Collection[str]) -> None:
    """Raise ValueError with the columns that there are if one is missing."""
    for name in required:
        if name not in names:
            raise Mistake(f"there is no column {name!r} among {', '.join(names)}{suggestion(closest(name, names))}")


def read_csv(path: Path, is_text: Callable[[str], bool], required: Collection[str] = ()) -> Columns:
    """Read a text table with a header line, separated by commas, semicolons or tabs; an empty cell is NaN."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        first = file.readline()
        delimiter = max(",;\t", key=first.count)
        names = [name.strip() for name in next(csv.reader([first], delimiter=delimiter), [])]
        if not names or not all(names) or len(set(names)) < len(names) or any(map(_NUMBER.fullmatch, names)):
            raise Mistake(f"the first line must name the columns, each once, got {first.strip()[:60]!r}")
        check_columns(required, names)
        columns: list[list[str] | array] = [[] if is_text(name) else array("d") for name in names]
        for number, row in enumerate(filter(None, csv.reader(file, delimiter=delimiter)), start=2):
            if len(row) != len(names):
                rule = f"rows must have {len(names)} cells like the first line"
                raise Mistake(f"{rule}, got {len(row)} in row {number}")
            for name, column, cell in zip(names, columns, row, strict=True):
                try:
                    column.append(cell.strip() if isinstance(column, list) else parse_number(cell))  # type: ignore[arg-type]
                except ValueError as error:
                    text = "columns of text are --data.label, --data.example, or not among --data.features"
                    raise Mistake(f"column {name} must hold numbers: {error} in row {number}; {text}") from None
    return {name: np.array(column) for name, column in zip(names, columns, strict=True)}


def read_npz(path: Path, is_text: Callable[[str], bool], required: Collection[str] = ()) -> Columns:
    """Read arrays as columns: `(n,)` is one column, `(n, k)` are the columns name.0, name.1, ..."""
    # An array `positions` with up to three columns gives x, y, z. A class may be a scalar `()`. Pickles are rejected,
    # and array sizes are checked against the file size before memory is allocated.
    columns: Columns = {}
    lengths: dict[str, int] = {}
    arrays = read_arrays(path)
    check_columns(required, arrays)
    for name, values in arrays.items():
        if is_text(name):
            columns[name] = values.reshape(-1).astype(str)
            continue
        if values.dtype.kind not in "iufbM" or values.ndim not in (1, 2):
            raise Mistake(f"arrays must be numbers (n,) or (n, k), got {name} {values.dtype} {values.shape}")
        parts = [name] if values.ndim == 1 else [f"{name}.{index}" for index in range(values.shape[1])]
        parts = [*"xyz"] if name == "positions" and len(parts) <= 3 and values.ndim == 2 else parts
        lengths[name] = len(values)
        columns |= zip(parts, as_floats(values).reshape(len(values), -1).T, strict=False)
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{name} {length}" for name, length in list(lengths.items())[:6])
        raise Mistake(f"arrays must have one row per point, got {listed}")
    return columns


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """Read all arrays of a .npz file, by name."""
    with path.open("rb") as file, _PARSE_LOCK, np.load(file, allow_pickle=False) as stored:
        return {name: stored[name] for name in stored.files}


def parse_number(text: str) -> float:
    """Convert a number, or an ISO date and time to seconds since 1970 in UTC; NaN for an empty text or "?"."""
    text = text.strip()
    try:
        return float(text) if text not in ("", "?") else math.nan
    except ValueError:
        pass
    try:
        date = datetime.fromisoformat(text.replace("Z", "+00:00"))
    except ValueError:
        raise Mistake(f"{text[:40]!r} is neither a number nor a date") from None
    return date.replace(tzinfo=date.tzinfo or timezone.utc).timestamp()


def as_floats(values: np.ndarray) -> np.ndarray:
    """Convert numbers to float64, dates to seconds since 1970."""
    if values.dtype.kind != "M":
        return values.astype(np.float64)
    return np.where(np.isnat(values), np.nan, (values - np.datetime64(0, "s")) / SECOND)


READERS: dict[str, Callable[[Path, Callable[[str], bool], Collection[str]], Columns]] = {
    ".csv": read_csv,
    ".npz": read_npz,
}
