"""Every public way into a Triton kernel, against the reference: values and gradients, and memory checked.

`test_gpu_kernels.py` runs this file in Triton's interpreter, in a process of its own, because Triton decides for or
against it when it is imported.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from interpreted import LAUNCHED, checked
from torch import Tensor
from triton.runtime.errors import InterpreterError
from triton.runtime.interpreter import InterpreterBuilder

import torchrope as tr

HEADS, TOKENS, HEAD_DIM = 2, 3, 8
SHAPE: dict[str, Any] = dict(num_axes=2, num_heads=HEADS, head_dim=HEAD_DIM)
Outputs = Iterable[Tensor]


# A few kernels use booleans in a way that the interpreter of Triton 3.2 lacks.
booleans = pytest.mark.skipif(
    not hasattr(InterpreterBuilder, "get_int1_ty"), reason="this interpreter of Triton has no constants of booleans"
)


def normal(*shape: int) -> Tensor:
    return torch.randn(shape).requires_grad_()


def vectors(batch: int = 2, heads: int = HEADS) -> Tensor:
    """Queries or keys as a packed projection gives them: nothing but the channels is contiguous."""
    return torch.randn(batch, TOKENS, 3, heads, HEAD_DIM).permute(2, 0, 3, 1, 4)[1].requires_grad_()


def compare(run: Callable[[], Outputs], inputs: Iterable[Tensor], kernels: set[str], tolerance: float = 2e-5) -> None:
    """Hold outputs and gradients by Triton against the reference; the kernels named must be among those launched."""
    inputs = list(inputs)
    with tr.backend("reference"):
        expected = results(run, inputs)
    LAUNCHED.clear()
    with checked(), tr.backend("triton"):
        found = results(run, inputs)
    assert kernels <= LAUNCHED
    assert len(found) == len(expected)
    for actual, truth in zip(found, expected, strict=True):
        torch.testing.assert_close(actual, truth, rtol=0, atol=tolerance * max(1, float(truth.abs().max())))


def results(run: Callable[[], Outputs], inputs: list[Tensor]) -> list[Tensor]:
    """Return outputs, and gradients of a weighted sum of them."""
    torch.manual_seed(1)
    outputs = list(run())
    weighted = [(x * torch.linspace(-1, 2, x.numel()).view(x.shape)).sum() for x in outputs]
    gradients = torch.autograd.grad(sum(weighted), inputs, allow_unused=True)
    return [x.detach() for x in (*outputs, *gradients) if x is not None]


def encoding_of(family: str, num_axes: int = 2, heads: int = HEADS, head_dim: int = HEAD_DIM) -> Any:
    shape = dict(num_axes=num_axes, num_heads=heads, head_dim=head_dim)
    made = {
        "planar": partial(tr.MixedRoPE, shared_heads=True),
        "partial": partial(tr.MixedRoPE, rotary_dim=6),
        "halves": tr.MixedRoPE,
        "block": partial(tr.LieRE, block_size=4),
        "basis": partial(tr.ComRoPELD, block_size=4, shared_heads=True),
        "string": partial(tr.STRING, block_size=4),
    }[family](**shape)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_()
    return made


ROTATES = {
    **dict.fromkeys(("planar", "partial", "halves", "string"), ("planar._rotate_kernel", "planar._rotate_kernel BACK")),
    "block": ("block._rotate_sums_kernel", "block._rotate_sums_kernel BACK tangent"),
    "basis": ("basis._rotate_kernel", "basis._rotate_kernel BACK"),
}


def launched(family: str) -> set[str]:
    exponentials = {"exponential._exp_kernel", "exponential._exp_kernel tangent"}
    of_encoding = {"block": exponentials, "basis": {"decomposition._decompose_kernel"}}
    return {*ROTATES[family], *of_encoding.get(family, ())}


def rotation_of(family: str, encoding: Any, positions: Tensor) -> Any:
    rotation = encoding(positions)
    return rotation.in_halves() if family == "halves" else rotation


def one(rotate: Callable[..., Any], x: Tensor, k: Tensor) -> Outputs:
    return [tr.apply(x, rotate())]


def both(rotate: Callable[..., Any], q: Tensor, k: Tensor) -> Outputs:
    return tr.rotate(q, k, rotate())


def keys_elsewhere(rotate: Callable[..., Any], q: Tensor, k: Tensor) -> Outputs:
    return tr.rotate(q, k, rotate(), key_rotation=rotate(1.5))


def scores(rotate: Callable[..., Any], q: Tensor, k: Tensor) -> Outputs:
    rotated_q, rotated_k = tr.rotate(q, k, rotate(), scores_only=True)
    return [rotated_q @ rotated_k.mT]


def tokens_first(rotate: Callable[..., Any], q: Tensor, k: Tensor) -> Outputs:
    return tr.rotate(q.transpose(1, 2), k.transpose(1, 2), rotate(), layout="bthd")


SHARED, EACH = (TOKENS, 2), (2, TOKENS, 2)
# Triton's interpreter takes up to a second for one of these: those that differ in what they show.
QUICK = {
    "partial": {"2 queries, 3 keys", "one"},
    "halves": {"one", "tokens first"},
    "block": {"one", "2 queries, 3 keys", "both, each sample's positions"},
    "basis": {"one", "keys elsewhere", "2 queries, 3 keys"},
    "string": {"one", "2 queries, 1 key"},
}
CALLS: dict[str, tuple[Callable[..., Outputs], tuple[int, ...], tuple[int, int], int]] = {
    "one": (one, SHARED, (2, 2), HEADS),
    "one, each sample's positions": (one, EACH, (2, 2), HEADS),
    "both, each sample's positions": (both, EACH, (2, 2), HEADS),
    "keys elsewhere": (keys_elsewhere, SHARED, (2, 2), HEADS),
    "2 queries, 1 key": (both, SHARED, (2, 1), HEADS),
    "2 queries, 3 keys": (both, SHARED, (2, 3), HEADS),
    "1 query, 2 keys": (both, SHARED, (1, 2), HEADS),
    "grouped heads": (both, SHARED, (1, 1), 2 * HEADS),
    "tokens first": (tokens_first, SHARED, (1, 1), HEADS),
    "scores": (scores, SHARED, (1, 1), HEADS),
}


@pytest.mark.parametrize(
    ("family", "call"),
    [
        pytest.param(
            family,
            call,
            marks=[
                *([] if call in QUICK.get(family, CALLS) else [pytest.mark.slow]),
                *([booleans] if family == "block" else []),
            ],
        )
        for family in ROTATES
        for call in CALLS
    ],
)
def test_rotations(family: str, call: str) -> None:
    run, shape, (queries, keys), heads = CALLS[call]
    encoding, positions = encoding_of(family), normal(*shape)
    q, k = vectors(queries, heads), vectors(keys)

    def rotate(factor: float = 1.0) -> Any:
        return rotation_of(family, encoding, factor * positions)

    kernels = launched(family)
    compare(lambda: run(rotate, q, k), [q, k, positions, *encoding.parameters()], kernels)


@booleans
def test_skew_exp() -> None:
    square = normal(3, 5, 5)
    compare(lambda: [tr.ops.skew_exp(square - square.mT)], [square], {"exponential._exp_kernel"})


@triton.jit
def copy_kernel(x, out, size, stride, MASKED: tl.constexpr):
    at = tl.arange(0, 8)
    inside = (at < size) | (not MASKED)
    tl.store(out + at, tl.load(x + at * stride, mask=inside, other=0.0), mask=inside)


@booleans
def test_memory_outside_of_tensors_is_reported() -> None:
    x, out = torch.zeros(16)[:14:2], torch.zeros(7)
    with checked():
        copy_kernel[(1,)](x, out, 7, 2, MASKED=True)
        with pytest.raises(InterpreterError, match="loads element 14 of x, whose elements are among 0 to 12"):
            copy_kernel[(1,)](x, out, 7, 2, MASKED=False)
        with pytest.raises(InterpreterError, match="loads element 1 of x"):  # between its elements
            copy_kernel[(1,)](x, out, 7, 1, MASKED=True)
        with pytest.raises(InterpreterError, match="stores element 0 of out, which has no elements"):
            copy_kernel[(1,)](x, out[:0], 7, 2, MASKED=True)
        assert torch.empty(3).isnan().all()
        assert torch.empty_like(x).isnan().all()
        assert x.new_empty(3).isnan().all()


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("shape", [(TOKENS, 3), (HEADS, TOKENS, 3), (2, 1, TOKENS, 3), (2, HEADS, TOKENS, 3)])
def test_given_angles(shape: tuple[int, ...], learned: bool) -> None:
    q, k, angles = vectors(), vectors(), torch.randn(shape).requires_grad_(learned)
    rotation = partial(tr.rotations.from_angles, angles, head_dim=HEAD_DIM)
    inputs = [q, k, angles] if learned else [q, k]
    compare(lambda: tr.rotate(q, k, rotation()), inputs, {"planar._rotate_kernel", "planar._rotate_kernel BACK"})


@pytest.mark.parametrize(
    ("family", "dtype"), [("block", torch.float32), ("basis", torch.float32), ("planar", torch.bfloat16)]
)
def test_bfloat16_of_the_stock_interpreter_is_refused(family: str, dtype: torch.dtype) -> None:
    q = torch.randn(1, HEADS, TOKENS, HEAD_DIM).to(dtype)
    with tr.backend("triton"), pytest.raises(ValueError, match="interpreter multiplies the bits of bfloat16"):
        tr.apply(q, encoding_of(family)(torch.randn(TOKENS, 2)))
