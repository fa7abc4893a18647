"""Unreadable files: listed, counted and skipped up to a limit, beyond which reading raises with the list."""

import logging
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

import torch

from torchrope_lab.mistakes import Mistake

NAMED_IN_WARNING = 5

logger = logging.getLogger(__name__)

Fault = tuple[str, str]  # path below root, description of the fault
A = TypeVar("A")
T = TypeVar("T")


class TooManyFaults(Mistake):
    """Raised if more files are unreadable than `max_skipped` allows."""


def reason(error: Exception) -> str:
    """Describe an error of a decoder in one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    text = f"no {text}" if isinstance(error, KeyError) else text
    return "truncated" if "truncated" in text.lower() else text


def find_faults(
    paths: Sequence[str], read: Callable[[str], object], explain: Callable[[Exception], str] = reason
) -> list[Fault]:
    """Read every file once, in threads, and return the unusable ones with the reason, in the order of `paths`."""

    with ThreadPoolExecutor() as pool:
        errors = pool.map(lambda path: attempt(read, path)[1], paths)
        return [(path, explain(error)) for path, error in zip(paths, errors, strict=True) if error is not None]


def attempt(read: Callable[[A], T], argument: A) -> tuple[T | None, Exception | None]:
    """Return the result of a decoder, or its error; only lack of memory is raised."""
    # Decoders raise many types of errors on damaged files; each means that the file is unusable.
    try:
        return read(argument), None
    except MemoryError:
        raise
    except Exception as error:
        return None, error


def warn_skipped(faults: Sequence[Fault], total: int, limit: int, kind: str = "files") -> None:
    """Warn about skipped files in one line; raise ValueError if they are all, or more than `limit`, with a list."""
    if len(faults) == total:
        named = f": {name_some(faults)}" if faults else ""
        raise Mistake(f"--data.root must hold readable {kind}, found 0 of {total}{named}")
    if len(faults) > limit:
        raise _too_many(faults, limit, kind)
    if faults:
        logger.warning("skipped %d of %d %s: %s", len(faults), total, kind, name_some(faults))


def name_some(faults: Sequence[Fault], number: int = NAMED_IN_WARNING) -> str:
    """List the first files with their faults, and count the others."""
    return first_of([f"{path} ({fault})" for path, fault in faults], number)


def first_of(names: Sequence[str], number: int = NAMED_IN_WARNING) -> str:
    """List the first names, and count the others."""
    return ", ".join(names[:number]) + (f" and {len(names) - number} more" if len(names) > number else "")


class Skipping(Generic[T]):
    """Read examples on access and skip the unreadable ones, for data too large to be checked before training."""

    # An unreadable example is logged once, counted, and replaced by the next readable one in the set: the replacement
    # depends on the files only, not on the seed, the order or the number of loading processes. The count is in shared
    # memory of these processes.

    def __init__(self, names: Sequence[str], load: Callable[[int], T], limit: int, kind: str = "files") -> None:
        self.names = names
        self.load = load
        self.limit = limit
        self.kind = kind
        self._broken = torch.zeros(len(names), dtype=torch.bool).share_memory_()
        self._reasons: dict[int, str] = {}

    def get(self, index: int) -> T:
        """Read an example, or the next readable one; raise TooManyFaults, which lists all, after more than `limit`."""
        if not 0 <= index < len(self.names):
            raise IndexError(f"index must be at least 0 and below {len(self.names)}, got {index}")
        for offset in range(len(self.names)):
            candidate = (index + offset) % len(self.names)
            # Broken examples are tried again, so that the data of a run does not depend on earlier reads.
            example, error = attempt(self.load, candidate)
            if error is None:
                return example  # type: ignore[return-value]
            self._note(candidate, error)
        raise TooManyFaults(f"none of the {self.kind} can be read: {name_some(self.found())}")

    def found(self) -> list[Fault]:
        """List the examples that were unreadable so far, in any process."""
        # A copy: nonzero() fails if another process writes at the same time.
        return [(self.names[index], self._why(index)) for index in self._broken.clone().nonzero().flatten().tolist()]

    def remember(self, names: Iterable[str]) -> None:
        """Count examples that an earlier start or another process could not read, if they are still unreadable."""
        previous = set(names)
        for index, name in enumerate(self.names):
            if name in previous and not self._broken[index]:
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
        """Return the reason; if another process found the fault, read the example again to get it."""
        if index not in self._reasons and not self._fails(index):
            self._reasons[index] = "unreadable once"
        return self._reasons[index]

    def _fails(self, index: int) -> bool:
        _, error = attempt(self.load, index)
        if error is not None:
            self._reasons[index] = reason(error)
        return error is not None


def _too_many(faults: Sequence[Fault], limit: int, kind: str) -> TooManyFaults:
    listed = name_some(faults, len(faults))
    return TooManyFaults(f"at most --data.max_skipped = {limit} {kind} may be unreadable, got {len(faults)}: {listed}")
