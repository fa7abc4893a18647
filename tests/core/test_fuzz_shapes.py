"""Own encodings and calls of the operators with random shapes, dtypes, strides and devices, right and wrong.

Right ones must equal the formula in float64, wrong ones raise ValueError in one line. `make sanitize` runs this under
the sanitizers, where no wrong one may touch foreign memory either. The examples are the same in every run.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracle import rotated
from torch import Tensor

import torchrope as tr
from torchrope.encodings import Encoding
from torchrope.ops import native

pytestmark = [
    pytest.mark.skipif(native.LIBRARY is None, reason="no kernels were built for this machine"),
    pytest.mark.filterwarnings("ignore:angles need frequencies in float32:UserWarning"),
]

OPS = torch.ops.torchrope
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
OTHERS = (torch.int64, torch.complex64, torch.bool)
LAYOUTS = ("dense", "transposed", "apart", "offset", "expanded")
CHANGES = ("resize", "drop", "add", "swap", "dtype", "device")


@dataclass(frozen=True)
class Change:
    """What is changed of one argument: sizes, number or order of dimensions, dtype or device."""

    which: int
    kind: str
    dim: int
    size: int
    dtype: torch.dtype

    def of(self, x: Tensor) -> Tensor:
        shape, dim = list(x.shape), self.dim % max(x.ndim, 1)
        if self.kind == "dtype":
            return x.to(self.dtype)
        if self.kind == "device":
            return x.to("meta")
        if self.kind == "resize" and shape:
            shape[dim] = (0, 1, shape[dim] - 1, shape[dim] + 1, 2 * shape[dim], 3)[self.size]
        elif self.kind == "drop" and shape:
            del shape[dim]
        elif self.kind == "swap" and shape:
            shape[dim], shape[dim - 1] = shape[dim - 1], shape[dim]
        else:
            shape.insert(dim, (0, 1, 2, 1, 2, 1)[self.size])
        shape = [max(size, 0) for size in shape]
        return x.clone() if shape == list(x.shape) else torch.randn(shape).to(x.dtype)


def changes() -> st.SearchStrategy[Change]:
    return st.builds(
        Change, st.integers(0, 8), st.sampled_from(CHANGES), st.integers(0, 5), st.integers(0, 5),
        st.sampled_from((*FLOATS, *OTHERS)),
    )  # fmt: skip


def laid_out(x: Tensor, layout: str) -> Tensor:
    """Return equal values with other strides, differentiably."""
    if layout == "transposed" and x.ndim > 1:
        return x.transpose(-1, -2).contiguous().transpose(-1, -2)
    if layout == "apart":
        return torch.stack([x, x], dim=-1)[..., 0]
    if layout == "offset":
        return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)
    return x


# Own encodings.


@dataclass(frozen=True)
class Own:
    """Random settings of an encoding, what its methods return, and q and k."""

    method: str
    block_size: int
    axes: int
    heads: int
    blocks: int
    rest: int
    batch: int
    tokens: int
    group: int
    shared: tuple[bool, bool]
    layouts: tuple[str, str]
    dtypes: tuple[torch.dtype, torch.dtype]
    requires_grad: tuple[bool, ...]
    change: Change | None
    seed: int


@st.composite
def own_encodings(draw: st.DrawFn) -> Own:
    method = draw(st.sampled_from(("frequencies", "factored", "generators")))
    sizes = {"frequencies": (2,), "factored": (4, 6, 8, 12, 16), "generators": (3, 4, 7, 8, 9, 16, 20)}[method]
    return Own(
        method=method,
        block_size=draw(st.sampled_from(sizes)),
        axes=draw(st.integers(1, 3)),
        heads=draw(st.integers(1, 4)),
        blocks=draw(st.integers(1, 3)),
        rest=draw(st.sampled_from((0, 0, 3))),
        batch=draw(st.integers(0, 2)),
        tokens=draw(st.integers(0, 6)),
        group=draw(st.integers(1, 2)),
        shared=draw(st.tuples(st.booleans(), st.booleans())),
        layouts=draw(st.tuples(st.sampled_from(LAYOUTS), st.sampled_from(LAYOUTS))),
        dtypes=draw(st.tuples(st.sampled_from(FLOATS), st.sampled_from(FLOATS))),
        requires_grad=draw(st.tuples(*[st.booleans()] * 5)),
        change=draw(st.none() | changes()),
        seed=draw(st.integers(0, 2**16)),
    )


class Returning(Encoding):
    """An encoding whose methods return given tensors."""

    def __init__(self, own: Own, returned: Sequence[Tensor]) -> None:
        rotary = own.blocks * own.block_size
        super().__init__(
            num_axes=own.axes,
            num_heads=own.heads,
            head_dim=rotary + own.rest,
            rotary_dim=rotary,
            block_size=own.block_size,
        )
        self.method, self.returned = own.method, returned

    def generators(self) -> Tensor:
        first, *base = self.returned
        return first[..., None, None] * base[0] if base else first

    def frequencies_per_axis(self) -> Tensor:
        return self.returned[0]

    def factors_and_base(self) -> tuple[Tensor, Tensor] | None:
        return None if self.method == "generators" else (self.returned[0], self.returned[1])


def promised(own: Own) -> list[tuple[tuple[int, ...], int]]:
    """Return the shapes that the methods promise, each with its dimension of heads."""
    blocks = (own.blocks, own.block_size, own.block_size)
    if own.method == "frequencies":
        return [((own.axes, own.heads, own.blocks), 1)]
    if own.method == "factored":
        return [((own.axes, own.heads, own.blocks), 1), ((own.heads, *blocks), 0)]
    return [((own.axes, own.heads, *blocks), 1)]


def check_own(own: Own) -> None:
    torch.manual_seed(own.seed)
    leaves, returned, right = [], [], True
    for at, (shape, dim) in enumerate(promised(own)):
        sizes = [1 if i == dim and own.shared[at] else size for i, size in enumerate(shape)]
        leaf = torch.randn(sizes).to(own.dtypes[at])
        if own.change is not None and own.change.which % len(promised(own)) == at:
            leaf = own.change.of(leaf)
        right &= leaf.dtype in FLOATS and not leaf.is_meta
        right &= tuple(leaf.shape) in (shape, (*shape[:dim], 1, *shape[dim + 1 :]))
        leaf.requires_grad_(own.requires_grad[at] and leaf.dtype in FLOATS)
        leaves.append(leaf)
        square = leaf.ndim > 3 and leaf.shape[-1] == leaf.shape[-2]
        x = laid_out((leaf - leaf.mT) / 2 if square and leaf.dtype in FLOATS else leaf, own.layouts[at])
        if own.layouts[at] == "expanded" and not leaf.is_meta and right:
            x = x.expand(*shape[:dim], -1 if x.shape[dim] != 1 else own.heads, *shape[dim + 1 :])
        returned.append(x)
    encoding = Returning(own, returned)
    q = torch.randn(own.batch, own.heads * own.group, own.tokens, encoding.head_dim)
    k = torch.randn(own.batch, own.heads, own.tokens, encoding.head_dim)
    positions = (2 * torch.rand(own.tokens, own.axes) - 1).requires_grad_(own.requires_grad[2])
    q.requires_grad_(own.requires_grad[3])
    k.requires_grad_(own.requires_grad[4])

    def outcome() -> list[Tensor]:
        return list(tr.rotate(q, k, encoding(positions), layout="bhtd"))

    if not right:
        refused(outcome)
        return
    outputs, blocks = outcome(), blocks_of(own, returned)  # once: narrow gradients are rounded once
    exact = [rotated(x, positions, blocks) for x in (q, k)]
    upstream = [torch.randn_like(x) for x in (q, k)]
    wanted = [x for x in (q, k, positions, *leaves) if x.requires_grad]
    results = [gradients(many, upstream, wanted) for many in (outputs, exact)]
    for one, other in zip([*outputs, *results[0]], [*exact, *results[1]], strict=True):
        close(one, other)


def blocks_of(own: Own, returned: Sequence[Tensor]) -> Tensor:
    """Compute the generators in float64."""
    first, *rest = (x.double() for x in returned)
    if own.method == "frequencies":
        return first[..., None, None] * torch.tensor([[0.0, -1.0], [1.0, 0.0]], dtype=torch.float64)
    return first[..., None, None] * rest[0] if rest else first


def gradients(outputs: Sequence[Tensor], upstream: Sequence[Tensor], wanted: Sequence[Tensor]) -> Sequence[Tensor]:
    flowing = [(out, g.to(out.dtype)) for out, g in zip(outputs, upstream, strict=True) if out.requires_grad]
    if not flowing or not wanted:
        return [torch.zeros_like(x) for x in wanted]
    results, cotangents = zip(*flowing, strict=True)
    return torch.autograd.grad(results, wanted, cotangents, materialize_grads=True, retain_graph=True)


# Operators.


@dataclass(frozen=True)
class Call:
    """Random sizes of an operator's arguments, and one change of them."""

    name: str
    axes: int
    own_heads: int
    groups: tuple[int, int]
    blocks: int
    b: int
    batches: tuple[int, int]
    per_sample: bool
    tokens: int
    rest: int
    with_table: bool
    layout: str
    dtype: torch.dtype
    change: Change | None
    seed: int


NAMES = ("planar", "basis", "block", "exp_generators", "skew_exp", "skew_eig")


@st.composite
def calls(draw: st.DrawFn) -> Call:
    batch = draw(st.integers(0, 3))
    return Call(
        name=draw(st.sampled_from(NAMES)) + draw(st.sampled_from(("", " backward"))),
        axes=draw(st.integers(0, 3)),
        own_heads=draw(st.integers(0, 3)),
        groups=draw(st.tuples(st.integers(0, 2), st.integers(0, 2))),
        blocks=draw(st.integers(0, 3)),
        b=draw(st.sampled_from((2, 4, 4, 6, 8, 8, 16, 3, 7, 9, 1, 0))),
        batches=(batch, draw(st.sampled_from((batch, batch, 0, 1, 2)))),
        per_sample=draw(st.booleans()),
        tokens=draw(st.integers(0, 5)),
        rest=draw(st.sampled_from((0, 0, 2))),
        with_table=draw(st.booleans()),
        layout=draw(st.sampled_from(LAYOUTS)),
        dtype=draw(st.sampled_from((torch.float32, torch.float32, torch.bfloat16, torch.float16))),
        change=draw(st.none() | changes()),
        seed=draw(st.integers(0, 2**16)),
    )


def check_call(call: Call) -> None:
    torch.manual_seed(call.seed)
    name, backward = call.name.split(" ")[0], call.name.endswith("backward")
    if name == "skew_eig":
        backward = False
    tensors = arguments(call, name)
    if backward and len(tensors) > 1 and name in ("planar", "basis", "block"):
        tensors = {"grad_q": torch.randn_like(tensors["q"]), "grad_k": torch.randn_like(tensors["k"]), **tensors}
        tensors.pop("base", None)  # no argument
    elif backward:
        count = (*tensors["positions"].shape[:1], call.own_heads, call.tokens) if name == "exp_generators" else ()
        blocks = (call.blocks,) if name == "exp_generators" else tensors["exponents"].shape[:1]
        tensors["tangent"] = torch.randn(*count, *blocks, call.b * (call.b - 1) // 2)
    if call.change is not None:
        changed = list(tensors)[call.change.which % len(tensors)]
        x = call.change.of(tensors[changed])
        skew = changed in ("base", "generators", "exponents") and x.ndim > 1 and x.shape[-1] == x.shape[-2]
        tensors[changed] = x - x.mT if skew and x.dtype in FLOATS else x
    tensors = {key: x if x.is_meta else laid_out(x, call.layout) for key, x in tensors.items()}
    run = RUNS[name, backward]
    if all(x.is_meta for x in tensors.values()):  # no memory
        return
    if any(x.dtype not in FLOATS or x.is_meta for x in tensors.values()):
        refused(lambda: run(call, tensors))
        return
    try:
        whole, alone = with_sets(name, tensors)
        expected = EXPECTED[name](call, whole, backward)
    except (AssertionError, RuntimeError, IndexError, ValueError, NotImplementedError, TypeError):
        refused(lambda: run(call, tensors))
        return
    for one, other in zip(run(call, tensors), expected, strict=False):
        close(one, other.squeeze(0) if alone and other.ndim > one.ndim else other)


def with_sets(name: str, tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], bool]:
    """Add the dimension of sets, which operators take with and without, if all tensors lack it; return whether so."""
    dims = {"positions": 3, "table": 6 if name == "block" else 5, "tangent": 5 if name == "exp_generators" else 0}
    if name == "exp_generators" or name in ("planar", "basis", "block"):
        given = {key: x for key, x in tensors.items() if dims.get(key)}
        if given and all(x.ndim == dims[key] - 1 for key, x in given.items()):
            return {**tensors, **{key: x.unsqueeze(0) for key, x in given.items()}}, True
    return tensors, False


def arguments(call: Call, name: str) -> dict[str, Tensor]:
    b, heads, blocks = call.b, call.own_heads, call.blocks
    sets = call.batches[0] if call.per_sample else 1
    width = call.rest + blocks * (2 if name == "planar" else b)
    sides = zip("qk", call.batches, call.groups, strict=True)
    sized = {side: (batch, heads * group, call.tokens, width) for side, batch, group in sides}
    vectors = {side: torch.randn(size).to(call.dtype) for side, size in sized.items()}
    positions = {"positions": torch.randn(sets, call.tokens, call.axes)}
    upper = torch.randn(heads, blocks, b, b)
    if name == "planar":
        table = {"table": torch.randn(sets, heads, call.tokens, 2, blocks)} if call.with_table else {}
        return {**vectors, **positions, "frequencies": torch.randn(call.axes, heads, blocks), **table}
    if name == "basis":
        basis = torch.linalg.qr(upper)[0] if b else upper
        rates = {"base": upper - upper.mT, "basis": basis, "angular": torch.rand(heads, blocks, b // 2)}
        return {**vectors, **positions, "factors": torch.randn(call.axes, heads, blocks), **rates}
    if name == "block":
        return {**vectors, "table": torch.randn(sets, heads, call.tokens, blocks, b, b)}
    if name == "exp_generators":
        square = torch.randn(call.axes, heads, blocks, b, b) / 2
        return {**positions, "generators": square - square.mT}
    square = torch.randn(blocks, b, b) / 2
    return {"base": (square - square.mT)[None]} if name == "skew_eig" else {"exponents": square - square.mT}


def planar_run(call: Call, x: dict[str, Tensor]) -> Any:
    return OPS.rotate_planar(x["q"], x["k"], x["positions"], x["frequencies"], x.get("table"), True)


def planar_back(call: Call, x: dict[str, Tensor]) -> Any:
    rotation = (x["positions"], x["frequencies"], x.get("table"), True)
    return OPS.rotate_planar_backward(x["grad_q"], x["grad_k"], x["q"], x["k"], *rotation, [True, True])


def _of_basis(x: dict[str, Tensor]) -> tuple[Tensor, ...]:
    return x["positions"], x["factors"], x["basis"], x["angular"]


RUNS: dict[tuple[str, bool], Callable[[Call, dict[str, Tensor]], Any]] = {
    ("planar", False): planar_run,
    ("planar", True): planar_back,
    ("basis", False): lambda call, x: OPS.rotate_basis(
        x["q"], x["k"], x["positions"], x["factors"], x["base"], x["basis"], x["angular"], True
    ),
    ("basis", True): lambda call, x: OPS.rotate_basis_backward(
        x["grad_q"], x["grad_k"], x["q"], x["k"], *_of_basis(x), True, [True] * 3
    ),
    ("block", False): lambda call, x: OPS.rotate_block(x["q"], x["k"], x["table"], torch.empty(0)),
    ("block", True): lambda call, x: OPS.rotate_block_backward(
        x["grad_q"], x["grad_k"], x["q"], x["k"], x["table"], True
    ),
    ("exp_generators", False): lambda call, x: OPS.exp_generators(x["positions"], x["generators"]),
    ("exp_generators", True): lambda call, x: OPS.exp_generators_backward(
        x["positions"], x["generators"], x["tangent"], True
    ),
    ("skew_exp", False): lambda call, x: [OPS.skew_exp(x["exponents"])],
    ("skew_exp", True): lambda call, x: [OPS.skew_exp_backward(x["exponents"], x["tangent"])],
    ("skew_eig", False): lambda call, x: OPS.skew_eig(x["base"]),
}


def spread(x: Tensor, like: Tensor) -> Tensor:
    """Give each sample and head of `like` its own part of x `(1 or batch, own heads, tokens, ...)`."""
    batch, heads, tokens, _ = like.shape
    assert x.shape[0] in (1, batch) or batch == 0
    assert heads % x.shape[1] == 0 if x.shape[1] else False
    assert x.shape[2] == tokens
    x = x.expand(batch, *x.shape[1:]) if batch and x.shape[0] != batch else x[:batch]
    x = x if len(x) == batch else x.new_empty(0, *x.shape[1:])
    return x.repeat_interleave(heads // x.shape[1], dim=1)


def turned(x: Tensor, matrices: Tensor) -> Tensor:
    """Multiply channel blocks by matrices `(batch, heads, tokens, blocks, b, b)`."""
    count, b, columns = matrices.shape[-3:]
    assert b == columns
    assert 0 < count * b <= x.shape[-1]
    cells = x.double()[..., : count * b].unflatten(-1, (count, b))
    rest = x.double()[..., count * b :]
    return torch.cat([(matrices @ cells.unsqueeze(-1)).flatten(-3), rest], dim=-1)


def expected_of_sides(x: dict[str, Tensor], matrices: Tensor, backward: bool) -> list[Tensor]:
    """Compute both results: q and k rotated, or their gradients."""
    narrow = (torch.float32, torch.bfloat16, torch.float16)
    vectors = [x[side] for side in ("q", "k")]
    assert all(v.dtype in narrow for v in vectors)
    assert vectors[0].shape[2:] == vectors[1].shape[2:]
    if backward:
        given = [x["grad_q"], x["grad_k"]]
        assert all(g.shape == v.shape and g.dtype in narrow for g, v in zip(given, vectors, strict=True))
        return [turned(g, spread(matrices.mT, g)) for g in given]
    return [turned(v, spread(matrices, v)) for v in vectors]


def angles(x: dict[str, Tensor], per_axis: str) -> Tensor:
    """sum_a p_a f_a, `(sets, heads, tokens, n)`."""
    positions, frequencies = x["positions"].double(), x[per_axis].double()
    assert positions.ndim == frequencies.ndim == 3
    assert positions.shape[2] == len(frequencies) > 0
    return torch.tensordot(positions, frequencies, dims=([2], [0])).transpose(1, 2)


def planes(cos: Tensor, sin: Tensor) -> Tensor:
    return torch.stack([torch.stack([cos, -sin], -1), torch.stack([sin, cos], -1)], -2)


def expected_planar(call: Call, x: dict[str, Tensor], backward: bool) -> list[Tensor]:
    phi = angles(x, "frequencies")
    cos, sin = phi.cos(), phi.sin()
    if "table" in x:
        assert x["table"].shape == (*phi.shape[:-1], 2, phi.shape[-1])
        cos, sin = x["table"].double().unbind(-2)
    return expected_of_sides(x, planes(cos, sin), backward)


def expected_basis(call: Call, x: dict[str, Tensor], backward: bool) -> list[Tensor]:
    basis, angular = x["basis"].double(), x["angular"].double()
    heads, blocks, b, columns = basis.shape
    assert b == columns
    assert b % 2 == 0
    assert angular.shape == (heads, blocks, b // 2)
    assert x["factors"].shape[1:] == (heads, blocks)
    assert backward or x["base"].shape == basis.shape
    phi = angles(x, "factors")[..., None] * angular[:, None]  # (sets, heads, tokens, blocks, b / 2)
    inner = torch.zeros(*phi.shape[:-1], b, b, dtype=torch.float64)  # minus the identity
    even = torch.arange(0, b, 2)
    inner[..., even, even], inner[..., even + 1, even + 1] = phi.cos() - 1, phi.cos() - 1
    inner[..., even + 1, even], inner[..., even, even + 1] = phi.sin(), -phi.sin()
    around = basis[:, None] @ inner @ basis[:, None].mT  # (sets, heads, tokens, blocks, b, b)
    return expected_of_sides(x, torch.eye(b, dtype=torch.float64) + around, backward)


def expected_block(call: Call, x: dict[str, Tensor], backward: bool) -> list[Tensor]:
    assert x["table"].dtype == torch.float32
    assert x["table"].ndim == 6
    return expected_of_sides(x, x["table"].double(), backward)


def exponential(exponents: Tensor) -> Tensor:
    assert exponents.shape[-1] == exponents.shape[-2]
    assert 2 <= exponents.shape[-1] <= 128
    return torch.linalg.matrix_exp(((exponents.double() - exponents.double().mT) / 2).contiguous())


def expected_exp(call: Call, x: dict[str, Tensor], backward: bool) -> list[Tensor]:
    positions, generators = x["positions"].double(), x["generators"].double()
    (sets, tokens, axes), (own_axes, heads, blocks, b, _) = positions.shape, generators.shape
    assert axes == own_axes > 0
    assert heads > 0
    exponent = torch.tensordot(positions, generators, dims=([2], [0])).transpose(1, 2)
    result = exponential(exponent)
    entries = (sets, heads, tokens, blocks, b * (b - 1) // 2)
    if not backward:
        return [result, torch.zeros(entries)]
    assert x["tangent"].shape == entries
    return [torch.full(positions.shape, torch.nan), torch.full(generators.shape, torch.nan)]


def expected_skew_exp(call: Call, x: dict[str, Tensor], backward: bool) -> list[Tensor]:
    exponents = x["exponents"]
    assert exponents.ndim == 3
    assert exponents.dtype == torch.float32
    result, b = exponential(exponents), exponents.shape[-1]
    if not backward:
        return [result]
    assert x["tangent"].shape == (len(exponents), b * (b - 1) // 2)
    return [torch.full(exponents.shape, torch.nan)]


def expected_skew_eig(call: Call, x: dict[str, Tensor], backward: bool) -> list[Tensor]:
    base = x["base"]
    assert base.ndim > 2
    assert base.shape[-1] == base.shape[-2] >= 2
    assert base.shape[-1] % 2 == 0
    assert base.dtype == torch.float32
    return [torch.full(base.shape, torch.nan), torch.full((*base.shape[:-2], base.shape[-1] // 2), torch.nan)]


EXPECTED: dict[str, Callable[[Call, dict[str, Tensor], bool], list[Tensor]]] = {
    "planar": expected_planar,
    "basis": expected_basis,
    "block": expected_block,
    "exp_generators": expected_exp,
    "skew_exp": expected_skew_exp,
    "skew_eig": expected_skew_eig,
}


def refused(run: Callable[[], Any]) -> None:
    with pytest.raises(ValueError, match=r" (must .*, got|needs .*, got|are on) ") as caught:
        run()
    assert "\n" not in str(caught.value)


def close(actual: Tensor, exact: Tensor) -> None:
    """Compare shapes, and values except where NaN is expected."""
    assert actual.shape == exact.shape
    steps = {torch.bfloat16: 2**-6, torch.float16: 2**-9}.get(actual.dtype, 2e-4)
    actual, exact = actual.detach(), exact.detach()
    known = ~exact.isnan()
    allowed = steps * (1 + float(exact[known].abs().max() if known.any() else 0))
    difference = (actual.double() - exact.double())[known].abs()
    assert not difference.numel() or float(difference.max()) <= allowed


@settings(max_examples=60, derandomize=True, deadline=None, database=None)
@given(own_encodings())
def test_own_encodings_are_right_or_refused(own: Own) -> None:
    check_own(own)


@settings(max_examples=100, derandomize=True, deadline=None, database=None)
@given(calls())
def test_operators_are_right_or_refuse(call: Call) -> None:
    check_call(call)


MANY = settings(
    max_examples=5000, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)


@pytest.mark.slow
@MANY
@given(own_encodings())
def test_five_thousand_own_encodings_are_right_or_refused(own: Own) -> None:
    check_own(own)


@pytest.mark.slow
@MANY
@given(calls())
def test_five_thousand_calls_of_operators_are_right_or_refused(call: Call) -> None:
    check_call(call)
