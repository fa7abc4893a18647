"""Backbones that start with other models: equal maps at the training size and beyond, a line for what does not fit."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from published import randomised, saved
from torch import Tensor, nn
from transformers import CLIPVisionConfig, CLIPVisionModel, Dinov2Config, Dinov2Model

import torchrope as tr
from torchrope.checkpoints.convert import load_backbone, read_model, to_torchrope
from torchrope.encodings import Choice
from torchrope.models import Features

SIZES = [(64, 64), (96, 128), (80, 50)]  # of training, and beyond
vit = partial(tr.ViT, patch_size=8, dim=32, depth=4, num_heads=2)


def _drawn(model: nn.Module) -> Any:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model.eval()


def _agree(features: Features, expected: Callable[[Tensor], list[Tensor]], sizes: list[tuple[int, int]]) -> None:
    features.eval()
    for size in sizes:
        x = torch.randn(1, 3, *size)
        with torch.no_grad():
            for map, theirs in zip(features(x), expected(x), strict=True):
                assert (map - theirs).abs().max() < 1e-4 * max(1, theirs.abs().max()), size


@pytest.mark.parametrize("encoding", ["mixed", "liere:8", "comrope-ap:4", "axial", "learned+mixed", "bias", "none"])
@pytest.mark.parametrize("side", [64, 128])
def test_backbone_of_any_lattice_computes_what_the_model_does(encoding: str, side: int) -> None:
    """The spacing of positions is that of training; a table is resampled, so there lattices are the same."""
    trained = _drawn(vit((64, 64), encoding=encoding, num_registers=1))
    backbone = Features(vit((side, side), encoding=encoding, num_registers=1, drop_path=0.1), indices=(1, 3))
    load_backbone(backbone, trained)
    if encoding in ("learned+mixed", "bias") and side != 64:
        x = torch.randn(1, 3, side, side)
        for map, theirs in zip(backbone.eval()(x), trained.feature_maps(x, [1, 3], norm=False), strict=True):
            assert torch.allclose(map, theirs, atol=1e-4)  # both are resampled once
        return
    _agree(backbone, lambda x: trained.feature_maps(x, [1, 3], norm=False), [(64, 64), (96, 128), (40, 64)])


def test_class_token_and_registers_stay_behind_where_windows_attend() -> None:
    trained = _drawn(vit((64, 64), encoding="liere:8", num_registers=2))
    backbone = Features(vit((64, 64), encoding="liere:8"), pyramid=True, window_size=4, global_layers=(4,))
    load_backbone(backbone, trained)
    trained.drop_prefix()
    x = torch.randn(1, 3, 96, 96)
    expected = trained.feature_maps(x, [-1], norm=False, window_size=4, global_layers=(4,))
    assert torch.equal(
        backbone.eval().model.feature_maps(x, [-1], norm=False, window_size=4, global_layers=(4,))[0], expected[0]
    )


@pytest.mark.parametrize("encoding", ["bias", "bias+liere:4", "mixed"])
@pytest.mark.parametrize("window", [4, 8])
def test_swin_takes_other_windows(encoding: str, window: int) -> None:
    swin = partial(tr.Swin, patch_size=2, dim=16, depths=(2, 2), num_heads=(1, 2), encoding=encoding)
    trained = _drawn(swin((64, 64), window_size=4))
    backbone = Features(swin((64, 64), window_size=window))
    load_backbone(backbone, trained)
    for stage, own in zip(backbone.model.stages, trained.stages, strict=True):
        assert stage.position_map == own.position_map

    def expected(x: Tensor) -> list[Tensor]:
        stages = trained.feature_maps(x, window_size=window)
        return [norm(stage) for norm, stage in zip(backbone.norms, stages, strict=True)]

    _agree(backbone, expected, [(64, 64), (128, 64)])  # windows of 8 fill lattices of 32 and 16


small = dict(img_size=64, embed_dim=48, depth=3, num_heads=2, num_classes=5, dynamic_img_size=True)
TIMM: dict[str, tuple[str, dict[str, Any]]] = {
    "vit_small_patch16_224": ("learned", {}),
    "deit3_small_patch16_224": ("learned", dict(layer_scale=1.0)),
    "vit_small_patch16_rope_224": ("axial", dict(layer_scale=1.0)),
    "vit_small_patch16_rope_ape_224": ("learned+axial", dict(layer_scale=1.0)),
    "vit_small_patch16_rope_mixed_224": ("mixed", dict(layer_scale=1.0)),
}


@pytest.mark.parametrize("name", TIMM)
@pytest.mark.parametrize("as_file", [False, True])
def test_timms_vits_give_the_maps_of_their_features_only(name: str, as_file: bool, tmp_path: Path) -> None:
    theirs = randomised(timm.create_model(name, **small))
    encoding, more = TIMM[name]
    backbone = Features(
        tr.ViT((64, 64), patch_size=16, dim=48, depth=3, num_heads=2, encoding=encoding, **more), indices=(1, 2, 3)
    )
    options = {} if "rope_ape" not in name or not as_file else dict(encoding="axial")
    if as_file:
        load_backbone(backbone, tr.load_published(saved(theirs.state_dict(), tmp_path), num_heads=2, **options))
    else:
        load_backbone(backbone, theirs)
    getter = timm.create_model(name, features_only=True, out_indices=(0, 1, 2), **small).eval()
    getter.model.load_state_dict(theirs.state_dict(), strict=False)
    assert backbone.feature_info.channels() == getter.feature_info.channels()
    assert backbone.feature_info.reduction() == getter.feature_info.reduction()
    _agree(backbone, getter, [(64, 64), (96, 128)])


def test_timms_swins_give_the_maps_of_their_features_only_behind_our_norms() -> None:
    shape = dict(img_size=64, embed_dim=32, depths=(2, 2), num_heads=(1, 2), window_size=4)
    theirs = randomised(timm.create_model("swin_tiny_patch4_window7_224", strict_img_size=False, **shape), spread=0.1)
    ours = dict(dim=32, depths=(2, 2), num_heads=(1, 2), window_size=4)
    backbone = Features(tr.Swin((64, 64), patch_size=4, encoding="bias", **ours))
    load_backbone(backbone, theirs)

    def expected(x: Tensor) -> list[Tensor]:
        stages = theirs.forward_intermediates(x, intermediates_only=True)
        return [norm(stage) for norm, stage in zip(backbone.norms, stages, strict=True)]

    _agree(backbone, expected, [(64, 64), (96, 128)])


def test_model_that_was_saved_is_a_backbone(tmp_path: Path) -> None:
    trained = _drawn(vit((64, 64), encoding="mixed"))
    tr.save(trained, tmp_path)
    backbone = Features(vit((64, 64), encoding="mixed"))
    load_backbone(backbone, read_model(tmp_path))
    _agree(backbone, lambda x: trained.feature_maps(x, [1, 2, 3, 4], norm=False), SIZES[:2])


one = dict(patch_size=8, dim=32, depth=4, num_heads=2, encoding="mixed")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            lambda: tr.ViT((64, 64), **one | {"encoding": "axial"}),
            "encodings.0: AxialRoPE instead of MixedRoPE; .*1 more",
        ),
        (lambda: tr.ViT((64, 64), **one | {"encoding": "liere:8"}), "encodings.0: LieRE instead of MixedRoPE"),
        (
            lambda: tr.ViT((64, 64), **one | {"num_heads": 4}),
            r"layers.0.attention: Attention\(num_heads=4\) instead of Attention\(num_heads=2\)",
        ),
        (lambda: tr.ViT((64, 64), **one | {"dim": 64}), r"embed.proj: Linear\(.*=64, .* instead of Linear\(.*=32, "),
        (lambda: tr.ViT((64, 64), **one | {"depth": 3}), "encodings.3: nothing instead of MixedRoPE"),
        (
            lambda: tr.ViT((64, 64), **one | {"patch_size": 4}),
            r"embed: PatchEmbed\(patch_size=\(4, 4\)\) instead of PatchEmbed\(patch_size=\(8, 8\)\)",
        ),
        (
            lambda: tr.ViT((64, 64), **one, norm_eps=1e-5),
            r"layers.0.norm1: LayerNorm\(.*eps=1e-05, .* instead of LayerNorm\(.*eps=1e-06",
        ),
        (lambda: tr.ViT((64, 64), **one, layer_scale=1e-4), "layers.0.scale1: LayerScale instead of Identity"),
        (lambda: tr.ViT((64, 64), **one, activation=nn.ReLU), "layers.0.mlp.1: ReLU instead of GELU"),
        (lambda: tr.ViT((64, 64), **one, num_registers=2), r"prefix_tokens of \(3, 32\) instead of \(1, 32\)"),
        (
            lambda: tr.ViT((64, 64), **one | {"encoding": Choice(tr.MixedRoPE, tr.SinusoidalAPE)}),
            "absolute: SinusoidalAPE instead of nothing",
        ),
        (
            lambda: tr.ViT((64, 64), **one | {"encoding": Choice(tr.MixedRoPE, bias=tr.RelativePositionBias)}),
            "biases.0.table, which is not in the model",
        ),
        (
            lambda: tr.ViT((64, 64), **one, positions=tr.Lattice(2.0, -1.0, offset=0.5, per="size")),
            "got other positions on the same lattice",
        ),
        (lambda: tr.Swin((64, 64), dim=32, depths=(2,), num_heads=(2,)), "got a Swin for a ViT"),
        (lambda: timm.create_model("resnet10t"), "load_published supports checkpoints of"),
    ],
)
def test_mismatch_raises_one_line(source: Callable[[], nn.Module], message: str) -> None:
    backbone = Features(tr.ViT((64, 64), **one))
    before = {name: value.clone() for name, value in backbone.state_dict().items()}
    with pytest.raises(ValueError, match=message) as caught:
        load_backbone(backbone, source())
    assert "\n" not in str(caught.value)
    assert all(torch.equal(value, before[name]) for name, value in backbone.state_dict().items())


@pytest.mark.parametrize("encoding", ["axial", "mixed", "bias", "none"])
def test_shared_generators_can_be_loaded_per_layer_but_not_conversely(encoding: str) -> None:
    shares, own = (_drawn(vit((64, 64), encoding=encoding, share_layers=share)) for share in (True, False))
    backbone = Features(vit((64, 64), encoding=encoding))
    load_backbone(backbone, shares)
    _agree(backbone, lambda x: shares.feature_maps(x, [1, 2, 3, 4], norm=False), SIZES[:2])
    if encoding in ("mixed", "bias"):
        with pytest.raises(ValueError, match=r"(encodings|biases)\.1\.(frequencies|table), which is not in the model"):
            load_backbone(Features(vit((64, 64), encoding=encoding, share_layers=True)), own)


def test_fixed_frequencies_come_along() -> None:
    trained = _drawn(vit((64, 64), encoding=partial(tr.AxialRoPE, base=50.0)))
    backbone = Features(vit((64, 64), encoding="axial"))
    load_backbone(backbone, trained)
    _agree(backbone, lambda x: trained.feature_maps(x, [1, 2, 3, 4], norm=False), SIZES[:2])


def test_missing_file_raises_one_line(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"none\.pth"):
        read_model(tmp_path / "none.pth")


def test_backbone_takes_the_weights_of_transformers() -> None:
    config = dict(hidden_size=32, num_hidden_layers=4, num_attention_heads=2, mlp_ratio=4, image_size=64, patch_size=8)
    theirs = _drawn(Dinov2Model(Dinov2Config(**config)))
    settings: dict[str, Any] = dict(encoding="learned", layer_scale=1.0)
    backbone = Features(vit((64, 64), **settings), indices=(1, 4))
    load_backbone(backbone, theirs)

    def expected(x: Tensor) -> list[Tensor]:
        states = theirs(pixel_values=x, output_hidden_states=True).hidden_states
        return [states[depth][:, 1:].mT.unflatten(2, (8, 8)) for depth in (1, 4)]

    _agree(backbone, expected, SIZES[:1])
    with pytest.raises(ValueError, match=r"LayerNorm\(.*eps=1e-06, .* instead of LayerNorm\(.*eps=1e-05"):
        load_backbone(Features(vit((64, 64), norm_eps=1e-5, **settings)), theirs)


@pytest.mark.parametrize(("encoding", "keep"), [("mixed", True), ("liere:8", False)])
def test_backbone_takes_the_weights_and_encodings_of_a_swapped_model(encoding: str, keep: bool) -> None:
    theirs = tr.swap(
        timm.create_model("vit_small_patch16_224", **small), encoding, init="paper", keep_position_tables=keep
    )
    theirs = randomised(theirs)
    backbone = Features(
        tr.ViT((64, 64), patch_size=16, dim=48, depth=3, num_heads=2, encoding=f"learned+{encoding}"), indices=(1, 2, 3)
    )
    load_backbone(backbone, theirs)
    _agree(backbone, lambda x: theirs.forward_intermediates(x, intermediates_only=True, norm=False), SIZES[:1])
    theirs = tr.swap(timm.create_model("swin_tiny_patch4_window7_224", img_size=56, depths=(1, 1)), encoding)
    with pytest.raises(ValueError, match="equal token positions in all layers"):
        load_backbone(backbone, theirs)


def test_clip_towers_of_transformers_and_timm_convert_with_equal_outputs(tmp_path: Path) -> None:
    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
    tower = _drawn(CLIPVisionModel(CLIPVisionConfig(**sizes, image_size=32, patch_size=8)))
    clip = partial(timm.create_model, embed_dim=32, depth=2, num_heads=2, img_size=32, num_classes=5)
    quick, exact = (_drawn(clip(f"vit_base_patch16_clip_{name}224")) for name in ("quickgelu_", ""))
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(to_torchrope(tower)(x), tower(x).pooler_output, rtol=1e-4, atol=1e-5)
        for theirs in (quick, exact):
            torch.testing.assert_close(to_torchrope(theirs)(x), theirs(x), rtol=1e-4, atol=1e-5)
        path = saved(quick.state_dict(), tmp_path)
        loaded = tr.load_published(path, num_heads=2, activation="quick_gelu")
        torch.testing.assert_close(loaded(x), quick(x), rtol=1e-4, atol=1e-5)
