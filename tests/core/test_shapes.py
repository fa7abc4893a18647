"""What users' methods and calls give in other shapes than promised is refused in one line, before a kernel runs."""

import random
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import torchrope as tr
from torchrope.encodings import Encoding, planar, skew
from torchrope.encodings.base import upper_triangle
from torchrope.encodings.skew_matrices import cayley
from torchrope.ops import library, native

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
REFUSED: dict[str, Callable[[], Any]] = {  # what a change of one argument in test_operator_arguments.py leaves out
    "table": lambda: OPS.rotate_planar(Q, Q, P, F, torch.randn(1, 2, 5, 3, 2), False),
    "0 axes": lambda: OPS.rotate_planar(Q, Q, P[..., :0], F[:0], None, False),
    "sets": lambda: OPS.rotate_planar(ones(4, 2, 5, 8), Q, ones(2, 5, 2), F, None, False),
    "dtype": lambda: OPS.rotate_planar(Q.double(), Q.double(), P, F, None, False),
    "no blocks dimension": lambda: OPS.skew_eig(torch.zeros(4, 4)),
    "large generators": lambda: OPS.exp_generators(P, torch.zeros(2, 1, 1, 129, 129)),
    "double exponents": lambda: OPS.skew_exp(torch.zeros(1, 4, 4, dtype=torch.float64)),
}


@needs_kernels
@pytest.mark.parametrize("name", REFUSED)
def test_operators_refuse_arguments_that_do_not_fit(name: str, called: list[str]) -> None:
    with pytest.raises(ValueError, match=r"^\w+ needs .*, got ") as caught:
        REFUSED[name]()
    assert "\n" not in str(caught.value)
    assert not called


def in_basis(**changed: Tensor) -> tr.rotations.PlanarInBasis:
    fields = dict(positions=P[0], frequencies=F, basis=torch.eye(8).expand(2, 1, 8, 8))
    return tr.rotations.PlanarInBasis(**{**fields, **changed}, head_dim=8)


def commuting(**changed: Tensor) -> tr.rotations.Commuting:
    fields = dict(zip(("positions", "factors", "base", "basis", "angular"), (P[0], *BASIS[1:]), strict=True))
    return tr.rotations.Commuting(**{**fields, **changed}, head_dim=8)


INCONSISTENT: dict[str, Callable[[], Any]] = {
    "axes": lambda: tr.rotations.Planar(positions=P[0], frequencies=F[:1], head_dim=8),
    "table": lambda: tr.rotations.Planar(positions=P[0], frequencies=F, _table=ones(2, 5, 3, 2), head_dim=8),
    "pairs": lambda: tr.rotations.Planar(positions=P[0], frequencies=torch.randn(2, 2, 6), head_dim=8),
    "dimensions": lambda: tr.rotations.Planar(positions=P[0], frequencies=F[0], head_dim=8),
    "whole numbers": lambda: tr.rotations.Planar(positions=P[0].long(), frequencies=F, head_dim=8),
    "device": lambda: tr.rotations.Planar(positions=P[0], frequencies=F.to("meta"), head_dim=8),
    "number of heads": lambda: tr.rotations.Planar(positions=P[0], frequencies=F, head_dim=8, num_heads=3),
    "heads of a basis": lambda: in_basis(frequencies=torch.randn(2, 3, 4)),
    "channels of a basis": lambda: in_basis(basis=torch.eye(4).expand(2, 1, 4, 4)),
    "factors": lambda: commuting(factors=ones(1, 2, 2)),
    "angular": lambda: commuting(angular=ones(2, 2, 1)),
    "blocks": lambda: tr.rotations.Block(table=ones(2, 5, 3, 4, 4), head_dim=8),
    "rows": lambda: tr.rotations.Block(table=ones(2, 5, 2, 4, 3), head_dim=8),
    "tangent": lambda: tr.rotations.Block(table=TABLE[0], _tangent=ones(2, 5, 2, 5), head_dim=8),
}


@pytest.mark.parametrize("name", INCONSISTENT)
def test_rotations_of_inconsistent_tensors_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"^\w+ needs floating-point tensors on one device .*, got ") as caught:
        INCONSISTENT[name]()
    assert "\n" not in str(caught.value)


@needs_kernels
def test_a_rotation_that_was_not_checked_when_it_was_made_is_when_it_is_used(called: list[str]) -> None:
    """As one that a compiled function made, or a file."""
    rotation = object.__new__(tr.rotations.Planar)
    for name, value in dict(positions=P[0], frequencies=F[:1], head_dim=8).items():
        object.__setattr__(rotation, name, value)
    with pytest.raises(ValueError, match=r"^Planar needs "):
        tr.rotate(Q, Q, rotation)
    assert not called


@needs_kernels
@torch.no_grad()
@pytest.mark.parametrize("make", [tr.MixedRoPE, tr.ComRoPELD, tr.STRING, partial(tr.LieRE, block_size=4)])
def test_tensors_of_a_rotation_that_get_another_shape_are_refused(make: Any, called: list[str]) -> None:
    """As by `x.data = ...` and `x.resize_`, after which kernels would read and write beyond tensors."""
    encoding = make(num_axes=2, num_heads=2, head_dim=8)
    for index in range(len(encoding(P[0])._tensors())):
        rotation = encoding(P[0])
        tensor = rotation._tensors()[index]
        tensor.data = torch.cat([tensor] * 9, dim=-1)
        called.clear()
        with pytest.raises(ValueError, match=r"^\w+ needs floating-point tensors on one device .*, got "):
            tr.rotate(Q, Q, rotation)
        assert not called


@needs_kernels
@torch.no_grad()
def test_whatever_rotate_hands_to_kernels_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operators, which check everything, must not refuse what `rotate` and `apply` have let through."""
    for name in ("rotate_planar", "rotate_basis", "rotate_block"):
        monkeypatch.setitem(library._COMPUTE, name, getattr(OPS, name))
    draw, passed, messages = random.Random(0), 0, []
    rotations = [
        family(num_axes=2, num_heads=2, head_dim=8, shared_heads=shared)(torch.randn(*batch, 5, 2))
        for family in (tr.MixedRoPE, tr.ComRoPELD, tr.STRING, partial(tr.LieRE, block_size=4))
        for shared in (False, True)
        for batch in ((), (1,), (3,))
    ]
    rotations += [rotation.tabulated() for rotation in rotations]
    for _ in range(3000):
        rotation, batch = draw.choice(rotations), draw.choice([(), (1,), (3,), (0,), (3,), (2, 3), (3, 1)])
        sizes = [
            (draw.choice((2, 2, 4, 1, 3, 0)), draw.choice((5, 5, 5, 4, 0)), draw.choice((8, 8, 8, 9))) for _ in "qk"
        ]
        q, k = (torch.randn(*draw.choice((batch, batch, (3,))), *size) for size in sizes)
        other = draw.choice((None, None, draw.choice(rotations)))
        try:
            tr.rotate(q, q if draw.random() < 0.5 else k, rotation, key_rotation=other, scores_only=draw.random() < 0.5)
            passed += 1
        except ValueError as error:
            messages.append(str(error))
    assert passed > 200 < len(messages)
    assert not [message for message in messages if message.startswith("rotate_")]


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
