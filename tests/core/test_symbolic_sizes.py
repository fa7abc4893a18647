"""Sizes stay symbolic: one compiled graph, and one exported program, for inputs of any height and width."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from symbolic import OWN, SIZES, Own, check_export, graphs, ours
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

import torchrope as tr
from torchrope.lattice import Lattice

LIERE = tr.LieRE(num_axes=2, num_heads=1, head_dim=2)
DINOV3 = tr.encodings.baselines.dinov3(num_axes=2, head_dim=4)
POSITIONS: dict[str, Callable[[int, int], Tensor]] = {
    "grid": tr.grid,
    "units": lambda h, w: tr.grid(h, w, spacing=(1 / h, 1 / w), origin=0.5 / h),
    "units of LieRE": lambda h, w: tr.grid(h, w, **LIERE.lattice.spaced(h, w)),
    "units of DINOv3": lambda h, w: tr.grid(h, w, **DINOV3.lattice.spaced(h, w)),
    "prefix": lambda h, w: tr.prefix(tr.grid(h, w), h),
    "shift": lambda h, w: tr.positions.shift(tr.grid(h, w), (-h / 2, -w / 2)),
    "rescale": lambda h, w: tr.positions.rescale(tr.grid(h, w), 1 / h),
    "diagonal": lambda h, w: tr.positions.video_rope(2, h, w),
    "around text": tr.positions.circle_rope,
    "wrap": lambda h, w: tr.positions.wrap(tr.grid(h, w), (None, w)),
    "circles": lambda h, w: tr.positions.to_circle(tr.grid(h, w), (None, w)),
    "jitter": lambda h, w: tr.positions.jitter(tr.grid(h, w), (1 / h, 1 / w), intensity=0.0),
    "random shift": lambda h, w: tr.positions.random_shift(tr.grid(h, w).expand(h, -1, -1), 0.0),
    "random stretch": lambda h, w: tr.positions.random_scale(tr.grid(h, w).expand(h, -1, -1), 1.0, per_axis=True),
    "random rescale": lambda h, w: tr.positions.random_scale(tr.grid(h, w).expand(h, -1, -1), 1.0),
    "fixed range": tr.Lattice(0.5, 0.25, per="size", train_sizes=(4, 6)),
    "fixed range of width": tr.Lattice(0.5, 0.25, per=1, train_sizes=(4, 6)),
    "jittered": tr.Lattice(0.5, 0.25, cell=0.5),
    "voxels": lambda h, w: tr.Lattice(unit=16.0, patch_size=(2, 16))(h, w, spacing=torch.tensor([[5.0, 0.5]])),
    "packed": lambda h, w: packed(h, w).positions,
    "cu_seqlens": lambda h, w: packed(h, w).cu_seqlens,
    "samples": lambda h, w: packed(h, w).samples,
    "mask": lambda h, w: packed(h, w).mask(),
    "windows": lambda h, w: tr.positions.windows(tr.grid(2 * h, 2 * w), (2 * h, 2 * w), (2, 2), offset=1),
    "windows of any size": lambda h, w: tr.positions.windows(
        tr.grid(2 * h, 3 * w), (2 * h, 3 * w), (h, w), offset=(h - 1, w)
    ),
    "lattice": Lattice(),
    "lattice by size": Lattice(spacing=2.0, origin=-1.0, offset=0.5, per="size"),
    "lattice by longest": Lattice(spacing=2.0, origin=-1.0, offset=0.5, per="longest"),
    "lattice by shortest": Lattice(spacing=2.0, origin=-1.0, offset=0.5, per="shortest"),
    "lattice by steps": Lattice(spacing=2.0, origin=-1.0, per="steps"),
}


def packed(h: int, w: int) -> Any:
    return tr.pack([tr.grid(h, w), tr.grid(w, h), tr.grid(h, h)])


if torch.__version__ < "2.7":  # its exporter takes the maximum and the minimum of sizes for one of them
    for name in [name for name in POSITIONS if re.search("longest|shortest", name)]:
        del POSITIONS[name]

QUICK = [
    "grid",
    "units of DINOv3",
    "lattice by longest",
    "prefix",
    "rescale",
    "around text",
    "jitter",
    "fixed range",
    "mask",
]
QUICK = [name for name in QUICK if name in POSITIONS]
"""The functions that are tested by default."""


class Placed(nn.Module):
    """Some functions from sizes to positions."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.names = names

    def forward(self, x: Tensor) -> list[Tensor]:
        return [POSITIONS[name](*x.shape) for name in self.names]


@pytest.mark.parametrize("names", [QUICK, pytest.param([*POSITIONS], marks=pytest.mark.slow)], ids=["quick", "all"])
def test_positions_are_exported_with_any_size(names: list[str]) -> None:
    height, width = torch.export.Dim("height", min=2), torch.export.Dim("width", min=2)
    place, shapes = Placed(names), ({0: height, 1: width},)
    check_positions(torch.export.export(place, (torch.zeros(4, 6),), dynamic_shapes=shapes).module(), place)


@pytest.mark.slow
def test_positions_are_one_compiled_graph_for_all_sizes() -> None:
    counter, place = CompileCounter(), Placed([*POSITIONS])
    check_positions(torch.compile(place, fullgraph=True, dynamic=True, backend=counter), place)
    assert counter.frame_count == 1


def check_positions(program: nn.Module, place: Placed) -> None:
    for size in SIZES:
        x = torch.zeros(size)
        for name, found, expected in zip(place.names, program(x), place(x), strict=True):
            assert torch.allclose(found, expected, atol=1e-5), (name, size)


def test_sizes_of_numpy_work_and_others_raise() -> None:
    assert torch.equal(tr.grid(np.int64(2), 3), tr.grid(2, 3))
    assert torch.equal(Lattice(per="longest")(np.int64(2), 3), Lattice(per="longest")(2, 3))
    with pytest.raises(TypeError, match="float"):
        tr.grid(2.0, 3)
    with pytest.raises(ValueError, match=r"^grid needs one size per axis, each 0 or more, got \(2, -1\)$"):
        tr.grid(2, -1)
    with pytest.raises(ValueError, match=r"^grid needs one size per axis, each 0 or more, got \(\)$"):
        Lattice(per="longest")()


def test_default_layout_adds_no_guard() -> None:
    class Rotated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoding = encoding

        def forward(self, q: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
            return tr.rotate(q, q, self.encoding(positions))

    encoding = tr.MixedRoPE(num_axes=2, num_heads=3, head_dim=8)
    tokens = torch.export.Dim("tokens", min=2)
    inputs = torch.randn(1, 3, 5, 8), torch.randn(5, 2)
    program = torch.export.export(Rotated(), inputs, dynamic_shapes=({2: tokens}, {0: tokens})).module()
    for count in (2, 3, 9):  # 3 is the number of heads
        q, positions = torch.randn(1, 3, count, 8), torch.randn(count, 2)
        torch.testing.assert_close(program(q, positions), tr.rotate(q, q, encoding(positions)), atol=1e-5, rtol=1e-5)


def test_one_graph_for_images_of_any_size() -> None:
    assert graphs(Own("mixed"), 8, SIZES[:4]) == 1


@pytest.mark.slow
def test_one_program_for_images_of_any_size() -> None:
    check_export(ours("mixed"), 8)


@pytest.mark.slow
@pytest.mark.parametrize("name", OWN)
def test_own_model_is_one_graph_and_one_program_for_all_sizes(name: str) -> None:
    model = OWN[name]()
    check_export(model, 8)
    # A learned table is not resampled along axes of the training size, which the compiler distinguishes.
    assert graphs(model, 8) <= (4 if "learned" in name else 1)
