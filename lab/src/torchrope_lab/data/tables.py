"""Readers of tables of points (.csv, .npz, .ply) and of files of time series (.ts, .arff, .npz)."""

import csv
import math
import re
from array import array
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from datetime import datetime, timezone
from itertools import takewhile, zip_longest
from pathlib import Path
from typing import BinaryIO
from zipfile import BadZipFile

import numpy as np
import torch

from torchrope_lab.data.arrays import read_arrays
from torchrope_lab.data.tokens import Cloud

Columns = dict[str, np.ndarray]
"""Columns of equal length by name: float64, or text."""
Series = tuple[Cloud, str]
"""The time steps of a series, and its class."""
Header = dict[str, list[str]]
"""Values of each keyword, in lower case."""
SERIES_EXTENSIONS = (".ts", ".arff", ".npz")
SECOND = np.timedelta64(1, "s")
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
_NUMBER = re.compile(r"[-+.]*\d[-+.\deE]*")
_PAIR = re.compile(r"\(([^(),]+),([^(),]+)\)")
_OUTSIDE = re.compile(r":(?![^(]*\))")
"""A colon outside of a (time, value) pair."""


def read_table(path: Path, text: Container[str] = (), needed: Iterable[str] | None = None) -> Columns:
    """Read the columns of a .csv, .npz or .ply file, whose extension selects the format.

    Args:
        path: The file.
        text: Names of columns of text, such as the class.
        needed: Names, in any case, of the other columns that must hold numbers; None for all.

    Returns:
        The columns by name; dates are seconds since 1970.

    Raises:
        ValueError, OSError, EOFError, zipfile.BadZipFile: the file is damaged, or violates its format.
    """
    numbers = None if needed is None else {name.lower() for name in needed}
    return READERS[path.suffix.lower()](
        path, lambda name: name in text or (numbers is not None and name.lower() not in numbers)
    )


def read_csv(path: Path, is_text: Callable[[str], bool]) -> Columns:
    """Read a text table with a header line, separated by commas, semicolons or tabs; an empty cell is NaN."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        first = file.readline()
        delimiter = max(",;\t", key=first.count)
        names = [name.strip() for name in next(csv.reader([first], delimiter=delimiter), [])]
        if not names or not all(names) or len(set(names)) < len(names) or any(map(_NUMBER.fullmatch, names)):
            raise ValueError(f"the first line must name the columns, each once, got {first.strip()[:60]!r}")
        columns: list[list[str] | array] = [[] if is_text(name) else array("d") for name in names]
        for number, row in enumerate(filter(None, csv.reader(file, delimiter=delimiter)), start=2):
            if len(row) != len(names):
                rule = f"rows must have {len(names)} cells like the first line"
                raise ValueError(f"{rule}, got {len(row)} in row {number}")
            for name, column, cell in zip(names, columns, row, strict=True):
                try:
                    column.append(cell.strip() if isinstance(column, list) else parse_number(cell))  # type: ignore[arg-type]
                except ValueError as error:
                    raise ValueError(f"column {name} must hold numbers: {error} in row {number}") from None
    return {name: np.array(column) for name, column in zip(names, columns, strict=True)}


def read_npz(path: Path, is_text: Callable[[str], bool]) -> Columns:
    """Read arrays as columns: `(n,)` is one column, `(n, k)` are the columns name.0, name.1, ...

    An array `positions` with up to three columns gives x, y, z. A class may be a scalar `()`. Pickles are rejected,
    and array sizes are checked against the file size before memory is allocated.
    """
    columns: Columns = {}
    lengths: dict[str, int] = {}
    for name, values in read_arrays(path).items():
        if is_text(name):
            columns[name] = values.reshape(-1).astype(str)
            continue
        if values.dtype.kind not in "iufbM" or values.ndim not in (1, 2):
            raise ValueError(f"arrays must be numbers (n,) or (n, k), got {name} {values.dtype} {values.shape}")
        parts = [name] if values.ndim == 1 else [f"{name}.{index}" for index in range(values.shape[1])]
        parts = [*"xyz"] if name == "positions" and len(parts) <= 3 and values.ndim == 2 else parts
        lengths[name] = len(values)
        columns |= zip(parts, as_floats(values).reshape(len(values), -1).T, strict=False)
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{name} {length}" for name, length in list(lengths.items())[:6])
        raise ValueError(f"arrays must have one row per point, got {listed}")
    return columns


def read_ply(path: Path, is_text: Callable[[str], bool]) -> Columns:
    """Read the vertices of a .ply file, ascii or binary: each property is a column; faces are not read.

    References:
        Turk, The PLY polygon file format, 1994.
    """
    with path.open("rb") as file:
        order, count, properties = _ply_header(file)
        row = np.dtype([(name, PLY_ORDERS[order] + kind) for name, kind in properties])
        if order == "ascii":
            table = _ply_text(file, count, row)
        else:
            start = file.tell()
            available = file.seek(0, 2) - start
            if count * row.itemsize > available:
                raise ValueError(f"the header claims {count:,} vertices, more than {available:,} bytes hold")
            file.seek(start)
            table = np.frombuffer(file.read(count * row.itemsize), row)
    return {
        name: np.array([np.format_float_positional(value, trim="-") for value in table[name]])
        if is_text(name)
        else table[name].astype(np.float64)
        for name, _ in properties
    }


def _ply_header(file: BinaryIO) -> tuple[str, int, list[tuple[str, str]]]:
    """Read the format, the number of vertices, and name and type of their properties."""
    lines: list[list[str]] = []
    while not lines or lines[-1] != ["end_header"]:
        line = file.readline(LONGEST_HEADER)
        if not line.endswith(b"\n") or file.tell() > LONGEST_HEADER:
            raise ValueError("the header must end with a line end_header")
        lines.append(line.decode("ascii").split())
    entries = [words for words in lines if words and words[0] not in ("comment", "obj_info")]
    if entries[0] != ["ply"] or len(entries) < 3 or entries[1][0] != "format" or len(entries[1]) != 3:
        raise ValueError(f"a .ply file must begin with ply and its format, got {' '.join(entries[0])[:60]!r}")
    order, element = entries[1][1], entries[2]
    if order not in PLY_ORDERS:
        raise ValueError(f"the format must be one of {', '.join(PLY_ORDERS)}, got {order!r}")
    if element[:2] != ["element", "vertex"] or len(element) != 3 or not element[2].isdecimal():
        raise ValueError(f"the first element must be vertex with its count, got {' '.join(element)[:60]!r}")
    properties = [*takewhile(lambda words: words[0] == "property", entries[3:])]
    for words in properties:
        if len(words) != 3 or words[1] not in PLY_TYPES:
            raise ValueError(f"properties of a vertex must be one number each, got {' '.join(words)[:60]!r}")
    names = [name for _, _, name in properties]
    if not names or len(set(names)) < len(names):
        raise ValueError(f"properties of a vertex must have different names, got {', '.join(names) or 'none'}")
    return order, int(element[2]), [(name, PLY_TYPES[kind]) for _, kind, name in properties]


def _ply_text(file: BinaryIO, count: int, row: np.dtype) -> np.ndarray:
    rows = []
    names = row.names or ()
    for number in range(count):
        cells = file.readline().split()
        if len(cells) != len(names):
            rule = f"{count:,} vertices must have {len(names)} numbers each"
            raise ValueError(f"{rule}, got {len(cells)} in number {number}")
        rows.append(tuple(map(float, cells)))
    return np.array(rows, [(name, "f8") for name in names])


def read_series(path: Path) -> list[Series]:
    """Read all series of a .ts, .arff or .npz file.

    Returns:
        The time steps that have a value, at their times, and the class of each series; dates are in seconds.

    Raises:
        ValueError: the file violates its format; the one-line message gives the line.
    """
    try:
        series = list(_npz_series(path) if path.suffix.lower() == ".npz" else _text_series(path))
    except (OSError, EOFError, ValueError, KeyError, BadZipFile) as error:
        raise ValueError(
            f"{path.name} must be a valid file of time series, got: {' '.join(str(error).split())}"
        ) from None
    if not series:
        raise ValueError(f"{path.name} must hold 1 series or more, got 0")
    channels = {cloud.features.shape[1] for cloud, _ in series}
    if len(channels) > 1:
        raise ValueError(f"all series of {path.name} must have the same number of channels, got {sorted(channels)}")
    return series


def _text_series(path: Path) -> Iterator[Series]:
    """Read the .ts format of sktime and aeon, or Weka's .arff: a header of lines with @, then one series per line."""
    header: dict[str, list[str]] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8-sig").splitlines(), start=1):
        if not line.strip() or line.lstrip().startswith(("#", "%")):
            continue
        if "data" not in header:
            if not line.lstrip().startswith("@"):
                raise ValueError(f"line {number} must belong to the header, such as @data, got {line[:40]!r}")
            name, *value = line.strip()[1:].lower().split(None, 1)
            header.setdefault(name, []).extend(value or [""])
            continue
        try:
            yield (_ts_series if path.suffix.lower() == ".ts" else _arff_series)(line.strip(), header)
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from None


def _ts_series(line: str, header: Header) -> Series:
    """Read channels `v,v,...`, or with `@timeStamps true` `(t,v),(t,v),...`, and the class, separated by colons."""
    if not header.get("classlabel", [""])[0].startswith("true"):
        raise ValueError("the header must have a line @classLabel true with the names of the classes")
    *channels, label = (part.strip() for part in _OUTSIDE.split(line))
    if not channels or not label:
        raise ValueError(f"a series must be channels and a class, separated by colons, got {line[:40]!r}")
    if header.get("timestamps") != ["true"]:
        return _regular(channels, label)
    columns = [_timed(channel) for channel in channels]
    times = sorted({time for column in columns for time in column})
    return make_series(times, [[column.get(time, math.nan) for time in times] for column in columns], label)


def _timed(channel: str) -> dict[float, float]:
    """Read the values of a channel by time."""
    pairs = _PAIR.findall(channel)
    if _PAIR.sub("", channel).strip(" ,"):
        raise ValueError(f"a channel must be (time,value),(time,value),..., got {channel[:40]!r}")
    values = {parse_number(time): parse_number(value) for time, value in pairs}
    if len(values) < len(pairs):
        raise ValueError("a channel must have one value per time, got several")
    return values


def _arff_series(line: str, header: Header) -> Series:
    """Read a row of numbers and the class; several channels are a quoted text with one line each."""
    body, _, label = line.rpartition(",")
    body, label = body.strip(), label.strip(" '\"")
    if not label:
        raise ValueError("a row must end with a comma and its class")
    if body and body[0] in "'\"" and body.endswith(body[0]):
        return _regular(body[1:-1].split(r"\n"), label)
    attributes, cells = len(header.get("attribute", ())), line.count(",") + 1
    if cells != attributes:
        raise ValueError(f"a row must have {attributes} cells as in the header, got {cells}")
    return _regular([body], label)


def _npz_series(path: Path) -> Iterator[Series]:
    """Read arrays: `values` `(series, length)` or `(series, channels, length)`, `labels` `(series,)`, optional `times`.

    `times` is `(length,)` for all series or `(series, length)`, numbers or dates. NaN is missing, such as padding.
    """
    arrays = read_arrays(path)
    if not {"values", "labels"} <= {*arrays}:
        raise ValueError(f"a .npz file must hold the arrays values and labels, got {', '.join(arrays) or 'none'}")
    if others := {*arrays} - {"values", "labels", "times"}:
        raise ValueError(f"arrays of a .npz file must be values, labels and times, got {', '.join(sorted(others))}")
    values, labels = arrays["values"], arrays["labels"]
    labels = labels.astype(str) if labels.dtype.kind == "S" else labels
    values = values[:, None] if values.ndim == 2 else values
    if values.ndim != 3 or values.dtype.kind not in "iufb" or labels.shape != values.shape[:1]:
        rule = "values must be numbers (series, channels, length) with labels (series,)"
        raise ValueError(f"{rule}, got {values.dtype} {values.shape} with {labels.shape}")
    series, _, length = values.shape
    times = as_floats(arrays.get("times", np.arange(length)))
    if times.shape not in ((length,), (series, length)):
        raise ValueError(f"times must be ({length},) or ({series}, {length}), got {times.shape}")
    return map(make_series, np.broadcast_to(times, (series, length)), values, map(str, labels.tolist()))


def _regular(channels: Sequence[str], label: str) -> Series:
    """Read channels of comma-separated values at times 0, 1, ...; shorter ones end with missing values."""
    columns = [[parse_number(cell) for cell in channel.split(",")] for channel in channels]
    rows = [*zip_longest(*columns, fillvalue=math.nan)]
    return make_series(range(len(rows)), [*zip(*rows, strict=True)], label)


def make_series(times: Sequence[float], channels: Sequence[Sequence[float]], label: str) -> Series:
    """Return the time steps that have a time and a value in any channel, `channels` being `(channels, length)`."""
    values = torch.as_tensor(np.asarray(channels, np.float64)).T
    valid = ~values.isnan().all(dim=1)
    if not valid.any():
        raise ValueError("a series must have 1 value or more, got only missing ones")
    return Cloud.of(torch.tensor(np.asarray(times, np.float64))[valid, None], values[valid]), label


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
        raise ValueError(f"{text[:40]!r} is neither a number nor a date") from None
    return date.replace(tzinfo=date.tzinfo or timezone.utc).timestamp()


def as_floats(values: np.ndarray) -> np.ndarray:
    """Convert numbers to float64, dates to seconds since 1970."""
    if values.dtype.kind != "M":
        return values.astype(np.float64)
    return np.where(np.isnat(values), np.nan, (values - np.datetime64(0, "s")) / SECOND)


READERS: dict[str, Callable[[Path, Callable[[str], bool]], Columns]] = {
    ".csv": read_csv,
    ".npz": read_npz,
    ".ply": read_ply,
}
