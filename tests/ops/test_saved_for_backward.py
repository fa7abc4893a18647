"""What a rotation keeps for its backward pass: q and k where its own gradient needs them, else neither."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import torchrope as tr

KINDS: dict[str, Callable[[], tr.rotations.Rotation]] = {
    "angles": lambda: tr.rotations.from_angles(torch.rand(13, 8)),
    "halves": lambda: encoding("mixed")(tr.grid(13)).in_halves(),
    "tabulated": lambda: encoding("mixed")(tr.grid(13)).tabulated(),
    "frozen": lambda: tr.freeze(encoding("comrope-ld:4"), tr.grid(13))(tr.grid(13)),
    **{name: (lambda name=name: encoding(name)(tr.grid(13))) for name in ("axial", "mixed", "string:4", "liere:8")},
    **{name: (lambda name=name: encoding(name)(tr.grid(13))) for name in ("comrope-ld:4", "liere:3", "comrope-ap:4")},
}


def encoding(name: str, *, learned: bool = False) -> Any:
    rotary_dim = {"rotary_dim": 15} if name == "liere:3" else {}
    built = tr.encodings.parse_encoding(name).rotary(num_axes=1, num_heads=2, head_dim=16, **rotary_dim)
    return built.requires_grad_(learned)


def kept_by(rotate: Callable[[Tensor, Tensor], Any]) -> tuple[bool, bool]:
    """Whether q and k, results of an operation, are kept."""
    q, k = (torch.randn(2, 2, 13, 16, requires_grad=True) * 2 for _ in range(2))
    kept = set()

    def keep(x: Tensor) -> Tensor:
        kept.add(x.untyped_storage().data_ptr())
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        results = rotate(q, k)
    del results
    return q.untyped_storage().data_ptr() in kept, k.untyped_storage().data_ptr() in kept


@pytest.fixture(params=["highest", "high"])
def precision(request: pytest.FixtureRequest) -> Iterator[None]:
    torch.set_float32_matmul_precision(request.param)
    yield
    torch.set_float32_matmul_precision("highest")


@pytest.mark.usefixtures("precision")
@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("scores_only", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_fixed_rotations_keep_neither(kind: str, scores_only: bool, backend: str) -> None:
    with tr.backend(backend):
        rotation = KINDS[kind]()
        assert kept_by(lambda q, k: tr.rotate(q, k, rotation, scores_only=scores_only)) == (False, False)
        assert kept_by(lambda q, k: (tr.apply(q, rotation), tr.apply(k, rotation))) == (False, False)


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("name", ["mixed", "comrope-ld:4", "liere:8"])
def test_each_side_keeps_for_its_own_rotation(name: str, backend: str) -> None:
    fixed, learned = encoding(name), encoding(name, learned=True)
    with tr.backend(backend):
        rotations = fixed(tr.grid(13)), learned(tr.grid(13))
        assert kept_by(lambda q, k: tr.rotate(q, k, rotations[0], key_rotation=rotations[1])) == (False, True)
        assert kept_by(lambda q, k: tr.rotate(q, k, rotations[1], key_rotation=rotations[0])) == (True, False)
        assert kept_by(lambda q, k: tr.rotate(q, k, rotations[1])) == (True, True)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize(
    ("kind", "backend", "compiled"),
    [(kind, backend, False) for kind in KINDS for backend in ("auto", "reference")]
    + [(kind, "auto", True) for kind in ("mixed", "liere:8", "comrope-ld:4")],
)
def test_a_rotated_slice_is_assigned_in_place(kind: str, backend: str, compiled: bool) -> None:
    weight = torch.randn(16, 16, requires_grad=True)
    found = []
    with tr.backend(backend):
        rotation = KINDS[kind]()
        rotate = torch.compile(tr.rotate, backend="aot_eager") if compiled else tr.rotate
        for in_place in (True, False):
            torch.manual_seed(0)
            q, k = (torch.randn(2, 2, 14, 16) @ weight for _ in range(2))
            turned = rotate(q[:, :, 1:], k[:, :, 1:], rotation)
            if in_place:
                q[:, :, 1:], k[:, :, 1:] = turned
            else:
                q, k = (torch.cat([x[:, :, :1], y], dim=2) for x, y in zip((q, k), turned, strict=True))
            found.append(torch.autograd.grad((q @ k.mT).square().sum(), weight)[0])
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("kind", ["mixed", "comrope-ld:4", pytest.param("liere:8", marks=pytest.mark.slow)])
def test_second_derivatives_of_fixed_rotations(kind: str) -> None:
    q = torch.randn(1, 2, 13, 16, dtype=torch.float64, requires_grad=True)
    with tr.backend("reference"):
        rotation = KINDS[kind]().to(torch.float64)
        assert torch.autograd.gradgradcheck(lambda q: tr.apply(q, rotation).square(), q)
