"""Planar rotations of equally spaced tokens: kernels compute cos and sin of few angles, and products of them."""

from dataclasses import replace

import pytest
import torch
from parity import assert_same_bits, build, judge, make_inputs, outcome, under
from torch import Tensor

import torchrope as tr
from torchrope.ops import native
from torchrope.rotations import Planar

pytestmark = pytest.mark.skipif(native.LIBRARY is None, reason="no kernels were built for this machine")

F32, BF16 = torch.float32, torch.bfloat16

POSITIONS = {
    "lattice after a prefix token": lambda: torch.cat([torch.zeros(1, 2), tr.grid(7, 9)]),
    "centred lattice, with the origin inside rows": lambda: tr.grid(5, 9) - torch.tensor([2.0, 4.0]),
    "normalised coordinates, rounded": lambda: tr.grid(6, 14) / torch.tensor([5.0, 13.0]),
    "descending rows": lambda: tr.grid(4, 20).flip(0),
    "rows of different spacing": lambda: torch.cat([tr.grid(3, 8) * scale for scale in (1.0, 0.25, 3.0)]),
    "one position many times": lambda: torch.full((40, 2), 1.5),
    "large coordinates": lambda: tr.grid(2, 30) + 1e6,
    "one line, irregular after the middle": lambda: torch.cat([tr.grid(1, 20), 10 * torch.rand(21, 2)]),
    "fewer tokens than a run": lambda: tr.grid(1, 3),
}


def planar(positions: Tensor, heads: int = 2, pairs: int = 12, halves: bool = False) -> Planar:
    """A rotation with random frequencies, without checks of the positions."""
    frequencies = torch.randn(positions.shape[-1], heads, pairs)
    return Planar(
        positions=positions, frequencies=frequencies, interleaved=not halves, head_dim=2 * pairs, num_heads=heads
    )


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("family", ["mixed", "halves"])
@pytest.mark.parametrize("where", POSITIONS)
def test_values_and_gradients_are_as_accurate_as_the_reference(where: str, family: str, dtype: torch.dtype) -> None:
    positions = POSITIONS[where]()
    encoding = build(family, 2, 2, blocks=5)
    judge(encoding, replace(make_inputs(encoding, len(positions), dtype), positions=positions))


@pytest.mark.parametrize("axes", [1, 3])
def test_lattices_with_any_number_of_axes_are_accurate(axes: int) -> None:
    positions = tr.grid(*(5,) * axes) if axes > 1 else tr.grid(50)
    encoding = build("mixed", 2, axes)
    judge(encoding, replace(make_inputs(encoding, len(positions)), positions=positions))


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("halves", [False, True])
def test_tokens_at_the_origin_are_unchanged(halves: bool, dtype: torch.dtype) -> None:
    positions = torch.arange(-10.0, 30.0)[:, None].expand(-1, 2).contiguous()
    q = torch.randn(1, 2, 40, 24).to(dtype)
    rotated, _ = tr.rotate(q, q, planar(positions, halves=halves))
    assert torch.equal(rotated[:, :, 10], q[:, :, 10])
    assert not torch.equal(rotated[:, :, 11], q[:, :, 11])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
@pytest.mark.parametrize("at", [0, 1, 7, 39])
def test_position_out_of_range_affects_its_token_alone(at: int, value: float) -> None:
    positions = tr.grid(2, 20)
    rotation = planar(positions)
    q = torch.randn(1, 2, 40, 24)
    expected, _ = tr.rotate(q, q, rotation)
    changed = positions.clone()
    changed[at] = value
    rotated, _ = tr.rotate(q, q, rotation._with(positions=changed))
    others = torch.arange(40) != at
    torch.testing.assert_close(rotated[:, :, others], expected[:, :, others], rtol=0, atol=1e-5)
    assert rotated[:, :, at].isnan().all() == (value != 1e30)


@pytest.mark.usefixtures("threads")
def test_large_lattices_give_the_same_bits_for_any_number_of_threads() -> None:
    encoding = build("mixed", 2, 2, heads=1)
    inputs = [
        replace(make_inputs(encoding, 900, batch=(batch,), heads=heads), positions=tr.grid(30, 30))
        for batch, heads in ((1, (1, 1)), (40, (2, 1)))
    ]
    found = []
    for count in (1, 2, 3, 5):
        torch.set_num_threads(count)
        found.append([outcome(encoding, each) for each in inputs])
    for others in found[1:]:
        for one, other in zip(found[0], others, strict=True):
            assert_same_bits(one, other)


@pytest.mark.parametrize("pairs", [4, 12, 16, 32])
@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize("dtypes", [(F32, F32), (BF16, BF16), (F32, BF16), (torch.float16, BF16)])
def test_repeated_calls_return_the_same_values(
    dtypes: tuple[torch.dtype, torch.dtype], halves: bool, pairs: int
) -> None:
    rotation = planar(torch.rand(37, 2) * 9, pairs=pairs, halves=halves)
    q, k = (torch.randn(1, 2, 37, 2 * pairs + 6).to(dtype) for dtype in dtypes)
    rotation = rotation._with(head_dim=2 * pairs + 6)
    with torch.no_grad():
        first = tr.rotate(q, k, rotation)
        for again in (rotation, rotation.tabulated()):
            for one, other in zip(first, tr.rotate(q, k, again), strict=True):
                torch.testing.assert_close(other, one, rtol=0, atol=torch.finfo(one.dtype).eps * 8)


@pytest.mark.parametrize("heads", [(3, 1), (5, 5), (4, 2)])
@pytest.mark.parametrize("dtypes", [(F32, F32), (BF16, BF16), (BF16, F32)])
def test_any_number_of_rows_per_angle_rotates_as_each_row_alone(
    dtypes: tuple[torch.dtype, torch.dtype], heads: tuple[int, int]
) -> None:
    rotation = planar(tr.grid(6, 6), heads=1)._with(num_heads=None)
    q, k = (torch.randn(3, of_side, 36, 24).to(dtype) for of_side, dtype in zip(heads, dtypes, strict=True))
    rotated = tr.rotate(q, k, rotation)
    for x, found in zip((q, k), rotated, strict=True):
        for sample in range(3):
            for head in range(x.shape[1]):
                row = x[sample : sample + 1, head : head + 1]
                assert torch.equal(found[sample, head], tr.rotate(row, row[:0], rotation)[0][0, 0])


def test_bfloat16_is_rounded_to_nearest() -> None:
    rotation = planar(torch.rand(500, 2) * 9)
    q = torch.randn(2, 2, 500, 24).to(BF16)
    rounded, _ = tr.rotate(q, q, rotation)
    exact, _ = tr.rotate(q.float(), q.float(), rotation)
    nearest = (exact.to(BF16).float() - exact).abs()
    # float32 results of both dtypes may differ by their own rounding
    assert ((rounded.float() - exact).abs() <= nearest + 4 * torch.finfo(F32).eps * exact.abs().max()).all()


def test_calls_with_alternating_layouts_and_dtypes_are_independent() -> None:
    rotation = planar(tr.grid(3, 4))
    given = [torch.randn(2, 2, 12, 24), torch.randn(2, 12, 2, 24).transpose(1, 2), torch.randn(1, 2, 12, 24).to(BF16)]
    given += [torch.randn(2, 2, 12, 48)[..., ::2], torch.randn(2, 2, 24, 12).mT]
    expected = [under("reference", tr.rotate, x, x, rotation)[0] for x in given]
    for _ in range(3):
        for x, right in zip(given, expected, strict=True):
            rotated, _ = tr.rotate(x, x, rotation)
            torch.testing.assert_close(rotated, right, rtol=1e-2 if x.dtype == BF16 else 1e-5, atol=1e-5)
