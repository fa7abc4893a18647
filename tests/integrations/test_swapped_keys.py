"""Keys leave a swapped model as R k in its own order of channels, and positions end with the forward."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from rotating import DECODERS, decoder, error, learned, tokens
from swapped import images, made, strong
from torch import Tensor, nn

import torchrope as tr

pytestmark = pytest.mark.filterwarnings("ignore:outputs change:UserWarning")
WIDE = torch.randn(1, 3, 64, 64)
BLOCKS = ("liere:4", "comrope-ld:4", "string")
ORDERS = ("llama", "phi", "cohere", "glm4", "GPTNeoX", "qwen3")  # halves, neighbours, a part of the channels
CASES = [
    *(pytest.param(name, "mixed", marks=() if name in ORDERS else pytest.mark.slow) for name in DECODERS),
    *(pytest.param(name, one, marks=pytest.mark.slow) for name in ORDERS[1:] for one in BLOCKS),
    *(("llama", one) for one in (*BLOCKS, "axial", "comrope-ap:4")),
]


def rotary_of(model: Any) -> Any:
    return next(part for part in model.modules() if type(part).__name__ == "Rotary")


def changed(model: Any, by: float = 0.1) -> Any:
    """The model with encodings that have learned."""
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in learned(model):
            parameter.add_(torch.randn_like(parameter), alpha=by)
    return model


def inherited(name: str, encoding: str) -> tuple[Any, Any]:
    """A model, and the same one swapped to an encoding that goes on from its rotation."""
    plain = decoder(name)
    return plain, tr.swap(copy.deepcopy(plain), encoding)


@torch.no_grad()
@pytest.mark.parametrize(("name", "encoding"), CASES)
def test_caches_are_those_of_the_model_before_its_swap(name: str, encoding: str) -> None:
    plain, swapped = inherited(name, encoding)
    words, rest = tokens(2, 7), tokens(2, 3)
    whole = plain(torch.cat([words, rest], dim=1)).logits[:, 7:]
    for first, then in ((plain, swapped), (swapped, plain), (swapped, swapped)):
        cache = first(words, use_cache=True).past_key_values
        assert error(then(rest, past_key_values=cache).logits, whole) < (1e-5 if first is then else 1e-4)
    caches = [model(words, use_cache=True).past_key_values.layers for model in (plain, swapped)]
    assert all(error(after.keys, before.keys) < 1e-4 for before, after in zip(*caches, strict=True))


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("encoding", ["mixed", *BLOCKS])
@pytest.mark.parametrize("name", ["llama", pytest.param("Gemma", marks=pytest.mark.slow)])
def test_prefix_that_peft_tunes(name: str, encoding: str) -> None:
    peft = pytest.importorskip("peft")
    words, logits = tokens(1, 6), []
    for model in inherited(name, encoding):
        torch.manual_seed(1)
        tuned = peft.get_peft_model(model, peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)).eval()
        logits.append(tuned(input_ids=words, attention_mask=torch.ones_like(words)).logits)
    assert error(logits[1], logits[0]) < 1e-4


def by_matrix(encoding: tr.Encoding, order: Any, x: Tensor, positions: Tensor) -> Tensor:
    """R x by dense matrices, in the order of channels of a model; x is (batch, heads, tokens, channels)."""
    matrix = encoding(positions).matrix().to(x.dtype)
    order = torch.arange(x.shape[-1]) if order is None else torch.as_tensor(order)
    rotated = torch.einsum("...tij,...tj->...ti", matrix, x[..., order])
    return rotated[..., order.argsort()]


@torch.no_grad()
@pytest.mark.parametrize("start", ["model", "paper"])
@pytest.mark.parametrize("encoding", ["mixed", *BLOCKS, "comrope-ap:4"])
@pytest.mark.parametrize("name", ["llama", "glm4", pytest.param("qwen3", marks=pytest.mark.slow)])
def test_cached_keys_are_those_of_dense_matrices_after_training(name: str, encoding: str, start: str) -> None:
    model = inherited(name, encoding)[1] if start == "model" else tr.swap(decoder(name), encoding, init="paper")
    keys, rotary = [], rotary_of(changed(model))
    for layer in model.model.layers:
        attention = layer.self_attn
        projection = getattr(attention, "k_norm", attention.k_proj)
        projection.register_forward_hook(lambda module, args, output: keys.append(output))
    places, expected = torch.arange(7).unsqueeze(-1).float(), []
    cache = model(tokens(2, 7), use_cache=True).past_key_values
    for index, key in enumerate(keys):
        heads = key.unflatten(-1, (-1, 16)) if key.ndim == 3 else key
        which = rotary.index(index)
        expected.append(
            by_matrix(rotary.encodings[which], rotary.channels[which], heads.transpose(1, 2), rotary.at(which, places))
        )
    assert len(expected) == len(cache.layers)
    assert all(error(one.keys, truth) < 1e-4 for one, truth in zip(cache.layers, expected, strict=True))


@torch.no_grad()
@pytest.mark.parametrize("encoding", ["mixed", "liere:4", "comrope-ap:4", "comrope-ld:4", "string"])
@pytest.mark.parametrize("name", ["eva02", "dinov3", "rope_axial", "rope_mixed_ape"])
def test_encoding_before_the_models_own_rotation_is_that_of_dense_matrices(name: str, encoding: str) -> None:
    plain = strong(name)
    model = changed(tr.swap(copy.deepcopy(plain), encoding, keep_rotation=True, init="paper"), 0.3)
    truth, exact, x = plain.double(), copy.deepcopy(model).double(), images(plain)
    places = tr.prefix(exact.rotary.lattices[0](4, 4, dtype=torch.float64), model.num_prefix_tokens)
    for index, block in enumerate(truth.blocks):
        own = exact.rotary.encodings[exact.rotary.index(index)]
        for norm in (block.attn.q_norm, block.attn.k_norm):
            norm.register_forward_hook(lambda module, args, out, own=own: by_matrix(own, None, out, places))
    expected = truth(x.double())
    assert error(exact(x.double()), expected) < 1e-8
    assert error(model(x), expected) < 1e-4
    with tr.backend("reference"):
        assert error(model(x), expected) < 1e-4


WIDTHS = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2)


def vit() -> Any:
    return transformers.ViTModel(transformers.ViTConfig(**WIDTHS, image_size=64, patch_size=16)).eval()


def fail(*_: Any) -> None:
    raise ZeroDivisionError


CALLS: dict[str, Callable[[Any, Tensor], Any]] = {
    "forward": lambda model, x: model(x),
    "forward_features": lambda model, x: model.forward_features(x),
    "forward_intermediates": lambda model, x: model.forward_intermediates(x),
    "get_intermediate_layers": lambda model, x: model.get_intermediate_layers(x),
    "transformers": lambda model, x: model(x),
}


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("raises", ["", "0", "1.mlp"])
@pytest.mark.parametrize("call", CALLS)
def test_positions_end_with_the_forward(call: str, raises: str, shared: bool) -> None:
    encoding = tr.MixedRoPE(num_axes=2, num_heads=2, head_dim=16) if shared else "mixed"
    model, x = tr.swap(vit() if call == "transformers" else made("vit"), encoding, init="paper"), WIDE
    blocks, expected = model.layers if call == "transformers" else model.blocks, model(x)
    if raises:
        handle = blocks.get_submodule(raises).register_forward_pre_hook(fail)
        with pytest.raises(ZeroDivisionError):
            CALLS[call](model, x)
        handle.remove()
    else:
        CALLS[call](model, x)
    for part in (blocks[0], blocks[1]) if call == "transformers" else (blocks, blocks[1], blocks[0].attn):
        with pytest.raises(ValueError, match="must be called through the model"):
            part(torch.randn(1, 17, 32))
    assert torch.equal(model(x)[0], expected[0])


TABLES: dict[str, tuple[Callable[[], Any], str]] = {
    "timm": (partial(made, "vit"), "pos_embed"),
    "transformers": (vit, "position_embeddings"),
    "swin": (partial(made, "swin"), "relative_position_bias_table"),
    "beit": (partial(made, "beit"), "relative_position_bias_table"),
}


@torch.no_grad()
@pytest.mark.parametrize("name", TABLES)
def test_state_of_the_plain_model_is_loaded_beside_a_table_of_zeros(name: str) -> None:
    build, table = TABLES[name]
    model, other = build().eval(), build().eval()
    for parameter in other.parameters():
        nn.init.normal_(parameter, std=0.3)
    x, state = images(model), copy.deepcopy(other.state_dict())
    expected = other(x)[0]
    tr.swap(model, "mixed", init="paper", keep_position_tables=False)
    model.load_state_dict(state, strict=False)
    tables = [value for key, value in model.named_parameters() if key.split(".rotary.")[0].endswith(table)]
    assert tables
    assert not any(value.any() for value in tables)
    tr.unswap(model)
    assert torch.equal(model(x)[0], expected)
    assert model.state_dict().keys() == state.keys()
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
