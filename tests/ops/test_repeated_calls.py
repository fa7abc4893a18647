"""A rotation that is used again without gradients repeats a call of a kernel: results are those of a new rotation."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import torchrope as tr
from torchrope.ops import native
from torchrope.rotations import from_angles

pytestmark = pytest.mark.skipif(native.LIBRARY is None, reason="no kernels were built for this machine")
ENCODINGS: dict[str, Any] = {
    "pairs": tr.MixedRoPE,
    "one basis": partial(tr.ComRoPELD, block_size=4),
    "blocks": partial(tr.LieRE, block_size=4),
    "pairs in a basis": tr.STRING,
}
FURTHER: dict[str, Any] = {
    "tables": lambda rotation: rotation.tabulated(),
    "halves": lambda rotation: rotation.in_halves(),
    "float64": lambda rotation: rotation.to(torch.float64),
    "angles": lambda rotation: from_angles(rotation.angles()),
    "users' own": lambda rotation: Doubled(**rotation._values()),
}
CHANGES: dict[str, Any] = {
    "strides of q": lambda q, k: (q.contiguous(), k),
    "strides of k": lambda q, k: (q, k.contiguous()),
    "k is q": lambda q, k: (q, q),
    "dtype of q": lambda q, k: (packed(dtype=torch.bfloat16)[0], k),
    "dtype of k": lambda q, k: (q, packed(dtype=torch.bfloat16)[1]),
    "batch of q": lambda q, k: (q[:1], k),
    "batch of k": lambda q, k: (q, k[:1]),
}


class Doubled(tr.rotations.Planar):
    def rotate_vectors(self, x: Any) -> Any:
        return [rotated.mul_(2) for rotated in super().rotate_vectors(x)]


@torch.no_grad()
def turned(name: str) -> Any:
    rotation = ENCODINGS.get(name, tr.MixedRoPE)(num_axes=2, num_heads=2, head_dim=16)(tr.grid(3, 3) / 3)
    return FURTHER.get(name, lambda rotation: rotation)(rotation)


def packed(layout: str = "bhtd", dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [x.transpose(1, 2) if layout == "bhtd" else x for x in torch.randn(2, 9, 3, 2, 16).to(dtype).unbind(2)[:2]]


def assert_as_new(rotation: tr.Rotation, q: Tensor, k: Tensor, **settings: Any) -> None:
    new = tr.rotate(q, k, copy.deepcopy(rotation), **settings)
    for found, expected in zip(tr.rotate(q, k, rotation, **settings), new, strict=True):
        assert torch.equal(found, expected)
        assert (found.dtype, found.stride()) == (expected.dtype, expected.stride())


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("layout", ["bhtd", "bthd"])
@pytest.mark.parametrize("name", [*ENCODINGS, *FURTHER])
def test_every_call_equals_the_first(name: str, layout: str, dtype: torch.dtype) -> None:
    rotation = turned(name)
    for _ in range(5):
        assert_as_new(rotation, *packed(layout, dtype), layout=layout)
    one_call = name not in ("pairs in a basis", "float64", "users' own") and dtype != torch.float64
    assert (rotation._repeated[1](*packed(layout, dtype)) is not None) == one_call


@torch.no_grad()
@pytest.mark.parametrize("name", ENCODINGS)
def test_calls_that_differ_in_anything_are_not_repeated(name: str) -> None:
    rotation = turned(name)
    for change in [each for other in (*CHANGES, "backend", "scores alone") for each in ("", other) for _ in range(4)]:
        q, k = CHANGES.get(change, lambda *both: both)(*packed())
        with tr.backend("reference" if change == "backend" else "auto"):
            assert_as_new(rotation, q, k, scores_only=change == "scores alone")
    with pytest.raises(ValueError, match="k and its rotation must be on one device, got meta and cpu"):
        tr.rotate(q, torch.empty_strided(k.shape, k.stride(), device="meta"), rotation, scores_only=True)


@torch.no_grad()
@pytest.mark.parametrize("way", ["in place", "data", "fewer heads"])
@pytest.mark.parametrize("name", ENCODINGS)
def test_tensors_that_change_after_all_are_read_again(name: str, way: str) -> None:
    rotation = turned(name)
    for _ in range(4):
        tr.rotate(*packed(), rotation)
    for tensor in [x for x in rotation._tensors() if 0 not in x.stride()]:  # the tangent is one zero
        if way == "in place":
            tensor.mul_(0.5)
        else:
            tensor.data = tensor[:, :1].clone() if way == "fewer heads" else tensor * 0.5
    if way == "fewer heads":
        with pytest.raises(ValueError, match=r" needs floating-point tensors on one device whose shapes fit "):
            tr.rotate(*packed(), rotation)
    else:
        assert_as_new(rotation, *packed())
