"""A model in one file: what comes back, by itself or into a plain model, and what is refused."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from swapped import MODELS, ROTATING, awake, images, made, stored, tower
from torch import nn
from transformers import ViTConfig

import torchrope as tr
from torchrope.encodings import ROTARY

VIT = ViTConfig(
    hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, image_size=64, patch_size=16
)


@pytest.mark.parametrize("keep", [pytest.param(True, marks=pytest.mark.slow), False])
@pytest.mark.parametrize("name", [name for name in MODELS if name != "vit_parallel"])
def test_swapped_model_is_restored(name: str, keep: bool, tmp_path: Path) -> None:
    model = made(name).eval()
    x = images(model)
    expected = model(x)
    encoding = {"dinov3": "comrope-ap:4", "eva02": "string:8"}.get(name, "liere:4")
    awake(tr.swap(model, encoding, keep_position_tables=keep, init=None if name in ROTATING else "paper"))
    tr.save(model, tmp_path / "model.safetensors")
    plain = MODELS[name]().eval()
    again: Any = tr.load(tmp_path / "model.safetensors", into=plain)
    assert again is plain
    assert torch.equal(again(x), model(x))
    assert tower(again).rotary.lattices == tower(model).rotary.lattices
    assert tower(again).rotary.channels == tower(model).rotary.channels
    assert torch.equal(tr.unswap(again)(x), expected)


def test_options_of_the_swap_are_saved(tmp_path: Path) -> None:
    encoding = tr.MixedRoPE(num_axes=2, num_heads=2, head_dim=16, rotary_dim=8, shared_heads=True)
    model = tr.swap(made("vit"), encoding, init="paper", spacing=0.25, origin=(1.0, 2.0)).eval()
    model.set_input_size((32, 96))
    tr.save(model, tmp_path)
    plain = made("vit").eval()
    plain.set_input_size((32, 96))
    again: Any = tr.load(tmp_path, into=plain)
    x = torch.randn(2, 3, 32, 96)
    assert torch.equal(again(x), model(x))
    assert repr(again.rotary.encodings) == repr(model.rotary.encodings)


def test_table_put_aside_at_another_size(tmp_path: Path) -> None:
    model = tr.swap(made("vit"), "mixed", keep_position_tables=False, init="paper").eval()
    model.set_input_size((32, 64))
    tr.save(model, tmp_path)
    plain = made("vit").eval()
    plain.set_input_size((32, 64))
    x = torch.randn(1, 3, 32, 64)
    assert torch.equal(tr.load(tmp_path, into=plain)(x), model(x))


@pytest.mark.parametrize("encoding", ["sinusoidal+mixed", "lookhere", "none"])
def test_models_in_half_precision_come_back_with_encodings_without_parameters(encoding: str, tmp_path: Path) -> None:
    model = tr.ViT((8, 8), patch_size=2, in_channels=1, num_outputs=5, dim=48, depth=2, num_heads=2, encoding=encoding)
    model, x = model.bfloat16().eval(), torch.randn(2, 1, 8, 12, dtype=torch.bfloat16)
    tr.save(model, tmp_path)
    again = tr.load(tmp_path)
    assert torch.equal(again(x), model(x))
    assert {name: part.dtype for name, part in again.named_buffers()} == {n: b.dtype for n, b in model.named_buffers()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["axial", "comrope-ld:8", "string", "sinusoidal+mixed", "learned+comrope-ap:3"])
def test_frozen_models_come_back(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    settings = dict(patch_size=2, in_channels=1, num_outputs=5, dim=48, depth=2, num_heads=2, encoding=name)
    frozen, other = (tr.freeze(tr.ViT((8, 8), **settings), (8, 12)).to(dtype) for _ in range(2))
    x = torch.randn(2, 1, 8, 12, dtype=dtype)
    tr.save(frozen, tmp_path)
    again = tr.load(tmp_path)
    for loaded in (again, tr.load(tmp_path, into=other), tr.load(tmp_path, into=tr.ViT((8, 8), **settings).to(dtype))):
        assert torch.equal(loaded.eval()(x), frozen(x))
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


@pytest.mark.parametrize("encoding", ["liere:4", "axial"])
@pytest.mark.parametrize("name", ["vit_qk_norm", "swin"])
def test_frozen_swapped_models_come_back(name: str, encoding: str, tmp_path: Path) -> None:
    model = tr.swap(made(name), encoding, init="paper").eval()
    x = images(model)
    frozen = tr.freeze(model, x)
    tr.save(frozen, tmp_path)
    plain, swapped = made(name).eval(), tr.swap(made(name), encoding, init="paper").eval()
    for into in (plain, swapped, tr.freeze(swapped, x)):
        assert torch.equal(tr.load(tmp_path, into=into)(x), frozen(x))


def test_frozen_models_within_others_come_back(tmp_path: Path) -> None:
    def composite() -> nn.Sequential:
        return nn.Sequential(made("vit"), nn.Linear(made("vit").num_classes, 3)).eval()

    x = torch.randn(2, 3, 64, 64)
    frozen = tr.freeze(tr.swap(composite(), "mixed", init="paper"), x)
    tr.save(frozen, tmp_path)
    assert torch.equal(tr.load(tmp_path, into=composite())(x), frozen(x))


def test_model_that_a_frozen_file_does_not_fit_is_unchanged(tmp_path: Path) -> None:
    x = torch.randn(1, 3, 64, 64)
    tr.save(tr.freeze(tr.swap(made("vit"), "mixed", init="paper"), x), tmp_path)
    for model in (made("vit", num_classes=3), tr.swap(made("vit", num_classes=3), "mixed", init="paper")):
        parts, expected = [name for name, _ in model.named_modules()], model.eval()(x)
        with pytest.raises(ValueError, match=r"got head\.weight of \(5, 32\) instead of \(3, 32\)"):
            tr.load(tmp_path, into=model)
        assert [name for name, _ in model.named_modules()] == parts
        assert torch.equal(model(x), expected)


def test_inflated_models_are_refused_by_the_plain_ones(tmp_path: Path) -> None:
    tr.save(tr.inflate(made("rope_axial"), patch_size=2, size=4, encoding="mixed"), tmp_path)
    with pytest.raises(ValueError, match="its tensors must be those of its model") as caught:
        tr.load(tmp_path, into=made("rope_axial"))
    assert "\n" not in str(caught.value)


def small() -> tr.ViT:
    return tr.ViT((16, 16), patch_size=4, num_outputs=5, dim=32, depth=2, num_heads=2, encoding="mixed")


class Isotropic(tr.MixedRoPE):
    pass


def test_encodings_of_users_are_passed_explicitly(tmp_path: Path) -> None:
    model = tr.swap(made("vit"), Isotropic, init="paper").eval()
    tr.save(model, tmp_path)
    x = images(model)
    with pytest.raises(ValueError, match=r"passed as classes=\[\.\.\.\] or registered, got a model with Isotropic"):
        tr.load(tmp_path, into=made("vit"))
    assert torch.equal(tr.load(tmp_path, into=made("vit").eval(), classes=[Isotropic])(x), model(x))
    tr.register_encoding("isotropic", Isotropic)
    try:
        assert torch.equal(tr.load(tmp_path, into=made("vit").eval())(x), model(x))
        named = tr.ViT((8, 8), patch_size=2, in_channels=1, dim=16, depth=1, num_heads=2, encoding="isotropic").eval()
        tr.save(named, tmp_path)
        assert type(tr.load(tmp_path).encodings[0]) is Isotropic
    finally:
        ROTARY.pop("isotropic")
    assert type(tr.load(tmp_path, classes=[Isotropic]).encodings[0]) is Isotropic


@pytest.mark.parametrize("wrap", [nn.DataParallel, partial(torch.compile, backend="eager")])
def test_wrapped_models_are_saved_and_loaded_without_the_wrapper(wrap: Any, tmp_path: Path) -> None:
    model: Any = awake(tr.swap(made("vit").eval(), "mixed"))
    x = images(model)
    tr.save(wrap(model), tmp_path / "m")
    for into in (MODELS["vit"]().eval(), wrap(MODELS["vit"]().eval())):
        assert tr.load(tmp_path / "m", into=into) is into
        assert torch.equal(into(x), model(x))
    tr.save(wrap(small()), tmp_path / "m")
    assert type(tr.load(tmp_path / "m")) is tr.ViT


def test_file_is_plain_data(tmp_path: Path) -> None:
    tr.save(tr.swap(made("vit"), "liere:4"), tmp_path / "m")
    head, _ = stored(tmp_path / "m")
    assert (head["model"], head["recipe"]) == ("timm.models.vision_transformer.VisionTransformer", None)
    assert head["swap"][""]["encodings"][0]["class"] == "LieRE"


def changed() -> nn.Module:
    model = small()
    model.head = nn.Sequential(nn.Linear(32, 5), nn.ReLU())
    return model


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (partial(nn.Linear, 2, 2), "save supports ViT, Swin, Transformer, Features and swapped models, got Linear"),
        (
            partial(made, "vit"),
            "save supports ViT, Swin, Transformer, Features and swapped models, got VisionTransformer",
        ),
        (changed, "got head: .*Sequential.* instead of .*Linear"),
    ],
)
def test_save_refuses_models_that_cannot_be_rebuilt(model: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        tr.save(model(), tmp_path / "model")
    assert list(tmp_path.iterdir()) == []
