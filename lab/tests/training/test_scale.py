"""Training at scale: optimisers, EMA, accumulation, memory, precision, several processes."""

import csv
import math
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import data_of, free_port
from timm.models import group_parameters
from timm.optim import Lamb, create_optimizer_v2, param_groups_layer_decay
from torch import nn

from torchrope.models import Features, Swin, ViT
from torchrope_lab.data.data_config import data_config
from torchrope_lab.settings.run_config import ExecutionConfig, ModelConfig, OptimConfig, RunConfig, read_config
from torchrope_lab.training.devices import accumulation_steps, slow_without_gpu
from torchrope_lab.training.optim import build_optimizer, build_schedule, warmup_cosine
from torchrope_lab.training.run import load, train

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
    small = dict(patch_size=2, in_channels=1, num_outputs=3, dim=16, depth=3, num_heads=2, encoding="learned+liere:4")
    return ViT((8, 8), **{**small, **settings})  # type: ignore[arg-type]


def tiny_swin(**settings: object) -> Swin:
    small = dict(num_outputs=3, dim=8, depths=(2, 2), num_heads=(1, 2), window_size=2, encoding="bias+mixed")
    return Swin((16, 16), **{**small, **settings})  # type: ignore[arg-type]


def lamb_step(w: torch.Tensor, gradients: list[torch.Tensor], lr: float, decay: float) -> torch.Tensor:
    """Compute the weights after steps of LAMB's algorithm 2; without weight decay the ratio of norms is 1."""
    m, v, b1, b2 = torch.zeros_like(w), torch.zeros_like(w), 0.9, 0.999
    for t, g in enumerate(gradients, 1):
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g**2
        u = (m / (1 - b1**t)) / ((v / (1 - b2**t)).sqrt() + 1e-6) + decay * w
        ratio = w.norm() / u.norm() if decay and w.norm() > 0 and u.norm() > 0 else 1.0
        w = w - lr * ratio * u
    return w


@pytest.mark.parametrize("weight_decay", [0.0, 0.05])
def test_lamb_equals_its_paper_without_gradient_clipping(
    weight_decay: float,
) -> None:
    model = tiny_vit(encoding="none").double()
    config = OptimConfig(optimizer="lamb", lr=0.01, weight_decay=weight_decay)
    optimizer = build_optimizer(model, config)
    decays = {p: group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    generator = torch.Generator().manual_seed(0)
    gradients: dict[str, list[torch.Tensor]] = {name: [] for name in before}
    for _ in range(4):
        for name, parameter in model.named_parameters():
            parameter.grad = 100 * torch.randn(parameter.shape, dtype=torch.float64, generator=generator)
            gradients[name].append(parameter.grad.clone())
        optimizer.step()
    assert set(decays.values()) == {weight_decay, 0.0}
    for name, parameter in model.named_parameters():
        wanted = lamb_step(before[name], gradients[name], lr=0.01, decay=decays[parameter])
        torch.testing.assert_close(parameter.detach(), wanted, rtol=1e-12, atol=1e-14)


def test_lamb_ignores_parameters_without_gradient() -> None:
    model = tiny_vit()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    build_optimizer(model, OptimConfig(optimizer="lamb")).step()
    assert all(torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True))


def rates_and_decays(model: nn.Module, **optim: Any) -> dict[str, tuple[float, float]]:
    """Return learning rate and weight decay of every trainable parameter, by name."""
    groups = build_optimizer(model, OptimConfig(lr=1.0, **optim)).param_groups
    assert all(p.numel() for group in groups for p in group["params"])
    found = {p: (group["lr"], group["weight_decay"]) for group in groups for p in group["params"]}
    return {name: found[p] for name, p in model.named_parameters() if p.numel()}


def levels(model: nn.Module) -> dict[str, int]:
    """Compute the level of every parameter below the head from its learning rate."""
    return {name: round(-math.log2(rate)) for name, (rate, _) in rates_and_decays(model, layer_decay=0.5).items()}


MODELS = {
    "class token": lambda: tiny_vit(),
    "no prefix, shared layers": lambda: tiny_vit(pool="mean", share_layers=True),
    "bias, registers, scales": lambda: tiny_vit(encoding="bias+mixed", num_registers=2, layer_scale=0.1, num_outputs=0),
    "swin": lambda: tiny_swin(),
    "swin, fixed encoding": lambda: tiny_swin(encoding="axial", num_outputs=0),
}


@pytest.mark.parametrize("kind", list(MODELS))
def test_layer_decay_and_weight_decay_equal_timms_groups(kind: str) -> None:
    model = MODELS[kind]()
    names = {parameter: name for name, parameter in model.named_parameters()}
    theirs = {
        names[parameter]: (group["lr_scale"], group["weight_decay"])
        for group in param_groups_layer_decay(model, 0.05, model.no_weight_decay(), layer_decay=0.5)
        for parameter in group["params"]
        if parameter.numel()
    }
    assert rates_and_decays(model, layer_decay=0.5, weight_decay=0.05) == theirs


def test_timm_optimisers_accept_torchrope_models() -> None:
    model = tiny_vit(encoding="liere:4")
    optimizer = create_optimizer_v2(model, "lamb", lr=0.1, weight_decay=0.05, layer_decay=0.5)
    groups = {p: group for group in optimizer.param_groups for p in group["params"]}
    assert groups[model.encodings[1].upper]["weight_decay"] == 0
    assert groups[model.encodings[1].upper]["lr_scale"] == 0.5**2
    assert groups[model.head.weight]["lr_scale"] == 1


def test_layer_decay_multiplies_once_per_level_below_the_head() -> None:
    vit = levels(tiny_vit(pool="cls"))
    assert {vit[name] for name in vit if name.startswith(("embed", "prefix", "absolute"))} == {4}
    assert {vit[name] for name in vit if name.startswith(("layers.1.", "encodings.1."))} == {2}
    assert {vit[name] for name in vit if name.startswith(("norm", "head"))} == {0}  # BEiT and MAE
    shared = levels(tiny_vit(share_layers=True))
    assert shared["encodings.0.upper"] == shared["layers.0.norm1.weight"] == 3
    swin = levels(tiny_swin())
    assert {swin[name] for name in swin if name.startswith("embed")} == {5}
    assert {swin[name] for name in swin if name.startswith("stages.0.layers.1.")} == {3}
    second = ("stages.1.layers.0.", "stages.1.merge.", "stages.1.encodings.0.", "stages.1.biases.0.")
    assert {swin[name] for name in swin if name.startswith(second)} == {2}
    assert {swin[name] for name in swin if name.startswith(("head", "norm"))} == {0}


def test_swin_coarse_groups_are_stages() -> None:
    model = tiny_swin()
    groups = group_parameters(model, model.group_matcher(coarse=True), reverse=True)
    assert {groups[name] for name in groups if name.startswith("stages.1.")} == {2}
    assert len(set(groups.values())) == 4


def rates_of(schedule: torch.optim.lr_scheduler.LRScheduler, steps: int) -> list[float]:
    rates = []
    for _ in range(steps):
        rates.append(schedule.get_last_lr()[0])
        schedule.optimizer.step()
        schedule.step()
    return rates


def test_linear_and_step_schedules_equal_torch() -> None:
    def stepped(**settings: Any) -> list[float]:
        config = OptimConfig(lr=1e-3, epochs=10, warmup_epochs=0, **settings)
        return rates_of(build_schedule(build_optimizer(tiny_vit(), config), config, total=50), 50)

    def sgd() -> torch.optim.Optimizer:
        return torch.optim.SGD([torch.zeros(1)], lr=1e-3)

    for schedule, power in (("linear", 1.0), ("polynomial", 0.9)):
        line = torch.optim.lr_scheduler.PolynomialLR(sgd(), total_iters=50, power=power)
        assert stepped(schedule=schedule) == pytest.approx(rates_of(line, 50))
    stairs = torch.optim.lr_scheduler.MultiStepLR(sgd(), milestones=[40, 45], gamma=0.1)
    assert stepped(schedule="step", milestones=[8, 9]) == pytest.approx(rates_of(stairs, 50))


@pytest.mark.parametrize("schedule", ["linear", "polynomial", "step"])
def test_schedules_warm_up_linearly(schedule: Any) -> None:
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


def test_warmup_share_zero_disables_warm_up() -> None:
    config = OptimConfig(lr=1.0, epochs=10, warmup_epochs=5, warmup_share=0.0)
    rates = rates_of(build_schedule(build_optimizer(tiny_vit(), config), config, total=40), 40)
    assert rates[0] == 1.0
    assert rates[20] == pytest.approx(0.5)


class WithBackbone(nn.Module):
    """A head on a backbone."""

    def __init__(self, model: ViT | Swin | None = None) -> None:
        super().__init__()
        self.backbone = Features(tiny_vit() if model is None else model)
        self.backbone.pyramid = nn.Conv2d(4, 4, 1)
        self.decoder = nn.Linear(4, 4)


def test_backbone_lr_scales_the_backbone_only() -> None:
    model = WithBackbone()
    optimizer = build_optimizer(model, OptimConfig(lr=1e-3, backbone_lr=0.1))
    rates = {parameter: group["lr"] for group in optimizer.param_groups for parameter in group["params"]}
    assert len(rates) == len(list(model.parameters()))
    assert {round(rates[parameter], 9) for parameter in model.backbone.model.parameters()} == {1e-4}
    assert {rates[parameter] for parameter in model.decoder.parameters()} == {1e-3}


@pytest.mark.parametrize("build", [tiny_vit, tiny_swin])
def test_layers_of_a_backbone_are_as_far_below_the_head_as_those_of_a_classifier(build: Callable[[], Any]) -> None:
    alone, below = levels(build()), levels(WithBackbone(build()))
    backbone = {name for name in below if name.startswith("backbone.model.")}
    assert backbone
    assert {name: below[name] for name in backbone} == {
        name: alone[name[len("backbone.model.") :]] for name in backbone
    }
    assert {level for name, level in below.items() if name not in backbone} == {0}


def test_backbone_lr_keeps_layer_decay() -> None:
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


@pytest.mark.parametrize(("name", "kind"), [("adamw", torch.optim.AdamW), ("adam", torch.optim.Adam), ("lamb", Lamb)])
def test_build_optimizer_by_name(name: str, kind: type) -> None:
    optimizer = build_optimizer(tiny_vit(), OptimConfig(optimizer=name, lr=1e-4, weight_decay=0.3))  # type: ignore[arg-type]
    assert type(optimizer) is kind
    assert {group["weight_decay"] for group in optimizer.param_groups} == {0.3, 0.0}
    assert {group["lr"] for group in optimizer.param_groups} == {1e-4}


def test_schedule_ends_at_min_lr_after_warmup_share() -> None:
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


def test_min_lr_is_at_most_lr() -> None:
    with pytest.raises(ValueError, match=r"^min_lr must be between 0 and lr = 0\.002, got 1\.0$"):
        OptimConfig(min_lr=1.0)


@pytest.mark.parametrize("make", [tiny_vit, tiny_swin])
def test_checkpoint_layers_keeps_gradients_bit_identical(make) -> None:
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


@pytest.mark.slow
def test_ema_is_evaluated_and_saved_and_resumes_exactly(tmp_path: Path) -> None:
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


def test_accumulated_batches_equal_one_large_batch(tmp_path: Path) -> None:
    whole, curve = train(small_run(batch_size=20), data_of(small_run(20)), tmp_path / "whole")
    config = small_run(batch_size=5, effective_batch=20)
    parts, accumulated = train(config, data_of(config), tmp_path / "parts")
    for one, other in zip(whole.parameters(), parts.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert [row["train_loss"] for row in accumulated.rows] == pytest.approx([row["train_loss"] for row in curve.rows])


@pytest.mark.parametrize(("examples", "batch_size"), [(76, 5), (70, 10)])
def test_last_step_of_an_epoch_is_the_mean_over_its_examples(tmp_path: Path, examples: int, batch_size: int) -> None:
    weights = []
    for batch in (20, batch_size):  # the last step has fewer batches, or a smaller one
        config = replace(small_run(batch, effective_batch=20, clip=0.0), encoding="liere:8")
        config = replace(config, data=replace(config.data, train_size=examples))
        weights.append(train(config, data_of(config), tmp_path / str(batch))[0].state_dict())
    for name, weight in weights[0].items():
        torch.testing.assert_close(weights[1][name], weight, rtol=1e-4, atol=1e-5)


def test_effective_batch_must_be_a_multiple_of_the_devices() -> None:
    config = small_run(batch_size=8, effective_batch=64)
    assert [accumulation_steps(config, devices) for devices in (1, 2, 4, 8)] == [8, 4, 2, 1]
    with pytest.raises(
        ValueError, match=r"^effective_batch must be a multiple of batch_size · devices = 8 · 3, got 64$"
    ):
        accumulation_steps(config, 3)
    assert accumulation_steps(small_run(batch_size=8), 3) == 1


@pytest.mark.parametrize("gpu", [False, True])
def test_recipe_for_gpus_names_what_is_less_slow_without_one(gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: gpu)
    on_gpus = ExecutionConfig(precision="bf16", compile=True)
    config = replace(small_run(batch_size=256, effective_batch=2048), run=on_gpus)
    options = "--run.compile false --run.precision float32 --data.batch_size 64 --optim.effective_batch 64"
    assert slow_without_gpu(config) == ("" if gpu else f"this machine has no GPU; less slow: {options}")
    assert slow_without_gpu(small_run()) == ""


def test_bf16_keeps_weights_in_float32(tmp_path: Path) -> None:
    config = replace(small_run(epochs=1), run=ExecutionConfig(precision="bf16"))
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


def test_older_configurations_can_be_read(tmp_path: Path) -> None:
    stored = {
        "encoding": "mixed",
        "seed": 0,
        "data": {"name": "digits"},
        "model": {"dim": 16},
        "optim": {"epochs": 3, "milestones": []},
    }
    assert read_config(stored) == RunConfig(
        encoding="mixed", data=data_config(), model=ModelConfig(dim=16), optim=OptimConfig(epochs=3)
    )


@pytest.mark.slow
def test_compiled_model_trains_to_the_same_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = small_run(epochs=1)
    plain, _ = train(config, data_of(config), tmp_path / "plain")
    compile_module, compiled = torch.nn.Module.compile, []

    def without_code(module: torch.nn.Module) -> None:
        compiled.append(module)
        compile_module(module, backend="eager")  # the compiler's front end only, which is fast

    monkeypatch.setattr(torch.nn.Module, "compile", without_code)
    faster = replace(config, run=ExecutionConfig(compile=True))
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
    "--run.logs=[]",
]


def in_background(command: list[str]) -> subprocess.Popen:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["--optim.train_sizes=4,8,12"]], ids=["one size", "mixed sizes"])
def test_training_in_two_processes_equals_that_in_one(tmp_path: Path, more: list[str]) -> None:
    out = {name: tmp_path / name for name in ("alone", "together")}
    train_so = [*TRAIN, *more]
    commands = [[sys.executable, "-m", "torchrope_lab", *train_so, "--data.batch_size=20", f"--out={out['alone']}"]]
    launch = [*LAUNCH, f"--rdzv-endpoint=127.0.0.1:{free_port()}", "-m", "torchrope_lab", *train_so]
    commands.append([*launch, "--data.batch_size=5", f"--out={out['together']}"])
    runs = [in_background(command) for command in commands]
    printed = [run.communicate(timeout=120)[0] for run in runs]
    assert [run.returncode for run in runs] == [0, 0], printed
    assert [text.count("trained:") for text in printed] == [1, 1]  # printed by rank 0 only
    alone, curve = (list(csv.DictReader((folder / "curve.csv").read_text().splitlines())) for folder in out.values())
    for one, two in zip(alone, curve, strict=True):
        for name in ("train_loss", "val_loss", "val_top1"):
            assert float(one[name]) == pytest.approx(float(two[name]), rel=1e-4), (one, two)
    weights, theirs = (load(folder)[2].state_dict() for folder in out.values())
    for name, weight in weights.items():
        torch.testing.assert_close(weight, theirs[name], rtol=1e-3, atol=1e-5)
