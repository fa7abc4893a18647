"""Listing of the files and sub-folders of a data set, without those that operating systems add."""

import logging
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from torchrope_lab.data.faults import first_of

ADDED = ("__macosx", "thumbs.db", "ehthumbs.db", "desktop.ini", "@eadir")

logger = logging.getLogger(__name__)


def is_system_file(name: str) -> bool:
    """Return whether a name is hidden (as `._*` and `.DS_Store`) or created by an archiver or a file manager.

    Example:
        >>> [is_system_file(name) for name in ("__MACOSX", "._cat.png", "Thumbs.db", "cat.png")]
        [True, True, True, False]
    """
    return name.startswith(".") or name.lower() in ADDED


def subfolders(folder: Path) -> list[str]:
    """List the names of the folders in a folder, sorted."""
    return sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and not is_system_file(entry.name))


def files_below(folder: Path, root: Path, extensions: Sequence[str] = ("",)) -> list[str]:
    """List the files in `folder` at any depth with one of the extensions (any case), as sorted paths below `root`."""

    def refuse(error: OSError) -> None:  # by default a folder that cannot be listed is empty
        raise error

    paths = []
    for parent, folders, files in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not is_system_file(name)]
        below = Path(parent).relative_to(root)
        names = (name for name in files if name.lower().endswith(tuple(extensions)) and not is_system_file(name))
        paths += [(below / name).as_posix() for name in names]
    return sorted(paths)


def matching(folder: Path, pattern: str) -> list[Path]:
    """List the files that match a glob pattern, such as `*` or `*/*`, sorted."""
    return sorted(path for path in folder.glob(pattern) if not any(map(is_system_file, path.relative_to(folder).parts)))


def matching_parts(folder: Path, *patterns: str) -> tuple[list[Path], list[Path]]:
    """List the files of train and of val whose glob patterns match with {} for the part, sorted."""
    # A file that matches as both, such as `trainval.json`, is of train only.
    train, val = (
        sorted({path for pattern in patterns for path in matching(folder, pattern.format(part))})
        for part in ("train", "val")
    )
    return train, [path for path in val if path not in train]


def warn_unread(root: Path, read: Iterable[str], kind: str) -> str:
    """Warn in one line about the files below `root` that are not read, counted by extension; return it or ""."""
    read_paths = set(read)
    others = [path for path in files_below(root, root) if path not in read_paths]
    if not others:
        return ""
    counts = Counter(Path(path).suffix.lower() or "without extension" for path in others)
    number = ", ".join(f"{count} {extension}" for extension, count in counts.most_common())
    warning = f"{number} not read because they are not {kind}: {first_of(others)}"
    logger.warning("%s", warning)
    return warning
