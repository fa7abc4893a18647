"""The Triton kernels of every family, on a CUDA device if there is one, otherwise in Triton's interpreter."""

import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

KERNELS = Path(__file__).with_name("gpu_kernels.py")
CALLS = Path(__file__).with_name("gpu_calls.py")
LEASE = "from interpreted import checked; import gpu, sys; sys.exit(checked()(gpu.main)(['lease', *sys.argv[1:]]))"


@pytest.mark.slow
def test_public_calls_equal_the_reference_and_stay_inside_their_tensors() -> None:
    run(CALLS, interpreted=True)


FAMILIES = [("planar", "not slow"), *product(("block", "planes", "skew_exp", "basis"), ("not slow", "slow"))]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "cases"), FAMILIES)
def test_kernels_equal_float64(family: str, cases: str) -> None:
    chosen = "-k", f"test_{family}_ or test_{family}[", "-m", cases
    run(KERNELS, *chosen, interpreted=not torch.cuda.is_available())


def run(file: Path, *selected: str, interpreted: bool) -> None:
    # The interpreter of Triton 3.2, which torch 2.6 has, converts arrays in a way that NumPy deprecates.
    warns = "ignore:Conversion of an array with ndim > 0 to a scalar:DeprecationWarning"
    command = [sys.executable, "-m", "pytest", "-q", "-W", warns, "-p", "no:cacheprovider", str(file), *selected]
    environment = {**os.environ, **({"TRITON_INTERPRET": "1"} if interpreted else {})}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.slow
def test_what_is_measured_on_a_leased_gpu_runs_and_resumes(tmp_path: Path) -> None:
    root, out = Path(__file__).parents[2], tmp_path / "lease"
    paths = [str(root / "tests" / "support"), str(root / "benchmarks"), *sys.path]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-c", LEASE, str(out), "--dry-run", "--commit", "none"]
    for _ in range(2):
        ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stdout + ran.stderr
        measured = json.loads((out / "gpu.json").read_text())
        assert measured["errors"] == {}
        assert "training step of ViT-B/16 with mixed over none" in {row["name"] for row in measured["rows"]}
        assert (out / "verified_kernels.json").read_text().count("rotate_planar") == 1
        (out / "video.json").unlink()  # is measured again, and nothing else
    assert ran.stdout.startswith("video")
