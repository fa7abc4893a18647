"""Two processes train like one, resume, and stop after the same step."""

import os
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch
from processes import become_one_of_two, data_of, free_port
from pytorch_lightning.callbacks import Callback
from test_scale import small_run

from torchrope_lab.settings.run_config import ExecutionConfig, ModelConfig, RunConfig
from torchrope_lab.training.interruption import Interrupted
from torchrope_lab.training.run import load, train

SWIN = ModelConfig(
    backbone="swin", dim=8, depths=[1, 1], stage_heads=[1, 2], window_size=[2], patch_size=[1], pool="mean"
)


@pytest.mark.parametrize(("total", "devices"), [(41, 2), (10, 3), (40, 2), (3, 3)])
def test_validation_has_each_example_once_and_equal_batch_counts(total: int, devices: int) -> None:
    seen, counts = [], set()
    data = data_of(replace(small_run(), data=replace(small_run().data, batch_size=5, val_size=20)))
    data._datasets = data.train_dataloader().dataset, torch.utils.data.TensorDataset(torch.arange(total))
    for rank in range(devices):
        data.trainer = SimpleNamespace(world_size=devices, global_rank=rank)  # type: ignore[assignment]
        batches = [batch[0] for batch in data.val_dataloader()]
        assert 1 <= min(map(len, batches)) <= max(map(len, batches)) <= 20
        counts.add(len(batches))
        seen += torch.cat(batches).tolist()
    assert sorted(seen) == list(range(total))
    assert len(counts) == 1
    data.trainer = SimpleNamespace(world_size=total + 1, global_rank=0)  # type: ignore[assignment]
    with pytest.raises(
        ValueError, match=f"^validation must have an example for each of {total + 1} devices, got {total}$"
    ):
        data.val_dataloader()


def runs(batch_size: int) -> dict[str, RunConfig]:
    """Return the configuration of a run on each of two devices, or on one with four times the batch."""
    plain = small_run(batch_size, effective_batch=20, clip=0.5)
    average = small_run(batch_size, effective_batch=20, ema_decay=0.8, layer_decay=0.5)
    return {
        "vit": plain,
        "average": replace(average, encoding="learned+mixed", run=ExecutionConfig(checkpoint_every=3)),
        "lamb": replace(small_run(batch_size, effective_batch=20, optimizer="lamb"), encoding="bias+axial"),
        "bf16": replace(plain, run=ExecutionConfig(precision="bf16")),
        "swin": replace(plain, encoding="comrope-ld", model=SWIN),
        "checkpointed": replace(plain, model=replace(plain.model, checkpoint_layers=True)),
        "compiled": replace(plain, run=ExecutionConfig(compile=True)),
    }


SIGNALLED = [(1, 1), (0, 3), (1, 5)]
"""Ranks and steps, from 0 to 7, that receive a signal; four steps are an epoch."""


class Dies(Callback):
    """Raise before the step of a number."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        assert trainer.world_size == 2
        if trainer.global_step == self.step:
            raise MemoryError


class Signalled(Callback):
    """Receive a signal in one of the processes, and count the steps begun."""

    def __init__(self, rank: int, step: int) -> None:
        self.rank, self.step, self.begun = rank, step, 0

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        self.begun = trainer.global_step + 1
        if (trainer.global_rank, trainer.global_step) == (self.rank, self.step):
            os.kill(os.getpid(), signal.SIGTERM)


class Alone(Callback):
    """Raise if anything waits for the other process in the steps of an epoch."""

    def on_train_epoch_start(self, *_: Any) -> None:
        self.replaced = {name: getattr(torch.distributed, name) for name in ("barrier", "broadcast")}
        for name in self.replaced:
            setattr(torch.distributed, name, self.refuse)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.is_last_batch:
            for name, function in self.replaced.items():
                setattr(torch.distributed, name, function)

    def refuse(self, *_: Any, **__: Any) -> None:
        os._exit(3)  # an exception would be suppressed


def stopped(config: RunConfig, folder: Path, rank: int, step: int) -> int:
    """Train until a signal in the step of one process stops both; return the steps of this process."""
    signalled = Signalled(rank, step)
    with pytest.raises(Interrupted):
        train(config, data_of(config), folder, callbacks=[signalled], accelerator="cpu")
    return signalled.begun


def one_of_two(rank: int, folder: Path, port: int) -> None:
    """Run one process with the environment that torchrun sets."""
    become_one_of_two(rank, port)
    compile_module = torch.nn.Module.compile
    torch.nn.Module.compile = lambda module: compile_module(module, backend="eager")  # type: ignore[method-assign]
    for name, config in runs(batch_size=5).items():
        found, _ = train(config, data_of(config), folder / name, accelerator="cpu")
        torch.save(found.state_dict(), folder / f"{name}-{rank}.pt")
    average = runs(batch_size=5)["average"]
    with pytest.raises(MemoryError):
        train(average, data_of(average), folder / "killed", callbacks=[Dies(5)], accelerator="cpu")
    train(average, data_of(average), folder / "killed", accelerator="cpu")
    plain = runs(batch_size=5)["vit"]
    train(plain, data_of(plain), folder / "whole", callbacks=[Alone()], accelerator="cpu")
    steps = [stopped(plain, folder / "stopped", *signalled) for signalled in SIGNALLED]
    torch.save(steps, folder / f"steps-{rank}.pt")
    train(plain, data_of(plain), folder / "stopped", accelerator="cpu")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two")
    torch.multiprocessing.spawn(one_of_two, (folder, free_port()), nprocs=2)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", list(runs(20)))
def test_training_in_two_processes_equals_training_in_one(trained: Path, tmp_path: Path, name: str) -> None:
    config = replace(runs(batch_size=20)[name], run=ExecutionConfig(precision="bf16" if name == "bf16" else "float32"))
    alone, curve = train(config, data_of(config), tmp_path)
    near = dict(rel=2e-2, abs=2 / 60) if name == "bf16" else dict(rel=1e-4)  # two of 60 predictions may change
    together = load(trained / name)[2]
    rows = [line.split(",") for line in (trained / name / "curve.csv").read_text().splitlines()[1:]]
    for row, expected in zip(curve.rows, rows, strict=True):
        for measure, value in zip(("train_loss", "val_loss", "val_top1"), expected[1:4], strict=True):
            assert float(value) == pytest.approx(row[measure], **near), measure
    for key, weight in alone.state_dict().items():
        tolerance = dict(rtol=0.1, atol=2e-2) if name == "bf16" else dict(rtol=1e-3, atol=1e-5)
        torch.testing.assert_close(together.state_dict()[key], weight, **tolerance)  # type: ignore[arg-type]
    for rank in (0, 1):
        returned = torch.load(trained / f"{name}-{rank}.pt")
        assert all(torch.equal(returned[key], value) for key, value in together.state_dict().items())


@pytest.mark.slow
def test_killed_processes_resume_to_the_same_weights(trained: Path) -> None:
    kept = [trained / "average", trained / "killed"]
    weights, resumed = (safetensors.torch.load_file(folder / "weights.safetensors") for folder in kept)
    torch.testing.assert_close(resumed, weights, rtol=0, atol=0)
    saved = [torch.load(folder / "checkpoint.ckpt", weights_only=True) for folder in kept]
    moments, again = (checkpoint["optimizer_states"][0]["state"] for checkpoint in saved)
    assert len(moments) > 10
    for number, of_weight in moments.items():
        torch.testing.assert_close(again[number], of_weight, rtol=0, atol=0)


@pytest.mark.slow
def test_signal_to_one_of_two_processes_stops_both_after_the_same_step(trained: Path) -> None:
    assert [torch.load(trained / f"steps-{rank}.pt") for rank in (0, 1)] == [[3, 4, 7]] * 2
    whole, resumed = (
        safetensors.torch.load_file(trained / name / "weights.safetensors") for name in ("whole", "stopped")
    )
    torch.testing.assert_close(resumed, whole, rtol=0, atol=0)
