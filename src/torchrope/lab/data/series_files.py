"""Time series in the files of the UCR and UEA archives: .ts, .arff and numpy's .npz."""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

from torchrope.lab.data.arrays import read_arrays

_PAIR = re.compile(r"\(([^(),]+),([^(),]+)\)")
_OUTSIDE = re.compile(r":(?![^(]*\))")
"""A colon that is not within a pair of time and value."""
SECONDS = np.timedelta64(1, "s")


@dataclass(frozen=True, eq=False)
class TimeSeries:
    """One series.

    Attributes:
        times: float64 `(n,)`: from the file, or 0, 1, ...; dates are in seconds.
        values: float64 `(n, channels)`, NaN where one is missing.
        label: Its class.
    """

    times: np.ndarray
    values: np.ndarray
    label: str


def read_series(path: Path) -> list[TimeSeries]:
    """Read all series of a file, by its extension: .ts, .arff or .npz.

    Raises:
        ValueError: the file violates its format; the message is one line and names the place.
    """
    try:
        found = READERS[path.suffix.lower()](path)
    except (OSError, EOFError, ValueError, KeyError, BadZipFile) as error:
        raise ValueError(
            f"{path.name} must be time series as its format says: {' '.join(str(error).split())}"
        ) from None
    if not found:
        raise ValueError(f"{path.name} must hold one series or more, got none")
    channels = {series.values.shape[1] for series in found}
    if len(channels) > 1:
        raise ValueError(f"series of {path.name} must have as many channels as one another, got {sorted(channels)}")
    return found


def read_ts(path: Path) -> list[TimeSeries]:
    """Read sktime's and aeon's format: a line a series, its channels and its class divided by colons.

    A channel is `v,v,...`, or with `@timeStamps true` `(t,v),(t,v),...`, t a number or a date; ? or NaN is missing.
    """
    header: dict[str, str] = {}
    found: list[TimeSeries] = []
    begun = False
    for number, line in _lines(path):
        if not begun and line.startswith("@"):
            name, _, value = line[1:].partition(" ")
            begun = name.lower() == "data"
            header[name.lower()] = value.strip().lower()
            if begun and not header.get("classlabel", "").startswith("true"):
                raise ValueError("the header must say @classLabel true and the classes, as of data to be classified")
        elif not begun:
            raise ValueError(f"line {number} must be a part of the header, as @data, got {line[:40]!r}")
        else:
            found.append(_at(number, partial(_ts_line, line, header.get("timestamps") == "true")))
    return found


def _ts_line(line: str, timed: bool) -> TimeSeries:
    *channels, label = (part.strip() for part in _OUTSIDE.split(line))
    if not channels or not label:
        raise ValueError(f"it must hold channels and a class, divided by colons, got {line[:40]!r}")
    if not timed:
        return _regular([_numbers(channel.split(",")) for channel in channels], label)
    return _merged([_timed(channel) for channel in channels], label)


def _timed(channel: str) -> dict[float, float]:
    pairs = _PAIR.findall(channel)
    if _PAIR.sub("", channel).strip(" ,"):
        raise ValueError(f"a channel must be (time,value),(time,value),..., got {channel[:40]!r}")
    times = [_time(time) for time, _ in pairs]
    if len(set(times)) < len(times):
        raise ValueError("a channel must have one value at a time, got several")
    return dict(zip(times, _numbers([value for _, value in pairs]).tolist(), strict=True))


def _time(text: str) -> float:
    """A number, or a date in seconds."""
    try:
        return float(text)
    except ValueError:
        return float((np.datetime64(text.strip(), "us") - np.datetime64(0, "us")) / SECONDS)


def read_arff(path: Path) -> list[TimeSeries]:
    """Read Weka's format: a row a series, numbers and the class; of several channels a text with a line a channel."""
    attributes: list[str] = []
    found: list[TimeSeries] = []
    begun, inner = False, False
    for number, line in _lines(path):
        low = line.lower()
        if not begun and low.startswith("@attribute"):
            relational = low.rstrip().endswith("relational")
            attributes += [] if inner else [low.split(None, 2)[-1]]
            inner = inner or relational
        elif not begun and low.startswith("@end"):
            inner = False
        elif not begun and low.startswith(("@relation", "@data")):
            begun = low.startswith("@data")
        elif not begun:
            raise ValueError(f"line {number} must be a part of the header, as @data, got {line[:40]!r}")
        else:
            found.append(_at(number, partial(_arff_line, line, len(attributes))))
    return found


def _arff_line(line: str, attributes: int) -> TimeSeries:
    quoted = re.fullmatch(r"(['\"])(.*)\1\s*,(.*)", line)
    if quoted:
        return _regular([_numbers(channel.split(",")) for channel in quoted[2].split(r"\n")], _unquoted(quoted[3]))
    *cells, label = line.split(",")
    if len(cells) + 1 != attributes:
        raise ValueError(f"it must have {attributes} cells as the header says, got {len(cells) + 1}")
    return _regular([_numbers(cells)], _unquoted(label))


def _unquoted(text: str) -> str:
    if not text.strip(" '\""):
        raise ValueError("it must end with its class, got none")
    return text.strip(" '\"")


def read_npz(path: Path) -> list[TimeSeries]:
    """Read arrays: `values` `(series, length)` or `(series, channels, length)`, `labels` `(series,)`, perhaps `times`.

    `times` is `(length,)` of all, or `(series, length)`, numbers or dates. NaN is missing, as behind the end of one.
    """
    arrays = read_arrays(path)
    if not {"values", "labels"} <= {*arrays}:
        raise ValueError(f"it must hold the arrays values and labels, got {', '.join(arrays) or 'none'}")
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
    every = np.broadcast_to(times.astype(np.float64), (series, length))
    return [
        TimeSeries(*_known(when, one.T.astype(np.float64)), str(label))
        for when, one, label in zip(every, values, labels.tolist(), strict=True)
    ]


def _regular(channels: Sequence[np.ndarray], label: str) -> TimeSeries:
    """Channels at times 0, 1, ...; a shorter one is missing at the end."""
    length = max(len(channel) for channel in channels)
    values = np.full((length, len(channels)), math.nan)
    for index, channel in enumerate(channels):
        values[: len(channel), index] = channel
    return TimeSeries(*_known(np.arange(length, dtype=np.float64), values), label)


def _merged(channels: Sequence[dict[float, float]], label: str) -> TimeSeries:
    """Channels with times of their own: at each time what is known then."""
    times = np.array(sorted({time for channel in channels for time in channel}), np.float64)
    values = np.array([[channel.get(time, math.nan) for channel in channels] for time in times.tolist()], np.float64)
    return TimeSeries(*_known(times, values.reshape(len(times), len(channels))), label)


def _known(times: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The times at which something is known."""
    there = ~np.isnan(values).all(axis=1) & ~np.isnan(times)
    if not there.any():
        raise ValueError("a series must have one value or more, got none")
    return times[there], values[there]


def _numbers(cells: Sequence[str]) -> np.ndarray:
    """Numbers; what is missing is NaN."""
    return np.array([math.nan if cell.strip() in ("?", "") else float(cell) for cell in cells], np.float64)


def _lines(path: Path) -> list[tuple[int, str]]:
    """Lines with their numbers, without comments and empty ones."""
    text = path.read_text(encoding="utf-8-sig")
    numbered = ((number, line.strip()) for number, line in enumerate(text.splitlines(), start=1))
    return [(number, line) for number, line in numbered if line and not line.startswith(("#", "%"))]


def _at(number: int, read: Callable[[], TimeSeries]) -> TimeSeries:
    try:
        return read()
    except ValueError as error:
        raise ValueError(f"line {number}: {error}") from None


READERS: dict[str, Callable[[Path], list[TimeSeries]]] = {".ts": read_ts, ".arff": read_arff, ".npz": read_npz}
