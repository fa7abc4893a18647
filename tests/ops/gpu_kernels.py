"""Every Triton kernel against float64: values and all gradients, odd sizes, and memory that starts as NaN.

`test_gpu_kernels.py` runs this file; on a machine without a CUDA device in Triton's interpreter, in processes of its
own, because Triton decides for or against it when it is imported.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import accuracy
import pytest
import torch
from torch import Tensor

from torchrope.ops import gpu
from torchrope.ops.gpu.launch import in_one_program

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
# Largest error, as a share of the largest number of the truth, by the dtype of the result.
TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 5e-3, torch.float16: 6e-4}


@pytest.fixture(autouse=True)
def _checked() -> Iterator[None]:
    """Without a GPU: memory outside of tensors raises, and what a kernel forgets to write shows as NaN."""
    if not INTERPRETED:
        yield
        return
    from interpreted import checked

    with checked():
        yield


@pytest.fixture(params=["split", "one program"])
def rows(request: pytest.FixtureRequest) -> Iterator[None]:
    """Rows in programs of their own, as of small batches, or all in one, whose loop has many iterations."""
    with in_one_program() if request.param == "one program" else nullcontext():
        yield


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def vectors(
    batch: int, heads: tuple[int, int], tokens: int, channels: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """q and k as attention cuts them out of one projection: nothing but the channels is contiguous."""
    packed = normal(batch, tokens, sum(heads), channels, dtype=dtype).permute(0, 2, 1, 3)
    q, k = packed.split(heads, dim=1)
    return q, k


def assert_near(actual: Tensor, truth: Tensor, what: str, tolerance: float | None = None) -> None:
    assert actual.shape == truth.shape, what
    if not truth.numel():
        return
    assert torch.isfinite(actual).all(), f"{what}: not every number was written"
    error = (actual.double() - truth).abs().max().item()
    limit = (tolerance or TOLERANCE[actual.dtype]) * max(truth.abs().max().item(), 1e-3)
    assert error <= limit, f"{what}: error {error:.3g} exceeds {limit:.3g}"


def gradients(
    formula: Callable[..., tuple[Tensor, Tensor]], inputs: dict[str, Tensor], grads: tuple[Tensor, Tensor]
) -> tuple[tuple[Tensor, Tensor], dict[str, Tensor]]:
    """Outputs of a formula and its gradients in float64."""
    wide = {name: value.double().requires_grad_() for name, value in inputs.items()}
    outputs = formula(**wide)
    found = torch.autograd.grad(outputs, list(wide.values()), [grad.double() for grad in grads], allow_unused=True)
    zeros = (torch.zeros_like(value) for value in wide.values())
    filled = (grad if grad is not None else zero for grad, zero in zip(found, zeros, strict=True))
    return outputs, dict(zip(wide, filled, strict=True))


def spread(per_head: Tensor, x: Tensor) -> Tensor:
    """Give each group of heads of x its own rotation, `(sets, rotation heads, ...)` to `(sets, heads, ...)`."""
    return per_head.repeat_interleave(x.shape[1] // per_head.shape[1], dim=1)


def turn_pairs(x: Tensor, angles: Tensor, halves: bool = False) -> Tensor:
    """Turn the first channels of x counter-clockwise by angles `(sets, heads, tokens, pairs)`."""
    turning, zero_fraction = x.split([2 * angles.shape[-1], x.shape[-1] - 2 * angles.shape[-1]], dim=-1)
    cos, sin = angles.cos(), angles.sin()
    if halves:
        first, second = turning.chunk(2, dim=-1)
        return torch.cat([cos * first - sin * second, sin * first + cos * second, zero_fraction], -1)
    even, odd = turning.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.cat([torch.stack([cos * even - sin * odd, sin * even + cos * odd], -1).flatten(-2), zero_fraction], -1)


def marked(cases: dict[str, dict[str, Any]]) -> list[Any]:
    """The names of cases; Triton's interpreter is slow at large blocks."""
    return [pytest.param(name, marks=pytest.mark.slow if case["b"] > 16 else ()) for name, case in cases.items()]


PLANAR: dict[str, dict[str, Any]] = {
    "plain": dict(batch=2, heads=(2, 2), tokens=63, channels=16, axes=2, own=2, pairs=8),
    "grouped": dict(batch=3, heads=(6, 2), tokens=5, channels=8, axes=1, own=2, pairs=4),
    "shared-heads": dict(batch=2, heads=(3, 3), tokens=7, channels=12, axes=3, own=1, pairs=6),
    "own-positions": dict(batch=3, heads=(2, 2), tokens=9, channels=64, axes=2, own=2, pairs=32, sets=3),
    "rest": dict(batch=2, heads=(2, 2), tokens=5, channels=11, axes=4, own=2, pairs=3),
    "bf16": dict(batch=2, heads=(2, 1), tokens=33, channels=64, axes=2, own=1, pairs=32, dtype=torch.bfloat16),
    "fp16": dict(batch=2, heads=(2, 2), tokens=3, channels=8, axes=2, own=2, pairs=4, dtype=torch.float16),
    "one-token": dict(batch=1, heads=(2, 2), tokens=1, channels=8, axes=2, own=2, pairs=4),
    "no-token": dict(batch=2, heads=(2, 2), tokens=0, channels=8, axes=2, own=2, pairs=4),
    "no-sample": dict(batch=0, heads=(2, 2), tokens=3, channels=8, axes=2, own=2, pairs=4),
    "angles-grouped-rest": dict(batch=3, heads=(4, 2), tokens=5, channels=9, axes=0, own=2, pairs=3),
    "own-angles": dict(batch=3, heads=(1, 2), tokens=33, channels=64, axes=0, own=1, pairs=32, sets=3),
}


@pytest.mark.usefixtures("rows")
@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize("case", PLANAR)
def test_planar(case: str, halves: bool) -> None:
    sizes = {"sets": 1, "dtype": torch.float32} | PLANAR[case]
    q, k = vectors(*(sizes[name] for name in ("batch", "heads", "tokens", "channels", "dtype")))
    grads = normal(*q.shape, dtype=q.dtype), normal(*k.shape, dtype=k.dtype)
    of_tokens = (sizes["tokens"], sizes["axes"]) if sizes["axes"] else [sizes[x] for x in ("own", "tokens", "pairs")]
    positions, frequencies = normal(sizes["sets"], *of_tokens), normal(sizes["axes"], sizes["own"], sizes["pairs"])

    def formula(q: Tensor, k: Tensor, positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
        angles = torch.einsum("pta,ahi->phti", positions, frequencies) if sizes["axes"] else positions
        return turn_pairs(q, spread(angles, q), halves), turn_pairs(k, spread(angles, k), halves)

    truth, slopes = gradients(formula, dict(q=q, k=k, positions=positions, frequencies=frequencies), grads)
    outputs = gpu.rotate_planar(q, k, positions, frequencies, None, not halves)
    found = gpu.rotate_planar_backward(*grads, q, k, positions, frequencies, None, not halves, (True, True))
    assert_all_near(outputs, truth, found, slopes)
    assert outputs[0].dtype == q.dtype
    rest = slice(2 * sizes["pairs"], None)
    assert torch.equal(outputs[0][..., rest], q[..., rest])
    assert torch.equal(found[1][..., rest], grads[1][..., rest])
    alone = gpu.rotate_planar_backward(*grads, q, k, positions, frequencies, None, not halves, (False, False))
    assert not alone[2].numel()
    assert not alone[3].numel()
    assert_near(alone[0], slopes["q"], "gradient of q alone")


@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")  # by numpy, in the interpreter
@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize("axes", [0, 1])
def test_planar_numbers_that_are_not_finite_stay_in_their_token_and_pair(axes: int, halves: bool) -> None:
    """Those of a channel that is not rotated have no part in gradients to angles."""
    (q, k), positions = (x.clone() for x in vectors(2, (2, 2), 3, 6)), normal(*((1, 3, 1) if axes else (1, 2, 3, 2)))
    grads, given = (normal(*q.shape), normal(*k.shape)), (positions, normal(axes, 2, 2), None, not halves)

    def run() -> list[Tensor]:
        found = *gpu.rotate_planar(q, k, *given), *gpu.rotate_planar_backward(*grads, q, k, *given, (True, True))
        return [x[..., :4] for x in found]

    clean = run()
    q[..., 5], k[..., 4] = torch.nan, torch.inf
    if axes == 0:
        positions[0, 1, 2, 1] = torch.inf
    for one, other in zip(run(), clean, strict=True):
        bad = one[:, 1, 2].isnan().sum() if axes == 0 and one.numel() else 0
        assert bad == one.isnan().sum() == (0 if axes or not one.numel() else 1 if one.shape[-1] == 2 else 4)
        assert torch.equal(one[one.isfinite()], other[one.isfinite()])


def test_planar_angles_are_accurate_far_from_the_origin() -> None:
    q, k = vectors(1, (1, 1), 16, 4)
    positions = torch.full((1, 16, 1), 20000.0, device=DEVICE)
    frequencies = torch.tensor([[[1.0, 0.5]]], device=DEVICE)  # exact products: what errs is the sine alone
    angles = torch.einsum("pta,ahi->phti", positions.double(), frequencies.double())
    assert_near(gpu.rotate_planar(q, k, positions, frequencies, None, True)[0], turn_pairs(q.double(), angles), "q")


def assert_all_near(
    outputs: tuple[Tensor, Tensor], truth: tuple[Tensor, Tensor], found: Any, slopes: dict[str, Tensor]
) -> None:
    for name, actual, expected in zip("qk", outputs, truth, strict=True):
        assert_near(actual, expected, f"rotated {name}")
    for (name, expected), actual in zip(slopes.items(), found, strict=True):
        assert_near(actual, expected, f"gradient of {name}")


BLOCK: dict[str, dict[str, Any]] = {
    "b2": dict(batch=2, heads=(2, 2), tokens=63, blocks=4, b=2, own=2),
    "b3-grouped-rest": dict(batch=3, heads=(4, 2), tokens=5, blocks=3, b=3, own=2, rest=2),
    "b4-own-tables": dict(batch=3, heads=(2, 2), tokens=5, blocks=4, b=4, own=1, sets=3),
    "b8": dict(batch=2, heads=(2, 2), tokens=9, blocks=8, b=8, own=2),
    "b8-bf16-products": dict(batch=37, heads=(2, 1), tokens=2, blocks=5, b=8, own=1, dtype=torch.bfloat16, rest=3),
    "b5-fp16-products": dict(batch=17, heads=(2, 2), tokens=1, blocks=3, b=5, own=2, dtype=torch.float16),
    "b16-products": dict(batch=35, heads=(1, 1), tokens=2, blocks=2, b=16, own=1),
    "b16-bf16": dict(batch=2, heads=(1, 1), tokens=3, blocks=2, b=16, own=1, dtype=torch.bfloat16),
    "b8-products": dict(batch=70, heads=(1, 1), tokens=1, blocks=3, b=8, own=1),
    "b24-products": dict(batch=9, heads=(2, 2), tokens=1, blocks=1, b=24, own=1),
    "b32": dict(batch=2, heads=(1, 1), tokens=2, blocks=2, b=32, own=1),
    "b64-bf16-products": dict(batch=40, heads=(2, 2), tokens=2, blocks=1, b=64, own=2, dtype=torch.bfloat16),
    "b128": dict(batch=2, heads=(1, 1), tokens=1, blocks=1, b=128, own=1),
    "one-token": dict(batch=1, heads=(2, 2), tokens=1, blocks=2, b=4, own=2),
    "no-token": dict(batch=2, heads=(2, 2), tokens=0, blocks=2, b=4, own=2),
    "no-sample": dict(batch=0, heads=(2, 2), tokens=3, blocks=2, b=4, own=2),
}


@pytest.mark.usefixtures("rows")
@pytest.mark.parametrize("case", marked(BLOCK))
def test_block(case: str) -> None:
    sizes = {"sets": 1, "rest": 0, "dtype": torch.float32} | BLOCK[case]
    blocks, b = sizes["blocks"], sizes["b"]
    q, k = vectors(sizes["batch"], sizes["heads"], sizes["tokens"], blocks * b + sizes["rest"], sizes["dtype"])
    grads = normal(*q.shape, dtype=q.dtype), normal(*k.shape, dtype=k.dtype)
    outer = (sizes["sets"], sizes["own"], sizes["tokens"], blocks)
    table = torch.linalg.qr(normal(*outer, b, b))[0].mT if min(outer) else normal(*outer, b, b)

    def formula(q: Tensor, k: Tensor, tangent: Tensor) -> tuple[Tensor, Tensor]:
        turn = skew(tangent, b).matrix_exp() @ table.double()
        return turn_blocks(q, spread(turn, q)), turn_blocks(k, spread(turn, k))

    at_rest = normal(*outer, b * (b - 1) // 2) * 0
    truth, slopes = gradients(formula, dict(q=q, k=k, tangent=at_rest), grads)
    assert_all_near(
        gpu.rotate_block(q, k, table, table.new_empty(0)),
        truth,
        gpu.rotate_block_backward(*grads, q, k, table, True),
        slopes,
    )
    dq, dk, unwanted = gpu.rotate_block_backward(*grads, q, k, table, False)
    assert not unwanted.numel()
    assert_near(dq, slopes["q"], "gradient of q alone")
    assert_near(dk, slopes["k"], "gradient of k alone")
    rest = slice(blocks * b, None)
    assert torch.equal(gpu.rotate_block(q, k, table, table.new_empty(0))[1][..., rest], k[..., rest])


def skew(upper: Tensor, b: int) -> Tensor:
    rows, columns = torch.triu_indices(b, b, 1, device=upper.device)
    square = upper.new_zeros(*upper.shape[:-1], b * b).index_copy(-1, rows * b + columns, upper)
    return square.unflatten(-1, (b, b)) - square.unflatten(-1, (b, b)).mT


def turn_blocks(x: Tensor, turn: Tensor) -> Tensor:
    """Multiply blocks of channels by matrices `(sets, heads, tokens, blocks, b, b)`."""
    size = turn.shape[-3] * turn.shape[-1]
    columns = x[..., :size].unflatten(-1, turn.shape[-3:-1])
    return torch.cat([(turn @ columns.unsqueeze(-1)).flatten(-3), x[..., size:]], dim=-1)


SKEW_EXP: dict[str, dict[str, Any]] = {
    "b2": dict(tokens=9, axes=1, heads=1, blocks=1, b=2),
    "b3-own-positions": dict(sets=2, tokens=1, axes=3, heads=2, blocks=2, b=3),
    "b4": dict(tokens=3, axes=4, heads=2, blocks=1, b=4),
    "b8": dict(tokens=3, axes=2, heads=1, blocks=3, b=8),
    "b16": dict(tokens=2, axes=2, heads=1, blocks=1, b=16),
    "b17": dict(tokens=2, axes=2, heads=1, blocks=1, b=17),
    "b32": dict(tokens=2, axes=2, heads=1, blocks=1, b=32),
    "b48": dict(tokens=2, axes=1, heads=1, blocks=1, b=48),
    "b64": dict(tokens=2, axes=1, heads=1, blocks=1, b=64),
    "batch": dict(tokens=1, axes=1, heads=7, blocks=1, b=5),
    "no-token": dict(tokens=0, axes=2, heads=2, blocks=2, b=4),
}


@pytest.mark.parametrize(
    ("case", "norm"),
    [pytest.param(*case.values, 20.0, marks=case.marks) for case in marked(SKEW_EXP)]
    + [("b8", 0.3), pytest.param("b32", 0.3, marks=pytest.mark.slow)],
)
def test_skew_exp(case: str, norm: float) -> None:
    sizes = {"sets": 1} | SKEW_EXP[case]
    positions = normal(sizes["sets"], sizes["tokens"], sizes["axes"])
    generators = skew_of_norm(norm, sizes["axes"], sizes["heads"], sizes["blocks"], sizes["b"])
    b = sizes["b"]
    tangent = normal(sizes["sets"], sizes["heads"], sizes["tokens"], sizes["blocks"], b * (b - 1) // 2)

    wide_p, wide_g = positions.double().requires_grad_(), generators.double().requires_grad_()
    truth = torch.einsum("pta,ahnij->phtnij", wide_p, wide_g).contiguous().matrix_exp()
    # The tangent T is the gradient to the upper triangle of Ω in exp(Ω) R, so  dR = skew(T) R / 2  gives it back.
    slope = skew(tangent.double(), b) @ truth.detach() / 2
    slopes = torch.autograd.grad(truth, (wide_g, wide_p), slope)
    assert_near(gpu.exp_generators(positions, generators), truth, "rotation", tolerance=2e-6 * max(norm, 1))
    found = gpu.exp_generators_backward(positions, generators, tangent, True)
    assert_near(found[0], slopes[1], "gradient of positions", tolerance=5e-6 * max(norm, 1))
    assert_near(found[1], (slopes[0] - slopes[0].mT) / 2, "gradient of generators", tolerance=5e-6 * max(norm, 1))
    assert not gpu.exp_generators_backward(positions, generators, tangent, False)[0].numel()


def skew_of_norm(norm: float, *shape: int) -> Tensor:
    """Random skew blocks `(*shape, b)` of about this spectral norm."""
    square = normal(*shape, shape[-1])
    square = square - square.mT
    return (
        square * (norm / torch.linalg.matrix_norm(square, 2).clamp(min=1e-6))[..., None, None] if min(shape) else square
    )


@pytest.mark.parametrize("norm", [1e-6, 1e-3, 1.0, 30.0, 1e3])
@pytest.mark.parametrize("b", [3, 8, pytest.param(32, marks=pytest.mark.slow)])
def test_skew_exp_errs_at_most_twice_as_much_as_torch(b: int, norm: float) -> None:
    generators = skew_of_norm(norm, 1, 3, 1, b)
    one = torch.ones(1, 1, 1, device=DEVICE)
    truth, identity = generators.double().matrix_exp().squeeze(), torch.eye(b, device=DEVICE).double()
    actual, peer = gpu.exp_generators(one, generators).squeeze().double(), generators.matrix_exp().squeeze().double()
    for what, error in {"exp": lambda r: r - truth, "orthogonality": lambda r: r.mT @ r - identity}.items():
        assert error(actual).abs().max() <= 2 * error(peer).abs().max() + 1e-7, what


@pytest.mark.parametrize("power", [3, 7, 12, 37])
@pytest.mark.parametrize("b", [3, 16])
def test_skew_exp_is_orthogonal_at_any_norm(b: int, power: int) -> None:
    generators = skew_of_norm(10.0**power, 1, 2, 1, b)
    table = gpu.exp_generators(torch.ones(1, 1, 1, device=DEVICE), generators).double()
    assert_near((table.mT @ table).float(), torch.eye(b, device=DEVICE).expand_as(table).double(), "R^T R", 1e-5)
    tangent = normal(1, 2, 1, 1, b * (b - 1) // 2)
    _, gradient = gpu.exp_generators_backward(torch.ones(1, 1, 1, device=DEVICE), generators, tangent, False)
    assert torch.linalg.matrix_norm(gradient).max() <= 1.1 * torch.linalg.matrix_norm(skew(tangent, b)).max()


@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")  # by numpy, in the interpreter
@pytest.mark.parametrize("value", [torch.nan, torch.inf, 1e30])
@pytest.mark.parametrize("b", [2, pytest.param(8, marks=pytest.mark.slow)])
def test_skew_exp_of_tokens_is_independent(b: int, value: float) -> None:
    positions, generators = normal(1, 4, 2), skew_of_norm(1.0, 2, 1, 2, b)
    tangent = normal(1, 1, 4, 2, b * (b - 1) // 2)
    clean = gpu.exp_generators(positions, generators)
    clean_slope = gpu.exp_generators_backward(positions, generators, tangent, True)[0]
    positions[0, 2, 1] = value
    dirty = gpu.exp_generators(positions, generators)
    dirty_slope = gpu.exp_generators_backward(positions, generators, tangent, True)[0]
    others = [0, 1, 3]
    assert_near(dirty[:, :, others], clean[:, :, others].double(), "other tokens")
    assert_near(dirty_slope[:, others], clean_slope[:, others].double(), "gradients of other positions")
    assert dirty[:, :, 2].isfinite().all() == (value == 1e30)
    assert dirty_slope[:, 2].isfinite().all() == (value == 1e30)
    positions[0, 2, 1], tangent[0, 0, 2, 1] = 1.0, value
    dirty_slope = gpu.exp_generators_backward(positions, generators, tangent, True)[0]
    assert_near(dirty_slope[:, others], clean_slope[:, others].double(), "gradients of other positions")


def test_skew_exp_of_zero_is_exactly_the_identity() -> None:
    table = gpu.exp_generators(normal(1, 3, 2), torch.zeros(2, 2, 1, 6, 6, device=DEVICE))
    assert torch.equal(table, torch.eye(6, device=DEVICE).expand_as(table))


@pytest.mark.parametrize("b", [2, 6, 8, 16, *(pytest.param(b, marks=pytest.mark.slow) for b in (4, 12, 24, 64))])
def test_planes_of_blocks_of_any_rank(b: int) -> None:
    kinds = list(accuracy.KINDS)
    if INTERPRETED and b > 8:  # a second each
        kinds = ["rank 4"] if b == 64 else ["rank 2", "30 % left", "repeated frequencies"]
    for kind in kinds:
        base = accuracy.KINDS[kind](1 if INTERPRETED else 100, b).float().to(DEVICE)
        turn, angular = (x.double() for x in gpu.skew_eig(base))
        inside = torch.zeros_like(turn)
        even = torch.arange(0, b, 2, device=DEVICE)
        inside[:, even + 1, even], inside[:, even, even + 1] = angular, -angular
        assert (angular >= 0).all(), kind
        assert_near((turn @ turn.mT).float(), torch.eye(b, device=DEVICE).expand_as(turn).double(), f"U U^T, {kind}")
        assert_near((turn @ inside @ turn.mT).float(), base.double(), f"U diag(w) U^T, {kind}")


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_planes_of_blocks_are_independent(value: float) -> None:
    base = accuracy.KINDS["full"](3, 8).float().to(DEVICE)
    clean = gpu.skew_eig(base)
    base[1, 2, 5] = value
    for one, other in zip(gpu.skew_eig(base), clean, strict=True):
        assert one[1].isnan().all()
        assert torch.equal(one[::2], other[::2])
    assert gpu.skew_eig(base[:0])[0].shape == (0, 8, 8)


BASIS: dict[str, dict[str, Any]] = {
    "b2": dict(batch=1, heads=(1, 0), tokens=33, axes=2, own=1, blocks=4, b=2),
    "b4-grouped-rest": dict(batch=2, heads=(4, 2), tokens=2, axes=3, own=2, blocks=3, b=4, rest=3),
    "b8": dict(batch=2, heads=(2, 2), tokens=3, axes=2, own=1, blocks=4, b=8),
    "b8-own-positions": dict(batch=2, heads=(2, 2), tokens=2, axes=4, own=1, blocks=5, b=8, sets=2),
    "b8-bf16": dict(batch=17, heads=(2, 2), tokens=1, axes=2, own=1, blocks=5, b=8, dtype=torch.bfloat16),
    "b12-fp16": dict(batch=2, heads=(2, 1), tokens=2, axes=2, own=1, blocks=3, b=12, dtype=torch.float16),
    "b4-one-token": dict(batch=100, heads=(1, 1), tokens=1, axes=1, own=1, blocks=2, b=4),
    "b4-many-rest": dict(batch=17, heads=(2, 2), tokens=3, axes=2, own=2, blocks=3, b=4, rest=2),
    "b8-many-own-positions": dict(batch=2, heads=(16, 16), tokens=2, axes=2, own=1, blocks=5, b=8, sets=2),
    "b32": dict(batch=2, heads=(1, 1), tokens=2, axes=1, own=1, blocks=2, b=32),
    "b64-many": dict(batch=17, heads=(1, 1), tokens=2, axes=2, own=1, blocks=1, b=64),
    "b64": dict(batch=2, heads=(1, 1), tokens=2, axes=2, own=1, blocks=1, b=64),
    "no-token": dict(batch=2, heads=(2, 2), tokens=0, axes=2, own=2, blocks=2, b=4),
    "no-sample": dict(batch=0, heads=(2, 2), tokens=3, axes=2, own=2, blocks=2, b=4),
}
FREQUENCIES: dict[str, Callable[[Tensor], Tensor]] = {
    "apart": lambda w: w,
    "equal": lambda w: torch.full_like(w, 0.7),
    "zero": torch.zeros_like,
    "near": lambda w: 0.7 + 1e-3 * w,
}


@pytest.mark.usefixtures("rows")
@pytest.mark.parametrize(
    ("case", "spectrum"),
    [pytest.param(*case.values, "apart", marks=case.marks) for case in marked(BASIS)]
    + [("b8", other) for other in ("equal", "zero", "near")],
)
def test_basis(case: str, spectrum: str) -> None:
    sizes = {"sets": 1, "rest": 0, "dtype": torch.float32} | BASIS[case]
    blocks, b, own = sizes["blocks"], sizes["b"], sizes["own"]
    q, k = vectors(sizes["batch"], sizes["heads"], sizes["tokens"], blocks * b + sizes["rest"], sizes["dtype"])
    grads = normal(*q.shape, dtype=q.dtype), normal(*k.shape, dtype=k.dtype)
    positions = normal(sizes["sets"], sizes["tokens"], sizes["axes"])
    coefficients = normal(sizes["axes"], own, blocks)
    turn, _ = torch.linalg.qr(normal(own, blocks, b, b))
    angular = FREQUENCIES[spectrum](normal(own, blocks, b // 2))
    planes = torch.zeros(own, blocks, b, b, dtype=torch.float64, device=DEVICE)
    even = torch.arange(0, b, 2, device=DEVICE)
    planes[..., even + 1, even], planes[..., even, even + 1] = angular.double(), -angular.double()
    base = turn.double() @ planes @ turn.double().mT

    def formula(q: Tensor, k: Tensor, positions: Tensor, coefficients: Tensor, base: Tensor) -> tuple[Tensor, Tensor]:
        along = torch.einsum("pta,ahn->phtn", positions, coefficients)
        rotation = (along[..., None, None] * base.unsqueeze(1)).contiguous().matrix_exp()
        return turn_blocks(q, spread(rotation, q)), turn_blocks(k, spread(rotation, k))

    inputs = dict(q=q, k=k, positions=positions, coefficients=coefficients, base=base)
    truth, slopes = gradients(formula, inputs, grads)
    slopes["base"] = (slopes["base"] - slopes["base"].mT) / 2
    given = positions, coefficients, turn.contiguous(), angular
    found = gpu.rotate_basis_backward(*grads, q, k, *given, True, (True, True, True))
    of_base = positions, coefficients, base.float(), turn.contiguous(), angular
    assert_all_near(gpu.rotate_basis(q, k, *of_base, True), truth, found, slopes)
    if case == "b4-grouped-rest":
        assert gpu.rotate_basis_backward(*grads, q, k, *given, True, (False, True, True))[2].numel() == 0


def test_basis_of_blocks_that_never_turn_passes_bit_identically() -> None:
    positions, base, factors = normal(5, 3), normal(2, 2, 4, 4), normal(3, 2, 2)
    base, factors[:, 0, 0] = base - base.mT, 0
    base[1, 1] = 0
    for batch in (2, 20):
        x = normal(batch, 4, 5, 10)
        still = gpu.rotate_basis(x, x, positions, factors, base, *gpu.skew_eig(base), True)[0]
        assert torch.equal(still[:, :2, :, :4], x[:, :2, :, :4])
        assert torch.equal(still[:, 2:, :, 4:], x[:, 2:, :, 4:])
        assert not torch.equal(still[:, :2, :, 4:8], x[:, :2, :, 4:8])
