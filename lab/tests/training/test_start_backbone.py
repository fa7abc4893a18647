"""Initialising backbones from runs."""

from pathlib import Path

import pytest
import torch

import torchrope as tr
from torchrope.models import Features
from torchrope_lab.data.build import make_data
from torchrope_lab.data.config import data_config
from torchrope_lab.training.config import ModelConfig, OptimConfig, RunConfig
from torchrope_lab.training.pretrained import load_pretrained_backbone
from torchrope_lab.training.run import load, train


def test_start_backbone_loads_a_classification_run(tmp_path: Path) -> None:
    data = data_config("digits", size=16, train_size=40, val_size=20, batch_size=20)
    model = ModelConfig(patch_size=[4], dim=16, depth=2, num_heads=2, jitter=0.3)
    config = RunConfig(encoding="learned+liere:8", data=data, model=model, optim=OptimConfig(epochs=1))
    digits = make_data(data)
    digits.setup()
    train(config, digits, tmp_path / "run")
    trained = load(tmp_path / "run")[2].model.cpu().eval()
    backbone = Features(
        tr.ViT((16, 16), patch_size=4, in_channels=1, dim=16, depth=2, num_heads=2, encoding="learned+liere:8"),
        indices=(1, 2),
    ).eval()
    load_pretrained_backbone(backbone, tmp_path / "run")
    for side in (16, 28):
        x = torch.randn(2, 1, side, side)
        for map, theirs in zip(backbone(x), trained.feature_maps(x, [1, 2], norm=False), strict=True):
            assert torch.allclose(map, theirs, atol=1e-5)


@pytest.mark.parametrize(
    ("path", "error", "message"),
    [
        ("", ValueError, "the folder of a run, which holds config.yaml, got"),
        ("none.pth", FileNotFoundError, "none.pth"),
    ],
)
def test_start_backbone_rejects_invalid_sources(
    path: str, error: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        load_pretrained_backbone(
            Features(tr.ViT((64, 64), patch_size=8, dim=32, depth=1, num_heads=2)), tmp_path / path
        )
