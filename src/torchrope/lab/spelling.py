"""The nearest known name to a misspelled one, for error messages."""

import difflib
from collections.abc import Iterable


def closest(word: str, known: Iterable[str], cutoff: float = 0.5) -> str | None:
    """The known name that is spelled most like a word, None where none is similar.

    Args:
        word: What was written.
        known: Names that there are.
        cutoff: Least similarity, difflib's ratio, from 0 to 1.
    """
    return next(iter(difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff)), None)


def suggestion(name: str | None) -> str:
    """The end of an error message that names what was probably meant, empty for None.

    Example:
        >>> suggestion(closest("lier", ["liere", "mixed"]))
        "; did you mean 'liere'?"
    """
    return "" if name is None else f"; did you mean {name!r}?"
