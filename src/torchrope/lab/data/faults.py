"""Unreadable files: listed, counted and skipped up to a limit, beyond which reading raises with the list."""

import logging
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

import torch

NAMED_IN_WARNING = 5
LARGEST_RATIO = 1032
"""A byte holds so many at most where deflate compressed them, as in .gz."""
ANY_FILE = 2**28
"""Bytes that any file may claim: images of one value compress better than that."""

logger = logging.getLogger(__name__)

Fault = tuple[str, str]  # path below root, what is wrong with it
T = TypeVar("T")


class TooManyFaults(ValueError):
    """More files cannot be read than `max_skipped` allows."""

    def __init__(self, message: str) -> None:
        # A loader's process sends its traceback along; the rule stands after the name of this class.
        super().__init__(message.rpartition(f"{type(self).__name__}: ")[2].strip())


def reason(error: Exception) -> str:
    """Say in one line what an error of a decoder means."""
    text = " ".join(str(error).split()) or type(error).__name__
    return "truncated" if "truncated" in text.lower() else text


def check_claim(claimed: int, size: int) -> None:
    """Raise ValueError where a header claims more bytes than its file can hold, before memory is taken for them.

    Args:
        claimed: Bytes of pixels or voxels, by the header.
        size: Bytes of the file.
    """
    if claimed > max(LARGEST_RATIO * size, ANY_FILE):
        raise ValueError(f"the header claims {claimed:,} bytes, more than a file of {size:,} can hold")


def find_faults(
    paths: Sequence[str], read: Callable[[str], object], explain: Callable[[Exception], str] = reason
) -> list[Fault]:
    """Read every file once, in threads, before the training.

    Args:
        paths: The files, below the root.
        read: Raises where a file cannot be used.
        explain: Says what an error means.

    Returns:
        Those that cannot be used, in the order of `paths`.
    """

    def fault(path: str) -> str | None:
        try:
            read(path)
        except MemoryError:
            raise
        # Decoders raise many kinds on damaged files; all of them mean that the file cannot be used.
        except Exception as error:
            return explain(error)
        return None

    with ThreadPoolExecutor() as pool:
        return [(path, why) for path, why in zip(paths, pool.map(fault, paths), strict=True) if why is not None]


def warn_skipped(faults: Sequence[Fault], total: int, limit: int, kind: str = "files") -> None:
    """Warn of what is left out, in one line.

    Args:
        faults: What cannot be used.
        total: How many files there are.
        limit: How many may be left out, `FilesConfig.max_skipped`.
        kind: What the files are, for the message.

    Raises:
        TooManyFaults: they are more than `limit`; the message names them all.
    """
    if len(faults) > limit:
        raise _too_many(faults, limit, kind)
    if faults:
        logger.warning("skipped %d of %d %s: %s", len(faults), total, kind, name_some(faults))


def name_some(faults: Sequence[Fault], number: int = NAMED_IN_WARNING) -> str:
    """Name the first files with what is wrong, and count the others."""
    named = [f"{path} ({fault})" for path, fault in faults[:number]]
    others = len(faults) - len(named)
    return ", ".join(named) + (f" and {others} more" if others else "")


class Skipping(Generic[T]):
    """Read examples while training, where reading all of them before would take too long.

    An example that cannot be read is named once in a warning, counted, and replaced by the next one in the set
    that can: a function of the files alone, whatever the seed, the order and the number of loading processes.
    The count is in memory that those processes share.

    Args:
        names: What each example is called, by index.
        load: Reads the example at an index.
        limit: How many may be left out, `FilesConfig.max_skipped`.
        kind: What the examples are, for messages.

    Example:
        >>> Skipping(["a", "b"], lambda index: 2 * index, limit=0).get(1)
        2
    """

    def __init__(self, names: Sequence[str], load: Callable[[int], T], limit: int, kind: str = "files") -> None:
        self.names = names
        self.load = load
        self.limit = limit
        self.kind = kind
        self._broken = torch.zeros(len(names), dtype=torch.bool).share_memory_()
        self._reasons: dict[int, str] = {}

    def get(self, index: int) -> T:
        """Read an example, or the next one that can be read.

        Raises:
            TooManyFaults: more than `limit` could not be read so far; the message names them all.
            IndexError: there is no such example; Python ends an iteration by it.
        """
        if not 0 <= index < len(self.names):
            raise IndexError(f"index must be at least 0 and below {len(self.names)}, got {index}")
        for ahead in range(len(self.names)):
            candidate = (index + ahead) % len(self.names)
            # Known to be broken, it is tried again: what a run sees must not depend on what it remembers.
            try:
                return self.load(candidate)
            except MemoryError:
                raise
            except Exception as error:  # as in find_faults
                self._note(candidate, error)
        raise TooManyFaults(f"some of the {self.kind} must be readable, got none: {name_some(self.found())}")

    def found(self) -> list[Fault]:
        """List the examples that could not be read so far, by any process."""
        # A copy: what another process notes while they are counted would be an error within torch.
        return [(self.names[index], self._why(index)) for index in self._broken.clone().nonzero().flatten().tolist()]

    def remember(self, names: Iterable[str]) -> None:
        """Count examples that another start or process could not read, where this one cannot either.

        Raises:
            TooManyFaults: with them there are more than `limit`.
        """
        wanted = set(names)
        for index, name in enumerate(self.names):
            if name in wanted and not self._broken[index]:
                self._broken[index] = self._fails(index)
        if int(self._broken.sum()) > self.limit:
            raise _too_many(self.found(), self.limit, self.kind)

    def _note(self, index: int, error: Exception) -> None:
        if self._broken[index]:
            return
        self._broken[index] = True
        count = int(self._broken.sum())
        if count > self.limit:
            raise _too_many(self.found(), self.limit, self.kind) from error
        logger.warning("skipped %s (%s), %d of at most %d", self.names[index], reason(error), count, self.limit)

    def _why(self, index: int) -> str:
        """Read it again, once: the error may have been another process's."""
        if index not in self._reasons and not self._fails(index):
            self._reasons[index] = "unreadable once"
        return self._reasons[index]

    def _fails(self, index: int) -> bool:
        try:
            self.load(index)
        except MemoryError:
            raise
        except Exception as error:
            self._reasons[index] = reason(error)
            return True
        return False


def _too_many(faults: Sequence[Fault], limit: int, kind: str) -> TooManyFaults:
    listed = name_some(faults, len(faults))
    return TooManyFaults(f"at most --data.max_skipped = {limit} {kind} may be unreadable, got {len(faults)}: {listed}")
