"""Tell a user's mistake, which is reported in one line, from a bug, which keeps its traceback."""

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class Mistake(ValueError):
    """Raised by a check of what a user typed, or of a user's files."""

    def __init__(self, message: str) -> None:
        # A DataLoader worker prefixes its traceback; the original message follows the name of this class.
        super().__init__(message.rpartition(f"{type(self).__name__}: ")[2].strip())


@contextmanager
def as_mistake() -> Iterator[None]:
    """Raise `Mistake` for the ValueError with which torchrope or Lightning refuses what a user chose."""
    try:
        yield
    except Mistake:
        raise
    except ValueError as error:
        raise Mistake(str(error)) from error


def is_mistake(error: BaseException) -> bool:
    """Return whether an error is a user's and not a bug: a `Mistake`, or of a file or a missing package."""
    if isinstance(error, ModuleNotFoundError):
        return error.name is not None and not error.name.startswith("torchrope")
    return isinstance(error, OSError | Mistake)


def closest(word: str, known: Iterable[str], cutoff: float = 0.5) -> str | None:
    """Return the known name that is spelled most like a word, None if none has difflib's ratio `cutoff`."""
    return next(iter(difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff)), None)


def suggestion(name: str | None) -> str:
    """Return the end of an error message that suggests a name, "; did you mean 'liere'?", empty for None."""
    return "" if name is None else f"; did you mean {name!r}?"
