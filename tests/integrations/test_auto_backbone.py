"""ViT and Features as backbones of transformers: feature maps, checkpoints that survive, its heads on top."""

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoBackbone,
    AutoConfig,
    AutoModel,
    DeformableDetrConfig,
    DeformableDetrForObjectDetection,
    Mask2FormerConfig,
    Mask2FormerForUniversalSegmentation,
    UperNetConfig,
    UperNetForSemanticSegmentation,
)

import torchrope as tr
from torchrope.integrations.auto import TorchropeBackbone, TorchropeConfig

ENCODINGS = ["none", "bias+mixed", "axial", "mixed", "liere:8", "comrope-ap:4", "learned+comrope-ld:4", "sinusoidal"]


def vit(encoding: Any = "mixed", **settings: Any) -> tr.ViT:
    sizes: dict[str, Any] = dict(patch_size=8, num_outputs=0, dim=32, depth=3, num_heads=2)
    return tr.ViT(settings.pop("input_size", (32, 32)), encoding=encoding, **{**sizes, **settings})


def tiny(encoding: str = "mixed", *, of: dict[str, Any] | None = None, **settings: Any) -> TorchropeConfig:
    return TorchropeConfig.of(vit(encoding, **(of or {})), **settings)


def stages(encoding: str = "bias") -> tr.Features:
    sizes: dict[str, Any] = dict(dim=16, depths=(1, 1, 2, 1), num_heads=(1, 1, 2, 2), window_size=4, drop_path=0.0)
    return tr.Features(tr.Swin((64, 64), num_outputs=0, encoding=encoding, **sizes))


FEATURES: dict[str, Callable[[], tr.Features]] = {
    "layers": lambda: tr.Features(vit("comrope-ld:4", depth=4), indices=(1, 2, 3, 4)),
    "windows": lambda: tr.Features(vit("bias+mixed", depth=4), indices=(1, 2, 3, 4), window_size=2),
    "pyramid": lambda: tr.Features(vit("learned+mixed", depth=4), pyramid=True, out_channels=16),
    "swin": stages,
}


@pytest.mark.parametrize("norm", [True, False])
def test_maps_are_the_tokens_of_their_depth_on_the_lattice(norm: bool) -> None:
    model = tr.ViT((32, 32), patch_size=8, dim=32, depth=3, num_heads=2, encoding="mixed", num_registers=2).eval()
    x = torch.randn(2, 3, 32, 48)
    seen = []
    for layer in model.layers:
        layer.register_forward_hook(lambda _module, _inputs, tokens: seen.append(tokens))
    maps = model.feature_maps(x, [1, -1], norm=norm)
    for depth, found in zip((1, 3), maps, strict=True):
        tokens = model.norm(seen[depth - 1]) if norm else seen[depth - 1]
        assert torch.equal(found, tokens[:, 3:].transpose(1, 2).reshape(2, 32, 4, 6))


def test_last_map_pools_to_the_features_and_the_first_is_the_embedding() -> None:
    model = tr.ViT((8, 8, 8), patch_size=4, dim=32, depth=2, num_heads=2, encoding="liere:8", pool="mean").eval()
    x = torch.randn(2, 3, 8, 4, 12)
    stem, last = model.feature_maps(x, [0, 2], norm=False)
    assert torch.equal(stem.flatten(2).mT, model.embed(x))
    assert torch.equal(model.norm(last.flatten(2).mT).mean(dim=1), model.features(x))


def test_indices_beyond_the_depth_are_told_in_one_line() -> None:
    model = tr.ViT((8, 8), patch_size=4, dim=32, depth=2, num_heads=2)
    with pytest.raises(ValueError, match=r"indices must be between -3 and 2, got \(1, 3\)"):
        model.feature_maps(torch.zeros(1, 3, 8, 8), [1, 3])


@pytest.mark.parametrize("size", [(32, 32), (48, 32), (64, 96)])
def test_auto_backbone_gives_the_vits_own_maps_at_any_size(size: tuple[int, int]) -> None:
    model = AutoBackbone.from_config(tiny("liere:8", out_features=["stem", "stage2"])).eval()
    assert isinstance(model, TorchropeBackbone)
    assert model.channels == [32, 32]
    x = torch.randn(2, 3, *size)
    expected = model.model.feature_maps(x, [0, 2])
    for found, map in zip(model(x).feature_maps, expected, strict=True):
        assert torch.equal(found, map)
        assert found.shape == (2, 32, size[0] // 8, size[1] // 8)
    everything = model(x, output_hidden_states=True)
    assert [state.shape[1] for state in everything.hidden_states] == [1 + size[0] * size[1] // 64] * 4
    assert torch.equal(everything.feature_maps[1], expected[1])
    assert isinstance(model(x, return_dict=False)[0], tuple)
    with pytest.raises(ValueError, match=r"output_attentions must be False, .* got True"):
        model(x, output_attentions=True)
    with pytest.raises(ValueError, match="pixel_mask must be None for a ViT"):
        model(x, pixel_mask=torch.ones(2, *size))


def test_final_norm_may_be_left_out() -> None:
    model = AutoBackbone.from_config(tiny(out_indices=[1, 3], apply_layernorm=False)).eval()
    nn.init.constant_(model.model.norm.bias, 3.0)
    x = torch.randn(1, 3, 32, 32)
    for found, map in zip(model(x).feature_maps, model.model.feature_maps(x, [1, 3], norm=False), strict=True):
        assert torch.equal(found, map)


@pytest.mark.slow
@pytest.mark.parametrize("kind", FEATURES)
def test_auto_backbone_gives_the_features_maps_and_survives_saving(kind: str, tmp_path: Path) -> None:
    features = FEATURES[kind]().eval()
    config = TorchropeConfig.of(features)
    assert config.out_features == [f"stage{index}" for index in range(1, 5)]
    model = AutoBackbone.from_config(config).eval()
    assert isinstance(model, TorchropeBackbone)
    assert model.channels == list(features.channels)
    model.model.load_state_dict(features.state_dict())
    x = torch.randn(2, 3, 50, 64)
    mask = torch.ones(2, 50, 64, dtype=torch.bool)
    mask[1, :, 40:] = False
    model.save_pretrained(tmp_path)
    again, info = TorchropeBackbone.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info[part] for part in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    for each in (model, again, AutoModel.from_pretrained(str(tmp_path))):
        for given in (None, mask):
            found = each(x, pixel_mask=given).feature_maps
            assert all(torch.equal(a, b) for a, b in zip(found, features(x, given), strict=True))
    assert AutoConfig.from_pretrained(str(tmp_path)).to_dict() == again.config.to_dict()


def test_tokens_stand_where_the_weights_were_trained(tmp_path: Path) -> None:
    features = FEATURES["layers"]().eval()
    features.model.position_map = tr.Lattice((3.0, 3.0), (1.0, 2.0))  # as pre-trained weights may say
    model = AutoBackbone.from_config(TorchropeConfig.of(features))
    model.model.load_state_dict(features.state_dict())
    model.save_pretrained(tmp_path)
    again = TorchropeBackbone.from_pretrained(tmp_path)
    assert again.model.model.position_map == tr.Lattice((3.0, 3.0), (1.0, 2.0))


def test_stages_of_features_are_chosen_by_name_or_number() -> None:
    model = AutoBackbone.from_config(TorchropeConfig.of(stages(), out_indices=[1, 3])).eval()
    assert (model.out_features, model.channels) == (["stage2", "stage4"], [32, 128])
    output = model(torch.randn(1, 3, 64, 64), output_hidden_states=True)
    assert [map.shape[-1] for map in output.feature_maps] == [8, 2]
    assert len(output.hidden_states) == 4
    with pytest.raises(ValueError, match="subset of stage_names"):
        TorchropeConfig.of(stages(), out_features=["stage5"])


def test_swin_stands_for_features_of_its_stages() -> None:
    swin = tr.Swin((64, 64), dim=16, depths=(1, 1), num_heads=(1, 2), window_size=4, encoding="mixed")
    config = TorchropeConfig.of(swin)
    assert config.to_dict() == TorchropeConfig.of(tr.Features(swin)).to_dict() | {"features": {}}
    assert AutoBackbone.from_config(config).channels == [16, 32]


def test_arguments_reach_the_vit() -> None:
    settings: dict[str, Any] = dict(
        share_layers=True,
        positions=tr.Lattice(2.0, (0.5, 1.0)),
        mlp_dim=40,
        pool="mean",
        num_registers=3,
        qkv_bias=False,
        dropout=0.1,
        attention_dropout=0.2,
        drop_path=0.3,
        layer_scale=0.4,
        in_channels=5,
    )
    built = AutoBackbone.from_config(tiny("learned+liere:8", of={**settings, "num_outputs": 7})).model
    assert built.arguments == {**vit("learned+liere:8", **settings).arguments, "encoding": "learned+liere:8"}
    assert isinstance(built.head, nn.Identity)


def test_three_axes_make_a_backbone_for_video() -> None:
    model = AutoBackbone.from_config(tiny(of=dict(input_size=(4, 16, 16), patch_size=(2, 8, 8))))
    assert model(torch.randn(1, 3, 8, 16, 24)).feature_maps[0].shape == (1, 32, 4, 2, 3)


def test_last_layer_of_a_vit_is_the_default_and_unknown_stages_are_refused() -> None:
    assert tiny().out_features == ["stage3"]
    assert tiny(out_indices=[1, 3]).out_features == ["stage1", "stage3"]
    assert TorchropeConfig().out_features == ["stage12"]
    with pytest.raises(ValueError, match="subset of stage_names"):
        tiny(out_features=["stage4"])


SMALL = {"class": "ViT", "arguments": {"input_size": [32, 32], "patch_size": 8, "dim": 32, "depth": 1, "num_heads": 2}}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TorchropeConfig.of(nn.Linear(1, 1)), "model must be a ViT, a Swin or a Features, got Linear"),
        (
            lambda: TorchropeConfig.of(vit(partial(tr.LieRE, block_size=8))),
            "must be representable as JSON, got: Object of type partial",
        ),
        (lambda: TorchropeConfig(model={**SMALL, "class": "os.system"}), "must be 'ViT' or 'Swin', got 'os.system'"),
        (lambda: TorchropeConfig(model=_with(activation="os.abort")), "that a file may set, got 'activation'"),
        (lambda: TorchropeConfig(model=_with(depth=10**9)), "depth of the arguments of ViT must be a whole number"),
        (lambda: TorchropeConfig(model=_with(encoding="mxed")), "did you mean 'mixed'"),
        (lambda: TorchropeConfig(model=_with(encoding="os.path:join")), "an encoding must be one of none, axial"),
        (lambda: TorchropeConfig(model=SMALL, features={"pyramid": 1}), "pyramid .* must be true or false, got 1"),
        (lambda: TorchropeConfig(model=SMALL, features={"indices": [9]}), "indices must be between"),
    ],
)
def test_other_models_are_refused_as_backbones_in_one_line(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        make()
    assert "\n" not in str(error.value)


def _with(**arguments: Any) -> dict[str, Any]:
    return {**SMALL, "arguments": {**SMALL["arguments"], **arguments}}  # type: ignore[dict-item]


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_saving_loses_nothing_of_the_model(encoding: str, tmp_path: Path) -> None:
    config = tiny(encoding, of=dict(num_registers=2, layer_scale=0.1), out_indices=[1, 3])
    model = AutoBackbone.from_config(config).eval()
    model.save_pretrained(tmp_path)
    again, info = TorchropeBackbone.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    x = torch.randn(1, 3, 32, 48)
    for of_model in (again, AutoModel.from_pretrained(str(tmp_path))):
        for before, after in zip(model(x).feature_maps, of_model(x).feature_maps, strict=True):
            assert torch.equal(before, after)
    assert AutoConfig.from_pretrained(str(tmp_path)).to_dict() == again.config.to_dict()


@pytest.mark.parametrize("of", [lambda: vit("comrope-ap:4", layer_scale=0.1), lambda: stages("bias+mixed")])
def test_missing_parameters_are_initialised_and_others_loaded(of: Any, tmp_path: Path) -> None:
    model = AutoBackbone.from_config(TorchropeConfig.of(of()))
    lost = [name for name in model.state_dict() if ".encodings." in name or ".norm" in name or "factor" in name]
    state = {name: value + 1 for name, value in model.state_dict().items() if name not in lost}
    model.save_pretrained(tmp_path, state_dict=dict(state))
    again, info = TorchropeBackbone.from_pretrained(tmp_path, output_loading_info=True)
    assert set(info["missing_keys"]) == set(lost)
    for name, value in again.state_dict().items():
        if name not in lost:
            assert torch.equal(value, state[name])
        elif ".encodings." in name:
            assert value.std() == pytest.approx(model.state_dict()[name].std().item(), rel=0.7)
        else:
            assert value.eq(model.state_dict()[name]).all()


def test_generators_that_a_checkpoint_lacks_start_as_in_their_paper(tmp_path: Path) -> None:
    model = AutoBackbone.from_config(tiny("comrope-ap:4"))
    model.save_pretrained(tmp_path, state_dict={k: v for k, v in model.state_dict().items() if ".encodings.0" not in k})
    again, info = TorchropeBackbone.from_pretrained(tmp_path, output_loading_info=True)
    assert len(info["missing_keys"]) == 1
    generators = again.model.encodings[0].generators()
    assert generators.std().item() == pytest.approx(2**0.5 * 3**0.5 / 2 / 2**0.5, rel=0.3)  # half the blocks an axis


@pytest.mark.parametrize("of", [lambda: vit("liere:8"), lambda: stages("mixed")])
def test_half_precision_leaves_encodings_as_they_are(of: Any, tmp_path: Path) -> None:
    AutoBackbone.from_config(TorchropeConfig.of(of())).save_pretrained(tmp_path)
    model = TorchropeBackbone.from_pretrained(tmp_path, dtype=torch.bfloat16)
    dtypes = {".encodings." in name: part.dtype for name, part in model.named_parameters()}
    assert dtypes == {True: torch.float32, False: torch.bfloat16}
    assert model(torch.randn(1, 3, 64, 64)).feature_maps[0].dtype == torch.bfloat16


def _upernet(backbone: TorchropeConfig) -> nn.Module:
    config = UperNetConfig(backbone_config=backbone, hidden_size=16, auxiliary_channels=8, num_labels=3)
    return UperNetForSemanticSegmentation(config)


def _mask2former(backbone: TorchropeConfig) -> nn.Module:
    sizes: dict[str, Any] = dict(feature_size=32, mask_feature_size=32, hidden_dim=32, encoder_feedforward_dim=32)
    layers: dict[str, Any] = dict(encoder_layers=1, decoder_layers=2, num_attention_heads=2, dim_feedforward=32)
    points: dict[str, Any] = dict(num_queries=6, train_num_points=50)
    config = Mask2FormerConfig(backbone_config=backbone, num_labels=3, **sizes, **layers, **points)
    return Mask2FormerForUniversalSegmentation(config)


def _detr(backbone: TorchropeConfig) -> nn.Module:
    sizes: dict[str, Any] = dict(d_model=32, encoder_ffn_dim=32, decoder_ffn_dim=32, num_queries=5)
    layers: dict[str, Any] = dict(encoder_layers=1, decoder_layers=2, num_feature_levels=4)
    heads: dict[str, Any] = dict(encoder_attention_heads=2, decoder_attention_heads=2)
    config = DeformableDetrConfig(backbone_config=backbone, num_labels=2, **sizes, **layers, **heads)
    return DeformableDetrForObjectDetection(config)


HEADS: dict[str, tuple[Any, Any, str]] = {
    "upernet on layers of a vit": (_upernet, lambda: tiny("liere:8", out_indices=[1, 2, 3]), "logits"),
    "upernet on a pyramid": (_upernet, lambda: TorchropeConfig.of(FEATURES["pyramid"]()), "logits"),
    "mask2former on a swin": (_mask2former, lambda: TorchropeConfig.of(stages("mixed")), "class_queries_logits"),
    "deformable detr on a swin": (_detr, lambda: TorchropeConfig.of(stages("mixed")), "logits"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", HEADS)
def test_heads_of_transformers_learn_through_it_and_survive_saving(name: str, tmp_path: Path) -> None:
    head, backbone, answer = HEADS[name]
    torch.manual_seed(0)
    model, x = head(backbone()), torch.randn(2, 3, 64, 64)
    maps = torch.randint(0, 3, (2, 64, 64))
    boxes = [{"class_labels": torch.tensor([1]), "boxes": torch.tensor([[0.5, 0.5, 0.2, 0.2]])}] * 2
    masks = [(map == torch.arange(3)[:, None, None]).float() for map in maps]
    labels = {
        _upernet: dict(labels=maps),
        _mask2former: dict(mask_labels=masks, class_labels=[torch.arange(3)] * 2),
        _detr: dict(labels=boxes),
    }
    model(x, **labels[head]).loss.sum().backward()
    encodings = [part for of, part in model.named_parameters() if ".encodings." in of]
    assert encodings
    assert all(part.grad.abs().sum() > 0 for part in encodings)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    torch.testing.assert_close(again(x)[answer], model.eval()(x)[answer], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_swapped_model_compiles_without_graph_breaks() -> None:
    model = AutoBackbone.from_config(tiny("mixed")).eval()
    x = torch.randn(1, 3, 32, 32)
    torch.compiler.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")(x)
    assert torch.allclose(compiled.feature_maps[0], model(x).feature_maps[0], atol=1e-5)
