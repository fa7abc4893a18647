"""Accuracy checks of fast paths: error against float64, relative to the error of the float32 reference."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

import torchrope as tr
from torchrope.encodings import Encoding
from torchrope.rotations import Planar


def under(name: str, function: Callable[..., Any], *args: Any, **settings: Any) -> Any:
    """Call a function inside `torchrope.backend(name)`."""
    with tr.backend(name):
        return function(*args, **settings)


class MixedInHalves(tr.MixedRoPE):
    """RoPE-Mixed whose pair i is channels (i, i + pairs)."""

    def forward(self, positions: Tensor) -> Planar:  # type: ignore[override]
        rotation = super().forward(positions)
        assert isinstance(rotation, Planar)
        return rotation.in_halves()


FAMILIES: dict[str, Callable[..., Encoding]] = {
    "axial": tr.AxialRoPE,
    "mixed": tr.MixedRoPE,
    "halves": MixedInHalves,
    "liere": tr.LieRE,
    "ap": tr.ComRoPEAP,
    "ld": tr.ComRoPELD,
}
LAYOUTS = ("dense", "packed", "expanded", "channels apart", "transposed", "one element in")
# Steps of the dtype, relative to the largest true value, that any order of arithmetic may cost: within a token, and in
# sums over tokens, samples and channels, whose terms are far larger than they are.
ULPS = 4
ULPS_OF_SUMS = 16
_WITHIN_A_TOKEN = ("R q", "R k", "gradient to q", "gradient to k")


@dataclass(frozen=True)
class Inputs:
    """What goes in: q and k, their positions, and the gradient that comes back to both."""

    q: Tensor
    k: Tensor
    positions: Tensor
    upstream: tuple[Tensor, Tensor]
    key_positions: Tensor | None = None

    def double(self) -> "Inputs":
        return Inputs(
            q=self.q.double(),
            k=self.k.double(),
            positions=self.positions.double(),
            upstream=(self.upstream[0].double(), self.upstream[1].double()),
            key_positions=None if self.key_positions is None else self.key_positions.double(),
        )


def build(family: str, b: int, axes: int, *, heads: int = 2, blocks: int | None = None, **settings: object) -> Encoding:
    """An encoding of blocks of b, as few as its family allows unless told."""
    if family in ("axial", "mixed", "halves"):
        return FAMILIES[family](num_axes=axes, num_heads=heads, head_dim=2 * axes * (blocks or 2), **settings)
    count = axes * (blocks or 1) if family == "ap" else blocks or (2 if b <= 16 else 1)
    return FAMILIES[family](num_axes=axes, num_heads=heads, block_size=b, head_dim=b * count, **settings)


def vectors(shape: tuple[int, ...], dtype: torch.dtype, layout: str = "dense") -> Tensor:
    """Standard normal `(*batch, heads, tokens, head_dim)` with the strides of a layout."""
    *batch, heads, tokens, dim = shape
    if layout == "packed":
        return torch.randn(*batch, tokens, 3, heads, dim).to(dtype).movedim(-3, 0)[1].transpose(-2, -3)
    if layout == "expanded":
        return torch.randn(heads, tokens, dim).to(dtype).expand(shape)
    if layout == "channels apart":
        return torch.randn(*batch, heads, tokens, 2 * dim).to(dtype)[..., ::2]
    if layout == "transposed":
        return torch.randn(*batch, heads, dim, tokens).to(dtype).mT
    if layout == "one element in":
        return torch.randn(torch.Size(shape).numel() + 1).to(dtype)[1:].view(shape)
    return torch.randn(shape).to(dtype)


def make_inputs(
    encoding: Encoding,
    tokens: int,
    dtype: torch.dtype = torch.float32,
    *,
    batch: tuple[int, ...] = (2,),
    heads: tuple[int, int] | None = None,
    sets: tuple[int, ...] = (),
    layout: str = "dense",
    upstream_layout: str = "dense",
    key_tokens: int | None = None,
) -> Inputs:
    """Random inputs that suit an encoding."""
    of_q, of_k = heads or (encoding.num_heads, encoding.num_heads)
    shape_q = (*batch, of_q, tokens, encoding.head_dim)
    shape_k = (*batch, of_k, tokens if key_tokens is None else key_tokens, encoding.head_dim)
    place = partial(_places, sets, encoding.num_axes)
    return Inputs(
        q=vectors(shape_q, dtype, layout),
        k=vectors(shape_k, dtype, layout),
        positions=place(tokens),
        upstream=(vectors(shape_q, dtype, upstream_layout), vectors(shape_k, dtype, upstream_layout)),
        key_positions=None if key_tokens is None else place(key_tokens),
    )


def outcome(encoding: Encoding, inputs: Inputs, *, backend: str = "auto", scores: bool = False) -> dict[str, Tensor]:
    """Rotated q and k, or their scores, and the gradients to all that goes in, by name."""
    named = {"q": inputs.q, "k": inputs.k, "positions": inputs.positions, "key positions": inputs.key_positions}
    leaves = {name: x.detach().requires_grad_() for name, x in named.items() if x is not None}
    places = [leaves[name] for name in ("positions", "key positions") if name in leaves]
    rotation, *of_keys = (under(backend, encoding, p) for p in places)
    key_rotation = of_keys[0] if of_keys else None
    turned = under(
        backend, tr.rotate, leaves["q"], leaves["k"], rotation, key_rotation=key_rotation, scores_only=scores
    )
    out = {"R q": turned[0], "R k": turned[1]}
    upstream = list(inputs.upstream)
    if scores:
        out = {"scores": turned[0] @ turned[1].mT}
        upstream = [inputs.upstream[0] @ inputs.upstream[1].mT]
    sources = leaves | dict(encoding.named_parameters())
    gradients = torch.autograd.grad(list(out.values()), list(sources.values()), upstream, materialize_grads=True)
    of_sources = {f"gradient to {name}": g for name, g in zip(sources, gradients, strict=True)}
    return {name: x.detach() for name, x in (out | of_sources).items()}


def truth_of(encoding: Encoding, inputs: Inputs, *, scores: bool = False) -> dict[str, Tensor]:
    """The same in float64, where nothing but the plain reference computes."""
    return outcome(copy.deepcopy(encoding).double(), inputs.double(), scores=scores)


def error(actual: Tensor, exact: Tensor) -> float:
    """Largest absolute difference; infinite where either is not a number."""
    if not exact.numel():
        return 0.0
    worst = (actual.double() - exact.double()).abs().max().item()
    return worst if worst == worst else float("inf")


def allowed_steps(name: str) -> int:
    """Steps of the dtype that a value of an outcome may be off."""
    return ULPS if name in _WITHIN_A_TOKEN else ULPS_OF_SUMS


def assert_as_good(fast: dict[str, Tensor], plain: dict[str, Tensor], exact: dict[str, Tensor]) -> None:
    """At most twice the error of the reference in that dtype, and a few steps of the dtype."""
    for name, value in exact.items():
        assert fast[name].shape == value.shape, f"{name}: shape {tuple(fast[name].shape)}"
        assert fast[name].dtype == plain[name].dtype, f"{name}: {fast[name].dtype}"
        largest = value.abs().max().item() if value.numel() else 0.0
        allowed = 2 * error(plain[name], value) + allowed_steps(name) * torch.finfo(fast[name].dtype).eps * largest
        came = error(fast[name], value)
        assert came <= allowed, f"{name}: error {came:.3g} exceeds {allowed:.3g}, largest value {largest:.3g}"


def assert_same_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    for name, value in one.items():
        assert torch.equal(value, other[name]), f"{name} differs by {error(other[name], value):.3g}"


def judge(encoding: Encoding, inputs: Inputs) -> None:
    """Hold the kernels to the reference, values and all gradients."""
    fast = outcome(encoding, inputs, backend="auto")
    assert_as_good(fast, outcome(encoding, inputs, backend="reference"), truth_of(encoding, inputs))


def mixed_dtypes(inputs: Inputs, of_k: torch.dtype) -> Inputs:
    """The same inputs with k in another dtype."""
    return replace(inputs, k=inputs.k.to(of_k), upstream=(inputs.upstream[0], inputs.upstream[1].to(of_k)))


def _places(sets: tuple[int, ...], axes: int, tokens: int) -> Tensor:
    """Positions in [-1, 1), a prefix token at the origin first."""
    positions = 2 * torch.rand(*sets, tokens, axes) - 1
    positions[..., :1, :] = 0
    return positions
