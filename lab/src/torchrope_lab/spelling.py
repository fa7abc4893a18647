"""Suggestions for misspelled names, for error messages."""

import difflib
from collections.abc import Iterable


def closest(word: str, known: Iterable[str], cutoff: float = 0.5) -> str | None:
    """Return the known name that is spelled most like a word, None if none has difflib's ratio `cutoff`."""
    return next(iter(difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff)), None)


def suggestion(name: str | None) -> str:
    """Return the end of an error message that suggests a name, "; did you mean 'liere'?", empty for None."""
    return "" if name is None else f"; did you mean {name!r}?"
