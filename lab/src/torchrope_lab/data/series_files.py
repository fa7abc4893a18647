"""Readers of time series files: .ts and .arff as in the UCR and UEA archives, and numpy's .npz."""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

from torchrope_lab.data.arrays import read_arrays
from torchrope_lab.data.faults import check_regular

_PAIR = re.compile(r"\(([^(),]+),([^(),]+)\)")
_OUTSIDE = re.compile(r":(?![^(]*\))")
"""A colon outside of a (time, value) pair."""
SECONDS = np.timedelta64(1, "s")


@dataclass(frozen=True, eq=False)
class TimeSeries:
    """A labelled time series.

    Attributes:
        times: float64 `(n,)`: from the file, or 0, 1, ...; dates are in seconds.
        values: float64 `(n, channels)`, NaN if missing.
        label: Class of the series.
    """

    times: np.ndarray
    values: np.ndarray
    label: str


def read_series(path: Path) -> list[TimeSeries]:
    """Read all series of a .ts, .arff or .npz file.

    Raises:
        ValueError: the file violates its format; the one-line message gives the line.
    """
    try:
        series = READERS[path.suffix.lower()](path)
    except (OSError, EOFError, ValueError, KeyError, BadZipFile) as error:
        raise ValueError(
            f"{path.name} must be a valid file of time series, got: {' '.join(str(error).split())}"
        ) from None
    if not series:
        raise ValueError(f"{path.name} must hold at least one series, got none")
    channels = {one.values.shape[1] for one in series}
    if len(channels) > 1:
        raise ValueError(f"all series of {path.name} must have the same number of channels, got {sorted(channels)}")
    return series


def read_ts(path: Path) -> list[TimeSeries]:
    """Read the .ts format of sktime and aeon: one series per line, channels and class separated by colons.

    A channel is `v,v,...`, or with `@timeStamps true` `(t,v),(t,v),...`, t a number or a date; ? or NaN is missing.
    """
    header: dict[str, str] = {}
    series: list[TimeSeries] = []
    in_data = False
    for number, line in _lines(path):
        if not in_data and line.startswith("@"):
            name, _, value = line[1:].partition(" ")
            in_data = name.lower() == "data"
            header[name.lower()] = value.strip().lower()
            if in_data and not header.get("classlabel", "").startswith("true"):
                raise ValueError("the header must have @classLabel true with the classes, got none")
        elif not in_data:
            raise ValueError(f"line {number} must belong to the header, such as @data, got {line[:40]!r}")
        else:
            series.append(_with_line_number(number, partial(_ts_line, line, header.get("timestamps") == "true")))
    return series


def _ts_line(line: str, timed: bool) -> TimeSeries:
    *channels, label = (part.strip() for part in _OUTSIDE.split(line))
    if not channels or not label:
        raise ValueError(f"a series must be channels and a class, separated by colons, got {line[:40]!r}")
    if not timed:
        return _regular([_numbers(channel.split(",")) for channel in channels], label)
    return _merged([_timed(channel) for channel in channels], label)


def _timed(channel: str) -> dict[float, float]:
    pairs = _PAIR.findall(channel)
    if _PAIR.sub("", channel).strip(" ,"):
        raise ValueError(f"a channel must be (time,value),(time,value),..., got {channel[:40]!r}")
    times = [_time(time) for time, _ in pairs]
    if len(set(times)) < len(times):
        raise ValueError("a channel must have one value per time, got several")
    return dict(zip(times, _numbers([value for _, value in pairs]).tolist(), strict=True))


def _time(text: str) -> float:
    """Convert a number, or a date to seconds since 1970."""
    try:
        return float(text)
    except ValueError:
        return float((np.datetime64(text.strip(), "us") - np.datetime64(0, "us")) / SECONDS)


def read_arff(path: Path) -> list[TimeSeries]:
    """Read Weka's .arff format: one series per row, numbers then class; several channels are a quoted text of lines."""
    attributes: list[str] = []
    series: list[TimeSeries] = []
    in_data, inner = False, False
    for number, line in _lines(path):
        low = line.lower()
        if not in_data and low.startswith("@attribute"):
            relational = low.rstrip().endswith("relational")
            attributes += [] if inner else [low.split(None, 2)[-1]]
            inner = inner or relational
        elif not in_data and low.startswith("@end"):
            inner = False
        elif not in_data and low.startswith(("@relation", "@data")):
            in_data = low.startswith("@data")
        elif not in_data:
            raise ValueError(f"line {number} must belong to the header, such as @data, got {line[:40]!r}")
        else:
            series.append(_with_line_number(number, partial(_arff_line, line, len(attributes))))
    return series


def _arff_line(line: str, attributes: int) -> TimeSeries:
    quoted = re.fullmatch(r"(['\"])(.*)\1\s*,(.*)", line)
    if quoted:
        return _regular([_numbers(channel.split(",")) for channel in quoted[2].split(r"\n")], _unquoted(quoted[3]))
    *cells, label = line.split(",")
    if len(cells) + 1 != attributes:
        raise ValueError(f"a row must have {attributes} cells as in the header, got {len(cells) + 1}")
    return _regular([_numbers(cells)], _unquoted(label))


def _unquoted(text: str) -> str:
    if not text.strip(" '\""):
        raise ValueError("a row must end with the class, got none")
    return text.strip(" '\"")


def read_npz(path: Path) -> list[TimeSeries]:
    """Read arrays: `values` `(series, length)` or `(series, channels, length)`, `labels` `(series,)`, optional `times`.

    `times` is `(length,)` for all series or `(series, length)`, numbers or dates. NaN is missing, such as padding.
    """
    arrays = read_arrays(path)
    if not {"values", "labels"} <= {*arrays}:
        raise ValueError(f"a .npz file must hold the arrays values and labels, got {', '.join(arrays) or 'none'}")
    values, labels = arrays["values"], arrays["labels"]
    values = values[:, None] if values.ndim == 2 else values
    if values.ndim != 3 or values.dtype.kind not in "iufb" or labels.shape != values.shape[:1]:
        rule = "values must be numbers (series, channels, length) with labels (series,)"
        raise ValueError(f"{rule}, got {values.dtype} {values.shape} with {labels.shape}")
    series, _, length = values.shape
    times = arrays.get("times", np.arange(length, dtype=np.float64))
    if times.shape not in ((length,), (series, length)):
        raise ValueError(f"times must be ({length},) or ({series}, {length}), got {times.shape}")
    if times.dtype.kind == "M":
        times = np.where(np.isnat(times), np.nan, (times - np.datetime64(0, "s")) / SECONDS)
    times_of = np.broadcast_to(times.astype(np.float64), (series, length))
    return [
        TimeSeries(*_drop_missing(series_times, one.T.astype(np.float64)), str(label))
        for series_times, one, label in zip(times_of, values, labels.tolist(), strict=True)
    ]


def _regular(channels: Sequence[np.ndarray], label: str) -> TimeSeries:
    """Stack channels at times 0, 1, ...; shorter ones are padded with missing values."""
    length = max(len(channel) for channel in channels)
    values = np.full((length, len(channels)), math.nan)
    for index, channel in enumerate(channels):
        values[: len(channel), index] = channel
    return TimeSeries(*_drop_missing(np.arange(length, dtype=np.float64), values), label)


def _merged(channels: Sequence[dict[float, float]], label: str) -> TimeSeries:
    """Stack channels with different times, over the union of the times."""
    times = np.array(sorted({time for channel in channels for time in channel}), np.float64)
    values = np.array([[channel.get(time, math.nan) for channel in channels] for time in times.tolist()], np.float64)
    return TimeSeries(*_drop_missing(times, values.reshape(len(times), len(channels))), label)


def _drop_missing(times: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Remove the time steps without a time or without any value."""
    valid = ~np.isnan(values).all(axis=1) & ~np.isnan(times)
    if not valid.any():
        raise ValueError("a series must have at least one value, got none")
    return times[valid], values[valid]


def _numbers(cells: Sequence[str]) -> np.ndarray:
    """Convert cells to numbers; missing ones are NaN."""
    return np.array([math.nan if cell.strip() in ("?", "") else float(cell) for cell in cells], np.float64)


def _lines(path: Path) -> list[tuple[int, str]]:
    """Read the numbered lines, without comments and empty ones."""
    check_regular(path)
    text = path.read_text(encoding="utf-8-sig")
    numbered = ((number, line.strip()) for number, line in enumerate(text.splitlines(), start=1))
    return [(number, line) for number, line in numbered if line and not line.startswith(("#", "%"))]


def _with_line_number(number: int, read: Callable[[], TimeSeries]) -> TimeSeries:
    try:
        return read()
    except ValueError as error:
        raise ValueError(f"line {number}: {error}") from None


READERS: dict[str, Callable[[Path], list[TimeSeries]]] = {".ts": read_ts, ".arff": read_arff, ".npz": read_npz}
