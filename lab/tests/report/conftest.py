"""A browser for the tests of pages."""

from collections.abc import Iterator

import pytest
from chromium import BINARY, Chromium


@pytest.fixture(scope="module")
def browser() -> Iterator[Chromium]:
    """A headless Chromium."""
    if BINARY is None:
        pytest.skip("no chromium here (Debian: apt-get install chromium)")
    chromium = Chromium()
    yield chromium
    chromium.close()
