"""Our ViT as a backbone of transformers: feature maps, checkpoints that survive, UPerNet on top."""

import warnings
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import AutoBackbone, AutoConfig, AutoModel, UperNetConfig, UperNetForSemanticSegmentation

import torchrope as tr
from torchrope.integrations.auto import TorchropeBackbone, TorchropeConfig

ENCODINGS = ["none", "bias+mixed", "axial", "mixed", "liere:8", "comrope-ap:4", "learned+comrope-ld:4", "sinusoidal"]
tiny = partial(TorchropeConfig, image_size=32, patch_size=8, hidden_size=32, num_hidden_layers=3, num_attention_heads=2)


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


def test_the_last_map_pools_to_the_features_and_the_first_is_the_embedding() -> None:
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
    model = AutoBackbone.from_config(tiny(encoding="liere:8", out_features=["stem", "stage2"])).eval()
    assert isinstance(model, TorchropeBackbone)
    assert model.channels == [32, 32]
    x = torch.randn(2, 3, *size)
    expected = model.vit.feature_maps(x, [0, 2])
    for found, map in zip(model(x).feature_maps, expected, strict=True):
        assert torch.equal(found, map)
        assert found.shape == (2, 32, size[0] // 8, size[1] // 8)
    everything = model(x, output_hidden_states=True)
    assert [state.shape[1] for state in everything.hidden_states] == [1 + size[0] * size[1] // 64] * 4
    assert torch.equal(everything.feature_maps[1], expected[1])
    assert isinstance(model(x, return_dict=False)[0], tuple)
    with pytest.raises(ValueError, match="got output_attentions=True"):
        model(x, output_attentions=True)


def test_every_setting_reaches_the_vit() -> None:
    settings = dict(
        share_layers=True,
        spacing=2.0,
        origin=(0.5, 1.0),
        intermediate_size=40,
        use_cls_token=False,
        num_register_tokens=3,
        qkv_bias=False,
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.2,
        drop_path_rate=0.3,
        layerscale_value=0.4,
        num_channels=5,
    )
    vit = AutoBackbone.from_config(tiny(encoding="learned+liere:8", **settings)).vit
    last = vit.layers[2]
    assert (len(vit.layers), len(vit.encodings), vit.encodings[0].block_size) == (3, 1, 8)
    assert (vit.spacing, vit.origin, vit.num_prefix, vit.pool) == (2.0, (0.5, 1.0), 3, "mean")
    assert isinstance(vit.absolute, tr.LearnedAPE)
    assert (vit.embed.proj.in_features, last.mlp[0].out_features) == (5 * 8 * 8, 40)
    assert last.attention.qkv.bias is None
    assert (vit.dropout.p, last.attention.attention_dropout, last.drop_path.p) == (0.1, 0.2, 0.3)
    assert last.scale1.factor.eq(0.4).all()


def test_three_axes_make_a_backbone_for_video() -> None:
    model = AutoBackbone.from_config(tiny(encoding="mixed", image_size=(4, 16, 16), patch_size=(2, 8, 8)))
    assert model(torch.randn(1, 3, 8, 16, 24)).feature_maps[0].shape == (1, 32, 4, 2, 3)


def test_the_last_layer_is_the_default_and_unknown_stages_are_refused() -> None:
    assert tiny().out_features == ["stage3"]
    assert tiny(out_indices=[1, 3]).out_features == ["stage1", "stage3"]
    with pytest.raises(ValueError, match="subset of stage_names"):
        tiny(out_features=["stage4"])
    with pytest.raises(ValueError, match="did you mean 'mixed'"):
        AutoBackbone.from_config(tiny(encoding="mxed"))


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_nothing_is_lost_by_saving(encoding: str, tmp_path: Path) -> None:
    config = tiny(encoding=encoding, out_indices=[1, 3], num_register_tokens=2, layerscale_value=0.1)
    model = AutoBackbone.from_config(config).eval()
    model.save_pretrained(tmp_path)
    again, info = TorchropeBackbone.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    x = torch.randn(1, 3, 32, 48)
    for of_model in (again, AutoModel.from_pretrained(str(tmp_path))):
        for before, after in zip(model(x).feature_maps, of_model(x).feature_maps, strict=True):
            assert torch.equal(before, after)
    assert AutoConfig.from_pretrained(str(tmp_path)).to_dict() == again.config.to_dict()


def test_what_a_checkpoint_lacks_starts_as_in_its_paper_and_the_rest_is_kept(tmp_path: Path) -> None:
    model = AutoBackbone.from_config(tiny(encoding="comrope-ap:4", layerscale_value=0.1))
    state = {name: value + 1 for name, value in model.state_dict().items() if ".encodings.0" not in name}
    model.save_pretrained(tmp_path, state_dict=dict(state))
    again, info = TorchropeBackbone.from_pretrained(tmp_path, output_loading_info=True)
    missing = again.vit.encodings[0].generators()
    assert len(info["missing_keys"]) == 1
    assert missing.std().item() == pytest.approx(2**0.5 * 3**0.5 / 2 / 2**0.5, rel=0.3)  # half the blocks an axis
    for name, value in again.state_dict().items():
        assert name in info["missing_keys"] or torch.equal(value, state[name])


def test_half_precision_leaves_encodings_as_they_are(tmp_path: Path) -> None:
    AutoBackbone.from_config(tiny(encoding="liere:8")).save_pretrained(tmp_path)
    model = TorchropeBackbone.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert model.vit.layers[0].mlp[0].weight.dtype == torch.bfloat16
    assert {parameter.dtype for parameter in model.vit.encodings.parameters()} == {torch.float32}
    assert model(torch.randn(1, 3, 32, 32)).feature_maps[0].dtype == torch.bfloat16


def test_upernet_learns_through_it_and_survives_saving(tmp_path: Path) -> None:
    config = UperNetConfig(
        backbone_config=tiny(encoding="liere:8", out_features=["stage1", "stage2", "stage3"]),
        hidden_size=16,
        auxiliary_in_channels=32,
        auxiliary_channels=16,
        num_labels=3,
    )
    model = UperNetForSemanticSegmentation(config)
    assert isinstance(model.backbone, TorchropeBackbone)
    x = torch.randn(2, 3, 32, 48)
    output = model(x, labels=torch.randint(0, 3, (2, 32, 48)))
    assert output.logits.shape == (2, 3, 32, 48)
    output.loss.backward()
    for parameter in model.backbone.vit.encodings.parameters():
        assert parameter.grad.abs().sum() > 0
    model.save_pretrained(tmp_path)
    again = UperNetForSemanticSegmentation.from_pretrained(tmp_path)
    assert torch.allclose(again(x).logits, model.eval()(x).logits, atol=1e-6)


def test_it_compiles_without_a_break() -> None:
    model = AutoBackbone.from_config(tiny(encoding="mixed")).eval()
    x = torch.randn(1, 3, 32, 32)
    torch.compiler.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")(x)
    assert torch.allclose(compiled.feature_maps[0], model(x).feature_maps[0], atol=1e-5)
