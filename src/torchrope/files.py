"""Atomic writes of files."""

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

UNFINISHED = ".torchrope-unfinished-"
"""Prefix of the names of files that are being written."""


def write_whole(path: Path, content: str | bytes, move: Callable[[str, Path], None] | None = None) -> None:
    """Write a file atomically: if the process is killed or the disk is full, the old file, or none, remains.

    Any number of processes may write into one folder, and the same file. Unfinished files of killed processes in the
    folder are removed if the file system supports locks. `move` renames the finished file, `os.replace` by default.
    An OSError names the file.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(path.parent)
        with _unfinished(path.parent) as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
            os.chmod(file.name, 0o644)
            if os.name == "nt":
                file.close()  # Windows cannot replace an open file
            (move or os.replace)(file.name, path)
    except OSError as error:
        raise OSError(f"cannot write {path}: {error.strerror or error}") from error


@contextmanager
def _unfinished(folder: Path) -> Iterator[IO[bytes]]:
    """Yield a new file, locked while this process runs; it is removed on an exception."""
    while True:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=UNFINISHED, delete=False) as file:
            try:
                lock(file, wait=True)
                if os.path.exists(file.name):  # else another process removed it as abandoned before the lock
                    yield file
                    return
            except BaseException:
                Path(file.name).unlink(missing_ok=True)  # an interrupt may arrive right after the replacement
                raise


def _remove_abandoned(folder: Path) -> None:
    """Remove unfinished files whose processes have ended."""
    for path in folder.glob(f"{UNFINISHED}*"):
        with suppress(OSError), path.open("r+b") as file:  # another process may finish or remove it at any time
            if lock(file, wait=False):
                path.unlink()


def lock(file: IO[bytes], *, wait: bool) -> bool:
    """Lock a file until it is closed or its process ends; return False if it is locked or locks are unsupported."""
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except (ImportError, OSError):
        return False
    return True
