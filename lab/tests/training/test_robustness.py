"""Robustness of runs: kills, signals, divergence, out of memory, full disks, malicious files, reproducibility."""

import json
import logging
import math
import multiprocessing.connection
import os
import pickle
import signal
import subprocess
import sys
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from shutil import copytree
from typing import Any

import killing
import pytest
import safetensors
import safetensors.torch
import small_runs
import torch
import yaml
from miniatures import imagenet, images
from processes import data_of
from pytorch_lightning.callbacks import Callback
from small_runs import AtBatch, HeadWeights, Killed, changed, lab_process, logged, same_weights, trained, without_times

from torchrope.files import UNFINISHED
from torchrope.models import ViT
from torchrope_lab.cli import main
from torchrope_lab.data.data_config import data_config
from torchrope_lab.data.digits import Digits
from torchrope_lab.data.faults import TooManyFaults
from torchrope_lab.engine import runs
from torchrope_lab.settings.run_config import MAY_CHANGE, RunConfig
from torchrope_lab.studies import compare
from torchrope_lab.training import evaluate, watch
from torchrope_lab.training.classifier import Classifier
from torchrope_lab.training.guards import Diverged
from torchrope_lab.training.interruption import EXIT_INTERRUPTED, Interrupted
from torchrope_lab.training.run import load, train
from torchrope_lab.training.watch import log_settings, loggers

small_run = partial(small_runs.small_run, dropout=0.1)


def kill(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


class In(Callback):
    """Call a function in a hook of Lightning."""

    def __init__(self, hook: str, action: Any) -> None:
        setattr(self, hook, action)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[torch.nn.Module, Any, Path]:
    """A run of two epochs that nothing disturbed."""
    folder = tmp_path_factory.mktemp("whole")
    return *trained(small_run(), folder), folder


# Kills and signals


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "augmented"])
def test_killed_run_resumes_to_bit_identical_weights(tmp_path: Path, kind: str) -> None:
    command = [sys.executable, killing.__file__, str(tmp_path / "runs"), "20", kind, "1"]
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    trials = json.loads(done.stdout)
    assert len(trials) == 20
    assert {how.split()[0] for killed in trials for how in killed} == {"time", "write"}


@pytest.mark.slow
@pytest.mark.parametrize("stopped_after", [3, 7, 8, 11, 16])
def test_stopped_run_saves_and_resumes_at_the_next_batch(tmp_path: Path, whole: Any, stopped_after: int) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Interrupted) as stopped:
        trained(small_run(), tmp_path, callbacks=[AtBatch(stopped_after, kill)])
    assert stopped.value.code == EXIT_INTERRUPTED == 75
    assert signal.getsignal(signal.SIGTERM) == before
    rest = AtBatch()
    resumes_to(whole, small_run(), tmp_path, callbacks=[rest])
    assert rest.seen == 16 - stopped_after


def resumes_to(whole: Any, config: RunConfig, folder: Path, **options: Any) -> None:
    """Train the rest of a run, and compare weights and curve with those of the whole one."""
    resumed, curve = trained(config, folder, **options)
    assert same_weights(whole[0], resumed)
    assert without_times(whole[1]) == without_times(curve)


SLOW = ["setup", "on_train_start", "on_sanity_check_start", "on_train_epoch_start", "on_validation_start"]
SLOW += ["on_train_epoch_end", "on_train_end", "teardown"]


@pytest.fixture(scope="module")
def whole_epoch(tmp_path_factory: pytest.TempPathFactory) -> tuple[torch.nn.Module, Any]:
    return trained(small_run(epochs=1), tmp_path_factory.mktemp("whole"))


@pytest.mark.parametrize(
    "hook",
    ["on_fit_start", "on_validation_end", "on_fit_end", *(pytest.param(hook, marks=pytest.mark.slow) for hook in SLOW)],
)
def test_run_stops_wherever_the_signal_comes(tmp_path: Path, whole_epoch: Any, hook: str) -> None:
    """In training, in the last validation, and before and after, where Lightning has handlers of its own."""
    settings = {"num_sanity_val_steps": int("sanity" in hook), "callbacks": [In(hook, kill)]}
    with pytest.raises(Interrupted) as stopped:
        trained(small_run(epochs=1), tmp_path, **settings)
    assert stopped.value.code == EXIT_INTERRUPTED == 75
    resumes_to(whole_epoch, small_run(epochs=1), tmp_path)


PLACES = {
    "reading the data": (Digits, "datasets"),
    "the last validation": (Classifier, "on_validation_epoch_end"),
    "after training": (evaluate, "predict"),
    "measuring": (compare, "read_robustness"),
}


@pytest.mark.parametrize(
    ("command", "place"),
    [
        ("train", "after training"),
        ("compare", "reading the data"),
        ("compare", "the last validation"),
        *(pytest.param("train", place, marks=pytest.mark.slow) for place in [*PLACES][:2]),
        *(pytest.param("compare", place, marks=pytest.mark.slow) for place in [*PLACES][2:]),
        *(pytest.param(f"study {name}", [*PLACES][1], marks=pytest.mark.slow) for name in ("accuracy", "finetune")),
    ],
)
def test_commands_exit_with_75_and_start_no_further_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, place: str
) -> None:
    owner, name = PLACES[place]
    function = getattr(owner, name)

    def killed(*arguments: Any, **options: Any) -> Any:
        result = function(*arguments, **options)
        with suppress(SystemExit):  # as where it comes while Python collects garbage
            kill()
        return result

    for module in (owner, *([runs] if name == "predict" else [])):
        monkeypatch.setattr(module, name, killed)
    several = [] if command == "train" else ["--encodings=axial,mixed", "--seeds=2"]
    options = [each for each in OPTIONS if command == "train" or "trainer" not in each]
    with pytest.raises(SystemExit) as stopped:
        main([*command.split(), *options, *several, "--epochs=1", "--out", str(tmp_path)])
    assert stopped.value.code == 75
    assert len(list(tmp_path.glob("runs/*/config.yaml"))) <= 1


def test_run_with_one_batch_per_epoch_stops_at_the_end_of_the_epoch(tmp_path: Path) -> None:
    ask = AtBatch(3, kill)
    with pytest.raises(Interrupted):
        trained(small_run(batch_size=80, epochs=20), tmp_path, callbacks=[ask])
    assert ask.seen == 3
    assert (tmp_path / "curve.csv").read_text().count("\n") == 1 + 3


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_signals_to_the_group_do_not_end_processes_that_load_data() -> None:
    loader = data_of(small_run(workers=2)).train_dataloader()
    batches = iter(loader)
    first = next(batches)  # both processes have set their handlers, or will ignore what waits for them
    for batch, number in zip(batches, [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGTERM], strict=False):
        assert batch[0].shape == first[0].shape
        for process in multiprocessing.active_children():
            os.kill(process.pid, number)  # type: ignore[arg-type]
    assert len(list(batches)) == 8 - 1 - 5
    del batches
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize("array", [False, True])
def test_preempted_slurm_job_saves_and_is_requeued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, array: bool
) -> None:
    slurm = {"SLURM_NTASKS": "1", "SLURM_JOB_ID": "4321", "SLURM_JOB_NAME": "vit", "SLURM_NNODES": "1"}
    places = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_NODELIST": "localhost"}
    arrays = {"SLURM_ARRAY_JOB_ID": "4300", "SLURM_ARRAY_TASK_ID": "7"} if array else {}
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "scontrol").write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\n')
    (programs / "scontrol").chmod(0o755)
    for name, value in {**slurm, **places, **arrays, "PATH": f"{programs}:{os.environ['PATH']}"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(Interrupted):
        trained(small_run(), tmp_path / "run", callbacks=[AtBatch(5, lambda _: os.kill(os.getpid(), signal.SIGUSR1))])
    assert (tmp_path / "asked").read_text() == f"requeue {'4300_7' if array else '4321'}\n"
    rest = AtBatch()
    trained(small_run(), tmp_path / "run", callbacks=[rest])
    assert rest.seen == 16 - 5


def test_killed_run_resumes_from_checkpoint_within_epoch(tmp_path: Path, whole: Any) -> None:
    config, rest = small_run(checkpoint_every=3), AtBatch()
    with pytest.raises(Killed):
        trained(config, tmp_path, callbacks=[AtBatch(15)])
    resumes_to(whole, config, tmp_path, callbacks=[rest])
    assert rest.seen == 16 - 12


def test_unfinished_files_are_removed_and_other_files_kept(tmp_path: Path) -> None:
    (tmp_path / f"{UNFINISHED}abcd1234").write_text("half")
    trained(small_run(), tmp_path)
    assert not list(tmp_path.glob(".*"))
    other = tmp_path / "other"
    other.mkdir()
    (other / ".notes").write_text("mine")
    with pytest.raises(ValueError, match="must be new, empty or that of a run"):
        trained(small_run(), other)
    assert (other / ".notes").read_text() == "mine"


def test_other_data_than_in_training_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    root, folder = images(tmp_path / "data"), tmp_path / "run"
    config = small_run(data=data_config("images", root=str(root), size=16, batch_size=10), epochs=1)
    trained(config, folder)
    load(folder)
    trained(config, folder)
    assert caplog.messages == []
    (root / "cat").rename(root / "bird")
    (root / "dog").rename(root / "cat")
    (root / "bird").rename(root / "dog")
    load(folder)
    trained(config, folder)
    assert [message.partition(" than ")[0] for message in caplog.messages] == ["the data have other examples"] * 2
    (root / "dog").rename(root / "eel")
    for act in (lambda: load(folder), lambda: trained(config, folder)):
        with pytest.raises(ValueError, match=r"^data of .* must have the classes cat, dog, got cat, eel$"):
            act()


# Files that cannot be read


def test_unreadable_files_are_counted_over_resumed_runs(tmp_path: Path) -> None:
    root, folder = imagenet(tmp_path / "data"), tmp_path / "run"
    files = data_config("imagenet", root=str(root), size=16, batch_size=4, max_skipped=1)
    config = small_run(data=files, epochs=1, checkpoint_every=3)
    data = data_of(config)
    data.run_seed = config.seed
    data.setup()
    drawn = [data._datasets[0].samples[index][0] for index in data.sampler(data._datasets[0], data._seed, 0, 1, 0)]
    first, last = drawn[0], drawn[-1]
    whole = {name: (root / name).read_bytes() for name in (first, last)}
    (root / first).write_bytes(b"no picture")
    with pytest.raises(Killed):
        trained(config, folder, callbacks=[AtBatch(4)])
    assert set(json.loads((folder / "skipped.json").read_text())) == {first}
    (root / last).write_bytes(b"nor this")
    for _ in range(2):  # resumes after the first; the second time both are on the list before reading
        with pytest.raises(TooManyFaults, match=r"at most --data\.max_skipped = 1 images may be unreadable, got 2"):
            trained(config, folder)
        assert set(json.loads((folder / "skipped.json").read_text())) == {first, last}
    (root / last).write_bytes(whole[last])
    data = data_of(config)
    train(config, data, folder)
    assert [name for name, _ in data.skipped] == [first]
    assert set(json.loads((folder / "skipped.json").read_text())) == {first}
    (folder / "skipped.json").write_text("[1]")
    with pytest.raises(ValueError, match=r"skipped\.json must hold named settings"):
        trained(config, folder)


# Divergence


def spoilt(number: int) -> AtBatch:
    """Make the inputs of a batch NaN."""
    return AtBatch(number, lambda batch: batch[0].fill_(float("nan")))


def test_diverged_error_names_step_and_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(Diverged) as diverged:
        trained(small_run(), tmp_path, callbacks=[spoilt(11)])
    message = str(diverged.value)
    assert "got nan" in message
    assert f"in step 11 (epoch 2, batch 3); the last good checkpoint is {tmp_path}/checkpoint.ckpt" in message
    assert "\n" not in message
    assert all(torch.isfinite(weight).all() for weight in load(tmp_path)[2].model.parameters())


def test_loss_guard_stops_above_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchrope_lab.training.run.DIVERGED", 1e-3)  # the other runs here are below the limit
    message = r"^the loss must stay finite and at most 0\.0023, got 2\.\d+ .* no checkpoint yet"
    with pytest.raises(Diverged, match=message):
        trained(small_run(), tmp_path)


@pytest.mark.parametrize("batch", [8, 16])
def test_diverged_last_step_of_an_epoch_is_not_saved(tmp_path: Path, batch: int) -> None:
    with pytest.raises(Diverged, match=f"in step {batch} .epoch {batch // 8}, batch 8.;"):
        trained(small_run(), tmp_path, callbacks=[spoilt(batch)])
    assert (tmp_path / "checkpoint.ckpt").exists() == (batch > 8)
    assert len((tmp_path / "curve.csv").read_text().splitlines() if batch > 8 else [0]) == batch // 8


def test_on_nan_skip_skips_and_counts_steps(tmp_path: Path) -> None:
    head, skipped = HeadWeights(), []
    count = In("on_train_end", lambda trainer, _: skipped.append(trainer.callback_metrics["skipped_steps"]))
    trained(small_run(on_nan="skip"), tmp_path, callbacks=[spoilt(5), head, count])
    assert torch.equal(head.after[3], head.after[4])
    assert not torch.equal(head.after[4], head.after[5])
    assert skipped == [1]
    assert torch.isfinite(head.after[-1]).all()


def test_skipped_steps_do_not_change_batch_norms(tmp_path: Path) -> None:
    norm = torch.nn.BatchNorm1d(16, affine=False)
    means: list[torch.Tensor] = []

    class Normed(Callback):
        def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
            pl_module.model.head = torch.nn.Sequential(norm, pl_module.model.head)

        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx % 2:
                means.append(norm.running_mean.clone())

    third = spoilt(6)  # of steps of two batches
    trained(small_run(on_nan="skip", effective_batch=20), tmp_path, callbacks=[Normed(), third])
    assert torch.equal(means[1], means[2])
    assert not torch.equal(means[2], means[3])
    assert all(mean.isfinite().all() for mean in means)


def test_skipped_steps_do_not_change_the_average(tmp_path: Path) -> None:
    config = small_run(on_nan="skip", checkpoint_every=1, ema_decay=0.8, effective_batch=20)
    head = HeadWeights(batches=2)
    undisturbed = trained(config, tmp_path / "whole", callbacks=[spoilt(6), head])  # in the third step
    assert torch.equal(head.after[1], head.after[2])
    average = head.after[0]
    for weight in head.after[1:2] + head.after[3:]:
        average = 0.8 * average + 0.2 * weight
    torch.testing.assert_close(undisturbed[0].model.head.weight.detach(), average)
    with pytest.raises(Killed):
        trained(config, tmp_path / "killed", callbacks=[spoilt(6), AtBatch(7)])
    assert same_weights(undisturbed[0], trained(config, tmp_path / "killed")[0])


def test_on_nan_ignore_continues(tmp_path: Path) -> None:
    module, curve = trained(small_run(on_nan="ignore"), tmp_path, callbacks=[spoilt(5)])
    assert not torch.isfinite(module.model.head.weight).any()
    assert [math.isnan(row["val_loss"]) for row in curve.rows] == [True, True]


# Full memory and disks


def lack_memory(*_: object, **__: object) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def test_out_of_memory_error_names_what_reduces_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ViT, "forward", lack_memory)
    rule = "a step must fit into memory, got batch_size 64; a smaller --data.batch_size with --optim.effective_batch 64"
    with pytest.raises(ValueError, match=f"^{rule}, or --model.checkpoint_layers true, needs less$"):
        trained(small_run(batch_size=64), tmp_path)


def test_full_disk_stops_the_run_and_keeps_the_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: Any
) -> None:
    fsync, writes = os.fsync, 0

    def fills_up(handle: int) -> None:
        nonlocal writes
        writes += 1
        if writes > 7:  # configuration, classes, three files of the first epoch, two of the second
            raise OSError(28, "No space left on device")
        fsync(handle)

    monkeypatch.setattr("os.fsync", fills_up)
    with pytest.raises(OSError, match=r"^cannot write .*/checkpoint\.ckpt: No space left on device$"):
        trained(small_run(), tmp_path)
    monkeypatch.undo()
    assert torch.load(tmp_path / "checkpoint.ckpt", weights_only=True)["epoch"] == 0
    resumes_to(whole, small_run(), tmp_path)


# Untrusted files and recipes


class Payload:
    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.proof}",)


@pytest.mark.parametrize("name", ["checkpoint.ckpt", "within-epoch.ckpt", "weights.safetensors"])
@pytest.mark.parametrize("form", ["cut", "pickle", "torch"])
def test_damaged_or_malicious_checkpoint_is_named_and_executes_no_code(
    tmp_path: Path, whole: Any, name: str, form: str
) -> None:
    folder, proof = copytree(whole[2], tmp_path / "run"), tmp_path / "proof"
    if form == "cut":
        (folder / name).write_bytes((folder / name.replace("within-epoch", "checkpoint")).read_bytes()[:1000])
    elif form == "pickle":
        (folder / name).write_bytes(pickle.dumps(Payload(proof)))
    else:
        content = {"state_dict": Payload(proof), "pytorch-lightning_version": "2.6.6", "global_step": 9}
        torch.save(content, folder / name)
    with pytest.raises(ValueError, match=rf"must be complete, got a damaged (one; delete it|file): .*{name}"):
        load(folder) if name.startswith("weights") else trained(small_run(), folder)
    assert not proof.exists()


def test_weights_file_is_safetensors_with_the_configuration(tmp_path: Path, whole: Any) -> None:
    module, folder = whole[0], copytree(whole[2], tmp_path / "run")
    with safetensors.safe_open(folder / "weights.safetensors", "pt") as file:
        header = file.metadata()
        names = {*file.keys()}
    assert json.loads(header["config"])["encoding"] == "liere:4"
    assert header["epochs"] == "2"
    assert names == set(module.state_dict())
    for name in ("checkpoint.ckpt", "curve.csv"):
        (folder / name).unlink()
    assert same_weights(load(folder)[2], module)


SIZES = {"model.dim": 16, "model.depth": 1, "model.num_heads": 1, "model.mlp_dim": 16, "model.patch_size": [4]}
SMALL = [f"--{name}={value}" for name, value in SIZES.items()]
OPTIONS = [*SMALL, "--data.train_size=40", "--data.val_size=20", "--trainer.enable_progress_bar=false"]
EVIL = 'open("pwned", "w").close()\nfrom pytorch_lightning.callbacks import Callback\nclass Evil(Callback): pass\n'


@pytest.mark.parametrize(
    "recipe",
    [
        "trainer: {callbacks: [{class_path: subprocess.Popen, init_args: {args: [touch, pwned]}}]}",
        "trainer: {callbacks: [{class_path: os.system, init_args: {command: touch pwned}}]}",
        "trainer: {callbacks: [{class_path: evil.Evil}]}",
        "trainer: {logger: evil.Evil}",
        "trainer: {strategy: {class_path: evil.Evil}}",
        "trainer: {callbacks: [{class_path: pytorch_lightning.callbacks.LambdaCallback,"
        " init_args: {on_fit_start: evil.Evil}}]}",
        "trainer: {callbacks: [{class_path: LambdaCallback, init_args: {on_fit_start: evil.Evil}}]}",
        "trainer: {callbacks: [{class_path: torch.load, init_args: {f: x}}]}",
        "trainer: other.yaml",
        "config: other.yaml",
        'trainer: !!python/object/apply:os.system ["touch pwned"]',
    ],
)
def test_recipe_encoding_is_not_imported_unless_allowed(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "evil.py").write_text(EVIL)
    (tmp_path / "other.yaml").write_text("trainer: {callbacks: [{class_path: evil.Evil}]}\n")
    (tmp_path / "mine.yaml").write_text(recipe + "\n")
    assert main(["train", *OPTIONS, "--epochs=1", "--config=mine.yaml", "--out=out"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not (tmp_path / "pwned").exists()
    assert "evil" not in sys.modules
    assert not (tmp_path / "out").exists()


def test_allowed_module_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "mildly_evil.py").write_text(EVIL)
    (tmp_path / "mine.yaml").write_text("trainer: {callbacks: [{class_path: mildly_evil.Evil}]}\n")
    assert main(["train", *OPTIONS, "--epochs=1", "--config=mine.yaml", "--out=out", "--allow=mildly_evil"]) == 0
    assert (tmp_path / "pwned").exists()


# Reproducibility


@pytest.mark.slow
def test_results_do_not_depend_on_the_process_or_the_number_of_workers(tmp_path: Path) -> None:
    workers = {tmp_path / "first": 0, tmp_path / "second": 0, tmp_path / "third": 2}
    options = ["train", *OPTIONS, "--epochs=2", "--model.dropout=0.1"]
    children = [
        lab_process(*options, "--out", folder, f"--data.workers={number}") for folder, number in workers.items()
    ]
    printed = [child.communicate(timeout=120)[0] for child in children]
    assert [child.returncode for child in children] == [0, 0, 0], printed
    first, *others = (safetensors.torch.load_file(folder / "weights.safetensors") for folder in workers)
    for other in others:
        assert all(torch.equal(first[name], other[name]) for name in first)
    curves = {
        tuple(line.rpartition(",")[0] for line in (folder / "curve.csv").read_text().splitlines()) for folder in workers
    }
    assert len(curves) == 1


# Logs


def test_logs_hold_throughput_and_are_kept_on_resume(tmp_path: Path) -> None:
    config = small_run(logs=["csv", "tensorboard"])
    trained(config, tmp_path, log_every_n_steps=4)
    rows = logged(tmp_path)
    steps = [row for row in rows if row["samples_per_second"]]
    assert [int(row["step"]) for row in steps] == [4, 8, 12, 16]
    assert all(float(row["loss"]) > 0 for row in steps)
    assert any(row["val_top1"] for row in rows)
    assert list((tmp_path / "logs" / "tensorboard").glob("events.out.tfevents.*"))
    trained(config, tmp_path)
    assert logged(tmp_path) == rows


def test_resumed_run_continues_its_table_of_metrics(tmp_path: Path) -> None:
    config = small_run(logs=["csv"])
    with pytest.raises(Interrupted):
        trained(config, tmp_path, callbacks=[AtBatch(11, kill)], log_every_n_steps=2)
    trained(config, tmp_path, log_every_n_steps=2)
    assert len([*(tmp_path / "logs" / "csv").rglob("*.csv")]) == 1
    assert [int(row["step"]) for row in logged(tmp_path) if row["lr"]] == [2, 4, 6, 8, 10, 12, 14, 16]


def test_training_leaves_the_levels_of_loggers_and_the_data_as_they_were(tmp_path: Path) -> None:
    config, logs = small_run(), [logging.getLogger(name) for name in ("pytorch_lightning", "lightning_fabric")]
    data, levels = data_of(config), [log.level for log in logs]
    before = next(iter(data.train_dataloader()))
    train(config, data, tmp_path)
    assert [log.level for log in logs] == levels
    assert all(map(torch.equal, before, next(iter(data.train_dataloader()))))


@pytest.mark.parametrize("command", ["train", pytest.param("compare", marks=pytest.mark.slow)])
def test_folder_of_a_run_that_failed_before_a_checkpoint_takes_other_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    options = [command, *OPTIONS[:-1], "--epochs=1", "--out", str(tmp_path)]
    options += ["--encodings=mixed", "--seeds=1", "--scales=1"] if command == "compare" else []
    with monkeypatch.context() as lacking:
        lacking.setattr(ViT, "forward", lack_memory)
        assert main([*options, "--data.batch_size=40"]) == 2
    assert "a smaller --data.batch_size" in capsys.readouterr().err
    assert main([*options, "--data.batch_size=20"]) == 0


def test_logged_loss_is_not_divided_by_accumulated_batches(tmp_path: Path) -> None:
    trained(small_run(logs=["csv"], effective_batch=40), tmp_path, log_every_n_steps=1)
    losses = [float(row["loss"]) for row in logged(tmp_path) if row["loss"]]
    assert losses[0] == pytest.approx(math.log(10), rel=0.2)


def test_logs_have_the_settings_of_the_run(tmp_path: Path) -> None:
    config = small_run(logs=["csv", "tensorboard"])
    built = loggers(config, tmp_path)
    log_settings(built, config, tmp_path)
    for logger in built:
        logger.save()
    for name in ("csv/version_0", "tensorboard"):
        stored = yaml.safe_load((tmp_path / "logs" / name / "hparams.yaml").read_text())
        assert stored["model.dim"] == config.model.dim
        assert stored["encoding"] == config.encoding


def test_runs_of_services_have_a_name_and_continue_after_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Service:
        run_id = "17"

        def __init__(self, *args: Any, **settings: Any) -> None:
            calls.append(settings)

        def log_hyperparams(self, settings: dict[str, Any]) -> None:
            logged.append(settings)

    calls: list[dict[str, Any]] = []
    logged: list[dict[str, Any]] = []
    for name in ("WandbLogger", "MLFlowLogger"):
        monkeypatch.setattr(watch, name, Service)
    for _ in range(2):
        config = small_run(logs=["wandb", "mlflow"])
        log_settings(loggers(config, tmp_path / "mine"), config, tmp_path / "mine")
    wandb, mlflow, wandb_again, mlflow_again = calls
    assert wandb == wandb_again
    assert (wandb["name"], wandb["resume"]) == ("mine", "allow")
    assert mlflow["run_name"] == "mine"
    assert (mlflow["run_id"], mlflow_again["run_id"]) == (None, "17")
    assert all("optim.lr" in settings for settings in logged)


def test_run_starts_in_a_folder_with_logs_alone(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "mlflow.db").touch()
    trained(small_run(), tmp_path)


def test_logger_without_its_package_raises_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pytorch_lightning.loggers.wandb._WANDB_AVAILABLE", False)
    with pytest.raises(ValueError, match=r"^logger 'wandb' needs a package that is not installed: pip install wandb$"):
        trained(small_run(logs=["wandb"]), tmp_path)


CHANGES = {
    "run.compile": True,
    "run.checkpoint_every": 5,
    "run.on_nan": "skip",
    "run.logs": ["csv"],
    "data.root": "moved",
    "data.labels": "moved/labels.csv",
    "data.workers": 1,
    "data.cache_gib": 0.0,
    "data.max_skipped": 1,
    "model.checkpoint_layers": True,
}


@pytest.mark.parametrize("name", MAY_CHANGE)
def test_settings_that_change_no_number_are_the_same_for_runs_and_resumed_folders(name: str) -> None:
    config = RunConfig(data=data_config("volumes"))
    assert runs.Run(changed(config, **{name.partition(".")[2]: CHANGES[name]})).key == runs.Run(config).key


@pytest.mark.parametrize("finished", [True, False])
def test_moved_and_otherwise_loaded_data_resume_unless_the_examples_differ(tmp_path: Path, finished: bool) -> None:
    def config(root: Path, **changes: object) -> RunConfig:
        data = data_config("images", root=str(root), size=8, train_size=20, batch_size=10, **changes)
        return small_run(data=data, epochs=1, checkpoint_every=1)

    run, (one, other) = tmp_path / "run", (images(tmp_path / name) for name in ("one", "other"))
    (other / "cat" / "0.png").rename(other / "cat" / "new.png")
    ask = [] if finished else [AtBatch(2, kill)]
    with nullcontext() if finished else pytest.raises(Interrupted):
        trained(config(one), run, callbacks=ask)
    with pytest.raises(ValueError, match=r"^a run's folder must .* with data\.root .*/one instead of .*/other$"):
        trained(config(other), run)
    moved = config(one.rename(tmp_path / "moved"), workers=1, max_skipped=1)
    moved = changed(moved, checkpoint_layers=True, on_nan="skip", checkpoint_every=None)
    _, history = trained(moved, run)
    assert len(history.rows) == 1
    assert yaml.safe_load((run / "config.yaml").read_text())["data"]["max_skipped"] == 1
    with pytest.raises(ValueError, match=r"run\.precision float32 instead of bf16"):
        trained(changed(moved, precision="bf16"), run)


@pytest.mark.parametrize("command", [pytest.param("compare", marks=pytest.mark.slow), "study finetune"])
def test_moved_folder_of_results_resumes_with_moved_data(tmp_path: Path, command: str) -> None:
    options = [*command.split(), *SMALL, "--encodings=none,mixed", "--data=images", "--data.size=8", "--seeds=1"]
    options += ["--optim.epochs=1", "--scales=1"] if command == "compare" else ["--optim.epochs=2"]
    root, out = images(tmp_path / "images"), tmp_path / "out"
    assert main([*options, f"--data.root={root}", f"--out={out}"]) == 0
    runs = {path.name for path in out.glob("runs/*")}
    for result in out.glob("runs/*/result.json"):
        result.unlink()
    root, out = root.rename(tmp_path / "images moved"), out.rename(tmp_path / "out moved")
    assert main([*options, f"--data.root={root}", "--data.workers=1", f"--out={out}"]) == 0
    assert {path.name for path in out.glob("runs/*")} == runs
