"""Transformers of diffusers: the outputs after a swap, gradients to frequencies, larger inputs, and the way back.

The oracle is the model itself: its outputs before, or with positions and tables that diffusers makes of other settings.
"""

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import torchrope as tr

pytest.importorskip("diffusers")
from diffusers import DiTTransformer2DModel
from diffusers.models.embeddings import get_3d_rotary_pos_embed
from diffusing import CASES, Inputs, built, inputs, output

from torchrope.integrations.families.diffusers import positions_of

SIZES = {
    **dict.fromkeys(("flux", "flux2", "qwen"), (3, 6)),
    **dict.fromkeys(("wan", "hunyuan", "cogvideox", "cosmos"), (2, 4, 12)),
    **dict.fromkeys(("ltx", "ltx2"), (3, 2, 4)),
    "lumina2": (8, 4),
}
OTHERS = ("string:4", "liere:4", "comrope-ld:2")


def error(came: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the spread of the outputs."""
    return float((came - expected).detach().abs().max() / expected.detach().std())


def learned(model: Any) -> list[Tensor]:
    return [parameter for name, parameter in model.named_parameters() if name.startswith("rotary.")]


def without_rotation(model: Any) -> Any:
    with pytest.warns(UserWarning, match="outputs change"):
        return tr.swap(copy.deepcopy(model), "mixed", init="zeros")


@pytest.mark.parametrize("name", CASES)
def test_outputs_stay_and_frequencies_of_every_layer_and_head_learn(name: str) -> None:
    model, given = built(name), inputs(name)
    expected = output(model, given)
    assert error(output(without_rotation(model), given), expected) > 0.1
    assert tr.swap(model, "mixed") is model
    came = output(model, given)
    assert error(came, expected) < 1e-5
    came.square().sum().backward()
    frequencies = learned(model)
    assert len(frequencies) == sum(isinstance(part, tr.MixedRoPE) for part in model.modules()) >= 2
    for of_layer in frequencies:
        assert of_layer.grad is not None
        assert of_layer.grad.abs().sum(dim=(0, 2)).all()  # each head's


@pytest.mark.parametrize("encoding", OTHERS)
@pytest.mark.parametrize(
    "name", ["flux", "hunyuan", "cosmos", *(pytest.param(n, marks=pytest.mark.slow) for n in CASES)]
)
def test_other_families_represent_the_rotation_too(name: str, encoding: str) -> None:
    model, given = built(name), inputs(name)
    expected = output(model, given)
    tr.swap(model, encoding, init="model")
    came = output(model, given)
    if encoding == "liere:4" and name.startswith("ltx"):  # float32 rounds the exponential at its 15,708 radians
        assert (came - expected).abs().max() < 1e-4 * expected.abs().max()
    else:
        assert error(came, expected) < 1e-5
    came.square().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in learned(model))


def test_pairs_that_are_dealt_to_axes_reorder_text_and_image_alike() -> None:
    for name, settings in (("flux", {"axes_dims_rope": (8, 8, 8)}), ("hunyuan", {"rope_axes_dim": (8, 8, 8)})):
        model, given = built(name, attention_head_dim=24, **settings), inputs(name)
        expected = output(model, given)
        tr.swap(model, "comrope-ap:4")
        assert model.rotary.channels[0] is not None
        assert error(output(model, given), expected) < 1e-5


@pytest.mark.parametrize("name", CASES)
def test_other_sizes_are_those_of_the_model_and_unswap_gives_it_back_to_the_bit(name: str) -> None:
    model = built(name)
    wide = inputs(name, *SIZES[name])
    expected, before = output(model, wide), copy.deepcopy(model.state_dict())
    tr.swap(model, "comrope-ld:2")
    assert error(output(model, wide), expected) < 1e-5
    assert tr.unswap(model) is model
    assert torch.equal(output(model, wide), expected)
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(value, before[key]) for key, value in after.items())


def test_norm_with_a_hook_of_the_user_is_called_and_then_rotated() -> None:
    model, given = tr.swap(built("flux"), "mixed"), inputs("flux")
    seen = []
    expected = output(model, given)
    norm = model.transformer_blocks[0].attn.norm_q
    norm.register_forward_hook(lambda module, args, x: seen.append(x.shape))
    assert error(output(model, given), expected) < 1e-5
    assert len(seen) == 1


def test_encoding_shared_by_all_layers_learns_once() -> None:
    model, given = built("qwen"), inputs("qwen")
    expected = output(model, given)
    tr.swap(model, tr.MixedRoPE(num_axes=3, num_heads=1, head_dim=16), init="model")
    assert error(output(model, given), expected) < 1e-5
    assert len(learned(model)) == 1


def test_layered_pictures_of_qwen_and_videos_of_wan_that_start_from_an_image() -> None:
    layered = {**inputs("qwen"), "img_shapes": [[(1, 4, 5), (1, 2, 3)]]}
    model = built("qwen", use_layer3d_rope=True)
    expected = output(model, layered)
    assert error(output(tr.swap(model, "mixed"), layered), expected) < 1e-5
    started = {**inputs("wan"), "encoder_hidden_states_image": torch.randn(1, 2, 8)}
    started["encoder_hidden_states"] = torch.randn(1, 512, 8)  # the length that Wan knows its text by
    model = built("wan", image_dim=8, added_kv_proj_dim=32)
    expected = output(model, started)
    assert error(output(tr.swap(model, "mixed"), started), expected) < 1e-5


def test_ltx2_pairs_channels_across_halves_too() -> None:
    model, given = built("ltx2", rope_type="split"), inputs("ltx2")
    expected = output(model, given)
    tr.swap(model, "mixed")
    assert model.rotary.channels[0] is not None
    assert error(output(model, given), expected) < 1e-5


def test_ltx_places_videos_by_itself_and_angles_are_rounded_as_its_own() -> None:
    """Its tables round angles of up to 15,708 radians to float32, by up to 5e-4; elsewhere inputs have exact angles."""
    for name, scale in (("ltx", {"rope_interpolation_scale": (8 / 25, 32, 32)}), ("ltx2", {})):
        given = {key: value for key, value in inputs(name).items() if key != "video_coords"} | scale
        model = built(name)
        expected = output(model, given)
        tr.swap(model, "mixed")
        assert error(output(model, given), expected) < 1e-5


def test_frequencies_count_in_the_units_of_the_model() -> None:
    """Half the frequency is half the position, as ids say it."""
    model, given = built("flux"), inputs("flux")
    squeezed = {**given, "img_ids": given["img_ids"] / 2}
    expected = output(model, squeezed)
    assert error(output(model, given), expected) > 0.05
    assert error(output(tr.extend(model, 2, method="interpolate"), given), expected) < 1e-5
    assert error(output(tr.extend(tr.swap(model, "mixed"), (1, 2, 2), method="interpolate"), given), expected) < 1e-5


def test_ntk_is_the_scaling_of_cosmos_itself() -> None:
    given = inputs("cosmos")
    expected = output(built("cosmos", rope_scale=(2.0, 3.0, 1.5)), given)
    plain = built("cosmos", rope_scale=(1.0, 1.0, 1.0))
    assert error(output(plain, given), expected) > 5e-3
    assert error(output(tr.extend(plain, (2, 3, 1.5), method="ntk"), given), expected) < 1e-5


def test_extend_copies_and_leaves_what_it_was_given() -> None:
    model, given = built("wan"), inputs("wan", 3, 12, 16)
    expected = output(model, given)
    for method in ("interpolate", "ntk"):
        assert error(output(tr.extend(model, 1, method=method), given), expected) < 1e-5
    larger = tr.extend(model, (1, 2, 2), method="yarn", train_size=(3, 3, 4))
    assert error(output(larger, given), expected) > 1e-2
    assert torch.equal(output(model, given), expected)
    assert not hasattr(model, "rotary")


@pytest.mark.parametrize("name", ["flux", "wan"])
def test_yarn_multiplies_the_keys_of_both_streams(name: str) -> None:
    model, given = tr.swap(built(name), "mixed"), inputs(name)
    yarn = partial(tr.scaling.yarn, train_size=4)
    by_hand = tr.extend(model, (1, 2, 2), method=yarn)
    with torch.no_grad():
        for part, norm in by_hand.named_modules():
            if part.endswith(("norm_k", "norm_added_k")) and "attn2" not in part:
                norm.weight *= tr.scaling.yarn_temperature((1, 2, 2)) ** 2
    expected = output(by_hand, given)
    assert error(output(tr.extend(model, (1, 2, 2), method="yarn", train_size=4), given), expected) < 1e-6
    with pytest.raises(ValueError, match=r"^yarn requires train_size= \(.*\)"):
        tr.extend(model, 2, method="yarn")


@pytest.mark.parametrize("name", ["qwen", "cogvideox"])
def test_saved_and_loaded_into_a_model_built_the_same_way(name: str, tmp_path: Path) -> None:
    model, given = tr.swap(built(name), "liere:4"), inputs(name)
    with torch.no_grad():
        for parameter in learned(model):
            parameter.add_(0.1 * torch.randn_like(parameter))
    expected = output(model, given)
    tr.save(model, tmp_path / "model.safetensors")
    again = tr.load(tmp_path / "model.safetensors", into=CASES[name][0]().eval())
    assert torch.equal(output(again, given), expected)
    with pytest.raises(ValueError, match=r"^a swapped model must be saved by torchrope.save .*, got save_pretrained"):
        model.save_pretrained(tmp_path / "folder")
    tr.unswap(model).save_pretrained(tmp_path / "folder")
    with pytest.raises(ValueError, match=r"^save supports ViT, Swin, Transformer, Features and swapped models, got "):
        tr.save(model, tmp_path / "plain.safetensors")


@pytest.mark.parametrize("grid_type", ["linspace", "slice"])
def test_positions_of_cogvideox_come_out_of_its_tables(grid_type: str) -> None:
    for head_dim, sizes, frames in ((64, (30, 45), 2), (16, (4, 3), 2), (64, (2, 170), 49)):
        extent = ((0, 1), (30.0, 45.5)) if grid_type == "linspace" else None
        tables = get_3d_rotary_pos_embed(head_dim, extent, sizes, frames, grid_type=grid_type, max_size=sizes)
        spacing, origin = (1.0, 1.0, 1.0), (0.0, 0.0, 0.0)
        if extent is not None:
            (_, start), (rows, columns) = extent
            last = columns * (sizes[1] - 1) / sizes[1]
            spacing = (1.0, rows / sizes[0], (last - start) / (sizes[1] - 1))
            origin = (0.0, 0.0, float(start))
        expected = tr.grid(frames, *sizes, spacing=spacing, origin=origin)
        assert (positions_of(*tables) - expected).abs().max() < 2e-5


def test_fresh_encoding_takes_positions_times_a_spacing() -> None:
    def drawn(num_axes: int, num_heads: int, head_dim: int) -> tr.Encoding:
        torch.manual_seed(2)
        return tr.MixedRoPE(num_axes=num_axes, num_heads=num_heads, head_dim=head_dim)

    model, given = built("flux"), inputs("flux")
    squeezed = {**given, "img_ids": given["img_ids"] / 2}
    with pytest.warns(UserWarning, match="outputs change"):
        plain = tr.swap(copy.deepcopy(model), drawn, init="zeros")
    with pytest.warns(UserWarning, match="outputs change"):
        closer = tr.swap(model, drawn, init="zeros", spacing=0.5)
    expected = output(plain, squeezed)
    assert error(output(plain, given), expected) > 1e-3
    assert error(output(closer, given), expected) < 1e-5


def test_another_transformer_is_refused_with_the_way_by_hand() -> None:
    other = DiTTransformer2DModel(num_attention_heads=2, attention_head_dim=8, num_layers=1, sample_size=8)
    message = r"^swap supports these transformers of diffusers: .*set_attn_processor.*got DiTTransformer2DM"
    with pytest.raises(ValueError, match=message):
        tr.swap(other, "mixed")


class _IPAdapter:
    to_k_ip = ()


def _refused() -> list[tuple[str, Inputs, dict[str, Any], str]]:
    return [
        ("flux", {}, {"keep_rotation": True}, r"^keep_rotation must be False for a FluxTransformer2DModel"),
        ("flux", {}, {"spacing": 2.0, "init": "model"}, r"^init='model' keeps the model's positions"),
        ("cogvideox", {"use_rotary_positional_embeddings": False}, {}, r"^swap needs a CogVideoX with rotary"),
        ("cogvideox", {"attention_head_dim": 8}, {}, r"^head_dim of a CogVideoX must be 16"),
    ]


@pytest.mark.parametrize(("name", "settings", "choices", "line"), _refused())
def test_refused_models_raise_one_line_with_the_reason(name: str, settings: Any, choices: Any, line: str) -> None:
    model = CASES[name][0](**settings)
    with pytest.raises(ValueError, match=line) as caught:
        tr.swap(model, "mixed", **choices)
    assert "\n" not in str(caught.value)
    assert not hasattr(model, "rotary")


def test_ip_adapter_and_missing_tables_are_refused() -> None:
    model = built("flux")
    model.transformer_blocks[0].attn.processor = _IPAdapter()
    with pytest.raises(ValueError, match=r"^swap rotates q after its norm, but an IP-Adapter needs it unrotated"):
        tr.swap(model, "mixed")
    model = tr.swap(built("cogvideox"), "mixed")
    with pytest.raises(ValueError, match=r"^image_rotary_emb must be the tables"):
        output(model, {**inputs("cogvideox"), "image_rotary_emb": None})
    model = built("wan")
    model.rope = type(model.rope)(16, (1, 2, 2), 1024, theta=100.0)
    with pytest.raises(ValueError, match=r"^init='model' needs a Wan whose theta is 10000"):
        tr.swap(model, "mixed")
