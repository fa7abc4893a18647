"""The vision transformer: against timm, the papers' sizes, any number of axes, shared layers, zero generators."""

from functools import partial

import pytest
import torch
from cases import CASES
from timm.layers.pos_embed_sincos import RotaryEmbeddingCat, RotaryEmbeddingMixed, apply_rot_embed_cat
from timm.models.vision_transformer import VisionTransformer
from torch import nn
from torch.nn import functional
from torch.nn.init import _calculate_fan_in_and_fan_out as fans
from torch.utils.flop_counter import FlopCounterMode

import torchrope as tr
from torchrope.encodings import ABSOLUTE, ROTARY
from torchrope.models import SIZES

tiny = partial(tr.ViT, in_channels=1, num_outputs=5, dim=48, depth=2, num_heads=2, mlp_dim=32)


def test_vit_equals_timm_with_the_same_weights() -> None:
    theirs = VisionTransformer(
        img_size=(32, 48), patch_size=8, embed_dim=48, depth=3, num_heads=4, num_classes=7, no_embed_class=True
    ).eval()
    mine = tr.ViT((32, 48), patch_size=8, num_outputs=7, dim=48, depth=3, num_heads=4, encoding="learned").eval()
    mine.load_state_dict(_from_timm(theirs))
    x = torch.randn(2, 3, 32, 48)
    assert (mine(x) - theirs(x)).abs().max() < 1e-5


def test_norms_and_activation_follow_the_arguments() -> None:
    settings = dict(embed_dim=48, depth=2, num_heads=4, num_classes=7)
    theirs = VisionTransformer(
        img_size=(32, 48),
        patch_size=8,
        no_embed_class=True,
        pre_norm=True,
        norm_layer=partial(nn.LayerNorm, eps=0.3),
        act_layer="silu",
        **settings,
    ).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(0, 0.2)
    mine = tr.ViT(
        (32, 48),
        patch_size=8,
        num_outputs=7,
        dim=48,
        depth=2,
        num_heads=4,
        encoding="learned",
        activation=nn.SiLU,
        norm_eps=0.3,
        embedding_norm=True,
    ).eval()
    mine.load_state_dict(_from_timm(theirs))
    x = torch.randn(2, 3, 32, 48)
    assert (mine(x) - theirs(x)).abs().max() < 1e-5


def _from_timm(model: VisionTransformer) -> dict[str, torch.Tensor]:
    names = {"blocks.": "layers.", ".attn.": ".attention.", ".mlp.fc1.": ".mlp.0.", ".mlp.fc2.": ".mlp.3."}
    names |= {"norm_pre.": "embedding_norm."}
    state = {}
    for name, value in model.state_dict().items():
        for old, new in names.items():
            name = name.replace(old, new)
        state[name] = value
    state["embed.proj.weight"] = state.pop("patch_embed.proj.weight").flatten(1)
    state["embed.proj.bias"] = state.pop("patch_embed.proj.bias", torch.zeros(model.embed_dim))
    state["absolute.table"] = state.pop("pos_embed").reshape(4, 6, -1)
    state["prefix_tokens"] = state.pop("cls_token")[0]
    return state


def test_mixed_and_axial_equal_timm() -> None:
    heads, head_dim, size = 3, 16, (4, 6)
    q = torch.randn(2, heads, 24, head_dim)
    mixed = RotaryEmbeddingMixed(heads * head_dim, 1, heads, feat_shape=size, grid_indexing="ij")
    encoding = tr.MixedRoPE(num_axes=2, num_heads=heads, head_dim=head_dim)
    with torch.no_grad():
        encoding.frequencies.copy_(mixed.freqs[:, 0])
    theirs = apply_rot_embed_cat(q, mixed.get_embed()[0])
    assert (tr.rotate(q, q, encoding(tr.grid(*size)))[0] - theirs).abs().max() < 1e-5

    cat = RotaryEmbeddingCat(
        head_dim, temperature=100.0, in_pixels=False, feat_shape=size, grid_indexing="ij", grid_offset=0.0
    )
    bands = torch.zeros(2, head_dim // 2)
    bands[0, : head_dim // 4] = bands[1, head_dim // 4 :] = cat.bands
    axial = tr.AxialRoPE(num_axes=2, num_heads=heads, head_dim=head_dim)
    axial.set_generators(tr.encodings.base.planar(bands).unsqueeze(1))
    theirs = apply_rot_embed_cat(q, cat.get_embed())
    assert (tr.rotate(q, q, axial(tr.grid(*size)))[0] - theirs).abs().max() < 1e-5
    assert torch.allclose(cat.bands, tr.AxialRoPE(num_axes=2, num_heads=1, head_dim=head_dim).frequencies[0, 0::2])


@pytest.mark.parametrize(("size", "gmacs"), [("tiny", 0.9634), ("base", 5.6073), ("large", 19.8566)])
def test_sizes_have_the_operation_counts_of_the_papers(size: str, gmacs: float) -> None:
    # LieRE's table 5 counts multiply-adds of products and 5 operations per normalised number (CIFAR, 65 tokens).
    dim, depth = SIZES[size]["dim"], SIZES[size]["depth"]
    norms = 5 * (2 * depth + 1) * 65 * dim
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        tr.ViT((32, 32), patch_size=4, num_outputs=100, **SIZES[size])(torch.empty(1, 3, 32, 32))
    assert (counter.get_total_flops() / 2 + norms) / 1e9 == pytest.approx(gmacs, rel=2e-3)


def test_base_size_has_the_parameter_count_of_the_paper() -> None:
    with torch.device("meta"):
        model = tr.ViT((32, 32), patch_size=4, num_outputs=100, **SIZES["base"], encoding="liere:8", qkv_bias=False)
    assert sum(p.numel() for p in model.encodings.parameters()) == 64_512
    assert sum(p.numel() for p in model.parameters()) - 64_512 == 85_143_652


@pytest.mark.parametrize(
    ("sizes", "patch", "other"),
    [
        ((24,), 4, (40,)),
        ((8, 12), (4, 2), (12, 8)),
        ((4, 6, 8), (2, 3, 2), (8, 6, 4)),
        ((2, 4, 2, 4), (1, 2, 1, 2), (4, 4, 2, 2)),
    ],
)
@pytest.mark.parametrize("name", [*ROTARY, *ABSOLUTE, "learned+mixed"])
def test_any_number_of_axes_and_other_sizes_at_inference(
    sizes: tuple[int, ...], patch: int | tuple[int, ...], other: tuple[int, ...], name: str
) -> None:
    if name == "spiral" and len(sizes) != 2:
        pytest.skip("directions of a plane")
    encoding = {"comrope-ap": "comrope-ap:2", "comrope-ld": "comrope-ld:4"}.get(name, name)
    size = {"mhrope": dict(dim=48, num_heads=4), "nd": dict(dim=60 if len(sizes) == 4 else 48)}.get(name, dict(dim=48))
    shape = dict(patch_size=patch, in_channels=2, num_outputs=5, depth=2, num_heads=2)
    model = tr.ViT(sizes, encoding=encoding, **{**shape, **size})
    assert model(torch.randn(3, 2, *sizes)).shape == (3, 5)
    assert model(torch.randn(1, 2, *other)).shape == (1, 5)


def test_embedding_is_a_convolution_of_stride_patch() -> None:
    embed = tr.models.vit.PatchEmbed((2, 3), 4, 8, num_axes=2)
    x = torch.randn(2, 4, 6, 9)
    kernel = embed.proj.weight.reshape(8, 4, 2, 3)
    expected = functional.conv2d(x, kernel, embed.proj.bias, stride=(2, 3)).flatten(2).mT
    assert torch.allclose(embed(x), expected, atol=1e-5)


@pytest.mark.parametrize("pool", ["cls", "mean"])
@pytest.mark.parametrize("family", [tr.MixedRoPE, tr.LieRE, partial(tr.ComRoPEAP, block_size=2), tr.ComRoPELD])
def test_zero_generators_leave_a_model_bit_identical_to_no_encoding(family: type, pool: str) -> None:
    plain = tiny((8, 8), patch_size=2, encoding="none", pool=pool)
    rotated = tiny((8, 8), patch_size=2, encoding=family, pool=pool)
    for encoding in rotated.encodings:
        encoding.zero_()
    missing = rotated.load_state_dict(plain.state_dict(), strict=False)
    assert not missing.unexpected_keys
    x = torch.randn(3, 1, 8, 8)
    assert torch.equal(rotated(x), plain(x))
    rotated(x).square().sum().backward()
    gradients = [p.grad for p in rotated.encodings.parameters()]
    assert any(g is not None and g.abs().sum() > 0 for g in gradients)


def test_order_of_patches_is_ignored_without_encoding() -> None:
    x = torch.randn(2, 1, 8, 8)
    mixed_up = x.roll(4, dims=3)  # whole patches change places
    none, mixed = (tiny((8, 8), patch_size=4, encoding=name) for name in ("none", "mixed"))
    assert torch.allclose(none(x), none(mixed_up), atol=1e-5)
    assert not torch.allclose(mixed(x), mixed(mixed_up), atol=1e-3)


def test_shared_layers_have_one_encoding_and_one_rotation() -> None:
    model = tiny((8, 8), patch_size=2, encoding="mixed", share_layers=True)
    own = tiny((8, 8), patch_size=2, encoding="mixed")
    assert len([*own.encodings.parameters()]) == 2 * len([*model.encodings.parameters()])
    calls = []
    model.encodings[0].register_forward_hook(lambda *_: calls.append(1))
    model(torch.randn(1, 1, 8, 8))
    assert len(calls) == 1


def test_larger_inputs_keep_the_training_spacing() -> None:
    model = tiny((8, 8), patch_size=2, encoding="liere:8")
    small = model.encodings[0](model.positions((4, 4))).matrix()[:, 1:].unflatten(1, (4, 4))
    large = model.encodings[0](model.positions((6, 6))).matrix()[:, 1:].unflatten(1, (6, 6))
    assert torch.allclose(large[:, :4, :4], small, atol=1e-5)
    assert model.position_map.spacing == (0.25, 0.25)


def test_prefix_tokens_are_not_rotated_nor_registers_pooled() -> None:
    model = tiny((8, 8), patch_size=2, encoding="comrope-ld:4", num_registers=3)
    assert model.num_prefix == 4
    first = model.encodings[0](model.positions((4, 4))).matrix()[:, :4]
    assert torch.equal(first, torch.eye(24).expand_as(first))


def test_dropout_acts_only_in_training() -> None:
    model = tiny((8, 8), patch_size=2, dropout=0.3, attention_dropout=0.2, drop_path=0.5, layer_scale=1e-4)
    x = torch.randn(4, 1, 8, 8)
    assert not torch.equal(model(x), model(x))
    model.eval()
    assert torch.equal(model(x), model(x))


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_drop_path_is_linear_as_timm_or_constant_as_deit_iii(depth: int) -> None:
    def rates(**schedule: str) -> list[float]:
        return [
            layer.drop_path.p for layer in tiny((8, 8), patch_size=2, depth=depth, drop_path=0.4, **schedule).layers
        ]

    theirs = VisionTransformer(img_size=8, patch_size=2, embed_dim=8, num_heads=1, depth=depth, drop_path_rate=0.4)
    grown = [getattr(block.drop_path1, "drop_prob", 0.0) for block in theirs.blocks]  # the identity where it is 0
    assert rates() == rates(drop_path_schedule="linear") == pytest.approx(grown)
    assert rates(drop_path_schedule="constant") == [0.4] * depth
    with pytest.raises(ValueError, match=r"^drop_path_schedule must be 'linear' or 'constant', got 'cosine'$"):
        rates(drop_path_schedule="cosine")


def like_timm(model: tr.ViT) -> dict[str, torch.Tensor]:
    """A ViT's parameters under timm's names."""
    names = {"layers.": "blocks.", "attention": "attn", "mlp.0": "mlp.fc1", "mlp.3": "mlp.fc2"}
    names |= {"embed.proj": "patch_embed.proj", "prefix_tokens": "cls_token", "absolute.table": "pos_embed"}
    named = {}
    for name, value in model.named_parameters():
        for old, new in names.items():
            name = name.replace(old, new)
        named[name] = value.detach()
    return named


SHAPE = dict(depth=2, num_heads=4)


def test_truncated_normal_weights_match_timm() -> None:
    theirs = VisionTransformer(img_size=64, patch_size=8, embed_dim=128, no_embed_class=True, **SHAPE)
    mine = like_timm(
        tr.ViT((64, 64), patch_size=8, dim=128, encoding="learned", weight_init="truncated-normal", **SHAPE)
    )
    compared = 0
    for name, expected in theirs.named_parameters():
        if name == "cls_token":  # timm's is next to zero, DeiT's code draws it like the table
            continue
        assert mine[name].numel() == expected.numel()
        assert same_distribution(mine[name], expected.detach()), name
        compared += 1
    assert compared == len(mine) - 1
    assert mine["cls_token"].std().item() == pytest.approx(0.02, rel=0.2)
    assert mine["pos_embed"].abs().max() > 0.05  # not cut at two deviations


def test_torch_weights_are_linear_defaults_and_normal_tokens() -> None:
    model = tr.ViT((64, 64), patch_size=8, dim=128, encoding="learned", weight_init="torch", norm_eps=1e-5, **SHAPE)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            expected = nn.Linear(module.in_features, module.out_features)
            assert same_distribution(module.weight.detach(), expected.weight.detach())
            assert same_distribution(module.bias.detach(), expected.bias.detach())
            assert module.weight.abs().max() <= fans(module.weight)[0] ** -0.5
        elif isinstance(module, nn.LayerNorm):
            assert module.eps == 1e-5
    table = model.absolute.table.detach()
    assert same_distribution(table, torch.randn(table.shape))
    assert model.prefix_tokens.std().item() == pytest.approx(1, rel=0.25)


def test_xavier_weights_are_the_default() -> None:
    drawn = []
    for settings in ({}, {"weight_init": "xavier"}):
        torch.manual_seed(0)
        drawn.append(tr.ViT((32, 32), patch_size=8, dim=64, depth=1, num_heads=2, encoding="learned+mixed", **settings))
    for mine, other in zip(drawn[0].parameters(), drawn[1].parameters(), strict=True):
        assert torch.equal(mine, other)
    weight = drawn[0].layers[0].mlp[0].weight.detach()
    assert weight.abs().max().item() == pytest.approx((6 / sum(weight.shape)) ** 0.5, rel=1e-2)
    assert not drawn[0].head.bias.any()
    assert drawn[0].absolute.table.abs().max() <= 0.04
    with pytest.raises(ValueError, match=r"^weight_init must be one of xavier, truncated-normal, torch, got 'he'$"):
        tiny((8, 8), patch_size=2, weight_init="he")


def same_distribution(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Two samples of one distribution: by Kolmogorov and Smirnov, a gap that chance makes once in 10⁷ samples."""
    mine, theirs = one.flatten().double().sort().values, other.flatten().double().sort().values
    if not theirs.std() > 0:
        return torch.equal(mine, theirs)
    both = torch.cat([mine, theirs])
    shares = [torch.searchsorted(each, both, right=True) / len(each) for each in (mine, theirs)]
    return (shares[0] - shares[1]).abs().max().item() < 2.9 * (1 / len(mine) + 1 / len(theirs)) ** 0.5


def test_drop_path_keeps_the_mean() -> None:
    drop = tr.models.layers.DropPath(0.25)
    kept = drop(torch.ones(20_000, 1, 1))
    assert sorted(kept.unique().tolist()) == pytest.approx([0, 1 / 0.75])
    assert kept.mean().item() == pytest.approx(1, abs=0.02)


def test_vit_builds_on_meta() -> None:
    with torch.device("meta"):
        empty = tiny((8, 8), patch_size=2, encoding="learned+liere:8")
    empty.to_empty(device="cpu").reset_parameters()
    assert torch.isfinite(empty(torch.randn(2, 1, 8, 8))).all()


@pytest.mark.slow
def test_vit_trains_compiled_at_two_sizes_with_learned_ape() -> None:
    model = tiny((8, 8), patch_size=2, encoding="learned")
    torch.compiler.reset()
    compiled = torch.compile(model, backend="aot_eager")
    for size in ((8, 8), (12, 8)):
        compiled(torch.randn(2, 1, *size)).square().sum().backward()
        assert torch.isfinite(model.absolute.table.grad).all()


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (partial(tiny, (9, 8), patch_size=2), r"input sizes must be multiples of the patch \(2, 2\), got \(9, 8\)"),
        (partial(tiny, (8, 8), patch_size=(2, 2, 2)), r"patch_size must be .* one integer or .*, got \(2, 2, 2\)"),
        (partial(tiny, (8, 8), patch_size=2, num_heads=5), "dim must be divisible by num_heads = 5, got 48"),
        (partial(tiny, (8, 8), patch_size=2, pool="max"), "pool must be 'cls' or 'mean', got 'max'"),
        (partial(tiny, (8, 8), patch_size=2, encoding="mxed"), "did you mean 'mixed'"),
    ],
)
def test_bad_arguments_raise_one_line_errors(build: partial, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


def test_bad_data_raises_one_line_errors() -> None:
    model = tiny((8, 8), patch_size=2)
    with pytest.raises(ValueError, match="data must have in_channels = 1, got 3"):
        model(torch.zeros(1, 3, 8, 8))
    with pytest.raises(ValueError, match=r"multiples of the patch \(2, 2\), got \(8, 7\)"):
        model(torch.zeros(1, 1, 8, 7))


def test_learned_ape_resamples_as_torch_and_only_other_sizes() -> None:
    table = tr.LearnedAPE(sizes=(4, 6), dim=3)
    assert torch.equal(table(4, 6), table.table.flatten(0, 1))
    picture = table.table.movedim(-1, 0).unsqueeze(0)
    for size in ((8, 9), (3, 5)):
        expected = functional.interpolate(picture, size=size, mode="bicubic", antialias=True)
        assert torch.allclose(table(*size), expected[0].flatten(1).mT, atol=1e-5)
    with pytest.raises(ValueError, match="LearnedAPE needs 2 sizes, one per axis, got 3"):
        table(4, 4, 4)


def test_sinusoidal_ape_equals_vaswani_on_one_axis() -> None:
    dim = 8
    encoding = tr.SinusoidalAPE(sizes=(10,), dim=dim)(10)
    position = torch.arange(10.0).unsqueeze(-1)
    omega = 10_000 ** (-2 * torch.arange(dim // 2) / dim)
    expected = torch.stack([(position * omega).sin(), (position * omega).cos()], dim=-1).flatten(1)
    assert torch.allclose(encoding, expected, atol=1e-6)
    left_over = tr.SinusoidalAPE(sizes=(2, 2, 2), dim=8)(2, 2, 2)
    assert not left_over[:, 6:].any()


def test_property_cases_cover_every_named_family() -> None:
    tested = {family for make in CASES.values() for family in type(make()).__mro__}
    assert {getattr(build, "func", build) for build in ROTARY.values()} <= tested


@pytest.mark.parametrize("rate", [1.0, 1.5, -0.1, float("nan")])
def test_drop_path_is_a_probability_below_one(rate: float) -> None:
    with pytest.raises(ValueError, match=f"drop_path must be from 0 to below 1, got {rate}"):
        tr.ViT((8, 8), patch_size=4, dim=16, depth=2, num_heads=2, drop_path=rate)


@pytest.mark.parametrize("norm", [True, False])
def test_maps_are_the_tokens_of_their_depth_on_the_lattice(norm: bool) -> None:
    model = tr.ViT((32, 32), patch_size=8, dim=32, depth=3, num_heads=2, encoding="mixed", num_registers=2).eval()
    x = torch.randn(2, 3, 32, 48)
    seen = []
    for layer in model.layers:
        layer.register_forward_hook(lambda _module, _inputs, tokens: seen.append(tokens))
    maps = model.feature_maps(x, [1, -1], norm=norm)
    for depth, found in zip((1, 3), maps, strict=True):
        tokens = model.norm(seen[depth - 1]) if norm else seen[depth - 1]
        assert torch.equal(found, tokens[:, 3:].transpose(1, 2).reshape(2, 32, 4, 6))


def test_last_map_pools_to_the_features_and_the_first_is_the_embedding() -> None:
    model = tr.ViT((8, 8, 8), patch_size=4, dim=32, depth=2, num_heads=2, encoding="liere:8", pool="mean").eval()
    x = torch.randn(2, 3, 8, 4, 12)
    stem, last = model.feature_maps(x, [0, 2], norm=False)
    assert torch.equal(stem.flatten(2).mT, model.embed(x))
    assert torch.equal(model.norm(last.flatten(2).mT).mean(dim=1), model.features(x))


def test_indices_beyond_the_depth_are_told_in_one_line() -> None:
    model = tr.ViT((8, 8), patch_size=4, dim=32, depth=2, num_heads=2)
    with pytest.raises(ValueError, match=r"indices must be between -3 and 2, got \(1, 3\)"):
        model.feature_maps(torch.zeros(1, 3, 8, 8), [1, 3])
