"""What the reference does on a GPU, run on a CPU: exponentials that read nothing, and products that nothing rounds."""

import copy
from collections.abc import Callable

import pytest
import torch
from parity import under
from torch import Tensor

import torchrope as tr
from torchrope import tensors
from torchrope.encodings import skew
from torchrope.ops.skew_exp import _Exponential, _square_repeatedly
from torchrope.tensors import exact_einsum, exact_matmul

# torch compiles its decompositions by its own deprecated torch.jit.script when forward mode is first used.
forward_mode = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:FutureWarning")
EPS = torch.finfo(torch.float32).eps


def generators(b: int, norm: float, count: int = 3) -> Tensor:
    raw = torch.randn(count, b, b)
    blocks = raw - raw.mT
    return norm * blocks / blocks.abs().sum(dim=-1).amax(dim=-1)[:, None, None]


@pytest.mark.parametrize("norm", [0.0, 1e-3, 1.0, 10.0, 1e3, 1e5])
@pytest.mark.parametrize("b", [2, 3, 8, 64])
def test_exponential_without_reading_is_exact_to_the_rounding_of_angles(b: int, norm: float) -> None:
    leaf, upstream = generators(b, norm).requires_grad_(), torch.randn(3, b, b)
    exact_leaf = leaf.detach().double().requires_grad_()
    exact = torch.linalg.matrix_exp(exact_leaf)
    (gradient,) = torch.autograd.grad(exact, exact_leaf, upstream.double())
    gradient = (gradient - gradient.mT) / 2
    matrix = _Exponential.apply(leaf)
    assert (matrix - exact).abs().max() <= 8 * EPS * max(norm, 1)
    assert (matrix.mT @ matrix - torch.eye(b)).abs().max() <= 16 * EPS
    error = (torch.autograd.grad(matrix, leaf, upstream)[0] - gradient).abs().max()
    assert error <= 16 * EPS * max(norm, 1) * gradient.abs().max()


def test_exponential_without_reading_keeps_identity_nan_and_huge_norms() -> None:
    assert torch.equal(_Exponential.apply(torch.zeros(2, 5, 5)), torch.eye(5).expand(2, 5, 5))
    blocks = torch.stack([generators(4, 1.0)[0], torch.full((4, 4), torch.nan), generators(4, 1e30)[0]])
    matrices = _Exponential.apply(blocks)
    assert matrices[1].isnan().all()
    assert (matrices[[0, 2]].mT @ matrices[[0, 2]] - torch.eye(4)).abs().max() < 1e-5


@forward_mode
def test_exponential_without_reading_has_all_derivatives() -> None:
    upper = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)

    def apply(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        return lambda upper: function(skew(upper, 3))

    assert torch.autograd.gradcheck(apply(_Exponential.apply), upper)
    assert torch.autograd.gradgradcheck(apply(_Exponential.apply), upper)
    assert torch.autograd.gradcheck(apply(lambda x: _square_repeatedly(x, None)[0]), upper, check_forward_ad=True)
    blocks = skew(upper, 3).detach()
    assert torch.allclose(torch.vmap(_Exponential.apply)(blocks), torch.linalg.matrix_exp(blocks))


@pytest.mark.slow
def test_exponential_without_reading_compiles_into_one_graph() -> None:
    blocks = generators(4, 3.0).requires_grad_()
    compiled = torch.compile(lambda x: _Exponential.apply(x).square().cumsum(-1), fullgraph=True, backend="aot_eager")
    (gradient,) = torch.autograd.grad(compiled(blocks).sum(), blocks)
    (expected,) = torch.autograd.grad(_Exponential.apply(blocks).square().cumsum(-1).sum(), blocks)
    assert torch.allclose(gradient, expected, atol=1e-5)


@pytest.fixture
def tensor_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of float32 that round their operands to TensorFloat-32, and a setting that says so."""
    right_einsum, right_matmul = torch.einsum, torch.Tensor.__matmul__

    def rounded(x: Tensor) -> Tensor:
        scale = 2.0 ** (torch.floor(torch.log2(x.abs().clamp(min=1e-30))) - 10)
        return x + (torch.round(x / scale) * scale - x).detach() if x.dtype == torch.float32 else x

    monkeypatch.setattr(tensors, "_allows_rounding", lambda kind: True)
    monkeypatch.setattr(torch, "einsum", lambda equation, *xs: right_einsum(equation, *map(rounded, xs)))
    monkeypatch.setattr(torch.Tensor, "__matmul__", lambda x, y: right_matmul(rounded(x), rounded(y)))


@forward_mode
@pytest.mark.usefixtures("tensor_cores")
def test_exact_products_do_not_round_values_or_gradients() -> None:
    x, y = torch.randn(5, 1, 7, 8), torch.randn(3, 8, 6)
    exact = [z.double().requires_grad_() for z in (x, y)]
    leaves = [z.requires_grad_() for z in (x, y)]
    truth = exact[0] @ exact[1]
    assert (leaves[0] @ leaves[1] - truth).abs().max() > 1e-4
    product, upstream = exact_matmul(*leaves), torch.randn(5, 3, 7, 6)
    assert (product - truth).abs().max() < 2e-6
    expected = torch.autograd.grad(truth, exact, upstream.double())
    for actual, wanted in zip(torch.autograd.grad(product, leaves, upstream), expected, strict=True):
        assert (actual - wanted).abs().max() < 1e-5
    ones = [torch.ones_like(z) for z in exact]
    _, tangent = torch.func.jvp(exact_matmul, (x.detach(), y.detach()), tuple(z.float() for z in ones))
    _, wanted = torch.func.jvp(torch.matmul, tuple(z.detach() for z in exact), tuple(ones))
    assert (tangent - wanted).abs().max() < 1e-5


@pytest.mark.usefixtures("tensor_cores")
@pytest.mark.parametrize("name", ["liere:4", "comrope-ld:4", "string:4"])
def test_reference_does_not_round_under_a_lower_matmul_precision(name: str) -> None:
    encoding = tr.encodings.parse_encoding(name).rotary(num_axes=2, num_heads=2, head_dim=8)
    q, k, *upstream = torch.randn(4, 2, 2, 9, 8)

    def outcome(encoding: torch.nn.Module, dtype: torch.dtype) -> list[Tensor]:
        leaves = [x.to(dtype).requires_grad_() for x in (q, k)]
        rotated = tr.rotate(*leaves, encoding(tr.grid(3, 3, dtype=dtype)))
        sources = [*leaves, *encoding.parameters()]
        return [*rotated, *torch.autograd.grad(rotated, sources, [x.to(dtype) for x in upstream])]

    truth = outcome(copy.deepcopy(encoding).double(), torch.float64)
    for actual, expected in zip(under("reference", outcome, encoding, torch.float32), truth, strict=True):
        assert (actual - expected).abs().max() <= 2e-5 * max(1.0, expected.abs().max().item())


@pytest.mark.parametrize(("setting", "rounds"), [("highest", False), ("high", True), ("medium", True)])
def test_rounding_follows_the_setting(setting: str, rounds: bool) -> None:
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision(setting)
        assert tensors._allows_rounding("cuda") == rounds
    finally:
        torch.set_float32_matmul_precision(before)


def test_exact_products_compile_into_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = torch.randn(2, 3, 4, requires_grad=True), torch.randn(4, 5)
    monkeypatch.setattr(tensors, "_rounds_products", lambda x: True)
    compiled = torch.compile(lambda x: exact_einsum("...ij,jk->...ik", x, y), fullgraph=True, backend="aot_eager")
    assert torch.allclose(compiled(x), x @ y, atol=1e-6)
    assert torch.allclose(torch.autograd.grad(compiled(x).sum(), x)[0], y.sum(dim=-1).expand(2, 3, 4), atol=1e-6)
