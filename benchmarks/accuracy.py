"""Compare rotations with float64, measure their precision far from the origin, and render docs/conventions.md.

    python benchmarks/accuracy.py

First 10,000 random blocks of ComRoPE of every size and rank: rotated vectors and all gradients against
torch.linalg.matrix_exp in float64. The exit status is 1 if one is wrong. Then every family at growing distances: the
change of norms, and the difference of rotations from those of the same float32 numbers in float64.
"""

import argparse
import copy
import json
import shlex
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import date
from functools import partial
from pathlib import Path

import torch
from markers import insert_between_markers
from torch import Tensor

import torchrope as tr
from torchrope.encodings import Encoding
from torchrope.files import write_whole

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "accuracy.json"
PAGE = ROOT / "docs" / "conventions.md"

AXES, HEADS, BLOCKS, TOKENS = 2, 2, 8, 4
SIZES = (2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 32, 48, 64)
# Allowed error in float32 rounding steps, relative to the magnitude of the summands and to the angle.
STEPS = 4.0
DISTANCES = (1.0, 1e2, 1e4, 1e6)
FAMILIES = ("axial", "mixed", "comrope-ap:8", "comrope-ld:8", "string:8", "liere:8", "liere:64")


# ---- blocks of any rank


def planes(frequencies: Tensor) -> Tensor:
    """Skew blocks `(count, b, b)` that rotate b / 2 planes in a random basis by frequencies `(count, b div 2)`."""
    count, b = len(frequencies), 2 * frequencies.shape[-1]
    inside = torch.zeros(count, b, b, dtype=torch.float64)
    even = torch.arange(0, b, 2)
    inside[:, even + 1, even], inside[:, even, even + 1] = frequencies, -frequencies
    basis = torch.linalg.qr(torch.randn(count, b, b, dtype=torch.float64)).Q
    return basis @ inside @ basis.mT


def _normal(count: int, b: int) -> Tensor:
    return torch.randn(count, b // 2, dtype=torch.float64)


def _with_odd(make: Callable[[int, int], Tensor]) -> Callable[[int, int], Tensor]:
    """Wrap a generator of even-sized blocks: an odd size is the leading part of the next even size."""
    return lambda count, b: make(count, b + b % 2)[:, :b, :b]


def pruned(left: float, count: int, b: int) -> Tensor:
    """Build skew blocks with random entries, of which the fraction `left` is non-zero."""
    upper = (torch.randn(count, b, b) * (torch.rand(count, b, b) < left)).triu(1)
    return upper - upper.mT


def of_rank(rank: int, count: int, b: int) -> Tensor:
    """Build skew blocks Σ (x yᵀ - y xᵀ) of a given rank from small integer vectors."""
    x, y = torch.randint(-2, 3, (2, rank // 2, count, b)).double()
    outer = torch.einsum("rni,rnj->nij", x, y)
    return outer - outer.mT


def with_zero_frequencies(num_zero: int, count: int, b: int) -> Tensor:
    """Build blocks of planes in a random basis, of which `num_zero` do not rotate."""
    frequencies = _normal(count, b)
    frequencies[:, :num_zero] = 0
    return planes(frequencies)


KINDS: dict[str, Callable[[int, int], Tensor]] = {
    "full": partial(pruned, 1.0),
    "50 % left": partial(pruned, 0.5),
    "30 % left": partial(pruned, 0.3),
    "10 % left": partial(pruned, 0.1),
    "rank 0": partial(of_rank, 0),
    "rank 2": partial(of_rank, 2),
    "rank 4": partial(of_rank, 4),
    "one plane at rest": _with_odd(partial(with_zero_frequencies, 1)),
    "two planes at rest": _with_odd(partial(with_zero_frequencies, 2)),
    "one plane rotates": _with_odd(lambda count, b: with_zero_frequencies(b // 2 - 1, count, b)),
    "repeated frequencies": _with_odd(lambda count, b: planes(torch.randint(1, 3, (count, b // 2)).double())),
    "equal frequencies": _with_odd(lambda count, b: planes(torch.ones(count, b // 2, dtype=torch.float64))),
    "nearly equal": _with_odd(lambda count, b: planes(1 + 1e-6 * _normal(count, b))),
    "far apart": _with_odd(lambda count, b: planes(10.0 ** -torch.randint(0, 12, (count, b // 2)).double())),
}
"""Skew blocks `(count, b, b)` by how many and of what size."""


@dataclass(frozen=True)
class Checked:
    """Blocks of one kind and size.

    Attributes:
        kind: One of `KINDS`.
        block_size: b.
        blocks: Number of blocks.
        failures: Number of blocks with an error above `STEPS` rounding steps.
        worst: Largest error in rounding steps.
    """

    kind: str
    block_size: int
    blocks: int
    failures: int
    worst: float


def check_blocks(kind: str, b: int, family: type[tr.ComRoPELD | tr.ComRoPEAP], backend: str = "auto") -> Checked:
    """Rotate by random blocks of a kind, values and gradients; evaluate the error of each block separately."""
    encoding = family(num_axes=AXES, num_heads=HEADS, head_dim=BLOCKS * b, block_size=b)
    blocks = KINDS[kind](HEADS * BLOCKS, b).float().unflatten(0, (HEADS, BLOCKS))
    rows, columns = torch.triu_indices(b, b, 1)
    with torch.no_grad():
        encoding.upper.copy_(blocks[..., rows, columns])
    positions = 4 * torch.rand(TOKENS, AXES) - 2
    vectors = torch.randn(4, 1, HEADS, TOKENS, BLOCKS * b)
    leaves = [*vectors[:2].unbind(0), positions, *encoding.parameters()]
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    found = _by_library(encoding, leaves, vectors[2:], backend)
    exact = _by_formula(isinstance(encoding, tr.ComRoPEAP), b, leaves, vectors[2:])
    steps = torch.stack(
        [
            _of_block(actual - wanted) / (_of_block(size) * torch.finfo(torch.float32).eps).clamp_min(1e-30)
            for (actual, wanted, size) in zip(found, *exact, strict=True)
        ]
    ).amax(dim=0)
    steps = steps.nan_to_num(nan=torch.inf)
    return Checked(kind, b, HEADS * BLOCKS, int((steps > STEPS).sum()), steps.max().item())


def _by_library(encoding: Encoding, leaves: list[Tensor], upstream: Tensor, backend: str) -> list[Tensor]:
    q, k, positions, *parameters = leaves
    names = [name for name, _ in encoding.named_parameters()]
    values = dict(zip(names, parameters, strict=True))
    with tr.backend(backend):
        turned = tr.rotate(q, k, torch.func.functional_call(encoding, values, (positions,)))
    return _per_block([*turned, *torch.autograd.grad(turned, leaves, list(upstream))], names)


def _by_formula(own_axes: bool, b: int, leaves: list[Tensor], upstream: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Compute the results in float64, and their error scale: the sum of absolute summands times (1 + angle)."""
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    q, k, positions, *parameters = wide
    upper = parameters[0]
    rows, columns = torch.triu_indices(b, b, 1)
    square = torch.zeros(HEADS, BLOCKS, b, b, dtype=torch.float64)
    square[..., rows, columns] = upper
    base = square - square.mT
    own = torch.tensor([[float(j % AXES == axis) for j in range(BLOCKS)] for axis in range(AXES)]).double()
    factors = own[:, None].expand(-1, HEADS, -1) if own_axes else parameters[1]
    along = torch.einsum("ta,ahn->htn", positions, factors)
    matrices = torch.linalg.matrix_exp((along[..., None, None] * base.unsqueeze(1)).contiguous())
    cut = [x.unflatten(-1, (BLOCKS, b)) for x in (q, k)]
    turned = [torch.einsum("htnij,zhtnj->zhtni", matrices, x).flatten(-2) for x in cut]
    names = ["upper"] if own_axes else ["upper", "factors"]
    gradients = torch.autograd.grad(turned, wide, [g.double() for g in upstream])

    with torch.no_grad():
        norm = torch.linalg.matrix_norm(base, 2)  # (heads, blocks)
        angle = 1 + along.abs() * norm.unsqueeze(1)  # (heads, tokens, blocks)
        x, g = (pair.double().unflatten(-1, (BLOCKS, b)).norm(dim=-1) for pair in (torch.stack([q, k]), upstream))
        moments = torch.einsum("szhtn,szhtn->htn", x, g)
        per_vector = [(y * angle).unsqueeze(-1).expand(*y.shape, b).flatten(-2) for y in (*x, *g)]
        reach = torch.einsum("htn,htn->hn", along.abs(), moments * angle)
        shares = torch.einsum("ta,htn->ahn", positions.abs(), moments * angle) * norm
        places = torch.einsum("ahn,htn->hnta", factors.abs(), moments * angle * norm.unsqueeze(1)).sum(dim=(0, 1))
        sizes = [*per_vector, places, reach.unsqueeze(-1).expand_as(upper)] + ([] if own_axes else [shares])
    results = [*turned, *gradients]
    return _per_block(results, names), _per_block(sizes, names)


def _per_block(results: list[Tensor], names: list[str]) -> list[Tensor]:
    """Reshape q, k and the gradients of q, k, positions and parameters to `(heads, blocks, ...)`.

    The gradient of positions is repeated for all blocks.
    """
    vectors = [x.unflatten(-1, (BLOCKS, -1)).movedim(-2, 0).movedim(2, 0) for x in results[:4]]
    places = results[4].expand(HEADS, BLOCKS, *results[4].shape)
    parameters = [x if name == "upper" else x.movedim(0, -1) for name, x in zip(names, results[5:], strict=True)]
    return [x.double() for x in (*vectors, places, *parameters)]


def _of_block(x: Tensor) -> Tensor:
    return x.detach().abs().flatten(2).amax(dim=-1)


def check_all(blocks: int, log: Callable[[str], object] = print) -> list[Checked]:
    """Check at least `blocks` blocks of all kinds and sizes, alternating the two families."""
    checked: list[Checked] = []
    while sum(one.blocks for one in checked) < blocks:
        for kind in KINDS:
            for b in SIZES:
                family = (tr.ComRoPELD, tr.ComRoPEAP)[len(checked) % 2]
                checked.append(check_blocks(kind, b, family))
        log(f"{sum(one.blocks for one in checked)} blocks, {sum(one.failures for one in checked)} failures")
    return checked


# ---- distance


@dataclass(frozen=True)
class DistanceError:
    """A family at one distance, on two axes, in the unit of its paper.

    Attributes:
        encoding: Name of the encoding.
        distance: Positions are uniform within it on each axis.
        angle_error: ‖R - R'‖ for the rotation R' of the same float32 numbers in float64: radians, up to 2.
        norm_change: Largest relative change of the norm of a rotated vector, or of its gradient.
    """

    encoding: str
    distance: float
    angle_error: float
    norm_change: float


def measure_far(name: str, distance: float, tokens: int = 64) -> DistanceError:
    """Rotate at random places within a distance."""
    torch.manual_seed(0)
    encoding = tr.encodings.parse_encoding(name).rotary(num_axes=2, num_heads=2, head_dim=64)
    positions = (2 * torch.rand(tokens, 2) - 1) * distance
    q = torch.randn(1, 2, tokens, 64, requires_grad=True)
    rotation = encoding(positions)
    turned, _ = tr.rotate(q, q, rotation)
    (back,) = torch.autograd.grad(turned, q, q.detach())
    basis = torch.eye(64).expand(1, 2, tokens, 64, 64).movedim(-1, 0)  # (64, 1, heads, tokens, 64)
    columns = [tr.rotate(unit.contiguous(), unit.contiguous(), rotation)[0].detach() for unit in basis]
    exact = copy.deepcopy(encoding).double()(positions.double()).matrix()
    off = torch.stack(columns, dim=-1)[0].double() - exact
    norms = q.detach().double().norm(dim=-1)
    changes = [(x.detach().double().norm(dim=-1) / norms - 1).abs().max().item() for x in (turned, back)]
    return DistanceError(name, distance, torch.linalg.matrix_norm(off, 2).max().item(), max(changes))


# ---- results


def table(far: list[DistanceError]) -> str:
    """Build a Markdown table of the angle error by encoding and distance."""
    head = ["encoding", *(f"{distance:,.0f}" for distance in DISTANCES), "norms change by"]
    lines = ["| " + " | ".join(head) + " |", "| --- |" + " ---: |" * (len(head) - 1)]
    for name in FAMILIES:
        own = [one for one in far if one.encoding == name]
        cells = [f"{one.angle_error:.0e}" if one.angle_error < 0.5 else "no precision" for one in own]
        lines.append("| " + " | ".join([f"`{name}`", *cells, f"{max(one.norm_change for one in own):.0e}"]) + " |")
    return "\n".join(lines)


def render(page: str, far: list[DistanceError]) -> str:
    """Return the page with the table between its markers."""
    return insert_between_markers(page, "accuracy", table(far))


def _failed(checked: list[Checked]) -> Iterator[str]:
    for one in checked:
        if one.failures:
            yield f"{one.kind}, blocks of {one.block_size}: {one.failures} of {one.blocks}, {one.worst:.3g} steps"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=10_000, help="blocks to check (default: 10,000)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random blocks (default: 0)")
    parser.add_argument("--check", action="store_true", help="only check the blocks; write nothing")
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    checked = check_all(options.blocks)
    failures = list(_failed(checked))
    print(*failures, sep="\n", file=sys.stderr, end="\n" if failures else "")
    worst = max(one.worst for one in checked)
    print(f"{sum(one.blocks for one in checked)} blocks, worst error {worst:.1f} of {STEPS:.0f} steps allowed")
    if failures or options.check:
        return 1 if failures else 0
    far = [measure_far(name, distance) for name in FAMILIES for distance in DISTANCES]
    command = shlex.join(["python", "benchmarks/accuracy.py", *sys.argv[1:]])
    from torchrope_lab.engine.provenance import provenance  # the library's tests do without the laboratory

    source = {"command": command, "date": date.today().isoformat(), **provenance(("torch",))}
    kinds = [asdict(one) for one in checked]
    results = {"source": source, "steps": STEPS, "blocks": kinds, "far": [asdict(one) for one in far]}
    write_whole(RESULTS, json.dumps(results, indent=1) + "\n")
    write_whole(PAGE, render(PAGE.read_text(encoding="utf-8"), far))
    print(table(far), f"{RESULTS.relative_to(ROOT)} and {PAGE.relative_to(ROOT)}", sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
