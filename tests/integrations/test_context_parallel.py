"""Tests of tokens that are split over two processes, by plans of diffusers for swapped models, and by torch."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("diffusers")

SUPPORT = Path(__file__).resolve().parents[1] / "support"


@pytest.mark.slow
def test_outputs_and_gradients_of_two_processes_are_those_of_one(tmp_path: Path) -> None:
    command = [sys.executable, str(SUPPORT / "context_parallel.py"), str(tmp_path)]
    processes = [subprocess.Popen([*command, str(rank)], stderr=subprocess.PIPE, text=True) for rank in range(2)]
    printed = [process.communicate(timeout=600)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], printed
    for rank in range(2):
        report = json.loads((tmp_path / f"found{rank}.json").read_text())
        assert report["found"].keys() == {"flux", "flux2", "qwen", "wan", "ltx"}
        for name, found in report["found"].items():
            assert found["gradients"], name
            assert max(found["output"], found["plain"], *found["gradients"]) < 2e-5, name
        rule = "swap and unswap must be called before enable_parallelism"
        assert report["refused"] == [f"{rule}, got a WanTransformer3DModel that is already parallel"] * 2
        assert report["sharded by torch"] < 1e-5
        assert max(report["heads"]) < 1e-5
