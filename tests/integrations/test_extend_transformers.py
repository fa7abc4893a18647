"""Models of transformers that rotate, copied for larger inputs; the oracle is transformers' own scaling."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from plain_towers import TOWERS as PLAIN
from rotating import SHARED, error, llava, outputs, qwen2_5_vl, text, tokens, tower
from torch import Tensor

import torchrope as tr

BASE = dict(rope_type="default", rope_theta=100.0)
VIT: dict[str, Any] = dict(patch_size=4, dim=32, depth=2, num_heads=2, encoding="mixed")
OFTEN = ("qwen2_5_vl", "exaone4_5", "glm_ocr", "pixtral")  # fused, with fewer keys, with norms, with linear layers
TOWERS = [pytest.param(name, marks=() if name in OFTEN else pytest.mark.slow) for name in (*SHARED, "pixtral")]


def decoder(rope: dict[str, Any], name: str = "LlamaForCausalLM", **settings: Any) -> Any:
    return text(name, max_position_embeddings=1024, rope_parameters=rope, **settings)


@pytest.mark.parametrize("method", ["interpolate", "ntk", "yarn"])
@pytest.mark.parametrize("name", ["qwen2_5_vl", "pixtral"])
def test_tower_keeps_its_outputs_at_factor_one_and_not_at_two(name: str, method: str) -> None:
    model, images = tower(name)
    expected = outputs(model, images)
    assert error(outputs(tr.extend(model, 1, method=method), images), expected) < 1e-5
    settings: dict[str, Any] = {"method": method} | ({"train_size": 4} if method == "yarn" else {})
    larger = outputs(tr.extend(model, 2, **settings), images)
    assert error(larger, expected) > 1e-3
    swapped = tr.swap(copy.deepcopy(model), "mixed")
    assert torch.equal(outputs(tr.extend(swapped, 2, **settings), images), larger)
    assert torch.equal(outputs(model, images), expected)


def test_interpolated_tower_sees_positions_closer_together() -> None:
    model, images = tower("qwen2_vl")
    larger = tr.extend(model, (2, 4), method="interpolate")
    closer = tr.swap(copy.deepcopy(model), "mixed")
    for index, lattice in enumerate(closer.rotary.lattices):
        closer.rotary.lattices[index] = type(lattice)(spacing=(1 / 2, 1 / 4))
    assert error(outputs(larger, images), outputs(closer, images)) < 1e-5


@pytest.mark.parametrize("name", TOWERS)
def test_yarn_scales_scores_by_the_square_of_its_temperature(name: str) -> None:
    model, images = tower(name)
    factors = (1, 2, 2) if name == "minimax_m3_vl" else 2
    came = outputs(tr.extend(model, factors, method="yarn", train_size=8), images)
    scaled = tr.extend(model, factors, method=partial(tr.scaling.yarn, train_size=8))
    scale_scores(scaled, tr.scaling.yarn_temperature((2, 2)) ** 2)
    assert error(came, outputs(scaled, images)) < 1e-5


@pytest.mark.parametrize("name", ["Phi3ForCausalLM", "PhiForCausalLM", "GlmForCausalLM"])
def test_yarn_scales_scores_of_decoders_too(name: str) -> None:
    model, words = text(name), tokens()
    scaled = tr.extend(model, 4, method=partial(tr.scaling.yarn, train_size=64))
    scale_scores(scaled, tr.scaling.yarn_temperature(4) ** 2)
    assert error(tr.extend(model, 4, method="yarn")(words).logits, scaled(words).logits) < 1e-5


@pytest.mark.parametrize("name", sorted(set(PLAIN) - {"sam", "sam_hq", "vjepa2", "videomae-masked"}))
def test_yarn_scales_scores_of_swapped_towers_that_do_not_rotate(name: str) -> None:
    given = PLAIN[name]()
    model = tr.swap(given.model, "mixed", init="paper")
    scaled = tr.extend(model, 2, method=partial(tr.scaling.yarn, train_size=8))
    scale_scores(scaled, tr.scaling.yarn_temperature((2,) * given.indices.shape[-1]) ** 2)
    came = outputs(tr.extend(model, 2, method="yarn", train_size=8), given.given)
    assert error(came, outputs(scaled, given.given)) < 1e-5


@pytest.mark.parametrize(
    "name", ["LlamaForCausalLM", "Qwen3ForCausalLM", pytest.param("Olmo2ForCausalLM", marks=pytest.mark.slow)]
)
def test_yarn_of_a_decoder_is_that_of_transformers(name: str) -> None:
    rope = dict(rope_theta=100.0, factor=4.0, original_max_position_embeddings=1024, truncate=False)
    settings: dict[str, Any] = dict(head_dim=16) if name == "Qwen3ForCausalLM" else {}
    model, words = decoder(BASE, name, **settings), tokens(1, 40)
    theirs = decoder({**rope, "rope_type": "yarn"}, name, **settings)
    theirs.load_state_dict(model.state_dict())
    ours = tr.extend(model, 4, method="yarn")
    assert error(ours(words).logits, theirs(words).logits) < 1e-5
    assert error(ours(words).logits, model(words).logits) > 0.05
    assert torch.equal(said(ours, words), said(theirs, words))


def test_interpolation_of_a_decoder_is_that_of_transformers() -> None:
    model, words = decoder(BASE), tokens(1, 40)
    theirs = decoder(dict(rope_type="linear", rope_theta=100.0, factor=2.0))
    assert error(tr.extend(model, 2, method="interpolate")(words).logits, theirs(words).logits) < 1e-5


def test_ntk_of_a_decoder_is_a_larger_base() -> None:
    model, words = decoder(BASE), tokens(1, 40)
    theirs = decoder({**BASE, "rope_theta": 100.0 * 4 ** (16 / 14)})
    assert error(tr.extend(model, 4)(words).logits, theirs(words).logits) < 1e-5


LOCAL: dict[str, Any] = dict(layer_types=["sliding_attention", "full_attention"], sliding_window=16, head_dim=16)


@pytest.mark.parametrize("name", ["Gemma3ForCausalLM", "ModernBertForMaskedLM"])
def test_layers_that_see_a_window_are_not_extended_as_by_rope_parameters_of_layer_types(name: str) -> None:
    linear = dict(rope_type="linear", rope_theta=100.0, factor=4.0)
    settings = {**LOCAL, "cls_token_id": 1, "sep_token_id": 2}
    model = decoder({"sliding_attention": BASE, "full_attention": BASE}, name, **settings)
    theirs = decoder({"sliding_attention": BASE, "full_attention": linear}, name, **settings)
    theirs.load_state_dict(model.state_dict())
    words = tokens(1, 40)
    ours = tr.extend(model, 4, method="interpolate")
    assert error(ours(words).logits, theirs(words).logits) < 1e-5
    assert error(ours(words).logits, model(words).logits) > 0.01


@pytest.mark.parametrize(
    ("build", "amounts"),
    [
        (lambda: text("Gemma2ForCausalLM", **LOCAL), [1, 4]),
        (lambda: text("Olmo3ForCausalLM", **LOCAL), [1, 4]),
        (lambda: text("Exaone4ForCausalLM", **LOCAL), [1]),
        (lambda: text("MistralForCausalLM", sliding_window=64 + 1), [4, 4]),  # of more than the trained length
        (lambda: tower("qwen2_5_vl")[0], [1, 4]),
        (lambda: tr.Features(tr.ViT((32, 32), **VIT), window_size=2, global_layers=[2]), [1, 4]),
    ],
)
def test_layers_whose_reach_does_not_grow_keep_their_frequencies(build: Any, amounts: list[int]) -> None:
    model = build()
    if amounts == [1]:
        with pytest.raises(ValueError, match=r"whose input size or windows are fixed$"):
            tr.extend(model, 4, method="interpolate")
        return
    larger = tr.extend(model, 4, method="interpolate")
    if not any(isinstance(part, tr.encodings.Encoding) for part in model.modules()):
        tr.swap(model, "mixed")
    before, after = ([e for e in m.modules() if isinstance(e, tr.encodings.Encoding)] for m in (model, larger))
    for encoding, extended, amount in zip(before, after, amounts, strict=True):
        assert torch.allclose(extended.frequencies * amount, encoding.frequencies)


def test_extend_of_a_model_extends_its_swapped_part() -> None:
    model, given = qwen2_5_vl()
    expected = model(**given).logits
    with pytest.raises(ValueError, match=r"pass model\.model\.language_model or model\.model\.visual, got Qwen2_5_VL"):
        tr.extend(model, 1)
    of_image = copy.deepcopy(model)
    of_image.model.visual = tr.extend(model.model.visual, 1)
    assert of_image.model.visual.rotary.encodings[0].num_axes == 2
    assert error(of_image(**given).logits, expected) < 1e-5
    tr.swap(model.model.language_model, "mixed")
    larger = tr.extend(model, 4, method="yarn")
    assert not hasattr(larger.model.visual, "rotary")
    keys, before = (one.model.language_model.layers[0].self_attn.k_proj.weight for one in (larger, model))
    assert torch.allclose(
        keys, before * tr.scaling.yarn_temperature(4) ** 2
    )  # the three positions of a word grow together
    tr.swap(model, "mixed")
    with pytest.raises(
        ValueError, match=r"^all encodings must have the same number of axes; .* with encodings of 2 and 3"
    ):
        tr.extend(model, 2)


@pytest.mark.parametrize("name", ["llama4", "sam3"])
def test_tower_of_one_size_is_refused(name: str) -> None:
    model, _ = tower(name)
    with pytest.raises(ValueError, match=r"^model must support inputs of several sizes, got \w+, whose input size"):
        tr.extend(model, 2)


def test_extended_whole_model_generates() -> None:
    larger, given = llava()
    larger.model.language_model = tr.extend(larger.model.language_model, 2, method="yarn")
    assert larger.generate(**given, max_new_tokens=4, do_sample=False).shape[1] == given["input_ids"].shape[1] + 4


def scale_scores(model: Any, amount: float) -> None:
    """Multiply the scores of all attention layers that see more of a larger input."""
    full, types = getattr(model, "fullatt_block_indexes", range(2)), getattr(model.config, "layer_types", None) or "--"
    windows = [str(index) for index in range(2) if index not in full or types[index] == "window_attention"]
    for part, layer in model.named_modules():
        for name in ("scale", "scaling"):
            if isinstance(getattr(layer, name, None), float) and not set(windows) & set(part.split(".")):
                setattr(layer, name, getattr(layer, name) * amount)


def said(model: Any, words: Tensor) -> Tensor:
    """The words that a model goes on with."""
    generated: Tensor = model.generate(words, max_new_tokens=6, do_sample=False)
    return generated
