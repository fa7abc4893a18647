"""Tests of swapped transformers of diffusers under their context-parallel plans, in two processes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("diffusers")

SUPPORT = Path(__file__).resolve().parents[1] / "support"


@pytest.mark.slow
def test_swapped_models_give_the_outputs_and_gradients_of_one_process(tmp_path: Path) -> None:
    command = [sys.executable, str(SUPPORT / "context_parallel.py"), str(tmp_path)]
    processes = [subprocess.Popen([*command, str(rank)], stderr=subprocess.PIPE, text=True) for rank in range(2)]
    printed = [process.communicate(timeout=600)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], printed
    received = json.loads((tmp_path / "found.json").read_text())
    assert received["found"].keys() == {"flux", "flux2", "qwen", "wan", "ltx"}
    for name, found in received["found"].items():
        assert found["output"] < 2e-5, name
        assert found["plain"] < 2e-5, name
        assert found["gradients"], name
        assert max(found["gradients"]) < 2e-5, name
    rule = "swap and unswap must be called before enable_parallelism"
    assert received["refused"] == [f"{rule}, got a WanTransformer3DModel that is already parallel"] * 2
