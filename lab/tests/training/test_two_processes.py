"""Two processes train like one, resume, and stop after the same step."""

import os
import signal
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch
from processes import become_one_of_two, data_of, free_port
from pytorch_lightning.callbacks import Callback
from small_runs import SWIN, AtBatch, Killed, changed, small_run, trained

from torchrope_lab.settings.run_config import RunConfig
from torchrope_lab.training.interruption import Interrupted
from torchrope_lab.training.run import load


@pytest.mark.parametrize(("total", "devices"), [(41, 2), (10, 3), (40, 2), (3, 3)])
def test_validation_has_each_example_once_and_equal_batch_counts(total: int, devices: int) -> None:
    seen, counts = [], set()
    data = data_of(small_run(batch_size=5, val_size=20))
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
    rule = f"^validation must have an example for each of {total + 1} devices, got {total}$"
    with pytest.raises(ValueError, match=rule):
        data.val_dataloader()


def runs(batch_size: int) -> dict[str, RunConfig]:
    """Return the configuration of a run on each of two devices, or on one with four times the batch."""
    plain = small_run(depth=2, val_size=60, batch_size=batch_size, effective_batch=20, clip=0.5)
    average = dict(encoding="learned+mixed", clip=1.0, ema_decay=0.8, layer_decay=0.5, checkpoint_every=3)
    return {
        "vit": plain,
        "average": changed(plain, **average),
        "lamb": changed(plain, encoding="bias+axial", clip=1.0, optimizer="lamb"),
        "bf16": changed(plain, precision="bf16"),
        "swin": changed(plain, encoding="comrope-ld", model=SWIN),
        "checkpointed": changed(plain, checkpoint_layers=True),
        "compiled": changed(plain, compile=True),
    }


SIGNALLED = [(1, 1), (0, 3), (1, 5)]
"""Ranks and steps, from 0 to 7, that receive a signal; four steps are an epoch."""


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
        trained(config, folder, callbacks=[signalled], accelerator="cpu")
    return signalled.begun


def one_of_two(rank: int, folder: Path, port: int) -> None:
    """Run one process with the environment that torchrun sets."""
    become_one_of_two(rank, port)
    compile_module = torch.nn.Module.compile
    torch.nn.Module.compile = lambda module: compile_module(module, backend="eager")  # type: ignore[method-assign]
    train = partial(trained, accelerator="cpu")
    for name, config in runs(batch_size=5).items():
        torch.save(train(config, folder / name)[0].state_dict(), folder / f"{name}-{rank}.pt")
    average, plain = runs(batch_size=5)["average"], runs(batch_size=5)["vit"]
    with pytest.raises(Killed):
        train(average, folder / "killed", callbacks=[AtBatch(11)])  # before the sixth step of two batches
    train(average, folder / "killed")
    train(plain, folder / "whole", callbacks=[Alone()])
    steps = [stopped(plain, folder / "stopped", *signalled) for signalled in SIGNALLED]
    torch.save(steps, folder / f"steps-{rank}.pt")
    train(plain, folder / "stopped")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def by_two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two")
    torch.multiprocessing.spawn(one_of_two, (folder, free_port()), nprocs=2)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", list(runs(20)))
def test_training_in_two_processes_equals_training_in_one(by_two: Path, tmp_path: Path, name: str) -> None:
    alone, curve = trained(changed(runs(batch_size=20)[name], compile=False, checkpoint_every=None), tmp_path)
    near = dict(rel=2e-2, abs=2 / 60) if name == "bf16" else dict(rel=1e-4)  # two of 60 predictions may change
    together = load(by_two / name)[2]
    rows = [line.split(",") for line in (by_two / name / "curve.csv").read_text().splitlines()[1:]]
    for row, expected in zip(curve.rows, rows, strict=True):
        for measure, value in zip(("train_loss", "val_loss", "val_top1"), expected[1:4], strict=True):
            assert float(value) == pytest.approx(row[measure], **near), measure
    tolerance = dict(rtol=0.1, atol=2e-2) if name == "bf16" else dict(rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(together.state_dict(), alone.state_dict(), **tolerance)  # type: ignore[arg-type]
    for rank in (0, 1):
        returned = torch.load(by_two / f"{name}-{rank}.pt")
        assert all(torch.equal(returned[key], value) for key, value in together.state_dict().items())


@pytest.mark.slow
def test_killed_processes_resume_to_the_same_weights(by_two: Path) -> None:
    kept = [by_two / "average", by_two / "killed"]
    weights, resumed = (safetensors.torch.load_file(folder / "weights.safetensors") for folder in kept)
    torch.testing.assert_close(resumed, weights, rtol=0, atol=0)
    saved = [torch.load(folder / "checkpoint.ckpt", weights_only=True) for folder in kept]
    moments, again = (checkpoint["optimizer_states"][0]["state"] for checkpoint in saved)
    assert len(moments) > 10
    for number, of_weight in moments.items():
        torch.testing.assert_close(again[number], of_weight, rtol=0, atol=0)


@pytest.mark.slow
def test_signal_to_one_of_two_processes_stops_both_after_the_same_step(by_two: Path) -> None:
    assert [torch.load(by_two / f"steps-{rank}.pt") for rank in (0, 1)] == [[3, 4, 7]] * 2
    files = [by_two / name / "weights.safetensors" for name in ("whole", "stopped")]
    whole, resumed = map(safetensors.torch.load_file, files)
    torch.testing.assert_close(resumed, whole, rtol=0, atol=0)
