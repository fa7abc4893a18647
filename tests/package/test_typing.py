"""A user's program passes type checkers: the package has py.typed, and public names have types that fit their use."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import torchrope

SOURCE = Path(__file__).parents[2] / "src"
PROGRAM = '''
import torch
from torch import Tensor, nn

import torchrope as tr


class SelfAttention(nn.Module):
    """Attention that rotates q and k."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.encoding: tr.Encoding = tr.LieRE(num_axes=2, num_heads=num_heads, head_dim=dim // num_heads, block_size=8)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        q, k = tr.rotate(q, k, self.encoding(positions))
        out = nn.functional.scaled_dot_product_attention(q, k, v)
        return out.transpose(1, 2).flatten(2)


positions: Tensor = tr.prefix(tr.grid(8, 8, spacing=1 / 8), 1)
out: Tensor = SelfAttention(64, 4)(torch.randn(2, 65, 64), positions)
model: tr.ViT = tr.ViT((32, 32), patch_size=4, num_outputs=10, dim=64, depth=2, num_heads=4, encoding="mixed")
larger: tr.ViT = tr.extend(model, (2, 2), method="ntk")
frozen: nn.Module = tr.freeze(larger, (64, 64))
relative: bool = tr.MixedRoPE(num_axes=1, num_heads=1, head_dim=4).relative
swapped: nn.Sequential = tr.swap(nn.Sequential(nn.Identity()), tr.LieRE, block_size=8)
back: nn.Sequential = tr.unswap(swapped)
'''
MISTAKE = "wrong: str = tr.grid(8, 8)\n"


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


def check(command: list[str], path: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*command, str(path)], cwd=path.parent, capture_output=True, text=True)


@pytest.mark.slow
def test_users_program_passes_mypy_strict(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mypy")
    monkeypatch.setenv("MYPYPATH", str(SOURCE))
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(program.parent / "cache")]
    checked = check(command, program)
    assert checked.returncode == 0, checked.stdout
    program.write_text(PROGRAM + MISTAKE)
    assert "Incompatible types in assignment" in check(command, program).stdout


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("pyright") is None, reason="pyright is not installed")
def test_users_program_passes_pyright(program: Path) -> None:
    settings = f'{{"extraPaths": ["{SOURCE}"], "typeCheckingMode": "standard"}}'
    (program.parent / "pyrightconfig.json").write_text(settings)
    command = ["pyright", "--pythonpath", sys.executable]
    checked = check(command, program)
    assert checked.returncode == 0, checked.stdout
    program.write_text(PROGRAM + MISTAKE)
    assert "reportAssignmentType" in check(command, program).stdout


def test_names_are_there() -> None:
    assert {"__version__", "rotate", "LieRE", "swap"} <= {*torchrope.__all__} <= {*dir(torchrope)}
