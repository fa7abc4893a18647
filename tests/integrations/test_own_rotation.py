"""Models of timm that rotate: the same outputs after a swap, gradients to their frequencies, and the way back."""

import copy
import warnings
from functools import partial
from typing import Any

import pytest
import timm
import torch
from swapped import NAFLEX_ROPE, ROTATING, SMALL, drawn, images, strong, tower
from timm.layers.pos_embed_sincos import apply_rot_embed_cat, build_rotary_pos_embed
from timm.models.naflexvit import batch_patchify
from torch import Tensor, nn
from torch.nn import functional

import torchrope as tr
from torchrope.encodings.base import planar
from torchrope.integrations.own_rotation import OwnRotation, halves, interleaved
from torchrope.lattice import Lattice

LEARNED = ["mixed", *(pytest.param(name, marks=pytest.mark.slow) for name in ("liere:4", "string:8", "comrope-ld:4"))]
PER_HEAD = ("rope_mixed_ape", "naflex_mixed")  # no axis for each pair, heads that differ
SIZES = {"any": ["rope_axial", "eva02", "dinov3", "rope_mixed_ape"], "always": [*NAFLEX_ROPE, "qwen3", "deepseek"]}


def error(model: Any, x: Any, expected: Tensor) -> float:
    with torch.no_grad():
        return float((model(x) - expected).abs().max() / expected.abs().max())


def unrotated(model: Any) -> Any:
    """A copy that is swapped to an encoding which does not rotate."""
    with pytest.warns(UserWarning, match="outputs change, .* init='model' preserves it, got "):
        return tr.swap(copy.deepcopy(model), "mixed", init="zeros")


def frequencies(model: Any) -> list[nn.Parameter]:
    return [parameter for name, parameter in model.named_parameters() if ".encodings." in name]


@pytest.mark.parametrize("encoding", [*LEARNED, "comrope-ap:4"])
@pytest.mark.parametrize("name", ROTATING)
def test_outputs_are_those_of_before_and_frequencies_learn(name: str, encoding: str) -> None:
    model = strong(name)
    x = images(model)
    expected = model(x)
    if name in PER_HEAD and encoding in ("comrope-ap:4", "comrope-ld:4"):
        with pytest.raises(ValueError, match=r"^init='model' needs a family that can represent the model's rotation"):
            tr.swap(model, encoding)
        assert torch.equal(model(x), expected)
        return
    if encoding == "mixed":
        assert error(unrotated(model), x, expected) > 0.05
    assert tr.swap(model, encoding) is model
    assert error(model, x, expected) < 1e-5
    model(x).square().sum().backward()
    for layer in tower(model).rotary.encodings:
        assert any(parameter.grad is not None and parameter.grad.any() for parameter in layer.parameters())


@pytest.mark.parametrize("name", [*SIZES["any"], *SIZES["always"], "gemma4"])
def test_other_sizes_are_those_of_the_model(name: str) -> None:
    settings = {"dynamic_img_size": True} if name in SIZES["any"] else {}
    model = strong(name, **settings)
    patch = 14 if name in ("eva02", "deepseek") else 16
    wide = [torch.randn(1, 3, rows * patch, columns * patch) for rows, columns in ((2, 6), (6, 4))]
    expected = [model(x) for x in wide]
    tr.swap(model, "mixed")
    for x, before in zip(wide, expected, strict=True):
        assert error(model, x, before) < 1e-5


@pytest.mark.parametrize("name", ["rope_axial", "eva02", "dinov3", "rope_mixed_ape", "pe"])
def test_size_that_is_set_after_the_swap(name: str) -> None:
    model = strong(name)
    plain = copy.deepcopy(model)
    tr.swap(model, "mixed")
    size = tuple(2 * extent for extent in model.patch_embed.img_size)
    for one in (model, plain):
        one.set_input_size(size)
    x = torch.randn(1, 3, *size)
    expected = plain(x)
    assert error(model, x, expected) < 1e-5
    assert torch.equal(tr.unswap(model)(x), expected)


def patches(*sizes: tuple[int, int]) -> dict[str, Tensor]:
    """Images of several sizes in patches of 16, as NaFlexVit takes them in one batch."""
    longest = max(rows * columns for rows, columns in sizes)
    batch: dict[str, list[Tensor]] = {"patches": [], "patch_coord": [], "patch_valid": []}
    for rows, columns in sizes:
        tokens, _ = batch_patchify(torch.randn(1, 3, 16 * rows, 16 * columns), (16, 16))
        missing = longest - rows * columns
        batch["patches"].append(functional.pad(tokens[0], (0, 0, 0, missing)))
        batch["patch_coord"].append(functional.pad(tr.grid(rows, columns).long(), (0, 0, 0, missing)))
        batch["patch_valid"].append(torch.arange(longest) < rows * columns)
    return {name: torch.stack(parts) for name, parts in batch.items()}


@pytest.mark.parametrize("name", [*NAFLEX_ROPE, "gemma4"])
def test_images_of_mixed_sizes(name: str) -> None:
    model = strong(name)
    x = patches((4, 4), (2, 6), (3, 2))
    call = partial(model, **{"x": x["patches"], **{key: x[key] for key in ("patch_coord", "patch_valid")}})
    expected = call()
    tr.swap(model, "liere:4")
    assert (call() - expected).abs().max() < 1e-5 * expected.abs().max()


def test_naflex_without_rotation_is_bit_identical_and_rotates_each_image_by_its_lattice() -> None:
    model = strong("naflex")
    x = patches((4, 4), (2, 6))
    expected = model(x)
    tr.swap(model, "liere:4")
    assert torch.equal(model(x), expected)
    with torch.no_grad():
        for parameter in frequencies(model):
            parameter.normal_(0, 2)
    together = model(x)
    assert not torch.allclose(together, expected, atol=1e-2)
    alone = {"patches": x["patches"][1:, :12], "patch_coord": x["patch_coord"][1:, :12]}
    alone["patch_valid"] = x["patch_valid"][1:, :12]
    assert torch.allclose(model(alone), together[1:], atol=1e-5)


@pytest.mark.parametrize("name", ["eva02", "dinov3", "naflex_axial", "naflex_mixed", "naflex_dinov3"])
def test_tokens_left_by_patch_dropout_keep_their_places(name: str) -> None:
    model = strong(name, patch_drop_rate=0.5).train()
    x = images(model)
    expected = drawn(model, x).detach()
    tr.swap(model, "mixed")
    assert torch.allclose(drawn(model, x), expected, atol=1e-5 * float(expected.abs().max()))


IN_DOUBLE = ["rope_axial", "eva02", "dinov3", "naflex_dinov3", "naflex_mrope", "qwen3", "deepseek"]


@pytest.mark.parametrize("encoding", LEARNED)
@pytest.mark.parametrize("name", IN_DOUBLE)
def test_exact_in_float64(name: str, encoding: str) -> None:
    """timm rounds the tables of some models to float32 unless told otherwise, RoPE-Mixed and Gemma 4 always."""
    settings = {"dynamic_img_size": True} if name in SIZES["any"] else {}
    model = strong(name, **settings).double()
    rope = tower(model).rope
    rope.get_embed = partial(rope.get_embed, dtype=torch.float64)
    x = images(model).double()
    expected = model(x)
    tr.swap(model, encoding)
    assert error(model, x, expected) < 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vit", "vit_qk_norm", "rope_mixed_ape", "swin", "beit", "swin_v2", "sam"])
def test_compiles_into_one_graph(name: str) -> None:
    model = strong(name)
    x = images(model)
    tr.swap(model, "liere:4", init="model" if name in ROTATING else "paper")
    assert error(torch.compile(model, fullgraph=True, backend="aot_eager"), x, model(x)) < 1e-5


def test_positions_move_in_training_as_the_model_moves_them() -> None:
    model = tr.swap(strong("dinov3", rope_rescale_coords=2.0, rope_shift_coords=0.1), "mixed")
    rotary, tokens = model.rotary, (tr.grid(4, 4), (4, 4), 1)
    still = rotary.positions(*tokens)[0]
    assert torch.equal(still, rotary.positions(*tokens)[0])
    for moved, again in (rotary.train().positions(*tokens),) * 5:
        assert moved is again  # one draw for all layers
        assert not torch.equal(moved, still)
        assert not moved[0].any()
        stretched = (moved[5] - moved[1]) / (still[5] - still[1])  # one step down
        assert 0.5 <= stretched[0] <= 2
        shift = moved[1:].mean(dim=0) / stretched[0]
        assert shift.abs().max() <= 0.1 + 1e-6
    x = images(model)
    assert not torch.equal(drawn(model.train(), x), drawn(model.eval(), x))


def test_layers_that_rotate_alike_share_one_encoding() -> None:
    model = strong("dinov3")
    x = images(model)
    expected = model(x)
    encoding = tr.LieRE(num_axes=2, num_heads=2, head_dim=16, block_size=4)
    tr.swap(model, encoding, init="model")
    assert error(model, x, expected) < 1e-5
    assert model.rotary.encodings[0] is encoding
    with pytest.raises(ValueError, match="for init='model' if layers rotate differently, got one"):
        tr.swap(strong("rope_mixed_ape"), encoding, init="model")


def test_given_encodings_keep_their_generators_by_default() -> None:
    model = strong("rope_axial")
    x = images(model)
    expected = model(x)
    encoding = tr.MixedRoPE(num_axes=2, num_heads=2, head_dim=16)
    before = encoding.frequencies.clone()
    for given in (encoding, lambda **head: encoding):
        with pytest.warns(UserWarning, match="init='model' preserves it, got Eva$"):
            tr.swap(model, given)
        assert torch.equal(encoding.frequencies, before)
        tr.unswap(model)
    for given in (tr.MixedRoPE, partial(tr.LieRE, block_size=4)):
        assert error(tr.swap(model, given), x, expected) < 1e-5
        tr.unswap(model)
    assert error(tr.swap(model, lambda **head: tr.MixedRoPE(**head), init="model"), x, expected) < 1e-5


def test_grouped_queries_rotate_as_their_keys_do() -> None:
    model = strong("dinov3", attn_type="rope", qkv_fused=False, num_kv_heads=(2, 1))
    x = images(model)
    expected = model(x)
    tr.swap(model, "mixed")
    assert [layer.num_heads for layer in model.rotary.encodings] == [2, 1]
    assert error(model, x, expected) < 1e-5


@pytest.mark.parametrize("name", ["dinov3", "rope_mixed_ape", "vit"])
def test_features_and_intermediates_are_those_of_before(name: str) -> None:
    x = torch.randn(2, 3, 64, 64)
    features = strong(name, features_only=True, out_indices=(0,), num_classes=0)
    [expected] = features(x)
    [came] = tr.swap(features, "mixed")(x)
    assert torch.allclose(came, expected, atol=1e-5 * float(expected.detach().abs().max()))
    model = strong(name)
    _, [before] = model.forward_intermediates(x, indices=[0])
    final, [after] = tr.swap(model, "mixed").forward_intermediates(x, indices=[0])
    assert torch.allclose(after, before, atol=1e-5 * float(before.detach().abs().max()))
    assert torch.allclose(model.forward_head(final), model(x), atol=1e-5)


@pytest.mark.parametrize("init", ["zeros", "paper"])
def test_other_starts_are_said_and_warn_once(init: str) -> None:
    model = strong("dinov3")
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        tr.swap(model, "mixed", init=init)
    assert [str(one.message).count("\n") for one in warned] == [0]
    assert warned[0].filename == __file__
    assert model.rotary.lattices[0] == Lattice((1.0, 1.0), (0.0, 0.0))  # the paper's, not the model's


def test_kept_rotation_rejects_init_own() -> None:
    model = strong("dinov3")
    x = images(model)
    expected = model(x)
    assert torch.equal(tr.swap(model, "mixed", keep_rotation=True)(x), expected)
    tr.unswap(model)
    with pytest.raises(ValueError, match="keep_rotation must be False for init='model', got True"):
        tr.swap(model, "mixed", init="model", keep_rotation=True)
    kept = strong("sam_rope")
    x = images(kept)
    expected = kept(x)
    assert error(tr.swap(kept, "mixed", keep_rotation=True), x, expected) < 1e-6


class OtherRope(nn.Module):
    def get_embed(self, **settings: Any) -> None:
        return None


def with_another_rope(model: Any) -> Any:
    model.rope = OtherRope()
    return model


@pytest.mark.parametrize(
    ("model", "settings", "message"),
    [
        (partial(strong, "vit"), dict(init="model"), "needs a model with a built-in rotation, got VisionTransformer$"),
        (partial(strong, "dinov3"), dict(spacing=0.5), "keeps the model's positions; .* take spacing, got spacing=0.5"),
        (partial(strong, "dinov3"), dict(encoding="none"), "can represent .*: generators of NoEncoding must be zero"),
        (lambda: with_another_rope(strong("dinov3")), {}, "reads timm's RotaryEmbeddingCat.* got OtherRope"),
        (
            partial(timm.create_model, "vit_small_patch16_rope_mixed_224", device="meta", **SMALL),
            {},
            "swap a model whose parameters have values, got frequencies on the meta device",
        ),
        (
            partial(strong, "dinov3"),
            dict(encoding=partial(tr.MixedRoPE, rotary_dim=8)),
            "rotates the 16 channels which the model rotates, got rotary_dim=8",
        ),
        (
            partial(timm.create_model, "hiera_tiny_224", device="meta"),
            {},
            "but Hiera's queries are max-pooled over several tokens; .* got Hiera$",
        ),
        (
            partial(timm.create_model, "sam2_hiera_tiny", device="meta"),
            {},
            "in a HieraDet of your own takes any positions, got HieraDet$",
        ),
    ],
)
def test_unsupported_models_are_refused(model: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as refused:
        tr.swap(model(), **{"encoding": "mixed", **settings})
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["sam", "swin_v2", "swin"])
def test_tokens_at_one_place_attend_as_without_a_rotation(name: str) -> None:
    """What turns alike keeps its scores, and biases are not those of what was turned."""
    model = strong(name).double()
    x = images(model).double()
    expected = model(x)
    tr.swap(model, "liere:4", init="paper", spacing=0.0, origin=3.0)
    assert error(model, x, expected) < 1e-10


def by_formula(layer: Any, turn: Any, x: Tensor) -> Tensor:
    """softmax(scale · q^T R^T R' k) v without biases of scores, in float64, for Beit and SwinTransformerV2."""
    heads = nn.functional.linear(x, layer.qkv.weight, torch.cat([layer.q_bias, layer.k_bias, layer.v_bias]))
    q, k, v = heads.unflatten(-1, (3, layer.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
    if hasattr(layer, "logit_scale"):
        q, k = (one / one.norm(dim=-1, keepdim=True) for one in (q, k))
        scale = layer.logit_scale.exp()
    else:
        scale = q.shape[-1] ** -0.5
    q, k = ((turn @ one.unsqueeze(-1)).squeeze(-1) for one in (q, k))
    return layer.proj(((q @ k.mT * scale).softmax(-1) @ v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize(("name", "sizes", "front"), [("beit", (4, 4), 1), ("swin_v2", (8, 8), 0)])
def test_layers_whose_forward_is_replaced_are_rotary_attention(name: str, sizes: tuple[int, int], front: int) -> None:
    model = tr.swap(strong(name).double(), "liere:4", init="paper", keep_position_tables=False)
    seen: dict[str, Tensor] = {}
    layer = model.blocks[0].attn if name == "beit" else model.layers[0].blocks[0].attn
    layer.register_forward_hook(lambda module, args, output: seen.update(x=args[0], y=output))
    model(images(model).double())
    rotary = model.rotary
    positions = tr.prefix(rotary.lattices[0](*sizes, dtype=torch.float64), front)
    generators = rotary.encodings[0].generators()
    exponents = torch.einsum("na,ahbij->hnbij", positions, generators)
    turn = torch.stack([torch.stack([torch.block_diag(*of_token) for of_token in head]) for head in exponents])
    truth = by_formula(layer, torch.linalg.matrix_exp(turn), seen["x"])
    assert torch.allclose(seen["y"], truth, atol=1e-9)


def test_channels_of_own_rotations() -> None:
    assert interleaved(6) == (0, 1, 2, 3, 4, 5)
    assert halves(8) == (0, 4, 1, 5, 2, 6, 3, 7)
    assert halves(10, parts=2) == (0, 2, 1, 3, 4, 6, 5, 7, 8, 9)
    for channels in ((0, 1, 1), (1, 2)):
        with pytest.raises(ValueError, match="channels must be each channel of a head once"):
            OwnRotation(torch.zeros(2, 1, 1), channels)
    with pytest.raises(ValueError, match="pairs must be at most half the channels, got 2 of them"):
        OwnRotation(torch.zeros(2, 1, 2), (0, 1, 2))
    with pytest.raises(ValueError, match=r"floating point \(axes, heads or 1, pairs\), got torch.int64 \(2, 1\)"):
        OwnRotation(torch.zeros(2, 1, dtype=torch.int64), (0, 1))


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize(
    ("lattice", "grid"),
    [
        (Lattice(), dict(grid_type="index")),
        (Lattice(offset=0.5), dict(grid_type="index", grid_offset=0.5)),
        (Lattice((8.0, 4.0), per="size"), dict(grid_type="index", ref_feat_shape=(8, 4))),
        (Lattice(2.0, -1.0, per="steps"), dict(grid_type="pixel")),
        (Lattice(2.0, -1.0, 0.5, per="size"), dict(grid_type="centered")),
        (Lattice(2.0, -1.0, 0.5, per="longest"), dict(grid_type="centered", normalize_coords="max")),
        (Lattice(2.0, -1.0, 0.5, per="shortest"), dict(grid_type="centered", normalize_coords="min")),
    ],
)
def test_scores_are_those_of_timms_tables(lattice: Lattice, grid: dict[str, Any], half: bool) -> None:
    bands = 2.0 * torch.rand(4)
    own = OwnRotation(torch.block_diag(bands, bands).unsqueeze(1), (halves if half else interleaved)(16), lattice, 2)
    q, k = torch.randn(2, 1, 3, 2 + 15, 16)
    table = torch.cat(build_rotary_pos_embed([5, 3], bands, in_pixels=False, rotate_half=half, **grid), dim=-1)
    theirs = [torch.cat([x[..., :2, :], apply_rot_embed_cat(x[..., 2:, :], table, half=half)], dim=2) for x in (q, k)]
    ours = tr.rotate(q[..., own.channels], k[..., own.channels], own.rotation(5, 3))
    assert torch.allclose(ours[0] @ ours[1].mT, theirs[0] @ theirs[1].mT, atol=1e-4)


def test_lattices_of_samples_are_those_of_each() -> None:
    sizes = [(4, 2), (1, 8)]
    indices = torch.stack([tr.grid(*one) for one in sizes])
    extents = [torch.tensor([[rows] for rows, _ in sizes]), torch.tensor([[columns] for _, columns in sizes])]
    for per in ("one", "size", "longest", "shortest", "steps"):
        lattice = Lattice((2.0, 3.0), (-1.0, 0.5), 0.5, per)  # type: ignore[arg-type]
        each = torch.stack([lattice(*one) for one in sizes])
        assert torch.allclose(lattice.at(indices, extents), each)
    assert Lattice(per="steps")(1, 1).isfinite().all()
    assert Lattice(per="size")(0, 3).shape == (0, 2)


def test_pairs_are_dealt_to_the_axes_where_a_family_needs_that() -> None:
    ladder = torch.tensor([[1.0, 0, 0.5, 0, 0, 0], [0, 0, 0, 2.0, 4.0, 0]]).unsqueeze(1)  # two pairs at rest
    own = OwnRotation(ladder, halves(12))
    encoding = tr.ComRoPEAP(num_axes=2, num_heads=1, head_dim=12, block_size=2, rotary_dim=12)
    order = own.transfer_to(encoding)
    assert sorted(order) == list(range(12))
    q, k = torch.randn(2, 1, 1, 6, 12)
    truth = tr.rotate(q[..., own.channels], k[..., own.channels], own.rotation(2, 3))
    ours = tr.rotate(q[..., order], k[..., order], encoding(tr.grid(2, 3)))
    assert torch.allclose(ours[0] @ ours[1].mT, truth[0] @ truth[1].mT, atol=1e-5)
    tilted = OwnRotation(ladder + ladder.flip(0), halves(12))
    with pytest.raises(ValueError, match=r"'mixed' can.*: ComRoPEAP rotates block j along axis j mod 2"):
        tilted.transfer_to(encoding)


def test_fewer_pairs_than_the_encoding_turns_leave_the_rest_at_rest() -> None:
    own = OwnRotation(torch.rand(2, 1, 2), (*halves(4), 4, 5, 6, 7))
    encoding = tr.MixedRoPE(num_axes=2, num_heads=3, head_dim=8)
    own.transfer_to(encoding)
    assert torch.equal(encoding.frequencies[..., 2:], torch.zeros(2, 3, 2))
    assert torch.equal(encoding.generators()[..., :2, :, :], planar(own.frequencies).expand(-1, 3, -1, -1, -1))
