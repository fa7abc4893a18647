"""The README's code runs as printed."""

import re
import sys
import textwrap
import types
from pathlib import Path

import pytest
import torch

README = (Path(__file__).parents[2] / "README.md").read_text()
EXAMPLES = [
    textwrap.dedent(block) for block in re.findall(r"^ *```python\n(.*?)^ *```", README, re.DOTALL | re.MULTILINE)
]


def test_the_library_example_runs_as_printed(capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(EXAMPLES[0], "README.md", "exec"), {})
    assert capsys.readouterr().out == "torch.Size([8, 12, 197, 64]) torch.Size([1, 5])\n"
    assert len([line for line in EXAMPLES[0].splitlines() if line]) <= 12


def test_own_encoding_example_runs_as_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("readme")  # a home for the class, or it could not be pickled
    monkeypatch.setitem(sys.modules, "readme", module)
    for example in EXAMPLES[1:]:
        exec(compile(example, "README.md", "exec"), module.__dict__)
    model = module.tr.ViT((32, 32), patch_size=4, encoding=module.Isotropic, dim=64, depth=1, num_heads=4)
    assert model(torch.zeros(1, 3, 32, 32)).shape == (1, 1000)


def test_every_file_that_the_readme_names_is_there() -> None:
    root = Path(__file__).parents[2]
    for link in re.findall(r"\]\(([^)]+)\)", README):
        assert (root / link).exists(), link
