"""`swap` preserves the outputs of every supported family to the bound that README and docs state."""

import runpy
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "benchmarks/families.py"))


def test_bound_is_the_one_that_readme_and_docs_state(script: dict[str, Any]) -> None:
    for page in ("README.md", "docs/use-it-in-your-model.md"):
        assert f"to {script['BOUND']:.0e} of the largest".replace("e-0", "e-") in (ROOT / page).read_text()


@pytest.mark.slow
def test_every_family_stays_within_the_bound(script: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert script["main"]() == 0
    families = [line for line in capsys.readouterr().out.splitlines() if line.endswith("bit-equal")]
    assert f"| {len(families)} | `python benchmarks/families.py`" in (ROOT / "README.md").read_text()
