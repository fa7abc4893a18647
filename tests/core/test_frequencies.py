"""Fixed frequencies and their scaling, against timm, transformers and the papers' formulas."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from cases import CASES
from timm.layers.pos_embed_sincos import RotaryEmbeddingDinoV3, RotaryEmbeddingMRope, apply_rot_embed_cat
from torch import Tensor

pytest.importorskip("transformers", reason="the oracle of these tests")

from transformers import DINOv3ViTConfig, LlamaConfig, Qwen2VLTextConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.dinov3_vit import modeling_dinov3_vit as dinov3
from transformers.models.qwen2_vl import modeling_qwen2_vl as qwen2
from transformers.models.qwen3_vl import modeling_qwen3_vl as qwen3
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLTextConfig

import torchrope as tr
from torchrope.encodings import baselines, planar
from torchrope.encodings.golden import directions

HEAD_DIM = 32


def half_and_half(x: Tensor) -> Tensor:
    """Permute channels to the layout with pairs j and j + head_dim / 2."""
    return torch.cat([x[..., 0::2], x[..., 1::2]], dim=-1)


def scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.mT


def vectors(tokens: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    q, k = torch.randn(2, 1, 2, tokens, HEAD_DIM, dtype=dtype).unbind(0)
    return q, k


@pytest.mark.parametrize(("normalize", "per"), [("separate", "size"), ("max", "longest"), ("min", "shortest")])
def test_dinov3_has_the_scores_of_timm(normalize: str, per: Any) -> None:
    sizes = (3, 5)
    theirs = RotaryEmbeddingDinoV3(HEAD_DIM, normalize_coords=normalize, rotate_half=True).eval().double()
    coords = tr.Lattice(2.0, -1.0, offset=0.5, per=per)(*sizes, dtype=torch.float64)
    table = torch.cat(theirs._get_pos_embed_from_coords(coords), dim=-1)
    q, k = vectors(15, torch.float64)
    expected = scores(*(apply_rot_embed_cat(half_and_half(x), table, half=True) for x in (q, k)))

    encoding = baselines.dinov3(num_axes=2, num_heads=2, head_dim=HEAD_DIM)
    rounded = scores(*tr.rotate(q, k, encoding(coords)))
    assert (rounded - expected).abs().max() < 1e-4
    encoding = encoding.double()
    own_axis = encoding.frequencies != 0
    exact = own_axis * (2 * math.pi / theirs.periods).repeat(2)
    encoding.set_generators(planar(exact).unsqueeze(1))
    assert (scores(*tr.rotate(q, k, encoding(coords))) - expected).abs().max() < 1e-10
    # timm computes its coordinates in float32
    assert (theirs.get_embed(list(sizes)) - table).abs().max() < 1e-4


def test_dinov3_has_the_scores_of_transformers() -> None:
    config = DINOv3ViTConfig(hidden_size=2 * HEAD_DIM, num_attention_heads=2, image_size=48, patch_size=16)
    cos, sin = dinov3.DINOv3ViTRopePositionEmbedding(config).eval()(torch.zeros(1, 3, 48, 80))
    q, k = vectors(16)
    expected = scores(*dinov3.apply_rotary_pos_emb(half_and_half(q), half_and_half(k), cos, sin))
    encoding = baselines.dinov3(num_axes=2, num_heads=2, head_dim=HEAD_DIM, base=config.rope_theta)
    positions = tr.prefix(encoding.lattice(3, 5), 1)
    assert (scores(*tr.rotate(q, k, encoding(positions))) - expected).abs().max() < 1e-4


def test_vit_has_positions_of_dinov3_at_any_size() -> None:
    build = partial(
        tr.ViT, (8, 8), patch_size=2, in_channels=1, num_outputs=3, dim=32, depth=1, num_heads=2, encoding="dinov3"
    )
    own, squeezed = build(), build(positions=tr.Lattice(2.0, -1.0, offset=0.5, per="size"))
    assert torch.allclose(own.positions((4, 4)), squeezed.positions((4, 4)))
    assert own.positions((6, 6)).max() > 1.2
    assert torch.equal(squeezed.positions((6, 6)), tr.prefix(squeezed.encodings[0].lattice(6, 6), 1))
    assert squeezed(torch.randn(2, 1, 12, 8)).shape == (2, 3)


MROPE = {
    "chunked": (
        partial(tr.encodings.MRoPE, sections=(4, 6, 6)),
        lambda: qwen2.Qwen2VLRotaryEmbedding(
            Qwen2VLTextConfig(hidden_size=64, num_attention_heads=2, rope_parameters=multimodal((4, 6, 6)))
        ),
    ),
    "interleaved": (
        partial(baselines.mrope_interleaved, sections=(8, 4, 4)),
        lambda: qwen3.Qwen3VLTextRotaryEmbedding(
            Qwen3VLTextConfig(head_dim=HEAD_DIM, num_attention_heads=2, rope_parameters=multimodal((8, 4, 4)))
        ),
    ),
}


def multimodal(sections: tuple[int, ...]) -> dict[str, object]:
    return {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": list(sections)}


@pytest.mark.parametrize("allocation", MROPE)
def test_mrope_has_the_scores_of_transformers(allocation: str) -> None:
    family, theirs = MROPE[allocation]
    positions = torch.randint(0, 40, (11, 3))  # (time, height, width)
    q, k = vectors(11)
    cos, sin = theirs()(q, positions.T.unsqueeze(1))
    expected = scores(*qwen2.apply_rotary_pos_emb(half_and_half(q), half_and_half(k), cos, sin))
    encoding = family(num_axes=3, num_heads=2, head_dim=HEAD_DIM)
    assert (scores(*tr.rotate(q, k, encoding(positions))) - expected).abs().max() < 2e-4


def test_interleaved_mrope_has_the_scores_of_timm_on_images() -> None:
    theirs = RotaryEmbeddingMRope(HEAD_DIM, mrope_section=(6, 5, 5))
    q, k = vectors(12)
    table = theirs.get_embed([3, 4])
    expected = scores(*(apply_rot_embed_cat(half_and_half(x), table, half=True) for x in (q, k)))
    encoding = baselines.mrope_interleaved(num_axes=3, num_heads=2, head_dim=HEAD_DIM)
    assert encoding.sections == (6, 5, 5)
    positions = tr.grid(1, 3, 4)
    assert (scores(*tr.rotate(q, k, encoding(positions))) - expected).abs().max() < 1e-4


@pytest.mark.parametrize("family", [tr.encodings.MRoPE, baselines.mrope_interleaved])
def test_mrope_with_equal_coordinates_is_rope_of_text(family: type) -> None:
    text = tr.AxialRoPE(num_axes=1, num_heads=1, head_dim=HEAD_DIM)(tr.grid(9))
    positions = tr.grid(9).expand(-1, 3)
    assert torch.allclose(family(num_axes=3, num_heads=1, head_dim=HEAD_DIM)(positions).matrix(), text.matrix())


@pytest.mark.parametrize(
    ("family", "sections", "message"),
    [
        (tr.encodings.MRoPE, (4, 6), r"sections must be 3 numbers of pairs with sum 16, got \(4, 6\)"),
        (tr.encodings.MRoPE, (4, 6, 5), "with sum 16"),
        (tr.encodings.MRoPE, (-1, 9, 8), "with sum 16"),
        (
            baselines.mrope_interleaved,
            (4, 6, 6),
            r"sections\[1\] must be 5 or less to be interleaved, got sections \(4, 6, 6\)",
        ),
    ],
)
def test_mrope_refuses_invalid_sections(family: type, sections: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        family(num_axes=3, num_heads=2, head_dim=HEAD_DIM, sections=sections)


def test_golden_frequencies_are_geometric_along_the_golden_angle() -> None:
    encoding = tr.encodings.GoldenGateRoPE(
        num_axes=2, num_heads=3, head_dim=16, min_frequency=0.5, max_frequency=64.0, zero_fraction=0.25
    )
    lengths = encoding.frequencies.norm(dim=0)
    expected = torch.tensor([0.0, 0.0, *(0.5 * 128 ** (step / 5) for step in range(6))])
    assert torch.allclose(lengths, expected.expand(3, -1))
    golden = (1 + math.sqrt(5)) / 2
    for head in range(3):
        for pair in range(2, 8):
            x, y = encoding.frequencies[:, head, pair] / lengths[head, pair]
            turn = (8 * head + pair) / golden  # of half a circle
            assert math.cos(2 * math.pi * turn) == pytest.approx((x * x - y * y).item(), abs=1e-4)


@pytest.mark.parametrize("num_axes", [1, 3, 4])
def test_directions_follow_the_generalised_golden_ratio(num_axes: int) -> None:
    ratio = {1: (1 + math.sqrt(5)) / 2, 3: 1.2207440846057596, 4: 1.1673039782614187}[num_axes]
    normal = torch.distributions.Normal(0.0, 1.0)
    for index, direction in enumerate(directions(20, num_axes), start=1):
        cube = torch.tensor([index / ratio**power % 1 for power in range(1, num_axes + 1)], dtype=torch.float64)
        expected = normal.icdf(cube)
        assert torch.allclose(direction, expected / expected.norm(), atol=1e-6)


@pytest.mark.parametrize("num_axes", [2, 3])
def test_directions_are_more_even_than_random_ones(num_axes: int) -> None:
    def farthest(spread: Tensor) -> float:
        anywhere = torch.nn.functional.normalize(torch.randn(2000, num_axes, dtype=torch.float64), dim=-1)
        return (anywhere @ spread.mT).abs().amax(dim=1).min().item()

    by_chance = torch.nn.functional.normalize(torch.randn(64, num_axes, dtype=torch.float64), dim=-1)
    assert farthest(directions(64, num_axes)) > farthest(by_chance)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(min_frequency=0.0), "min_frequency must be above 0 and at most max_frequency = 20.0, got 0.0"),
        (dict(max_frequency=0.1), "max_frequency = 0.1, got 0.2"),
        (dict(zero_fraction=1.5), "zero_fraction must be a fraction from 0 to 1, got 1.5"),
    ],
)
def test_golden_refuses_invalid_frequencies(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tr.encodings.GoldenGateRoPE(num_axes=2, num_heads=1, head_dim=8, **change)


@pytest.mark.parametrize("family", [baselines.dinov3, tr.encodings.MRoPE, baselines.visionllama])
def test_one_axis_per_pair_refuses_a_second_axis(family: type) -> None:
    encoding = family(num_axes=2, num_heads=2, head_dim=8)
    with pytest.raises(
        ValueError, match=f"{type(encoding).__name__} rotates a pair along one axis, got a pair with 2 axes"
    ):
        encoding.set_generators(planar(torch.ones(2, 1, 4)))
    golden = tr.encodings.GoldenGateRoPE(num_axes=2, num_heads=2, head_dim=8)
    golden.set_generators(planar(torch.arange(16.0).reshape(2, 2, 4)))
    assert torch.equal(golden.frequencies, torch.arange(16.0).reshape(2, 2, 4))


def llama(rope: dict[str, object]) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=2 * HEAD_DIM,
        num_attention_heads=2,
        max_position_embeddings=256,
        rope_parameters={"rope_theta": 10_000.0, **rope},
    )


def geometric_frequencies() -> Tensor:
    return tr.AxialRoPE(num_axes=1, num_heads=1, head_dim=HEAD_DIM).double().frequencies.unsqueeze(1)


def test_interpolate_and_ntk_match_transformers() -> None:
    linear, _ = ROPE_INIT_FUNCTIONS["linear"](llama({"rope_type": "linear", "factor": 4.0}), "cpu")
    assert torch.allclose(tr.scaling.interpolate(geometric_frequencies(), 4.0).flatten().float(), linear, rtol=1e-5)
    # Dynamic NTK at factor 1 and three times the length has the base of a factor of 3.
    dynamic, _ = ROPE_INIT_FUNCTIONS["dynamic"](llama({"rope_type": "dynamic", "factor": 1.0}), "cpu", seq_len=768)
    assert torch.allclose(tr.scaling.ntk(geometric_frequencies(), 3.0).flatten().float(), dynamic, rtol=1e-5)


@pytest.mark.parametrize("train_size", [256, 2048])
@pytest.mark.parametrize("factor", [1.0, 4.0, 16.0])
def test_yarn_matches_transformers(factor: float, train_size: int) -> None:
    rope = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": train_size, "truncate": False}
    theirs, temperature = ROPE_INIT_FUNCTIONS["yarn"](llama(rope), "cpu")
    mine = tr.scaling.yarn(geometric_frequencies(), factor, train_size=train_size)
    assert torch.allclose(mine.flatten().float(), theirs, rtol=1e-5)
    assert tr.scaling.yarn_temperature(factor) == pytest.approx(temperature)


@pytest.mark.parametrize("factor", [1.0, 0.25, (0.5, 0.5), (4.0, 0.25)])
def test_yarn_temperature_is_one_for_inputs_not_longer(factor: float | tuple[float, ...]) -> None:
    assert tr.scaling.yarn_temperature(factor) == 1.0


def test_yarn_keeps_the_highest_frequency_as_transformers() -> None:
    rope = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 14, "truncate": False}
    theirs, _ = ROPE_INIT_FUNCTIONS["yarn"](llama(rope), "cpu")
    mine = tr.scaling.yarn(geometric_frequencies(), 2.0, train_size=14)
    assert torch.allclose(mine.flatten().float(), theirs, rtol=1e-5)
    assert mine[0, 0, 0] == 1.0


SCALINGS = {
    "interpolate": tr.scaling.interpolate,
    "ntk": tr.scaling.ntk,
    "yarn": partial(tr.scaling.yarn, train_size=14.0),
}


@pytest.mark.parametrize("name", SCALINGS)
def test_scalings_accept_a_factor_per_axis(name: str) -> None:
    frequencies = tr.AxialRoPE(num_axes=2, num_heads=1, head_dim=32).frequencies_per_axis()
    scaled = SCALINGS[name](frequencies, (1.0, 3.0))
    assert torch.equal(scaled[0], frequencies[0])
    own = frequencies[1] != 0
    alone = SCALINGS[name](frequencies[1:, :, own[0]], 3.0)
    assert torch.allclose(scaled[1:, :, own[0]], alone)
    assert scaled[1][own][-1].item() == pytest.approx(frequencies[1][own][-1].item() / 3)
    assert not scaled[1][~own].any()


@pytest.mark.parametrize("name", SCALINGS)
def test_scalings_keep_directions_if_factors_are_equal(name: str) -> None:
    frequencies = tr.MixedRoPE(num_axes=3, num_heads=4, head_dim=24).frequencies.detach()
    scaled = SCALINGS[name](frequencies, 2.0)
    ratio = scaled / frequencies
    assert torch.allclose(ratio, ratio[:1].expand_as(ratio), rtol=1e-4)
    assert (ratio <= 1 + 1e-6).all()
    assert (ratio >= 0.5 - 1e-6).all()
    assert ratio.min().item() == pytest.approx(0.5, rel=1e-4)


@pytest.mark.parametrize("name", SCALINGS)
def test_scalings_by_one_are_the_identity_with_gradients(name: str) -> None:
    frequencies = torch.tensor([[[1.0, 0.0, 0.1]], [[0.0, 0.0, 0.2]], [[0.0, 0.0, 0.0]]], requires_grad=True)
    assert torch.allclose(SCALINGS[name](frequencies, 1.0), frequencies)
    (gradient,) = torch.autograd.grad(SCALINGS[name](frequencies, 2.0).sum(), frequencies)
    assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("case", CASES)
def test_extend_interpolates_a_copy_of_every_encoding(case: str) -> None:
    encoding = CASES[case]()
    before = encoding.generators().detach().clone()
    factor = [2.0 + axis for axis in range(encoding.num_axes)]
    extended = tr.extend(encoding, factor, method="interpolate")
    per_axis = torch.tensor(factor).reshape(-1, 1, 1, 1, 1)
    assert torch.allclose(extended.generators(), before / per_axis, atol=1e-5)
    assert torch.equal(encoding.generators(), before)
    assert type(extended) is type(encoding)


@pytest.mark.parametrize("method", ["ntk", "yarn"])
@pytest.mark.parametrize("family", [tr.AxialRoPE, tr.MixedRoPE, tr.encodings.GoldenGateRoPE, tr.STRING])
def test_extend_scales_frequencies_by_every_method(family: type, method: str) -> None:
    encoding = family(num_axes=2, num_heads=2, head_dim=16)
    own = encoding.frequencies_per_axis()
    expected = SCALINGS[method](own, (1.0, 2.0))
    size = 14.0 if method == "yarn" else None
    extended = tr.extend(encoding, (1.0, 2.0), method=method, train_size=size)
    assert torch.allclose(extended.frequencies_per_axis(), expected)
    assert not torch.equal(expected, own)
    if family is tr.STRING:
        assert torch.equal(extended.basis(), encoding.basis())


def test_frequencies_of_string_are_those_of_its_planes_and_larger_blocks_have_none() -> None:
    string = tr.STRING(num_axes=2, num_heads=2, head_dim=16, block_size=8)
    assert torch.equal(string.frequencies_per_axis(), string.frequencies)
    with pytest.raises(ValueError, match="frequencies need blocks of 2 or STRING, got LieRE"):
        tr.LieRE(num_axes=2, num_heads=2, head_dim=16, block_size=8).frequencies_per_axis()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: tr.scaling.interpolate(torch.ones(2, 1, 3), (1.0, 0.0)),
            r"factor must be above 0 and finite, got \(1.0, 0.0\)",
        ),
        (
            lambda: tr.scaling.ntk(torch.ones(2, 1, 3), (1.0,)),
            r"factor must be one number or one per axis \(2\), got 1",
        ),
        (
            lambda: tr.scaling.yarn(torch.ones(1, 1, 3), 2.0, train_size=-1),
            "train_size must be above 0 and finite, got -1",
        ),
        (
            lambda: tr.scaling.yarn(torch.ones(1, 1, 3), 2.0, train_size=9, beta_fast=1.0),
            "yarn needs beta_fast > beta_slow > 0, got 1.0 and 1.0",
        ),
        (
            lambda: tr.extend(CASES["axial-N2"](), 2.0, method="pi"),
            "method must be interpolate, ntk, yarn or a function, got 'pi'",
        ),
        (lambda: tr.extend(CASES["axial-N2"](), 2.0, method="yarn"), r"yarn requires train_size= \(.*\)"),
        (
            lambda: tr.extend(CASES["liere4-N2-rest"](), 2.0),
            "ntk needs frequencies, which blocks of 2 and STRING have; interpolate supports any encoding, got LieRE",
        ),
    ],
)
def test_extend_refuses_invalid_arguments_in_one_line(call: object, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        call()  # type: ignore[operator]
    assert "\n" not in str(caught.value)


def test_ntk_keeps_pairs_of_equal_frequency_and_zeros() -> None:
    equal = torch.tensor([[[1.0, 0.0, 1.0 + 1e-7]], [[0.0, 1.0, 0.0]]])
    torch.testing.assert_close(tr.scaling.ntk(equal, 4), equal, atol=0, rtol=1e-6)
    slow = torch.tensor([[[1e-3, 0.0, 0.9e-3, 0.0]], [[0.0, 1e-3, 0.0, 0.9e-3]]])
    found = tr.scaling.ntk(slow, 4)
    torch.testing.assert_close(found, slow * torch.tensor([1.0, 1.0, 0.25, 0.25]))
    encoding = tr.encodings.SimplexRoPE(num_axes=2, num_heads=1, head_dim=6)
    torch.testing.assert_close(tr.extend(encoding, 4).frequencies_per_axis(), encoding.frequencies_per_axis())
