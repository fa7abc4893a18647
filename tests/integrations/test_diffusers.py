"""Transformers of diffusers: the same outputs after a swap, gradients to their frequencies, larger inputs, and back."""

import copy
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("diffusers")

from diffusers import DiTTransformer2DModel
from diffusers.models.embeddings import get_3d_rotary_pos_embed
from diffusing import FAMILIES, built, inputs, output
from torch import Tensor, nn

import torchrope as tr
from torchrope.integrations.diffusers_rotation import positions_in

LEARNED = ["mixed", *(pytest.param(name, marks=pytest.mark.slow) for name in ("liere:4", "string:4", "comrope-ld:2"))]
FLUX = "FluxTransformer2DModel"
WAN = "WanTransformer3DModel"
COSMOS = "CosmosTransformer3DModel"
COGVIDEOX = "CogVideoXTransformer3DModel"
# One of two streams of tokens, and one of one, stand for all where nothing depends on a family's tables.
SOME = [name if name in (FLUX, WAN) else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES]


def quiet(model: nn.Module, arguments: dict[str, Any]) -> Tensor:
    with torch.no_grad():
        return output(model, arguments)


def error(model: nn.Module, arguments: dict[str, Any], expected: Tensor) -> float:
    """The largest difference, in spreads of what is expected."""
    return float((quiet(model, arguments) - expected).abs().max() / expected.std())


def frequencies(model: Any) -> list[nn.Parameter]:
    return [parameter for name, parameter in model.named_parameters() if ".encodings." in name]


def gradients(model: Any, name: str) -> dict[str, Tensor]:
    output(model, inputs(name)).square().mean().backward()
    return {key: one.grad for key, one in model.named_parameters() if one.grad is not None}


@pytest.mark.parametrize("encoding", LEARNED)
@pytest.mark.parametrize("name", FAMILIES)
def test_outputs_are_those_of_before_and_every_layer_learns(name: str, encoding: str) -> None:
    model = built(name)
    small, large = quiet(model, inputs(name)), quiet(model, inputs(name, scale=2))
    assert tr.swap(model, encoding) is model
    # Angles of LTX are so large that float32 rounds them to 5e-4: blocks larger than 2 round them otherwise.
    bound = 1e-4 if name.startswith("LTX") and encoding != "mixed" else 1e-5
    assert error(model, inputs(name), small) < bound
    assert error(model, inputs(name, scale=2), large) < bound
    assert all(one.grad is not None and one.grad.any() for one in _after_backward(model, name))
    with torch.no_grad():
        for one in frequencies(model):
            one.zero_()
    assert error(model, inputs(name), small) > 0.05  # it was the rotation that was kept


def _after_backward(model: Any, name: str) -> list[nn.Parameter]:
    gradients(model, name)
    return frequencies(model)


@pytest.mark.parametrize("name", SOME)
def test_unswap_gives_the_model_back_to_the_bit(name: str) -> None:
    model = built(name)
    before, expected = copy.deepcopy(model.state_dict()), quiet(model, inputs(name))
    tr.unswap(tr.swap(model, "mixed"))
    assert torch.equal(quiet(model, inputs(name)), expected)
    assert before.keys() == model.state_dict().keys()
    assert not any(hasattr(module, "rotary") for module in model.modules())


@pytest.mark.parametrize("name", SOME)
def test_gradient_checkpointing_finds_the_positions_of_its_call(name: str) -> None:
    plain = tr.swap(built(name), "mixed").train()
    saving = copy.deepcopy(plain)
    saving.enable_gradient_checkpointing()
    quiet(saving, inputs(name, scale=2))  # of another size, before the call that is recomputed
    expected, found = gradients(plain, name), gradients(saving, name)
    assert expected.keys() == found.keys()
    for key, gradient in expected.items():
        torch.testing.assert_close(found[key], gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", SOME)
def test_in_bfloat16_frequencies_stay_exact_and_outputs_as_near_as_the_models_own(name: str) -> None:
    model = built(name)
    exact = quiet(model, inputs(name))
    model.to(torch.bfloat16)
    own = error(model, _in_half(inputs(name)), exact)
    tr.swap(model, "mixed")
    assert {one.dtype for one in frequencies(model)} == {torch.float32}
    assert error(model, _in_half(inputs(name)), exact) < 2 * own


def _in_half(arguments: dict[str, Any]) -> dict[str, Any]:
    features = ("hidden_states", "encoder_hidden_states", "audio_hidden_states", "audio_encoder_hidden_states")
    names = (*features, "pooled_projections", "timestep")
    return {name: value.bfloat16() if name in names else value for name, value in arguments.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_compiles_to_the_same(name: str) -> None:
    model = tr.swap(built(name), "mixed")
    expected = quiet(model, inputs(name))
    torch._dynamo.reset()
    assert error(torch.compile(model, backend="aot_eager"), inputs(name), expected) < 1e-5


@pytest.mark.parametrize("name", [FLUX, "LTXVideoTransformer3DModel"])
def test_a_saved_swap_is_loaded_into_a_model_built_alike(name: str, tmp_path: Path) -> None:
    model = tr.swap(built(name), "mixed")
    with torch.no_grad():
        for one in frequencies(model):
            one.mul_(0.9)
    tr.save(model, tmp_path)
    other = built(name)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert torch.equal(quiet(tr.load(tmp_path, into=other), inputs(name)), quiet(model, inputs(name)))


def test_save_pretrained_refuses_what_from_pretrained_would_drop(tmp_path: Path) -> None:
    model = tr.swap(built(FLUX), "mixed")
    with pytest.raises(ValueError, match=r"would drop the encodings .* torchrope.load\(path, into=model\)"):
        model.save_pretrained(tmp_path)
    tr.unswap(model).save_pretrained(tmp_path)
    assert list(tmp_path.iterdir())


@pytest.mark.parametrize("name", SOME)
def test_extend_by_nothing_changes_nothing(name: str) -> None:
    model = built(name)
    expected = quiet(model, inputs(name))
    assert error(tr.extend(model, 1, method="yarn", train_size=6), inputs(name), expected) < 1e-5


@pytest.mark.parametrize(
    "settings",
    [{"method": "interpolate"}, {"method": "riflex", "train_size": 6}, {"method": "dype", "timestep": 1.0}],
    ids=lambda settings: settings["method"],
)
def test_every_method_extends_a_model_once_swapped_too(settings: dict[str, Any]) -> None:
    model, call = built(FLUX), inputs(FLUX, scale=2)
    plain = quiet(model, call)
    expected = quiet(tr.extend(model, 2, **settings), call)
    assert error(model, call, expected) > 1e-3
    assert error(tr.extend(tr.swap(model, "mixed"), 2, **settings), call, expected) < 1e-5
    assert error(model, call, plain) < 1e-5  # what was extended is a copy


@pytest.mark.parametrize("name", [FLUX, "Flux2Transformer2DModel"])
def test_interpolation_is_the_call_with_coordinates_closer_together(name: str) -> None:
    model, large = built(name), inputs(name, scale=2)
    closer = {**large, "img_ids": large["img_ids"] / 2, "txt_ids": large["txt_ids"] / 2}
    expected = quiet(model, closer)
    assert error(tr.extend(model, 2, method="interpolate"), large, expected) < 1e-5
    assert error(model, large, expected) > 1e-3


def test_ntk_is_what_cosmos_calls_a_rope_scale() -> None:
    scaled, plain = built(COSMOS, rope_scale=(1.0, 2.0, 3.0)), built(COSMOS, rope_scale=(1.0, 1.0, 1.0))
    expected = quiet(scaled, inputs(COSMOS, scale=2))
    assert error(plain, inputs(COSMOS, scale=2), expected) > 1e-3
    assert error(tr.extend(plain, (1, 2, 3), method="ntk"), inputs(COSMOS, scale=2), expected) < 1e-5


def test_yarn_needs_the_size_trained_on_and_multiplies_keys_of_image_and_text() -> None:
    model = built(FLUX)
    with pytest.raises(ValueError, match=r"^yarn needs train_size, .*, got none$"):
        tr.extend(model, 2, method="yarn")
    layer, longer = (
        one.transformer_blocks[0].attn for one in (model, tr.extend(model, 2, method="yarn", train_size=6))
    )
    grown = tr.yarn_temperature(8) ** 2  # 2 along each of three axes
    for norm in ("norm_k", "norm_added_k"):
        torch.testing.assert_close(getattr(longer, norm).weight, grown * getattr(layer, norm).weight)
    assert torch.equal(longer.norm_q.weight, layer.norm_q.weight)


def test_dype_needs_no_copy_of_the_model_for_each_timestep() -> None:
    model = tr.swap(built(FLUX), "mixed")
    large = {**inputs(FLUX, scale=2), "return_dict": False}
    for timestep in (1.0, 0.4, 0.0):
        encodings = {
            f"rotary.encodings.{index}.{name}": value
            for index, encoding in enumerate(model.rotary.encodings)
            for name, value in tr.extend(encoding, 2, method="dype", timestep=timestep).state_dict().items()
        }
        with torch.no_grad():
            found = torch.func.functional_call(model, encodings, (), large)[0]
        whole = tr.extend(model, 2, method="dype", timestep=timestep)
        torch.testing.assert_close(found, quiet(whole, inputs(FLUX, scale=2)))


def test_several_pictures_and_text_behind_them_in_qwen_image() -> None:
    name = "QwenImageTransformer2DModel"
    model, call = built(name), inputs(name)
    call["hidden_states"] = torch.cat([call["hidden_states"], torch.randn(2, 15, 4)], dim=1)
    call["img_shapes"] = [[(1, 6, 4), (1, 3, 5)]] * 2
    expected = quiet(model, call)
    assert error(tr.swap(model, "mixed"), call, expected) < 1e-5


def test_coordinates_of_the_caller_in_ltx_video() -> None:
    name = "LTXVideoTransformer3DModel"
    model, call = built(name), inputs(name)
    call["video_coords"] = torch.rand(2, 3, 48) * torch.tensor([[20.0], [2048.0], [4096.0]])
    expected = quiet(model, call)
    assert error(tr.swap(model, "mixed"), call, expected) < 1e-5


@pytest.mark.parametrize("kind", ["interleaved", "split"])
def test_both_pairings_of_ltx_2(kind: str) -> None:
    name = "LTX2VideoTransformer3DModel"
    model = built(
        name, rope_type=kind, attention_head_dim=20, cross_attention_dim=80
    )  # a ladder that does not fill the heads
    expected = quiet(model, inputs(name))
    assert error(tr.swap(model, "mixed"), inputs(name), expected) < 1e-5


def test_one_encoding_may_serve_all_layers() -> None:
    model = built(FLUX)
    expected = quiet(model, inputs(FLUX))
    tr.swap(model, tr.MixedRoPE(num_axes=3, num_heads=4, head_dim=32), init="own")
    assert error(model, inputs(FLUX), expected) < 1e-5
    assert len(frequencies(model)) == 1


def test_a_fresh_encoding_takes_positions_times_a_spacing() -> None:
    model = built(FLUX)
    with pytest.warns(UserWarning, match="outputs change"):
        plain = tr.swap(copy.deepcopy(model), _drawn, init="zeros")
    with pytest.warns(UserWarning, match="outputs change"):
        closer = tr.swap(model, _drawn, init="zeros", spacing=0.5)
    call = inputs(FLUX)
    halved = {**call, "img_ids": call["img_ids"] / 2}
    assert error(closer, call, quiet(plain, halved)) < 1e-5
    assert error(plain, call, quiet(plain, halved)) > 1e-3


def _drawn(num_axes: int, num_heads: int, head_dim: int) -> tr.Encoding:
    torch.manual_seed(2)
    return tr.MixedRoPE(num_axes=num_axes, num_heads=num_heads, head_dim=head_dim)


def test_positions_are_read_from_cosines_and_sines() -> None:
    torch.manual_seed(3)
    bands = [10000.0 ** -(torch.arange(0, dim, 2).double() / dim) for dim in (16, 24, 4)]
    ladder = torch.block_diag(*bands).unsqueeze(1)
    # Negative ones, fractions, and far ones: half a turn of the slowest pair ends at pi / f.
    positions = (torch.rand(2, 50, 3).double() * 2 - 1) * torch.tensor([9000.0, 9000.0, 300.0])
    angles = positions @ ladder[:, 0]
    read = positions_in((angles.cos().float(), angles.sin().float()), ladder[:, 0].tolist())
    assert read.dtype == torch.float64
    torch.testing.assert_close(read, positions, rtol=0, atol=1e-6)
    none = positions_in((angles[:, :0].cos(), angles[:, :0].sin()), ladder[:, 0].tolist())
    assert none.shape == (2, 0, 3)


def test_positions_of_one_pair_are_read_up_to_half_a_turn() -> None:
    angles = torch.tensor([[-3.0], [0.0], [3.0]], dtype=torch.float64)
    read = positions_in((angles.cos(), angles.sin()), [[2.0]])
    torch.testing.assert_close(read, angles / 2)
    beyond = positions_in(((angles + 2 * math.pi).cos(), (angles + 2 * math.pi).sin()), [[2.0]])
    torch.testing.assert_close(beyond, angles / 2)


class TestRefusals:
    """One line with the reason, in the words of the model."""

    def test_a_transformer_of_another_family_with_the_way_by_hand(self) -> None:
        other = DiTTransformer2DModel(num_attention_heads=2, attention_head_dim=8, num_layers=1, sample_size=8)
        with pytest.raises(ValueError, match=r"^swap knows the rotations of .*set_attn_processor.*got DiTTransformer"):
            tr.swap(other, "mixed")

    def test_a_cogvideox_without_rotation(self) -> None:
        model = built(COGVIDEOX, use_rotary_positional_embeddings=False)
        with pytest.raises(ValueError, match=r"got use_rotary_positional_embeddings=False$"):
            tr.swap(model, "mixed")

    def test_a_cogvideox_called_without_its_table(self) -> None:
        model = tr.swap(built(COGVIDEOX), "mixed")
        call = {name: value for name, value in inputs(COGVIDEOX).items() if name != "image_rotary_emb"}
        with pytest.raises(ValueError, match=r"image_rotary_emb=\(cos, sin\), .*got none$"):
            output(model, call)

    def test_a_table_of_other_frequencies(self) -> None:
        model = tr.swap(built(COGVIDEOX), "mixed")
        table = get_3d_rotary_pos_embed(32, ((0, 0), (6, 4)), (6, 4), temporal_size=2, theta=100)
        with pytest.raises(ValueError, match=r"^image_rotary_emb must be a table .* of theta 10000, got one of other"):
            output(model, {**inputs(COGVIDEOX), "image_rotary_emb": table})

    def test_a_rotation_beside(self) -> None:
        with pytest.raises(ValueError, match=r"has one rotation: .*, got keep_rotation=True$"):
            tr.swap(built(FLUX), "mixed", keep_rotation=True)

    def test_an_ip_adapter(self) -> None:
        model = tr.swap(built(FLUX), "mixed")
        layer = model.transformer_blocks[0].attn
        with pytest.raises(ValueError, match=re.escape("unload the adapter, got ip_hidden_states")):
            layer(torch.randn(1, 4, 128), ip_hidden_states=[torch.randn(1, 2, 24)])

    def test_a_layer_called_alone(self) -> None:
        model = tr.swap(built(FLUX), "mixed")
        with pytest.raises(ValueError, match=r"^positions come with the call .* got a FluxAttention alone$"):
            model.single_transformer_blocks[0].attn(torch.randn(1, 4, 128))

    def test_layers_without_norms(self) -> None:
        model = built("HunyuanVideoTransformer3DModel", qk_norm=None)
        with pytest.raises(ValueError, match=r"with qk_norm, got a Attention without norm_q$"):
            tr.swap(model, "mixed")

    def test_a_family_that_cannot_represent_heads_that_differ(self) -> None:
        model = built("LTXVideoTransformer3DModel", attention_head_dim=24, cross_attention_dim=96)
        expected = quiet(model, inputs("LTXVideoTransformer3DModel"))
        with pytest.raises(ValueError, match=r"^init='own' needs a family that can represent the model's rotation"):
            tr.swap(model, "axial", init="own")
        assert torch.equal(quiet(model, inputs("LTXVideoTransformer3DModel")), expected)
