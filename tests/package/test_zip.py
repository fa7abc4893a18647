"""The library imports from a zip, as a frozen application holds it: no module reads its own source."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src"
PROGRAM = """
import torch, torchrope as tr
assert ".zip" in tr.__file__, tr.__file__
q, encoding = torch.randn(1, 2, 9, 8), tr.MixedRoPE(num_axes=2, num_heads=2, head_dim=8)
assert tr.rotate(q, q, encoding(tr.grid(3, 3)))[0].shape == q.shape
"""


def test_library_imports_from_a_zip(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "library.zip", "w") as file:
        for path in SOURCE.glob("torchrope/**/*.py"):
            file.write(path, path.relative_to(SOURCE))
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "library.zip")}
    subprocess.run([sys.executable, "-c", PROGRAM], env=environment, cwd=tmp_path, check=True)
