"""Train in child processes that are killed at random moments, resume them, and check that all results are equal.

    python tests/support/killing.py FOLDER TRIALS KIND SEED

KIND is "plain", a set in memory that is read by the training process itself, or "augmented", files that two workers
decode and change by RandAugment, with Mixup. A trial's child is killed with SIGKILL once or twice: after a random part
of what a whole run takes, or inside the k-th write of a file, before or behind it became the file. Then it may finish.
Children are forks, so that torch is imported once; this process itself never computes.
"""

import hashlib
import json
import multiprocessing
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from miniatures import images

from torchrope_lab.data.build import make_data
from torchrope_lab.data.data_config import AugmentConfig, data_config
from torchrope_lab.settings.run_config import ExecutionConfig, ModelConfig, OptimConfig, RunConfig
from torchrope_lab.training.run import train

WRITES = {"plain": 11, "augmented": 9}  # of a whole run


def config(folder: Path, kind: str) -> RunConfig:
    data: dict[str, Any] = {
        "plain": dict(name="digits", train_size=60, augment=AugmentConfig(flip=True, mixup=0.4)),
        "augmented": dict(
            name="images",
            root=str(folder / "images"),
            size=8,
            train_size=40,
            workers=2,
            augment=AugmentConfig(crop_scale=(0.6, 1), flip=True, randaugment=(2, 9), erasing=0.5, mixup=0.4),
        ),
    }[kind]
    return RunConfig(
        encoding="learned+liere:4",
        seed=5,
        data=data_config(**data, val_size=10, batch_size=5),
        model=ModelConfig(dim=8, depth=1, num_heads=1, mlp_dim=8, patch_size=[4], dropout=0.1, drop_path=0.1),
        optim=OptimConfig(epochs=2, ema_decay=0.9, effective_batch=10),
        run=ExecutionConfig(checkpoint_every=2),
    )


def run(folder: Path, kind: str, dies_in_write: float | None) -> None:
    folder.parent.mkdir(exist_ok=True)
    torch.set_num_threads(1)
    os.dup2(os.open(folder.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    if dies_in_write is not None:
        die_in_write(dies_in_write)
    settings = config(folder.parent, kind)
    data = make_data(settings.data)
    data.setup()
    train(settings, data, folder)


def die_in_write(number: float) -> None:
    """Kill this process in its write of that number; x.5 is behind the replacement."""
    replace, done = os.replace, 0

    def counted(old: str, new: str) -> None:
        nonlocal done
        done += 1
        if done == number:
            os.kill(os.getpid(), signal.SIGKILL)
        replace(old, new)
        if done + 0.5 == number:
            os.kill(os.getpid(), signal.SIGKILL)

    os.replace = counted  # type: ignore[assignment]


def start(folder: Path, kind: str, dies_in_write: float | None = None) -> multiprocessing.Process:
    child = multiprocessing.get_context("fork").Process(target=run, args=(folder, kind, dies_in_write))
    child.start()
    return child  # type: ignore[return-value]


def outcome(folder: Path) -> dict[str, str]:
    """Everything that must be alike: weights, the state of the optimiser and the average, the curve but for times."""
    weights = safetensors.torch.load_file(folder / "weights.safetensors")
    saved = torch.load(folder / "checkpoint.ckpt", weights_only=True)
    rows = [line.split(",")[:-1] for line in (folder / "curve.csv").read_text().splitlines()]
    moments = [
        state[key] for _, state in sorted(saved["optimizer_states"][0]["state"].items()) for key in sorted(state)
    ]
    return {
        "weights": digest([weights[name] for name in sorted(weights)]),
        "current": digest([saved["current_model_state"][name] for name in sorted(saved["current_model_state"])]),
        "moments": digest([torch.as_tensor(value) for value in moments]),
        "curve": json.dumps(rows),
    }


def digest(tensors: list[torch.Tensor]) -> str:
    return hashlib.sha256(b"".join(tensor.contiguous().numpy().tobytes() for tensor in tensors)).hexdigest()


def trial(folder: Path, kind: str, rng: random.Random, seconds: float) -> list[str]:
    """Kill once or twice, then let the run finish; says what killed it."""
    killed = []
    for _ in range(rng.randint(1, 2)):
        if rng.random() < 0.4:
            number = rng.randint(1, WRITES[kind]) + rng.choice([0, 0.5])
            child = start(folder, kind, number)
            child.join()
            how = f"write {number}"
        else:
            child = start(folder, kind)
            child.join(rng.uniform(0.05, 0.8) * seconds)
            how = "time"
            child.kill()
            child.join()
        if child.exitcode == -signal.SIGKILL:
            killed.append(how)
    child = start(folder, kind)
    child.join()
    if child.exitcode != 0:
        raise SystemExit(f"a run that went on ended with {child.exitcode}")
    return killed


def seconds_of(call: Callable[[], object]) -> float:
    started = time.monotonic()
    call()
    return time.monotonic() - started


def main(folder: Path, trials: int, kind: str, seed: int) -> None:
    rng = random.Random(seed)
    images(folder / "images")
    seconds = seconds_of(lambda: start(folder / "whole", kind).join())
    expected = outcome(folder / "whole")
    kills: list[list[str]] = []
    for number in range(4 * trials):
        here = folder / f"trial-{number}"
        killed = trial(here, kind, rng, seconds)
        got = outcome(here)
        wrong = [name for name in expected if got[name] != expected[name]]
        if wrong or list(here.glob(".*")):
            raise SystemExit(f"trial {number}, killed by {killed}: {wrong} differ, {sorted(here.iterdir())}")
        kills += [killed] if killed else []  # a run that was too quick does not count
        if len(kills) == trials:
            break
    print(json.dumps(kills))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
