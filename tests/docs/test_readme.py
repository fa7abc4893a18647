"""The README's code runs as printed."""

import re
import textwrap
from pathlib import Path

import pytest

README = (Path(__file__).parents[2] / "README.md").read_text()
EXAMPLES = [
    textwrap.dedent(block) for block in re.findall(r"^ *```python\n(.*?)^ *```", README, re.DOTALL | re.MULTILINE)
]


def test_library_example_runs_as_printed(capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(EXAMPLES[0], "README.md", "exec"), {})
    assert capsys.readouterr().out == "torch.Size([8, 12, 197, 64]) torch.Size([1, 5])\n"
    assert len([line for line in EXAMPLES[0].splitlines() if line]) <= 12


def test_readme_examples_run_as_printed() -> None:
    for example in EXAMPLES[1:]:
        exec(compile(example, "README.md", "exec"), {})


def test_files_that_the_readme_names_exist() -> None:
    root = Path(__file__).parents[2]
    for link in re.findall(r"\]\(([^)]+)\)", README):
        assert link.startswith("https://") or (root / link).exists(), link
