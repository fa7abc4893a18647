"""`skew_exp` by kernels: accuracy over sizes and norms, NaN and infinity, strides, vmap, compilation."""

import copy
import math
from collections.abc import Callable
from functools import partial
from timeit import timeit

import pytest
import torch
from parity import under
from torch import Tensor

import torchrope as tr
from torchrope.ops import native
from torchrope.ops.library import OPS
from torchrope.rotations import combine

pytestmark = pytest.mark.skipif(native.LIBRARY is None, reason="no kernels were built for this machine")

BLOCKS = (2, 3, 4, 8, 16, 32, 48, 64, 128)
NORMS = tuple(10.0**power for power in range(-6, 4))
EPS = torch.finfo(torch.float32).eps


def skew_matrices(count: int, b: int, norm: float = 1.0) -> Tensor:
    """Random skew matrices `(count, b, b)` of this spectral norm."""
    x = torch.randn(count, b, b, dtype=torch.float64)
    skew = x - x.mT
    return (skew * norm / torch.linalg.matrix_norm(skew, 2)[:, None, None]).float()


def largest(x: Tensor) -> float:
    return x.abs().max().item()


@pytest.mark.parametrize("b", BLOCKS)
def test_errors_are_within_twice_those_of_torch(b: int) -> None:
    for norm in NORMS:
        generator = skew_matrices(20 if b <= 16 else 3, b, norm)
        exact = torch.linalg.matrix_exp(generator.double())
        fast, plain = (x.double() for x in (under("native", tr.ops.skew_exp, generator), torch.matrix_exp(generator)))
        identity = torch.eye(b, dtype=torch.float64)
        assert largest(fast - exact) <= 2 * largest(plain - exact) + 2 * EPS, norm
        assert largest(fast.mT @ fast - identity) <= 2 * largest(plain.mT @ plain - identity) + 4 * EPS, norm


def degenerate_matrices(b: int) -> Tensor:
    """Zero, one plane, half of the channels, equal frequencies, graded frequencies; spectral norms of about 1."""
    zero = torch.zeros(b, b)
    plane, half, equal = zero.clone(), zero.clone(), zero.clone()
    plane[0, b - 1] = 1
    half[: b // 2, : b // 2] = torch.randn(b // 2, b // 2).triu(1) / b**0.5
    equal[range(0, b - 1, 2), range(1, b, 2)] = 1
    graded = torch.ones(b, b).triu(1) / b
    return torch.stack([x - x.mT for x in (zero, plane, half, equal, graded)])


@pytest.mark.parametrize("b", [9, 10, 16, 31, 33, 64, 128])
def test_large_blocks_are_accurate_at_any_norm(b: int) -> None:
    """Angles of blocks of more than 8 are computed in double, whatever their planes."""
    for norm in (1e-30, 1e-3, 1.0, 100.0, 1e4, 1e6):
        generator = norm * torch.cat([degenerate_matrices(b), skew_matrices(4, b)])
        exact = torch.linalg.matrix_exp(generator.double())
        fast = under("native", tr.ops.skew_exp, generator).double()
        assert largest(fast - exact) <= 16 * EPS + norm * 1e-13, norm
        assert largest(fast.mT @ fast - torch.eye(b, dtype=torch.float64)) <= 32 * EPS, norm
        assert torch.equal(fast[0], torch.eye(b, dtype=torch.float64))
        exact, fast = (
            skew_gradient(exp, generator.to(dtype), torch.ones(b, b).triu(1).to(dtype).expand_as(generator))
            for exp, dtype in ((torch.linalg.matrix_exp, torch.float64), (native_exp, torch.float32))
        )
        assert largest(fast - exact) <= 128 * EPS * largest(exact), norm


@pytest.mark.parametrize("b", BLOCKS)
def test_gradients_are_within_twice_the_error_of_torchs(b: int) -> None:
    for norm in (0.0, 1e-6, 1e-2, 1.0, 30.0, 1e3):
        generator = skew_matrices(5 if b <= 16 else 2, b, norm or 1.0) * (norm > 0)
        upstream = torch.randn_like(generator)
        exact = skew_gradient(torch.linalg.matrix_exp, generator.double(), upstream.double())
        fast, plain = (skew_gradient(exp, generator, upstream) for exp in (native_exp, torch.linalg.matrix_exp))
        assert torch.equal(fast, -fast.mT)
        assert largest(fast - exact) <= 2 * largest(plain - exact) + 8 * EPS * largest(exact), norm


native_exp = partial(under, "native", tr.ops.skew_exp)


def skew_gradient(exp: Callable[[Tensor], Tensor], generator: Tensor, upstream: Tensor) -> Tensor:
    """The gradient along skew directions."""
    leaf = generator.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(exp(leaf), leaf, upstream)
    return (gradient - gradient.mT) / 2


@pytest.mark.parametrize("b", [2, 5, 8, 12, 64])
def test_matrices_are_computed_independently(b: int) -> None:
    """Matrices lie side by side in a vector: each comes out as it does alone."""
    norms = torch.logspace(-6, 3, 35)
    generator = skew_matrices(35, b) * norms[:, None, None]
    exact = torch.linalg.matrix_exp(generator.double())
    fast = tr.ops.skew_exp(generator)
    for i, norm in enumerate(norms.tolist()):
        assert largest(fast[i] - exact[i]) <= 8 * EPS * max(1.0, norm), norm


@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize("power", [0, 2, 4, 6, 7, 8, 9, 12, 20, 38])
@pytest.mark.parametrize("b", [3, 8, 16, 64])
def test_rotations_are_orthogonal_at_any_norm(b: int, power: int, backend: str) -> None:
    generator = skew_matrices(3, b, 10.0**power)
    upstream = torch.randn_like(generator)
    leaf = generator.requires_grad_()
    rotation = under(backend, tr.ops.skew_exp, leaf)
    wide = rotation.detach().double()
    assert largest(wide.mT @ wide - torch.eye(b)) <= 1e-5
    assert (torch.linalg.det(wide) - 1).abs().max() <= 1e-4
    (gradient,) = torch.autograd.grad(rotation, leaf, upstream)
    # J averages M over the orbit of rotations, so it is no larger than M.
    assert torch.linalg.matrix_norm(gradient - gradient.mT).max() <= 2.1 * torch.linalg.matrix_norm(upstream).max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_large_exponents_keep_their_accuracy(dtype: torch.dtype) -> None:
    """Whole turns of a plane leave the identity: 2 pi times a power of two is exact in float64 alone."""
    for turns in (1.0, 2.0**10, 2.0**20):
        angle = torch.tensor(2 * math.pi * turns, dtype=dtype)
        rotation = tr.ops.skew_exp(torch.stack([torch.stack([0 * angle, -angle]), torch.stack([angle, 0 * angle])]))
        known = turns * 2 * math.pi * torch.finfo(dtype).eps
        assert largest(rotation - torch.eye(2, dtype=dtype)) <= 4 * known + 1e-6


@pytest.mark.parametrize("b", [3, 8])
def test_large_matrices_do_not_affect_others(b: int) -> None:
    for far in (1e6, 1e12, 1e30, 3e38):
        generator = skew_matrices(20, b)
        alone = torch.linalg.matrix_exp(generator.double())
        generator[7] *= far
        near = torch.arange(20) != 7
        assert largest(tr.ops.skew_exp(generator)[near] - alone[near]) <= 16 * EPS, far


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("b", [2, 3, 8, 16, 64, 128])
def test_nonfinite_exponents_give_nan(b: int, value: float) -> None:
    generator = skew_matrices(3, b)
    generator[1, 0, 1], generator[1, 1, 0] = value, -value
    leaf = generator.requires_grad_()
    rotation = under("native", tr.ops.skew_exp, leaf)
    assert rotation[1].isnan().all()
    (gradient,) = torch.autograd.grad(rotation.sum(), leaf)
    assert gradient[1].isnan().any()


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("b", [3, 8, 16])
def test_nonfinite_exponents_do_not_affect_others(b: int, value: float) -> None:
    generator = skew_matrices(3, b)
    expected = tr.ops.skew_exp(generator)[::2]
    generator[1, 0, 1], generator[1, 1, 0] = value, -value
    assert torch.allclose(tr.ops.skew_exp(generator)[::2], expected, atol=1e-6)


@pytest.mark.parametrize("b", [3, 8, 20])
def test_skew_exp_accepts_any_strides(b: int) -> None:
    generator = skew_matrices(6, b)
    expected = tr.ops.skew_exp(generator)
    strided = generator.permute(1, 2, 0).contiguous().permute(2, 0, 1)
    spaced = torch.zeros(6, b, 2 * b)
    spaced[..., ::2] = generator
    for same in (strided, spaced[..., ::2], generator.mT.neg(), -generator.mT):
        assert torch.equal(tr.ops.skew_exp(same), expected)
    assert torch.equal(tr.ops.skew_exp(generator[:1].expand(4, b, b)), expected[:1].expand(4, b, b))
    assert torch.equal(tr.ops.skew_exp(generator.view(2, 3, b, b)), expected.view(2, 3, b, b))
    assert torch.equal(tr.ops.skew_exp(generator[0]), expected[0])
    assert tr.ops.skew_exp(generator[:0]).shape == (0, b, b)


@pytest.mark.parametrize("b", [1, 129])
def test_sizes_without_kernels_use_the_reference(b: int) -> None:
    generator = skew_matrices(2, b) if b > 1 else torch.zeros(2, 1, 1)
    assert largest(tr.ops.skew_exp(generator).double() - torch.linalg.matrix_exp(generator.double())) < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32_without_autocast(dtype: torch.dtype) -> None:
    narrow = skew_matrices(5, 8).to(dtype).requires_grad_()
    rotation = tr.ops.skew_exp(narrow)
    assert rotation.dtype == torch.float32
    assert torch.equal(rotation, tr.ops.skew_exp(narrow.float()))
    (gradient,) = torch.autograd.grad(rotation.square().cumsum(-1).sum(), narrow)
    assert gradient.dtype == dtype
    wide = narrow.detach().float()
    with torch.autocast("cpu", dtype=dtype):
        assert torch.equal(tr.ops.skew_exp(wide), rotation)


@pytest.mark.parametrize("b", [3, 8, 16])
def test_skew_exp_and_its_gradient_support_vmap(b: int) -> None:
    generator, weight = skew_matrices(12, b).view(4, 3, b, b), torch.randn(3, b, b)

    def score(generator: Tensor, weight: Tensor) -> Tensor:
        return (tr.ops.skew_exp(generator) * weight).sum()

    assert torch.allclose(torch.vmap(tr.ops.skew_exp)(generator), tr.ops.skew_exp(generator), atol=1e-6)
    assert torch.allclose(torch.vmap(tr.ops.skew_exp, 1, 1)(generator), tr.ops.skew_exp(generator), atol=1e-6)
    per_sample = torch.vmap(torch.func.grad(score), (0, None))(generator, weight)
    along = torch.func.jacrev(score)(generator[0], weight)
    for i in range(4):
        expected = skew_gradient(native_exp, generator[i], weight)
        assert torch.allclose((per_sample[i] - per_sample[i].mT) / 2, expected, atol=1e-5)
    assert torch.allclose((along - along.mT) / 2, skew_gradient(native_exp, generator[0], weight), atol=1e-5)

    leaf = generator[0].clone().requires_grad_()
    directions = torch.randn(5, 3, b, b)
    rotation = under("native", tr.ops.skew_exp, leaf)
    (batched,) = torch.autograd.grad(rotation, leaf, directions, is_grads_batched=True, retain_graph=True)
    for direction, gradient in zip(directions, batched, strict=True):
        assert torch.equal(gradient, torch.autograd.grad(rotation, leaf, direction, retain_graph=True)[0])


@pytest.mark.parametrize("b", [3, 16])
def test_skew_exp_compiles(b: int) -> None:
    torch.compiler.reset()
    compiled = torch.compile(lambda x: tr.ops.skew_exp(2 * x).square().cumsum(-1), fullgraph=True, backend="aot_eager")
    leaf = skew_matrices(5, b).requires_grad_()
    expected = tr.ops.skew_exp(2 * leaf).square().cumsum(-1)
    assert torch.allclose(compiled(leaf), expected, atol=1e-6)
    gradients = (torch.autograd.grad(out.sum(), leaf)[0] for out in (compiled(leaf), expected))
    assert torch.allclose(*gradients, atol=1e-5)


def directions(axes: int) -> dict[str, Tensor]:
    """Sets of positions `(tokens, axes)` in which many, few or no tokens are multiples of one another."""
    lattice = tr.grid(*[{1: 300, 2: 9, 3: 4, 4: 3}[axes]] * axes)
    factors = torch.tensor([0.0, -0.0, 1, -1, 2.5, -3, 1e-3, 0.7, 1e-30, 77, -1e4, 1e-38, 1 / 3, 0.7])[:, None]
    return {
        "random": torch.randn(40, axes),
        "lattice": lattice / 7,
        "around the origin": tr.Lattice(2.0, -1.0, offset=0.5, per="size")(*[7] * min(axes, 2), *[2] * (axes - 2)),
        "equal": torch.full((20, axes), -0.3),
        "zero": torch.zeros(20, axes),
        "multiples": factors * torch.tensor([0.25, 1.5, 0.0, -0.75])[:axes],
        "rounded multiples": factors * torch.randn(1, axes),
        "nearly one direction": 1 + EPS * (torch.arange(40.0)[:, None] % 9) * torch.arange(axes),
    }


@pytest.mark.parametrize(
    ("axes", "b"), [(1, 16), (2, 9), pytest.param(2, 32, marks=pytest.mark.slow), (3, 16), (4, 10)]
)
def test_tokens_at_multiples_of_one_position_are_as_accurate_as_others(axes: int, b: int) -> None:
    """Exponents of large blocks share a decomposition along each direction, at any scale of positions."""
    for name, unit in directions(axes).items():
        for scale in (1.0, 2.0**-127, 2.0**100):
            positions = unit * scale
            encoding = tr.LieRE(num_axes=axes, num_heads=1, head_dim=b, init_scale=0.1)
            with torch.no_grad():
                encoding.upper.div_(scale)
            x = torch.randn(len(unit), b)
            exact = rotated(copy.deepcopy(encoding).double(), positions.double(), x.double())
            fast, plain = (under(kind, rotated, encoding, positions, x) for kind in ("native", "reference"))
            for mine, other, true in zip(fast, plain, exact, strict=True):
                limit = 2 * largest(other - true) + 8 * EPS * largest(true)
                assert largest(mine - true) <= limit, (name, scale)
            assert torch.equal(fast[0][(positions == 0).all(dim=1)], x[(positions == 0).all(dim=1)]), name


def rotated(encoding: tr.LieRE, positions: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """The rotated channels `(tokens, b)`, and a gradient of the generators for the norm of 1."""
    y = tr.rotate(x[None, None], x[None, None], encoding(positions))[0][0, 0]
    (gradient,) = torch.autograd.grad(y.flip(1), encoding.upper, x)
    return y.detach(), gradient


def test_tokens_that_share_a_direction_with_infinity_stay_finite() -> None:
    generators = skew_matrices(2, 16, 2.0).view(2, 1, 1, 16, 16)
    far = 2.0**126
    factors = torch.tensor([1.0, math.nan, far, -2, math.inf, 3 * far, -3 * far, 0, -math.inf, 3.4e38, 1e-40])
    positions = torch.cat([factors[:, None] * torch.tensor([1.0, y]) for y in (0.0, 0.5, -1.0)])
    exponents = combine(positions.double(), generators.double())
    overflow = ~(exponents.abs() <= torch.finfo(torch.float32).max).all(dim=-1).all(dim=-1)
    rotations = OPS.exp_generators(positions, generators)[0]
    assert torch.equal(rotations.isnan().any(dim=-1).any(dim=-1), overflow)
    assert torch.equal(rotations.isnan().all(dim=-1).all(dim=-1), overflow)
    assert 0 < overflow.sum() < len(positions)
    near = rotations[~overflow].double()
    assert largest(near.mT @ near - torch.eye(16, dtype=torch.float64)) <= 32 * EPS


def test_directions_do_not_depend_on_the_number_of_threads(threads: int) -> None:
    generators = skew_matrices(2, 16).view(2, 1, 1, 16, 16).requires_grad_()
    positions = torch.cat([*directions(2).values()])
    results = []
    for count in (threads, 1, 2, 3):
        torch.set_num_threads(count)
        table, tangent = OPS.exp_generators(positions, generators)
        (gradient,) = torch.autograd.grad(tangent, generators, torch.ones_like(tangent))
        results.append((table, gradient))
    for same in results[1:]:
        assert all(map(torch.equal, results[0], same))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lattice", "random", "one axis", "one hash"])
def test_time_is_linear_in_tokens(kind: str) -> None:
    """8 times the tokens take 64 times as long where each is compared with all others."""
    axes = 1 if kind == "one axis" else 2
    generators = skew_matrices(axes, 9).view(axes, 1, 1, 9, 9)

    def work(side: int) -> Callable[[], object]:
        tokens = side * side
        positions = {
            "lattice": lambda: tr.grid(side, side),
            "random": lambda: torch.randn(tokens, 2),
            "one axis": lambda: torch.randn(tokens, 1),
            "one hash": lambda: torch.stack([1e6 + torch.arange(tokens), torch.ones(tokens)], dim=1),
        }[kind]()
        return partial(OPS.exp_generators, positions, generators)

    works = work(64), work(181)
    fewer, more = zip(*([timeit(each, number=1) for each in works] for _ in range(10)), strict=True)
    assert min(more) < 20 * min(fewer)
