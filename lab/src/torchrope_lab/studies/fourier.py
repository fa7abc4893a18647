"""Reconstruction of a point from an encoding's frequencies or blocks (RoPE-ViT figure 1)."""

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from torchrope.encodings import Encoding
from torchrope.positions import grid
from torchrope_lab.conclusion import join_names
from torchrope_lab.encodings import resolve_encoding
from torchrope_lab.engine.descriptions import label
from torchrope_lab.engine.figures import ENCODING_AXIS, figure, map_figure
from torchrope_lab.engine.long_table import Cell, Columns, Quantity, ranking, row_of, table_of, with_interval
from torchrope_lab.engine.study import Lab
from torchrope_lab.engine.trained_models import Site, read_checkpoints
from torchrope_lab.mistakes import Mistake
from torchrope_lab.results import Axis, Column, Figure, Findings

LATTICE = (14, 14)
HEADS, HEAD_DIM = 12, 64
"""ViT-B at 224x224 pixels with patches of 16x16, as in the paper."""
RELATIVE_CUTOFF = 1e-6
"""Singular values below this share of the largest are dropped, because they would need huge weights."""
EXACT = 1e-9
WAYS = {"fit": "best fit", "back": "transform and back"}
OUTSIDE = {"fit": "Best fit: energy outside the point", "back": "Transform and back: energy outside"}


@dataclass(frozen=True)
class Heads:
    """The heads of one layer with one encoding on one lattice."""

    encoding: str
    state: str  # the initialisation of a model, or a checkpoint
    sizes: tuple[int, ...]  # tokens along each axis
    blocks: Tensor  # R `(heads, tokens, n, b, b)` of all seeds, or one if they are equal, without unrotated channels
    head_dim: int
    per_seed: int  # heads of one seed
    title: str = ""

    @property
    def functions(self) -> Tensor:
        """Matrix coefficients of R as functions of the token, `(heads, tokens, functions)`."""
        entries = self.blocks.flatten(2)
        rest = self.head_dim - self.blocks.shape[-3] * self.blocks.shape[-1]
        return torch.cat([entries, entries.new_ones(*entries.shape[:-1], 1)], -1) if rest else entries

    @cached_property
    def fits(self) -> list[tuple[Tensor, int]]:
        """`best_fit` of each head."""
        return [best_fit(each) for each in self.functions]

    @cached_property
    def back(self) -> list[Tensor]:
        """`transform` of each head."""
        return [transform(each, self.head_dim) for each in self.blocks]

    @cached_property
    def sharpness(self) -> dict[str, list[dict[str, float]]]:
        """`sharpness` of each head's reconstructions, by "fit" and "back"."""
        ways = {"fit": [fit for fit, _ in self.fits], "back": self.back}
        return {way: [sharpness(each, self.sizes) for each in found] for way, found in ways.items()}


def heads_of(sites: Sequence[Site], name: str, state: str, title: str = "") -> Heads:
    """Compute the rotations of a lattice in float64, of encodings of one layer, one per seed."""
    found = []
    with torch.no_grad():
        for site in sites:
            positions = grid(*site.sizes, spacing=site.spacing, origin=site.origin, dtype=torch.float64)
            exact = copy.deepcopy(site.encoding).cpu().double()
            found.append(exact(positions).blocks().double())
    alike = bool((found[0].shape[0] == 1) and all(torch.equal(found[0], each) for each in found))
    blocks = found[0] if alike else torch.cat(found)
    return Heads(name, state, tuple(sites[0].sizes), blocks, exact.head_dim, len(found[0]), title)


def best_fit(functions: Tensor) -> tuple[Tensor, int]:
    """Return the projector `(tokens, tokens)` onto the span of functions `(tokens, functions)`, and its dimension."""
    # Its rows are the least-squares reconstructions of every point of a lattice.
    left, strength, _ = torch.linalg.svd(functions, full_matrices=False)
    basis = left[:, strength > RELATIVE_CUTOFF * strength[0]]
    return basis @ basis.mT, basis.shape[1]


def transform(blocks: Tensor, head_dim: int) -> Tensor:
    """Reconstruct points by the transform with the encoding's frequencies and its inverse:  tr(R(p₀)^T R(p)) / d."""
    # `blocks` are `(tokens, n, b, b)`, the result `(points, tokens)`. For blocks of 2 it is the mean of cos θ·(p - p₀)
    # over the frequencies θ: the discrete Fourier transform of a point and its inverse, with these frequencies only.
    flat = blocks.flatten(1)
    unrotated = head_dim - blocks.shape[-3] * blocks.shape[-1]
    return (flat @ flat.mT + unrotated) / head_dim


def sharpness(reconstructions: Tensor, sizes: Sequence[int]) -> dict[str, float]:
    """Measure the mean sharpness of reconstructions `(points, tokens)` over points, row-major as the tokens."""
    # peak: value at the point, originally 1. outside: share of the energy, the sum of squares, outside the point.
    # lines: share of that energy on lines along the axes through the point. width: root mean square distance from the
    # point, in tokens, weighted by energy.
    positions = grid(*sizes, dtype=torch.float64)
    apart = positions.unsqueeze(1) - positions  # (points, tokens, axes)
    energy = reconstructions.square()
    of_point = energy.sum(dim=1).clamp(min=torch.finfo(energy.dtype).tiny)
    away = energy * ~torch.eye(len(energy), dtype=torch.bool)
    on_lines = away * ((apart != 0).sum(dim=-1) == 1)
    outside = away.sum(dim=1) / of_point
    spread = (energy * apart.square().sum(dim=-1)).sum(dim=1) / of_point
    total = float(away.sum())
    return {
        "peak": float(reconstructions.diagonal().mean()),
        "outside": float(outside.mean()),
        "lines": float(on_lines.sum()) / total if total > EXACT else 0.0,
        "width": float(spread.sqrt().mean()),
    }


def find(lab: Lab) -> Findings:
    """Reconstruct points from each encoding at initialisation, and from those of checkpoints."""
    rotary = [name for name in lab.encodings if issubclass(resolve_encoding(name).parts[-1], Encoding)]
    checkpoints = read_checkpoints(lab.checkpoints, lab.encodings)
    rotating = [each for each in checkpoints if each.sites and each.sites[0].sizes]
    if not rotary and not rotating:
        names = [*lab.encodings, *(each.name for each in checkpoints)]
        raise Mistake(f"fourier needs rotary encodings, got {', '.join(names)}")
    plain = [each.name for each in checkpoints if each not in rotating]
    lab.leave_out(*(f"{name} left out: it has no rotary encoding." for name in plain))
    if left_out := [name for name in lab.encodings if name not in rotary]:
        lab.leave_out(f"{join_names(left_out)} left out: not rotary.")
    measured = []
    for name in rotary:
        try:
            measured.append(heads_of([_at_start(name, seed) for seed in lab.seeds], name, "ViT-B, initialisation"))
        except ValueError as error:
            lab.leave_out(f"{name} left out: {error}.")
    for each in rotating:
        state = f"checkpoint, {'x'.join(map(str, each.sites[0].sizes))} tokens"
        measured.append(heads_of(each.sites[:1], each.name, state, f"{each.name} ({each.title})"))
    by_cell = {Cell(heads.encoding, heads.state): heads for heads in measured}
    outside = {way: _over_heads(by_cell, way, "outside", title, "%", 1) for way, title in OUTSIDE.items()}
    columns: Columns = (
        (Column("name", "Encoding"), lambda cell: f"{by_cell[cell].title or cell.arm}, {cell.level}"),
        outside["fit"].column,
        *_sharpness_columns(by_cell, "fit"),
        (Column("dimension", "Dimensions, one head", digits=1), lambda cell: _mean_dimension(by_cell[cell])),
        (Column("together", "All heads", digits=0), lambda cell: _dimension_of_all(by_cell[cell])),
        (Column("tokens", "Of", digits=0), lambda cell: math.prod(by_cell[cell].sizes)),
        outside["back"].column,
        *_sharpness_columns(by_cell, "back"),
        (Column("heads", "Heads", digits=0), lambda cell: len(by_cell[cell].blocks)),
    )
    table = table_of(
        "Reconstruction of a point",
        columns,
        by_cell,
        _NOTE,
        keys=lambda cell: {"encoding": cell.arm, "state": cell.level},
    )
    state = measured[-1].state
    least = min((cell for cell in by_cell if cell.level == state), key=lambda cell: outside["fit"].estimates[cell].mean)
    claim = f"By best fit ({state}) one head has least energy outside a point"
    return Findings(
        answer=f"{ranking(claim, {least: ''}, outside['fit'].interval)}.",
        tables=[table],
        figures=[_maps(measured), _bars(outside)],
    )


def _at_start(name: str, seed: int) -> Site:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        encoding = resolve_encoding(name).rotary(num_axes=len(LATTICE), num_heads=HEADS, head_dim=HEAD_DIM)
    return Site(encoding, LATTICE, **encoding.lattice.spaced(*LATTICE))


def _dimension_of_all(heads: Heads) -> int:
    """Compute the dimension of the span of all functions of one seed from their Gram matrix over tokens."""
    functions = heads.functions[: heads.per_seed].transpose(0, 1).flatten(1)
    strength = torch.linalg.eigvalsh(functions @ functions.mT)
    return int((strength > RELATIVE_CUTOFF**2 * strength[-1]).sum())


def _over_heads(by_cell: Mapping[Cell, Heads], way: str, key: str, title: str, unit: str, digits: int) -> Quantity:
    """Return a measure of `sharpness`, whose examples are heads."""
    values = {cell: np.array([[each[key] for each in heads.sharpness[way]]]) for cell, heads in by_cell.items()}
    return Quantity(values, with_interval(f"{way}_{key}", title, unit, digits))


def _sharpness_columns(by_cell: Mapping[Cell, Heads], way: str) -> Columns:
    return (
        _over_heads(by_cell, way, "lines", "Of it on lines along the axes", "%", 1).column,
        _over_heads(by_cell, way, "width", "Width", "tokens", 2).column,
    )


def _mean_dimension(heads: Heads) -> float:
    return float(np.mean([dimension for _, dimension in heads.fits]))


_NOTE = (
    "A point is 1 at a token and 0 at all others; means over all tokens. The best fit is by least squares "
    "from the matrix coefficients of R(p), cosines and sines for blocks of 2, without directions weaker than "
    f"{RELATIVE_CUTOFF:g} of the strongest. Transform and back is the paper's: tr(R(p₀)ᵀR(p))/d. Energy is the sum "
    "of squares, width the root mean square distance from the point. Intervals are over the heads of one layer and "
    "all seeds; if all heads are equal, one is shown without interval."
)


def _maps(measured: Sequence[Heads]) -> Figure:
    """Build maps of the middle point's reconstruction by the first head; for more than two axes, a plane through it."""
    panels = {}
    for heads in measured:
        middle = tuple(size // 2 for size in heads.sizes)
        point = int(np.ravel_multi_index(middle, heads.sizes))
        for way, values in (("fit", heads.fits[0][0][point]), ("back", heads.back[0][point])):
            panel = f"{heads.title or label(heads.encoding)}, {heads.state}, {WAYS[way]}"
            panels[panel] = np.atleast_2d(values.view(heads.sizes)[middle[:-2]].numpy())
    return map_figure(
        Axis("x", "Column", "tokens"),
        Axis("y", "Row", "tokens"),
        Axis("value", "Reconstruction"),
        panels,
        name="reconstruction",
        title="A point, reconstructed",
        caption="The point in the middle of the lattice, by the first head of the first layer. An exact reconstruction "
        "is 1 there and 0 elsewhere; axial encodings give a cross.",
    )


def _bars(outside: Mapping[str, Quantity]) -> Figure:
    marks = [
        {
            "panel": f"{cell.level}, {WAYS[way]}",
            "name": cell.arm,
            **row_of([(with_interval("outside", ""), quantity.interval)], cell),
        }
        for way, quantity in outside.items()
        for cell in quantity.values
    ]
    return figure(
        "outside",
        "Energy outside the point",
        Axis("outside", "Energy outside", "%"),
        ENCODING_AXIS,
        marks,
        "Lines are 95 % intervals over heads.",
        kind="points",
        panel="panel",
    )
