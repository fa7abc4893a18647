"""Encodings in timm's models: the outputs of before, everything that timm does with a model, and the way back."""

import copy
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import timm
import torch
from swapped import MODELS, ROTATING, SMALL, awake, drawn, images, made, strong, tower
from timm.layers.pos_embed_sincos import (
    RotaryEmbeddingCat,
    RotaryEmbeddingDinoV3,
    RotaryEmbeddingMixed,
    RotaryEmbeddingMRope,
)
from timm.models.deepseek_vit import DeepseekVitEncoder
from timm.models.eva import Eva
from timm.models.gemma4_vit import Gemma4RotaryEmbedding2D, Gemma4VitEncoder
from timm.models.naflexvit import NaFlexVit
from timm.models.qwen3_vit import Qwen3VitEncoder
from timm.models.vision_transformer import VisionTransformer
from timm.models.vision_transformer_sam import Attention as SamAttention
from torch import Tensor, nn

import torchrope as tr

ROTARY = (
    RotaryEmbeddingCat,
    RotaryEmbeddingDinoV3,
    RotaryEmbeddingMixed,
    RotaryEmbeddingMRope,
    Gemma4RotaryEmbedding2D,
)
WINDOWS = ["swin", "swin_v2", "sam", "sam_rope"]
ENCODINGS = ["mixed", "liere", "comrope-ap:4", "comrope-ld:4", "string:8"]


def without_rotation(model: Any) -> Any:
    """What a model computes whose own rotation is taken out."""
    plain = copy.deepcopy(model)
    for module in plain.modules():
        if isinstance(module, (Eva, NaFlexVit, SamAttention)):
            module.rope = None
        elif isinstance(module, (Qwen3VitEncoder, DeepseekVitEncoder)):
            module.rope.get_embed = lambda **settings: None
        elif isinstance(module, Gemma4VitEncoder):
            module.rotary_emb.inv_freq.zero_()
    return plain


def with_zeros(model: Any, encoding: Any, **settings: Any) -> Any:
    """A swapped model that starts without a rotation; one that rotates warns."""
    rotates = any(isinstance(module, ROTARY) for module in model.modules())
    if isinstance(encoding, tr.Encoding):
        encoding.zero_()
    warned = pytest.warns(UserWarning, match="outputs change, .* init='model' preserves it, got ")
    with warned if rotates else nullcontext():
        return tr.swap(model, encoding, init="zeros", **settings)


@pytest.mark.parametrize(
    "name_of_encoding", [pytest.param(name, marks=() if name == "mixed" else pytest.mark.slow) for name in ENCODINGS]
)
@pytest.mark.parametrize("name", MODELS)
def test_zero_generators_keep_outputs_bit_for_bit(name: str, name_of_encoding: str) -> None:
    model = made(name)
    plain = without_rotation(model)
    names, x = set(model.state_dict()), images(model)
    with_zeros(model, name_of_encoding)
    for training in (False, True):
        found, expected = drawn(model.train(training), x), drawn(plain.train(training), x)
        assert torch.equal(found, expected)
    model(x).square().sum().backward()
    for encoding in tower(model).rotary.encodings:
        assert any(p.grad.abs().max() > 0 for p in encoding.parameters() if p.grad is not None)
    assert {key for key in model.state_dict() if "rotary." not in key} == names


@pytest.mark.parametrize("name", MODELS)
def test_unswap_gives_the_model_back(name: str) -> None:
    model = made(name).eval()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    learns = {key: parameter.requires_grad for key, parameter in model.named_parameters()}
    x = images(model)
    expected = model(x)
    awake(tr.swap(model, "liere", keep_position_tables=False, init=None if name in ROTATING else "paper"))
    assert not torch.equal(model(x), expected)
    tr.unswap(model)
    assert torch.equal(model(x), expected)
    assert before.keys() == model.state_dict().keys()
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert learns == {key: parameter.requires_grad for key, parameter in model.named_parameters()}
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize(
    "name", ["vit", "vit_qk_norm", "rope_mixed_ape", "dinov3", "naflex_axial", "gemma4", "beit", *WINDOWS]
)
def test_copies_live_on_their_own(name: str) -> None:
    model = awake(tr.swap(strong(name), "liere", block_size=8)).eval()
    x = images(model)
    expected = model(x)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(x), expected)
        awake(twin)
        assert not torch.allclose(twin(x), expected, atol=1e-4)
        tr.unswap(twin)
        assert torch.equal(model(x), expected)


def test_encodings_alone_learn_as_documented() -> None:
    model = tr.swap(strong("rope_mixed_ape"), "mixed")
    model.requires_grad_(False)
    model.rotary.requires_grad_(True)
    model(images(model)).square().sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters() if parameter.requires_grad)
    assert all(parameter.requires_grad for parameter in model.rotary.encodings.parameters())
    assert not any(parameter.requires_grad for parameter in tr.unswap(model).parameters())  # the model stays frozen


def attention_in_float64(attention: Any, x: Tensor, encoding: tr.Encoding, positions: Tensor) -> Tensor:
    """softmax(q^T R^T R' k / sqrt d) v with dense matrices, from the weights of a timm attention layer."""
    projected = nn.functional.linear(x, attention.qkv.weight, attention.qkv.bias)  # a layer called would rotate
    heads = projected.unflatten(-1, (3, attention.num_heads, -1)).permute(2, 0, 3, 1, 4)
    q, k, v = heads.unbind(0)
    if hasattr(attention, "q_norm"):  # called, they would rotate
        q, k = (type(norm).forward(norm, y) for norm, y in ((attention.q_norm, q), (attention.k_norm, k)))
    exponents = torch.einsum("na,ahbij->hnbij", positions.to(x.dtype), encoding.generators().to(x.dtype))
    blocks = torch.linalg.matrix_exp(exponents.contiguous())  # (heads, tokens, blocks, b, b)
    q, k = (
        torch.einsum("hnbij,shnbj->shnbi", blocks, y.unflatten(-1, (blocks.shape[2], -1))).flatten(-2) for y in (q, k)
    )
    weights = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
    return attention.proj((weights @ v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize(
    ("name", "encoding"), [("vit_qk_norm", "mixed"), *(("vit", one) for one in ("mixed", "liere:4", "comrope-ld:4"))]
)
def test_swapped_layer_is_rotary_attention(name: str, encoding: str) -> None:
    model = tr.swap(made(name, dynamic_img_size=True), encoding, init="paper").eval().double()
    seen: dict[str, Tensor] = {}
    layer = model.blocks[0].attn
    layer.register_forward_hook(lambda module, args, output: seen.update(x=args[0], y=output))
    model(images(model, by=(0.5, 1.5)).double())
    rotary = model.rotary
    positions = tr.prefix(rotary.lattices[0](2, 6, dtype=torch.float64), 1)
    truth = attention_in_float64(layer, seen["x"], rotary.encodings[0], positions)
    assert torch.allclose(seen["y"], truth, atol=1e-7)


@pytest.mark.filterwarnings("ignore::UserWarning:timm")
def test_swin_at_another_input_and_window() -> None:
    model = awake(tr.swap(made("swin"), "mixed", keep_position_tables=False, init="paper")).eval()
    lattice = model.rotary.lattices[0]
    model.set_input_size((112, 84), window_size=(8, 7))
    assert model(torch.randn(1, 3, 112, 84)).shape == (1, 5)
    assert model.rotary.lattices[0] == lattice  # the spacing is that of the training size


def test_windows_are_rotated_by_their_lattice() -> None:
    """A Swin of one window attends like a ViT layer does over that lattice."""
    model = tr.swap(made("swin", window_size=14), "liere:4", init="paper", keep_position_tables=False).eval().double()
    seen: dict[str, Tensor] = {}
    layer = model.layers[0].blocks[0].attn
    layer.register_forward_hook(lambda module, args, output: seen.update(x=args[0], y=output))
    model(images(model).double())
    rotary = model.rotary
    positions = rotary.lattices[0](14, 14, dtype=torch.float64)
    truth = attention_in_float64(layer, seen["x"], rotary.encodings[0], positions)
    assert seen["y"].shape == (2, 196, 32)
    assert torch.allclose(seen["y"], truth, atol=1e-5)  # positions are float32


def test_patch_dropout_gathers_positions() -> None:
    """Patches that are left turn as they do in the whole image."""
    model = awake(tr.swap(made("vit", patch_drop_rate=0.5), "mixed")).train()
    turned: list[tuple[Tensor, Tensor]] = []
    model.blocks[0].attn.fused_attn = False  # rotated after its norms
    norm = model.blocks[0].attn.q_norm
    kept: list[Tensor] = []
    model.patch_drop.register_forward_hook(lambda module, args, output: kept.append(output))
    norm.register_forward_hook(lambda module, args, output: turned.append((args[0], output)))
    before = model.patch_drop.register_forward_pre_hook(lambda module, args: kept.append(args[0]))
    drawn(model, images(model, batch=3))
    before.remove()
    whole, left = kept[0], kept[1]
    assert left.shape[1] < whole.shape[1]
    index = (whole.unsqueeze(1) == left.unsqueeze(2)).all(-1).int().argmax(-1)  # (batch, tokens left)
    q, turned_q = turned[0]
    positions = tr.prefix(tr.grid(4, 4), 1)[index]
    expected, _ = tr.rotate(q, q, model.rotary.encodings[0](positions))
    assert torch.allclose(turned_q, expected, atol=1e-5)
    assert "forward" not in vars(tr.unswap(model).patch_drop)


def test_shared_encoding_is_computed_once() -> None:
    encoding = tr.LieRE(num_axes=2, num_heads=2, head_dim=16, block_size=8)
    calls: list[Any] = []
    encoding.register_forward_hook(lambda *seen: calls.append(seen))
    model = tr.swap(made("vit"), encoding, init="paper")
    model(images(model))
    assert len(calls) == 1
    assert sum(p.numel() for p in model.rotary.parameters()) == sum(p.numel() for p in encoding.parameters())


def wrong(**changes: Any) -> tr.Encoding:
    return tr.MixedRoPE(**{**dict(num_axes=2, num_heads=2, head_dim=16), **changes})


@pytest.mark.parametrize(
    ("model", "settings", "message"),
    [
        (lambda: nn.Linear(2, 2), dict(encoding="mixed"), "swap supports the models .* got Linear"),
        (lambda: nn.ModuleList([made("vit"), made("vit")]), dict(encoding="mixed"), "got ModuleList, with 2 of them"),
        (lambda: tr.swap(made("vit"), "mixed"), dict(encoding="mixed"), "got a swapped VisionTransformer"),
        (lambda: made("vit"), dict(encoding="learned+mixed"), "=True keeps the model's table\\), got 'learned"),
        (lambda: made("vit"), dict(encoding="mixd"), "did you mean 'mixed'"),
        (lambda: made("vit"), dict(encoding=wrong(num_heads=3)), "head_dim=16, got MixedRoPE.*num_heads=3"),
        (lambda: made("vit"), dict(encoding=wrong(), block_size=2), "block_size must be None if .*, got 2"),
        (lambda: made("vit"), dict(encoding="mixed", block_size=2), "block_size must be None unless .* 'mixed' and 2"),
        (lambda: made("vit"), dict(encoding="liere:8", block_size=4), "block_size must be None unless .*:8' and 4"),
        (lambda: made("vit"), dict(encoding="mixed", spacing=(1.0, 2.0, 3.0)), r"spacing must be .* \(2\), got 3"),
        (lambda: made("vit"), dict(encoding="mixed", init="zero"), "init must be 'model', 'paper' or 'zeros', got '"),
        (lambda: made("vit"), dict(encoding="liere", block_size=5), "head_dim must be divisible by block_size = 5"),
    ],
)  # fmt: skip
def test_swap_refuses_unsupported_models(
    model: Callable[[], nn.Module], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        tr.swap(model(), **settings)


def test_layer_that_swap_does_not_know_is_named() -> None:
    class Own(nn.Identity):
        def __init__(self, **settings: Any) -> None:
            super().__init__()

    with pytest.raises(ValueError, match="separate norms of q and k, got Own as block 0"):
        tr.swap(VisionTransformer(block_fn=Own, **SMALL), "mixed")


def test_unswap_needs_a_swapped_model_of_the_same_size() -> None:
    with pytest.raises(ValueError, match="unswap needs a swapped model, got VisionTransformer"):
        tr.unswap(made("vit"))
    model = tr.swap(made("vit"), "mixed", keep_position_tables=False, init="paper")
    model.set_input_size((32, 64))
    with pytest.raises(ValueError, match="got a position table of"):
        tr.unswap(model)


def test_older_library_is_refused_with_both_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timm, "__version__", "1.0.9")
    with pytest.raises(ImportError, match=r"^swap needs timm 1\.0\.31 or newer, got 1\.0\.9$"):
        tr.swap(MODELS["vit"](), "mixed")


@pytest.mark.parametrize("encoding", ["axial", tr.MixedRoPE(num_axes=2, num_heads=2, head_dim=16)], ids=str)
def test_swap_warns_if_outputs_change_unless_it_is_asked_to(encoding: Any) -> None:
    with pytest.warns(UserWarning, match="outputs change, because the encoding rotates from the start"):
        tr.swap(made("vit"), encoding)
    tr.swap(made("vit"), encoding, init="paper")


def test_failed_swap_leaves_the_model_as_it_was() -> None:
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=3, qk_norm=True).eval()
    model.blocks[-1].attn.q_norm = None
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trainable = [parameter.requires_grad for parameter in model.parameters()]
    with pytest.raises(ValueError, match="q_norm"):
        tr.swap(model, "mixed", keep_position_tables=False, init="paper")
    after = model.state_dict()
    assert {*after} == {*before}
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert [parameter.requires_grad for parameter in model.parameters()] == trainable
    model.blocks[-1].attn.q_norm = nn.Identity()
    tr.swap(model, "mixed", keep_position_tables=False, init="paper")
