"""Readers of point tables: .csv, .npz and .ply files with one row per point, as named columns."""

import csv
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np

from torchrope_lab.data.arrays import read_arrays
from torchrope_lab.data.faults import check_regular

Columns = dict[str, np.ndarray]
"""Columns of equal length by name: float64, or text for the class."""
LONGEST_HEADER = 2**16
"""Largest .ply header in bytes."""
PLY_TYPES = {
    **dict.fromkeys(("char", "int8"), "i1"),
    **dict.fromkeys(("uchar", "uint8"), "u1"),
    **dict.fromkeys(("short", "int16"), "i2"),
    **dict.fromkeys(("ushort", "uint16"), "u2"),
    **dict.fromkeys(("int", "int32"), "i4"),
    **dict.fromkeys(("uint", "uint32"), "u4"),
    **dict.fromkeys(("float", "float32"), "f4"),
    **dict.fromkeys(("double", "float64"), "f8"),
}
PLY_ORDERS = {"ascii": "", "binary_little_endian": "<", "binary_big_endian": ">"}


def read_table(path: Path, label: str | None = None) -> Columns:
    """Read the columns of a .csv, .npz or .ply file.

    Args:
        path: The file; its extension selects the format.
        label: Name of the class column, which may be text.

    Raises:
        ValueError, OSError, EOFError, zipfile.BadZipFile: the file is damaged, or violates its format.
    """
    check_regular(path)
    return READERS[path.suffix.lower()](path, label)


def read_csv(path: Path, label: str | None) -> Columns:
    """Read a text table with a header line, separated by commas, semicolons or tabs; an empty cell is NaN."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        first = file.readline()
        delimiter = max(",;\t", key=first.count)
        names = [name.strip() for name in next(csv.reader([first], delimiter=delimiter), [])]
        if not names or not all(names) or len(set(names)) < len(names) or any(map(_is_number, names)):
            raise ValueError(f"the first line must name the columns, each once, got {first.strip()[:60]!r}")
        rows = [row for row in csv.reader(file, delimiter=delimiter) if row]
    for number, row in enumerate(rows, start=2):
        if len(row) != len(names):
            raise ValueError(f"rows must have {len(names)} cells like the first line, got {len(row)} in row {number}")
    columns = zip(*rows, strict=True) if rows else ([] for _ in names)
    return {
        name: np.array([cell.strip() for cell in cells]) if name == label else _numbers(name, cells)
        for name, cells in zip(names, columns, strict=True)
    }


def read_npz(path: Path, label: str | None) -> Columns:
    """Read arrays as columns: `(n,)` is one column, `(n, k)` are the columns name.0, name.1, ...

    An array `positions` with up to three columns gives x, y, z. The class may be a scalar `()`. Pickles are rejected,
    and array sizes are checked against the file size before memory is allocated.
    """
    arrays = read_arrays(path)
    columns: Columns = {}
    for name, array in arrays.items():
        if name == label:
            columns[name] = array.reshape(-1).astype(str)
        elif array.dtype.kind not in "iufb" or array.ndim not in (1, 2):
            raise ValueError(f"arrays must be numbers (n,) or (n, k), got {name} {array.dtype} {array.shape}")
        elif array.ndim == 1:
            columns[name] = array.astype(np.float64)
        else:
            names = [*"xyz"] if name == "positions" and array.shape[1] <= 3 else _numbered(name, array.shape[1])
            columns |= {part: column.astype(np.float64) for part, column in zip(names, array.T, strict=False)}
    lengths = {name: len(column) for name, column in columns.items() if name != label}
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{name} {length}" for name, length in list(lengths.items())[:6])
        raise ValueError(f"arrays must have one row per point, got {listed}")
    return columns


def read_ply(path: Path, label: str | None) -> Columns:
    """Read the vertices of a .ply file, ascii or binary: each property is a column; faces are not read.

    References:
        Turk, The PLY polygon file format, 1994.
    """
    with path.open("rb") as file:
        order, count, properties = _ply_header(file)
        if order == "ascii":
            table = _ply_text(file, count, len(properties))
            columns = {name: table[:, index] for index, (name, _) in enumerate(properties)}
        else:
            row = np.dtype([(name, PLY_ORDERS[order] + kind) for name, kind in properties])
            start = file.tell()
            available = file.seek(0, 2) - start
            if count * row.itemsize > available:
                raise ValueError(f"the header claims {count:,} vertices, more than {available:,} bytes hold")
            file.seek(start)
            table = np.frombuffer(file.read(count * row.itemsize), row)
            columns = {name: table[name] for name, _ in properties}
    return {
        name: np.array([f"{value:g}" for value in column]) if name == label else column.astype(np.float64)
        for name, column in columns.items()
    }


def _ply_header(file: BinaryIO) -> tuple[str, int, list[tuple[str, str]]]:
    """Read the format, the number of vertices, and name and type of their properties."""
    lines: list[list[str]] = []
    while not lines or lines[-1] != ["end_header"]:
        line = file.readline(LONGEST_HEADER)
        if not line.endswith(b"\n") or file.tell() > LONGEST_HEADER:
            raise ValueError("the header must end with end_header, got none")
        lines.append(line.decode("ascii").split())
    entries = [line for line in lines if line and line[0] not in ("comment", "obj_info")]
    if entries[0] != ["ply"] or len(entries) < 3 or entries[1][:1] != ["format"] or len(entries[1]) != 3:
        raise ValueError(f"a .ply file must begin with ply and its format, got {' '.join(entries[0])[:60]!r}")
    if entries[1][1] not in PLY_ORDERS:
        raise ValueError(f"the format must be one of {', '.join(PLY_ORDERS)}, got {entries[1][1]!r}")
    if entries[2][:2] != ["element", "vertex"] or len(entries[2]) != 3 or not entries[2][2].isdecimal():
        raise ValueError(f"the first element must be vertex with its count, got {' '.join(entries[2])[:60]!r}")
    properties: list[tuple[str, str]] = []
    for words in entries[3:]:
        if words[0] != "property":
            break
        if len(words) != 3 or words[1] not in PLY_TYPES:
            raise ValueError(f"properties of a vertex must be one number each, got {' '.join(words)[:60]!r}")
        properties.append((words[2], PLY_TYPES[words[1]]))
    names = [name for name, _ in properties]
    if not names or len(set(names)) < len(names):
        raise ValueError(f"properties of a vertex must have different names, got {', '.join(names) or 'none'}")
    return entries[1][1], int(entries[2][2]), properties


def _ply_text(file: BinaryIO, count: int, width: int) -> np.ndarray:
    rows = []
    for number in range(count):
        line = file.readline()
        cells = line.split()
        if len(cells) != width:
            raise ValueError(f"{count:,} vertices must have {width} numbers each, got {len(cells)} in number {number}")
        rows.append([float(cell) for cell in cells])
    return np.array(rows, np.float64).reshape(count, width)


def _numbered(name: str, count: int) -> list[str]:
    return [f"{name}.{index}" for index in range(count)]


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _numbers(name: str, cells: Sequence[str]) -> np.ndarray:
    """Convert cells to numbers; empty ones are NaN."""
    try:
        return np.array([float(cell) if cell.strip() else math.nan for cell in cells], np.float64)
    except ValueError as error:
        raise ValueError(f"column {name} must hold numbers: {error}") from None


READERS: dict[str, Callable[[Path, str | None], Columns]] = {".csv": read_csv, ".npz": read_npz, ".ply": read_ply}
