"""Reading of numpy's .npz files: thread-safe, without pickles, with array sizes checked against the file size."""

import math
import threading
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import numpy as np

from torchrope_lab.data.faults import check_claim, check_regular

_PARSE_LOCK = threading.Lock()
"""numpy parses headers with `ast`, which fails at random in threads before CPython 3.13 (python/cpython#106905)."""


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """Read all arrays of a .npz file, by name.

    Raises:
        ValueError, OSError, EOFError, zipfile.BadZipFile: the file is damaged, holds Python objects, or claims more
            than it can hold.
    """
    check_regular(path)
    with _PARSE_LOCK:
        with ZipFile(path) as archive:
            entries = [entry for entry in archive.infolist() if entry.filename.endswith(".npy")]
            check_claim(sum(entry.file_size for entry in entries), path.stat().st_size)
            for entry in entries:
                with archive.open(entry) as file:
                    _check_header(file, entry.file_size, entry.filename)
        with np.load(path, allow_pickle=False) as stored:
            return {name: stored[name] for name in stored.files}


def _check_header(file: Any, size: int, name: str) -> None:
    """Raise ValueError if the header of a .npy file claims more data than `size` bytes hold."""
    version = np.lib.format.read_magic(file)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = read(file)
    if dtype.hasobject:
        raise ValueError(f"arrays must hold numbers or text, got {name} of Python objects")
    if math.prod(shape) * dtype.itemsize > size:
        raise ValueError(f"{name} claims {math.prod(shape):,} values, more than its {size:,} bytes hold")
