"""Reading of numpy's .npz files: thread-safe, without pickles."""

import threading
from pathlib import Path

import numpy as np

_PARSE_LOCK = threading.Lock()
"""numpy parses headers with `ast`, which fails at random in threads before CPython 3.13 (python/cpython#106905)."""


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """Read all arrays of a .npz file, by name."""
    with path.open("rb") as file, _PARSE_LOCK, np.load(file, allow_pickle=False) as stored:
        return {name: stored[name] for name in stored.files}
