"""A model in one file: what comes back, what is refused, and that nothing else runs."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from swapped import MODELS, ROTATING, awake, images, made, tower
from torch import nn
from transformers import ViTConfig, ViTModel

import torchrope as tr
from torchrope.encodings import ROTARY


@pytest.mark.parametrize("keep", [pytest.param(True, marks=pytest.mark.slow), False])
@pytest.mark.parametrize("name", [name for name in MODELS if name != "vit_parallel"])
def test_swapped_model_is_restored(name: str, keep: bool, tmp_path: Path) -> None:
    model = made(name).eval()
    x = images(model)
    expected = model(x)
    awake(tr.swap(model, "liere:4", keep_position_tables=keep, init=None if name in ROTATING else "paper"))
    tr.save(model, tmp_path / "model.safetensors")
    again: Any = tr.load(tmp_path / "model.safetensors")
    assert type(again) is type(model)
    assert not again.training
    assert torch.equal(again(x), model(x))
    assert tower(again).rotary.lattices == tower(model).rotary.lattices
    assert tower(again).rotary.channels == tower(model).rotary.channels
    assert torch.equal(tr.unswap(again)(x), expected)


def test_options_of_the_swap_are_saved(tmp_path: Path) -> None:
    encoding = tr.MixedRoPE(num_axes=2, num_heads=2, head_dim=16, rotary_dim=8, shared_heads=True)
    model = tr.swap(made("vit", drop_path_rate=0.2), encoding, init="paper", spacing=0.25, origin=(1.0, 2.0))
    model.set_input_size((32, 96))
    tr.save(model, tmp_path)
    again: Any = tr.load(tmp_path)
    x = torch.randn(2, 3, 32, 96)
    assert torch.equal(again(x), model.eval()(x))
    assert repr(again.rotary.encodings) == repr(model.rotary.encodings)
    assert again.blocks[1].drop_path1.drop_prob == pytest.approx(0.2)


def test_table_put_aside_at_another_size(tmp_path: Path) -> None:
    model = tr.swap(made("vit"), "mixed", keep_position_tables=False, init="paper").eval()
    model.set_input_size((32, 64))
    tr.save(model, tmp_path)
    x = torch.randn(1, 3, 32, 64)
    assert torch.equal(tr.load(tmp_path)(x), model(x))


def test_plain_and_feature_models(tmp_path: Path) -> None:
    small = dict(img_size=64, embed_dim=32, depth=3, num_heads=2)
    x = torch.randn(1, 3, 64, 64)
    for model in (
        made("vit"),
        timm.create_model("vit_tiny_patch16_224", features_only=True, out_indices=(0, 1), **small),
    ):
        tr.save(model, tmp_path)
        expected, came = model.eval()(x), tr.load(tmp_path)(x)
        pairs = zip(expected, came, strict=True)
        assert all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.parametrize(
    "model",
    [
        partial(tr.ViT, (16, 16), patch_size=4, dim=32, depth=2, num_heads=2, encoding="learned+liere:4", pool="mean"),
        partial(tr.ViT, (4, 8, 8), patch_size=(2, 4, 4), dim=32, depth=2, num_heads=2, encoding="string:8"),
        partial(
            tr.ViT,
            (16, 16),
            patch_size=4,
            dim=32,
            depth=2,
            num_heads=2,
            encoding="learned-jittered+comrope-liere:4",
            weight_init="truncated-normal",
            drop_path=0.1,
            drop_path_schedule="constant",
        ),
        partial(tr.Swin, (32, 32), dim=16, depths=(2, 2), num_heads=(1, 2), window_size=4, encoding="bias+mixed"),
    ],
)
def test_models_of_our_own_come_back(model: Any, tmp_path: Path) -> None:
    built = model(num_outputs=5).eval()
    tr.save(built, tmp_path)
    again = tr.load(tmp_path)
    x = torch.randn(2, 3, *built.arguments["input_size"])
    assert torch.equal(again(x), built(x))
    with pytest.raises(ValueError, match="settings that JSON can represent"):
        tr.save(model(encoding=tr.MixedRoPE), tmp_path / "other")


@pytest.mark.parametrize("encoding", ["sinusoidal+mixed", "lookhere", "none"])
def test_models_in_half_precision_come_back_with_encodings_without_parameters(encoding: str, tmp_path: Path) -> None:
    model = tr.ViT((8, 8), patch_size=2, in_channels=1, num_outputs=5, dim=48, depth=2, num_heads=2, encoding=encoding)
    model, x = model.bfloat16().eval(), torch.randn(2, 1, 8, 12, dtype=torch.bfloat16)
    tr.save(model, tmp_path)
    again = tr.load(tmp_path)
    assert torch.equal(again(x), model(x))
    assert {name: part.dtype for name, part in again.named_buffers()} == {n: b.dtype for n, b in model.named_buffers()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("build", [tr.freeze, lambda model, size: tr.freeze(tr.absorb(model), size)])
@pytest.mark.parametrize("name", ["axial", "comrope-ld:8", "string", "sinusoidal+mixed", "learned+comrope-ap:3"])
def test_frozen_models_come_back(build: Any, name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    settings = dict(in_channels=1, num_outputs=5, dim=48, depth=2, num_heads=2)
    model = tr.ViT((8, 8), patch_size=2, encoding=name, **settings).eval()
    frozen, x = build(model, (8, 12)).to(dtype), torch.randn(2, 1, 8, 12, dtype=dtype)
    tr.save(frozen, tmp_path)
    again = tr.load(tmp_path)
    assert torch.equal(again(x), frozen(x))
    other = build(tr.ViT((8, 8), patch_size=2, encoding=name, **settings), (8, 12)).to(dtype)
    assert torch.equal(tr.load(tmp_path, into=other)(x), frozen(x))
    with pytest.raises(ValueError, match=r"frozen for input size \(8, 12\), got \(8, 8\)"):
        again(x[..., :8])


def test_frozen_models_come_back_where_other_kernels_rotate(tmp_path: Path) -> None:
    x = torch.randn(2, 3, 32, 48)
    for name in ("comrope-ld:4", "liere:8", "bias+string"):
        model = tr.Swin((32, 32), num_outputs=5, dim=16, depths=(2, 2), num_heads=(1, 2), window_size=4, encoding=name)
        with tr.backend("reference"):
            frozen = tr.freeze(model, (32, 48))
            expected = frozen(x)
            tr.save(frozen, tmp_path)
        assert torch.allclose(model.eval()(x), expected, atol=1e-5)
        assert torch.allclose(tr.load(tmp_path)(x), expected, atol=1e-5)
        with tr.backend("reference"):
            assert torch.equal(tr.load(tmp_path)(x), expected)


@pytest.mark.parametrize("encoding", ["liere:4", "mixed", "axial", "comrope-ld:4"])
@pytest.mark.parametrize("name", ["vit", "vit_qk_norm", "swin"])
def test_frozen_swapped_models_come_back(name: str, encoding: str, tmp_path: Path) -> None:
    model = tr.swap(made(name), encoding, init="paper").eval()
    x = images(model)
    frozen = tr.freeze(model, x)
    tr.save(frozen, tmp_path)
    again = tr.load(tmp_path)
    assert torch.equal(again(x), frozen(x))
    assert torch.equal(tr.load(tmp_path, into=tr.freeze(tr.swap(made(name), encoding, init="paper"), x))(x), frozen(x))
    with pytest.raises(ValueError, match="its tensors must be those of its model"):
        tr.load(tmp_path, into=made(name))


def test_frozen_models_of_other_origins_come_back(tmp_path: Path) -> None:
    x = torch.randn(2, 3, 64, 64)
    config = ViTConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=64, patch_size=16)
    hugging: Any = ViTModel(config).bfloat16()
    composite = nn.Sequential(tr.swap(made("vit"), "mixed"), nn.Linear(made("vit").num_classes, 3))
    for model, given in ((tr.swap(hugging, "mixed"), x.bfloat16()), (composite, x)):
        frozen = tr.freeze(model, given)
        tr.save(frozen, tmp_path)
        again = tr.load(tmp_path, into=tr.freeze(model, given) if model is composite else None)
        expected, came = frozen(given), again(given)
        same = [torch.equal(one, other) for one, other in zip(expected, came, strict=True) if torch.is_tensor(one)]
        assert all(same)
        assert same or torch.equal(expected.last_hidden_state, came.last_hidden_state)


def test_absorbed_models_come_back(tmp_path: Path) -> None:
    settings = dict(in_channels=1, num_outputs=5, dim=48, depth=2, num_heads=2)
    for name in ("comrope-ld:8", "learned+string", "bias+comrope-ap:3"):
        model = tr.ViT((8, 8), patch_size=2, encoding=name, **settings).eval()
        absorbed, x = tr.absorb(model), torch.randn(2, 1, 8, 12)
        tr.save(absorbed, tmp_path)
        assert torch.equal(tr.load(tmp_path)(x), absorbed(x))
        assert torch.allclose(absorbed(x), model(x), atol=1e-5)


def test_tensors_come_back_in_their_dtypes(tmp_path: Path) -> None:
    model = tr.swap(made("vit").bfloat16(), "liere", init="paper").eval()
    tr.save(model, tmp_path)
    again = tr.load(tmp_path)
    x = images(model).bfloat16()
    assert torch.equal(again(x), model(x))
    assert {name: p.dtype for name, p in again.named_parameters()} == {n: p.dtype for n, p in model.named_parameters()}
    assert all(p.requires_grad for p in again.parameters())


class Isotropic(tr.MixedRoPE):
    pass


def test_encodings_of_users_are_passed_explicitly(tmp_path: Path) -> None:
    model = tr.swap(made("vit"), Isotropic, init="paper").eval()
    tr.save(model, tmp_path)
    x = images(model)
    with pytest.raises(ValueError, match=r"passed as classes=\[\.\.\.\] or registered, got a model with Isotropic"):
        tr.load(tmp_path)
    assert torch.equal(tr.load(tmp_path, classes=[Isotropic])(x), model(x))
    tr.register_encoding("isotropic", Isotropic)
    try:
        assert torch.equal(tr.load(tmp_path)(x), model(x))
        named = tr.ViT((8, 8), patch_size=2, in_channels=1, dim=16, depth=1, num_heads=2, encoding="isotropic").eval()
        tr.save(named, tmp_path)
        assert type(tr.load(tmp_path).encodings[0]) is Isotropic
    finally:
        ROTARY.pop("isotropic")


def test_file_is_plain_data(tmp_path: Path) -> None:
    tr.save(tr.swap(made("vit"), "liere:4"), tmp_path / "m")
    with safe_open(tmp_path / "m", framework="pt") as opened:
        head = json.loads(opened.metadata()["torchrope"])
    assert head["recipe"]["architecture"] == "vit_tiny_patch16_224"
    assert head["swap"]["encodings"][0]["class"] == "LieRE"


def changed() -> nn.Module:
    model = made("vit")
    model.head = nn.Sequential(nn.Linear(32, 5), nn.ReLU())
    return model


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (partial(nn.Linear, 2, 2), "model must be of timm, transformers, torchrope, got Linear"),
        (changed, "got head: .*Sequential.* instead of .*Linear"),
        (partial(made, "vit", act_layer=nn.ReLU), "settings that JSON can represent, got: Object of type type"),
        (partial(timm.models.VisionTransformer, img_size=32, embed_dim=32, depth=1, num_heads=2), "built otherwise"),
    ],
)
def test_save_refuses_models_that_cannot_be_rebuilt(model: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        tr.save(model(), tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_files_that_are_no_models(tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    tr.save(made("vit"), whole)
    (tmp_path / "cut").write_bytes(whole.read_bytes()[:-100])
    (tmp_path / "text").write_text("hello")
    for name in ("cut", "text", "missing"):
        with pytest.raises(ValueError, match=f"load needs a file that torchrope.save wrote, got .*{name}"):
            tr.load(tmp_path / name)


def test_tensors_must_fit(tmp_path: Path) -> None:

    tr.save(made("vit"), tmp_path / "m")
    with safe_open(tmp_path / "m", framework="pt") as opened:
        head = opened.metadata()
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    del tensors["norm.bias"]
    save_file(tensors, tmp_path / "less", metadata=head)
    with pytest.raises(ValueError, match=r"got no norm\.bias$"):
        tr.load(tmp_path / "less")
    save_file(tensors, tmp_path / "other")
    with pytest.raises(ValueError, match="no settings of torchrope"):
        tr.load(tmp_path / "other")
