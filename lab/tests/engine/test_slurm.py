"""--slurm: its options, and the request to Slurm."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from torchrope_lab.engine import workers
from torchrope_lab.engine.slurm import slurm_executor
from torchrope_lab.settings.study_config import LabConfig, parse_slurm


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
        ({"time": 30, "array_parallelism": 2}, "--slurm options are .*, got 'array_parallelism'"),
    ]
    for options, message in refused:
        with pytest.raises(ValueError, match=message):
            slurm_executor(tmp_path / "jobs", options)
    monkeypatch.setattr(workers, "run_all", lambda *_, **__: None)  # no job runs
    for parallel, together in ((None, 300), (2, 2), (400, 300)):  # not submitit's own limit of 256
        config = LabConfig(slurm="partition=gpu,time=30,gpus-per-node=8", parallel=parallel, out=str(tmp_path))
        workers.run_calls([(number, partial(abs, number)) for number in range(300)], config, lambda *_: None)
        sent = (tmp_path / "sent").read_text()
        limit = f"array=0-299%{together}"
        wanted = (limit, "partition=gpu", "time=30", "gpus-per-node=8", "signal=SIGUSR1@120", "requeue")
        assert [f"#SBATCH --{option}\n" in sent for option in wanted] == [True] * len(wanted)
    assert len(list((tmp_path / "runs" / ".jobs").glob("77_*_submitted.pkl"))) == 300
