"""Text decoders of transformers as one axis: the same logits and the same words after a swap, with a cache of keys."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from rotating import DECODERS, TEXT, decoder, error, hunyuan_vl, learned, qwen2_5_vl, text, tokens
from torch import Tensor

import torchrope as tr

OFTEN = ("llama", "qwen3", "phi", "glm4", "llama3", "Gemma3", "GPTNeoX", "SmolLM3")


def words_of(model: Any, words: Tensor, **settings: Any) -> Tensor:
    generated: Tensor = model.generate(words, max_new_tokens=10, do_sample=False, **settings)
    return generated


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in OFTEN else pytest.mark.slow) for name in DECODERS]
)
def test_logits_and_words_are_those_of_before_and_frequencies_learn(name: str) -> None:
    model, words = decoder(name), tokens()
    expected, said = model(words).logits, words_of(model, words)
    with pytest.warns(UserWarning, match="^outputs change, "):
        still = tr.swap(copy.deepcopy(model), "mixed", init="zeros")
    assert error(still(words).logits, expected) > 0.05
    assert torch.equal(tr.swap(model, "mixed", keep_rotation=True)(words).logits, expected)
    tr.swap(tr.unswap(model), "mixed")
    assert error(model(words).logits, expected) < 1e-5
    assert torch.equal(words_of(model, words), said)
    model(words).logits.square().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in learned(model))
    assert torch.equal(tr.unswap(model)(words).logits, expected)


def test_words_padded_in_front_and_a_static_cache() -> None:
    model, words = decoder("qwen3"), tokens(2, 9)
    mask = torch.ones_like(words)
    mask[0, :3] = 0
    said = words_of(model, words, attention_mask=mask)
    tr.swap(model, "mixed")
    assert torch.equal(words_of(model, words, attention_mask=mask), said)
    static = words_of(model, words, attention_mask=mask, cache_implementation="static", disable_compile=True)
    assert torch.equal(static, said)


@pytest.mark.parametrize("name", ["eager_attention_forward", "apply_rotary_pos_emb"])
def test_function_that_is_patched_in_the_models_module_after_the_swap_is_called(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, words = decoder("llama", attn_implementation="eager"), tokens()
    module = transformers.models.llama.modeling_llama
    tr.swap(model, "mixed", keep_rotation=True)
    expected, called, before = model(words).logits, [], getattr(module, name)

    def patched(*args: Any, **kwargs: Any) -> Any:
        called.append(name)
        return before(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(module, name, patched)
        assert torch.equal(model(words).logits, expected)
    assert len(called) == model.config.num_hidden_layers
    assert torch.equal(model(words).logits, expected)
    assert len(called) == model.config.num_hidden_layers


def test_text_of_qwen_vl_has_three_axes() -> None:
    model, given = qwen2_5_vl()
    expected, said = model(**given).logits, model.generate(**given, max_new_tokens=6, do_sample=False)
    tr.swap(model.model.language_model, "mixed")
    assert model.model.language_model.rotary.encodings[0].num_axes == 3
    assert error(model(**given).logits, expected) < 1e-5
    assert torch.equal(model.generate(**given, max_new_tokens=6, do_sample=False), said)


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        (dict(rope_type="yarn", factor=2.0), "rope_type='yarn' also scales q and k; .*attention_scaling=1.06931$"),
        (dict(rope_type="dynamic", factor=2.0), "same at all lengths; .*, got LlamaModel with rope_type='dynamic'$"),
    ],
)
def test_rope_that_is_no_fixed_rotation_is_refused_and_may_be_replaced(rope: dict[str, Any], message: str) -> None:
    model, words = decoder("llama", rope_parameters=dict(rope_theta=1e2, **rope)), tokens()
    expected = model(words).logits
    with pytest.raises(ValueError, match=rf"^init='model' needs .*{message}"):
        tr.swap(model, "mixed")
    assert torch.equal(model(words).logits, expected)
    with pytest.warns(UserWarning, match="^outputs change, "):
        tr.swap(model, "mixed", init="zeros")
    assert torch.equal(tr.unswap(model)(words).logits, expected)


def test_layers_of_two_kinds_go_on_from_frequencies_of_their_own() -> None:
    model = tr.swap(decoder("Gemma3"), "mixed").model
    local, whole = (encoding.frequencies.flatten() for encoding in model.rotary.encodings)
    assert torch.equal(local, model.rotary_emb.sliding_attention_inv_freq)
    assert torch.equal(whole, model.rotary_emb.full_attention_inv_freq)
    assert not torch.equal(local, whole)


def test_decoders_are_saved_and_loaded_into_one_built_the_same_way(tmp_path: Path) -> None:
    model, words = tr.swap(decoder("qwen3"), "string:8"), tokens()
    with torch.no_grad():
        for parameter in learned(model):
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.save_pretrained(tmp_path)
    again = tr.load(tmp_path, into=decoder("qwen3"))
    assert torch.equal(again(words).logits, model(words).logits)
    assert torch.equal(words_of(copy.deepcopy(again), words), words_of(model, words))


@pytest.mark.parametrize(("name", "layer"), [("DeepseekV3", "DeepseekV3Attention"), ("Llama4", "Llama4TextAttention")])
def test_attention_with_another_rotation_is_rejected_with_the_manual_way(name: str, layer: str) -> None:
    experts = dict(num_local_experts=2, n_routed_experts=2, num_experts_per_tok=1, n_group=1, topk_group=1)
    heads = dict(q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=16)
    message = (
        rf"^swap needs attention that rotates q and k by positions, but {layer} does not rotate q and k by one "
        rf"function of q, k, cos and sin; torchrope\.rotate\(q, k, rotation, key_rotation=\.\.\.\) in a {layer} "
        rf"of your own takes any positions, got {name}ForCausalLM$"
    )
    with pytest.raises(ValueError, match=message):
        tr.swap(text(f"{name}ForCausalLM", **experts, **(heads if name == "DeepseekV3" else {})), "mixed")


def test_model_with_a_vision_tower_that_does_not_rotate_has_that_one_swapped() -> None:
    vision = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2)
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**vision, image_size=32, patch_size=8),
        text_config=transformers.LlamaConfig(**TEXT),
        image_token_index=49,
    )
    model = tr.swap(transformers.LlavaForConditionalGeneration(config), "mixed")
    assert [name for name, part in model.named_modules() if name.endswith(".rotary")] == ["model.vision_tower.rotary"]


def test_two_axes_first_in_an_encoder_are_refused() -> None:
    settings = dict(num_hidden_layers=2, layer_types=["full_attention"] * 2, per_layer_config=None, head_dim=16)
    model = transformers.NeoMMEModel(transformers.NeoMMEModel.config_class(**{**TEXT, **settings}))
    with pytest.warns(UserWarning, match="^outputs change, "):
        tr.swap(model, "mixed", init="zeros")
    with pytest.raises(ValueError, match=r"needs position_ids \(tokens, axes\) of 2 axes, got \(2, 1, 9\) in NeoMME"):
        model(tokens(1, 9))


def test_four_axes_of_positions() -> None:
    model, words, four = hunyuan_vl(), tokens(1, 12), tr.grid(2, 2, 3, 1).long().T.unsqueeze(1)
    with pytest.raises(ValueError, match=r"^init='model' reads rotations of pairs of channels by positions"):
        tr.swap(model, "mixed")
    with pytest.warns(UserWarning, match="^outputs change, "):
        tr.swap(model, "mixed", init="zeros")
    still = model(words, position_ids=four)[0]
    with torch.no_grad():
        model.rotary.encodings[0].frequencies[2] = 0.5
    assert torch.equal(
        model(words, position_ids=four + torch.tensor([1, 1, 0, 1]).view(4, 1, 1))[0],
        model(words, position_ids=four)[0],
    )
    assert error(model(words, position_ids=four)[0], still) > 0.05
