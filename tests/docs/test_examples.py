"""The examples run, and their numbers in the docs are those measured."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_trained_vit_is_swapped_and_fine_tuned(tmp_path: Path) -> None:
    sizes = ["--train-size=160", "--val-size=80", "--patch-size=2", "--pretrain-epochs=1", "--epochs=1"]
    out = tmp_path / "finetune.json"
    options = ["--data=digits", *sizes, "--encodings=mixed", f"--out={out}"]
    command = [sys.executable, "examples/finetune_timm.py", *options]
    told = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    rows = json.loads(out.read_text())["rows"]
    assert [row["model"] for row in rows] == ["trained", "without an encoding", "mixed"]
    assert all(row["interval"][0] <= row["top1"] <= row["interval"][1] for row in rows)
    assert [line.split("  ")[0] for line in told.splitlines()] == ["model", *(row["model"] for row in rows)]


def test_page_names_what_was_measured() -> None:
    page = (ROOT / "docs/use-it-in-your-model.md").read_text()
    for row in json.loads((ROOT / "docs/results/finetune/finetune.json").read_text())["rows"]:
        low, high = row["interval"]
        assert f"{100 * row['top1']:.2f} [{100 * low:.2f}, {100 * high:.2f}]" in page
