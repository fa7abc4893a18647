"""Positions: lattices, prefixes, and the functions on them."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from timm.layers.pos_embed_sincos import make_coords_dinov3

import torchrope as tr


def test_grid_is_row_major_with_the_last_axis_fastest() -> None:
    assert tr.grid(2, 3).tolist() == [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2]]
    index = tr.grid(3, 4, 5).reshape(3, 4, 5, 3)
    assert index[2, 1, 3].tolist() == [2, 1, 3]


def test_grid_accepts_spacing_and_origin_per_axis() -> None:
    positions = tr.grid(2, 2, spacing=(0.5, 2.0), origin=(1.0, -1.0))
    assert positions.tolist() == [[1.0, -1.0], [1.0, 1.0], [1.5, -1.0], [1.5, 1.0]]
    assert tr.grid(4, spacing=0.25, origin=0.125).flatten().tolist() == [0.125, 0.375, 0.625, 0.875]


@pytest.mark.parametrize("sizes", [(0,), (3, 0), (0, 2, 2)])
def test_grid_accepts_axes_without_tokens(sizes: tuple[int, ...]) -> None:
    assert tr.grid(*sizes).shape == (0, len(sizes))


def test_prefix_prepends_positions_at_the_origin() -> None:
    positions = tr.grid(2, 2, origin=5.0)
    both = tr.prefix(positions, 3)
    assert torch.equal(both[:3], torch.zeros(3, 2))
    assert torch.equal(both[3:], positions)
    assert tr.prefix(positions.expand(4, -1, -1), 1).shape == (4, 5, 2)


def test_grid_keeps_its_spacing_at_larger_sizes() -> None:
    small, large = tr.grid(4, 4, spacing=1 / 4), tr.grid(6, 6, spacing=1 / 4)
    assert torch.equal(large.reshape(6, 6, 2)[:4, :4], small.reshape(4, 4, 2))


def test_shift_and_rescale_act_on_each_axis() -> None:
    positions = tr.grid(2, 2)
    assert torch.equal(tr.positions.shift(positions, (1.0, -2.0)), positions + torch.tensor([1.0, -2.0]))
    assert torch.equal(tr.positions.rescale(positions, 3.0), positions * 3)
    per_sample = torch.tensor([[[0.0, 0.0]], [[1.0, 1.0]]])
    assert tr.positions.shift(positions, per_sample).shape == (2, 4, 2)


def test_jitter_stays_in_its_cell_and_is_reproducible() -> None:
    positions = tr.grid(30, 30)
    moved = tr.positions.jitter(positions, (1.0, 0.5), generator=torch.Generator().manual_seed(3))
    offset = moved - positions
    assert (offset.abs() <= torch.tensor([0.5, 0.25]) + 1e-5).all()
    assert (offset.std(dim=0) > torch.tensor([0.2, 0.1])).all()
    assert torch.equal(moved, tr.positions.jitter(positions, (1.0, 0.5), generator=torch.Generator().manual_seed(3)))


@pytest.mark.parametrize("intensity", [0.0, 0.4, 1.0, 3.0])
def test_jitter_with_a_gaussian_shift_matches_comrope(intensity: float) -> None:
    patches = 6
    noise = torch.randn(patches**2, 2, generator=torch.Generator().manual_seed(5))
    offset = 0.1 * torch.randn(2)
    # get_positions of its code: index + clamp(noise intensity / 2, ±1/2), then (+ 1/2) / n, then one offset for all
    expected = (tr.grid(patches, patches) + (noise * intensity * 0.5).clamp(-0.5, 0.5) + 0.5) / patches + offset
    centres = tr.grid(patches, patches, spacing=1 / patches, origin=0.5 / patches)
    moved = tr.positions.jitter(centres, 1 / patches, intensity=intensity, generator=torch.Generator().manual_seed(5))
    assert torch.allclose(tr.positions.shift(moved, offset), expected, atol=1e-6)


def test_jitter_of_zero_keeps_an_axis() -> None:
    positions = tr.grid(3, 4, 4)
    moved = tr.positions.jitter(positions, (0.0, 1.0, 1.0))
    assert torch.equal(moved[:, 0], positions[:, 0])
    assert not torch.allclose(moved[:, 1:], positions[:, 1:])


@pytest.mark.parametrize(("normalize", "per"), [("separate", "size"), ("max", "longest"), ("min", "shortest")])
def test_patch_centres_match_dinov3(normalize: str, per: Any) -> None:
    expected = make_coords_dinov3(3, 5, normalize_coords=normalize)
    lattice = tr.Lattice(2.0, -1.0, offset=0.5, per=per)
    assert torch.allclose(lattice(3, 5), expected, atol=1e-6)
    video = lattice(2, 3, 4)
    assert torch.allclose(video, -video.flip(0), atol=1e-6) or normalize != "separate"
    assert lattice(0, 3).shape == (0, 2)


def test_lattices_of_papers_span_the_training_image() -> None:
    for family in (tr.encodings.baselines.dinov3, tr.encodings.GoldenGateRoPE):
        lattice = family(num_axes=2, head_dim=8).lattice
        assert torch.allclose(lattice(3, 5), make_coords_dinov3(3, 5), atol=1e-6)
        assert torch.allclose(tr.grid(3, 5, **lattice.spaced(3, 5)), lattice(3, 5), atol=1e-6)


RANDOM = {
    "shift": tr.positions.random_shift,
    "stretch": partial(tr.positions.random_scale, per_axis=True),
    "rescale": tr.positions.random_scale,
}


@pytest.mark.parametrize("name", RANDOM)
def test_random_changes_are_drawn_per_sample(name: str) -> None:
    positions = tr.grid(3, 4, spacing=0.5, origin=0.25, dtype=torch.float64)
    batch = positions.expand(500, -1, -1)
    moved = RANDOM[name](batch, 2.0, generator=torch.Generator().manual_seed(1))
    change = moved - batch if name == "shift" else (moved / batch).log()
    assert torch.allclose(change, change[:, :1].expand_as(change))
    per_sample = change[:, 0]
    limit = 2.0 if name == "shift" else math.log(2.0)
    assert per_sample.abs().max() <= limit
    # uniform: mean 0 and standard deviation limit / √3; equal on all axes only for rescale
    assert per_sample.mean().abs() < 0.1 * limit
    assert per_sample.std().item() == pytest.approx(limit / math.sqrt(3), rel=0.1)
    assert torch.allclose(per_sample[:, 0], per_sample[:, 1]) == (name == "rescale")
    again = RANDOM[name](batch, 2.0, generator=torch.Generator().manual_seed(1))
    assert torch.equal(moved, again)
    assert RANDOM[name](positions, 2.0).shape == positions.shape


@pytest.mark.parametrize("name", RANDOM)
def test_random_changes_of_zero_are_the_identity(name: str) -> None:
    positions = tr.Lattice(2.0, -1.0, offset=0.5, per="size")(3, 4)
    assert torch.equal(RANDOM[name](positions, 0.0 if name == "shift" else 1.0), positions)


def test_spacing_per_size_maps_to_the_training_size() -> None:
    anchored = tr.Lattice(spacing=4.0, per="size")
    assert anchored(8, 6).amax(dim=0).tolist() == pytest.approx([3.5, 4 * 5 / 6])  # VisionLLaMA: (i B / H, j B / W)
    assert torch.equal(anchored(4, 4), tr.grid(4, 4))


@pytest.mark.parametrize("dtype", [torch.int64, torch.bfloat16])
def test_position_functions_keep_at_least_float32(dtype: torch.dtype) -> None:
    whole = torch.arange(256, 260).unsqueeze(-1).to(dtype)
    assert tr.positions.shift(whole, 0.5).tolist() == [[v + 0.5] for v in whole.flatten().tolist()]
    assert tr.positions.rescale(whole, 0.5).dtype == torch.float32
    assert tr.positions.jitter(whole, 1.0).dtype == torch.float32
    assert tr.positions.random_scale(whole, 2.0).dtype == torch.float32


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: tr.grid(), r"one size per axis, each 0 or more, got \(\)"),
        (lambda: tr.grid(2, -1), r"got \(2, -1\)"),
        (lambda: tr.grid(2, 2, spacing=(1.0,)), r"spacing must be one number or one per axis \(2\), got 1"),
        (lambda: tr.grid(2, dtype=torch.bfloat16), "positions must be float32 or float64, got torch.bfloat16"),
        (lambda: tr.prefix(tr.grid(2), -1), "count must be 0 or more, got -1"),
        (lambda: tr.positions.random_shift(tr.grid(2), -1.0), "random_shift needs an amount of 0 or more, got -1.0"),
        (lambda: tr.positions.random_scale(tr.grid(2), 0.5), "factor must be 1 or more, got 0.5"),
        (lambda: tr.positions.circle_rope(0, 3), "height must be 1 or more, got 0"),
        (lambda: tr.positions.wrap(tr.grid(2), 24.0), r"periods must be one per axis \(1\), .* got 24.0"),
        (lambda: tr.positions.shift(tr.grid(2, 2), (1.0, 2.0, 3.0)), r"offset must be .* \(2\), got 3"),
    ],
)
def test_position_functions_refuse_invalid_input(call: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()  # type: ignore[operator]
