"""Positions that float32 cannot hold, such as Unix times, keep their differences wherever positions are given."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import torchrope as tr
from torchrope.integrations.rope2d import RoPE2D
from torchrope.integrations.rotary import Rotary

TIMES = [1_700_000_000 + seconds for seconds in (0, 1, 60, 3600, 86400)]
NEAR = torch.tensor(TIMES, dtype=torch.float64)[:, None] - TIMES[0]
GIVEN: dict[str, Any] = {
    "int64": torch.tensor(TIMES)[:, None],
    "int32": torch.tensor(TIMES, dtype=torch.int32)[:, None],
    "list of int": [[time] for time in TIMES],
    "list of float": [[float(time)] for time in TIMES],
    "array of int64": np.array(TIMES)[:, None],
    "array of float64": np.array(TIMES, dtype=np.float64)[:, None],
}
NAMES = ["axial", "mixed", "string:4", "comrope-ld:4", "liere:4", "periodic"]


def build(name: str) -> tr.Encoding:
    head: dict[str, Any] = dict(num_axes=1, num_heads=2, head_dim=8)
    encoding = tr.AxialRoPE(**head) if name == "periodic" else tr.encodings.parse_encoding(name).rotary(**head)
    with torch.no_grad():
        for parameter in encoding.parameters():
            parameter.mul_(0.1)
    return tr.encodings.Periodic(encoding, (86400.0,)) if name == "periodic" else encoding


def scores(rotation: tr.rotations.Rotation) -> Tensor:
    """Scores of the first token with all, which depend on differences of positions alone."""
    q = torch.randn(1, 2, rotation.shape[-1], 8, generator=torch.Generator().manual_seed(0))
    rotated = tr.apply(q, rotation)
    return (rotated @ rotated[:, :, :1].mT)[0, :, :, 0]


def expected(name: str) -> Tensor:
    return scores(build(name).double()(NEAR))


@pytest.fixture(params=[torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def default_dtype(request: pytest.FixtureRequest) -> Any:
    torch.set_default_dtype(request.param)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("given", GIVEN)
def test_scores_of_unix_times_depend_on_differences(name: str, given: str) -> None:
    torch.manual_seed(1)
    encoding = build(name)
    torch.manual_seed(1)
    torch.testing.assert_close(scores(encoding(GIVEN[given])), expected(name), rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64, torch.float16, torch.float64])
def test_small_positions_of_every_dtype(dtype: torch.dtype) -> None:
    encoding = tr.MixedRoPE(num_axes=1, num_heads=2, head_dim=8)
    places = torch.arange(100)[:, None]
    rotation = encoding(places.to(dtype))
    assert rotation.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(scores(rotation), scores(encoding(places.float())))


@pytest.mark.usefixtures("default_dtype")
@pytest.mark.parametrize("given", [[[4001], [16_777_215]], [[4001.0], [0.1]], np.array([[4001], [7]], np.float32)])
def test_lists_and_arrays_under_any_default_dtype(given: Any) -> None:
    positions = build("axial").check_positions(given)
    wide = torch.get_default_dtype() == torch.float64 and isinstance(given, list) and given[1] == [0.1]
    assert positions.dtype == (torch.float64 if wide else torch.float32)
    assert torch.equal(
        positions.double(), torch.tensor(np.asarray(given), dtype=torch.float64).to(positions.dtype).double()
    )


@pytest.mark.usefixtures("default_dtype")
def test_indices_of_a_lattice_under_any_default_dtype() -> None:
    indices = torch.tensor([[4001], [4002]])
    assert tr.Lattice(spacing=0.5)(2).dtype == torch.float32
    assert tr.Lattice(spacing=0.5).at(indices).tolist() == [[2000.5], [2001.0]]


def frozen(times: Tensor) -> Tensor:
    encoding = tr.AxialRoPE(num_axes=1, num_heads=2, head_dim=8)
    return tr.freeze(encoding, times)(times).cos_sin()[0]


def of_transformer(times: Tensor) -> Tensor:
    torch.manual_seed(0)
    model = tr.Transformer(3, num_axes=1, num_outputs=2, dim=16, depth=1, num_heads=2, encoding="axial").eval()
    return model(torch.ones(1, len(times), 3).cumsum(1), times)


def of_croco(times: Tensor) -> Tensor:
    q = torch.ones(1, 2, len(times), 8, dtype=times.dtype if times.is_floating_point() else torch.float32)
    return RoPE2D()(q, times.expand(-1, 2)[None])


PLACES: dict[str, Callable[[Tensor], Tensor]] = {
    "grid": lambda times: tr.grid(5, origin=float(times[0]), dtype=torch.float64) - TIMES[0],
    "shift by a number": lambda times: tr.positions.shift(tr.grid(5), float(times[0])) - TIMES[0],
    "shift by a tensor": lambda times: tr.positions.shift(tr.grid(5), times[:1]) - TIMES[0],
    "rescale": lambda times: tr.positions.rescale(times, 0.5) - TIMES[0] / 2,
    "wrap": lambda times: tr.positions.wrap(times, (86400.0,)),
    "to_circle": lambda times: tr.positions.to_circle(times, (86400.0,)),
    "prefix": lambda times: tr.prefix(times, 1)[1:] - TIMES[0],
    "pack": lambda times: tr.pack([times, torch.zeros(1, 1)]).positions[:5] - TIMES[0],
    "Lattice.at": lambda times: tr.Lattice(spacing=0.5).at(times) - TIMES[0] / 2,
    "SinusoidalAPE.at": lambda times: tr.SinusoidalAPE(sizes=(4,), dim=8).at(times),
    "freeze": frozen,
    "Transformer": of_transformer,
    "RoPE2D": of_croco,
}
"""Functions of positions, whose results of int64 equal those of float64."""


@pytest.mark.parametrize("name", PLACES)
def test_functions_of_positions_hold_unix_times(name: str) -> None:
    times = torch.tensor(TIMES)[:, None]
    exact, found = PLACES[name](times.double()), PLACES[name](times)
    torch.testing.assert_close(found.double(), exact.double(), rtol=1e-6, atol=1e-5)


def test_position_ids_of_swapped_models_hold_unix_times() -> None:
    settings: dict[str, Any] = dict(keep_position_tables=True, keep_rotation=False)
    rotary = Rotary([build("axial")], lattices=[tr.Lattice()], channels=[None], **settings)
    assert torch.equal(rotary.positions(GIVEN["int64"])[0] - TIMES[0], NEAR)


def test_another_rotation_at_unix_times() -> None:
    encoding = tr.AxialRoPE(num_axes=1, num_heads=2, head_dim=8)
    moved = encoding(tr.grid(5)).at(GIVEN["int64"])
    torch.testing.assert_close(scores(moved), expected("axial"), rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("given", ["int64", "list of int"])
def test_rerotate_by_unix_times(given: str) -> None:
    encoding = tr.AxialRoPE(num_axes=1, num_heads=2, head_dim=8)
    keys = torch.randn(1, 2, 5, 8)
    back = tr.rerotate(tr.apply(keys, encoding(GIVEN[given])), encoding, (-NEAR - TIMES[0]))
    torch.testing.assert_close(back, keys, rtol=1e-4, atol=1e-4)


def test_compiled_unix_times() -> None:
    encoding = build("mixed")
    q = torch.randn(1, 2, 5, 8)
    compiled = torch.compile(lambda places: tr.apply(q, encoding(places)), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(GIVEN["int64"]), tr.apply(q, encoding(GIVEN["int64"])), rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: tr.grid(3, origin=1.7e9), r"within 2\^24 spacings: give dtype=torch.float64.* got 1700000000.0"),
        (lambda: tr.Lattice(origin=1.7e9)(3), r"within 2\^24 spacings"),
        (lambda: build("axial")(torch.tensor([[2**60]])), r"must be below 2\^53.* got up to 1.15e\+18"),
    ],
)
def test_what_no_dtype_holds_is_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_gradients_at_unix_times_equal_those_in_float64() -> None:
    found = []
    for wide in (False, True):
        encoding = build("mixed").double() if wide else build("mixed")
        torch.manual_seed(0)
        q = torch.randn(1, 2, 5, 8, dtype=torch.float64)
        rotated = tr.apply(q if wide else q.float(), encoding(GIVEN["int64"]))
        (rotated * torch.ones_like(rotated).cumsum(-1)).sum().backward()
        found.append(encoding.frequencies.grad.double())
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-3 * TIMES[0])
