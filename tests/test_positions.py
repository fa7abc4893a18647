"""Positions: lattices, prefixes, and the functions on them."""

import pytest
import torch

import torchrope as tr


def test_grid_is_row_major_with_the_last_axis_fastest() -> None:
    assert tr.grid(2, 3).tolist() == [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2]]
    index = tr.grid(3, 4, 5).reshape(3, 4, 5, 3)
    assert index[2, 1, 3].tolist() == [2, 1, 3]


def test_spacing_and_origin_are_one_number_or_one_per_axis() -> None:
    positions = tr.grid(2, 2, spacing=(0.5, 2.0), origin=(1.0, -1.0))
    assert positions.tolist() == [[1.0, -1.0], [1.0, 1.0], [1.5, -1.0], [1.5, 1.0]]
    assert tr.grid(4, spacing=0.25, origin=0.125).flatten().tolist() == [0.125, 0.375, 0.625, 0.875]


@pytest.mark.parametrize("sizes", [(0,), (3, 0), (0, 2, 2)])
def test_an_axis_without_tokens_gives_no_positions(sizes: tuple[int, ...]) -> None:
    assert tr.grid(*sizes).shape == (0, len(sizes))


def test_prefix_sits_at_the_origin_in_front() -> None:
    positions = tr.grid(2, 2, origin=5.0)
    both = tr.prefix(positions, 3)
    assert torch.equal(both[:3], torch.zeros(3, 2))
    assert torch.equal(both[3:], positions)
    assert tr.prefix(positions.expand(4, -1, -1), 1).shape == (4, 5, 2)


def test_a_larger_lattice_runs_past_the_smaller_one_with_the_same_spacing() -> None:
    small, large = tr.grid(4, 4, spacing=1 / 4), tr.grid(6, 6, spacing=1 / 4)
    assert torch.equal(large.reshape(6, 6, 2)[:4, :4], small.reshape(4, 4, 2))


def test_shift_and_rescale_act_on_each_axis() -> None:
    positions = tr.grid(2, 2)
    assert torch.equal(tr.shift(positions, (1.0, -2.0)), positions + torch.tensor([1.0, -2.0]))
    assert torch.equal(tr.rescale(positions, 3.0), positions * 3)
    per_sample = torch.tensor([[[0.0, 0.0]], [[1.0, 1.0]]])
    assert tr.shift(positions, per_sample).shape == (2, 4, 2)


def test_jitter_stays_in_its_cell_and_repeats_with_its_generator() -> None:
    positions = tr.grid(30, 30)
    moved = tr.jitter(positions, (1.0, 0.5), generator=torch.Generator().manual_seed(3))
    offset = moved - positions
    assert (offset.abs() <= torch.tensor([0.5, 0.25]) + 1e-5).all()
    assert (offset.std(dim=0) > torch.tensor([0.2, 0.1])).all()
    assert torch.equal(moved, tr.jitter(positions, (1.0, 0.5), generator=torch.Generator().manual_seed(3)))


@pytest.mark.parametrize("dtype", [torch.int64, torch.bfloat16])
def test_functions_on_positions_never_round_below_float32(dtype: torch.dtype) -> None:
    whole = torch.arange(256, 260).unsqueeze(-1).to(dtype)
    assert tr.shift(whole, 0.5).tolist() == [[v + 0.5] for v in whole.flatten().tolist()]
    assert tr.rescale(whole, 0.5).dtype == torch.float32
    assert tr.jitter(whole, 1.0).dtype == torch.float32


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: tr.grid(), r"one size per axis, each 0 or more, got \(\)"),
        (lambda: tr.grid(2, -1), r"got \(2, -1\)"),
        (lambda: tr.grid(2, 2, spacing=(1.0,)), r"spacing must be one number or one per axis \(2\), got 1"),
        (
            lambda: tr.grid(2, dtype=torch.bfloat16),
            "positions must be float32 or float64, got torch.bfloat16",
        ),
        (lambda: tr.prefix(tr.grid(2), -1), "count of 0 or more, got -1"),
        (lambda: tr.shift(tr.grid(2, 2), (1.0, 2.0, 3.0)), r"offset must be .* \(2\), got 3"),
    ],
)
def test_bad_input_is_told_in_one_line(call: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()  # type: ignore[operator]
