"""Encodings since ComRoPE against the formulas of their papers."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import torchrope as tr
from torchrope.encodings.simplex import simplex

WIDE = dict(dtype=torch.float64)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), **WIDE)


def scores(encoding: tr.Encoding, positions: Tensor) -> Tensor:
    q, k = drawn(2, 1, encoding.num_heads, len(positions), encoding.head_dim)
    q, k = tr.rotate(q, k, encoding(positions), layout="bhtd")
    return q @ k.mT


@pytest.mark.parametrize("num_axes", [2, 3, 4, 7])
def test_simplex_vertices_are_balanced_and_equidistant(num_axes: int) -> None:
    corners = simplex(num_axes)
    products = corners @ corners.T
    expected = (1 + 1 / num_axes) * torch.eye(num_axes + 1, **WIDE) - 1 / num_axes
    assert torch.allclose(products, expected, atol=1e-12)
    assert corners.sum(dim=0).abs().max() < 1e-12


def test_simplex_rope_is_isotropic_with_directions_per_head() -> None:
    encoding = tr.encodings.SimplexRoPE(num_axes=3, num_heads=2, head_dim=24, base=1000.0)
    f = encoding.frequencies.double().unflatten(-1, (3, 4))  # (axes, heads, scales, corners)
    for scale, size in enumerate((1.0, 0.1, 0.01)):
        own = f[:, :, scale]
        assert torch.allclose(own.norm(dim=0), torch.tensor(size, **WIDE), rtol=1e-5)
        energy = torch.einsum("ahi,bhi->hab", own, own)
        assert torch.allclose(energy, 4 / 3 * size**2 * torch.eye(3, **WIDE).expand(2, 3, 3), atol=1e-6 * size)
    assert not torch.allclose(f[:, 0], f[:, 1], atol=1e-2)


def test_simplex_rope_of_one_axis_is_rope() -> None:
    simplex_rope = tr.encodings.SimplexRoPE(num_axes=1, num_heads=2, head_dim=12)
    rope = tr.AxialRoPE(num_axes=1, num_heads=2, head_dim=12)
    assert torch.allclose(simplex_rope.frequencies_per_axis().abs(), rope.frequencies_per_axis().expand(-1, 2, -1))


def test_spiral_rope_with_two_directions_is_rope_axial() -> None:
    spiral = tr.encodings.SpiralRoPE(num_axes=2, num_heads=1, head_dim=16, num_directions=2)
    axial = tr.AxialRoPE(num_axes=2, num_heads=1, head_dim=16)
    order = [0, 2, 4, 6, 1, 3, 5, 7]  # pairs grouped by axis
    assert torch.allclose(spiral.frequencies[:, 0], axial.frequencies[:, order], atol=1e-6)


@pytest.mark.parametrize("directions", [4, 8])
def test_spiral_rope_has_uniform_directions_and_shared_frequencies(directions: int) -> None:
    encoding = tr.encodings.SpiralRoPE(num_axes=2, num_heads=1, head_dim=64, num_directions=directions)
    groups = encoding.frequencies[:, 0].double().unflatten(-1, (directions, -1))  # (axes, groups, pairs)
    angles = torch.atan2(groups[1], groups[0])
    expected = torch.arange(directions, **WIDE) * math.pi / directions
    assert torch.allclose(angles, expected.unsqueeze(1).expand_as(angles), atol=1e-5)
    sizes = groups.norm(dim=0)
    assert torch.allclose(sizes[: directions // 2], sizes[directions // 2 :], rtol=1e-5)
    ladder = 100.0 ** (-torch.arange(16, **WIDE) / 16)
    assert torch.allclose(sizes[: directions // 2].flatten().sort(descending=True).values, ladder, rtol=1e-5)


def test_drope_heading_is_periodic_and_relative() -> None:
    encoding = tr.encodings.DRoPE(num_axes=3, num_heads=2, head_dim=16).double()
    positions = torch.tensor([[1.0, 2.0, 3.0], [4.0, 0.0, -2.0], [0.0, 0.0, 0.1]], **WIDE)
    rotated = positions + torch.tensor([0.0, 0.0, 2 * math.pi], **WIDE) * torch.tensor([[1.0], [-2.0], [0.0]], **WIDE)
    assert torch.allclose(scores(encoding, rotated), scores(encoding, positions), atol=1e-10)
    elsewhere = positions + torch.tensor([7.0, -3.0, 1.0], **WIDE)
    assert torch.allclose(scores(encoding, elsewhere), scores(encoding, positions), atol=1e-10)
    alone = tr.encodings.DRoPE(num_axes=1, num_heads=1, head_dim=4)(torch.tensor([[0.7]], **WIDE)).angles()
    assert torch.allclose(alone, torch.full_like(alone, 0.7))


def test_mhrope_heads_have_all_frequencies_of_one_axis() -> None:
    encoding = tr.encodings.MultiHeadRoPE(num_axes=3, num_heads=8, head_dim=16, sections=(2, 3, 2))
    ladder = tr.AxialRoPE(num_axes=1, num_heads=1, head_dim=16).frequencies[0]
    of_head = [0, 0, 1, 1, 1, 2, 2, None]
    for head, axis in enumerate(of_head):
        for other in range(3):
            expected = ladder if other == axis else torch.zeros_like(ladder)
            assert torch.allclose(encoding.frequencies[other, head], expected)


def test_videorope_assigns_the_lowest_frequencies_to_time() -> None:
    encoding = tr.encodings.baselines.videorope(num_axes=3, num_heads=1, head_dim=128, sections=(16, 24, 24))
    time, height, width = encoding.frequencies
    assert [int((each > 0).sum()) for each in (time, height, width)] == [16, 24, 24]
    assert time[time > 0].max() < min(height[height > 0].min(), width[width > 0].min())
    assert height[0] > width[1] > height[2]


def test_diagonal_centres_frames_on_the_diagonal() -> None:
    places = tr.positions.video_rope(4, 3, 5, spacing=2.0, start=10.0).unflatten(0, (4, 15))
    assert torch.allclose(places.mean(dim=1), (10 + 2 * torch.arange(4.0)).unsqueeze(1).expand(-1, 3))
    assert torch.allclose(places[1:] - places[:-1], torch.full((), 2.0))
    assert torch.allclose(places[0, 5] - places[0, 0], torch.tensor([0.0, 1.0, 0.0]))


@pytest.mark.parametrize("angle_weight", [0.0, 0.5, 1.0])
def test_around_text_is_equidistant_from_text_tokens(angle_weight: float) -> None:
    places = tr.positions.circle_rope(4, 6, radius=3.0, angle_weight=angle_weight).double()
    for text in (-2.0, 0.0, 11.0):
        distance = (places - text).norm(dim=-1)
        assert torch.allclose(distance, torch.full_like(distance, math.sqrt(9 + 3 * text**2)), rtol=1e-5)
    if angle_weight == 0:
        assert len(places.round(decimals=4).unique(dim=0)) == 24
    assert tr.positions.circle_rope(1, 1).shape == (1, 3)


@pytest.mark.parametrize("fov", [180, 90])
def test_lookhere_masks_and_penalises_distance_per_head(fov: int) -> None:
    bias = tr.encodings.LookHere(sizes=(5, 5), num_heads=12, fov=fov)(5, 5)
    assert bias.shape == (12, 25, 25)
    seen = bias.isfinite().unflatten(-1, (5, 5))
    up = torch.zeros(5, 5, dtype=torch.bool)
    for y in range(5):
        for x in range(5):
            up[y, x] = y <= 2 if fov == 180 else 2 - y >= abs(x - 2)
    assert torch.equal(seen[0, 12], up)
    assert all(torch.equal(seen[head, 12], seen[0, 12].rot90(turns)) for head, turns in ((1, 2), (2, 1), (3, 3)))
    assert seen[8:].all()
    distance = torch.cdist(tr.grid(5, 5), tr.grid(5, 5))
    slopes = [0.5] * 4 + [0.25] * 4 + [0.25, 0.0625, 0.015625, 0.00390625]
    for head, slope in enumerate(slopes):
        at = bias[head].isfinite()
        assert torch.allclose(bias[head][at], -slope * distance[at])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: tr.encodings.SimplexRoPE(num_axes=2, num_heads=1, head_dim=16),
            r"divisible by 2·\(num_axes \+ 1\) = 6, got 16",
        ),
        (
            lambda: tr.encodings.SpiralRoPE(num_axes=3, num_heads=1, head_dim=16),
            "num_axes of SpiralRoPE must be 2, got 3",
        ),
        (
            lambda: tr.encodings.SpiralRoPE(num_axes=2, num_heads=1, head_dim=16, num_directions=3),
            "even and 2 or more, got 3",
        ),
        (
            lambda: tr.encodings.DRoPE(num_axes=2, num_heads=1, head_dim=8, heading_pairs=5),
            "heading_pairs must be 0 to 4, got 5",
        ),
        (
            lambda: tr.encodings.DRoPE(num_axes=1, num_heads=1, head_dim=8, heading_pairs=2),
            "heading_pairs must be 4 without a position, got 2",
        ),
        (
            lambda: tr.encodings.MultiHeadRoPE(num_axes=3, num_heads=2, head_dim=8),
            "num_heads of MHRoPE must be num_axes = 3 or more, got 2",
        ),
        (
            lambda: tr.encodings.MultiHeadRoPE(num_axes=2, num_heads=2, head_dim=8, sections=(2, 1)),
            r"with sum 2 or less, got \(2, 1\)",
        ),
        (
            lambda: tr.encodings.baselines.videorope(num_axes=3, num_heads=1, head_dim=16, sections=(4, 3, 1)),
            r"equal numbers of pairs, got sections \(4, 3, 1\)",
        ),
        (lambda: tr.positions.circle_rope(2, 2, angle_weight=2.0), "angle_weight from 0 to 1, got 10.0 and 2.0"),
        (lambda: tr.encodings.LookHere(sizes=(2, 2), num_heads=2, fov=45), "fov must be 180 or 90 degrees, got 45"),
        (lambda: tr.encodings.LookHere(sizes=(2, 2), num_heads=2)(3), "LookHere needs 2 sizes, one per axis, got 1"),
        (lambda: tr.encodings.parse_encoding("bias+lookhere"), "at most one absolute, one score bias"),
    ],
)
def test_newer_encodings_refuse_invalid_arguments(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        call()
    assert "\n" not in str(raised.value)
