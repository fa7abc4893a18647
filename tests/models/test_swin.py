"""Swin: against timm, windows and masks against brute force, any encoding, any number of axes, published names."""

import re
from functools import partial
from itertools import product

import pytest
import timm
import torch
from timm.models.swin_transformer import SwinTransformer

import torchrope as tr
from torchrope.checkpoints.published import convert, rope_swin
from torchrope.encodings import Choice
from torchrope.models import SWIN_SIZES
from torchrope.models.layers import encoding_parameters
from torchrope.models.swin import Windows

# Small Swins: 56 pixels are lattices of 14, 7 and 4 tokens.
tiny = partial(tr.Swin, num_outputs=5, dim=16, depths=(2, 2), num_heads=(1, 2), window_size=4, encoding="bias")


def _drawn(model: tr.Swin) -> tr.Swin:
    """All weights but those of encodings drawn large enough to be seen in the outputs."""
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            torch.nn.init.normal_(module.weight, std=0.3)
        elif isinstance(module, tr.RelativePositionBias):
            torch.nn.init.normal_(module.table)
    return model.eval()


def _pair(size: tuple[int, int], dtype: torch.dtype = torch.float64, **settings: object) -> tuple:
    """A Swin of timm and one of ours with the same weights, all of them drawn at random."""
    shape = dict(depths=(2, 2, 2), num_heads=(1, 2, 4), window_size=7) | settings
    theirs = SwinTransformer(img_size=size, embed_dim=16, num_classes=5, strict_img_size=False, **shape).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(std=0.3)
    ours = tr.Swin(size, dim=16, num_outputs=5, encoding="bias", **shape).eval()
    ours.load_state_dict(_weights(theirs.state_dict(), ours))
    return theirs.to(dtype), ours.to(dtype)


def _weights(state: dict[str, torch.Tensor], ours: tr.Swin) -> dict[str, torch.Tensor]:
    """Published tensors, by our names."""
    return rope_swin.checkpoint(state).weights(ours)


SHAPES = {
    "windows and shifts": dict(size=(56, 56)),
    "padding": dict(size=(60, 64)),
    "no padding but in merging": dict(size=(56, 56), window_size=14),
    "windows as large as the lattice": dict(size=(32, 32)),
    "a shift along one axis": dict(size=(56, 28)),
    "windows that are not square": dict(size=(64, 48), window_size=(4, 3)),
    "even windows": dict(size=(48, 56), window_size=4, depths=(3, 1), num_heads=(2, 1)),
    "no bias of queries": dict(size=(32, 32), window_size=4, qkv_bias=False),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
def test_swin_equals_timm_with_the_same_weights(shape: dict, dtype: torch.dtype, tolerance: float) -> None:
    theirs, ours = _pair(**shape, dtype=dtype)
    x = torch.randn(2, 3, *shape["size"], dtype=dtype)
    assert (ours(x) - theirs(x)).abs().max() < tolerance
    for mine, others in zip(
        ours.feature_maps(x), theirs.forward_intermediates(x, intermediates_only=True), strict=True
    ):
        assert mine.shape == others.shape
        assert (mine - others).abs().max() < tolerance * max(1, others.abs().max())


def test_swin_gradients_equal_timm() -> None:
    theirs, ours = _pair((60, 56))
    x = torch.randn(2, 3, 60, 56, dtype=torch.float64)
    for model in (theirs, ours):
        model(x).square().sum().backward()
    expected = _weights({name: parameter.grad for name, parameter in theirs.named_parameters()}, ours)
    for name, parameter in ours.named_parameters():
        assert (parameter.grad - expected[name]).abs().max() < 1e-9 * max(1, expected[name].abs().max()), name


def test_other_input_sizes_equal_timm() -> None:
    theirs, ours = _pair((56, 56), window_size=4, depths=(2, 2), num_heads=(1, 2))  # lattices of 14 and 7
    for size in ((60, 88), (40, 120)):
        x = torch.randn(1, 3, *size, dtype=torch.float64)
        assert (ours(x) - theirs(x)).abs().max() < 1e-10


@pytest.mark.filterwarnings("ignore:torch.searchsorted", "ignore:Using a non-tuple sequence")  # timm's own
@pytest.mark.parametrize(("size", "window"), [((96, 64), 6), ((32, 32), 4), ((24, 40), 5)])
def test_other_windows_equal_timm_with_the_same_table(size: tuple[int, int], window: int) -> None:
    theirs, ours = _pair((64, 64), window_size=4)
    theirs.set_input_size(size, window_size=window)
    for index, stage in enumerate(ours.stages):
        for block, bias in zip(theirs.layers[index].blocks, stage.biases, strict=True):
            _set_bias(block.attn, bias(*block.window_size))
    x = torch.randn(1, 3, *size, dtype=torch.float64)
    assert (ours(x, window_size=window) - theirs(x)).abs().max() < 1e-10


def _set_bias(attention: torch.nn.Module, values: torch.Tensor) -> None:
    """Write a bias `(heads, tokens, tokens)` into timm's table."""
    with torch.no_grad():
        index = attention.relative_position_index
        attention.relative_position_bias_table[index] = values.permute(1, 2, 0)


@pytest.mark.slow
def test_published_tiny_weights_equal_timm() -> None:
    theirs = timm.create_model("swin_tiny_patch4_window7_224").eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.02)
    ours = tr.Swin((224, 224), **SWIN_SIZES["tiny"], encoding="bias").eval()
    ours.load_state_dict(_weights(theirs.state_dict(), ours))
    x = torch.randn(1, 3, 224, 224)
    with torch.no_grad():
        assert (ours(x) - theirs(x)).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("size", "name"),
    [
        ("tiny", "swin_tiny_patch4"),
        *(pytest.param(size, f"swin_{size}_patch4", marks=pytest.mark.slow) for size in ("small", "base", "large")),
    ],
)
def test_sizes_have_the_papers_parameters(size: str, name: str) -> None:
    with torch.device("meta"):
        theirs = timm.create_model(f"{name}_window7_224")
        ours = {
            encoding: tr.Swin((224, 224), **SWIN_SIZES[size], encoding=encoding) for encoding in ("bias", "bias+mixed")
        }
    count = {encoding: sum(p.numel() for p in model.parameters()) for encoding, model in ours.items()}
    assert count["bias"] == sum(p.numel() for p in theirs.parameters())
    assert size != "tiny" or count["bias"] == 28_288_354
    dim, depths = SWIN_SIZES[size]["dim"], SWIN_SIZES[size]["depths"]
    assert count["bias+mixed"] - count["bias"] == sum(depth * dim * 2**i for i, depth in enumerate(depths))


def test_initialisation_matches_timm() -> None:
    settings = dict(depths=(2, 2), num_heads=(1, 2), window_size=4)
    torch.manual_seed(0)
    state = SwinTransformer(img_size=32, embed_dim=64, num_classes=5, **settings).state_dict()
    model = tr.Swin((32, 32), dim=64, num_outputs=5, encoding="bias", **settings)
    theirs, ours = _weights(state, model), model.state_dict()
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert value.mean().item() == pytest.approx(theirs[name].mean().item(), abs=0.02), name
        if value.numel() > 1 and theirs[name].std():
            assert value.std().item() == pytest.approx(theirs[name].std().item(), rel=0.3), name
        else:
            assert torch.equal(value, theirs[name]), name


@pytest.mark.parametrize(
    ("sizes", "window", "offset"), [((6,), (3,), 1), ((4, 6), (2, 3), (1, 0)), ((4, 4, 2), (2, 4, 1), (1, 2, 0))]
)
def test_windows_hold_each_token_once_and_neighbours_together(
    sizes: tuple[int, ...], window: tuple[int, ...], offset: int | tuple[int, ...]
) -> None:
    places = tr.grid(*sizes)
    cut = tr.positions.windows(places, sizes, window, offset=offset)
    assert cut.shape == (len(places) // torch.Size(window).numel(), torch.Size(window).numel(), len(sizes))
    assert sorted(cut.flatten(0, 1).tolist()) == sorted(places.tolist())
    offsets = (offset,) * len(sizes) if isinstance(offset, int) else offset
    corners = product(*(range(0, size, part) for size, part in zip(sizes, window, strict=True)))
    for tokens, corner in zip(cut, corners, strict=True):
        within = product(*(range(c, c + part) for c, part in zip(corner, window, strict=True)))
        expected = [[(i + o) % size for i, o, size in zip(place, offsets, sizes, strict=True)] for place in within]
        assert tokens.tolist() == expected


def test_windows_cut_any_tensor_with_one_row_per_token() -> None:
    tokens = torch.randn(3, 2, 12, 5)
    cut = tr.positions.windows(tokens, (4, 3), (2, 3))
    assert cut.shape == (3, 2, 2, 6, 5)
    assert torch.equal(cut.flatten(2, 3), tokens)  # these windows are whole rows


@pytest.mark.parametrize(
    ("sizes", "window"), [((8,), (4,)), ((6, 6), (3, 3)), ((8, 4), (4, 4)), ((4, 6, 2), (2, 3, 2)), ((4, 4), (1, 2))]
)
def test_shifted_windows_mask_tokens_that_are_not_neighbours(sizes: tuple[int, ...], window: tuple[int, ...]) -> None:
    shifted = Windows.fit(sizes, window).shifted()
    assert shifted.shift == tuple(0 if s <= w else w // 2 for s, w in zip(sizes, window, strict=True))
    places = shifted.cut(tr.grid(*sizes).reshape(1, *sizes, -1))  # (windows, tokens, axes)
    mask = shifted.mask()
    if mask is None:
        mask = torch.ones(len(places), *(places.shape[1],) * 2, dtype=torch.bool)
    for window_index, tokens in enumerate(places.tolist()):
        for (i, query), (j, key) in product(enumerate(tokens), repeat=2):
            near = all(abs(a - b) < w for a, b, w in zip(query, key, window, strict=True))
            assert mask[window_index, i, j] == near


@pytest.mark.parametrize("sizes", [(7,), (5, 8), (3, 4, 5)])
def test_join_inverts_cut_if_windows_do_not_divide_the_lattice(sizes: tuple[int, ...]) -> None:
    x = torch.randn(2, *sizes, 3)
    for cut in (Windows.fit(sizes, (3,) * len(sizes)), Windows.fit(sizes, (3,) * len(sizes)).shifted()):
        assert torch.equal(cut.join(cut.cut(x)), x)


def test_lattice_smaller_than_its_window_is_part_of_it() -> None:
    build = partial(tr.Swin, num_outputs=5, dim=16, depths=(2,), num_heads=(2,), window_size=6, encoding="bias+liere:4")
    stage = _drawn(build((48, 48))).stages[0]
    x = torch.randn(1, 4, 5, 16)
    layer, encoding, bias = stage.layers[1], stage.encodings[1], stage.biases[1]
    whole = Windows((4, 5), (6, 6), (0, 0))
    seen = whole.cut(torch.ones(1, 4, 5, 1)).squeeze(-1).bool()  # (1, 36): the lattice's own tokens
    masked = layer(
        x, encoding(tr.grid(6, 6, spacing=1 / 6)), (bias(6, 6), seen.unsqueeze(1).expand(-1, 36, -1)), within=whole
    )
    part = Windows.fit((4, 5), (6, 6))
    assert part.shifted() == part
    alone = layer(x, encoding(tr.grid(4, 5, spacing=1 / 6)), (bias(4, 5), None), within=part)
    assert torch.allclose(alone, masked, atol=1e-5)
    stage.layers, stage.encodings, stage.biases = stage.layers[1:], stage.encodings[1:], stage.biases[1:]
    assert torch.equal(stage(x), alone)


@pytest.mark.parametrize("family", [tr.MixedRoPE, tr.LieRE, partial(tr.ComRoPEAP, block_size=4), tr.ComRoPELD])
@pytest.mark.parametrize("name", ["bias", "none"])
def test_zero_generators_leave_a_model_bit_identical(family: type, name: str) -> None:
    bias = tr.RelativePositionBias if name == "bias" else None
    plain = _drawn(tiny((32, 32), encoding=name))
    rotated = tiny((32, 32), encoding=Choice(family, bias=bias)).eval()
    for encoding in filter(lambda part: isinstance(part, tr.Encoding), rotated.modules()):
        encoding.zero_()
    assert not rotated.load_state_dict(plain.state_dict(), strict=False).unexpected_keys
    x = torch.randn(2, 3, 40, 32)
    assert torch.equal(rotated(x), plain(x))


@pytest.mark.parametrize("name", ["bias", "mixed", "liere:4", "bias+mixed", "bias+comrope-ld:4", "learned+bias"])
def test_gradients_reach_every_encoding(name: str) -> None:
    model = tiny((32, 32), encoding=name)
    model(torch.randn(2, 3, 32, 32)).square().sum().backward()
    kinds = (tr.Encoding, tr.RelativePositionBias, tr.encodings.AbsoluteEncoding)
    encodings = [module for module in model.modules() if isinstance(module, kinds)]
    learned = [parameter for module in encodings for parameter in module.parameters()]
    assert learned
    assert all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in learned)
    assert len(learned) == len(encoding_parameters(model))


@pytest.mark.parametrize(("family", "relative"), [(tr.MixedRoPE, True), (tr.ComRoPELD, True), (tr.LieRE, False)])
def test_relative_encodings_ignore_the_origin_of_windows(family: type, relative: bool) -> None:
    encoding = family(num_axes=2, num_heads=2, head_dim=8).double()
    q, k = torch.randn(2, 4, 2, 9, 8, dtype=torch.float64)  # (windows, heads, tokens, head_dim)
    scores = []
    near, far = (tr.grid(*sizes, spacing=1 / 6, dtype=torch.float64) for sizes in ((3, 3), (6, 6)))
    for positions in (near, tr.positions.windows(far, (6, 6), (3, 3))):
        turned_q, turned_k = tr.rotate(q, k, encoding(positions))
        scores.append(turned_q @ turned_k.mT)
    local, everywhere = scores
    assert torch.allclose(local[0], everywhere[0])  # the first window is at the origin
    assert torch.allclose(local, everywhere, atol=1e-9) == relative


@pytest.mark.parametrize("name", ["mixed", "axial", "liere:4", "comrope-ap:4"])
def test_larger_windows_keep_the_training_spacing(name: str) -> None:
    build = partial(tr.Swin, (48, 48), num_outputs=5, dim=16, depths=(2,), num_heads=(2,), encoding=name)
    small = _drawn(build(window_size=4))
    large = build(window_size=6, positions=small.stages[0].position_map).eval()
    large.load_state_dict(small.state_dict())
    x = torch.randn(1, 3, 48, 48)
    assert torch.equal(small(x, window_size=6), large(x))
    assert torch.equal(small(x, window_size=(6, 6)), large(x))
    assert not torch.allclose(small(x), large(x), atol=1e-3)
    assert large.stages[0].position_map == tr.Lattice(**small.stages[0].encodings[0].lattice.spaced(4, 4))


def test_stages_use_the_position_convention_of_the_paper() -> None:
    model = tr.Swin((32, 32), num_outputs=5, dim=16, depths=(1, 1), num_heads=(1, 2), window_size=8, encoding="liere:4")
    assert [stage.position_map.spacing for stage in model.stages] == [(1 / 8, 1 / 8), (1 / 4, 1 / 4)]
    assert tiny((32, 32), encoding="mixed").stages[0].position_map.spacing == (1.0, 1.0)


def test_axes_may_be_permuted() -> None:
    settings = dict(num_outputs=5, dim=24, depths=(2, 2), num_heads=(1, 2), in_channels=2, encoding="bias+mixed")
    video = tr.Swin((4, 12, 8), patch_size=(1, 2, 2), window_size=(2, 3, 4), **settings).double().eval()
    with torch.no_grad():
        for parameter in video.parameters():
            parameter.normal_(std=0.3)
    order = (2, 0, 1)
    moved = tr.Swin((8, 4, 12), patch_size=(2, 1, 2), window_size=(4, 2, 3), **settings).double().eval()
    moved.load_state_dict(_with_axes(video, order))
    x = torch.randn(2, 2, 5, 14, 12, dtype=torch.float64)  # neither windows nor merging divide it
    y = x.permute(0, 1, *(2 + axis for axis in order))
    assert torch.allclose(moved(y), video(x), atol=1e-10)
    shapes = [tuple(lattice.shape[1:]) for lattice in video.feature_maps(x)]
    assert shapes == [(24, 5, 7, 6), (48, 3, 4, 3)]


def _with_axes(model: tr.Swin, order: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """The state dict of the model that sees the axes in another order."""
    state = model.state_dict()
    weight = state["embed.proj.weight"].unflatten(1, (-1, *model.embed.patch_size))
    state["embed.proj.weight"] = weight.permute(0, 1, *(2 + axis for axis in order)).flatten(1)
    for name, value in state.items():
        if ".merge." in name:
            neighbours = value.unflatten(-1, (2, 2, 2, -1)).movedim((-2, -3, -4), (0, 1, 2))  # axes 0, 1, 2 in front
            there = neighbours.permute(*order, *range(3, neighbours.ndim)).movedim((0, 1, 2), (-2, -3, -4))
            state[name] = there.flatten(-4)
        elif name.endswith("frequencies"):
            state[name] = value[list(order)]
        elif name.endswith("table"):
            window = model.stages[int(name.split(".")[1])].window
            spans = value.unflatten(0, [2 * part - 1 for part in window])
            state[name] = spans.permute(*order, 3).flatten(0, 2)
    return state


@pytest.mark.parametrize("sizes", [(64,), (8, 8, 8, 8)])
def test_swin_runs_with_one_axis_and_four(sizes: tuple[int, ...]) -> None:
    model = tiny(sizes, patch_size=2, window_size=2, dim=32, num_heads=(1, 1), encoding="bias+mixed")
    assert model(torch.randn(2, 3, *sizes)).shape == (2, 5)


def test_drop_path_equals_timm_and_acts_only_in_training() -> None:
    model = tiny((32, 32), drop_path=0.4, dropout=0.1, attention_dropout=0.1)
    rates = [layer.drop_path.p for stage in model.stages for layer in stage.layers]
    assert rates == pytest.approx(torch.linspace(0, 0.4, 4).tolist())
    constant = tiny((32, 32), drop_path=0.4, drop_path_schedule="constant")
    assert {layer.drop_path.p for stage in constant.stages for layer in stage.layers} == {0.4}
    x = torch.randn(2, 3, 32, 32)
    assert not torch.equal(model(x), model(x))
    model.eval()
    assert torch.equal(model(x), model(x))


@pytest.mark.slow
def test_swin_compiles_into_one_graph() -> None:
    model = _drawn(tiny((32, 32), depths=(2,), num_heads=(2,), encoding="bias+liere:4"))
    x = torch.randn(2, 3, 40, 36)
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert torch.allclose(compiled(x), model(x), atol=1e-5)
    compiled(x).sum().backward()
    assert model.stages[0].biases[1].table.grad.abs().sum() > 0


@pytest.mark.slow
def test_swin_exports_with_a_dynamic_batch() -> None:
    model = _drawn(tiny((32, 32), depths=(2,), num_heads=(2,), encoding="bias+mixed"))
    batch = torch.export.Dim("batch", min=1, max=64)
    exported = torch.export.export(model, (torch.randn(2, 3, 40, 36),), dynamic_shapes={"x": {0: batch}})
    x = torch.randn(5, 3, 40, 36)
    assert torch.allclose(exported.module()(x), model(x), atol=1e-5)


def test_swin_runs_in_half_precision_and_autocast() -> None:
    model = _drawn(tiny((32, 32), encoding="bias+mixed"))
    x = torch.randn(2, 3, 32, 32)
    with torch.autocast("cpu", torch.bfloat16):
        mixed_precision = model(x)
    exact = model(x)
    assert (mixed_precision - exact).norm() < 0.05 * exact.norm()
    assert model.to(torch.bfloat16)(x.bfloat16()).dtype == torch.bfloat16


def test_swin_freezes() -> None:
    model = _drawn(tiny((32, 32), encoding="bias+liere:4"))
    x = torch.randn(2, 3, 40, 32)
    assert torch.allclose(tr.freeze(model, x)(x), model(x), atol=1e-5)


def test_swin_without_classes_returns_pooled_features() -> None:
    model = tiny((32, 32), num_outputs=0).eval()
    x = torch.randn(2, 3, 32, 32)
    assert torch.equal(model(x), model.features(x))
    last = model.feature_maps(x)[-1].movedim(1, -1)
    assert torch.allclose(model(x), model.norm(last).mean(dim=(1, 2)), atol=1e-6)


def _microsofts(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Timm's state dict in Microsoft's names, with its buffers."""
    theirs = {}
    for name, value in state.items():
        name = re.sub(r"layers\.(\d+)\.downsample", lambda match: f"layers.{int(match[1]) - 1}.downsample", name)
        theirs[name.replace("head.fc.", "head.")] = value
    theirs["layers.0.blocks.0.attn.relative_position_index"] = torch.zeros(16, 16)
    theirs["layers.0.blocks.1.attn_mask"] = torch.zeros(4, 16, 16)
    return theirs


def test_microsoft_state_dicts_load_with_and_without_head() -> None:
    state = SwinTransformer(
        img_size=32, embed_dim=16, depths=(1, 2, 1), num_heads=(1, 1, 1), window_size=4
    ).state_dict()
    expected = convert(state, input_size=32).state_dict()
    renamed = convert(_microsofts(state), input_size=32).state_dict()
    assert renamed.keys() == expected.keys()
    assert all(torch.equal(renamed[name], expected[name]) for name in expected)
    headless = {name: value for name, value in state.items() if not name.startswith("head")}
    assert expected.keys() - convert(headless, input_size=32).state_dict().keys() == {"head.weight", "head.bias"}


def test_rope_vit_frequencies_load_with_axes_swapped() -> None:
    theirs, _ = _pair((32, 32), torch.float32, depths=(1,), num_heads=(2,), window_size=4)
    state = {name: value for name, value in theirs.state_dict().items() if not name.endswith("bias_table")}
    freqs = torch.randn(2, 2, 4)
    state["layers.0.blocks.0.attn.rope_freqs"] = freqs
    state["layers.0.blocks.0.attn.rope_t_x"] = state["layers.0.blocks.0.attn.rope_t_y"] = torch.zeros(16)
    model = convert(state)
    column, row = torch.arange(16) % 4, torch.arange(16) // 4  # as rope-vit counts: x is the column
    angles = freqs[0].unsqueeze(1) * column.unsqueeze(-1) + freqs[1].unsqueeze(1) * row.unsqueeze(-1)
    q = torch.randn(1, 2, 16, 8)
    turned = torch.view_as_complex(q.unflatten(-1, (-1, 2))) * torch.polar(torch.ones_like(angles), angles)
    ours, _ = tr.rotate(q, q, model.stages[0].encodings[0](tr.grid(4, 4)))
    assert torch.allclose(ours, torch.view_as_real(turned).flatten(-2), atol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.update(cls_token=torch.zeros(1)), "all tensors must be used, got unused cls_token$"),
        (
            lambda state: state.pop("layers.1.blocks.0.mlp.fc1.bias"),
            r": layers\.1\.blocks\.0\.mlp\.fc1\.bias is missing$",
        ),
        (lambda state: state.pop("layers.1.downsample.norm.bias"), r": layers\.1\.downsample\.norm\.bias is missing$"),
        (
            lambda state: state.pop("layers.0.blocks.0.attn.relative_position_bias_table"),
            r": layers\.0\.blocks\.0\.attn\.relative_position_bias_table is missing$",
        ),
        (lambda state: state.clear(), r": patch_embed\.proj\.weight is missing$"),
    ],
)
def test_unknown_state_dicts_raise_with_their_names(change: object, message: str) -> None:
    state = SwinTransformer(img_size=32, embed_dim=16, depths=(1, 1), num_heads=(1, 1), window_size=4).state_dict()
    change(state)
    with pytest.raises(ValueError, match=message):
        rope_swin.convert(state, window_size=4)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (partial(tiny, (30, 32)), r"input sizes must be multiples of the patch \(4, 4\), got \(30, 32\)"),
        (partial(tiny, (32, 32), depths=(2,)), r"one of each per stage, got \(2,\) and \(1, 2\)"),
        (partial(tiny, (32, 32), depths=(), num_heads=()), r"one of each per stage, got \(\) and \(\)"),
        (partial(tiny, (32, 32), depths=(2, 0)), r"must be 1 or more, one of each per stage, got \(2, 0\)"),
        (partial(tiny, (32, 32), num_heads=(1, 3)), "dim must be divisible by num_heads = 3, got 32"),
        (partial(tiny, (32, 32), window_size=0), "window_size must be 1 or more, one integer or .*, got 0"),
        (partial(tiny, (32, 32), window_size=(7, 7, 7)), r"window_size must be 1 or more, one integer or .*, got \(7,"),
        (partial(tiny, (32, 32), encoding="baes"), "got 'baes'"),
        (partial(tr.positions.windows, tr.grid(4, 4), (4, 4), (3, 2)), r"divide its lattice \(4, 4\) .*, got \(3, 2\)"),
        (partial(tr.positions.windows, tr.grid(4, 4), (4, 4), (2,)), r"divide its lattice \(4, 4\) .*, got \(2,\)"),
        (
            partial(tr.positions.windows, tr.grid(4, 4), (4, 2), (2, 2)),
            r"positions of a lattice \(4, 2\) must be 8, got 16",
        ),
        (
            partial(tr.positions.windows, tr.grid(4, 4), (4, 4), (2, 2), offset=(1,)),
            "offset must be one number or one per axis",
        ),
    ],
)
def test_bad_arguments_raise_one_line_errors(build: partial, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()
