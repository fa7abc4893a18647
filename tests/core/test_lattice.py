"""One class of lattices gives, bit for bit, the positions of the conventions that it unites."""

import copy
import pickle
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import torchrope as tr
from torchrope.lattice import Lattice
from torchrope.positions import grid, rescale, shift, to_circle

SIZES = [(3, 5), (7, 2), (14, 14), (1, 1), (6, 10)]
SPACING, ORIGIN = (0.3, 1 / 7), (0.1, -2 / 3)


def fixed_range(
    sizes: Sequence[int], trained: Sequence[int], spacing: Sequence[float], origin: Sequence[float], unit: int | None
) -> Tensor:
    """ComRoPE's rule as a spacing and an origin of `grid` for each size."""
    ratios = [before / size for before, size in zip(trained, sizes, strict=True)]
    ratios = ratios if unit is None else [ratios[unit]] * len(sizes)
    steps = [step * ratio for step, ratio in zip(spacing, ratios, strict=True)]
    starts = [start + step * (ratio - 1) / 2 for start, step, ratio in zip(origin, spacing, ratios, strict=True)]
    return grid(*sizes, spacing=steps, origin=starts)


@pytest.mark.parametrize("sizes", SIZES)
def test_a_plain_lattice_is_grid(sizes: tuple[int, int]) -> None:
    lattice = Lattice(SPACING, ORIGIN)
    assert torch.equal(lattice(*sizes), grid(*sizes, spacing=SPACING, origin=ORIGIN))
    wide = lattice(*sizes, dtype=torch.float64)
    assert torch.equal(wide, grid(*sizes, spacing=SPACING, origin=ORIGIN, dtype=torch.float64))
    assert torch.equal(grid(*sizes, **lattice.spaced(*sizes)), lattice(*sizes))


@pytest.mark.parametrize("unit", [None, 0, 1, -1])
@pytest.mark.parametrize("sizes", SIZES)
def test_a_fixed_range(sizes: tuple[int, int], unit: int | None) -> None:
    lattice = Lattice(SPACING, ORIGIN, per="size" if unit is None else unit, train_sizes=[6, 10])
    expected = fixed_range(sizes, (6, 10), SPACING, ORIGIN, unit)
    assert torch.equal(lattice(*sizes), expected)
    assert torch.equal(grid(*sizes, **lattice.spaced(*sizes)), expected)
    if sizes == (6, 10):
        assert torch.equal(expected, grid(*sizes, spacing=SPACING, origin=ORIGIN))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_voxels(dtype: torch.dtype) -> None:
    voxels = torch.tensor([[5.0, 0.7], [2.0, 0.31]], dtype=dtype)
    steps = voxels * voxels.new_tensor((2, 16)) / 7.3
    indices = grid(3, 5).to(steps) * steps[:, None]
    expected = steps.new_tensor(ORIGIN) + steps.new_tensor(SPACING) * indices
    assert torch.equal(Lattice(SPACING, ORIGIN, unit=7.3, patch_size=(2, 16))(3, 5, spacing=voxels), expected)


DIVISORS: dict[str, Any] = {
    "one": lambda sizes: (1, 1),
    "size": lambda sizes: sizes,
    "longest": lambda sizes: (max(sizes),) * 2,
    "shortest": lambda sizes: (min(sizes),) * 2,
    "steps": lambda sizes: tuple(max(size - 1, 1) for size in sizes),
}


@pytest.mark.parametrize("per", DIVISORS)
@pytest.mark.parametrize("sizes", SIZES)
def test_rotations_of_other_models(sizes: tuple[int, int], per: Any) -> None:
    lattice = Lattice(SPACING, ORIGIN, 0.5, per)
    indices = grid(*sizes).unbind(-1)
    settings = zip(indices, ORIGIN, SPACING, DIVISORS[per](sizes), strict=True)
    expected = torch.stack([start + step * ((index + 0.5) / n) for index, start, step, n in settings], dim=-1)
    assert torch.equal(lattice(*sizes), expected)
    extents = [torch.tensor([size]).expand(2, 1) for size in sizes]
    assert torch.equal(lattice.at(grid(*sizes).expand(2, -1, -1), extents), expected.expand(2, -1, -1))


@pytest.mark.parametrize("periods", [None, (24.0, None), (24.0, 7.0)])
def test_positions_of_points(periods: Any) -> None:
    units = torch.randn(2, 9, 2, dtype=torch.float32) * 5
    expected = shift(rescale(units, SPACING), ORIGIN)
    if periods is not None:  # in the unit of the points
        scaled = [None if period is None else period * step for period, step in zip(periods, SPACING, strict=True)]
        expected = to_circle(expected, scaled)
    assert torch.equal(Lattice(SPACING, ORIGIN, periods=periods).at(units), expected)


def test_perturbations_draw_as_their_functions() -> None:
    positions = grid(4, 6, spacing=0.25)
    torch.manual_seed(0)
    expected = tr.positions.jitter(positions, (0.0, 0.25), intensity=0.7)
    torch.manual_seed(0)
    assert torch.equal(Lattice(0.25, cell=(0.0, 0.25), intensity=0.7).perturbed(positions), expected)
    torch.manual_seed(0)
    expected = tr.positions.random_scale(
        tr.positions.random_scale(tr.positions.random_shift(positions, 0.1), 1.5, per_axis=True), 2.0
    )
    torch.manual_seed(0)
    assert torch.equal(Lattice(shift=0.1, stretch=1.5, rescale=2.0).perturbed(positions), expected)
    assert Lattice(0.25).perturbed(positions) is positions


def test_axes_may_have_different_rules() -> None:
    lattice = Lattice((0.5, 2.0, 2.0), (0.0, -1.0, -1.0), (0.0, 0.5, 0.5), ("one", "longest", "longest"))
    volume = lattice(9, 3, 5).unflatten(0, (9, 15))
    assert torch.equal(volume[4, :, 1:], Lattice(2.0, -1.0, 0.5, "longest")(3, 5))
    assert torch.equal(volume[:, 0, 0], torch.arange(9) * 0.5)


def test_lattices_are_values() -> None:
    lattice = Lattice([0.5, 0.25], train_sizes=[4, 6], per="size")
    assert lattice == Lattice((0.5, 0.25), train_sizes=(4, 6), per="size") == copy.deepcopy(lattice)
    assert pickle.loads(pickle.dumps(lattice)) == lattice


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Lattice(per="width"), "per must be one of one, size, .*, steps or an axis, got 'width'"),  # type: ignore[arg-type]
        (lambda: Lattice(train_sizes=(4, 4)), "train_sizes needs per='size' or .*, got per='one' and offset=0.0"),
        (
            lambda: Lattice(0.5)(2, 2, spacing=torch.ones(1, 2)),
            r"such as tr.Lattice\(unit=16.0, .*, got Lattice\(spacing=0.5\) and spacing \(1, 2\)",
        ),
        (lambda: Lattice(unit=8.0)(2, 2), r"spacing must be voxel spacings \(batch, 2\), a tensor, got None"),
        (lambda: Lattice((1.0, 2.0, 3.0))(2, 2), r"spacing must be one number or one per axis \(2\), got 3"),
        (
            lambda: Lattice(per=("one", "size"))(2, 2, 2),
            r"per must be one value or one per axis \(3\), got \('one', 'size'\)",
        ),
        (lambda: Lattice(stretch=0.5), "stretch and rescale 1 or more, got 0.0, 0.5 and 1.0"),
        (lambda: Lattice(rescale=0.5), "stretch and rescale 1 or more, got 0.0, 1.0 and 0.5"),
        (lambda: Lattice(shift=-1.0), "shift must be 0 or more"),
        (lambda: Lattice(periods=4.0), "periods must be one per axis, None if not periodic, got 4.0"),
    ],
)
def test_wrong_settings_raise_one_line(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_whole_voxel_spacings_are_real_numbers() -> None:
    lattice = Lattice(unit=(1.5, 2.5), patch_size=(1, 0.5))
    whole, real = (lattice(2, 3, spacing=torch.tensor([[3, 3]], dtype=dtype)) for dtype in (torch.int64, torch.float32))
    assert torch.equal(whole, real)
    assert real[0, -1].tolist() == pytest.approx([2.0, 1.2])


def test_periods_are_of_indices() -> None:
    with pytest.raises(ValueError, match=r"an axis with a period, .*, needs per='one' or train_sizes, got per='size'"):
        Lattice(per="size", periods=(8.0,))
    start, end = Lattice(per="size", train_sizes=(8,), periods=(8.0,)).at(torch.tensor([[0.0], [8.0]]), (8,))
    torch.testing.assert_close(start, end)


def test_models_on_a_lattice_refuse_periods_and_what_is_no_lattice() -> None:
    for model, settings in ((tr.ViT, {"depth": 1, "num_heads": 2}), (tr.Swin, {"depths": (1,), "num_heads": (2,)})):
        with pytest.raises(ValueError, match=r"periods of a Lattice need tr\.Transformer"):
            model((8, 8), patch_size=2, dim=32, positions=Lattice(periods=(4, None)), **settings)
        model((8, 8), patch_size=2, dim=32, positions=Lattice(periods=(None, None)), **settings)
        with pytest.raises(ValueError, match=r"^positions must be a Lattice or None, got 'size'$"):
            model((8, 8), patch_size=2, dim=32, positions="size", **settings)


@pytest.mark.parametrize("per", [5, -3, ("size", 2)])
def test_axis_that_a_lattice_lacks_is_one_line(per: Any) -> None:
    with pytest.raises(ValueError, match="an axis in per must be from -2 to 1, got"):
        Lattice(per=per)(2, 2)
