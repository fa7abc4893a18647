"""Files and sub-folders of a data set's folder, without those that operating systems add."""

import logging
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

NAMED_IN_WARNING = 5
ADDED = ("__macosx", "thumbs.db", "ehthumbs.db", "desktop.ini", "@eadir")

logger = logging.getLogger(__name__)


def is_added(name: str) -> bool:
    """Whether a file or a folder is hidden (`._*` and `.DS_Store` are), or made by an archiver or a file manager.

    Example:
        >>> [is_added(name) for name in ("__MACOSX", "._cat.png", "Thumbs.db", "cat.png")]
        [True, True, True, False]
    """
    return name.startswith(".") or name.lower() in ADDED


def subfolders(folder: Path) -> list[str]:
    """Names of the folders in a folder, sorted.

    Raises:
        ValueError: it cannot be listed.
    """
    try:
        return sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and not is_added(entry.name))
    except OSError as error:
        raise unlisted(error) from error


def files_below(folder: Path, root: Path, extensions: Sequence[str] = ("",)) -> list[str]:
    """Paths below `root` of the files in `folder` at any depth whose names end so, in any case, sorted.

    Raises:
        ValueError: a folder cannot be listed.
    """

    def refuse(error: OSError) -> None:
        raise unlisted(error) from error

    found = []
    for place, folders, files in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not is_added(name)]
        below = Path(place).relative_to(root)
        wanted = (name for name in files if name.lower().endswith(tuple(extensions)) and not is_added(name))
        found += [(below / name).as_posix() for name in wanted]
    return sorted(found)


def matching(folder: Path, pattern: str) -> list[Path]:
    """The files of a pattern, `*` or `*/*`, sorted."""
    return sorted(path for path in folder.glob(pattern) if not any(map(is_added, path.relative_to(folder).parts)))


def warn_unread(root: Path, read: Iterable[str], wanted: str) -> None:
    """Warn, in one line, of the files below `root` that are not read.

    Args:
        root: The folder.
        read: Paths below it of the files that are.
        wanted: What is read.
    """
    known = set(read)
    others = [path for path in files_below(root, root) if path not in known]
    if others:
        named = ", ".join(others[:NAMED_IN_WARNING])
        more = f" and {len(others) - NAMED_IN_WARNING} more" if len(others) > NAMED_IN_WARNING else ""
        logger.warning("not read, as they are no %s: %s%s", wanted, named, more)


def unlisted(error: OSError) -> ValueError:
    """Make the error for a folder that cannot be listed."""
    return ValueError(f"every folder below --data.root must be readable, got {error.filename!r}: {error.strerror}")
