"""A user's mistakes, which are reported in one line; any other error keeps its traceback."""

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class Mistake(ValueError):
    """Raised by a check of what a user typed, or of a user's files."""

    def __init__(self, message: str) -> None:
        # A DataLoader worker prefixes its traceback; the original message follows the name of this class.
        super().__init__(message.rpartition(f"{type(self).__name__}: ")[2].strip())


IN_ONE_LINE = (Mistake, OSError, ModuleNotFoundError)
"""Errors that are told in one line: mistakes, files that cannot be used, packages that are missing."""


@contextmanager
def as_mistake() -> Iterator[None]:
    """Raise `Mistake` for the ValueError with which torchrope or Lightning refuses what a user chose."""
    try:
        yield
    except Mistake:
        raise
    except ValueError as error:
        raise Mistake(str(error).replace("; rotary_dim=", "; --model.rotary_dim ")) from error  # as an option


def closest(word: str, known: Iterable[str], cutoff: float = 0.5) -> str | None:
    """Return the known name that is spelled most like a word, None if none has difflib's ratio `cutoff`."""
    return next(iter(difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff)), None)


def suggestion(name: str | None) -> str:
    """Return the end of an error message that suggests a name, "; did you mean 'liere'?", empty for None."""
    return "" if name is None else f"; did you mean {name!r}?"
