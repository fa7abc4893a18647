"""The kernel slot of transformers: text models with it equal themselves without it, in training too."""

import copy
from typing import Any

import pytest
import torch
import transformers
from kernel_slot import module_of, slot_bound
from rotating import TEXT, decoder, error, hunyuan_vl, strong, text, tokens
from torch import Tensor
from transformers.integrations import hub_kernels
from transformers.utils import import_utils

import torchrope as tr
from torchrope.integrations import transformers_kernels
from torchrope.integrations.transformers_kernels import RotaryPosEmb

EXPERTS: dict[str, Any] = dict(num_experts=2, num_experts_per_tok=1, moe_intermediate_size=16)
MODELS: dict[str, dict[str, Any] | None] = {
    **dict.fromkeys(
        ("llama", "qwen3", "phi", "cohere", "glm4", "linear", "llama3", "Falcon", "Gemma", "Gemma3", "GPTNeoX")
    ),
    **dict.fromkeys(("Mistral", "Olmo2", "Olmo3", "Phi3", "Qwen2", "SmolLM3", "StableLm")),
    "Olmo": {},
    "Granite": {},
    "Starcoder2": {},
    "SeedOss": dict(head_dim=16, attention_dropout=0.0, residual_dropout=0.0),
    "NanoChat": {},  # rotates clockwise
    "GptOss": dict(head_dim=16, num_local_experts=2, num_experts_per_tok=1),  # one entry of the table per pair, YaRN
}


@pytest.fixture
def rotations(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of heads of the queries that the slot rotated."""
    heads: list[int] = []
    real = transformers_kernels.rotate

    def counted(q: Tensor, k: Tensor, rotation: Any, **settings: Any) -> Any:
        heads.append(q.shape[1])
        return real(q, k, rotation, **settings)

    transformers_kernels._convention.cache_clear()
    monkeypatch.setattr(transformers_kernels, "rotate", counted)
    return heads


def model_of(name: str) -> Any:
    settings = MODELS[name]
    return decoder(name) if settings is None else text(f"{name}ForCausalLM", **settings)


def step(model: Any, words: Tensor) -> tuple[Tensor, list[Tensor]]:
    model.zero_grad()
    logits = model(words).logits
    logits.square().mean().backward()
    return logits.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("name", MODELS)
def test_text_models_have_their_outputs_and_gradients(name: str, rotations: list[int]) -> None:
    model, words = model_of(name).train(), tokens(2, 9)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    expected = model(words).logits
    with slot_bound(model):
        assert error(model(words).logits, expected) < 1e-5
    exact = model if name == "GptOss" else model.double()  # its experts have no float64
    expected, gradients = step(exact, words)
    with slot_bound(model):
        logits, found = step(exact, words)
    assert rotations.count(2) >= 4  # both layers, twice
    assert error(logits, expected) < 1e-5
    assert len(found) == len(gradients)
    torch.testing.assert_close(found, gradients, atol=1e-5, rtol=1e-5)


def test_cache_of_keys_and_generated_words(rotations: list[int]) -> None:
    model, words = decoder("qwen3"), tokens(2, 9)
    said = model.generate(words, max_new_tokens=6, do_sample=False)
    with slot_bound(model):
        assert torch.equal(model.generate(words, max_new_tokens=6, do_sample=False), said)
    assert len(rotations) > 12


def halves(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """The function of most text models."""
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    one, other = (x * cos + torch.cat([-x.chunk(2, -1)[1], x.chunk(2, -1)[0]], -1) * sin for x in (q, k))
    return one, other


def partly_in_neighbours(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    """Adjacent pairs, a part of the channels."""
    function = transformers.models.glm4.modeling_glm4.apply_rotary_pos_emb
    result: tuple[Tensor, Tensor] = function(q, k, cos, sin, unsqueeze_dim)
    return result


def drawn(entries: int = 8, dtype: torch.dtype = torch.float64, heads_at: int = 1) -> list[Tensor]:
    angles = torch.randn(2, 5, entries // 2, dtype=torch.float64).repeat(1, 1, 2)
    q, k = (torch.randn(2, heads, 5, 8, dtype=dtype).requires_grad_() for heads in (4, 2))
    q, k = (x.transpose(1, heads_at) for x in (q, k))
    return [q, k, angles.cos().to(dtype), angles.sin().to(dtype)]


def call(function: Any, *arguments: Any) -> Any:
    return RotaryPosEmb.forward(module_of(function), *arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(("function", "entries"), [(halves, 8), (partly_in_neighbours, 4), (partly_in_neighbours, 8)])
@pytest.mark.parametrize("heads_at", [1, 2])
def test_layouts_and_parts_of_heads(function: Any, entries: int, heads_at: int, rotations: list[int]) -> None:
    arguments = drawn(entries, heads_at=heads_at)
    found, expected = call(function, *arguments, heads_at), function(*arguments, heads_at)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)
    assert len(rotations) > 1
    grown = [torch.randn_like(x) for x in expected]
    one, other = (torch.autograd.grad(result, arguments[:2], grown) for result in (found, expected))
    torch.testing.assert_close(one, other, atol=1e-12, rtol=0)


def test_queries_alone() -> None:
    q, k, cos, sin = drawn()
    rotated, none = call(halves, q, None, cos, sin)
    assert none is None
    torch.testing.assert_close(rotated, halves(q, k, cos, sin)[0], atol=1e-12, rtol=0)


def test_tables_that_need_a_gradient_get_it() -> None:
    q, k = drawn()[:2]
    half = torch.randn(2, 5, 4, dtype=torch.float64, requires_grad=True)

    def value(function: Any) -> Tensor:
        angles = torch.cat([half, half], dim=-1)
        rotated = function(q, k, angles.cos(), angles.sin())
        return torch.autograd.grad(sum(x.pow(3).sum() for x in rotated), half)[0]

    torch.testing.assert_close(value(lambda *a: call(halves, *a)), value(halves), atol=1e-10, rtol=0)


def test_bfloat16_is_rounded_once() -> None:
    arguments = drawn(dtype=torch.bfloat16)
    wide = halves(*(x.double() for x in arguments))
    for one, other in zip(call(halves, *arguments), wide, strict=True):
        assert one.dtype == torch.bfloat16
        torch.testing.assert_close(one.double(), other, atol=0, rtol=2**-8)


@pytest.mark.parametrize("name", ["scaled keys", "three dimensions", "no batch in the table", "heads behind"])
def test_other_functions_and_shapes_are_left_to_the_model(name: str, rotations: list[int]) -> None:
    q, k, cos, sin = drawn()
    arguments: tuple[Any, ...] = q, k, cos, sin

    def scaled(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        rotated, other = halves(q, k, cos, sin, unsqueeze_dim)
        return rotated, 2 * other

    if name == "three dimensions":
        arguments = q[:, 0], k[:, 0], cos, sin, 0
        arguments = arguments[0][:1], arguments[1][:1], cos[0], sin[0], 0
    elif name == "no batch in the table":
        arguments = q, k, cos[0], sin[0], 0
    elif name == "heads behind":
        arguments = q[..., None, :], k[..., None, :], cos[:, None], sin[:, None], 3
    function = scaled if name == "scaled keys" else halves
    transformers_kernels._convention.cache_clear()
    found = call(function, *arguments)
    torch.testing.assert_close(found, function(*arguments), atol=0, rtol=0)
    assert 4 not in rotations  # trials have one head


def test_tables_that_differ_between_the_channels_of_a_pair_are_left_to_the_model(rotations: list[int]) -> None:
    q, k, cos, sin = drawn()
    call(halves, q, k, cos, sin)
    assert rotations.count(4) == 1
    sin[1, 2, 7] += 1  # after the slot read the table
    torch.testing.assert_close(call(halves, q, k, cos, sin), halves(q, k, cos, sin), atol=0, rtol=0)
    assert rotations.count(4) == 1


def test_model_whose_pairs_rotate_by_two_axes(rotations: list[int]) -> None:
    model, words = hunyuan_vl(), tokens(1, 12)
    image = torch.stack([tr.grid(3, 4).long()[:, axis // 2] for axis in range(4)]).unsqueeze(1)
    expected = model(words, position_ids=image)[0]
    with slot_bound(model):
        assert torch.equal(model(words, position_ids=image)[0], expected)
        assert 4 not in rotations
        model(words)
    assert rotations.count(4) == 2  # both layers, as the axes of text are equal


def test_compiled_models_run_the_function_itself(rotations: list[int]) -> None:
    arguments = [x.detach() for x in drawn()]
    slot = module_of(halves)
    compiled = torch.compile(lambda *a: RotaryPosEmb.forward(slot, *a), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(*arguments), halves(*arguments), atol=1e-12, rtol=0)
    assert not rotations


def test_mapping_keeps_the_entries_of_other_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    mapping: dict[str, Any] = {"rotary_pos_emb": {"cuda": "of the Hub"}, "RMSNorm": {}}
    registered: list[Any] = []
    monkeypatch.setattr(import_utils, "is_kernels_available", lambda: True)
    monkeypatch.setattr(hub_kernels, "get_kernel_mapping_transformers", lambda: mapping, raising=False)
    monkeypatch.setattr(
        hub_kernels, "register_kernel_mapping_transformers", lambda: registered.append(copy.deepcopy(mapping))
    )
    tr.integrations.use_in_transformers()
    tr.integrations.use_in_transformers(["cpu", "mps"])
    slot = registered[-1]["rotary_pos_emb"]
    assert slot["cuda"] == "of the Hub"
    assert slot["cpu"] == slot["mps"]
    assert {slot["cpu"]: 1}[slot["mps"]] == 1  # hashable, by value
    assert slot["cpu"].load() is RotaryPosEmb


def test_missing_package_and_unknown_devices_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_utils, "is_kernels_available", lambda: False)
    with pytest.raises(ImportError, match=r"^use_in_transformers requires the package kernels: pip install 'kernels>="):
        tr.integrations.use_in_transformers()
    with pytest.raises(ValueError, match=r"^devices must be among cpu, cuda, .*, got gpu$"):
        tr.integrations.use_in_transformers(["gpu"])


@pytest.mark.skipif(not import_utils.is_kernels_available(), reason="the package kernels is not installed")
def test_use_kernels_of_transformers(rotations: list[int]) -> None:
    tr.integrations.use_in_transformers()
    model, words = strong(transformers.LlamaForCausalLM(transformers.LlamaConfig(**TEXT))).train(), tokens(2, 9)
    expected, gradients = step(model, words)
    model.set_use_kernels(True)
    logits, found = step(model, words)
    assert rotations.count(2) == 2
    assert error(logits, expected) < 1e-5
    torch.testing.assert_close(found, gradients, atol=1e-5, rtol=1e-5)
