"""Training of models for segmentation and detection: resuming, precision, backbones, several processes."""

import json
import math
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from miniatures import MINIATURES, coco, images
from processes import become_one_of_two, data_of, free_port
from pytorch_lightning.callbacks import Callback

from torchrope_lab.cli import main
from torchrope_lab.data.data_config import DataConfig, data_config
from torchrope_lab.settings.run_config import ExecutionConfig, ModelConfig, OptimConfig, RunConfig
from torchrope_lab.training.module import Module
from torchrope_lab.training.run import load, train

HEADS = ["upernet", "mask2former", "dino"]
QUERIES = {"mask2former": 10, "dino": 30}


def data_for(head: str) -> DataConfig:
    """Settings of a miniature, which is written once for all tests and their processes."""
    name = "coco" if head == "dino" else "segments"
    root = Path(os.environ["TORCH_HOME"], "miniatures", name)
    if not root.exists():
        MINIATURES[name](root)
    return data_config(name, root=str(root), size=64, train_size=4, batch_size=2)


def small_run(head: str, **settings: Any) -> RunConfig:
    channels = {"dino": 64, "mask2former": 32}.get(head, 8)
    model = dict(head=head, head_channels=channels, num_queries=QUERIES.get(head), dim=16, depth=4, num_heads=2)
    return RunConfig(
        encoding="learned+liere:4",
        data=data_for(head),
        model=ModelConfig(**{**model, "mlp_dim": 16, "patch_size": [16], **settings.pop("model", {})}),
        optim=OptimConfig(**{"epochs": 2, "warmup_epochs": 1.0, **settings.pop("optim", {})}),
        **settings,
    )


class Dies(Callback):
    """Simulate a killed process before a batch."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self.step:
            raise MemoryError


def without_times(rows: list[dict[str, float]]) -> list[dict[str, float]]:
    return [{name: value for name, value in row.items() if name != "seconds"} for row in rows]


def same_weights(one: Module, other: Module) -> bool:
    mine, theirs = one.state_dict(), other.state_dict()
    return mine.keys() == theirs.keys() and all(torch.equal(value, theirs[name]) for name, value in mine.items())


@pytest.mark.slow
@pytest.mark.parametrize("head", ["dino", pytest.param("upernet", marks=pytest.mark.slow)])
def test_killed_run_resumes_to_the_same_weights(tmp_path: Path, head: str) -> None:
    config = small_run(head, run=ExecutionConfig(checkpoint_every=1), optim={"ema_decay": 0.5})
    whole, curve = train(config, data_of(config), tmp_path / "whole")
    with pytest.raises(MemoryError):
        train(config, data_of(config), tmp_path / "killed", callbacks=[Dies(3)])
    resumed, resumed_curve = train(config, data_of(config), tmp_path / "killed")
    assert same_weights(whole, resumed)
    assert without_times(curve.rows) == without_times(resumed_curve.rows)
    assert same_weights(load(tmp_path / "killed")[2], whole)


@pytest.mark.slow
@pytest.mark.parametrize(
    "head", [pytest.param(head, marks=pytest.mark.slow if head in QUERIES else ()) for head in HEADS]
)
def test_heads_train_in_bf16_with_accumulation(tmp_path: Path, head: str) -> None:
    optim = {"epochs": 1, "effective_batch": 4, "layer_decay": 0.8, "schedule": "polynomial"}
    config = small_run(head, optim=optim, run=ExecutionConfig(precision="bf16"))
    module, history = train(config, data_of(config), tmp_path)
    (row,) = history.rows
    assert list(row) == ["epoch", "train_loss", *module.curve, "seconds"]
    assert all(math.isfinite(value) for value in row.values())
    assert 0 <= row[module.curve[-1]] <= 1


@pytest.mark.slow
def test_pretrained_backbone_keeps_its_positions_when_loaded(tmp_path: Path) -> None:
    below = replace(small_run("upernet"), encoding="liere:4")  # whose positions depend on the training size
    classes = replace(below.model, head="classify", head_channels=None)
    pictures = data_config(name="images", root=str(images(tmp_path / "images")), size=32)
    above = replace(below, data=pictures, model=classes)
    whole, _ = train(above, data_of(above), tmp_path / "whole")
    frozen = OptimConfig(epochs=1, lr=1e-3, backbone_lr=0.0, weight_decay=0.0)
    config = replace(below, optim=frozen, init=str(tmp_path / "whole"))
    trained, _ = train(config, data_of(config), tmp_path / "below")
    image = torch.randn(1, 3, 32, 32)
    with torch.no_grad():
        expected = whole.model.eval().feature_maps(image, [4], norm=False)[0]
        for module in (trained, load(tmp_path / "below")[2]):
            torch.testing.assert_close(module.model.backbone.eval()(image)[-1], expected)


def test_head_that_does_not_fit_the_data_raises_one_line(tmp_path: Path) -> None:
    config = small_run("upernet")
    digits = replace(config, data=data_config(name="digits"))
    with pytest.raises(ValueError, match=r"^digits is for model\.head classify, got 'upernet'$"):
        train(digits, data_of(digits), tmp_path)
    classes = replace(config, model=replace(config.model, head="classify", head_channels=None))
    rule = r"^segments is for model\.head upernet, mask2former, got 'classify'$"
    with pytest.raises(ValueError, match=rule):
        train(classes, data_of(classes), tmp_path)


def test_missing_pycocotools_is_named_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "pycocotools", None)
    root = str(coco(tmp_path / "coco"))
    small = ["--model.size", "tiny", "--model.head_channels", "64", "--data.workers", "0"]
    assert main(["train", "--data", "coco", "--data.root", root, *small, "--out", str(tmp_path / "run")]) == 2
    assert "pycocotools is not installed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        (dict(window_size=[2]), "window_size is a setting of backbone swin, or of vit with another head"),
        (dict(head="upernet", global_layers=[1]), "global_layers is for a vit with window_size, got"),
        (dict(head_channels=8), "head_channels is a setting of head upernet and mask2former and dino only, got 8"),
        (dict(head="upernet", head_channels=0), "head_channels must be 1 or more, got 0"),
        (dict(head="upernet", num_queries=3), "num_queries is a setting of head mask2former and dino only, got 3"),
        (dict(head="dino", head_dropout=0.1), "head_dropout is a setting of head upernet only, got 0.1"),
        (dict(head="yolo"), "head must be one of classify, upernet, mask2former, dino, got"),
    ],
)
def test_settings_of_another_head_raise(settings: dict[str, Any], rule: str) -> None:
    with pytest.raises(ValueError, match=f"^{rule}"):
        ModelConfig(**settings)


def two(rank: int, folder: Path, port: int) -> None:
    """Run one of two processes with the environment that torchrun sets."""
    become_one_of_two(rank, port)
    for head in ("upernet", "dino"):
        config = small_run(head, optim={"epochs": 1})
        found, _ = train(config, data_of(config), folder / head, accelerator="cpu")
        torch.save(found.state_dict(), folder / f"{head}-{rank}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def by_two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two")
    for head in ("upernet", "dino"):
        data_for(head)  # before both processes read it
    torch.multiprocessing.spawn(two, (folder, free_port()), nprocs=2)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("head", ["upernet", "dino"])
def test_processes_agree_on_model_and_metrics(by_two: Path, head: str, capsys: Any) -> None:
    weights = [torch.load(by_two / f"{head}-{rank}.pt") for rank in (0, 1)]
    learned = [name for name in weights[0] if "running_" not in name]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in learned)
    if head != "upernet":  # batch norms have other statistics in each process
        last = (by_two / head / "curve.csv").read_text().splitlines()
        curve = dict(zip(last[0].split(","), last[-1].split(","), strict=True))
        assert main(["evaluate", str(by_two / head), "--json"]) == 0
        measured = json.loads(capsys.readouterr().out)
        assert measured["ap"] == pytest.approx(float(curve["val_ap"]), abs=1e-5)
