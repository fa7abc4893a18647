"""The Triton kernels of every family, on a CUDA device where there is one, in Triton's interpreter otherwise."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

KERNELS = Path(__file__).with_name("gpu_kernels.py")


@pytest.mark.parametrize("family", ["planar", "planes", "block", "skew_exp", "basis", "library"])
def test_kernels_equal_float64(family: str) -> None:
    run_kernels(family, "not slow")


@pytest.mark.slow
@pytest.mark.parametrize("family", ["planes", "block", "skew_exp", "basis"])
def test_kernels_of_large_blocks_equal_float64(family: str) -> None:
    run_kernels(family, "slow")


def run_kernels(family: str, cases: str) -> None:
    interpreted = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        str(KERNELS),
        "-k",
        f"test_{family}_ or test_{family}[",
        "-m",
        cases,
    ]
    ran = subprocess.run(command, env={**os.environ, **interpreted}, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
