"""Weight decay leaves position encodings as they are, in every trainer."""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import rotating
import swapped
import torch
import transformers
from timm.optim import param_groups_weight_decay
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.utils.data import DataLoader

import torchrope as tr

DOCS = Path(__file__).parents[2] / "docs"
vit = partial(tr.ViT, (8, 8), patch_size=4, dim=32, depth=2, num_heads=2)
swin = partial(tr.Swin, (32, 32), patch_size=4, window_size=4, dim=32, depths=(1, 1), num_heads=(2, 2))


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        shared = tr.LieRE(num_axes=2, num_heads=2, head_dim=8)
        self.layers = nn.ModuleDict({"a": nn.Sequential(shared, nn.Linear(4, 4)), "b": shared})
        self.periodic = tr.encodings.Periodic(tr.MixedRoPE(num_axes=1, num_heads=2, head_dim=8), (24.0,))
        self.frozen = nn.Linear(4, 4).requires_grad_(False)


def towers_vit() -> nn.Module:
    """A swapped model of transformers with a position table."""
    return tr.swap(transformers.ViTModel(transformers.ViTConfig(**rotating.IMAGES)), "mixed", init="paper")


# Builds a model; its parameters of two dimensions and more that are exempt.
CASES: dict[str, tuple[Any, str]] = {
    "vit": (partial(vit, encoding="learned+bias+liere:8"), r"prefix_tokens|absolute.table|(biases|encodings).*"),
    "swin": (partial(swin, encoding="fire+mixed"), r".*\.(biases|encodings)\..*"),
    "features": (lambda: tr.Features(vit(encoding="comrope-ld:4")), r"model\.(prefix_tokens|encodings.*)"),
    "transformer": (partial(tr.Transformer, 3, num_axes=2, dim=32, depth=2, num_heads=2), "prefix_tokens|encodings.*"),
    "timm": (lambda: tr.swap(swapped.made("rope_axial"), "mixed"), "cls_token|pos_embed|rotary.encodings.*"),
    "timm's swin": (lambda: tr.swap(swapped.made("swin"), "liere:8"), ".*bias_table|rotary.encodings.*"),
    "nested": (lambda: nn.Sequential(tr.swap(swapped.made("dinov3"), "mixed")), r"0\.(.*_token|rotary.encodings.*)"),
    "llama": (lambda: tr.swap(rotating.decoder("llama"), "mixed"), "model.rotary.encodings.*"),
    "transformers": (towers_vit, "embeddings.position_embeddings|rotary.encodings.*"),
    "compiled": (lambda: torch.compile(vit(encoding="mixed")), r"_orig_mod\.(prefix_tokens|encodings.*)"),
    "containers, a shared encoding": (Own, r"(layers\.a\.0|periodic\.encoding)\..*"),
}


@pytest.mark.parametrize("name", CASES)
def test_decay_shrinks_matrices_that_are_no_encodings(name: str) -> None:
    build, exempt = CASES[name]
    model = build()
    matrices = {key for key, p in model.named_parameters() if p.ndim > 1 and p.numel() and p.requires_grad}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
            parameter.grad = torch.zeros_like(parameter)
    torch.optim.AdamW(tr.parameter_groups(model, 0.5), lr=0.1).step()
    shrunk = {key for key, parameter in model.named_parameters() if parameter.numel() and (parameter < 1).all()}
    assert shrunk == {key for key in matrices if not re.fullmatch(exempt, key)}
    assert matrices - shrunk


@pytest.mark.parametrize("name", ["vit", "swin", "transformer", "timm", "timm's swin"])
def test_groups_are_those_of_timm(name: str) -> None:
    model = CASES[name][0]()
    theirs = param_groups_weight_decay(model, 0.1, no_weight_decay_list=model.no_weight_decay())
    for mine, other in zip(tr.parameter_groups(model, 0.1), theirs, strict=True):
        assert mine["weight_decay"] == other["weight_decay"]
        assert list(map(id, mine["params"])) == list(map(id, other["params"]))


def test_trainer_of_transformers_as_documented(tmp_path: Path) -> None:
    page, names = (DOCS / "use-it-in-your-model.md").read_text(), dict[str, Any]()
    [code] = re.findall(r"```python\n(import transformers\n.*?)```", page, re.DOTALL)
    exec(code, names)
    model = tr.swap(rotating.decoder("llama"), "mixed")
    settings: dict[str, Any] = dict(weight_decay=0.1, report_to=[], use_cpu=True, max_steps=2, save_strategy="no")
    words = {"input_ids": torch.arange(1, 8), "labels": torch.arange(1, 8)}
    arguments = transformers.TrainingArguments(output_dir=str(tmp_path), **settings)
    trainer = names["Trainer"](model=model, args=arguments, train_dataset=[words] * 2)
    trainer.train()
    decays = {p: group["weight_decay"] for group in trainer.optimizer.param_groups for p in group["params"]}
    for key, parameter in model.named_parameters():
        assert decays[parameter] == (0.0 if "norm" in key or "rotary" in key else 0.1), key


def fit_by_lightning(model: nn.Module, loader: DataLoader) -> None:
    lightning: Any = pytest.importorskip("pytorch_lightning")

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, images: Tensor) -> Tensor:
            return 0 * self.model(images).sum()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(tr.parameter_groups(self, 0.1))

    shown = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    lightning.Trainer(accelerator="cpu", max_steps=1, **shown).fit(Module(), loader)


def fit_by_accelerate(model: nn.Module, loader: DataLoader) -> None:
    accelerator = pytest.importorskip("accelerate").Accelerator(cpu=True)
    optimizer = torch.optim.AdamW(tr.parameter_groups(model, 0.1))
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for images in loader:
        accelerator.backward(0 * model(images).sum())
        optimizer.step()


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.parametrize("fit", [fit_by_lightning, fit_by_accelerate])
def test_other_trainers_as_documented(fit: Callable[[nn.Module, DataLoader], None]) -> None:
    model = tr.swap(swapped.made("vit"), "mixed")
    before = {key: parameter.detach().clone() for key, parameter in model.named_parameters()}
    fit(model, DataLoader(swapped.images(model)))
    shrunk = {key for key, parameter in model.named_parameters() if not torch.equal(parameter, before[key])}
    assert shrunk == {key for key in before if key.endswith("weight") and "norm" not in key}


@pytest.mark.parametrize("value", [-0.1, float("nan"), float("inf")])
def test_wrong_decay_is_one_line(value: float) -> None:
    with pytest.raises(ValueError, match=f"^weight_decay must be 0 or more and finite, got {value}$"):
        tr.parameter_groups(nn.Linear(2, 2), value)


@pytest.mark.filterwarnings("ignore")
def test_parameters_that_fsdp1_flattened_are_refused(tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        with pytest.raises(ValueError, match=r"^parameter_groups needs .*: use FSDP2's fully_shard, got FSDP1$"):
            tr.parameter_groups(FullyShardedDataParallel(nn.Linear(2, 2), device_id=torch.device("cpu")), 0.1)
    finally:
        torch.distributed.destroy_process_group()
