"""--slurm: its options, and the request to Slurm."""

from pathlib import Path
from typing import Any

import pytest

from torchrope_lab.studies.slurm import parse_slurm, slurm_executor


def test_options_of_sbatch_are_numbers_and_words() -> None:
    assert parse_slurm("partition=gpu,gpus-per-node=8, mem=64GB") == {
        "partition": "gpu",
        "gpus_per_node": 8,
        "mem": "64GB",
    }


@pytest.mark.slow
def test_slurm_array_gets_the_signal_that_we_handle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("submitit")
    monkeypatch.setenv("PATH", str(tmp_path))
    for name, text in {"srun": "", "sbatch": f'/bin/cp "$1" {tmp_path}/sent\necho Submitted batch job 77\n'}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}")
        (tmp_path / name).chmod(0o755)
    refused: list[tuple[dict[str, Any], str]] = [
        ({}, "--slurm must include time=MINUTES, got nothing"),
        ({"time": 30, "gpu": 8}, "got 'gpu'"),
    ]
    for options, message in refused:
        with pytest.raises(ValueError, match=message):
            slurm_executor(tmp_path / "jobs", options)
    executor = slurm_executor(tmp_path / "jobs", parse_slurm("partition=gpu,time=30,gpus-per-node=8"))
    assert [job.job_id for job in executor.map_array(abs, [1, 2, 3])] == ["77_0", "77_1", "77_2"]
    sent = (tmp_path / "sent").read_text()
    wanted = ("array=0-2%3", "partition=gpu", "time=30", "gpus-per-node=8", "signal=SIGUSR1@120", "requeue")
    assert [f"#SBATCH --{option}\n" in sent for option in wanted] == [True] * len(wanted)
    assert len(list((tmp_path / "jobs").glob("77_*_submitted.pkl"))) == 3
