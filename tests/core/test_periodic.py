"""Periodic axes: `Periodic` for encodings with frequencies, `to_circle` for all others."""

import math
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import pytest
import torch
from torch import Tensor

import torchrope as tr
from torchrope.encodings.periodic import distinct_turns

WIDE = dict(dtype=torch.float64)
HEAD = dict(num_heads=2, head_dim=12)
PERIODS = (24.0, None, 2 * math.pi)
FAMILIES: dict[str, Callable[..., tr.Encoding]] = {
    "axial": tr.AxialRoPE,
    "mixed": tr.MixedRoPE,
    "mixed-shared": partial(tr.MixedRoPE, shared_heads=True),
    "golden": tr.encodings.GoldenGateRoPE,
    "dinov3": tr.encodings.baselines.dinov3,
    "mrope": tr.encodings.MRoPE,
    "liere2": partial(tr.LieRE, block_size=2),
    "comrope-ap2": partial(tr.ComRoPEAP, block_size=2),
    "string": tr.STRING,
    "string4-rest": partial(tr.STRING, block_size=4, rotary_dim=8),
    "none": tr.NoEncoding,
}


def periodic(name: str, periods: tuple[float | None, ...] = PERIODS) -> tr.encodings.Periodic:
    torch.manual_seed(1)
    return tr.encodings.Periodic(FAMILIES[name](num_axes=len(periods), **HEAD), periods)


def scores(encoding: tr.Encoding, positions: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 2, len(positions), 12, generator=generator, **WIDE).to(positions.dtype)
    rotated_q, rotated_k = tr.rotate(q, k, encoding(positions), layout="bhtd")
    return rotated_q @ rotated_k.mT


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("turns", [1, -1, 5])
@pytest.mark.parametrize("name", FAMILIES)
def test_periodic_rotations_repeat_after_a_period(name: str, turns: int, dtype: torch.dtype) -> None:
    encoding = periodic(name).to(dtype)
    positions = torch.tensor([[0, 0, 0], [5, 2, 1], [23, 1, 3]], dtype=dtype)
    moved = positions.clone()
    moved[0] += turns * torch.tensor([24, 0, 2 * math.pi], dtype=dtype)
    assert (scores(encoding, moved) - scores(encoding, positions)).abs().max() < 1e-6
    if name not in ("none", "axial", "mrope"):
        moved[0] += torch.tensor([0, 24, 0], dtype=dtype)  # this axis is not periodic
        assert (scores(encoding, moved) - scores(encoding, positions)).abs().max() > 1e-2


@pytest.mark.parametrize("name", FAMILIES)
def test_periodic_scores_depend_on_the_difference_modulo_t(name: str) -> None:
    """Across the place where positions are wrapped, too: there, non-integer turns would be discontinuous."""
    encoding = periodic(name).double()
    positions = torch.tensor([[11.0, 0.0, 3.0], [13.0, 0.5, 3.3], [2.0, 4.0, -1.0]], **WIDE)
    moved = positions + torch.tensor([7.3, -2.0, 1.9], **WIDE)
    assert (scores(encoding, moved) - scores(encoding, positions)).abs().max() < 1e-10


@pytest.mark.parametrize("name", FAMILIES)
def test_periodic_generators_have_integer_turns_per_period(name: str) -> None:
    encoding = periodic(name).double()
    generators, inner = encoding.generators(), encoding.encoding.generators()
    assert generators.shape == inner.shape
    assert torch.allclose(generators[1], inner[1])
    for axis in (0, 2):
        whole = torch.linalg.matrix_exp((PERIODS[axis] * generators[axis]).double())
        assert torch.allclose(whole, torch.eye(whole.shape[-1], **WIDE).expand_as(whole), atol=1e-9)


def test_periodic_turns_are_nearest_integers_and_distinct() -> None:
    along_all = torch.tensor([[[0.4, 0.6, -1.2]], [[0.4, 0.6, -1.2]], [[0.4, 0.6, -1.2]]])
    turns = distinct_turns(along_all, (2 * math.pi, None, 4 * math.pi))
    assert turns.tolist() == [[[0, 1, -1]], [[0, 0, 0]], [[1, 1, -2]]]
    alone = torch.tensor([[[0.3, -1.2, 0.0, 1.4, 7.0], [0.0, 3.0, 3.1, -2.9, 3.2]]])
    assert distinct_turns(alone, (2 * math.pi,)).tolist() == [[[1, -2, 0, 3, 7], [0, 4, 5, -3, 6]]]
    assert distinct_turns(torch.zeros(1, 2, 0), (1.0,)).shape == (1, 2, 0)


@pytest.mark.parametrize("period", [3.0, 24.0, 1000.0])
@pytest.mark.parametrize("name", ["axial", "dinov3", "mrope", "golden"])
def test_periodic_pairs_of_one_axis_have_distinct_turns(name: str, period: float) -> None:
    turns = periodic(name, (period,)).turns
    assert all(len(set(head.abs().tolist())) == 6 for head in turns[0])
    assert turns.abs().min() >= 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["axial", "golden", "mixed", "string"])
def test_periodic_encodings_have_every_property(name: str) -> None:
    def make() -> tr.encodings.Periodic:
        return tr.encodings.Periodic(FAMILIES[name](num_axes=2, **HEAD), (24.0, None))

    for what, holds in tr.testing.PROPERTIES.items():
        if name == "string" and what == "gradients are exact":  # sets frequencies without integer turns
            continue
        with suppress(tr.testing.DoesNotApply):
            holds(make)


@pytest.mark.parametrize("name", ["mixed", "string"])
def test_periodic_gradients_match_an_equal_encoding(name: str) -> None:
    encoding = periodic(name, (24.0, None)).double()
    plain = FAMILIES[name](num_axes=2, **HEAD).double()
    plain.load_state_dict(encoding.encoding.state_dict())
    with torch.no_grad():
        plain.frequencies[0] = encoding.turns[0] * (2 * math.pi / 24)
    positions = 10 * torch.rand(5, 2, **WIDE)  # within one period: not wrapped
    for each in (encoding, plain):
        scores(each, positions).sin().sum().backward()
    mine, theirs = encoding.encoding.frequencies.grad, plain.frequencies.grad
    assert torch.allclose(mine[1], theirs[1], atol=1e-10)
    assert theirs.abs().amax(dim=(1, 2)).min() > 1e-3
    assert not mine[0].any()
    if name == "string":
        assert torch.allclose(encoding.encoding.upper.grad, plain.upper.grad, atol=1e-10)


@pytest.mark.parametrize("name", ["mixed", "string", "comrope-ap2"])
def test_periodic_cycles_are_fixed_while_other_axes_learn(name: str) -> None:
    encoding = periodic(name, (24.0, None))
    before = encoding.generators().detach().clone()
    optimizer = torch.optim.AdamW(encoding.parameters(), lr=0.3, weight_decay=0.5)
    positions = torch.tensor([[0.0, 0.0], [5.0, 2.0], [20.0, -1.0]])
    for _ in range(3):
        optimizer.zero_grad()
        scores(encoding, positions).square().sum().backward()
        assert all(p.grad is None or p.grad.isfinite().all() for p in encoding.parameters())
        optimizer.step()
    assert (encoding.generators()[1] - before[1]).abs().max() > 0.1
    moved = positions + torch.tensor([24.0, 0.0])
    assert (scores(encoding, moved) - scores(encoding, positions)).abs().max() < 1e-6
    if name != "string":  # its basis is learned
        assert torch.equal(encoding.generators()[0], before[0])


@pytest.mark.parametrize("name", ["mixed", "string"])
def test_periodic_cycles_are_saved_and_loaded(name: str) -> None:
    encoding = periodic(name)
    with torch.no_grad():
        next(encoding.encoding.parameters()).add_(10.0)  # the turns do not change
    other = tr.encodings.Periodic(FAMILIES[name](num_axes=3, **HEAD), PERIODS)
    other.load_state_dict(encoding.state_dict())
    assert torch.equal(other.generators(), encoding.generators())


def test_periodic_cycles_match_the_encodings_of_a_model() -> None:
    model = tr.Transformer(
        3, num_axes=1, dim=16, depth=2, num_heads=2, encoding="mixed", positions=tr.Lattice(unit=0.5, periods=(24.0,))
    )
    for encoding in model.encodings:
        drawn = distinct_turns(encoding.encoding.frequencies, encoding.periods)
        assert torch.equal(encoding.turns.double(), drawn.double())


def test_periodic_positions_have_gradients_on_every_axis() -> None:
    encoding = periodic("mixed").double()
    positions = torch.tensor([[30.0, 1.0, 9.0], [3.0, 2.0, -4.0]], **WIDE).requires_grad_()
    assert torch.autograd.gradcheck(partial(scores, encoding), (positions,))


def test_periodic_set_generators_needs_integer_cycles() -> None:
    encoding, other = periodic("mixed"), periodic("mixed")
    encoding.reset_parameters()
    other.set_generators(encoding.generators())
    assert torch.allclose(other.generators(), encoding.generators(), atol=1e-6)
    before = other.encoding.frequencies.clone()
    with pytest.raises(ValueError, match=r"must have integer turns per period, got a difference of 0\."):
        other.set_generators(encoding.encoding.generators())
    assert torch.equal(other.encoding.frequencies, before)


def test_periodic_keeps_the_lattice_of_its_encoding() -> None:
    assert periodic("golden", (2.0, None)).lattice.spaced(4, 8)["spacing"] == [2 / 4, 2 / 8]


def test_wrap_maps_to_one_period_about_the_origin() -> None:
    positions = torch.tensor([[25, 25], [-13, -13], [12, 0]])
    assert tr.positions.wrap(positions, (24, None)).tolist() == [[1, 25], [11, -13], [12, 0]]


@pytest.mark.parametrize("name", ["liere:4", "comrope-ld:4", "comrope-ap:2", "string", "axial", "learned+liere"])
def test_on_circles_makes_any_encoding_periodic(name: str) -> None:
    encoding = tr.encodings.parse_encoding(name).rotary(num_axes=3, num_heads=2, head_dim=12)
    positions = torch.tensor([[0.0, 1.0], [23.0, 2.0], [7.0, 3.0]])
    moved = positions + torch.tensor([[24.0, 0.0], [-48.0, 0.0], [0.0, 0.0]])
    first, second = (scores(encoding, tr.positions.to_circle(each, (24.0, None))) for each in (positions, moved))
    assert (first - second).abs().max() < 1e-6


def test_on_circles_keeps_distances_of_neighbours() -> None:
    positions = torch.tensor([[0.0], [0.01], [12.0], [12.01]], **WIDE)
    places = tr.positions.to_circle(positions, (24.0,))
    assert places.shape == (4, 2)
    near = (places[1::2] - places[0::2]).norm(dim=-1)
    assert torch.allclose(near, torch.full((2,), 0.01, **WIDE), rtol=1e-5)
    assert (places[2] - places[0]).norm().item() == pytest.approx(24 / math.pi)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: tr.encodings.Periodic(tr.LieRE(num_axes=1, num_heads=1, head_dim=8, block_size=4), (1.0,)),
            r"Periodic rounds frequencies.*for others use positions of torchrope.positions.to_circle, got LieRE",
        ),
        (
            lambda: tr.encodings.Periodic(periodic("axial").encoding, (1.0,)),
            r"periods must be one per axis \(3\).*got 1",
        ),
        (lambda: periodic("axial", (0.0, None)), r"periods must be above 0 and finite, or None, got \(0.0, None\)"),
        (lambda: tr.positions.wrap(torch.zeros(2, 2), (math.inf, None)), "periods must be above 0 and finite"),
        (lambda: tr.positions.to_circle(torch.zeros(2, 2), (1.0,)), r"periods must be one per axis \(2\).*got 1"),
        (
            lambda: tr.encodings.Periodic(periodic("axial").encoding, (8.64e13, None, None)),
            r"turns per period must be at most 16777216 in torch.float32: use a larger unit of position, got 1.38e\+13",
        ),
        (
            lambda: periodic("mixed")(torch.full((2, 3), torch.nan)),
            "positions must be finite, got NaN or infinity in 2 of 2",
        ),
    ],
)
def test_periodic_refuses_invalid_arguments_in_one_line(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        call()
    assert "\n" not in str(raised.value)
