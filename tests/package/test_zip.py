"""The library runs from a zip, as in a frozen application, and without a home directory, as under any uid."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src"
PROGRAM = """
import os, pwd

def absent(uid):
    raise KeyError(uid)

os.environ.pop("HOME", None)
pwd.getpwuid = absent
import torch, torchrope as tr
from torchrope.ops import record
assert ".zip" in tr.__file__, tr.__file__
assert record.user_record() is None and not record._verified("sm_90")
q, encoding = torch.randn(1, 2, 9, 8), tr.MixedRoPE(num_axes=2, num_heads=2, head_dim=8)
assert tr.rotate(q, q, encoding(tr.grid(3, 3)))[0].shape == q.shape
"""


@pytest.mark.slow
def test_library_runs_from_a_zip_and_without_a_home(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "library.zip", "w") as file:
        for path in SOURCE.glob("torchrope/**/*.py"):
            file.write(path, path.relative_to(SOURCE))
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "library.zip")}
    subprocess.run([sys.executable, "-W", "error:ignored", "-c", PROGRAM], env=environment, cwd=tmp_path, check=True)
