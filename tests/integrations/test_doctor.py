"""`diagnose` names each fault that is put into a model or a function, and accuses no healthy family."""

import math
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusing import built, inputs
from every_family import Family, every_family
from rotating import dinov3, qwen2_5_vl, text, tokens
from swapped import images
from swapped import strong as timm_strong
from torch import Tensor, nn
from transformers import DynamicCache

import torchrope as tr
from torchrope.integrations import Finding, diagnose

FAMILIES = {f"{family.library}-{family}": family for family in every_family()}
QUICK = ("timm-eva02", "transformers-qwen2_vl", "transformers-dinov3_vit", "transformers, text-glm4", "diffusers-flux")


def accuse_nothing(family: Family) -> None:
    torch.manual_seed(0)
    model = family.build()
    given = family.inputs(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert diagnose(model, *given) == []
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("name", QUICK)
def test_healthy_models_are_not_accused(name: str) -> None:
    accuse_nothing(FAMILIES[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in QUICK])
def test_no_family_is_accused(name: str) -> None:
    accuse_nothing(FAMILIES[name])


# Models, each with one fault

Case = tuple[Any, tuple[Any, ...]]


def llama(**settings: Any) -> Any:
    return text("LlamaForCausalLM", **settings)


def modeling(model: Any) -> Any:
    return sys.modules[type(model).__module__]


def rope_of(model: Any) -> Any:
    return model.model.rotary_emb


def with_tables(model: Any, angles: Callable[[Tensor, Tensor], Tensor]) -> Any:
    """A Llama whose tables are those of a function of positions and frequencies."""
    rope = rope_of(model)

    def forward(x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        table = angles(position_ids[..., None].float(), rope.inv_freq).float().repeat(1, 1, 2)
        return table.cos(), table.sin()

    rope.forward = forward
    return model


def frequencies_in_half(patch: pytest.MonkeyPatch, dtype: torch.dtype = torch.bfloat16) -> Case:
    model = llama()
    rope_of(model).inv_freq = rope_of(model).inv_freq.to(dtype).float()
    return model, (tokens(),)


def frequencies_in_float16(patch: pytest.MonkeyPatch) -> Case:
    return frequencies_in_half(patch, torch.float16)


def cast_model(patch: pytest.MonkeyPatch) -> Case:
    return llama().bfloat16().float(), (tokens(),)


def other_base(patch: pytest.MonkeyPatch) -> Case:
    model = llama()
    rope_of(model).inv_freq = 500.0 ** -(torch.arange(8.0) / 8)
    return model, (tokens(),)


def timm_bands(patch: pytest.MonkeyPatch) -> Case:
    model = timm_strong("dinov3")
    model.rope.periods = model.rope.periods.bfloat16().float()
    return model, ((images(model),),)


def angles_in_half(patch: pytest.MonkeyPatch) -> Case:
    return with_tables(llama(), lambda p, f: (p * f).bfloat16()), (tokens(1, 40),)


def computed_in_half(patch: pytest.MonkeyPatch) -> Case:
    return with_tables(llama(), lambda p, f: p.half() * f.half()), (tokens(1, 40),)


def shifted(patch: pytest.MonkeyPatch) -> Case:
    return with_tables(llama(), lambda p, f: (p * f).roll(1, 1)), (tokens(),)


def rotated_twice(patch: pytest.MonkeyPatch) -> Case:
    return with_tables(llama(), lambda p, f: 2 * p * f), (tokens(),)


def opposite(patch: pytest.MonkeyPatch) -> Case:
    return with_tables(llama(), lambda p, f: -p * f), (tokens(),)


def unrotated(patch: pytest.MonkeyPatch) -> Case:
    return with_tables(llama(), lambda p, f: 0 * p * f), (tokens(),)


def adjacent_pairs(patch: pytest.MonkeyPatch) -> Case:
    model = llama()

    def apply(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        cos, sin = (x[..., : x.shape[-1] // 2].repeat_interleave(2, -1).unsqueeze(1) for x in (cos, sin))
        q, k = (x * cos + torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2) * sin for x in (q, k))
        return q, k

    patch.setattr(modeling(model), "apply_rotary_pos_emb", apply)
    return model, (tokens(),)


def without_gradient(patch: pytest.MonkeyPatch) -> Case:
    model = llama()
    module = modeling(model)
    shipped = module.apply_rotary_pos_emb

    class Kernel(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, x: Tensor, rotated: Tensor) -> Tensor:
            return rotated.clone()

        @staticmethod
        def backward(context: Any, grad: Tensor) -> tuple[Tensor, None]:  # of a clone that is rotated in place
            return grad, None

    def apply(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        rotated = shipped(q.detach(), k.detach(), cos, sin)
        return Kernel.apply(q, rotated[0]), Kernel.apply(k, rotated[1])

    patch.setattr(module, "apply_rotary_pos_emb", apply)
    return model, (tokens(),)


def detached(patch: pytest.MonkeyPatch) -> Case:
    model = llama()
    module = modeling(model)
    shipped = module.apply_rotary_pos_emb
    patch.setattr(module, "apply_rotary_pos_emb", lambda q, k, *tables: shipped(q.detach(), k.detach(), *tables))
    return model, (tokens(),)


def cached_forward(patch: pytest.MonkeyPatch) -> Case:
    model = llama()
    rope = rope_of(model)
    shipped, kind = type(rope).forward, type(rope)

    def forward(self: Any, x: Tensor, position_ids: Tensor) -> Any:
        if getattr(self, "_kept", None) is None or self._kept[0].shape[1] != x.shape[1]:
            self._kept = shipped(self, x, position_ids)
        return self._kept

    patch.setattr(kind, "forward", forward)
    first, later = (torch.arange(9)[None] * step for step in (1, 3))
    words = tokens(1, 9)
    return model, ({"input_ids": words, "position_ids": first}, {"input_ids": words, "position_ids": later})


def table_of_another_size(patch: pytest.MonkeyPatch) -> Case:
    model = timm_strong("eva02")
    model.rope.pos_embed = model.rope.pos_embed.roll(1, 0)
    return model, ((images(model),),)


def axes_swapped(patch: pytest.MonkeyPatch) -> Case:
    model = dinov3()
    rope = model.rope_embeddings
    shipped = rope.forward

    def forward(pixels: Tensor) -> Any:  # (tokens, channels) of (row, column), twice
        return tuple(x.unflatten(-1, (2, 2, -1)).flip(-2).flatten(-3) for x in shipped(pixels))

    rope.forward = forward
    return model, ({"pixel_values": torch.randn(1, 3, 32, 48)},)


def diffusers_axes(patch: pytest.MonkeyPatch) -> Case:
    model = built("wan")
    rope = model.rope
    shipped = rope.forward
    # (1, tokens, 1, 16) of 8 channels of time, 4 of rows, 4 of columns
    rope.forward = lambda x: tuple(torch.cat([t[..., :8], t[..., 12:], t[..., 8:12]], -1) for t in shipped(x))
    return model, (inputs("wan"),)


def whole_qwen() -> Any:
    model, given = qwen2_5_vl()
    return model.model.language_model, given


def mrope_ids() -> dict[str, Tensor]:
    time, row, column = tr.grid(2, 3, 4).long().T
    ids = torch.stack([time, row, column]).unsqueeze(1)
    return {"inputs_embeds": torch.randn(1, 24, 32), "position_ids": ids}


def mrope_section(patch: pytest.MonkeyPatch) -> Case:
    model, _ = whole_qwen()
    model.rotary_emb.mrope_section = [3, 2, 3]
    return model, (mrope_ids(),)


def mrope_in_code(patch: pytest.MonkeyPatch) -> Case:
    model, _ = whole_qwen()

    def recompose(self: Any, freq: Tensor) -> Tensor:
        parts = [part[axis] for axis, part in enumerate(freq.split([3, 2, 3], dim=-1))]
        return torch.cat([*parts, *parts], dim=-1)

    patch.setattr(type(model.rotary_emb), "recomposition_frequencies", recompose)
    return model, (mrope_ids(),)


def mrope_lost(patch: pytest.MonkeyPatch) -> Case:
    model, _ = whole_qwen()
    patch.setattr(type(model.rotary_emb), "recomposition_frequencies", lambda self, freq: freq[0].repeat(1, 1, 2))
    return model, (mrope_ids(),)


def padding(patch: pytest.MonkeyPatch) -> Case:
    mask = torch.tensor([[1, 1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 1, 1, 1]])
    return llama(), ({"input_ids": tokens(2, 8), "attention_mask": mask},)


MODELS: dict[Callable[[pytest.MonkeyPatch], Case], tuple[str, str]] = {
    frequencies_in_half: ("frequencies", "model.rotary_emb.inv_freq: is rounded to bfloat16"),
    frequencies_in_float16: ("frequencies", "model.rotary_emb.inv_freq: is rounded to float16"),
    cast_model: ("frequencies", "model.rotary_emb.inv_freq: is rounded to bfloat16"),
    other_base: ("frequencies", "model.rotary_emb.inv_freq: differs"),
    timm_bands: ("frequencies", "rope.periods: is rounded to bfloat16"),
    angles_in_half: ("angles", "model.layers.0.self_attn: rounds angles to bfloat16"),
    computed_in_half: ("angles", "model.layers.0.self_attn: computes angles"),
    shifted: ("positions", "model.layers.0.self_attn: rotates each token by the position 1 before it"),
    rotated_twice: ("frequencies", "model.layers.0.self_attn: rotates twice"),
    opposite: ("direction", "model.layers.0.self_attn: rotates in the opposite direction"),
    unrotated: ("direction", "model.layers.0.self_attn: does not rotate"),
    adjacent_pairs: ("pairs", "model.layers.0.self_attn: pairs adjacent channels"),
    without_gradient: ("gradient", "model.layers.0.self_attn: gradients"),
    detached: ("gradient", "model.layers.0.self_attn: gradients"),
    cached_forward: ("cache", "model.layers.0.self_attn: keeps tables of an earlier call"),
    table_of_another_size: ("cache", "rope.pos_embed: is a table of other positions"),
    axes_swapped: ("axes", "attention: takes positions of axes in the order (1, 0)"),
    diffusers_axes: ("axes", "blocks.0.attn1: takes positions of axes in the order (0, 2, 1)"),
    mrope_section: ("sections", "rotary_emb.mrope_section: is [3, 2, 3], but the configuration gives [2, 3, 3]"),
    mrope_in_code: ("sections", "layers.0.self_attn: has sections (3, 2, 3)"),
    mrope_lost: ("sections", "layers.0.self_attn: takes the positions of axis 0"),
    padding: ("positions", "model.layers.0.self_attn: padding tokens"),
}


@pytest.mark.parametrize("fault", MODELS, ids=lambda fault: fault.__name__)
def test_a_fault_of_a_model_is_named(
    fault: Callable[[pytest.MonkeyPatch], Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model, calls = fault(monkeypatch)
    findings = diagnose(model, *calls)
    kind, line = MODELS[fault]
    assert kind in {finding.kind for finding in findings}
    assert any(line in str(finding) for finding in findings), [str(finding) for finding in findings]
    assert len(findings) == 1
    assert all("\n" not in str(finding) for finding in findings)


def test_left_padding_is_no_fault() -> None:
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    assert diagnose(llama(), {"input_ids": tokens(2, 6), "attention_mask": mask}) == []


def test_positions_of_every_third_token_beside_padding_are_no_fault() -> None:
    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]])
    ids = (3 * torch.arange(6)).expand(2, 6)
    assert diagnose(llama(), {"input_ids": tokens(2, 6), "attention_mask": mask, "position_ids": ids}) == []


def test_cache_of_keys_among_the_inputs_stays_empty() -> None:
    model, cache = llama(), DynamicCache()
    assert diagnose(model, {"input_ids": tokens(2, 9), "past_key_values": cache}) == []
    assert cache.get_seq_length() == 0
    model(tokens(2, 5), past_key_values=cache)
    with pytest.raises(
        ValueError, match=r"^diagnose needs inputs without keys of earlier tokens, .*, got a cache of 5$"
    ):
        diagnose(model, {"input_ids": tokens(2, 4), "past_key_values": cache})


def test_parameters_of_the_rotation_learn_as_before() -> None:
    model = timm_strong("rope_mixed_ape")
    assert diagnose(model, images(model)) == []
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_nan_in_the_frequencies_of_a_call_is_no_known_fault() -> None:
    findings = diagnose(with_tables(llama(), lambda p, f: p * f * math.nan), (tokens(),))
    assert [finding.kind for finding in findings] == ["unknown"]


def test_models_that_cannot_be_compared_are_refused() -> None:
    with pytest.raises(ValueError, match="with RoPE that swap supports"):
        diagnose(nn.Linear(2, 2), torch.randn(1, 2))
    with pytest.raises(ValueError, match="not swapped"):
        diagnose(tr.swap(llama(), "mixed"), (tokens(),))
    with pytest.raises(ValueError, match="outputs depend on the rotation"):
        diagnose(llama(), tokens(2, 1))
    with pytest.raises(ValueError, match="positions= and frequencies= for a function"):
        diagnose(lambda q, k: (q, k), (torch.randn(1, 2, 3, 8),) * 2)


# Functions

F = 10.0 ** -(torch.arange(4) / 2)
P = torch.arange(12.0) * 7


def tables(positions: Tensor = P, frequencies: Tensor = F) -> tuple[Tensor, Tensor]:
    angles = (positions[..., None] * frequencies).repeat(*[1] * positions.ndim, 2)
    return angles.cos(), angles.sin()


def rotate_half(x: Tensor) -> Tensor:
    return torch.cat([-x[..., 4:], x[..., :4]], dim=-1)


def apply(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


def one(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x * cos + rotate_half(x) * sin


def in_place(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        rotated = apply(q, k, cos, sin)
        q.copy_(rotated[0])
        k.copy_(rotated[1])
    return q, k


def promoted(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return apply(q.double(), k.double(), cos, sin)


def in_numpy(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    q, k = (torch.from_numpy(x.numpy()) for x in (q, k))  # refuses tensors that require a gradient
    return apply(q, k, cos, sin)


FUNCTIONS: dict[str, tuple[Callable[..., Any], Callable[[], tuple[Tensor, Tensor]], str]] = {
    "frequencies": (apply, lambda: tables(frequencies=F.bfloat16().float()), "rounds frequencies to bfloat16"),
    "angles": (
        one,
        lambda: tuple(f((P[:, None] * F).half().float().repeat(1, 2)) for f in (torch.cos, torch.sin)),
        "rounds angles to float16",
    ),
    "positions": (apply, lambda: tables(P.roll(1)), "position 1 before it"),
    "index": (apply, lambda: tables(torch.arange(12.0)), "by their index"),
    "turns": (apply, lambda: tables(frequencies=2 * math.pi * F), "multiplies angles by 2π"),
    "direction": (lambda q, k, cos, sin: apply(q, k, cos, -sin), tables, "opposite direction"),
    "cache": (apply, lambda: tuple(x.half().float() for x in tables()), "stores cos and sin in float16"),
    "in place": (in_place, tables, "overwrites its inputs"),
    "gradient": (in_place, tables, "gradients of q and k"),
    "without gradient": (in_numpy, tables, "gradients of q and k"),
    "dtype": (promoted, tables, "returns torch.float64"),
    "unknown": (apply, lambda: tables(P**2), "rotates otherwise"),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_fault_of_a_function_is_named(name: str) -> None:
    function, given, problem = FUNCTIONS[name]
    q, k = torch.randn(2, 2, 3, 12, 8, generator=torch.Generator().manual_seed(0))
    findings = diagnose(
        function, (q, k, *given()) if function is not one else (q, *given()), positions=P, frequencies=F
    )
    assert any(problem in str(finding) for finding in findings), [str(finding) for finding in findings]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("layout", ["bhtd", "bthd"])
def test_healthy_functions_are_not_accused(dtype: torch.dtype, layout: str) -> None:
    q, k = torch.randn(2, 4, 12, 8, dtype=dtype), torch.randn(2, 2, 12, 8, dtype=dtype)
    cos, sin = (x.to(dtype) for x in tables(P.to(dtype), F.to(dtype)))
    if layout == "bthd":
        q, k, cos, sin = q.transpose(1, 2), k.transpose(1, 2), cos.unsqueeze(1), sin.unsqueeze(1)
    given: dict[str, Any] = dict(positions=P.to(dtype), frequencies=F.to(dtype), layout=layout)
    assert diagnose(apply, (q, k, cos, sin), **given) == []
    assert diagnose(one, (q, cos, sin), **given) == []


def test_a_function_that_takes_positions_for_each_sample() -> None:
    encoding = tr.MixedRoPE(num_axes=2, num_heads=3, head_dim=8)
    positions = tr.grid(3, 4).repeat(2, 1, 1) * torch.tensor([1.0, 3.0])[:, None, None]
    q, k = torch.randn(2, 2, 3, 12, 8)
    given: dict[str, Any] = dict(positions=positions, frequencies=encoding.frequencies, interleaved=True)
    assert diagnose(lambda q, k: tr.rotate(q, k, encoding(positions)), (q, k), **given) == []
    findings = diagnose(lambda q, k: tr.rotate(q, k, encoding(positions[0])), (q, k), **given)
    assert [finding.kind for finding in findings] == ["positions"]
    assert "those of the first" in str(findings[0]) or "positions of the first" in str(findings[0])
    findings = diagnose(lambda q, k: tr.rotate(q, k, encoding(positions.flip(-1))), (q, k), **given)
    assert isinstance(findings[0], Finding)
    assert findings[0].kind == "axes"


def test_nan_and_wrong_shapes() -> None:
    q, k = torch.randn(2, 1, 2, 12, 8)
    with pytest.raises(ValueError, match="positions must be"):
        diagnose(apply, (q, k, *tables()), positions=P[:5], frequencies=F)
    with pytest.raises(ValueError, match="positions and frequencies, and inputs of one call"):
        diagnose(apply, (q, k, *tables()), positions=P)
    for given, received in ((), r"\[\]"), ({"q": q}, "dict"), (q, "Tensor"), ((None, q), r"\['NoneType', 'Tensor'\]"):
        with pytest.raises(ValueError, match=rf"a tuple \(q, k, \*others\) or \(q, \*others\), got {received}$"):
            diagnose(apply, given, positions=P, frequencies=F)
    with pytest.raises(ValueError, match=r"must return q and k, or q, rotated, got no tensor from <lambda>$"):
        diagnose(lambda q, k: None, (q, k), positions=P, frequencies=F)
    with pytest.raises(ValueError, match="different positions"):
        diagnose(apply, (q, k, *tables(0 * P)), positions=0 * P, frequencies=F)
    findings = diagnose(apply, (q, k, *(x * math.nan for x in tables())), positions=P, frequencies=F)
    assert [finding.kind for finding in findings] == ["unknown"]
