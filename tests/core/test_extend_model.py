"""`extend` of models: unchanged outputs at factor 1, the papers' formulas, and attention scores of larger inputs."""

import copy
import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from swapped import ROTATING, images, made, strong, tower
from timm.models.vision_transformer import Attention as TimmAttention
from torch import Tensor, nn
from torch.nn import functional

import torchrope as tr

METHODS = ("interpolate", "ntk", "yarn")


def vit(encoding: Any = "mixed", **settings: Any) -> tr.ViT:
    sizes: dict[str, Any] = dict(patch_size=2, in_channels=3, num_outputs=5, dim=32, depth=2, num_heads=2)
    return sharp(tr.ViT((8, 12), **{**sizes, "encoding": encoding, **settings}))


def swin(encoding: Any = "bias+mixed") -> tr.Swin:
    sizes: dict[str, Any] = dict(num_outputs=5, dim=16, depths=(2, 2), num_heads=(1, 2), window_size=4)
    return sharp(tr.Swin((32, 32), **sizes, encoding=encoding))


def features() -> tr.Features:
    plain = tr.ViT((32, 32), patch_size=8, dim=32, depth=2, num_heads=2, encoding="axial")
    return tr.Features(sharp(plain), pyramid=True, out_channels=8, window_size=2)


def clip() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.CLIPVisionConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=64, patch_size=16
    )
    return tr.swap(sharp(transformers.CLIPVisionModel(config)), "mixed", init="paper")


def sharp(model: Any) -> Any:
    """Scale q and k up, so that scores depend on the rotation."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(part in name for part in ("qkv.weight", "q_proj.weight", "k_proj.weight")):
                parameter.normal_(0, 3 / parameter.shape[1] ** 0.5)
    return model.eval()


def swapped(name: str, encoding: str = "mixed") -> Any:
    model = strong(name)
    rotates = name in ROTATING
    return tr.swap(model, encoding) if rotates else tr.swap(model, encoding, init="paper")


class CustomModel(nn.Module):
    """A custom model with an encoding."""

    def __init__(self) -> None:
        super().__init__()
        self.encoding = tr.MixedRoPE(num_axes=2, num_heads=2, head_dim=8)

    def forward(self, x: Tensor) -> Tensor:
        q, k = x.unflatten(-1, (2, 2, 8)).permute(2, 0, 3, 1, 4)
        q, k = tr.rotate(q, k, self.encoding(tr.grid(4, 4)))
        return q @ k.mT


KINDS: dict[str, tuple[Callable[[], Any], Callable[[], Tensor]]] = {
    "vit": (vit, lambda: torch.randn(2, 3, 8, 12)),
    "vit-string": (partial(vit, "string:8", share_layers=True), lambda: torch.randn(2, 3, 8, 12)),
    "vit-learned+golden": (partial(vit, "learned+golden"), lambda: torch.randn(2, 3, 8, 12)),
    "vit-centres": (
        partial(vit, "dinov3", positions=tr.Lattice(2.0, -1.0, offset=0.5, per="size")),
        lambda: torch.randn(2, 3, 8, 12),
    ),
    "swin": (swin, lambda: torch.randn(2, 3, 32, 32)),
    "features": (features, lambda: torch.randn(2, 3, 32, 32)),
    "clip": (clip, lambda: torch.randn(2, 3, 64, 64)),
    "own": (CustomModel, lambda: torch.randn(2, 16, 32)),
    **{f"timm-{name}": (partial(strong, name), lambda: torch.randn(2, 3, 64, 64)) for name in ("dinov3", "sam_rope")},
    **{
        f"swapped-{name}": (partial(swapped, name), partial(torch.randn, 2, 3, size, size))
        for name, size in {"vit_qk_norm": 64, "beit": 64, "rope_axial": 64, "swin": 56, "vit_parallel": 64}.items()
    },
}


def mostly_slow(names: Iterable[str], *fast: str) -> list[Any]:
    """Mark all but some cases as slow."""
    return [name if name in fast else pytest.param(name, marks=pytest.mark.slow) for name in names]


def outputs(model: Any, x: Tensor) -> Tensor:
    actual = model(x)
    actual = getattr(actual, "last_hidden_state", actual)
    return actual[0] if isinstance(actual, list) else actual


def difference(one: Tensor, other: Tensor) -> float:
    return float(((one - other).abs().max() / other.abs().max()).detach())


@pytest.mark.parametrize("kind", mostly_slow(KINDS, "vit", "vit-centres", "own", "timm-dinov3", "swapped-beit"))
def test_extend_by_one_keeps_outputs_and_by_two_changes_them(kind: str) -> None:
    build, data = KINDS[kind]
    model, x = build(), data()
    before, state = outputs(model, x), copy.deepcopy(model.state_dict())
    for method in METHODS:
        if kind == "own" and method == "yarn":
            continue
        same, larger = (tr.extend(model, factor, method=method) for factor in (1, 2))
        assert type(same) is type(model)
        assert difference(outputs(same, x), before) < 5e-6, method
        if kind not in ("vit-centres", "timm-dinov3") or method != "interpolate":
            assert difference(outputs(larger, x), before) > 1e-4, method
    after = model.state_dict()
    assert after.keys() == state.keys()
    assert all(torch.equal(value, after[name]) for name, value in state.items())


@pytest.mark.parametrize("name", mostly_slow(ROTATING, "eva02", "rope_mixed_ape", "gemma4"))
def test_extend_supports_rotary_models_of_timm(name: str) -> None:
    model = strong(name)
    x = images(model)
    before, state = model(x), copy.deepcopy(model.state_dict())
    assert difference(tr.extend(model, 1)(x), before) < 1e-5
    assert tower(tr.extend(model, 2)).rotary.encodings[0].frequencies.requires_grad
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in state.items())


def interpolate_formula(frequencies: Tensor, s: float, size: float) -> Tensor:
    return frequencies / s


def ntk_formula(frequencies: Tensor, s: float, size: float) -> Tensor:
    """The base b of f_j = f_0 b^(-2j / d) changed to b s^(d / (d - 2))."""
    d = 2 * len(frequencies)
    base = (frequencies[0] / frequencies[1]) ** (d / 2)
    return frequencies[0] * (base * s ** (d / (d - 2))) ** (
        -2 * torch.arange(len(frequencies), dtype=torch.float64) / d
    )


def yarn_formula(frequencies: Tensor, s: float, size: float) -> Tensor:
    """Equations 17 to 20 with α = 1 and β = 32, the ramp linear in the index of the pair, as in the code."""
    turns = size * frequencies / (2 * math.pi)
    log_base = float((frequencies[0] / frequencies[1]).log())
    at = [math.log(float(turns[0]) / number) / log_base for number in (min(32.0, float(turns[0])), 1.0)]
    ramp = ((torch.arange(len(frequencies), dtype=torch.float64) - at[0]) / (at[1] - at[0])).clamp(0, 1)
    return frequencies * (1 - ramp) + frequencies / s * ramp


FORMULAS = {"interpolate": interpolate_formula, "ntk": ntk_formula, "yarn": yarn_formula}


@pytest.mark.parametrize("method", METHODS)
def test_extend_matches_the_formula_of_each_method(method: str) -> None:
    """Per axis, for the training sizes of the model: 20 and 48 patches."""
    model = tr.ViT((20, 96), patch_size=(1, 2), in_channels=1, dim=128, depth=1, num_heads=2, encoding="axial").double()
    model.encodings[0].reset_parameters()  # exact, not rounded to float32
    actual = tr.extend(model, (3, 2.5), method=method).encodings[0].frequencies
    for axis, (size, s) in enumerate(((20, 3), (48, 2.5))):
        frequencies = model.encodings[0].frequencies[axis, axis::2]
        expected = FORMULAS[method](frequencies, s, size)
        assert torch.allclose(actual[axis, axis::2], expected, rtol=1e-12), axis
        assert not torch.allclose(expected, frequencies)
        assert not actual[axis, 1 - axis :: 2].any()


@pytest.mark.parametrize("method", METHODS)
def test_extend_with_fixed_range_positions_matches_the_formula(method: str) -> None:
    """DINOv3's positions are in [-1, 1] at every size: compare angles between neighbouring tokens."""
    model = strong("dinov3", dynamic_img_size=True).double()
    own = tr.swap(copy.deepcopy(model), "mixed").rotary.encodings[0].frequencies.detach()
    larger = tr.extend(model, 2, method=method)
    step = 2 / 4  # between 4 patches; half of it between 8
    used = own[0, 0] != 0
    actual = larger.rotary.encodings[0].frequencies[0, 0, used] * step / 2
    assert torch.allclose(actual, FORMULAS[method](own[0, 0, used] * step, 2, 4), rtol=1e-9)
    x = torch.randn(1, 3, 128, 128, dtype=torch.float64)
    if method == "interpolate":
        assert difference(larger(x), model(x)) < 1e-9


def scores_of(model: Any, x: Tensor) -> list[Tensor]:
    """Return q^T k of every attention call of the model, with the bias."""
    seen: list[Tensor] = []
    attention = functional.scaled_dot_product_attention

    def record(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, **others: Any) -> Tensor:
        seen.append((q @ k.mT).detach())
        return attention(q, k, v, attn_mask=attn_mask, **others)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(functional, "scaled_dot_product_attention", record)
        model(x)
    return seen


SHARPENED = ["vit", "vit_qk_norm", "vit_parallel", "beit", "sam", "eva02", "dinov3", "rope_axial", "naflex_axial"]
SHARPENED += ["gemma4", "qwen3", "deepseek", "pe", "ours", "clip"]


@pytest.mark.parametrize("name", mostly_slow(SHARPENED, "vit_qk_norm", "vit_parallel", "sam", "eva02", "ours", "clip"))
def test_yarn_multiplies_scores_by_its_temperature_squared(name: str) -> None:
    """Compared with YaRN frequencies without temperature, in the first layer, whose input is the same."""
    model = {"ours": vit, "clip": clip}[name]() if name in ("ours", "clip") else strong(name)
    if name in ("vit", "vit_qk_norm", "vit_parallel", "beit", "sam"):
        tr.swap(model, "mixed", init="paper")
    x = torch.randn(2, 3, 8, 12) if name == "ours" else torch.randn(2, 3, 64, 64) if name == "clip" else images(model)
    actual = tr.extend(model, (2, 3), method="yarn")
    alone = copy.deepcopy(actual)
    for part, module in alone.named_modules():
        if isinstance(module, (nn.Linear, nn.LayerNorm)) or "norm" in type(module).__name__.lower():
            module.load_state_dict(dict(model.named_modules())[part].state_dict())
    sharpened, plain = scores_of(actual, x), scores_of(alone, x)
    index = 1 if name == "sam" else 0  # a window in its first layer, which does not grow
    factor = (0.1 * math.log(6) + 1) ** 2
    assert tr.scaling.yarn_temperature((2, 3)) ** 2 == pytest.approx(factor)
    assert len(sharpened) == len(plain) > 0
    if name == "sam":
        assert torch.equal(sharpened[0], plain[0])
    assert difference(sharpened[index], factor * plain[index]) < 1e-4


class Fixed(nn.Module):
    """A norm of keys without weights."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.normalize(x, dim=-1)


class Offset(nn.Module):
    """A norm whose weights are offsets from 1."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        return functional.normalize(x, dim=-1) * (1 + self.weight)


def with_norm(norm: nn.Module) -> Any:
    model = made("vit")
    layers = [module for module in model.modules() if isinstance(module, TimmAttention)]
    layers[0].k_norm = norm
    return tr.swap(model, "mixed", init="paper")


def swapped_beside() -> Any:
    return tr.swap(made("rope_axial"), "mixed", keep_rotation=True)


REFUSED: dict[str, tuple[Callable[[], Any], dict[str, Any], str]] = {
    "blocks": (partial(vit, "liere:4"), {}, "ntk needs frequencies, .* interpolate supports any encoding, got LieRE"),
    "no encoding": (
        partial(vit, "none"),
        {},
        "^model must rotate q and k, .*; swap supports .* got ViT; in an attention of your own .*\\.md$",
    ),
    "no rotation": (partial(made, "vit"), {}, "^model must rotate q and k, .* got VisionTransformer$"),
    "no model": (
        lambda: nn.Linear(2, 2),
        {},
        "^model must rotate q and k, .*, got Linear; in an attention of your own .*\\.md$",
    ),
    "beside": (swapped_beside, {}, "^extend scales the encodings .* got keep_rotation=True"),
    "cosine": (
        partial(swapped, "swin_v2"),
        {"method": "yarn"},
        "must not be 'yarn' for cosine attention, .* got WindowAttention$",
    ),
    "no weights": (lambda: with_norm(Fixed()), {"method": "yarn"}, "linear in its weights, got Fixed in Attention$"),
    "offsets": (lambda: with_norm(Offset()), {"method": "yarn"}, "linear in its weights, got Offset in Attention$"),
    "own, yarn": (CustomModel, {"method": "yarn", "train_size": 4}, "^yarn also scales keys .* got CustomModel$"),
    "own, no size": (CustomModel, {"method": "yarn"}, r"^yarn requires train_size= \(.*\)$"),
    "size": (vit, {"train_size": 4}, "^train_size must be None unless method is 'yarn', got 4 for ntk$"),
    "method": (vit, {"method": "pi"}, "^method must be interpolate, ntk, yarn or a function, got 'pi'$"),
    "axes": (vit, {"factor": (1, 2, 3)}, r"^factor must be one number or one per axis \(2\), got 3$"),
    "zero": (vit, {"factor": 0}, r"^factor must be above 0 and finite, got"),
    "nan": (vit, {"factor": math.nan}, "^factor must be above 0 and finite, got"),
    "shared": (
        lambda: tr.swap(made("sam"), tr.MixedRoPE(num_axes=2, num_heads=2, head_dim=16).zero_()),
        {},
        "^models with windowed layers must have an encoding for each layer, got one shared by all layers of a",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_extend_refuses_unsupported_models_in_one_line(case: str) -> None:
    build, settings, message = REFUSED[case]
    model = build()
    with pytest.raises(ValueError, match=message) as caught:
        tr.extend(model, **{"factor": 2, **settings})
    assert "\n" not in str(caught.value)


def test_extend_interpolates_blocks() -> None:
    model = vit("liere:4")
    larger = tr.extend(model, (2, 3), method="interpolate")
    by = torch.tensor([2.0, 3.0]).reshape(2, 1, 1, 1, 1)
    assert torch.allclose(larger.encodings[0].generators(), model.encodings[0].generators() / by)


def test_extend_by_interpolation_keeps_rotations_of_the_lattice() -> None:
    """Interpolated by 2, tokens 2i of a lattice of twice the size rotate as tokens i did."""
    for model in (vit(), vit("comrope-ld:4"), vit("dinov3")):
        larger = tr.extend(model, 2, method="interpolate")
        few = model.encodings[0](tr.grid(4, 6, spacing=model.position_map.spacing)).matrix()
        many = larger.encodings[0](tr.grid(8, 12, spacing=model.position_map.spacing)).matrix()
        assert torch.allclose(many.unflatten(-3, (8, 12))[:, ::2, ::2].flatten(1, 2), few, atol=1e-5)


def test_extend_of_sam_keeps_windows_and_scales_global_layers() -> None:
    model = swapped("sam")
    before, after = (one.rotary.encodings for one in (model, tr.extend(model, 2)))
    assert torch.equal(before[0].frequencies, after[0].frequencies)
    assert torch.allclose(after[1].frequencies, tr.scaling.ntk(before[1].frequencies, 2))


def test_extend_of_swin_scales_by_the_window_size() -> None:
    model = swin()
    x = torch.randn(1, 3, 64, 64)
    larger = tr.extend(model, 2, method="yarn")
    assert larger(x, window_size=8).shape == (1, 5)
    for stage, grown in zip(model.stages, larger.stages, strict=True):
        own = stage.encodings[0].frequencies
        expected = tr.scaling.yarn(own, 2, train_size=[size * 1.0 for size in stage.window])
        assert torch.allclose(grown.encodings[0].frequencies, expected)


def test_extend_prefers_the_given_train_size() -> None:
    own = vit().encodings[0].frequencies
    model = vit()
    actual = tr.extend(model, 2, method="yarn", train_size=3).encodings[0].frequencies
    assert torch.allclose(actual, tr.scaling.yarn(model.encodings[0].frequencies, 2, train_size=3))
    assert own.shape == actual.shape


def test_extend_accepts_a_custom_function() -> None:
    model = vit("axial", positions=tr.Lattice(2.0, -1.0, offset=0.5, per="size"))
    larger = tr.extend(model, (1, 2), method=partial(tr.scaling.yarn, train_size=2.0))
    expected = tr.scaling.yarn(model.encodings[0].frequencies_per_axis(), (1, 2), train_size=2.0)
    by = torch.tensor([1.0, 2.0]).reshape(2, 1, 1)  # patches are twice as dense along the second axis
    assert torch.allclose(larger.encodings[0].frequencies_per_axis(), expected * by)
    assert torch.equal(larger.layers[0].attention.qkv.weight, model.layers[0].attention.qkv.weight)


def test_extend_keeps_positions_in_millimetres() -> None:
    model = vit("mixed", positions=tr.Lattice(unit=2.0, patch_size=(2, 2)))
    larger = tr.extend(model, 2)
    assert torch.allclose(larger.encodings[0].frequencies, tr.scaling.ntk(model.encodings[0].frequencies, 2))
    with pytest.raises(ValueError, match=r"^yarn requires train_size= \(.*\)$"):
        tr.extend(model, 2, method="yarn")
    assert tr.extend(model, 2, method="yarn", train_size=(4, 6)) is not model


def test_extend_scales_shared_layers_once() -> None:
    model = vit("mixed", share_layers=True)
    model.layers[1].attention.qkv = model.layers[0].attention.qkv
    larger = tr.extend(model, 2, method="yarn")
    weights = [one.layers[1].attention.qkv.weight for one in (larger, model)]
    assert torch.allclose(weights[0][32:64], weights[1][32:64] * tr.scaling.yarn_temperature((2, 2)) ** 2)
    assert larger.layers[0].attention.qkv is larger.layers[1].attention.qkv
    expected = tr.scaling.yarn(model.encodings[0].frequencies, 2, train_size=(4, 6))
    assert torch.allclose(larger.encodings[0].frequencies, expected)


@pytest.mark.parametrize("method", METHODS)
def test_extend_copies_parameters_with_gradients(method: str) -> None:
    for model, x in ((vit(), torch.randn(2, 3, 16, 24)), (swapped("rope_axial"), torch.randn(2, 3, 64, 64))):
        larger = tr.extend(model, 2, method=method)
        larger(x).square().sum().backward()
        encodings = getattr(larger, "encodings", None) or larger.rotary.encodings
        assert all(encoding.frequencies.grad.abs().sum() > 0 for encoding in encodings)
        assert all(parameter.grad is None for parameter in model.parameters())


def test_extend_scales_the_float32_frequencies_of_half_precision_models() -> None:
    model = vit().bfloat16()
    actual = tr.extend(model, 2).encodings[0].frequencies
    exact = tr.scaling.ntk(model.encodings[0].frequencies.float(), 2)
    assert actual.dtype == torch.float32
    assert torch.equal(actual, exact)


def test_extend_result_can_be_saved_and_loaded(tmp_path: Any) -> None:
    model = tr.extend(strong("rope_axial"), 2, method="yarn")
    x = images(model)
    tr.save(model, tmp_path / "model.safetensors")
    assert torch.equal(tr.load(tmp_path / "model.safetensors", into=strong("rope_axial"))(x), model(x))


@pytest.mark.slow
@pytest.mark.parametrize("build", [vit, partial(swapped, "rope_axial")])
def test_extend_result_compiles(build: Callable[[], Any]) -> None:
    model = tr.extend(build(), 2, method="yarn")
    x = torch.randn(2, 3, 16, 24) if isinstance(model, tr.ViT) else images(model)
    assert difference(torch.compile(model)(x), model(x)) < 1e-4


@pytest.mark.slow
def test_extend_keeps_accuracy_at_twice_the_size() -> None:
    """Digits in patches of one pixel: trained at 8 x 8, a model at 16 x 16 is near chance, interpolated far above."""
    torch.manual_seed(0)
    digits = pytest.importorskip("sklearn.datasets").load_digits()
    x = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    y = torch.tensor(digits.target)
    sizes: dict[str, Any] = dict(patch_size=1, in_channels=1, num_outputs=10, dim=32, depth=2, num_heads=2)
    model = tr.ViT((8, 8), **sizes, encoding="axial", pool="mean")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(240):
        batch = torch.arange(64 * step, 64 * (step + 1)) % 1500
        optimizer.zero_grad()
        functional.cross_entropy(model(x[batch]), y[batch]).backward()
        optimizer.step()
    model.eval()
    large = functional.interpolate(x[1500:], scale_factor=2, mode="bilinear")

    def accuracy(one: nn.Module) -> float:
        with torch.no_grad():
            return float((one(large).argmax(dim=-1) == y[1500:]).float().mean())

    assert accuracy(tr.extend(model, 2, method="interpolate")) > accuracy(model) + 0.1
