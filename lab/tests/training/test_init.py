"""Starting a run from a run, a published checkpoint, or a model of timm or transformers."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from small_runs import small_run, trained
from torch import Tensor, nn
from transformers import CLIPVisionConfig, CLIPVisionModel, Dinov2Config, Dinov2Model, ViTConfig, ViTModel

import torchrope as tr
from torchrope.models import Features
from torchrope_lab.cli import main
from torchrope_lab.data.build import make_data
from torchrope_lab.data.data_config import data_config
from torchrope_lab.settings.run_config import ModelConfig, RunConfig
from torchrope_lab.training.initial import initialise
from torchrope_lab.training.models import build_model
from torchrope_lab.training.run import load

SIZES = dict(dim=32, depth=2, num_heads=2, mlp_dim=64)
HF: dict[str, Any] = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=32, patch_size=8)
SETTINGS: dict[str, dict[str, Any]] = {
    "vit": {"norm_eps": 1e-12},
    "dinov2": {"layer_scale": 1.0, "mlp_dim": 128},
    "clip": {"embedding_norm": True, "activation": "quick_gelu", "norm_eps": 1e-5},
}


def model_of_transformers(name: str) -> nn.Module:
    match name:
        case "vit":
            return ViTModel(ViTConfig(**HF, intermediate_size=64), add_pooling_layer=False)
        case "dinov2":
            return Dinov2Model(Dinov2Config(**HF))
    return CLIPVisionModel(CLIPVisionConfig(**HF, intermediate_size=64))


def randomise(model: nn.Module) -> Any:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model.eval()


def small(encoding: str, size: int = 32, **settings: Any) -> Any:
    """A model of the laboratory for coloured images of a size, with settings changed."""
    data = make_data(data_config("cifar10", size=size, root="none"))
    return build_model(encoding, ModelConfig(**{**SIZES, "patch_size": [8], **settings}), data)


def saved(folder: Path) -> tuple[tr.ViT, str]:
    """A model of the library, and its file."""
    model = randomise(tr.ViT((32, 32), patch_size=8, num_outputs=10, encoding="mixed", **SIZES))
    tr.save(model, folder / "mine.safetensors")
    return model, str(folder / "mine.safetensors")


def logits_without_head(model: Any, x: Tensor) -> Tensor:
    model.head = nn.Identity()
    with torch.no_grad():
        return model.eval()(x)


@pytest.mark.parametrize("encoding", ["learned", "learned+comrope-ld:8"])
@pytest.mark.parametrize("name", list(SETTINGS))
def test_model_of_transformers_starts_a_run_with_equal_features(name: str, encoding: str, tmp_path: Path) -> None:
    theirs = randomise(model_of_transformers(name))
    theirs.save_pretrained(tmp_path)
    mine = small(encoding, **SETTINGS[name])
    initialise(mine, f"hf:{tmp_path}")
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        output = theirs(x)
    expected = output.pooler_output if name == "clip" else output.last_hidden_state[:, 0]
    torch.testing.assert_close(logits_without_head(mine, x), expected, rtol=1e-4, atol=1e-5)


def test_model_of_timm_starts_a_run_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = dict(embed_dim=32, depth=2, num_heads=2, img_size=32, num_classes=10)
    theirs = randomise(timm.create_model("vit_base_patch16_clip_quickgelu_224", **sizes))
    asked: list[tuple[str, bool]] = []

    def create(name: str, pretrained: bool) -> nn.Module:
        asked.append((name, pretrained))
        return theirs

    monkeypatch.setattr(timm, "create_model", create)
    x = torch.randn(2, 3, 32, 32)
    mine = small("learned+comrope-ap:8", mlp_dim=128, patch_size=[16], **SETTINGS["clip"])
    initialise(mine, "timm:vit_base_patch16_clip_quickgelu_224.openai")
    assert asked == [("vit_base_patch16_clip_quickgelu_224.openai", True)]
    with torch.no_grad():
        torch.testing.assert_close(mine.eval()(x), theirs(x), rtol=1e-4, atol=1e-5)


def test_published_file_starts_a_run_at_another_size(tmp_path: Path) -> None:
    theirs = randomise(timm.create_model("vit_tiny_patch16_224", embed_dim=64, depth=2, num_heads=1, img_size=64))
    torch.save({"model": theirs.state_dict()}, tmp_path / "deit.pth")
    mine = small("learned", 96, dim=64, num_heads=1, mlp_dim=256, patch_size=[16])
    initialise(mine, str(tmp_path / "deit.pth"))
    loaded = tr.load_published(tmp_path / "deit.pth")
    x = torch.randn(2, 3, 96, 96)
    torch.testing.assert_close(logits_without_head(mine, x), logits_without_head(loaded, x), rtol=1e-4, atol=1e-5)


def test_saved_model_starts_a_run(tmp_path: Path) -> None:
    theirs, file = saved(tmp_path)
    mine = small("mixed")
    initialise(mine, file)
    x = torch.randn(2, 3, 32, 32)
    assert torch.equal(mine.eval()(x), theirs(x))


@pytest.mark.parametrize(
    ("changes", "encoding", "message"),
    [
        ({"num_heads": 4}, "mixed", r"num_heads 2 instead of 4$"),
        ({"dim": 64, "pool": "mean"}, "mixed", r"dim 32 instead of 64, pool cls instead of mean$"),
        ({"norm_eps": 1e-5}, "mixed", r"norm_eps 1e-06 instead of 1e-05$"),
        ({"spacing": [0.5]}, "mixed", r"positions must be those of .* which has model\.spacing .* got "),
        ({}, "learned+mixed", r"^init must be the same model .*, got absolute\.table None instead of"),
    ],
)
def test_init_with_other_settings_names_them(
    changes: dict[str, Any], encoding: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        initialise(small(encoding, **changes), saved(tmp_path)[1])
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        (".", ValueError, r"^a folder must contain torchrope\.safetensors, or config\.yaml and weights\.safetensors"),
        ("none.pth", FileNotFoundError, r"none\.pth"),
        ("clip", ValueError, r"; a folder of transformers is hf:"),
        ("timm:no_such_model", ValueError, r"^timm:no_such_model cannot be loaded: "),
        ("hf:empty", ValueError, r"^hf:\S*empty cannot be loaded: "),
    ],
)
def test_init_from_nothing_raises_one_line(source: str, error: type[Exception], message: str, tmp_path: Path) -> None:
    model_of_transformers("clip").save_pretrained(tmp_path / "clip")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").write_text("{}")
    hub, colon, name = source.rpartition(":")
    with pytest.raises(error, match=message):
        initialise(small("learned"), source if hub == "timm" else f"{hub}{colon}{tmp_path / name}")


def test_train_command_starts_from_clip_with_zero_generators(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    grey = CLIPVisionConfig(**{**HF, "image_size": 16, "num_channels": 1}, intermediate_size=64)
    randomise(CLIPVisionModel(grey)).save_pretrained(tmp_path / "clip")
    options = ["--data.size=16", "--data.train_size=40", "--data.val_size=20", "--data.batch_size=20", "--epochs=1"]
    options += ["--model.pool=cls", *(f"--model.{name}={value}" for name, value in SIZES.items())]
    clip = ["--model.embedding_norm=true", "--model.activation=quick_gelu", "--model.norm_eps=1e-5"]
    command = ["train", *options, "--model.patch_size=8", "--encoding=learned+comrope-ld:8"]
    command += [f"--init=hf:{tmp_path / 'clip'}", "--trainer.enable_progress_bar=false"]
    assert main([*command, *clip, "--optim.lr=1e-9", "--out", str(tmp_path / "run")]) == 0
    encodings = load(tmp_path / "run")[2].model.encodings
    assert max(encoding.generators().abs().max() for encoding in encodings) < 1e-6
    assert main([*command, "--out", str(tmp_path / "other")]) == 2
    rule = "torchrope train: the model must have the settings of hf:"
    assert capsys.readouterr().err.splitlines()[-1].startswith(rule)


def test_backbone_starts_from_a_classification_run(tmp_path: Path) -> None:
    config = small_run(encoding="learned+liere:8", size=16, depth=2, pool="cls", jitter=0.3, epochs=1)
    trained(config, tmp_path / "run")
    classifier = load(tmp_path / "run")[2].model.cpu().eval()
    settings: dict[str, Any] = dict(patch_size=4, in_channels=1, dim=16, depth=2, num_heads=2, mlp_dim=16)
    head = nn.Module()
    head.backbone = Features(tr.ViT((16, 16), encoding="learned+liere:8", **settings), indices=(1, 2)).eval()
    initialise(head, str(tmp_path / "run"))
    for side in (16, 28):
        x = torch.randn(2, 1, side, side)
        for map, theirs in zip(head.backbone(x), classifier.feature_maps(x, [1, 2], norm=False), strict=True):
            assert torch.allclose(map, theirs, atol=1e-5)


def test_init_of_a_configuration_is_absolute_unless_it_is_a_name() -> None:
    config = RunConfig(init="runs/vit")
    assert config.init == str(Path("runs/vit").absolute())
    assert replace(config, init="timm:vit_tiny").init == "timm:vit_tiny"
    assert replace(config, init="hf:org/name").init == "hf:org/name"
