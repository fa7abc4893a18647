"""Suggestions for misspelled names, for error messages."""

import difflib
from collections.abc import Iterable


def closest(word: str, known: Iterable[str], cutoff: float = 0.5) -> str | None:
    """Return the known name that is spelled most like a word, None if none is similar.

    Args:
        word: The word, possibly misspelled.
        known: The valid names.
        cutoff: Least similarity, difflib's ratio, from 0 to 1.
    """
    return next(iter(difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff)), None)


def suggestion(name: str | None) -> str:
    """Return the end of an error message that suggests a name, empty for None.

    Example:
        >>> suggestion(closest("lier", ["liere", "mixed"]))
        "; did you mean 'liere'?"
    """
    return "" if name is None else f"; did you mean {name!r}?"
