"""Every law over every encoding."""

import pytest
from cases import CASES

from torchrope import testing


@pytest.mark.parametrize("law", testing.LAWS)
@pytest.mark.parametrize("case", CASES)
def test_law(case: str, law: str) -> None:
    testing.LAWS[law](CASES[case])
