"""Distance of generators from commuting, and bases of frequencies by name."""

import pytest
import torch

import torchrope as tr
from torchrope.encodings import commutator_ratio, commutes, parse_encoding

SHAPE = dict(num_axes=3, num_heads=2, head_dim=24)


@pytest.mark.parametrize(
    ("name", "does"), [("comrope-ap:4", True), ("comrope-ld:4", True), ("mixed", True), ("liere:8", False)]
)
def test_generators_of_families_commute_if_their_scores_are_relative(name: str, does: bool) -> None:
    encoding = parse_encoding(name).rotary(**SHAPE)
    assert commutes(encoding.generators()) is does is encoding.relative


def test_commutator_ratio_has_a_value_per_pair_head_and_block_with_finite_gradients() -> None:
    encoding = tr.LieRE(**SHAPE, block_size=8)
    generators = encoding.generators()
    ratios = commutator_ratio(generators)
    assert ratios.shape == (3, 2, 3)
    assert 0 < ratios.min() <= ratios.max() <= 1
    a, b = generators[0], generators[2]
    by_hand = (a @ b - b @ a).norm(dim=(-2, -1)) / (a.norm(dim=(-2, -1)) * b.norm(dim=(-2, -1)))
    torch.testing.assert_close(ratios[1], by_hand)
    for start in (generators, 0 * generators):
        leaf = start.detach().clone().requires_grad_()
        commutator_ratio(leaf).square().mean().backward()
        assert leaf.grad is not None
        assert leaf.grad.isfinite().all()


def test_generators_set_to_multiples_of_one_commute() -> None:
    encoding = tr.LieRE(num_axes=2, num_heads=1, head_dim=8)
    first = encoding.generators().detach()[:1]
    encoding.set_generators(torch.cat([first, 3 * first]))
    assert commutes(encoding.generators())


def test_base_of_frequencies_is_set_by_name() -> None:
    shape = dict(num_axes=2, num_heads=2, head_dim=16)
    assert parse_encoding("learned+axial:base=50").rotary(**shape).base == 50
    assert parse_encoding("mixed:base=100").rotary(**shape).base == 100
    default = parse_encoding("axial").rotary(**shape)
    assert torch.equal(parse_encoding("axial:base=100").rotary(**shape).frequencies, default.frequencies)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("liere:base=50", r"^only .*axial, mixed.* take a base, got 'liere:base=50'$"),
        ("axial:base=1", r"^base must be a number above 1, got 'axial:base=1'$"),
        ("axial:base=", r"^base must be a number above 1, got 'axial:base='$"),
        ("axial:base=inf", r"^base must be a number above 1, got 'axial:base=inf'$"),
    ],
)
def test_invalid_bases_raise_one_line(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_encoding(name)
