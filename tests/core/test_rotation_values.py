"""Rotations as values: slices, other positions, copies, repr."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import torchrope as tr
from torchrope.encodings.names import takes
from torchrope.rotations import Block, GivenAngles, Planar, PlanarInBasis, Rotation, from_angles

HEADS, HEAD_DIM, TOKENS, BATCH = 4, 24, 7, 3
NAMES = ("axial", "mixed", "liere:4", "liere", "comrope-ap:4", "comrope-ld:8", "string:8", "golden", "none")


def make_rotation(name: str, positions: Tensor, **settings: object) -> Rotation:
    torch.manual_seed(0)
    encoding = tr.encodings.parse_encoding(name).rotary(num_axes=2, num_heads=HEADS, head_dim=HEAD_DIM, **settings)
    return encoding(positions)


@pytest.fixture(params=[(), (BATCH,)], ids=["shared", "of each sample"])
def positions(request: pytest.FixtureRequest) -> Tensor:
    return torch.randn(*request.param, TOKENS, 2, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_rotation_slices_equal_slices_of_the_result(name: str, shared: bool, positions: Tensor) -> None:
    shares = takes(tr.encodings.parse_encoding(name).rotary, "shared_heads")
    rotation = make_rotation(name, positions, **({"shared_heads": shared} if shares else {}))
    q, k = torch.randn(2, BATCH, HEADS, TOKENS, HEAD_DIM)
    whole = tr.rotate(q, k, rotation)
    tokens = torch.tensor([5, 0, 0])
    indices = [
        (..., slice(2, 5)),
        (..., slice(1, 3), slice(None)),
        (..., slice(None, None, 2), slice(None)),
        (..., tokens),
    ]
    indices += [(slice(1, 3), ..., slice(2, 6)), (slice(0, 1),)] if positions.ndim == 3 else []
    for index in indices:
        part = rotation[index]
        of_vectors = (*index, slice(None)) if any(part is ... for part in index) else index
        own = [each[of_vectors] for each in (q, k)]
        for rotated, expected in zip(tr.rotate(*own, part, layout="bhtd"), whole, strict=True):
            torch.testing.assert_close(rotated, expected[of_vectors], atol=2e-6, rtol=0)


OTHERS = torch.randn(5, 2, generator=torch.Generator().manual_seed(2))
KINDS = ("mixed", "liere:4", "comrope-ld:8", "string:8")
WAYS: dict[str, Callable[[Rotation], Rotation]] = {
    "from an encoding": lambda r: r,
    "tabulated": lambda r: r.tabulated(),
    "in halves": lambda r: r.in_halves() if isinstance(r, Planar) else r,
    "in halves, tabulated": lambda r: r.in_halves().tabulated() if isinstance(r, Planar) else r,
    "from fixed angles": lambda r: from_angles(r.angles().detach(), num_heads=HEADS) if isinstance(r, Planar) else r,
    "from learned angles": lambda r: from_angles(r.angles(), num_heads=HEADS) if isinstance(r, Planar) else r,
    "detached": lambda r: r.detach(),
    "sliced": lambda r: r[..., 1:],
    "for export": lambda r: r.for_export(),
    "inverted twice": lambda r: r.inverse().inverse(),
    "in float64": lambda r: r.to(torch.float64),
    "copied": lambda r: copy.deepcopy(r),
    "pickled": lambda r: pickle.loads(pickle.dumps(r.detach())),
    "moved back": lambda r: r if isinstance(r, Block) else r.at(OTHERS[:3]).at(r.positions),  # type: ignore[attr-defined]
}
METHODS: dict[str, Callable[[Any], Any]] = {
    "inverse": lambda r: (r.inverse(), r.matrix().mT),
    "tabulated": lambda r: (r.tabulated(), r.matrix()),
    "detach": lambda r: (r.detach(), r.matrix()),
    "to": lambda r: (r.to(torch.float64), r.matrix()),
    "index": lambda r: (r[..., 1:3, 2:5], r.matrix()[..., 1:3, 2:5, :, :]),
    "for_export": lambda r: (r.for_export(), r.matrix()),
    "inverse of a slice": lambda r: (r[..., :4].inverse().tabulated(), r.matrix()[..., :4, :, :].mT),
}


def dense(rotation: Rotation, like: Tensor) -> Tensor:
    """Its matrices, without the dimension that the exported form of blocks adds."""
    matrix = rotation.matrix()
    return matrix.squeeze(0) if matrix.ndim > like.ndim else matrix


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", KINDS)
def test_methods_are_right_however_a_rotation_was_built(name: str, way: str, positions: Tensor) -> None:
    original = make_rotation(name, positions)
    rotation = WAYS[way](original)
    order = torch.cat([torch.arange(0, HEAD_DIM, 2), torch.arange(1, HEAD_DIM, 2)]) if "halves" in way else None
    exact = original.matrix()[..., 1:, :, :] if way == "sliced" else original.matrix()
    if order is not None and isinstance(original, Planar):
        exact = exact[..., order, :][..., order]
    torch.testing.assert_close(dense(rotation, exact), exact, atol=2e-5, rtol=0, check_dtype=False)
    for method in METHODS.values():
        result, expected = method(rotation)
        assert result.shape[-1] == expected.shape[-3]
        torch.testing.assert_close(dense(result, expected), expected, atol=2e-5, rtol=0, check_dtype=False)
        x = torch.randn(BATCH, expected.shape[-4], expected.shape[-3], HEAD_DIM)
        rotated = (expected.float() @ x.unsqueeze(-1)).squeeze(-1)
        torch.testing.assert_close(tr.apply(x, result), rotated, atol=2e-5, rtol=0)
    if isinstance(rotation, Planar):
        found = torch.stack([rotation.angles().cos(), rotation.angles().sin()])
        torch.testing.assert_close(found, torch.stack(rotation.cos_sin()), atol=2e-5, rtol=0)
    if isinstance(rotation, Block | GivenAngles):
        with pytest.raises(ValueError, match=r"at\(\) must be called|has no frequencies"):
            rotation.at(OTHERS)
        return
    moved = make_rotation(name, OTHERS).matrix()
    moved = moved if order is None or not isinstance(original, Planar) else moved[..., order, :][..., order]
    atol = 1e-6 if way == "from an encoding" else 2e-5
    torch.testing.assert_close(rotation.at(OTHERS).matrix(), moved, atol=atol, rtol=0, check_dtype=False)
    with pytest.raises(ValueError, match="positions must be"):
        rotation.at(torch.zeros(5, 3))


def test_a_planar_rotation_takes_no_table() -> None:
    with pytest.raises(TypeError, match=r"got table$"):
        Planar(positions=torch.zeros(5, 1), frequencies=torch.zeros(1, 1, 2), table=torch.ones(1, 5, 2, 2))  # type: ignore[call-arg]


def test_rotation_of_keys_at_other_positions_shares_the_basis() -> None:
    encoding = tr.STRING(num_axes=2, num_heads=HEADS, head_dim=HEAD_DIM)
    rotation = encoding(torch.randn(TOKENS, 2))
    of_keys = rotation.at(torch.randn(5, 2))
    assert isinstance(rotation, PlanarInBasis)
    q, k = torch.randn(1, HEADS, TOKENS, HEAD_DIM), torch.randn(1, HEADS, 5, HEAD_DIM)
    full = tr.rotate(q, k, rotation, key_rotation=of_keys)
    inner = tr.rotate(q, k, rotation, key_rotation=of_keys, scores_only=True)
    torch.testing.assert_close(inner[0] @ inner[1].mT, full[0] @ full[1].mT, atol=1e-4, rtol=1e-5)
    assert not torch.allclose(inner[0], full[0])  # without the basis


@pytest.mark.parametrize("case", ["leading dimensions", "dtype of k", "dtype of the rotation", "positions"])
@pytest.mark.parametrize("name", ["comrope-ap:4", "comrope-ld:8", "string:8", "mixed", "liere:4"])
def test_scores_are_the_same_if_only_they_are_used_where_q_and_k_take_other_paths(name: str, case: str) -> None:
    positions, others = torch.randn(TOKENS, 2), torch.randn(BATCH, 5, 2)
    rotation, key_rotation = make_rotation(name, positions), make_rotation(name, others)
    several = (2,) if case in ("leading dimensions", "positions") else ()
    q, k = (torch.randn(*several, BATCH, HEADS, tokens, HEAD_DIM) for tokens in (TOKENS, 5))
    if case == "dtype of k":
        k = k.double()
    elif case == "dtype of the rotation":
        key_rotation = key_rotation.to(torch.float64)
    elif case == "positions" and not isinstance(rotation, Block):
        key_rotation = rotation.at(others)

    def scores(scores_only: bool) -> Tensor:
        rotated_q, rotated_k = tr.rotate(q, k, rotation, key_rotation=key_rotation, scores_only=scores_only)
        return rotated_q.double() @ rotated_k.double().mT

    torch.testing.assert_close(scores(True), scores(False), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_rotation_deepcopy_is_detached_and_independent(name: str, positions: Tensor) -> None:
    rotation = make_rotation(name, positions)
    before = rotation.matrix().detach().clone()
    copied = copy.deepcopy({"kept": rotation})["kept"]
    with torch.no_grad():
        for tensor in rotation._tensors():
            if tensor.numel() and 0 not in tensor.stride():
                tensor.zero_()
    torch.testing.assert_close(copied.matrix(), before)
    assert not copied.matrix().requires_grad


@pytest.mark.parametrize("name", NAMES)
def test_rotation_repr_is_one_line(name: str, positions: Tensor) -> None:
    shown = repr(make_rotation(name, positions))
    assert "\n" not in shown
    assert len(shown) < 160
    assert f"head_dim={HEAD_DIM}" in shown


@pytest.mark.parametrize(
    ("index", "words"),
    [
        (0, "slices"),
        ((slice(None), 1), "slices"),
        ((..., slice(None), slice(None), slice(None)), "at most 2 parts"),
        ((..., slice(None), ...), "one '...'"),
        ((..., slice(4, 4), slice(None)), "1 or more of 4"),
        ((..., torch.zeros(2, 2, dtype=torch.long)), "slices"),
    ],
)
def test_rotation_refuses_an_index_that_changes_dimensions(index: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make_rotation("mixed", torch.zeros(TOKENS, 2))[index]


def test_rotation_slices_have_gradients_to_their_generators() -> None:
    encoding = tr.MixedRoPE(num_axes=2, num_heads=HEADS, head_dim=HEAD_DIM)
    part = encoding(torch.randn(TOKENS, 2))[1:3]
    q, k = torch.randn(2, 1, 2, TOKENS, HEAD_DIM)
    tr.rotate(q, k, part)[0].square().mul(torch.arange(HEAD_DIM)).sum().backward()
    reached = encoding.frequencies.grad.flatten(2).abs().sum(dim=(0, 2)) > 0
    assert reached.tolist() == [False, True, True, False]


@pytest.mark.parametrize("name", NAMES)
def test_encodings_accept_lists_and_arrays(name: str) -> None:
    at = [[0.0, 1.5], [2.0, -3.0], [4, 5]]
    expected = make_rotation(name, torch.tensor(at)).matrix()
    for positions in (at, np.array(at, dtype=np.float32), tuple(map(tuple, at))):
        rotation = make_rotation(name, positions)  # type: ignore[arg-type]
        assert rotation.dtype == torch.float32
        assert torch.equal(rotation.matrix(), expected)
    rotation = make_rotation(name, np.array(at))  # type: ignore[arg-type]
    assert rotation.dtype == torch.float64 or name == "none"
    torch.testing.assert_close(rotation.matrix(), expected, atol=2e-5, rtol=0, check_dtype=False)


@pytest.mark.parametrize("positions", [[["a", "b"]], [[1.0, 2.0], [3.0]], None, [[None, 1.0]]])
def test_encodings_refuse_positions_that_are_not_numbers(positions: object) -> None:
    with pytest.raises(ValueError, match="positions must be numbers"):
        make_rotation("mixed", positions)  # type: ignore[arg-type]
