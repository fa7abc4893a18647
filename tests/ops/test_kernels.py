"""CPU kernels: every property of the reference, in every dtype, layout and size."""

import copy
import hashlib
import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import parity
import pytest
import torch
from parity import (
    FAMILIES,
    LAYOUTS,
    assert_as_good,
    assert_same_bits,
    build,
    error,
    judge,
    make_inputs,
    mixed_dtypes,
    outcome,
    truth_of,
    under,
)

import torchrope as tr
from torchrope.ops import native
from torchrope.rotations import Block

pytestmark = pytest.mark.skipif(native.LIBRARY is None, reason="no kernels were built for this machine")

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64

# Every block size, number of axes, number of tokens and dtype, and each family's risky pairs.
SIZES = [
    ("axial", 2, 1, 1000, F32),
    ("axial", 2, 4, 63, F16),
    ("mixed", 2, 1, 0, F32),
    ("mixed", 2, 2, 197, F32),
    ("mixed", 2, 3, 63, BF16),
    ("mixed", 2, 4, 1000, F16),
    ("halves", 2, 1, 0, F32),
    ("halves", 2, 2, 197, F32),
    ("halves", 2, 3, 63, BF16),
    ("halves", 2, 4, 1000, F16),
    ("liere", 2, 3, 197, BF16),
    ("liere", 3, 1, 1000, F32),
    ("liere", 3, 2, 63, F16),
    ("liere", 4, 2, 197, F32),
    ("liere", 4, 3, 1, BF16),
    ("liere", 8, 4, 197, BF16),
    ("liere", 8, 2, 1000, F32),
    ("liere", 8, 1, 0, F16),
    ("liere", 16, 1, 197, F16),
    ("liere", 16, 3, 63, F32),
    ("liere", 32, 2, 63, F32),
    ("liere", 48, 4, 63, BF16),
    pytest.param("liere", 64, 2, 197, F32, marks=pytest.mark.slow),
    ("liere", 64, 1, 1, F16),
    ("liere", 64, 3, 0, F32),
    ("ap", 2, 2, 63, F32),
    ("ap", 3, 4, 197, F32),
    ("ap", 4, 3, 1000, BF16),
    ("ap", 8, 2, 1000, F32),
    ("ap", 8, 4, 1, F32),
    ("ap", 16, 1, 63, F16),
    ("ap", 32, 2, 63, F32),
    ("ap", 48, 1, 63, F32),
    ("ap", 64, 3, 1, BF16),
    ("ld", 2, 1, 197, F16),
    ("ld", 3, 2, 63, BF16),
    ("ld", 4, 2, 197, F32),
    ("ld", 8, 1, 63, BF16),
    ("ld", 8, 3, 1000, F32),
    ("ld", 8, 2, 0, F32),
    ("ld", 16, 4, 197, F32),
    ("ld", 32, 1, 63, F16),
    ("ld", 48, 2, 1, F32),
    pytest.param("ld", 64, 2, 63, F32, marks=pytest.mark.slow),
    # between the sizes that compilers unroll
    ("liere", 5, 2, 9, F32),
    ("liere", 7, 1, 33, F32),
    ("liere", 9, 2, 9, F32),
    ("ld", 6, 2, 33, F32),
    ("ld", 10, 2, 9, F32),
    ("ap", 12, 2, 9, F16),
]

KINDS = [("mixed", 2), ("halves", 2), ("ld", 8), ("liere", 4)]
"""Planar rotations of both pair layouts, a commuting one and one of free blocks."""


@pytest.mark.parametrize(("family", "b", "axes", "tokens", "dtype"), SIZES)
def test_values_and_gradients_are_as_accurate_as_the_reference(
    family: str, b: int, axes: int, tokens: int, dtype: torch.dtype
) -> None:
    encoding = build(family, b, axes, heads=1 if b >= 48 else 2)
    judge(encoding, make_inputs(encoding, tokens, dtype))


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("family", "b"), KINDS)
def test_kernels_accept_any_strides(family: str, b: int, layout: str, dtype: torch.dtype) -> None:
    encoding = build(family, b, 2)
    for upstream in ("dense", layout):
        judge(encoding, make_inputs(encoding, 19, dtype, batch=(3,), layout=layout, upstream_layout=upstream))


@pytest.mark.parametrize("sets", [(), (1,), (3,)])
@pytest.mark.parametrize("heads", [(2, 2), (6, 2), (2, 1), (6, 6)])
@pytest.mark.parametrize(("family", "b"), KINDS)
def test_heads_may_be_grouped_or_shared_and_positions_per_sample(
    family: str, b: int, heads: tuple[int, int], sets: tuple[int, ...]
) -> None:
    shared = heads == (6, 6)
    encoding = build(family, b, 2, heads=6 if shared else heads[1], shared_heads=shared)
    judge(encoding, make_inputs(encoding, 9, batch=(3,), heads=heads, sets=sets))


@pytest.mark.parametrize("dtype", [F32, BF16, F16])
@pytest.mark.parametrize(("family", "b"), [*KINDS, ("ap", 4), ("liere", 3)])
def test_channels_beyond_rotary_dim_pass(family: str, b: int, dtype: torch.dtype) -> None:
    rotary = 4 * b
    size = {} if b == 2 else {"block_size": b}
    encoding = FAMILIES[family](num_axes=2, num_heads=2, head_dim=rotary + 5, rotary_dim=rotary, **size)
    judge(encoding, make_inputs(encoding, 9, dtype))


@pytest.mark.parametrize("sets", [(), (2,)])
@pytest.mark.parametrize("key_tokens", [0, 4, 70])
@pytest.mark.parametrize(("family", "b"), KINDS)
def test_keys_may_have_other_positions(family: str, b: int, key_tokens: int, sets: tuple[int, ...]) -> None:
    encoding = build(family, b, 2)
    judge(encoding, make_inputs(encoding, 9, sets=sets, key_tokens=key_tokens))


@pytest.mark.parametrize("tokens", [0, 5])
@pytest.mark.parametrize(
    ("batch", "sets"),
    [((), ()), ((0,), ()), ((0,), (0,)), ((4, 3), ()), ((4, 3), (1,)), ((4, 3), (3,)), ((2, 4, 3), (3,))],
)
@pytest.mark.parametrize(("family", "b"), KINDS)
def test_kernels_accept_any_leading_dimensions(
    family: str, b: int, batch: tuple[int, ...], sets: tuple[int, ...], tokens: int
) -> None:
    encoding = build(family, b, 1)
    judge(encoding, make_inputs(encoding, tokens, batch=batch, sets=sets))


@pytest.mark.parametrize(("family", "b"), KINDS)
def test_queries_and_keys_keep_their_dtypes(family: str, b: int) -> None:
    encoding = build(family, b, 2)
    judge(encoding, mixed_dtypes(make_inputs(encoding, 9, F32), BF16))


def test_rotating_empty_tensors_returns_empty_tensors() -> None:
    for family, b in KINDS:
        size = {} if b == 2 else {"block_size": b}
        encoding = FAMILIES[family](num_axes=2, num_heads=2, head_dim=5, rotary_dim=0, **size)
        judge(encoding, make_inputs(encoding, 9))


@pytest.mark.parametrize(
    ("family", "b", "names"),
    [
        ("axial", 2, {"torchrope_planar"}),
        ("mixed", 2, {"torchrope_planar"}),
        ("ld", 8, {"torchrope_basis", "torchrope_skew_eig"}),
        ("ap", 4, {"torchrope_basis", "torchrope_skew_eig"}),
        ("ap", 3, {"torchrope_skew_exp", "torchrope_block"}),
        ("liere", 8, {"torchrope_skew_exp", "torchrope_block"}),
    ],
)
def test_auto_backend_uses_kernels(family: str, b: int, names: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    called = set()
    run = native._run
    monkeypatch.setattr(native, "_run", lambda name, *args: called.add(name) or run(name, *args))
    encoding = build(family, b, 2)
    outcome(encoding, make_inputs(encoding, 9))
    assert called == names


@pytest.mark.parametrize("dtype", [F32, F16])
def test_large_positions_keep_accuracy(dtype: torch.dtype) -> None:
    encoding = build("mixed", 2, 1)
    inputs = make_inputs(encoding, 64, dtype)
    judge(encoding, replace(inputs, positions=inputs.positions * 1e6))
    fast = outcome(encoding, replace(inputs, positions=inputs.positions * 1e6))
    exact = truth_of(encoding, replace(inputs, positions=inputs.positions * 1e6))
    assert error(fast["R q"], exact["R q"]) < 2 * torch.finfo(dtype).eps * exact["R q"].abs().max()


@pytest.mark.parametrize(
    ("family", "b", "values"),
    [(*kind, values) for kind in KINDS for values in (True, False) if values or kind[0] != "halves"],
)
def test_precomputed_tables_give_the_same_rotation(family: str, b: int, values: bool) -> None:
    encoding = build(family, b, 2).requires_grad_(False)
    inputs = make_inputs(encoding, 9, sets=(2,))
    rotation = encoding(inputs.positions)
    expected = under("reference", tr.rotate, inputs.q, inputs.k, rotation)
    if values:
        rotation = rotation.tabulated() if isinstance(rotation, tr.rotations.Planar) else rotation.to("cpu")
    else:
        strided = rotation.blocks().movedim(1, 0).contiguous().movedim(0, 1)
        rotation = Block(head_dim=rotation.head_dim, table=strided)
    for one, other in zip(under("native", tr.rotate, inputs.q, inputs.k, rotation), expected, strict=True):
        assert torch.allclose(one, other, atol=1e-5)
    back = under("native", tr.rotate, *tr.rotate(inputs.q, inputs.k, rotation), rotation.inverse())
    assert torch.allclose(back[0], inputs.q, atol=1e-5)


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_tables_of_other_dtypes_are_converted(dtype: torch.dtype) -> None:
    encoding = build("liere", 4, 2).requires_grad_(False)
    inputs = make_inputs(encoding, 9)
    narrow = Block(head_dim=encoding.head_dim, table=encoding(inputs.positions).table.to(dtype))
    fast, plain = (under(name, tr.rotate, inputs.q, inputs.k, narrow) for name in ("auto", "reference"))
    assert torch.allclose(fast[0], plain[0], atol=1e-5)


def test_gradients_flow_to_tables_given_by_the_caller() -> None:
    encoding = build("liere", 4, 2)
    inputs = make_inputs(encoding, 9)
    table = encoding(inputs.positions).table.detach().requires_grad_()
    turned, _ = tr.rotate(inputs.q, inputs.k, Block(head_dim=encoding.head_dim, table=table))
    (gradient,) = torch.autograd.grad(turned, table, inputs.upstream[0])
    blocks = (x.unflatten(-1, (-1, 4)) for x in (inputs.upstream[0], inputs.q))
    assert torch.allclose(gradient, torch.einsum("bhtni,bhtnj->htnij", *blocks), atol=1e-5)


def test_double_backward_raises() -> None:
    for family, b in KINDS:
        encoding = build(family, b, 2)
        inputs = make_inputs(encoding, 9)
        q = inputs.q.requires_grad_()
        turned, _ = tr.rotate(q, inputs.k, encoding(inputs.positions))
        (gradient,) = torch.autograd.grad(turned.square().sum(), q, create_graph=True)
        with pytest.raises(RuntimeError, match="kernels have no gradients of gradients"):
            gradient.square().sum().backward()


def test_scores_and_gradients_do_not_depend_on_the_outer_basis() -> None:
    for heads, key_tokens in (((2, 2), None), ((6, 2), None), ((2, 2), 70)):
        encoding = build("ld", 8, 2)
        with torch.no_grad():
            encoding.factors[:, 0, 0] = 0  # a block that never turns beside blocks that do
        inputs = make_inputs(encoding, 9, heads=(heads[1], heads[1]), key_tokens=key_tokens)
        fast = outcome(encoding, inputs, backend="native", scores=True)
        plain = outcome(encoding, inputs, backend="reference", scores=True)
        assert_as_good(fast, plain, truth_of(encoding, inputs, scores=True))


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("scores", [False, True])
@pytest.mark.parametrize("b", [4, 8])
def test_tokens_may_have_more_rows_than_a_panel(b: int, scores: bool, dtype: torch.dtype) -> None:
    encoding = build("ld", b, 2)
    inputs = make_inputs(encoding, 3, dtype, batch=(37,))
    fast = outcome(encoding, inputs, backend="native", scores=scores)
    plain = outcome(encoding, inputs, backend="reference", scores=scores)
    assert_as_good(fast, plain, truth_of(encoding, inputs, scores=scores))


@pytest.mark.parametrize("name", ["comrope-ld:4", "comrope-ap:4", "string:4"])
def test_rotations_of_one_encoding_share_their_basis(name: str) -> None:
    encoding = tr.encodings.parse_encoding(name).rotary(num_axes=2, num_heads=2, head_dim=16).requires_grad_(False)
    q, k = torch.randn(2, 2, 9, 16), torch.randn(2, 2, 5, 16)
    places = torch.rand(9, 2), torch.rand(5, 2)
    full = tr.rotate(q, k, encoding(places[0]), key_rotation=encoding(places[1]))
    saved = tr.rotate(q, k, encoding(places[0]), key_rotation=encoding(places[1]), scores_only=True)
    assert not torch.allclose(saved[0], full[0], atol=1e-3)  # the basis was left out
    assert torch.allclose(saved[0] @ saved[1].mT, full[0] @ full[1].mT, atol=1e-5)
    with torch.no_grad():
        other = copy.deepcopy(encoding)
        other.upper.add_(0.1)
    apart = tr.rotate(q, k, encoding(places[0]), key_rotation=other(places[1]), scores_only=True)
    expected = tr.rotate(q, k, encoding(places[0]), key_rotation=other(places[1]))
    assert torch.allclose(apart[0] @ apart[1].mT, expected[0] @ expected[1].mT, atol=1e-5)


@pytest.mark.parametrize("name", ["comrope-ld:4", "comrope-ap:4", "string:4"])
def test_gradients_to_two_equal_encodings_are_separate(name: str) -> None:
    """Bases that only happen to be equal: what each of the encodings gets is what it gets with both bases applied."""
    one = tr.encodings.parse_encoding(name).rotary(num_axes=2, num_heads=2, head_dim=16)
    other = copy.deepcopy(one)
    q, k, upstream = torch.randn(2, 2, 9, 16), torch.randn(2, 2, 5, 16), torch.randn(2, 2, 9, 5)
    places = torch.rand(9, 2), torch.rand(5, 2)
    found = []
    for scores_only in (True, False):
        turned = tr.rotate(q, k, one(places[0]), key_rotation=other(places[1]), scores_only=scores_only)
        leaves = [*one.parameters(), *other.parameters()]
        found.append(torch.autograd.grad(turned[0] @ turned[1].mT, leaves, upstream))
    for saved, full in zip(*found, strict=True):
        torch.testing.assert_close(saved, full, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("change", ["positions", "factors"])
def test_basis_is_omitted_for_both_sides_or_neither(change: str) -> None:
    encoding = build("ld", 4, 1).requires_grad_(False)
    inputs = make_inputs(encoding, 9)
    here = encoding(inputs.positions)
    there = here._with(**{change: 0 * getattr(here, change)})
    with_basis, without = (
        tr.rotate(inputs.q, inputs.k, here, key_rotation=there, scores_only=scores) for scores in (False, True)
    )
    assert torch.allclose(without[0] @ without[1].mT, with_basis[0] @ with_basis[1].mT, atol=1e-5)


FAMILIES_OF_PARAMETERS = [("mixed", 2), ("ap", 4), ("ap", 8), ("ld", 4), ("ld", 8), ("liere", 3), ("liere", 8)]


@pytest.mark.parametrize("where", ["zero", "equal", "nearly equal", "one plane at rest", "huge"])
@pytest.mark.parametrize(("family", "b"), FAMILIES_OF_PARAMETERS)
def test_derivatives_are_exact_at_zero_and_equal_frequencies(family: str, b: int, where: str) -> None:
    encoding = build(family, b, 2)
    name = "frequencies" if family == "mixed" else "upper"
    with torch.no_grad():
        parameter = getattr(encoding, name)
        parameter.copy_(_place_of_interest(where, b).expand_as(parameter))
    inputs = make_inputs(encoding, 17)
    fast, exact = outcome(encoding, inputs, backend="native"), truth_of(encoding, inputs)
    assert_as_good(fast, outcome(encoding, inputs, backend="reference"), exact)
    if where == "zero":
        assert torch.equal(fast["R q"], inputs.q)
        assert exact[f"gradient to {name}"].any()


@pytest.mark.parametrize("gap", [0.05, 0.09, 0.11, 0.2, 0.5])
@pytest.mark.parametrize("unit", [1e-2, 1, 100])
def test_gradients_are_accurate_for_frequencies_at_any_distance(gap: float, unit: float) -> None:
    """Kernels divide by differences of frequencies where these are separated; the switch is at 0.1 radians."""
    encoding = build("ld", 8, 1)
    block = torch.zeros(8, 8)
    for plane, frequency in enumerate((1.0, 1.0 + gap, 3.0, 5.0)):
        block[2 * plane, 2 * plane + 1] = frequency
    basis = torch.linalg.qr(torch.randn(8, 8))[0]
    skew = basis @ (block - block.mT) @ basis.mT / unit
    with torch.no_grad():
        encoding.factors.fill_(1)
        encoding.upper.copy_(skew[tuple(torch.triu_indices(8, 8, 1))].expand_as(encoding.upper))
    inputs = make_inputs(encoding, 65)
    positions = torch.randn(65, 1)
    inputs = replace(inputs, positions=positions / positions.square().mean().sqrt() * unit)
    judge(encoding, inputs)


def _place_of_interest(where: str, b: int) -> torch.Tensor:
    """Entries above the diagonal of a block whose planes are (0, 1), (2, 3), ..., or one frequency."""
    frequencies = torch.ones(b // 2)
    if where == "nearly equal":
        frequencies += 1e-4 * torch.arange(b // 2)
    elif where == "one plane at rest":
        frequencies[-1] = 0
    elif where == "huge":
        frequencies *= 100
    elif where == "zero":
        frequencies *= 0
    block = torch.zeros(b, b)
    for plane, frequency in enumerate(frequencies):
        block[2 * plane, 2 * plane + 1] = frequency
    return block[tuple(torch.triu_indices(b, b, 1))]


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize(("family", "b"), [*KINDS, ("ap", 3), ("ld", 4), ("liere", 16)])
def test_results_are_bit_identical_for_any_number_of_threads(family: str, b: int, heads: int) -> None:
    encoding = build(family, b, 2, heads=heads)
    inputs = [make_inputs(encoding, 197), make_inputs(encoding, 33, sets=(2,), key_tokens=70)]
    found = []
    for count in (1, 2, 2, 3, 7):
        torch.set_num_threads(count)
        found.append([outcome(encoding, one) for one in inputs])
    for others in found[1:]:
        for one, other in zip(found[0], others, strict=True):
            assert_same_bits(one, other)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize(("family", "b"), [*KINDS, ("ap", 3), ("liere", 16)])
def test_kernels_do_not_read_uninitialised_memory(
    family: str, b: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoding = build(family, b, 2)
    size = {} if b == 2 else {"block_size": b}
    encoding = FAMILIES[family](num_axes=2, num_heads=2, head_dim=4 * b + 3, rotary_dim=4 * b, **size)
    cases = [make_inputs(encoding, 19, dtype), make_inputs(encoding, 5, dtype, key_tokens=3, sets=(2,))]
    clean = [outcome(encoding, inputs) for inputs in cases]
    for owner, name in ((torch.Tensor, "new_empty"), (torch, "empty_like"), (torch, "empty")):
        monkeypatch.setattr(owner, name, _poisoned(getattr(owner, name)))
    assert torch.ones(1).new_empty(1).isnan().all()
    for inputs, expected in zip(cases, clean, strict=True):
        assert_same_bits(outcome(encoding, inputs), expected)


def _poisoned(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def allocate_nan(*args: Any, **settings: Any) -> torch.Tensor:
        fresh = allocate(*args, **settings)
        return fresh.fill_(torch.nan) if fresh.is_floating_point() else fresh

    return allocate_nan


def digest() -> str:
    """What kernels answer, as one number: the same whatever memory held before."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    bits = hashlib.sha256()
    for family, b in (*KINDS, ("ap", 3), ("ap", 6), ("liere", 16), ("liere", 64)):
        encoding = build(family, b, 2)
        for tokens in (3, 19):
            for value in outcome(encoding, make_inputs(encoding, tokens)).values():
                bits.update(value.contiguous().numpy().tobytes())
    return bits.hexdigest()


@pytest.mark.slow
def test_scratch_memory_is_written_before_it_is_read() -> None:
    answers = {}
    for filling in ("0", "165"):
        folders = os.pathsep.join(str(Path(module.__file__).parent) for module in (sys.modules[__name__], parity))
        environment = {**os.environ, "MALLOC_PERTURB_": filling, "PYTHONPATH": folders}
        command = [sys.executable, "-c", "import test_kernels; print(test_kernels.digest())"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        answers[filling] = done.stdout.strip()
    assert len(answers["0"]) == 64
    assert answers["165"] == answers["0"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(backend="native", q=F64), "backend 'native' computes in float32, got torch.float64"),
        (dict(backend="triton"), "backend 'triton' needs CUDA or ROCm tensors, got cpu"),
        (dict(backend="fast"), "backend must be one of auto, reference, native, triton, got 'fast'"),
        (dict(backend="native", built=False), "backend 'native' needs kernels that were not built"),
    ],
)
@pytest.mark.filterwarnings("ignore:torchrope computes with plain PyTorch:UserWarning")
def test_unsupported_backend_raises_one_line_error(
    change: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not change.get("built", True):
        monkeypatch.setattr(native, "LIBRARY", None)
    dtype, backend = change.get("q", F32), change["backend"]
    encoding = build("liere", 8, 2).to(dtype)
    inputs = make_inputs(encoding, 9, dtype)
    positions, exponents = inputs.positions.to(dtype), torch.zeros(3, 4, 4, dtype=dtype)
    rotation = encoding(positions)
    for call in (
        lambda: under(backend, tr.rotate, inputs.q, inputs.k, rotation),
        lambda: under(backend, encoding, positions),
        lambda: under(backend, tr.ops.skew_exp, exponents),
    ):
        with pytest.raises(ValueError, match=message) as caught:
            call()
        assert "\n" not in str(caught.value)


def test_named_backend_raises_for_unsupported_rotations() -> None:
    encoding = build("liere", 4, 1)
    several = make_inputs(encoding, 5, batch=(4, 3), sets=(3,))
    with pytest.raises(ValueError, match=r"'native' needs positions shared by all samples, or one batch .* got \(3,\)"):
        under("native", tr.rotate, several.q, several.k, encoding(several.positions))
    one = make_inputs(encoding, 5)
    learned = tr.rotations.Block(
        table=encoding(one.positions).table.detach().requires_grad_(), head_dim=encoding.head_dim
    )
    with pytest.raises(ValueError, match="'native' needs a table without requires_grad"):
        under("native", tr.rotate, one.q, one.k, learned)


@pytest.mark.parametrize(("family", "b"), KINDS)
@pytest.mark.filterwarnings("ignore:torchrope computes with plain PyTorch:UserWarning")
def test_backends_agree_and_auto_works_without_kernels(family: str, b: int, monkeypatch: pytest.MonkeyPatch) -> None:
    encoding = build(family, b, 2)
    inputs = make_inputs(encoding, 9)
    plain = outcome(encoding, inputs, backend="reference")
    assert_same_bits(outcome(encoding, inputs, backend="auto"), outcome(encoding, inputs, backend="native"))
    judge(encoding, inputs)
    monkeypatch.setattr(native, "LIBRARY", None)  # and a kernel that is called all the same fails
    assert_same_bits(outcome(encoding, inputs), plain)


def test_float64_is_computed_in_float64() -> None:
    for family, b in KINDS:
        encoding = build(family, b, 2).double()
        inputs = make_inputs(encoding, 9).double()
        assert_same_bits(outcome(encoding, inputs), outcome(encoding, inputs, backend="reference"))


@pytest.mark.parametrize(("family", "b"), KINDS)
def test_encodings_and_gradients_support_vmap(family: str, b: int) -> None:
    members = [build(family, b, 2) for _ in range(3)]
    encoding = members[0]
    inputs = make_inputs(encoding, 9)
    stacked, _ = torch.func.stack_module_state(members)

    def turn(parameters: dict[str, torch.Tensor]) -> torch.Tensor:
        rotation = torch.func.functional_call(encoding, parameters, (inputs.positions,))
        return tr.rotate(inputs.q, inputs.k, rotation)[0]

    for mapped, member in zip(torch.vmap(turn)(stacked), members, strict=True):
        assert torch.allclose(mapped, tr.rotate(inputs.q, inputs.k, member(inputs.positions))[0], atol=1e-5)

    turned, _ = tr.rotate(inputs.q, inputs.k, encoding(inputs.positions))
    directions = torch.randn(3, *turned.shape)
    parameter = next(encoding.parameters())
    (batched,) = torch.autograd.grad(turned, parameter, directions, retain_graph=True, is_grads_batched=True)
    for i in range(3):
        (one,) = torch.autograd.grad(turned, parameter, directions[i], retain_graph=True)
        assert torch.allclose(batched[i], one, rtol=1e-4, atol=1e-4 * one.abs().max().item())


@pytest.mark.slow
@pytest.mark.parametrize(("training", "share"), [(True, 1.5), (False, 1.1)])
def test_full_blocks_need_little_memory_beyond_the_rotation(training: bool, share: float) -> None:
    encoding = tr.LieRE(num_axes=2, num_heads=12, head_dim=64).requires_grad_(training)
    positions = tr.prefix(tr.grid(28, 28, spacing=1 / 28), 1)
    q, k = (torch.randn(1, 12, 785, 64, requires_grad=training) for _ in range(2))
    upstream = torch.randn(1, 12, 785, 64)

    def layer() -> None:
        turned = tr.rotate(q, k, encoding(positions))
        if training:
            torch.autograd.backward(turned, (upstream, upstream))

    rotation = 12 * 785 * 64 * 64 * 4
    assert peak_memory(layer) <= share * rotation + 4 * q.numel() * 4  # q and k turned, and their gradients


def peak_memory(run: Callable[[], object]) -> int:
    """Most bytes that tensors held at once beyond those that were there, by the profiler's account."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    changes = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    changes.sort(key=lambda event: event.start_ns())
    return max(itertools.accumulate(event.nbytes() for event in changes))


def collinear_places(where: str) -> torch.Tensor:
    """Positions of which many lie on one line through the origin, `(tokens, 2)`."""
    along = torch.tensor([[1.0, 2.0]]) / 8
    return {
        "a grid with prefix tokens": tr.prefix(tr.grid(7, 5, spacing=1 / 7), 2),
        "a centred grid": tr.grid(5, 5, spacing=0.25, origin=-0.5),
        "steps of three decades on one line": along * torch.logspace(-3, 0, 21).unsqueeze(-1),
        "both sides of the origin": torch.cat([along, -along, 2 * along, -3 * along, 0 * along, along.flip(-1)]),
        "one place many times": along.expand(21, 2),
        "the origin alone": torch.zeros(9, 2),
    }[where]


@pytest.mark.parametrize("sets", [(), (2,)])
@pytest.mark.parametrize("b", [3, 8, 16, pytest.param(64, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "where",
    [
        "a grid with prefix tokens",
        "a centred grid",
        "steps of three decades on one line",
        "both sides of the origin",
        "one place many times",
        "the origin alone",
    ],
)
def test_collinear_tokens_rotate_as_each_does_alone(where: str, b: int, sets: tuple[int, ...]) -> None:
    encoding = build("liere", b, 2, heads=1)
    places = collinear_places(where)
    if sets:
        places = torch.stack([places, places.roll(3, 0)])
    inputs = make_inputs(encoding, places.shape[-2], sets=sets)
    judge(encoding, replace(inputs, positions=places))
