"""One version, wherever it is written."""

import re
from pathlib import Path

import pytest

from torchrope import __version__

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("lab/pyproject.toml", 'version = "{}"'),
        ("lab/pyproject.toml", '"torchrope=={}",'),
        ("CITATION.cff", "\nversion: {}"),
        ("README.md", "## Status\n\n{}, "),
        ("CHANGELOG.md", "## {} "),
    ],
)
def test_version_is_the_same_everywhere(file: str, line: str) -> None:
    text = (ROOT / file).read_text(encoding="utf-8")
    assert re.findall(re.escape(line).replace(r"\{\}", r"(\d[\w.]*\w)"), text)[0] == __version__
