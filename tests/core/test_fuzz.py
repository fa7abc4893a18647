"""Random encodings, shapes, strides and gradients against `oracle.py`: dense exponentials in float64.

The examples are the same in every run; `make slow` tries 10,000.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracle import generators, rotated
from parity import LAYOUTS, under, vectors
from torch import Tensor

import torchrope as tr
from torchrope.encodings import Encoding
from torchrope.encodings.names import takes

WITH_BLOCKS: dict[str, Any] = {"liere": tr.LieRE, "ap": tr.ComRoPEAP, "ld": tr.ComRoPELD, "string": tr.STRING}
FIXED: dict[str, Any] = {
    "axial": tr.AxialRoPE,
    "golden": tr.encodings.GoldenGateRoPE,
    "dinov3": tr.encodings.baselines.dinov3,
    "mrope": tr.encodings.MRoPE,
}
FAMILIES = {**WITH_BLOCKS, **FIXED, "mixed": tr.MixedRoPE}
BLOCKS = (2, 3, 4, 5, 6, 7, 8, 8, 9, 10, 12, 16, 17, 20, 24, 32, 64)
ENTRIES = ("normal", "normal", "zero", "whole", "pruned", "equal")
NARROW = (torch.float32, torch.float32, torch.bfloat16, torch.float16)
# Allowed error, in rounding steps of the dtype of angles and of that of vectors. In float64 the oracle is inexact:
# torch.matrix_exp has an error of 6e-13 at norms of 0.04.
STEPS, OUTPUT_STEPS = {torch.float32: 16.0, torch.float64: 1e4}, 4.0


@dataclass(frozen=True)
class Case:
    """Random settings of a case; they and the seed determine every tensor."""

    family: str
    block_size: int
    axes: int
    blocks: int
    own_heads: int
    group: int
    shared_heads: bool
    rest: int
    batch: tuple[int, ...]
    tokens: int
    key_tokens: int | None
    own_positions: bool
    layout: str
    upstream_layout: str
    dtypes: tuple[torch.dtype, torch.dtype]
    entries: str
    scale: float
    scores_only: bool
    backend: str
    requires_grad: tuple[bool, ...]
    seed: int

    @property
    def angles(self) -> torch.dtype:
        return torch.float64 if torch.float64 in self.dtypes else torch.float32


def mostly(often: st.SearchStrategy, other: st.SearchStrategy) -> st.SearchStrategy:
    """Draw from the first strategy with probability 8/9, otherwise from the other."""
    return st.integers(0, 8).flatmap(lambda drawn: other if drawn == 8 else often)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    family = draw(st.sampled_from((*WITH_BLOCKS, *WITH_BLOCKS, "mixed", *FIXED)))
    b = draw(st.sampled_from([b for b in BLOCKS if family != "string" or b % 2 == 0])) if family in WITH_BLOCKS else 2
    few, axes = b > 20, draw(st.integers(1, 5))
    batch = draw(mostly(st.integers(1, 3).map(lambda n: (n,)), st.lists(st.integers(0, 3), max_size=3).map(tuple)))
    return Case(
        family=family,
        block_size=b,
        axes=axes,
        blocks=draw(st.integers(1, 1 if few else 3)) * (axes if family in ("axial", "dinov3", "ap") else 1),
        own_heads=draw(st.integers(1, 1 if few else 3)),
        group=draw(st.integers(1, 3)),
        shared_heads=draw(st.booleans()),
        rest=draw(st.sampled_from((0, 0, 1, 5))),
        batch=batch,
        tokens=draw(mostly(st.integers(1, 9 if few else 40), st.just(0))),
        key_tokens=draw(st.none() | mostly(st.integers(1, 9), st.just(0))),
        own_positions=draw(st.booleans()),
        layout=draw(st.sampled_from(LAYOUTS)),
        upstream_layout=draw(st.sampled_from(LAYOUTS)),
        dtypes=draw(mostly(st.tuples(*[st.sampled_from(NARROW)] * 2), st.just((torch.float64, torch.float64)))),
        entries=draw(st.sampled_from(ENTRIES)),
        scale=draw(st.sampled_from((1.0, 1.0, 1.0, 1e-3, 0.0, 30.0, 1e3))),
        scores_only=draw(st.booleans()),
        backend=draw(mostly(st.just("auto"), st.just("reference"))),
        requires_grad=draw(mostly(st.just((True,) * 6), st.tuples(*[st.booleans()] * 6))),
        seed=draw(st.integers(0, 2**16)),
    )


def check(case: Case) -> None:
    """Compare values and gradients of the library with those of the formula."""
    torch.manual_seed(case.seed)
    encoding = _encoding(case)
    key_tokens = case.tokens if case.key_tokens is None else case.key_tokens
    heads = case.own_heads * case.group, case.own_heads
    shapes = [(*case.batch, n, t, encoding.head_dim) for n, t in zip(heads, (case.tokens, key_tokens), strict=True)]
    q, k = (vectors(shape, dtype, case.layout) for shape, dtype in zip(shapes, case.dtypes, strict=True))
    upstream = [vectors(shape, d, case.upstream_layout) for shape, d in zip(shapes, case.dtypes, strict=True)]
    sets = case.batch[-1:] if case.own_positions else ()
    tokens = [case.tokens] if case.key_tokens is None else [case.tokens, key_tokens]
    places = [case.scale * (2 * torch.rand(*sets, t, case.axes, dtype=case.angles) - 1) for t in tokens]
    leaves = [x.detach() for x in (q, k, *places, *encoding.parameters())]
    requires_grad = [want for want, _ in zip(case.requires_grad, leaves, strict=False)]
    found = _by_library(case, encoding, leaves, requires_grad, upstream)
    exact, sizes, names = _by_formula(case, encoding, leaves, upstream)
    own = max(torch.finfo(dtype).eps for dtype in case.dtypes) if case.scores_only else 0.0
    for name, actual, expected, size in zip(names, found, exact, sizes, strict=True):
        if actual is not None:
            assert actual.shape == expected.shape, name
            steps = STEPS[case.angles] * torch.finfo(case.angles).eps + OUTPUT_STEPS * own
            allowed = steps * size + OUTPUT_STEPS * torch.finfo(actual.dtype).eps * _largest(expected)
            error = _largest(actual.double() - expected)
            assert error <= allowed, f"{name}: error {error:.3g} exceeds {allowed:.3g}"


def _encoding(case: Case) -> Encoding:
    """Build the encoding of a case with random parameters."""
    rotary = case.block_size * case.blocks
    size: dict[str, Any] = dict(num_axes=case.axes, num_heads=case.own_heads, head_dim=rotary + case.rest)
    size |= {"block_size": case.block_size} if case.family in WITH_BLOCKS else {}
    size |= {"sections": (case.blocks, *[0] * (case.axes - 1))} if case.family == "mrope" else {}
    size |= {"shared_heads": case.shared_heads} if takes(FAMILIES[case.family], "shared_heads") else {}
    encoding: Encoding = FAMILIES[case.family](**size, rotary_dim=rotary)
    with torch.no_grad():
        for parameter in encoding.parameters():
            parameter.copy_(_entries(parameter.shape, case.entries))
    return encoding.to(case.angles)


def _entries(shape: torch.Size, kind: str) -> Tensor:
    normal = torch.randn(shape)
    if kind == "zero":
        return 0 * normal
    if kind == "whole":
        return normal.round()
    if kind == "pruned":
        return normal * (torch.rand(shape) < 0.3)
    return torch.ones(shape) if kind == "equal" else normal


def _by_library(
    case: Case, encoding: Encoding, leaves: Sequence[Tensor], requires_grad: Sequence[bool], upstream: Sequence[Tensor]
) -> list[Tensor | None]:
    names = [name for name, _ in encoding.named_parameters()]
    leaves = [leaf.detach().requires_grad_(want) for leaf, want in zip(leaves, requires_grad, strict=True)]
    q, k, *places = leaves[: len(leaves) - len(names)]
    values = dict(zip(names, leaves[len(leaves) - len(names) :], strict=True))
    rotation, *of_keys = (
        under(case.backend, torch.func.functional_call, encoding, values, (place,)) for place in places
    )
    elsewhere = of_keys[0] if of_keys else None
    turned = under(
        case.backend, tr.rotate, q, k, rotation, key_rotation=elsewhere, layout="bhtd", scores_only=case.scores_only
    )
    outputs = [_scores(*turned)] if case.scores_only else list(turned)
    came = [_scores(*upstream)] if case.scores_only else list(upstream)
    flowing = [(out, g) for out, g in zip(outputs, came, strict=True) if out.requires_grad]
    asked = [leaf for leaf in leaves if leaf.requires_grad]
    gradients: Any = [torch.zeros_like(leaf) for leaf in asked]
    if flowing and asked:
        results, cotangents = zip(*flowing, strict=True)
        gradients = torch.autograd.grad(results, asked, cotangents, materialize_grads=True)
    left = iter(gradients)
    return [*(x.detach() for x in outputs), *(next(left) if leaf.requires_grad else None for leaf in leaves)]


def _by_formula(
    case: Case, encoding: Encoding, leaves: Sequence[Tensor], upstream: Sequence[Tensor]
) -> tuple[list[Tensor], list[float], list[str]]:
    """Return results and gradients in float64, the scale of each for rounding errors, and their names."""
    parameters = [name for name, _ in encoding.named_parameters()]
    wide = [leaf.double().requires_grad_() for leaf in leaves]
    q, k, *places = wide[: len(wide) - len(parameters)]
    values = dict(zip(parameters, wide[len(wide) - len(parameters) :], strict=True))
    blocks = _generators(case, encoding, values)
    pairs = [(q, places[0]), (k, places[-1])]
    turned = [rotated(x, place, blocks) for x, place in pairs]
    outputs = [_scores(*turned)] if case.scores_only else turned
    came = [g.double() for g in ([_scores(*upstream)] if case.scores_only else upstream)]
    gradients = torch.autograd.grad(outputs, wide, came, materialize_grads=True, retain_graph=True)
    arrived = torch.autograd.grad(outputs, turned, came)

    sizes = _sizes(case, blocks.detach(), pairs, arrived, values)
    names = ["scores"] if case.scores_only else ["R q", "R k"]
    names += ["dq", "dk", "d positions", "d key positions"][: 2 + len(places)] + [f"d {name}" for name in parameters]
    return [*(x.detach() for x in outputs), *gradients], sizes, names


@torch.no_grad()
def _sizes(
    case: Case,
    blocks: Tensor,
    pairs: Sequence[tuple[Tensor, Tensor]],
    arrived: Sequence[Tensor],
    values: dict[str, Tensor],
) -> list[float]:
    """Return the scale of each result and gradient, times one plus the largest angle: rounding is relative to it."""
    norms = torch.linalg.matrix_norm(blocks, 2).amax(dim=(1, 2))  # (axes)
    angle = 1 + max(_largest(place.abs() @ norms) for _, place in pairs)
    lengths = [_largest(x.norm(dim=-1)) for x, _ in pairs]
    # |g| |x|, summed over samples and heads, of each token
    moments = [_of_tokens(g.norm(dim=-1) * x.norm(dim=-1), torch.sum) for g, (x, _) in zip(arrived, pairs, strict=True)]
    places = [_of_tokens(place.abs().amax(dim=-1), torch.amax) for _, place in pairs]
    of_positions = [_largest(moment) * _largest(norms) for moment in moments]
    of_generators = sum(float((moment * place).sum()) for moment, place in zip(moments, places, strict=True))
    if case.family == "ld":  # a product of two parameters
        of_generators *= max([1.0, *(_largest(value) * case.block_size for value in values.values())])
    if case.family == "string":  # its basis has a gradient at the origin, too
        of_generators += 8 * sum(float(moment.sum()) for moment in moments)
    sizes = [lengths[0] * lengths[1]] if case.scores_only else lengths
    sizes = [*sizes, *(_largest(g.norm(dim=-1)) for g in arrived)]
    sizes += [sum(of_positions)] if case.key_tokens is None else of_positions
    return [angle * size for size in [*sizes, *[of_generators] * len(values)]]


def _of_tokens(x: Tensor, over: Callable[..., Tensor]) -> Tensor:
    """Reduce `(..., tokens)` to `(tokens)`."""
    flat = x.unsqueeze(0).flatten(0, -2)
    return over(flat, dim=0) if len(flat) else flat.new_zeros(x.shape[-1])


def _generators(case: Case, encoding: Encoding, values: dict[str, Tensor]) -> Tensor:
    """Compute blocks `(axes, heads or 1, blocks, b, b)` in float64 from the parameters and buffers of the encoding."""
    if case.family in FIXED:
        frequencies = encoding.frequencies
        frequencies = frequencies.unsqueeze(1) if frequencies.ndim == 2 else frequencies
        return generators("frequencies", [frequencies], case.axes, 2)
    if case.family == "mixed":
        return generators("frequencies", [values["frequencies"]], case.axes, 2)
    names = {"ld": ("factors", "upper"), "string": ("frequencies", "upper")}.get(case.family, ("upper",))
    return generators(case.family, [values[name] for name in names], case.axes, case.block_size)


def _scores(q: Tensor, k: Tensor) -> Tensor:
    wide = torch.promote_types(torch.promote_types(q.dtype, k.dtype), torch.float32)
    return q.to(wide) @ k.to(wide).repeat_interleave(q.shape[-3] // k.shape[-3], dim=-3).mT


def _largest(x: Tensor) -> float:
    return float(x.abs().max()) if x.numel() else 0.0


@settings(max_examples=50, derandomize=True, deadline=None, database=None)
@given(cases())
def test_rotate_matches_dense_exponentials_for_random_cases(case: Case) -> None:
    check(case)


@pytest.mark.slow
@settings(max_examples=10_000, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(cases())
def test_rotate_matches_dense_exponentials_for_ten_thousand_cases(case: Case) -> None:
    check(case)
