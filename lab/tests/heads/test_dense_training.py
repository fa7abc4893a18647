"""Training of models for segmentation and detection: resuming, precision, backbones, several processes."""

import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import small_runs
import torch
from miniatures import MINIATURES, coco, images
from processes import become_one_of_two, free_port
from small_runs import AtBatch, Killed, changed, same_weights, trained, without_times

from torchrope_lab.cli import main
from torchrope_lab.data.data_config import DataConfig, data_config
from torchrope_lab.settings.run_config import ModelConfig, RunConfig
from torchrope_lab.training.run import load

QUERIES = {"mask2former": 10, "dino": 30}


def data_for(head: str) -> DataConfig:
    """Settings of a miniature, which is written once for all tests and their processes."""
    name = "coco" if head == "dino" else "segments"
    root = Path(os.environ["TORCH_HOME"], "miniatures", name)
    if not root.exists():
        MINIATURES[name](root)
    return data_config(name, root=str(root), size=64, train_size=4, batch_size=2)


def small_run(head: str, **settings: Any) -> RunConfig:
    sizes: dict[str, Any] = dict(dim=16, depth=4, num_heads=2, mlp_dim=16, patch_size=[16])
    sizes |= dict(head_channels={"dino": 64, "mask2former": 32}.get(head, 8), num_queries=QUERIES.get(head))
    model = ModelConfig(head=head, **sizes)  # type: ignore[arg-type]
    return small_runs.small_run(encoding="learned+liere:4", data=data_for(head), model=model, **settings)


@pytest.mark.slow
@pytest.mark.parametrize("head", ["dino", "upernet"])
def test_killed_run_resumes_to_the_same_weights(tmp_path: Path, head: str) -> None:
    config = small_run(head, checkpoint_every=1, ema_decay=0.5)
    whole, curve = trained(config, tmp_path / "whole")
    with pytest.raises(Killed):
        trained(config, tmp_path / "killed", callbacks=[AtBatch(4)])
    resumed, again = trained(config, tmp_path / "killed")
    assert same_weights(whole, resumed)
    assert without_times(curve) == without_times(again)
    assert same_weights(load(tmp_path / "killed")[2], whole)


@pytest.mark.slow
@pytest.mark.parametrize("head", ["upernet", "mask2former", "dino"])
def test_heads_train_in_bf16_with_accumulation(tmp_path: Path, head: str) -> None:
    optim = {"epochs": 1, "effective_batch": 4, "layer_decay": 0.8, "schedule": "polynomial"}
    module, history = trained(small_run(head, precision="bf16", **optim), tmp_path)
    (row,) = history.rows
    assert list(row) == ["epoch", "train_loss", *module.curve, "seconds"]
    assert all(math.isfinite(value) for value in row.values())
    assert 0 <= row[module.curve[-1]] <= 1


@pytest.mark.slow
def test_pretrained_backbone_keeps_its_positions_when_loaded(tmp_path: Path) -> None:
    below = changed(small_run("upernet"), encoding="liere:4")  # whose positions depend on the training size
    pictures = data_config(name="images", root=str(images(tmp_path / "images")), size=32)
    above = changed(below, data=pictures, head="classify", head_channels=None)
    whole, _ = trained(above, tmp_path / "whole")
    frozen = dict(epochs=1, lr=1e-3, backbone_lr=0.0, weight_decay=0.0)
    tuned, _ = trained(changed(below, init=str(tmp_path / "whole"), **frozen), tmp_path / "below")
    image = torch.randn(1, 3, 32, 32)
    with torch.no_grad():
        expected = whole.model.eval().feature_maps(image, [4], norm=False)[0]
        for module in (tuned, load(tmp_path / "below")[2]):
            torch.testing.assert_close(module.model.backbone.eval()(image)[-1], expected)


def test_head_that_does_not_fit_the_data_raises_one_line(tmp_path: Path) -> None:
    config = small_run("upernet")
    with pytest.raises(ValueError, match=r"^digits is for model\.head classify, got 'upernet'$"):
        trained(changed(config, data=data_config("digits")), tmp_path)
    rule = r"^segments is for model\.head upernet, mask2former, got 'classify'$"
    with pytest.raises(ValueError, match=rule):
        trained(changed(config, head="classify", head_channels=None), tmp_path)


def test_missing_pycocotools_is_named_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "pycocotools", None)
    root = str(coco(tmp_path / "coco"))
    small = ["--model.size", "tiny", "--model.head_channels", "64", "--data.workers", "0"]
    assert main(["train", "--data", "coco", "--data.root", root, *small, "--out", str(tmp_path / "run")]) == 2
    assert "pycocotools is not installed" in capsys.readouterr().err


def two(rank: int, folder: Path, port: int) -> None:
    """Run one of two processes with the environment that torchrun sets."""
    become_one_of_two(rank, port)
    for head in ("upernet", "dino"):
        found, _ = trained(small_run(head, epochs=1), folder / head, accelerator="cpu")
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
