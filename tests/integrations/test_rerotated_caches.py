"""Tests of `rerotate` on the cache of a swapped text model: evicted tokens leave a cache as if they had never been."""

import pytest
import torch

import torchrope as tr

transformers = pytest.importorskip("transformers")

SINKS, DROPPED, TOTAL = 2, 5, 12


def small(**settings: object) -> torch.nn.Module:
    """One layer, whose keys depend on their own tokens alone."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 20}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(**sizes, **heads, initializer_range=0.5, **settings)
    return transformers.LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("encoding", ["axial", "mixed"])
@torch.no_grad()
def test_next_token_is_that_of_the_model_without_the_evicted_tokens(encoding: str) -> None:
    ids = torch.randint(0, 20, (2, TOTAL + 1), generator=torch.Generator().manual_seed(1))
    kept = [*range(SINKS), *range(SINKS + DROPPED, TOTAL)]
    plain = small()
    expected = plain(ids[:, [*kept, TOTAL]]).logits[:, -1]
    unmoved = plain(ids).logits[:, -1]
    model = tr.swap(plain, encoding)
    cache = model(ids[:, :TOTAL], use_cache=True).past_key_values
    for layer, rotary in zip(cache.layers, model.model.rotary.encodings, strict=True):
        order, back = model.model.rotary.orders(0, ids.device) or (torch.arange(8),) * 2
        recent = tr.rerotate(layer.keys[:, :, SINKS + DROPPED :, order], rotary, -DROPPED)[..., back]
        layer.keys = torch.cat([layer.keys[:, :, :SINKS], recent], dim=2)
        layer.values = layer.values[:, :, kept]
    place = torch.full((2, 1), len(kept))
    logits = model(ids[:, TOTAL:], past_key_values=cache, position_ids=place).logits[:, -1]
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
    assert (logits - unmoved).abs().max() > 1e-2


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_frequencies_that_depend_on_the_length_are_refused(rope_type: str) -> None:
    scaled = {"rope_theta": 1e4, "rope_type": rope_type, "factor": 2.0}
    lists = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4} if rope_type == "longrope" else {}
    model = small(rope_parameters={**scaled, **lists, "original_max_position_embeddings": 64})
    with pytest.raises(ValueError, match="frequencies that are the same at all lengths"):
        tr.swap(model, "mixed")
    with pytest.raises(ValueError, match="for a model of another library call swap, got LlamaRotaryEmbedding"):
        tr.rerotate(torch.zeros(1, 2, 3, 8), model.model.rotary_emb, -1)
