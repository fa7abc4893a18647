"""Training at scale: optimisers, EMA, accumulation, memory, precision, several processes."""

import csv
import math
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import free_port
from small_runs import HeadWeights, Killed, changed, die_in_epoch_2, lab_process, same_weights, small_run, trained
from timm.models import group_parameters
from timm.optim import Lamb, param_groups_layer_decay
from torch import nn
from torch.optim import lr_scheduler

from torchrope.models import Features, Swin, ViT
from torchrope_lab.data.data_config import data_config
from torchrope_lab.settings.run_config import ModelConfig, OptimConfig, RunConfig, read_config
from torchrope_lab.training.devices import accumulation_steps, slow_without_gpu
from torchrope_lab.training.optim import build_optimizer, build_schedule
from torchrope_lab.training.run import load


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
def test_lamb_equals_its_paper_without_gradient_clipping(weight_decay: float) -> None:
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


def rates_of(schedule: lr_scheduler.LRScheduler, steps: int) -> list[float]:
    rates = []
    for _ in range(steps):
        rates.append(schedule.get_last_lr()[0])
        schedule.optimizer.step()
        schedule.step()
    return rates


def rates(**optim: Any) -> list[float]:
    """The learning rate of each of 40 steps in ten epochs, and the one after."""
    config = OptimConfig(**{"lr": 1.0, "epochs": 10, "warmup_epochs": 0, **optim})
    return rates_of(build_schedule(build_optimizer(tiny_vit(), config), config, total=40), 41)


@pytest.mark.parametrize(
    ("settings", "theirs"),
    [
        ({"schedule": "cosine", "min_lr": 0.01}, partial(lr_scheduler.CosineAnnealingLR, T_max=40, eta_min=0.01)),
        ({"schedule": "linear"}, partial(lr_scheduler.PolynomialLR, total_iters=40, power=1.0)),
        ({"schedule": "polynomial"}, partial(lr_scheduler.PolynomialLR, total_iters=40, power=0.9)),
        ({"schedule": "step", "milestones": [8, 9]}, partial(lr_scheduler.MultiStepLR, milestones=[32, 36], gamma=0.1)),
    ],
    ids=lambda value: value["schedule"] if isinstance(value, dict) else "torch",
)
def test_schedules_equal_torch(settings: dict[str, Any], theirs: Callable[..., lr_scheduler.LRScheduler]) -> None:
    assert rates(**settings) == pytest.approx(rates_of(theirs(torch.optim.SGD([torch.zeros(1)], lr=1.0)), 41))


@pytest.mark.parametrize("schedule", ["cosine", "linear", "polynomial", "step"])
def test_schedules_warm_up_linearly(schedule: str) -> None:
    found = rates(warmup_epochs=1, schedule=schedule, milestones=[9.0] if schedule == "step" else [])
    assert found[:5] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])
    assert max(found) == pytest.approx(1.0)


@pytest.mark.parametrize("warmup_epochs", [5.0, 6.0, 25.0])
@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_build_schedule_warms_up_over_half_of_the_steps_at_most(schedule: str, warmup_epochs: float) -> None:
    found = rates(warmup_epochs=warmup_epochs, schedule=schedule)
    assert found[:20] == pytest.approx([step / 20 for step in range(1, 21)])
    assert found[20] == 1.0
    assert all(after < before for before, after in pairwise(found[20:]))
    assert found[30] == pytest.approx(0.5)


@pytest.mark.parametrize(("share", "warm"), [(0.0, [1.0]), (0.1, [0.25, 0.5, 0.75, 1.0])])
def test_warmup_share_takes_the_place_of_warmup_epochs(share: float, warm: list[float]) -> None:
    found = rates(warmup_epochs=5, warmup_share=share)
    assert found[: len(warm)] == pytest.approx(warm)
    assert found[len(warm) - 1] == max(found)


class WithBackbone(nn.Module):
    """A head on a backbone."""

    def __init__(self, model: ViT | Swin | None = None) -> None:
        super().__init__()
        self.backbone = Features(tiny_vit() if model is None else model)
        self.backbone.pyramid = nn.Conv2d(4, 4, 1)
        self.decoder = nn.Linear(4, 4)


@pytest.mark.parametrize("build", [tiny_vit, tiny_swin])
def test_layers_of_a_backbone_are_as_far_below_the_head_as_those_of_a_classifier(build: Callable[[], Any]) -> None:
    alone, below = levels(build()), levels(WithBackbone(build()))
    backbone = {name for name in below if name.startswith("backbone.model.")}
    assert backbone
    assert {name: below[name] for name in backbone} == {
        name: alone[name[len("backbone.model.") :]] for name in backbone
    }
    assert {level for name, level in below.items() if name not in backbone} == {0}


@pytest.mark.parametrize("layer_decay", [None, 0.5])
def test_backbone_lr_scales_the_backbone_only_and_keeps_layer_decay(layer_decay: float | None) -> None:
    model = WithBackbone()
    whole, slower = (rates_and_decays(model, layer_decay=layer_decay, backbone_lr=factor) for factor in (1.0, 0.1))
    backbone = {name for name in whole if name.startswith("backbone.model.")}
    assert (len({whole[name][0] for name in backbone}) > 2) == (layer_decay is not None)
    for name, (rate, _) in whole.items():
        assert slower[name][0] == pytest.approx(rate * (0.1 if name in backbone else 1.0))


@pytest.mark.parametrize(
    ("name", "kind", "given", "eps"),
    [
        ("adamw", torch.optim.AdamW, None, 1e-8),
        ("adam", torch.optim.Adam, 1e-5, 1e-5),
        ("lamb", Lamb, None, 1e-6),
    ],
)
def test_build_optimizer_by_name(name: Any, kind: type, given: float | None, eps: float) -> None:
    optimizer = build_optimizer(tiny_vit(), OptimConfig(optimizer=name, lr=1e-4, weight_decay=0.3, eps=given))
    assert type(optimizer) is kind
    assert {group["weight_decay"] for group in optimizer.param_groups} == {0.3, 0.0}
    assert {(group["lr"], group["eps"]) for group in optimizer.param_groups} == {(1e-4, eps)}


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
    config, head = small_run(epochs=3, ema_decay=0.8), HeadWeights()
    whole, curve = trained(config, tmp_path / "whole", callbacks=[head])
    average = head.after[0]
    for weight in head.after[1:]:
        average = 0.8 * average + 0.2 * weight
    torch.testing.assert_close(whole.model.head.weight.detach(), average)
    assert torch.equal(load(tmp_path / "whole")[2].model.head.weight, whole.model.head.weight)
    finished, _ = trained(config, tmp_path / "whole")
    assert torch.equal(finished.model.head.weight, whole.model.head.weight)
    with pytest.raises(Killed):
        trained(config, tmp_path / "stopped", on_epoch=die_in_epoch_2)
    resumed, again = trained(config, tmp_path / "stopped")
    assert same_weights(whole, resumed)
    assert [row["val_loss"] for row in again.rows] == [row["val_loss"] for row in curve.rows]


def test_accumulated_batches_equal_one_large_batch(tmp_path: Path) -> None:
    whole, curve = trained(small_run(batch_size=20), tmp_path / "whole")
    parts, accumulated = trained(small_run(batch_size=5, effective_batch=20), tmp_path / "parts")
    torch.testing.assert_close(parts.state_dict(), whole.state_dict(), rtol=1e-4, atol=1e-5)
    assert [row["train_loss"] for row in accumulated.rows] == pytest.approx([row["train_loss"] for row in curve.rows])


@pytest.mark.parametrize(("examples", "batch_size"), [(76, 5), (70, 10)])
def test_last_step_of_an_epoch_is_the_mean_over_its_examples(tmp_path: Path, examples: int, batch_size: int) -> None:
    weights = []
    for batch in (20, batch_size):  # the last step has fewer batches, or a smaller one
        config = small_run(train_size=examples, batch_size=batch, effective_batch=20, clip=0.0, encoding="liere:8")
        weights.append(trained(config, tmp_path / str(batch))[0].state_dict())
    torch.testing.assert_close(weights[1], weights[0], rtol=1e-4, atol=1e-5)


def test_effective_batch_must_be_a_multiple_of_the_devices() -> None:
    config = small_run(batch_size=8, effective_batch=64)
    assert [accumulation_steps(config, devices) for devices in (1, 2, 4, 8)] == [8, 4, 2, 1]
    rule = r"^effective_batch must be a multiple of batch_size · devices = 8 · 3, got 64$"
    with pytest.raises(ValueError, match=rule):
        accumulation_steps(config, 3)
    assert accumulation_steps(small_run(batch_size=8), 3) == 1


@pytest.mark.parametrize("gpu", [False, True])
def test_recipe_for_gpus_names_what_is_less_slow_without_one(gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: gpu)
    config = small_run(batch_size=256, effective_batch=2048, precision="bf16", compile=True)
    options = "--run.compile false --run.precision float32 --data.batch_size 64 --optim.effective_batch 64"
    assert slow_without_gpu(config) == ("" if gpu else f"this machine has no GPU; less slow: {options}")
    assert slow_without_gpu(small_run()) == ""


def test_bf16_keeps_weights_in_float32(tmp_path: Path) -> None:
    dtypes: set[torch.dtype] = set()
    hook = torch.nn.modules.module.register_module_forward_hook(
        lambda module, _, out: dtypes.add(out.dtype) if isinstance(module, torch.nn.Linear) else None
    )
    try:
        module, curve = trained(small_run(epochs=1, precision="bf16"), tmp_path)
    finally:
        hook.remove()
    assert dtypes == {torch.bfloat16}
    assert {parameter.dtype for parameter in module.parameters()} == {torch.float32}
    assert math.isfinite(curve.rows[-1]["train_loss"])


def test_older_configurations_can_be_read() -> None:
    stored = {"encoding": "mixed", "seed": 0, "data": {"name": "digits"}, "model": {"dim": 16}}
    assert read_config({**stored, "optim": {"epochs": 3, "milestones": []}}) == RunConfig(
        encoding="mixed", data=data_config(), model=ModelConfig(dim=16), optim=OptimConfig(epochs=3)
    )


@pytest.mark.slow
def test_compiled_model_trains_to_the_same_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = small_run(epochs=1)
    plain, _ = trained(config, tmp_path / "plain")
    compile_module, compiled = torch.nn.Module.compile, []

    def without_code(module: torch.nn.Module) -> None:
        compiled.append(module)
        compile_module(module, backend="eager")  # the compiler's front end only, which is fast

    monkeypatch.setattr(torch.nn.Module, "compile", without_code)
    faster, _ = trained(changed(config, compile=True), tmp_path / "compiled")
    assert compiled == [faster.model]
    torch.testing.assert_close(load(tmp_path / "compiled")[2].state_dict(), plain.state_dict())


LAUNCH = ("-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d")
MODEL = ["--model.dim=16", "--model.depth=1", "--model.num_heads=1", "--model.mlp_dim=16", "--model.patch_size=[4]"]
TRAIN = ["train", "--data.train_size=80", "--data.val_size=50", "--encoding=mixed", *MODEL, "--optim.warmup_epochs=1"]
TRAIN += ["--optim.effective_batch=20", "--epochs=3", "--optim.train_sizes=4,8,12", "--trainer.accelerator=cpu"]
TRAIN += ["--trainer.enable_progress_bar=false", "--run.logs=[]"]


@pytest.mark.slow
def test_command_in_two_processes_equals_that_in_one_at_mixed_sizes(tmp_path: Path) -> None:
    out = {name: tmp_path / name for name in ("alone", "together")}
    launcher = (*LAUNCH, f"--rdzv-endpoint=127.0.0.1:{free_port()}")
    runs = [
        lab_process(*TRAIN, "--data.batch_size=20", f"--out={out['alone']}"),
        lab_process(*TRAIN, "--data.batch_size=5", f"--out={out['together']}", launcher=launcher),
    ]
    printed = [run.communicate(timeout=120)[0] for run in runs]
    assert [run.returncode for run in runs] == [0, 0], printed
    assert [text.count("trained:") for text in printed] == [1, 1]  # printed by rank 0 only
    alone, curve = (list(csv.DictReader((folder / "curve.csv").read_text().splitlines())) for folder in out.values())
    for one, two in zip(alone, curve, strict=True):
        for name in ("train_loss", "val_loss", "val_top1"):
            assert float(one[name]) == pytest.approx(float(two[name]), rel=1e-4), (one, two)
    weights, theirs = (load(folder)[2].state_dict() for folder in out.values())
    torch.testing.assert_close(theirs, weights, rtol=1e-3, atol=1e-5)
