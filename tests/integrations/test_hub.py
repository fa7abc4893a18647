"""Models in folders by huggingface_hub's mixin: what comes back, what is refused. Nothing reaches a network."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from swapped import awake, images, made

import torchrope as tr
from torchrope.checkpoints.convert import load_backbone
from torchrope.integrations.hub import Hub

SMALL: dict[str, Any] = dict(patch_size=4, num_outputs=5, dim=32, depth=2, num_heads=2)


def vit(encoding: Any = "learned+liere:4") -> tr.ViT:
    return tr.ViT((16, 16), **SMALL, encoding=encoding).eval()


def swin() -> tr.Swin:
    return tr.Swin((32, 32), dim=16, depths=(2, 2), num_heads=(1, 2), window_size=4, encoding="bias+mixed").eval()


def features(**settings: Any) -> tr.Features:
    settings = {"pyramid": True, "out_channels": 8, "window_size": 2, "global_layers": (2,), **settings}
    return tr.Features(tr.ViT((16, 16), **SMALL, encoding="mixed", pool="mean"), **settings).eval()


def outputs(model: Any, x: torch.Tensor) -> list[torch.Tensor]:
    came = model(x)
    return came if isinstance(came, list) else [came]


@pytest.mark.parametrize("build", [vit, swin, features, lambda: tr.Features(swin())])
def test_model_comes_back_from_its_folder(build: Any, tmp_path: Path) -> None:
    model = build().eval()
    model.save_pretrained(tmp_path / "model")
    again = type(model).from_pretrained(tmp_path / "model")
    assert type(again) is type(model)
    assert not again.training
    x = torch.randn(2, 3, 32, 32)
    pairs = zip(outputs(model, x), outputs(again, x), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    assert {file.name for file in (tmp_path / "model").iterdir()} == {
        "README.md",
        "config.json",
        "torchrope.safetensors",
    }


def test_features_keep_where_pretraining_put_the_patches(tmp_path: Path) -> None:
    backbone = features()
    load_backbone(backbone, tr.ViT((32, 32), **SMALL, encoding="mixed", pool="mean", positions=tr.Lattice(0.25)))
    backbone.save_pretrained(tmp_path)
    again = tr.Features.from_pretrained(tmp_path)
    assert again.model.position_map.spacing == pytest.approx((0.25, 0.25))
    x = torch.randn(1, 3, 16, 24)
    assert all(torch.equal(one, other) for one, other in zip(again(x), backbone(x), strict=True))


def test_hub_accepts_every_model_that_save_accepts(tmp_path: Path) -> None:
    model = awake(tr.swap(made("vit"), "mixed")).eval()
    Hub(model).save_pretrained(tmp_path)
    x = images(model)
    other = made("vit").eval()
    assert Hub.from_pretrained(tmp_path, into=other) is other
    assert torch.equal(other(x), model(x))


def test_card_says_how_the_model_is_loaded(tmp_path: Path) -> None:
    Hub(tr.swap(made("vit"), "mixed")).save_pretrained(tmp_path / "swapped")
    assert 'tr.load("torchrope.safetensors", into=model)' in (tmp_path / "swapped/README.md").read_text()
    vit().save_pretrained(tmp_path / "own")
    assert 'tr.ViT.from_pretrained("...")' in (tmp_path / "own/README.md").read_text()


def test_upload_and_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is uploaded is what `from_pretrained` fetches by name."""
    repository = tmp_path / "repository"

    class Api:
        def __init__(self, token: str | None = None) -> None:
            pass

        def create_repo(self, repo_id: str, **settings: Any) -> Any:
            return type("Url", (), {"repo_id": repo_id})

        def upload_folder(self, *, repo_id: str, folder_path: Path, **settings: Any) -> str:
            repository.mkdir()
            for file in Path(folder_path).iterdir():
                (repository / file.name).write_bytes(file.read_bytes())
            return f"hub/{repo_id}"

    def fetched(repo_id: str, filename: str, **settings: Any) -> str:
        assert repo_id == "name/model"
        return str(repository / filename)

    monkeypatch.setattr(huggingface_hub.hub_mixin, "HfApi", Api)
    monkeypatch.setattr(huggingface_hub.hub_mixin, "hf_hub_download", fetched)
    monkeypatch.setattr("torchrope.integrations.hub.hf_hub_download", fetched)
    model = vit()
    assert model.push_to_hub("name/model") == "hub/name/model"
    x = torch.randn(1, 3, 16, 16)
    assert torch.equal(tr.ViT.from_pretrained("name/model")(x), model(x))


def test_another_class_is_refused(tmp_path: Path) -> None:
    vit().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="must hold a Swin, got a ViT"):
        tr.Swin.from_pretrained(tmp_path)


def test_failed_save_leaves_no_weights(tmp_path: Path) -> None:
    model = vit()
    model.norm.eps = 1.0
    with pytest.raises(ValueError, match="not modified since it was built, got norm: LayerNorm"):
        model.save_pretrained(tmp_path)
    assert not list(tmp_path.glob("*.safetensors"))


@pytest.mark.parametrize("config", [{"model": "os.system"}, {"kind": 3, "into": "x"}, {"architecture": ["deep"] * 99}])
def test_configuration_that_was_tampered_with_has_no_say(config: dict, tmp_path: Path) -> None:
    model = vit()
    model.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    x = torch.randn(1, 3, 16, 16)
    if "model" in config:
        with pytest.raises(ValueError, match=r"must be into or classes, got model"):
            tr.ViT.from_pretrained(tmp_path)
    else:
        assert torch.equal(tr.ViT.from_pretrained(tmp_path)(x), model(x))


def test_missing_huggingface_hub_raises_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torchrope.integrations.hub")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ImportError, match=r"requires huggingface_hub: pip install huggingface_hub safetensors$"):
        vit().save_pretrained(tmp_path)
    with pytest.raises(ImportError, match="requires huggingface_hub"):
        tr.Swin.from_pretrained(tmp_path)


@pytest.mark.slow
def test_library_does_not_import_it() -> None:
    code = "import sys, torchrope; torchrope.ViT, torchrope.Features; print('huggingface_hub' in sys.modules)"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "False"
