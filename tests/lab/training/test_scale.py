"""Training at scale: optimisers against timm's, averages, accumulation, memory, precision, several processes."""

import csv
import math
import os
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from processes import data_of, free_port
from timm.optim import Lamb, param_groups_layer_decay
from torch import nn

from torchrope.lab.data.config import data_config
from torchrope.lab.training.config import ModelConfig, OptimConfig, RunConfig, ScaleConfig, read_config
from torchrope.lab.training.devices import batches_in_a_step
from torchrope.lab.training.lamb import LAMB
from torchrope.lab.training.optim import build_optimizer, build_schedule, layer_depths, warmup_cosine
from torchrope.lab.training.run import load, train
from torchrope.models import Swin, ViT

SMALL = ModelConfig(dim=16, depth=2, num_heads=2, mlp_dim=16, patch_size=[4], pool="mean")


def small_run(batch_size: int = 20, **optim: object) -> RunConfig:
    return RunConfig(
        encoding="liere:4",
        seed=1,
        data=data_config(name="digits", train_size=80, val_size=60, batch_size=batch_size),
        model=SMALL,
        optim=OptimConfig(**{"epochs": 2, "warmup_epochs": 1.0, **optim}),  # type: ignore[arg-type]
    )


def tiny_vit(**settings: object) -> ViT:
    small = dict(patch_size=2, in_channels=1, num_classes=3, dim=16, depth=3, num_heads=2, encoding="learned+liere:4")
    return ViT((8, 8), **{**small, **settings})  # type: ignore[arg-type]


def tiny_swin(**settings: object) -> Swin:
    small = dict(num_classes=3, dim=8, depths=(2, 2), num_heads=(1, 2), window_size=2, encoding="bias+mixed")
    return Swin((16, 16), **{**small, **settings})  # type: ignore[arg-type]


@pytest.mark.parametrize("weight_decay", [0.0, 0.05])
def test_lamb_takes_the_steps_of_timms(weight_decay: float) -> None:
    weights = [torch.randn(4, 3), torch.zeros(5), torch.randn(2)]
    mine, theirs = ([torch.nn.Parameter(w.clone()) for w in weights] for _ in range(2))
    optimizers = [
        LAMB(mine, lr=0.1, weight_decay=weight_decay),
        Lamb(theirs, lr=0.1, weight_decay=weight_decay, max_grad_norm=None),
    ]
    for _ in range(5):
        gradients = [torch.randn_like(w) for w in weights]
        for parameters, optimizer in zip((mine, theirs), optimizers, strict=True):
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient.clone()
            optimizer.step()
    for one, other in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, other)


def test_a_step_of_lamb_leaves_alone_what_has_no_gradient() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    LAMB([weight]).step()
    assert torch.equal(weight, torch.ones(3))


def test_layers_learn_slower_by_depth_as_in_timm() -> None:
    ours = tiny_vit(pool="cls", encoding="learned")
    theirs = timm.create_model(
        "vit_tiny_patch16_224", img_size=8, patch_size=2, in_chans=1, embed_dim=16, depth=3, num_heads=2, num_classes=3
    )
    names = {id(parameter): name for name, parameter in theirs.named_parameters()}
    scales = {
        names[id(parameter)]: group["lr_scale"]
        for group in param_groups_layer_decay(theirs, layer_decay=0.5)
        for parameter in group["params"]
    }
    optimizer = build_optimizer(ours, OptimConfig(lr=1.0, layer_decay=0.5))
    mine = {id(parameter): group["lr"] for group in optimizer.param_groups for parameter in group["params"]}
    pairs = {
        "embed.proj.weight": "patch_embed.proj.weight",
        "prefix_tokens": "cls_token",
        "layers.0.attention.qkv.weight": "blocks.0.attn.qkv.weight",
        "layers.2.mlp.0.bias": "blocks.2.mlp.fc1.bias",
        "head.weight": "head.weight",
    }
    own = dict(ours.named_parameters())
    assert {name: mine[id(own[name])] for name in pairs} == {name: scales[other] for name, other in pairs.items()}
    assert mine[id(own["norm.weight"])] == 1.0  # BEiT and MAE; timm counts it to the last layer
    assert len(mine) == len(own)


def test_depths_follow_the_layers_with_their_encodings_in_vit_and_swin() -> None:
    vit = layer_depths(tiny_vit(pool="cls"))
    assert {vit[name] for name in vit if name.startswith(("layers.1.", "encodings.1."))} == {2}
    assert {vit[name] for name in vit if name.startswith(("embed", "prefix", "absolute"))} == {0}
    swin = layer_depths(tiny_swin())
    assert {swin[name] for name in swin if name.startswith("stages.0.layers.1.")} == {2}
    second = ("stages.1.layers.0.", "stages.1.merge.", "stages.1.encodings.0.", "stages.1.biases.0.")
    assert {swin[name] for name in swin if name.startswith(second)} == {3}
    assert {swin[name] for name in swin if name.startswith(("head", "norm"))} == {5}
    assert {swin[name] for name in swin if name.startswith("embed")} == {0}


def rates_of(schedule: torch.optim.lr_scheduler.LRScheduler, steps: int) -> list[float]:
    rates = []
    for _ in range(steps):
        rates.append(schedule.get_last_lr()[0])
        schedule.optimizer.step()
        schedule.step()
    return rates


def test_linear_and_step_schedules_are_those_of_torch() -> None:
    def stepped(**settings: Any) -> list[float]:
        config = OptimConfig(lr=1e-3, epochs=10, warmup_epochs=0, **settings)
        return rates_of(build_schedule(build_optimizer(tiny_vit(), config), config, total=50), 50)

    def sgd() -> torch.optim.Optimizer:
        return torch.optim.SGD([torch.zeros(1)], lr=1e-3)

    line = torch.optim.lr_scheduler.PolynomialLR(sgd(), total_iters=50, power=1.0)
    assert stepped(schedule="linear") == pytest.approx(rates_of(line, 50))
    stairs = torch.optim.lr_scheduler.MultiStepLR(sgd(), milestones=[40, 45], gamma=0.1)
    assert stepped(schedule="step", milestones=[8, 9]) == pytest.approx(rates_of(stairs, 50))


@pytest.mark.parametrize("schedule", ["linear", "step"])
def test_every_schedule_warms_up_linearly(schedule: Any) -> None:
    milestones = [9.0] if schedule == "step" else []
    config = OptimConfig(lr=1.0, epochs=10, warmup_epochs=1, schedule=schedule, milestones=milestones)
    rates = rates_of(build_schedule(build_optimizer(tiny_vit(), config), config, total=40), 40)
    assert rates[:4] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert max(rates) == pytest.approx(1.0)


@pytest.mark.parametrize("warmup_epochs", [5.0, 6.0, 25.0])
@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_build_schedule_warms_up_over_half_of_the_steps_at_most(schedule: Any, warmup_epochs: float) -> None:
    config = OptimConfig(lr=1.0, epochs=10, warmup_epochs=warmup_epochs, schedule=schedule)
    rates = rates_of(build_schedule(build_optimizer(tiny_vit(), config), config, total=40), 40)
    assert rates[:20] == pytest.approx([step / 20 for step in range(1, 21)])
    assert rates[20] == 1.0
    assert all(after < before for before, after in pairwise(rates[20:]))
    assert rates[30] == pytest.approx(0.5)


def test_a_share_of_warm_up_that_is_zero_is_none() -> None:
    config = OptimConfig(lr=1.0, epochs=10, warmup_epochs=5, warmup_share=0.0)
    rates = rates_of(build_schedule(build_optimizer(tiny_vit(), config), config, total=40), 40)
    assert rates[0] == 1.0
    assert rates[20] == pytest.approx(0.5)


class WithBackbone(nn.Module):
    """What reads the maps of a backbone."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Module()
        self.backbone.model = tiny_vit()
        self.backbone.pyramid = nn.Conv2d(4, 4, 1)
        self.decoder = nn.Linear(4, 4)


def test_a_backbone_below_another_head_learns_more_slowly() -> None:
    model = WithBackbone()
    alone = layer_depths(tiny_vit())
    below = {name.removeprefix("backbone.model."): depth for name, depth in layer_depths(model).items()}
    assert {name: below[name] for name in alone} == alone
    assert {below[name] for name in below if name not in alone} == {max(alone.values())}
    optimizer = build_optimizer(model, OptimConfig(lr=1e-3, backbone_lr=0.1))
    rates = {parameter: group["lr"] for group in optimizer.param_groups for parameter in group["params"]}
    assert len(rates) == len(list(model.parameters()))
    assert {round(rates[parameter], 9) for parameter in model.backbone.model.parameters()} == {1e-4}
    assert {rates[parameter] for parameter in model.decoder.parameters()} == {1e-3}


def test_a_slower_backbone_keeps_the_decay_of_its_layers() -> None:
    model = WithBackbone()

    def rates(backbone_lr: float) -> dict[str, float]:
        config = OptimConfig(lr=1e-3, layer_decay=0.5, backbone_lr=backbone_lr)
        groups = build_optimizer(model, config).param_groups
        rate = {parameter: group["lr"] for group in groups for parameter in group["params"]}
        return {name: rate[parameter] for name, parameter in model.named_parameters()}

    whole, slower = rates(1.0), rates(0.1)
    assert len({rate for name, rate in whole.items() if name.startswith("backbone.model.")}) > 2
    for name, rate in whole.items():
        assert slower[name] == pytest.approx(rate * (0.1 if name.startswith("backbone.model.") else 1.0))


@pytest.mark.parametrize(("name", "kind"), [("adamw", torch.optim.AdamW), ("adam", torch.optim.Adam), ("lamb", LAMB)])
def test_optimisers_by_name(name: str, kind: type) -> None:
    optimizer = build_optimizer(tiny_vit(), OptimConfig(optimizer=name, lr=1e-4, weight_decay=0.3))  # type: ignore[arg-type]
    assert type(optimizer) is kind
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0.0]
    assert {group["lr"] for group in optimizer.param_groups} == {1e-4}


def test_the_schedule_ends_at_its_least_rate_after_a_share_of_warm_up() -> None:
    optimizer = build_optimizer(tiny_vit(), OptimConfig(lr=1e-3))
    schedule = build_schedule(optimizer, OptimConfig(lr=1e-3, min_lr=1e-5, warmup_share=0.02), total=100)
    rates = []
    for _ in range(100):
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    rates.append(schedule.get_last_lr()[0])
    assert rates[:3] == pytest.approx([5e-4, 1e-3, 1e-3])
    assert rates[51] == pytest.approx((1e-3 + 1e-5) / 2)
    assert rates[-1] == pytest.approx(1e-5)
    assert warmup_cosine(7, warmup=2, total=9) == warmup_cosine(7, warmup=2, total=9, floor=0.0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(min_lr=1.0), "min_lr must be between 0 and lr = 0.002, got 1.0"),
        (dict(warmup_share=0.7), "warmup_share must be between 0 and 0.5, got 0.7"),
        (dict(layer_decay=0.0), "layer_decay must be above 0 and at most 1, got 0.0"),
        (dict(ema_decay=1.0), "ema_decay must be above 0 and below 1, got 1.0"),
        (dict(effective_batch=0), "effective_batch must be 1 or more, got 0"),
        (dict(optimizer="sgd"), "optimizer must be one of adamw, adam, lamb, got 'sgd'"),
    ],
)
def test_bad_settings_are_told_in_one_line(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        OptimConfig(**settings)


@pytest.mark.parametrize("make", [tiny_vit, tiny_swin])
def test_checkpointed_layers_have_the_same_gradients_bit_for_bit(make) -> None:
    settings = dict(dropout=0.1, drop_path=0.3)
    plain, lean = (make(**settings, checkpoint_layers=checkpointed) for checkpointed in (False, True))
    lean.load_state_dict(plain.state_dict())
    x = torch.randn(6, plain.embed.in_channels, *((8, 8) if make is tiny_vit else (16, 16)))
    kept = []
    for model in (plain, lean):
        saved: list[int] = []
        torch.manual_seed(3)
        with torch.autograd.graph.saved_tensors_hooks(lambda t, saved=saved: saved.append(t.nbytes) or t, lambda t: t):
            loss = model(x).square().sum()
        loss.backward()
        kept.append(sum(saved))
    for (name, one), other in zip(plain.named_parameters(), lean.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad), name  # type: ignore[arg-type]
    assert kept[1] < kept[0] / 2


def test_the_average_of_the_weights_is_what_is_evaluated_and_kept_and_resumes_exactly(tmp_path: Path) -> None:
    config = small_run(epochs=3, ema_decay=0.8)
    seen: list[torch.Tensor] = []

    from pytorch_lightning.callbacks import Callback

    class Spy(Callback):
        def on_train_batch_end(self, trainer, pl_module, *_):
            seen.append(pl_module.model.head.weight.detach().clone())

    trained, curve = train(config, data_of(config), tmp_path / "whole", callbacks=[Spy()])
    average = seen[0]
    for weight in seen[1:]:
        average = 0.8 * average + 0.2 * weight
    torch.testing.assert_close(trained.model.head.weight.detach(), average)
    assert torch.equal(load(tmp_path / "whole")[2].model.head.weight, trained.model.head.weight)
    finished, _ = train(config, data_of(config), tmp_path / "whole")
    assert torch.equal(finished.model.head.weight, trained.model.head.weight)

    def stop(row: dict[str, float]) -> None:
        if row["epoch"] == 2:
            raise RuntimeError

    with pytest.raises(RuntimeError):
        train(config, data_of(config), tmp_path / "stopped", on_epoch=stop)
    resumed, again = train(config, data_of(config), tmp_path / "stopped")
    for one, other in zip(trained.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, other)
    assert [row["val_loss"] for row in again.rows] == [row["val_loss"] for row in curve.rows]


def test_accumulated_batches_step_as_one_of_their_size(tmp_path: Path) -> None:
    whole, curve = train(small_run(batch_size=20), data_of(small_run(20)), tmp_path / "whole")
    config = small_run(batch_size=5, effective_batch=20)
    parts, accumulated = train(config, data_of(config), tmp_path / "parts")
    for one, other in zip(whole.parameters(), parts.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert [row["train_loss"] for row in accumulated.rows] == pytest.approx([row["train_loss"] for row in curve.rows])


def test_an_effective_batch_is_kept_on_any_number_of_devices_or_refused() -> None:
    config = small_run(batch_size=8, effective_batch=64)
    assert [batches_in_a_step(config, devices) for devices in (1, 2, 4, 8)] == [8, 4, 2, 1]
    with pytest.raises(
        ValueError, match=r"^effective_batch must be a multiple of batch_size · devices = 8 · 3, got 64$"
    ):
        batches_in_a_step(config, 3)
    assert batches_in_a_step(small_run(batch_size=8), 3) == 1


def test_bfloat16_multiplies_in_bfloat16_and_keeps_weights_in_float32(tmp_path: Path) -> None:
    config = replace(small_run(epochs=1), scale=ScaleConfig(precision="bf16"))
    dtypes: set[torch.dtype] = set()
    hook = torch.nn.modules.module.register_module_forward_hook(
        lambda module, _, out: dtypes.add(out.dtype) if isinstance(module, torch.nn.Linear) else None
    )
    try:
        trained, curve = train(config, data_of(config), tmp_path)
    finally:
        hook.remove()
    assert dtypes == {torch.bfloat16}
    assert {parameter.dtype for parameter in trained.parameters()} == {torch.float32}
    assert math.isfinite(curve.rows[-1]["train_loss"])


def test_older_configurations_read_as_they_were(tmp_path: Path) -> None:
    stored = {
        "encoding": "mixed",
        "seed": 0,
        "data": {"name": "digits"},
        "model": {"dim": 16},
        "optim": {"epochs": 3, "betas": [0.9, 0.999]},
    }
    assert read_config(stored) == RunConfig(
        encoding="mixed", data=data_config(), model=ModelConfig(dim=16), optim=OptimConfig(epochs=3)
    )


def test_a_compiled_model_trains_the_same_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = small_run(epochs=1)
    plain, _ = train(config, data_of(config), tmp_path / "plain")
    compile_module, compiled = torch.nn.Module.compile, []

    def without_code(module: torch.nn.Module) -> None:
        compiled.append(module)
        compile_module(module, backend="eager")  # what the compiler's front end alone makes of it, at once

    monkeypatch.setattr(torch.nn.Module, "compile", without_code)
    faster = replace(config, scale=ScaleConfig(compile=True))
    trained, _ = train(faster, data_of(config), tmp_path / "compiled")
    assert compiled == [trained.model]
    assert set(load(tmp_path / "compiled")[2].state_dict()) == set(plain.state_dict())
    for one, other in zip(plain.parameters(), trained.parameters(), strict=True):
        torch.testing.assert_close(one, other)


LAUNCH = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d"]
TRAIN = [
    "train",
    "--data.train_size=80",
    "--data.val_size=50",
    "--encoding=mixed",
    "--model.dim=16",
    "--model.depth=1",
    "--model.num_heads=1",
    "--model.mlp_dim=16",
    "--model.patch_size=[4]",
    "--optim.warmup_epochs=1",
    "--optim.effective_batch=20",
    "--epochs=3",
    "--trainer.accelerator=cpu",
    "--trainer.enable_progress_bar=false",
    "--scale.logs=[]",
]


def in_background(command: list[str]) -> subprocess.Popen:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.slow
def test_two_processes_under_torchrun_learn_as_one_does(tmp_path: Path) -> None:
    out = {name: tmp_path / name for name in ("alone", "ddp", "fsdp2")}
    commands = [[sys.executable, "-m", "torchrope", *TRAIN, "--data.batch_size=20", f"--out={out['alone']}"]]
    for strategy in ("ddp", "fsdp2"):
        launch = [*LAUNCH, f"--rdzv-endpoint=127.0.0.1:{free_port()}", "-m", "torchrope", *TRAIN]
        chosen = [f"--trainer.strategy={strategy}"] if strategy == "fsdp2" else []  # the other is the default
        commands.append([*launch, "--data.batch_size=5", f"--out={out[strategy]}", *chosen])
    runs = [in_background(command) for command in commands]
    printed = [run.communicate(timeout=120)[0] for run in runs]
    assert [run.returncode for run in runs] == [0, 0, 0], printed
    assert [text.count("trained:") for text in printed] == [1, 1, 1]  # by the first process, which knows the other
    alone, *others = (list(csv.DictReader((folder / "curve.csv").read_text().splitlines())) for folder in out.values())
    weights, *their_weights = (load(folder)[2].state_dict() for folder in out.values())
    for curve, theirs in zip(others, their_weights, strict=True):
        for one, two in zip(alone, curve, strict=True):
            for name in ("train_loss", "val_loss", "val_top1"):
                assert float(one[name]) == pytest.approx(float(two[name]), rel=1e-4), (one, two)
        for name, weight in weights.items():
            torch.testing.assert_close(weight, theirs[name], rtol=1e-3, atol=1e-5)
