"""Imports of the library go down the layers of pyproject.toml, also those in functions and by a name in a string."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_, CONTRACT = (ROOT / "pyproject.toml").read_text(encoding="utf-8").split('containers = ["torchrope"]\nlayers = [')
LAYERS = re.findall(r'"(.*?)"', CONTRACT.partition("]")[0])
DEPTH = {part: depth for depth, layer in enumerate(LAYERS) for part in layer.split(" | ")}
MODULE = re.compile(rf"(torchrope)?\.+({'|'.join(DEPTH)})(\.\w*)*")


def named_in(code: str) -> Iterator[str]:
    """Yield what code imports at any depth, and its strings that are, or begin, the name of a module."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{'.' * node.level}{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and MODULE.fullmatch(str(node.value)):
            yield str(node.value)


def upwards(part: str, code: str) -> list[str]:
    """Return what code of a part of the library names that is above it, beside it, or the library as a whole."""
    below = {part, *(other for other in DEPTH if DEPTH[other] > DEPTH[part])}
    named = [name for name in named_in(code) if re.match(r"(torchrope)?(\.|$)", name)]
    return [name for name in named if f"{name}.".split(".")[1] not in below]


@pytest.mark.parametrize("part", DEPTH)
def test_imports_go_down(part: str) -> None:
    folder = ROOT / "src/torchrope" / part
    files = sorted(folder.rglob("*.py")) or [folder.with_suffix(".py")]
    found = {file.name: upwards(part, file.read_text(encoding="utf-8")) for file in files}
    assert not {file: names for file, names in found.items() if names}


@pytest.mark.parametrize("name", ["integrations.swap", "checkpoints", "verify", "swap"])
@pytest.mark.parametrize("code", ["import torchrope.{}", "def f():\n    from torchrope.{} import it"])
def test_upward_imports_are_seen(code: str, name: str) -> None:
    assert len(upwards("models", code.format(name))) == 1


def test_upward_names_in_strings_are_seen() -> None:
    code = "import_module('torchrope.integrations.hub'), import_module('torchrope.ops.gpu'), 'torchrope.safetensors'"
    assert upwards("models", code) == ["torchrope.integrations.hub"]
    assert upwards("models", "import_module(f'torchrope.integrations.{name}')") == ["torchrope.integrations."]
    assert upwards("models", "import_module('.integrations.hub', 'torchrope')") == [".integrations.hub"]
