"""Encodings against their papers, each other, and reference implementations."""

import copy
import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

import torchrope as tr
from torchrope.encodings import ROTARY, Encoding
from torchrope.encodings.base import planar, skew, upper_triangle


def count(encoding: torch.nn.Module) -> int:
    return sum(p.numel() for p in encoding.parameters())


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        (partial(tr.LieRE, block_size=64), 580_608),
        (partial(tr.LieRE, block_size=8), 64_512),
        (tr.MixedRoPE, 9_216),
        (tr.AxialRoPE, 0),
    ],
)
def test_vit_b_has_the_number_of_parameters_of_the_papers(family: type, expected: int) -> None:
    layers = [family(num_axes=2, num_heads=12, head_dim=64) for _ in range(12)]
    assert sum(map(count, layers)) == expected


def test_liere_shared_has_the_4032_parameters_of_the_paper() -> None:
    assert count(tr.LieRE(num_axes=2, num_heads=12, head_dim=64, shared_heads=True)) == 4032


def test_axial_with_one_axis_is_rope_of_roformer() -> None:
    head_dim, tokens = 16, 50
    theta = 10_000.0 ** (-2 * torch.arange(head_dim // 2, dtype=torch.float64) / head_dim)  # RoFormer, eq. 15
    angle = torch.arange(tokens, dtype=torch.float64).unsqueeze(-1) * theta
    x = torch.randn(1, 1, tokens, head_dim, dtype=torch.float64)
    rotated = torch.view_as_complex(x.unflatten(-1, (-1, 2))) * torch.polar(torch.ones_like(angle), angle)
    encoding = tr.AxialRoPE(num_axes=1, num_heads=1, head_dim=head_dim)
    mine, _ = tr.rotate(x, x, encoding(tr.grid(tokens)))
    assert (mine - torch.view_as_real(rotated).flatten(-2)).abs().max() < 1e-4


def test_axial_with_two_axes_has_the_frequencies_of_rope_vit() -> None:
    frequencies = tr.AxialRoPE(num_axes=2, num_heads=1, head_dim=64).frequencies
    theta = 100.0 ** (-torch.arange(16) / 16)  # RoPE-ViT, eq. 13 with head_dim / 4 = 16
    assert torch.allclose(frequencies[0, 0::2], theta)
    assert torch.allclose(frequencies[1, 1::2], theta)
    assert not frequencies[0, 1::2].any()
    assert not frequencies[1, 0::2].any()


def test_mixed_starts_from_rotated_axial_frequencies() -> None:
    encoding = tr.MixedRoPE(num_axes=2, num_heads=4, head_dim=64)
    lengths = encoding.frequencies.norm(dim=0)  # (heads, pairs)
    ladder = 10.0 ** (-torch.arange(16) / 16)
    assert torch.allclose(lengths, ladder.repeat_interleave(2).expand(4, -1), atol=1e-6)
    directions = torch.atan2(encoding.frequencies[1, :, 0], encoding.frequencies[0, :, 0])
    assert len(directions.round(decimals=3).unique()) == 4


@pytest.mark.parametrize("num_axes", [1, 2, 3, 4])
def test_mixed_draws_uniform_rotations_of_the_axes(num_axes: int) -> None:
    """Checked on the first pair of each axis, whose frequency is 1: orthogonal, determinant 1, uniform."""
    heads = 4000
    encoding = tr.MixedRoPE(num_axes=num_axes, num_heads=heads, head_dim=2 * num_axes)
    turns = encoding.frequencies.detach().movedim(1, 0)  # (heads, axes, axes)
    assert torch.allclose(turns.mT @ turns, torch.eye(num_axes).expand_as(turns), atol=1e-5)
    assert torch.allclose(torch.linalg.det(turns), torch.ones(heads), atol=1e-5)
    if num_axes > 1:
        # Haar measure: entries have mean 0, variance 1 / N and no correlation with one another.
        entries = turns.flatten(1)
        deviation = 5 * heads**-0.5
        assert entries.mean(dim=0).abs().max() < deviation
        moments = num_axes * entries.T @ entries / heads
        if num_axes == 2:  # two entries determine the matrix
            moments = moments[:2, :2]
        assert (moments - torch.eye(len(moments))).abs().max() < 3 * deviation


@pytest.mark.parametrize("num_axes", [1, 2, 3])
def test_blocks_of_two_are_equal_for_all_classes(num_axes: int) -> None:
    sizes = dict(num_axes=num_axes, num_heads=2, head_dim=12)
    axial = tr.AxialRoPE(**sizes).double()
    positions = torch.randn(7, num_axes, dtype=torch.float64)
    truth = axial(positions).matrix()
    for family in (tr.MixedRoPE, partial(tr.LieRE, block_size=2), partial(tr.ComRoPEAP, block_size=2)):
        other = family(**sizes).double()
        other.set_generators(axial.generators())
        assert (other(positions).matrix() - truth).abs().max() < 1e-12


def test_set_generators_accepts_smaller_blocks_only() -> None:
    sizes = dict(num_axes=2, num_heads=2, head_dim=16)
    mixed = tr.MixedRoPE(**sizes)
    liere = tr.LieRE(**sizes, block_size=8)
    liere.set_generators(mixed.generators())
    positions = torch.randn(5, 2)
    assert torch.allclose(liere(positions).matrix(), mixed(positions).matrix(), atol=1e-5)
    back = tr.MixedRoPE(**sizes)
    back.set_generators(liere.generators())
    assert torch.allclose(back.frequencies, mixed.frequencies)
    with pytest.raises(ValueError, match="generators of MixedRoPE must be zero outside blocks of 2"):
        back.set_generators(tr.LieRE(**sizes, block_size=8).generators())


@pytest.mark.parametrize(
    ("family", "message"),
    [
        (tr.AxialRoPE, "AxialRoPE needs the same generators in all heads"),
        (partial(tr.MixedRoPE, shared_heads=True), "shares its generators among heads"),
        (partial(tr.ComRoPEAP, block_size=2), "ComRoPEAP rotates block j along axis j mod 2"),
        (partial(tr.ComRoPELD, block_size=4), "generators of ComRoPELD must be multiples of one base"),
        (tr.NoEncoding, "generators of NoEncoding must be zero"),
    ],
)
def test_set_generators_refuses_what_it_cannot_represent(family: type, message: str) -> None:
    sizes = dict(num_axes=2, num_heads=2, head_dim=8)
    with pytest.raises(ValueError, match=message):
        family(**sizes).set_generators(tr.LieRE(**sizes, block_size=2).generators())


def test_comrope_ld_accepts_multiples_of_a_base_and_zeros() -> None:
    sizes = dict(num_axes=3, num_heads=2, head_dim=8, block_size=4)
    source, target = tr.ComRoPELD(**sizes), tr.ComRoPELD(**sizes)
    target.set_generators(source.generators())
    assert torch.allclose(target.generators(), source.generators(), atol=1e-5)
    target.set_generators(torch.zeros_like(source.generators()))
    assert not target.generators().any()
    target.generators().square().sum()
    weight = torch.randn_like(target.generators())
    (target.generators() * weight).sum().backward()
    assert target.factors.grad.abs().min() > 0


@pytest.mark.parametrize("family", [tr.ComRoPEAP, tr.ComRoPELD, tr.LieRE, tr.MixedRoPE, tr.AxialRoPE])
def test_set_generators_accepts_bfloat16(family: type) -> None:
    encoding = family(num_axes=2, num_heads=2, head_dim=16)
    rounded = encoding.generators().detach().to(torch.bfloat16)
    encoding.set_generators(rounded)
    error = (encoding.generators() - rounded.float()).abs().max()
    assert error <= 0.02 * rounded.abs().max()


@pytest.mark.parametrize("share", [1e-6, 1e-4])
def test_set_generators_tolerates_rounding_up_to_1e_5(share: float) -> None:
    """Relative to the largest entry, for asymmetric blocks, unequal heads, entries outside blocks, non-multiples."""
    exact = tr.LieRE(num_axes=2, num_heads=2, head_dim=8, block_size=4).generators().detach()
    size = exact.abs().max() * share
    shared, blocks = exact[:, :1].expand(-1, 2, -1, -1, -1).clone(), torch.zeros(2, 2, 1, 8, 8)
    blocks[:, :, 0, :4, :4], blocks[:, :, 0, 4:, 4:] = exact.unbind(2)
    multiples = exact[:1] * torch.tensor([1.0, -2.0])[:, None, None, None, None]
    cases = [
        (tr.LieRE(num_axes=2, num_heads=2, head_dim=8, block_size=4), exact.clone(), (0, 0, 0, 0, 1)),
        (tr.LieRE(num_axes=2, num_heads=2, head_dim=8, block_size=4, shared_heads=True), shared, (0, 1, 0, (0, 1))),
        (tr.LieRE(num_axes=2, num_heads=2, head_dim=8, block_size=4), blocks, (0, 0, 0, (0, 7))),
        (tr.ComRoPELD(num_axes=2, num_heads=2, head_dim=8, block_size=4), multiples, (1, 0, 0, (0, 3))),
    ]
    for encoding, generators, place in cases:
        *front, last = place
        if isinstance(last, tuple):  # keep it skew
            generators[(*front, *last)] += 2 * size
            generators[(*front, *reversed(last))] -= 2 * size
        else:
            generators[place] += 2 * size
        if share > 1e-5:
            with pytest.raises(ValueError, match="got"):
                encoding.set_generators(generators)
        else:
            encoding.set_generators(generators)


def test_comrope_ap_assigns_blocks_to_axes_as_rope_axial() -> None:
    generators = tr.ComRoPEAP(num_axes=3, num_heads=2, head_dim=12, block_size=2).generators()
    for block in range(6):
        used = generators[:, :, block].flatten(1).any(dim=1)
        assert used.tolist() == [axis == block % 3 for axis in range(3)]


@pytest.mark.parametrize("family", [tr.LieRE, tr.ComRoPEAP, tr.ComRoPELD, tr.MixedRoPE])
def test_init_follows_the_papers(family: type) -> None:
    sizes = dict(num_axes=2, num_heads=64, head_dim=64)
    values = upper_triangle(family(**sizes).generators()).detach()
    if family is tr.LieRE:  # uniform in [0, 2 pi)
        assert 0 <= values.min() < 0.01
        assert 2 * math.pi - 0.01 < values.max() < 2 * math.pi
        assert values.mean().item() == pytest.approx(math.pi, rel=0.02)
    if family is tr.ComRoPEAP:  # P - P^T of standard normal P
        assert values[values != 0].std().item() == pytest.approx(math.sqrt(2), rel=0.02)


@pytest.mark.parametrize("name", [*ROTARY])
def test_zero_sets_generators_to_zero_and_returns_the_encoding(name: str) -> None:
    encoding = tr.encodings.parse_encoding(name).rotary(num_axes=2, num_heads=2, head_dim=48)
    learned = [parameter.any() for parameter in encoding.parameters()]
    assert encoding.zero_() is encoding
    assert not encoding.generators().any()
    if learned:  # and can be learned again
        encoding.generators().square().sum().backward()
        encoding.zero_grad()
        (encoding.generators() * torch.randn_like(encoding.generators())).sum().backward()
        assert any(parameter.grad is not None and parameter.grad.any() for parameter in encoding.parameters())


def test_zero_names_an_encoding_that_must_define_it() -> None:
    class Shifted(tr.LieRE):
        def generators(self) -> Tensor:
            return skew(self.upper + 1, self.block_size)

    with pytest.raises(ValueError, match=r"^Shifted must define zero_\(\), .*, got some of up to 1$"):
        Shifted(num_axes=1, num_heads=1, head_dim=4).zero_()


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (partial(tr.LieRE, distribution="even"), "distribution must be 'uniform' or 'normal', got 'even'"),
        (
            partial(tr.encodings.MRoPE, order="reverse"),
            "order must be 'chunked', 'interleaved' or 'video', got 'reverse'",
        ),
        (partial(tr.AxialRoPE, base=10.0, min_frequency=0.1), "base must be None if min_frequency is given"),
        (partial(tr.AxialRoPE, min_frequency=2.0), "min_frequency at most max_frequency = 1.0, got 2.0"),
        (partial(tr.AxialRoPE, max_frequency=0.0), "frequencies must be above 0"),
    ],
)
def test_settings_of_families_are_checked(build: Callable[..., Encoding], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(num_axes=2, num_heads=1, head_dim=8)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            partial(tr.AxialRoPE, num_axes=3, num_heads=1, head_dim=64),
            r"head_dim must be divisible by 2·num_axes = 6, got 64; rotary_dim=60 would leave the rest unrotated",
        ),
        (partial(tr.MixedRoPE, num_axes=2, num_heads=1, head_dim=7), "head_dim must be divisible by block_size = 2"),
        (
            partial(tr.LieRE, num_axes=2, num_heads=1, head_dim=64, block_size=48),
            "divisible by block_size = 48, got 64",
        ),
        (partial(tr.ComRoPEAP, num_axes=3, num_heads=1, head_dim=64), "divisible by num_axes·block_size = 24, got 64"),
        (partial(tr.MixedRoPE, num_axes=0, num_heads=1, head_dim=8), "num_axes must be 1 or more, got 0"),
        (
            partial(tr.MixedRoPE, num_axes=2, num_heads=1, head_dim=8, rotary_dim=10),
            "rotary_dim must be an integer from 0 to",
        ),
        (partial(tr.LieRE, num_axes=2, num_heads=1, head_dim=8, block_size=1), "block_size must be 2 or more, got 1"),
    ],
)
def test_encodings_refuse_invalid_sizes_in_one_line(build: partial, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        build()
    assert "\n" not in str(caught.value)


def test_encodings_refuse_invalid_positions_in_one_line() -> None:
    encoding = tr.MixedRoPE(num_axes=2, num_heads=1, head_dim=8)
    for positions, message in [
        (torch.zeros(4, 3), "positions must have num_axes = 2 axes, got 3"),
        (torch.zeros(2), r"positions must be \(tokens, axes\) or \(batch, tokens, axes\), got shape \(2,\)"),
        (torch.tensor([[0.0, torch.nan], [0.0, 1.0]]), "positions must be finite, got NaN or infinity in 1 of 2"),
        (torch.zeros(4, 2, dtype=torch.bool), "positions must be real numbers, got torch.bool"),
    ]:
        with pytest.raises(ValueError, match=message):
            encoding(positions)


@pytest.mark.parametrize("name", sorted(ROTARY.keys() - {"none"}))
def test_encoding_that_rotates_no_channels_is_left_unchanged(name: str) -> None:
    build = partial(ROTARY[name], rotary_dim=0)
    encoding, positions, q = build(num_axes=2, num_heads=2, head_dim=8), tr.grid(2, 3), torch.randn(1, 2, 6, 8)
    before = copy.deepcopy(encoding.state_dict())
    encoding.set_generators(encoding.generators())
    extended = [tr.extend(encoding, 2, method=method) for method in ("interpolate", "ntk")]
    for each in (*extended, tr.extend(encoding, 2, method="yarn", train_size=4), encoding.zero_()):
        assert each.state_dict().keys() == before.keys()
        assert all(torch.equal(x, before[key]) for key, x in each.state_dict().items())
        for rotation in (each(positions), tr.freeze(each, positions)(positions)):
            assert torch.equal(tr.rotate(q, q, rotation)[0], q)
            assert torch.equal(rotation.matrix(), torch.eye(8).expand_as(rotation.matrix()))
    model, x = (
        tr.ViT((8, 8), patch_size=4, dim=16, depth=1, num_heads=2, encoding=build).eval(),
        torch.randn(1, 3, 8, 8),
    )
    changed = [tr.extend(model, 2), tr.freeze(model, (8, 8)), *([tr.absorb(model)] if encoding.relative else [])]
    assert all(torch.allclose(each(x), model(x), atol=1e-6) for each in changed)
    assert tr.inflate(model)(x.unsqueeze(2)).isfinite().all()


@pytest.mark.parametrize("b", [4, 16, 20])
def test_skew_has_zeros_on_its_diagonal_also_beside_values_that_are_not_finite(b: int) -> None:
    upper = torch.full((b * (b - 1) // 2,), torch.inf)
    upper[1:] = torch.nan
    assert not skew(upper, b).diagonal().any()


def test_skew_and_upper_triangle_are_inverse() -> None:
    upper = torch.randn(3, 10)
    blocks = skew(upper, 5)
    assert torch.equal(upper_triangle(blocks), upper)
    assert blocks[0, 0, 1] == upper[0, 0]
    assert blocks[0, 3, 4] == upper[0, 9]
    assert planar(torch.tensor(2.0)).tolist() == [[0.0, -2.0], [2.0, 0.0]]


@pytest.mark.parametrize("b", [2, 3, 8, 17])
@pytest.mark.parametrize("shape", [(2, 3), (0, 3), (40, 12)])
def test_skew_and_its_gradients_are_those_of_plain_operations(b: int, shape: tuple[int, int]) -> None:
    given = torch.randn(*shape, b * (b - 1) // 2 + 1)[..., 1:].requires_grad_()
    wide = given.detach().double().requires_grad_()  # kernels compute float32
    blocks, expected = skew(given, b), skew(wide, b)
    assert torch.equal(blocks.double(), expected)
    grad = torch.randn(b, b).expand_as(blocks)
    [fast] = torch.autograd.grad(blocks, given, grad)
    [exact] = torch.autograd.grad(expected, wide, grad.double())
    assert torch.allclose(fast.double(), exact, atol=1e-6)
    linear = torch.randn_like(given).requires_grad_()
    [again] = torch.autograd.grad(skew(linear, b).square().sum(), linear, create_graph=True)
    [second] = torch.autograd.grad(again.sum(), linear)
    assert torch.allclose(second, torch.full_like(second, 4.0))


def test_parse_encoding_finds_classes() -> None:
    both = tr.encodings.parse_encoding("learned+liere:8")
    assert both.rotary(num_axes=2, num_heads=4, head_dim=16).block_size == 8
    assert both.absolute is tr.LearnedAPE
    assert both.parts == [tr.LearnedAPE, tr.LieRE]
    assert tr.encodings.parse_encoding("sinusoidal").parts == [tr.SinusoidalAPE]
    assert tr.encodings.parse_encoding("none").parts == [tr.NoEncoding]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("lire", "got 'lire'; did you mean 'liere'"),
        ("comrope-dl", "did you mean 'comrope-"),
        ("axial:4", "only liere, comrope-ap, comrope-ld, string, comrope-liere take a number, got 'axial:4'"),
        ("liere:eight", "block size must be a whole number of 2 or more, got 'liere:eight'"),
        ("mixed+axial", "at most one absolute, one score bias and one rotary name"),
        ("learned+sinusoidal", "at most one absolute, one score bias and one rotary name"),
        ("learned:3", "got 'learned:3'; did you mean 'learned'"),
        ("", "an encoding must be one of none, axial"),
    ],
)
def test_parse_encoding_suggests_the_nearest_name(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tr.encodings.parse_encoding(name)
