"""`swap` runs a layer of each kind and accepts what computes the same as its own code; others stay as they were."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from rotating import IMAGES, TEXT, error, learned, strong, tokens
from torch import Tensor, nn

import torchrope as tr
from torchrope.integrations import AfterNorms, AttentionShape, FromPatches, InFunction, ModelFamily

EXPERTS = dict(num_experts=2, num_local_experts=2, num_experts_per_tok=1, moe_intermediate_size=16)
WINDOWS = dict(num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"], head_dim=16)
THETAS: dict[str, Any] = dict(
    num_hidden_layers=3, layer_types=["sliding_attention", "full_attention", "full_attention"]
)
THETAS["layer_rope_theta"] = [1e2, 1e6, 0]
SIZES: dict[str, Any] = dict(IMAGES, image_size=64, patch_size=8)
# Models of transformers by class: their settings, and which of their layers call the rotation.
PARTLY: dict[str, tuple[dict[str, Any], list[bool]]] = {
    "BeamModel": (dict(**WINDOWS, **EXPERTS, mlp_layer_types=["dense"] * 2), [True, False]),
    "Cohere2Model": (dict(**WINDOWS), [True, False]),
    "Exaone4Model": (dict(**WINDOWS), [True, False]),
    "GraniteMoeSWAModel": (dict(**THETAS, **EXPERTS), [True, True, False]),
    "GraniteSWAModel": (THETAS, [True, True, False]),
    "ModernBertModel": (dict(**WINDOWS, cls_token_id=1, sep_token_id=2), [True, True]),
    "Molmo2TextModel": (dict(head_dim=16, num_hidden_layers=2, rope_scaling_layers=[1]), [True, True]),
    "SmolLM3Model": (dict(num_hidden_layers=4), [True, True, True, False]),
}


def built(name: str) -> Any:
    model = getattr(transformers, name)
    return strong(model(model.config_class(**{**TEXT, **PARTLY[name][0]})))


@pytest.mark.parametrize("name", PARTLY)
def test_each_layer_goes_on_from_the_tables_that_it_gets_and_those_without_stay_without(name: str) -> None:
    model, words = built(name), tokens()
    expected = model(words).last_hidden_state
    tr.swap(model, "mixed")
    assert len(model.rotary.encodings) == sum(PARTLY[name][1])
    assert error(model(words).last_hidden_state, expected) < 1e-5
    model(words).last_hidden_state.square().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in learned(model))
    assert torch.equal(tr.unswap(model)(words).last_hidden_state, expected)


def test_queries_of_other_heads_of_keys_take_a_rotation_that_heads_share() -> None:
    settings = dict(kv_channels=16, num_key_value_heads=2, num_experts_per_tok=2)
    model = strong(transformers.JetMoeModel(transformers.JetMoeConfig(**{**TEXT, **settings})))
    words = tokens()
    expected, before = model(words).last_hidden_state, state(model)
    with pytest.raises(ValueError, match=r"each head needs the same rotation: functools\.partial\(MixedRoPE, shared_h"):
        tr.swap(model, "mixed")
    assert state(model) == before
    tr.swap(model, functools.partial(tr.MixedRoPE, shared_heads=True))
    assert error(model(words).last_hidden_state, expected) < 1e-5


def test_sapiens2_is_swapped_as_dinov3_is() -> None:
    model, images = strong(transformers.Sapiens2Model(transformers.Sapiens2Config(**SIZES))), torch.randn(2, 3, 64, 32)
    expected = model(images).last_hidden_state
    assert error(tr.swap(model, "mixed")(images).last_hidden_state, expected) < 1e-5


def test_eomt_is_refused_for_the_reason_that_holds() -> None:
    config = transformers.EomtDinov3Config(**SIZES, num_blocks=1, num_upscale_blocks=1, num_queries=4)
    message = r"^swap needs attention that rotates q and k by positions, but EoMT puts queries before the patches"
    with pytest.raises(ValueError, match=message):
        tr.swap(transformers.EomtDinov3ForUniversalSegmentation(config), "mixed")


def rotate_half_of(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    return q, k


class Attention(nn.Module):
    """Attention with one of several mistakes, for a family that says that it rotates q and k."""

    def __init__(self, mistake: str) -> None:
        super().__init__()
        self.mistake, self.heads, self.qkv, self.out = mistake, 4, nn.Linear(32, 96), nn.Linear(32, 32)
        self.q_norm, self.k_norm = nn.Identity(), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        if self.mistake == "none":
            q, k = self.q_norm(q), self.k_norm(k)
        elif self.mistake == "keys alone":
            k = self.k_norm(k)
        elif self.mistake == "values too":
            q, k, v = self.q_norm(q), self.k_norm(k), self.k_norm(v)
        elif self.mistake == "not in this branch" and x.shape[-1] == 0:
            q, k = rotate_half_of(q, k)
        scores = q @ k.mT / q.shape[-1] ** 0.5
        return x + self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Tower(nn.Module):
    def __init__(self, mistake: str) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, 32, 8, 8)
        self.layers = nn.ModuleList(Attention(mistake) for _ in range(2))

    def forward(self, images: Tensor) -> Tensor:
        x = self.embed(images).flatten(2).mT
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.fixture
def families(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    from torchrope.integrations import family

    monkeypatch.setattr(family, "_registered", [])
    family._families_of.cache_clear()

    def register(intercept: Any) -> None:
        shape = lambda model, layer: AttentionShape(layer.heads, 8, (4, 4))  # noqa: E731
        made = ModelFamily("*.Tower", "layers.*", shape=shape, positions=FromPatches("embed"), intercept=intercept)
        tr.integrations.register_family(made)

    yield register
    family._families_of.cache_clear()


def state(model: nn.Module) -> dict[str, Any]:
    hooks = {name: (len(part._forward_hooks), len(part._forward_pre_hooks)) for name, part in model.named_modules()}
    return {"hooks": hooks, "attributes": {name: set(vars(part)) for name, part in model.named_modules()}}


MISTAKES: dict[str, tuple[Any, str]] = {
    "keys alone": (AfterNorms(), "its outputs change if all tokens rotate alike"),
    "values too": (AfterNorms(), "its outputs change if all tokens rotate alike"),
    "norms are not called": (AfterNorms(), "its forward does not rotate them"),
    "not in this branch": (InFunction("rotate_half_of"), "its forward does not rotate them"),
}


@pytest.mark.parametrize("where", ["cpu", "meta"])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_layer_that_does_not_compute_what_its_code_does_is_refused(
    mistake: str, where: str, families: Callable[[Any], None]
) -> None:
    intercept, reason = MISTAKES[mistake]
    families(intercept)
    model, images = Tower(mistake).to(where), torch.randn(1, 3, 32, 32, device=where)
    if where == "meta" and reason.startswith("its outputs"):  # no values to compare
        tr.swap(model, "mixed")
        return
    expected, before, weights = model(images), state(model), model.state_dict()
    with pytest.raises(ValueError, match=rf"^swap rotates q and k alike, .*; {reason}.*, got a Attention of a Tower$"):
        tr.swap(model, "mixed", init="paper", keep_position_tables=False)
    assert state(model) == before
    assert model.state_dict().keys() == weights.keys()
    assert where == "meta" or torch.equal(model(images), expected)


def test_weights_of_all_ranges_pass(families: Callable[[Any], None]) -> None:
    for scale in (0.0, 1e-8, 30.0):
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            families(AfterNorms())
            model = Tower("none")
            nn.init.normal_(model.layers[0].qkv.weight, std=scale)
            tr.swap(model.to(dtype), "mixed")


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_layers_of_a_decoder_on_the_meta_device_are_those_of_one_with_values(device: str) -> None:
    with torch.device(device), pytest.warns(UserWarning, match="outputs change"):
        model = tr.swap(transformers.BeamModel(built("BeamModel").config), "mixed", init="zeros")
    assert len(model.rotary.encodings) == 1


def test_part_of_the_heads_without_a_mesh_is_refused_with_a_way_out() -> None:
    def of_rank_0(encoding: Any) -> Any:
        config = transformers.LlamaConfig(**{**TEXT, "num_attention_heads": 4, "num_key_value_heads": 4})
        model = tr.swap(strong(transformers.LlamaModel(config)), encoding)
        for layer in (layer.self_attn for layer in model.layers):
            for part in (layer.q_proj, layer.k_proj, layer.v_proj):
                part.weight = nn.Parameter(part.weight[:16])
            layer.o_proj.weight = nn.Parameter(layer.o_proj.weight[:, :16])
        return model

    rule = r"^a layer that holds a part of the heads must have DTensors .*, shared_heads=True\); got 2 of 4 heads"
    with pytest.raises(ValueError, match=rule):
        of_rank_0("mixed")(tokens())
    of_rank_0(functools.partial(tr.MixedRoPE, shared_heads=True))(tokens())
