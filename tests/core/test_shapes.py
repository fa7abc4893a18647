"""What users' methods and calls give in other shapes than promised is refused in one line, before a kernel runs."""

import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import torchrope as tr
from torchrope.encodings import Encoding, planar, skew
from torchrope.encodings.base import upper_triangle
from torchrope.encodings.skew_matrices import cayley
from torchrope.ops import native

OPS = torch.ops.torchrope
needs_kernels = pytest.mark.skipif(native.LIBRARY is None, reason="no kernels were built for this machine")


class Returning(Encoding):
    """An encoding of 2 axes and 4 heads of 64 channels whose methods return given values."""

    def __init__(self, block_size: int, frequencies: Any = None, factored: Any = None, generators: Any = None) -> None:
        super().__init__(num_axes=2, num_heads=4, head_dim=64, block_size=block_size)
        self.returned = frequencies, factored, generators
        self.anchor = torch.nn.Parameter(torch.zeros(()))

    def generators(self) -> Tensor:
        generators, b = self.returned[2], self.block_size
        return self.anchor.new_zeros(2, 4, 64 // b, b, b) if generators is None else generators

    def frequencies_per_axis(self) -> Tensor:
        return self.returned[0] if self.returned[0] is not None else super().frequencies_per_axis()

    def factors_and_base(self) -> Any:
        return self.returned[1]


class Spread(Returning):
    """A base `(heads, 1, b, b)` that its author expects to be broadcast over blocks."""

    def __init__(self) -> None:
        super().__init__(8, factored=(torch.ones(2, 4, 8), torch.zeros(4, 1, 8, 8)))


def ones(*shape: int, **settings: Any) -> Tensor:
    return torch.ones(shape, **settings)


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the CPU kernels that ran."""
    names: list[str] = []
    find = native._kernel
    monkeypatch.setattr(native, "_kernel", lambda name: names.append(name) or find(name))
    return names


FREQUENCIES, GENERATORS = "frequencies_per_axis() must be", "generators() must be (2, 4 or 1, 8, 8, 8)"
FACTORS, BASE = "factors of factors_and_base() must be", "base of factors_and_base() must be"
BLOCKS = torch.zeros(4, 8, 8, 8)
WRONG: list[tuple[dict[str, Any], str]] = [
    (dict(frequencies=ones(2, 4, 64)), f"{FREQUENCIES} (2, 4 or 1, 32), got (2, 4, 64)"),
    (dict(frequencies=ones(1, 4, 32)), f"{FREQUENCIES} (2, 4 or 1, 32), got (1, 4, 32)"),
    (dict(frequencies=ones(2, 4, 16)), f"{FREQUENCIES} (2, 4 or 1, 32), got (2, 4, 16)"),
    (dict(frequencies=ones(2, 2, 32)), f"{FREQUENCIES} (2, 4 or 1, 32), got (2, 2, 32)"),
    (dict(frequencies=ones(2, 32)), f"{FREQUENCIES} (2, 4 or 1, 32), got (2, 32)"),
    (dict(frequencies=ones(2, 4, 32).long()), f"{FREQUENCIES} floating point (2, 4 or 1, 32), got int64 (2, 4, 32)"),
    (dict(frequencies=[1.0]), f"{FREQUENCIES} floating point (2, 4 or 1, 32), got list"),
    (
        dict(frequencies=ones(2, 4, 32, device="meta")),
        "positions are on cpu, the encoding on meta: tr.grid(..., device=x.device)",
    ),
    (dict(factored=(ones(2, 4, 8), BLOCKS[:, :1])), f"{BASE} (4 or 1, 8, 8, 8), got (4, 1, 8, 8)"),
    (dict(factored=(ones(1, 4, 8), BLOCKS)), f"{FACTORS} (2, 4 or 1, 8), got (1, 4, 8)"),
    (dict(factored=(ones(2, 4, 8).double(), BLOCKS[:2])), f"{BASE} (4 or 1, 8, 8, 8), got (2, 8, 8, 8)"),
    (dict(factored=ones(2, 4, 8)), "factors_and_base() must be (factors, base) or None, got (2, 4, 8)"),
    (dict(generators=torch.zeros(2, 4, 1, 8, 8)), f"{GENERATORS}, got (2, 4, 1, 8, 8)"),
    (dict(generators=torch.zeros(2, 2, 8, 8, 8)), f"{GENERATORS}, got (2, 2, 8, 8, 8)"),
    (dict(generators=torch.zeros(1, 4, 8, 8, 8)), f"{GENERATORS}, got (1, 4, 8, 8, 8)"),
]


@pytest.mark.parametrize(("returned", "message"), WRONG)
def test_methods_that_return_another_shape_are_refused(
    returned: dict[str, Any], message: str, called: list[str]
) -> None:
    encoding = Returning(2 if "frequencies" in returned else 8, **returned)
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        encoding(tr.grid(3, 3))
    assert not called


@pytest.mark.parametrize("heads", [(1, 4), (4, 1), (1, 1), (4, 4)])
def test_factors_and_base_may_share_heads_separately(heads: tuple[int, int]) -> None:
    upper, factors = torch.randn(heads[1], 8, 28), torch.randn(2, heads[0], 8)
    both = Returning(8, factored=(factors, skew(upper, 8)))
    dense = Returning(8, generators=(factors[..., None, None] * skew(upper, 8)).expand(2, 4, 8, 8, 8))
    q = torch.randn(2, 4, 9, 64)
    for one, other in zip(*(tr.rotate(q, q, e(tr.grid(3, 3) / 3)) for e in (both, dense)), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=0)


STRIDES: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
    "apart": lambda x: torch.stack([x, x], dim=-1)[..., 0],
    "offset": lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape),
    "expanded": lambda x: x.select(-3, 0).unsqueeze(-3).expand_as(x),
}


@pytest.mark.filterwarnings("ignore:angles need frequencies in float32:UserWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("strides", STRIDES)
@pytest.mark.parametrize("kind", ["frequencies", "factored", "generators"])
def test_methods_may_return_tensors_of_any_strides_and_dtypes(kind: str, strides: str, dtype: torch.dtype) -> None:
    shapes = {"frequencies": [(2, 4, 32)], "factored": [(2, 4, 8), (4, 8, 28)], "generators": [(2, 4, 8, 28)]}[kind]
    leaves = [STRIDES[strides](torch.randn(shape).to(dtype)).detach().requires_grad_() for shape in shapes]
    upstream, q, found = torch.randn(2, 4, 9, 64), torch.randn(2, 4, 9, 64), []
    for wide in (False, True):
        values = [leaf.double().contiguous() if wide else leaf for leaf in leaves]
        values = values[:1] if kind == "frequencies" else [*values[:-1], skew(values[-1], 8)]
        given: dict[str, Any] = {kind: values[0]}
        if kind == "factored":
            given = dict(factored=tuple(values), generators=values[0][..., None, None] * values[1])
        rotated, _ = tr.rotate(q, q, Returning(2 if kind == "frequencies" else 8, **given)(tr.grid(3, 3) / 3))
        found.append([rotated, *torch.autograd.grad(rotated, leaves, upstream)])
    for one, other in zip(*found, strict=True):
        largest = other.abs().max().item()
        torch.testing.assert_close(one, other, atol=largest * (0.02 if one.dtype == torch.bfloat16 else 1e-4), rtol=0)


def test_check_names_a_base_that_should_broadcast(called: list[str]) -> None:
    with pytest.raises(AssertionError) as caught:
        tr.testing.check(Spread)
    failed = [line for line in str(caught.value).splitlines() if line.startswith("failed")]
    assert failed[0].startswith(
        "failed      generators have the promised shape: base of factors_and_base() must be (4 or"
    )
    assert "torchrope_skew_eig" not in called
    assert "torchrope_basis" not in called


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: skew(ones(1, 3), 32), "upper must be floating point (..., 496) for block_size = 32, got (1, 3)"),
        (lambda: skew(ones(1, 700), 32), "upper must be floating point (..., 496) for block_size = 32, got (1, 700)"),
        (
            lambda: skew(ones(3, dtype=torch.int64), 3),
            "upper must be floating point (..., 3) for block_size = 3, got int64 (3,)",
        ),
        (lambda: skew(torch.ones(()), 2), "upper must be floating point (..., 1) for block_size = 2, got ()"),
        (lambda: skew(ones(1), 0), "block_size must be 1 or more, got 0"),
        (lambda: upper_triangle(ones(2, 3, 4)), "blocks must be floating point (..., b, b), got (2, 3, 4)"),
        (lambda: planar(ones(3, dtype=torch.int64)), "frequencies must be floating point, got torch.int64"),
        (lambda: cayley(ones(2, 3)), "S of the Cayley transform must be floating point (..., b, b), got (2, 3)"),
        (lambda: tr.ops.skew_exp(ones(2, 3)), "generator must be floating point (..., b, b), got (2, 3)"),
        (lambda: tr.ops.skew_exp(ones(2, 0, 0)), "generator must be floating point (..., b, b), got (2, 0, 0)"),
        (lambda: tr.ops.skew_exp(ones(3, 3).long()), "generator must be floating point (..., b, b), got int64 (3, 3)"),
    ],
)
def test_building_blocks_refuse_wrong_shapes(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        call()


def test_skew_of_single_rows_and_of_empty_batches() -> None:
    assert torch.equal(skew(torch.empty(2, 0), 1), torch.zeros(2, 1, 1))
    assert skew(torch.empty(0, 3), 3).shape == (0, 3, 3)
    assert planar(torch.tensor(2.0)).tolist() == [[0.0, -2.0], [2.0, 0.0]]


Q, P = torch.randn(2, 2, 5, 8), torch.randn(1, 5, 2)
F, TABLE = torch.randn(2, 2, 4), torch.eye(4).expand(1, 2, 5, 2, 4, 4)
BASIS = (P, ones(2, 2, 2), torch.zeros(2, 2, 4, 4), torch.eye(4).expand(2, 2, 4, 4), ones(2, 2, 2))
GENERATED = torch.zeros(2, 2, 2, 4, 4)
REFUSED: dict[str, Callable[[], Any]] = {
    "0 pairs": lambda: OPS.rotate_planar(Q, Q, P, F[..., :0], None, False),
    "0 heads": lambda: OPS.rotate_planar(Q, Q, P, F[:, :0], None, False),
    "0 axes": lambda: OPS.rotate_planar(Q, Q, P[..., :0], F[:0], None, False),
    "too many pairs": lambda: OPS.rotate_planar(Q, Q, P, torch.randn(2, 2, 5), None, False),
    "axes": lambda: OPS.rotate_planar(Q, Q, P, F[:1], None, False),
    "tokens": lambda: OPS.rotate_planar(Q, Q, P[:, :4], F, None, False),
    "tokens of k": lambda: OPS.rotate_planar(Q, Q[:, :, :4], P, F, None, False),
    "heads": lambda: OPS.rotate_planar(Q, Q, P, torch.randn(2, 3, 4), None, False),
    "sets": lambda: OPS.rotate_planar(ones(4, 2, 5, 8), Q, ones(2, 5, 2), F, None, False),
    "dimensions": lambda: OPS.rotate_planar(Q[0], Q, P, F, None, False),
    "dtype": lambda: OPS.rotate_planar(Q.double(), Q.double(), P, F, None, False),
    "device": lambda: OPS.rotate_planar(Q, Q, P.to("meta"), F, None, False),
    "table": lambda: OPS.rotate_planar(Q, Q, P, F, torch.randn(1, 2, 5, 3, 2), False),
    "gradient": lambda: OPS.rotate_planar_backward(Q[:1], Q, Q, Q, P, F, None, False, [True, True]),
    "factors": lambda: OPS.rotate_basis(Q, Q, P, ones(2, 1, 2), *BASIS[2:], True),
    "angular": lambda: OPS.rotate_basis(Q, Q, *BASIS[:4], ones(2, 2, 1), True),
    "basis": lambda: OPS.rotate_basis_backward(Q, Q, Q, Q, P, BASIS[1], ones(2, 1, 4, 4), BASIS[4], True, [True] * 3),
    "odd blocks": lambda: OPS.skew_eig(torch.zeros(1, 3, 3)),
    "no blocks dimension": lambda: OPS.skew_eig(torch.zeros(4, 4)),
    "double blocks": lambda: OPS.skew_eig(torch.zeros(1, 4, 4, dtype=torch.float64)),
    "table's blocks": lambda: OPS.rotate_block(Q, Q, ones(1, 2, 5, 3, 4, 4), ones(0)),
    "table's rows": lambda: OPS.rotate_block(Q, Q, ones(1, 2, 5, 2, 4, 3), ones(0)),
    "table's dtype": lambda: OPS.rotate_block(Q, Q, TABLE.double(), ones(0)),
    "tangent": lambda: OPS.rotate_block(Q, Q, TABLE, ones(1, 2, 5, 2, 5)),
    "gradient of blocks": lambda: OPS.rotate_block_backward(Q, Q[..., :4], Q, Q, TABLE, True),
    "generators": lambda: OPS.exp_generators(P, torch.zeros(1, 2, 2, 4, 4)),
    "generators' rows": lambda: OPS.exp_generators(P, torch.zeros(2, 2, 2, 4, 3)),
    "large generators": lambda: OPS.exp_generators(P, torch.zeros(2, 1, 1, 129, 129)),
    "gradient of generators": lambda: OPS.exp_generators_backward(
        P, torch.zeros(2, 2, 2, 4, 4), ones(1, 2, 5, 2, 5), True
    ),
    "exponents": lambda: OPS.skew_exp(torch.zeros(1, 4, 3)),
    "double exponents": lambda: OPS.skew_exp(torch.zeros(1, 4, 4, dtype=torch.float64)),
    "gradient of exponents": lambda: OPS.skew_exp_backward(torch.zeros(2, 4, 4), ones(1, 6)),
}


@needs_kernels
@pytest.mark.parametrize("name", REFUSED)
def test_operators_refuse_arguments_that_do_not_fit(name: str, called: list[str]) -> None:
    with pytest.raises(ValueError, match=r"^\w+ needs .*, got ") as caught:
        REFUSED[name]()
    assert "\n" not in str(caught.value)
    assert not called


def commuting(**changed: Tensor) -> tr.rotations.Commuting:
    fields = dict(zip(("positions", "factors", "base", "basis", "angular"), (P[0], *BASIS[1:]), strict=True))
    return tr.rotations.Commuting(**{**fields, **changed}, head_dim=8)


@pytest.mark.parametrize(
    "rotation",
    [
        tr.rotations.Planar(positions=P[0], frequencies=F[:1], head_dim=8),
        tr.rotations.Planar(positions=P[0], frequencies=F, _table=torch.ones(2, 5, 3, 2), head_dim=8),
        tr.rotations.Planar(positions=P[0], frequencies=torch.randn(2, 2, 6), head_dim=8),
        tr.rotations.Commuting(
            positions=P[0], factors=ones(1, 2, 2), base=BASIS[2], basis=BASIS[3], angular=BASIS[4], head_dim=8
        ),
        tr.rotations.Commuting(
            positions=P[0], factors=ones(2, 2, 2), base=BASIS[2], basis=BASIS[3], angular=ones(2, 2, 1), head_dim=8
        ),
        tr.rotations.Block(table=torch.ones(2, 5, 3, 4, 4), head_dim=8),
        tr.rotations.Block(table=torch.ones(2, 5, 2, 4, 3), head_dim=8),
    ],
    ids=["axes", "table", "pairs", "factors", "angular", "blocks", "rows"],
)
@needs_kernels
def test_rotations_of_inconsistent_tensors_are_refused(rotation: Any, called: list[str]) -> None:
    with pytest.raises(ValueError, match=r"^rotate_\w+ needs .*, got "):
        tr.rotate(Q, Q, rotation, layout="bhtd")
    assert not called


@needs_kernels
def test_backward_of_empty_queries_and_some_keys_is_the_same_each_time() -> None:
    """The cached call must not take absent gradients of q for a forward pass."""
    rotation = tr.MixedRoPE(num_axes=2, num_heads=2, head_dim=8)(P[0] / 2).detach()
    upstream = torch.randn(3, 2, 5, 8)
    gradients = []
    for _ in range(3):
        q, k = torch.randn(0, 2, 5, 8), torch.randn(3, 2, 5, 8, requires_grad=True)
        rotated = tr.rotate(q, k, rotation, layout="bhtd")[1]
        gradients += torch.autograd.grad(rotated, k, upstream)
    expected = tr.rotate(upstream, upstream, rotation.inverse(), layout="bhtd")[1]
    for gradient in gradients:
        torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize("make", [tr.MixedRoPE, tr.ComRoPELD, tr.LieRE])
def test_checks_do_not_recompile_for_other_sizes(make: Callable[..., Encoding]) -> None:
    encoding, graphs = make(num_axes=2, num_heads=2, head_dim=16), []

    def rotated(q: Tensor, positions: Tensor) -> Tensor:
        return tr.rotate(q, q, encoding(positions), layout="bhtd")[0]

    def count(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(rotated, fullgraph=True, dynamic=True, backend=count)
    with torch.no_grad():
        for batch, tokens in ((3, 7), (4, 11), (5, 6)):
            q, positions = torch.randn(batch, 2, tokens, 16), torch.randn(tokens, 2)
            torch.testing.assert_close(compiled(q, positions), rotated(q, positions))
    assert len(graphs) == 1


PRIVATE = (
    "_C._functorch.is_functorch_wrapped_tensor",
    "_C._functorch.get_interpreter_stack",
    "_C._AutoDispatchBelowAutograd",
)
WITHOUT_PRIVATE_FUNCTION = """
import sys
import torch
from functools import reduce
*parents, name = sys.argv[1].split(".")
owner = reduce(getattr, parents, torch)
value = getattr(owner, name)
delattr(owner, name)
import torchrope as tr
setattr(owner, name, value)  # PyTorch itself needs it
q, encoding = torch.randn(1, 2, 9, 16), tr.MixedRoPE(num_axes=2, num_heads=2, head_dim=16)
exact = tr.rotate(q.double(), q.double(), encoding.double()(tr.grid(3, 3).double()))[0]
exact.sum().backward()
expected, encoding.frequencies.grad = encoding.frequencies.grad.float(), None
rotated = tr.rotate(q, q, encoding.float()(tr.grid(3, 3)))[0]
rotated.sum().backward()
torch.testing.assert_close(rotated, exact.float())
torch.testing.assert_close(encoding.frequencies.grad, expected, rtol=1e-4, atol=1e-4)
"""


@pytest.mark.slow
@pytest.mark.parametrize("path", PRIVATE)
def test_a_torch_without_a_private_function_still_rotates(path: str) -> None:
    command = [sys.executable, "-c", WITHOUT_PRIVATE_FUNCTION, path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr.splitlines()[-1]


@pytest.mark.parametrize("b", [2, 3, 8, 16, 32])
def test_exponents_that_overflow_are_nan_in_their_token_alone(b: int) -> None:
    encoding = tr.LieRE(num_axes=1, num_heads=1, head_dim=32 if b != 3 else 30, block_size=b)
    positions = torch.tensor([[1.0], [3e38], [2.0]])
    with torch.no_grad():
        encoding.upper.mul_(100)
        fast = encoding(positions).matrix()
        with tr.backend("reference"):
            slow = encoding(positions).matrix()
    assert torch.equal(fast.isnan().flatten(2).any(dim=-1)[0], slow.isnan().flatten(2).any(dim=-1)[0])
    assert not fast[0, [0, 2]].isnan().any()
    assert fast[0, 1].isnan().any() or b == 2
