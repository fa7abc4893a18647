"""Sweeps: their runs, the request to Slurm, and runs on this machine."""

import shlex
from pathlib import Path

import pytest

from torchrope_lab.cli import main
from torchrope_lab.results import StudyResult
from torchrope_lab.studies.slurm import parse_slurm
from torchrope_lab.studies.sweep import parse_sweep, sweep

TINY = [
    "train",
    "--data.train_size=40",
    "--data.val_size=20",
    "--model.dim=16",
    "--model.depth=1",
    "--model.num_heads=1",
    "--model.mlp_dim=16",
    "--model.patch_size=[4]",
    "--epochs=1",
    "--run.logs=[]",
    "--trainer.enable_progress_bar=false",
]


def test_sweep_is_the_product_of_its_axes() -> None:
    axes = [parse_sweep("encoding=mixed,liere:8"), parse_sweep("optim.betas=[0.9,0.99],[0.9,0.95]")]
    jobs = sweep(["train", "--out", "old", "--data=digits", "--out=older"], axes, Path("runs"))
    assert [job.arguments[2:-1] for job in jobs] == [
        [f"--encoding={encoding}", f"--optim.betas={betas}"]
        for encoding in ("mixed", "liere:8")
        for betas in ("[0.9,0.99]", "[0.9,0.95]")
    ]
    assert {tuple(job.arguments[:2]) for job in jobs} == {("train", "--data=digits")}
    assert len({job.out for job in jobs}) == 4
    assert all(job.out.parent == Path("runs") and job.arguments[-1] == f"--out={job.out}" for job in jobs)
    assert [job.out for job in sweep(["compare"], [])] == [Path("torchrope-compare")]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sweep", "seed", "--", "train"], "--sweep must be NAME=A,B,... with values named once each, got 'seed'"),
        (["--sweep", "seed=0,,1", "--", "train"], "values named once each, got 'seed=0,,1'"),
        (["--sweep", "seed=0,0", "--", "train"], "values named once each, got 'seed=0,0'"),
        (["--sweep=seed=0", "--sweep=seed=1", "--", "train"], "name each option once, and never out, got seed, seed"),
        (["--sweep=epochs=1,2", "--sweep=optim.epochs=3,4", "--", "train"], "got epochs, optim.epochs"),
        (["--sweep=seed=0,1", "--", "train", "--out"], "--out requires a value, got ''"),
        (["--sweep=seed=0,1", "--", "train", "--out", "--data=digits"], "--out requires a value, got '--data=digits'"),
        (["--sweep=out=a,b", "--", "train"], "name each option once, and never out, got out"),
        (
            ["--sweep=encoding=liere:8,liere-8", "--", "train"],
            "different folders, got torchrope-train/",
        ),
        (["--", "speed"], "submit runs train or compare, got 'speed'"),
        ([], "submit runs train or compare, got 'nothing'"),
        (["--sweep=sed=0", "--", "train"], "there is no option --sed; did you mean '--seed'?"),
        (["--sweep=data.name=digits,digit", "--", "train"], "--sweep data.name must be one of"),
        (["--slurm", "time", "--", "train"], "--slurm must be NAME=VALUE,..., got 'time'"),
        (["--cluster", "sge", "--", "train"], "must be one of slurm, local, got 'sge'"),
        (["--cluster=local", "--slurm=partition=gpu", "--", "train"], "--slurm is for --cluster slurm, got local"),
        (["--parallel", "0", "--", "train"], "--parallel must be 1 or more, got 0"),
    ],
)
def test_mistakes_are_reported_before_submission(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["submit", *arguments]) == 2
    told = capsys.readouterr().err
    assert message in told
    assert told.count("\n") == 1


def test_dry_run_prints_commands_that_can_be_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "with space"
    assert main(["submit", "--sweep=seed=0,1", "--dry-run", "--", "train", f"--out={out}"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [shlex.split(line) for line in lines] == [
        ["torchrope", "train", f"--seed={seed}", f"--out={out}/seed={seed}"] for seed in (0, 1)
    ]
    assert not out.exists()


@pytest.mark.parametrize("command", ["train", "compare"])
def test_output_folder_may_be_named_in_a_file(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("out: runs/mine\n")
    submit = ["submit", "--dry-run", "--sweep=optim.lr=0.1", "--", command, f"--config={file}"]
    assert main(submit) == 0
    assert capsys.readouterr().out.rstrip().endswith(" --out=runs/mine/optim.lr=0.1")
    assert main([*submit, "--out=other"]) == 0
    assert capsys.readouterr().out.rstrip().endswith(" --out=other/optim.lr=0.1")


@pytest.mark.slow
def test_slurm_array_gets_the_signal_that_we_handle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("submitit")
    command = ["--sweep=seed=0,1,2", "--parallel=2", "--", *TINY, f"--out={tmp_path}/runs"]
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["submit", "--slurm=time=30", *command]) == 2
    assert "Slurm not found (no srun); --cluster local runs the jobs on this machine" in capsys.readouterr().err
    for name, text in {"srun": "", "sbatch": f'/bin/cp "$1" {tmp_path}/sent\necho Submitted batch job 77\n'}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}")
        (tmp_path / name).chmod(0o755)
    assert main(["submit", *command]) == 2
    assert main(["submit", "--slurm=time=30,gpu=8", *command]) == 2
    told = capsys.readouterr().err.splitlines()
    assert told[0] == "torchrope submit: --slurm must include time=MINUTES, got nothing"
    assert told[1].endswith("got 'gpu'")
    assert not (tmp_path / "sent").exists()
    assert main(["submit", "--slurm=partition=gpu,time=30", "--slurm=gpus-per-node=8", *command]) == 0
    assert capsys.readouterr().out.splitlines() == [
        *(f"77_{seed}: {tmp_path}/runs/seed={seed}" for seed in range(3)),
        f"output: {tmp_path}/runs-jobs",
        f"when runs have ended, their table: torchrope report {tmp_path}/runs",
    ]
    sent = (tmp_path / "sent").read_text()
    wanted = ("array=0-2%2", "partition=gpu", "time=30", "gpus-per-node=8", "signal=SIGUSR1@120", "requeue")
    assert [f"#SBATCH --{option}\n" in sent for option in wanted] == [True] * len(wanted)
    assert len(list((tmp_path / "runs-jobs").glob("77_*_submitted.pkl"))) == 3


@pytest.mark.slow
def test_sweep_on_this_machine_runs_and_reports_failures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    taken = tmp_path / "runs" / "seed=1"
    taken.mkdir(parents=True)
    (taken / "notes.txt").write_text("mine")
    command = ["submit", "--cluster=local", "--parallel=2", "--sweep=seed=0,1", "--", *TINY, f"--out={tmp_path}/runs"]
    assert main(command) == 1
    lines = capsys.readouterr().out.splitlines()
    first, second = sorted(lines[:2])
    assert first == f"done: {tmp_path}/runs/seed=0"
    assert second.startswith(f"failed: {taken}, see ")
    assert any(line.split()[:2] == ["seed=0", "mixed"] for line in lines[2:])  # the table of what has ended
    log = Path(second.rpartition("see ")[2]).read_text()
    assert "a run's folder must be new, empty or that of a run" in log
    (taken / "notes.txt").unlink()
    assert main(command) == 0
    runs = [tmp_path / "runs" / f"seed={seed}" for seed in (0, 1)]
    weights = [(run / "weights.safetensors").read_bytes() for run in runs]
    assert weights[0] != weights[1]
    rows = StudyResult.read(tmp_path / "runs" / "runs.json").findings.tables[0].rows
    assert [row["option-seed"] for row in rows] == ["0", "1"]
    assert all(0 <= row["quality"] <= 100 and row["seconds"] > 0 for row in rows)
    assert (tmp_path / "runs" / "report" / "index.html").exists()


def test_missing_package_raises_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(__import__("sys").modules, "submitit", None)
    assert main(["submit", "--slurm=time=1", "--", *TINY]) == 2
    assert "--slurm requires submitit, which is not installed: pip install" in capsys.readouterr().err


def test_options_of_sbatch_are_numbers_and_words() -> None:
    assert parse_slurm("partition=gpu,gpus-per-node=8, mem=64GB") == {
        "partition": "gpu",
        "gpus_per_node": 8,
        "mem": "64GB",
    }
