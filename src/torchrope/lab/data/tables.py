"""Files with a row for each point: .csv, .npz and .ply, as columns by name."""

import csv
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np

from torchrope.lab.data.arrays import read_arrays

Columns = dict[str, np.ndarray]
"""Equally long columns by name: float64, or text for the one that is the class."""
LONGEST_HEADER = 2**16
"""Bytes of a header of .ply."""
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
    """Read the columns of a file, by its extension.

    Args:
        path: Ends in .csv, .npz or .ply.
        label: Name of a column that may be text.

    Raises:
        ValueError, OSError, EOFError, zipfile.BadZipFile: the file is damaged, or violates its format.
    """
    return READERS[path.suffix.lower()](path, label)


def read_csv(path: Path, label: str | None) -> Columns:
    """Read text whose first line names the columns, separated by commas, semicolons or tabs; an empty cell is NaN."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        first = file.readline()
        delimiter = max(",;\t", key=first.count)
        names = [name.strip() for name in next(csv.reader([first], delimiter=delimiter), [])]
        if not names or not all(names) or len(set(names)) < len(names) or any(map(_is_number, names)):
            raise ValueError(f"the first line must name the columns, each once, got {first.strip()[:60]!r}")
        rows = [row for row in csv.reader(file, delimiter=delimiter) if row]
    for number, row in enumerate(rows, start=2):
        if len(row) != len(names):
            raise ValueError(f"rows must have {len(names)} cells as the first line, got {len(row)} in row {number}")
    columns = zip(*rows, strict=True) if rows else ([] for _ in names)
    return {
        name: np.array([cell.strip() for cell in cells]) if name == label else _numbers(name, cells)
        for name, cells in zip(names, columns, strict=True)
    }


def read_npz(path: Path, label: str | None) -> Columns:
    """Read arrays: each `(n,)` is a column; the k columns of one that is `(n, k)` are its name with .0, .1, ...

    Those of an array `positions` of up to three columns are x, y, z. The class may be one value `()`. No pickles are
    read, and no more memory is taken than the file holds.
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
            columns |= {each: column.astype(np.float64) for each, column in zip(names, array.T, strict=False)}
    lengths = {name: len(column) for name, column in columns.items() if name != label}
    if len(set(lengths.values())) > 1:
        told = ", ".join(f"{name} {length}" for name, length in list(lengths.items())[:6])
        raise ValueError(f"arrays must have a row for each point, got {told}")
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
            here = file.tell()
            left = file.seek(0, 2) - here
            if count * row.itemsize > left:
                raise ValueError(f"the header claims {count:,} vertices, more than {left:,} bytes hold")
            file.seek(here)
            table = np.frombuffer(file.read(count * row.itemsize), row)
            columns = {name: table[name] for name, _ in properties}
    return {
        name: np.array([f"{value:g}" for value in column]) if name == label else column.astype(np.float64)
        for name, column in columns.items()
    }


def _ply_header(file: BinaryIO) -> tuple[str, int, list[tuple[str, str]]]:
    """Format, number of vertices, and name and type of their properties."""
    lines: list[list[str]] = []
    while not lines or lines[-1] != ["end_header"]:
        line = file.readline(LONGEST_HEADER)
        if not line.endswith(b"\n") or file.tell() > LONGEST_HEADER:
            raise ValueError("the header must end with end_header, got none")
        lines.append(line.decode("ascii").split())
    told = [line for line in lines if line and line[0] not in ("comment", "obj_info")]
    if told[0] != ["ply"] or len(told) < 3 or told[1][:1] != ["format"] or len(told[1]) != 3:
        raise ValueError(f"a .ply file must begin with ply and its format, got {' '.join(told[0])[:60]!r}")
    if told[1][1] not in PLY_ORDERS:
        raise ValueError(f"the format must be one of {', '.join(PLY_ORDERS)}, got {told[1][1]!r}")
    if told[2][:2] != ["element", "vertex"] or len(told[2]) != 3 or not told[2][2].isdecimal():
        raise ValueError(f"the first element must be vertex with its number, got {' '.join(told[2])[:60]!r}")
    properties: list[tuple[str, str]] = []
    for words in told[3:]:
        if words[0] != "property":
            break
        if len(words) != 3 or words[1] not in PLY_TYPES:
            raise ValueError(f"properties of a vertex must be one number each, got {' '.join(words)[:60]!r}")
        properties.append((words[2], PLY_TYPES[words[1]]))
    names = [name for name, _ in properties]
    if not names or len(set(names)) < len(names):
        raise ValueError(f"properties of a vertex must have different names, got {', '.join(names) or 'none'}")
    return told[1][1], int(told[2][2]), properties


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
    """A column of numbers; what is empty is NaN."""
    try:
        return np.array([float(cell) if cell.strip() else math.nan for cell in cells], np.float64)
    except ValueError as error:
        raise ValueError(f"column {name} must hold numbers: {error}") from None


READERS: dict[str, Callable[[Path, str | None], Columns]] = {".csv": read_csv, ".npz": read_npz, ".ply": read_ply}
