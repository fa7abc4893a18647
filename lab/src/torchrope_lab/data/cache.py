"""Cache folder for downloaded files, drawn images, indices and preprocessed examples."""

import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich.console import Console
from rich.progress import track
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from torchrope.files import write_whole
from torchrope_lab.data.faults import Fault, attempt, reason
from torchrope_lab.files import read_mapping

SCANS = 256
"""A process counts the bytes of the cache again each time it has written this fraction of the limit."""
FILES_A_SAVE = 100_000
FILES_WITH_PROGRESS = 2_000
HEADER = 256
"""Bytes of a file beside those of the example, at most."""

Made = TypeVar("Made", Tensor, Tensor | None)

logger = logging.getLogger(__name__)


def cache_folder() -> Path:
    """Return the cache folder, `torchrope` in the folder of `torch.hub`."""
    return Path(torch.hub.get_dir()) / "torchrope"


def index_of(root: Path, kind: str) -> Path:
    """Return the file in the cache folder that keeps what was read of files below a folder."""
    return cache_folder() / f"{kind}-{hashlib.sha256(str(root).encode()).hexdigest()[:16]}.json"


def read_files(
    root: Path,
    paths: Sequence[str],
    read: Callable[[Path], Any],
    index: Path,
    *,
    version: str,
    doing: str,
    explain: Callable[[Exception], str] = reason,
) -> tuple[dict[str, Any], list[Fault]]:
    """Read every file once, in threads, and keep the results: one is read again if its size or time has changed."""
    # `read` returns a value that JSON can hold and that is no text. Results of another `version` are not used; an error
    # of the system, such as a lost connection, is not kept. Many files have a progress bar.
    known = _read_index(index, version)
    stamps = {path: _size_and_mtime(root / path) for path in paths}
    entries = {path: known[path] for path in paths if path in known and known[path][:2] == stamps[path]}
    unread = [path for path in paths if path not in entries]
    passing = set()
    with ThreadPoolExecutor() as pool:
        results = pool.map(lambda path: attempt(read, root / path), unread)
        hidden, console = len(unread) < FILES_WITH_PROGRESS, Console(stderr=True)
        shown = track(results, doing, len(unread), console=console, transient=True, disable=hidden)
        for number, (path, (value, error)) in enumerate(zip(unread, shown, strict=True), 1):
            entries[path] = [*stamps[path], value if error is None else explain(error)]
            if getattr(error, "errno", None) is not None:
                passing.add(path)
            if number % FILES_A_SAVE == 0 or number == len(unread):
                kept = {path: entry for path, entry in entries.items() if path not in passing}
                with suppress(OSError):
                    write_whole(index, json.dumps({"version": version, "files": kept}))
    faults = [(path, entries[path][2]) for path in paths if isinstance(entries[path][2], str)]
    return {path: entries[path][2] for path in paths if not isinstance(entries[path][2], str)}, faults


def _size_and_mtime(path: Path) -> list[int]:
    try:
        state = path.stat()
    except OSError:
        return [-1, -1]
    return [state.st_size, state.st_mtime_ns]


def _read_index(index: Path, version: str) -> dict[str, Any]:
    """Return what is kept; nothing if the index is missing, damaged or of another version."""
    try:
        stored = read_mapping(index, "an index of files")
    except ValueError:
        return {}
    return stored.get("files", {}) if stored.get("version") == version else {}


class ExampleCache:
    """Preprocessed examples in the cache folder, so that files are decoded in the first epoch only."""

    # An example is stored under a hash of its files (path, size, modification time) and of the settings of its
    # preprocessing. Damaged files of the cache are replaced. Nothing is deleted: when the limit is reached or the disk
    # is full, a warning says so, and further examples are not stored.

    def __init__(self, gib: float) -> None:
        self.limit = int(gib * 2**30)
        self._used: int | None = None
        self._uncounted = 0
        self._full = torch.zeros((), dtype=torch.bool).share_memory_()  # shared by the loading processes

    def get(self, files: Sequence[Path], settings: tuple, make: Callable[[], Made]) -> Made | Tensor:
        """Return the cached example, mapped into memory, or make and store it; None is not stored."""
        if not self.limit:
            return make()
        states = [(str(path), path.stat()) for path in files]
        key = ([(path, state.st_size, state.st_mtime_ns) for path, state in states], torch.__version__, settings)
        digest = hashlib.sha256(repr(key).encode(errors="surrogateescape")).hexdigest()
        place = self._folder / digest[:2] / f"{digest[2:34]}.safetensors"
        with suppress(OSError, SafetensorError), safe_open(place, "pt") as stored:
            return stored.get_tensor("example")
        example = make()
        if example is not None and self.has_room(example.nbytes):
            content = save({"example": example.contiguous()})
            try:
                write_whole(place, content)
                self._uncounted += len(content)
            except OSError as error:
                self._stop(str(error))
        return example

    def has_room(self, nbytes: int) -> bool:
        """Return whether an example of this size would be stored."""
        if not self.limit or self._full:
            return False
        if self._used is None or self._uncounted > self.limit // SCANS:
            self._used, self._uncounted = _bytes_below(self._folder), 0
        if self._used + self._uncounted + nbytes + HEADER <= self.limit:
            return True
        self._stop(f"the limit of {self.limit / 2**30:g} GiB is reached")
        return False

    @property
    def _folder(self) -> Path:
        return cache_folder() / "examples"

    def _stop(self, why: str) -> None:
        self._full.fill_(True)
        advice = "delete this folder or change --data.cache_gib"
        logger.warning("no further examples are cached in %s: %s (%s)", self._folder, why, advice)


def _bytes_below(folder: Path) -> int:
    total = 0
    for path in folder.glob("*/*"):
        with suppress(OSError):  # another process renames or deletes it
            total += path.stat().st_size
    return total
