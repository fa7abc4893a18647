"""How the API page reads docstrings: formulas as code, examples as examples, sources as a paragraph."""

import re
from typing import Any

import griffe

FORMULA = re.compile(r"(?<=:)  (\S.*?)(?=\.(?: +[A-Z]|$)|$)", re.MULTILINE)
EXAMPLE = re.compile(r"^Example:$", re.MULTILINE)
REFERENCES = re.compile(r"^References:\n((?: {4}.*\n?)+)", re.MULTILINE)


class Docstrings(griffe.Extension):
    """Turn the library's docstrings into what the parser for Google's style knows."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of every object that is read."""
        if obj.docstring is not None:
            obj.docstring.value = readable(obj.docstring.value)


def readable(docstring: str) -> str:
    """Set formulas, which follow a colon and two spaces, as code; rename sections."""
    lines = [line if line.startswith("    ") else FORMULA.sub(r" `\1`", line) for line in docstring.split("\n")]
    text = EXAMPLE.sub("Examples:", "\n".join(lines))
    return REFERENCES.sub(lambda found: "*Source:* " + re.sub(r"^ {4}", "", found[1], flags=re.MULTILINE), text)
