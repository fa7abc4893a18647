"""Attention scores by offset of two tokens, and their dependence on absolute position (in none of the papers)."""

import copy
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchrope.encodings import Encoding, NoEncoding
from torchrope.lattice import spaced
from torchrope.models import Swin, ViT
from torchrope.positions import grid
from torchrope.tensors import block_diagonal
from torchrope_lab.conclusion import join_names, one_seed
from torchrope_lab.data.datamodule import DataModule
from torchrope_lab.encodings import resolve_encoding
from torchrope_lab.results import Axis, Check, Column, Figure, Findings
from torchrope_lab.studies.engine.estimates import Columns, drawn_mean, estimate_in, mean_column, percent, table_of
from torchrope_lab.studies.engine.figures import Point, line_figure, map_figure
from torchrope_lab.studies.engine.models import Measures, select_models
from torchrope_lab.studies.engine.runs import Measure, Run, untrained
from torchrope_lab.studies.engine.study import Lab

EXACT = 1e-9
"""Absolute parts below this are rounding errors of float64."""
NOT_ROUNDING = 1e-3
"""Absolute parts above this are not rounding errors."""
HEADS_DRAWN = 4
START, END, PROJECTED = "initialisation", "trained", "trained, with its projections"
MEASURE = "kernel-2"


@dataclass(frozen=True)
class Kernel:
    """The scores of all pairs of tokens of one head, sorted by offset.

    Attributes:
        offsets: p' - p in tokens, `(offsets, axes)`, key minus query; all offsets of the lattice.
        mean: Mean score of the pairs with each offset, `(offsets,)`.
        absolute: Root mean square deviation of the scores of pairs with an offset from their mean, over the root mean
            square score, `(offsets,)`; NaN if only one pair has the offset.
        share: The same ratio over all pairs.
    """

    offsets: Tensor
    mean: Tensor
    absolute: Tensor
    share: float


def offsets_of(sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """Return all offsets of a lattice, p' - p in tokens, the last axis fastest."""
    return list(itertools.product(*(range(1 - size, size) for size in sizes)))


def pair_indices(sizes: Sequence[int]) -> Iterator[tuple[tuple[int, ...], Tensor, Tensor]]:
    """Yield the pairs of queries and keys for every offset of a lattice.

    Args:
        sizes: Tokens along each axis.

    Yields:
        The offset in tokens, indices of the queries, and of the keys, row-major like `torchrope.grid`.
    """
    index = torch.arange(int(np.prod(sizes))).view(*sizes)
    for offset in offsets_of(sizes):
        query, key = index, index
        for axis, (step, size) in enumerate(zip(offset, sizes, strict=True)):
            query = query.narrow(axis, max(0, -step), size - abs(step))
            key = key.narrow(axis, max(0, step), size - abs(step))
        yield offset, query.flatten(), key.flatten()


def rotary_kernel(
    matrices: Tensor, sizes: Sequence[int], *, query_weight: Tensor | None = None, key_weight: Tensor | None = None
) -> Kernel:
    """Compute the kernel of one head's rotations:  q^T R(p)^T R(p') k  over contents.

    Without weights contents are isotropic, E q k^T = I for equal ones: the mean score is tr(R(p)^T R(p')) / d, 1 at
    offset 0. With weights contents c are isotropic and q = W_q c, k = W_k c: the mean score of equal contents is
    tr(W_q^T R(p)^T R(p') W_k) / (|W_q| |W_k|). The absolute part is of independent contents, where a root mean square
    score is a Frobenius norm: |W_q^T (K - K̄) W_k| over |W_q^T K W_k|, K = R(p)^T R(p'), K̄ its mean at an offset.

    Args:
        matrices: R `(tokens, d, d)`, or without weights its blocks `(tokens, n, b, b)`.
        sizes: Tokens along each axis.
        query_weight, key_weight: W_q and W_k, `(d, channels)`.
    """
    blocks = matrices if matrices.ndim == 4 else matrices.unsqueeze(1)
    d = blocks.shape[1] * blocks.shape[-1]
    left = right = joint = None
    scale = float(d)
    if query_weight is not None and key_weight is not None:
        left, right = _square_root(query_weight), _square_root(key_weight)
        scale = float(query_weight.norm() * key_weight.norm())
        joint = key_weight @ query_weight.mT  # (d, d):  tr(W_q^T K W_k) = tr(K joint)

    def scores(queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        k = blocks[queries].mT @ blocks[keys]  # (pairs, n, b, b)
        average = k.mean(dim=0)
        if left is None or right is None or joint is None:
            return average.diagonal(dim1=-2, dim2=-1).sum() / scale, k - average, k
        return (average[0] * joint.mT).sum() / scale, left.mT @ (k - average) @ right, left.mT @ k @ right

    return _by_offset(scores, sizes)


def scalar_kernel(scores: Tensor, sizes: Sequence[int]) -> Kernel:
    """Compute the kernel of an encoding that contributes one number to the score of each pair of tokens.

    Args:
        scores: `(tokens, tokens)`, queries before keys.
        sizes: Tokens along each axis.
    """

    def of_pairs(queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        of_offset = scores[queries, keys]
        return of_offset.mean(), of_offset - of_offset.mean(), of_offset

    return _by_offset(of_pairs, sizes)


def _by_offset(scores: Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]], sizes: Sequence[int]) -> Kernel:
    """Compute the kernel from a function that returns mean, deviations and scores of pairs of one offset."""
    offsets, counts, sums = [], [], []
    for offset, queries, keys in pair_indices(sizes):
        average, deviations, each = scores(queries, keys)
        offsets.append(offset)
        counts.append(len(queries))
        sums.append(torch.stack([average, deviations.square().sum(), each.square().sum()]))
    mean, deviation, whole = torch.stack(sums).unbind(dim=1)
    pairs = torch.tensor(counts, dtype=mean.dtype)
    several = pairs > 1
    # Bessel's correction: squared deviations from the mean of n pairs are too small by (n - 1) / n.
    unbiased = torch.where(several, deviation * pairs / (pairs - 1).clamp(min=1), torch.nan)
    absolute = (unbiased / whole.clamp(min=torch.finfo(mean.dtype).tiny)).sqrt()
    share = (unbiased[several].sum() / whole[several].sum().clamp(min=torch.finfo(mean.dtype).tiny)).sqrt()
    return Kernel(torch.tensor(offsets), mean, absolute, float(share))


def _square_root(weight: Tensor) -> Tensor:
    """Compute C `(d, d)` with C C^T = W W^T."""
    values, vectors = torch.linalg.eigh(weight @ weight.mT)
    return vectors * values.clamp(min=0).sqrt()


def kernels(model: ViT, sizes: Sequence[int], *, projections: bool = False) -> list[list[Kernel]]:
    """Compute the kernels of a model's layers and heads, in float64.

    A rotary encoding has one for each layer and head; for a bias it is its values over the largest of them; for an
    absolute encoding, which only the first layer receives, the scalar products of its vectors over their mean square.
    Of a combination, the rotary part is measured.

    Args:
        model: A vision transformer.
        sizes: Tokens along each axis.
        projections: Whether contents pass through the layer's projections to queries and keys, with the gains and
            biases before them; for rotary encodings only.

    Returns:
        Layers of heads.
    """
    with torch.no_grad():
        if rotates(model):
            positions = grid(*sizes, **spaced(model.position_map, sizes), dtype=torch.float64)
            return [_of_layer(model, layer, positions, sizes, projections) for layer in range(len(model.layers))]
        if model.biases:
            return [_of_bias(bias, sizes) for bias in model.biases]
        vectors = torch.ones(int(np.prod(sizes)), 1) if model.absolute is None else model.absolute.cpu()(*sizes)
        vectors = vectors.double()
        return [[scalar_kernel(vectors @ vectors.mT / vectors.square().sum(dim=1).mean(), sizes)]]


def rotates(model: ViT) -> bool:
    """Return whether a model has a rotary encoding."""
    return not isinstance(model.encodings[0], NoEncoding)


def _of_layer(model: ViT, layer: int, positions: Tensor, sizes: Sequence[int], projections: bool) -> list[Kernel]:
    encoding: Any = copy.deepcopy(model.encodings[layer % len(model.encodings)]).cpu().double()
    blocks = encoding(positions).blocks()  # (heads or 1, tokens, n, b, b)
    whole = blocks.shape[-3] * blocks.shape[-1] == encoding.head_dim
    if not projections:
        return [rotary_kernel(own if whole else block_diagonal(own, encoding.head_dim), sizes) for own in blocks]
    dense = block_diagonal(blocks, encoding.head_dim).expand(encoding.num_heads, -1, -1, -1)
    weights = projected(model.layers[layer])
    return [
        rotary_kernel(own, sizes, query_weight=query, key_weight=key)
        for own, query, key in zip(dense, weights[0], weights[1], strict=True)
    ]


def projected(layer: Any) -> Tensor:
    """Return the map of normalised contents, and 1 for biases, to queries and keys, `(2, heads, head_dim, dim + 1)`."""
    qkv, norm = layer.attention.qkv, layer.norm1
    weight, gain, shift = (each.detach().cpu().double() for each in (qkv.weight, norm.weight, norm.bias))
    bias = weight.new_zeros(len(weight)) if qkv.bias is None else qkv.bias.detach().cpu().double()
    both = torch.cat([weight * gain, (weight @ shift + bias).unsqueeze(1)], dim=1)
    return both.unflatten(0, (3, layer.attention.num_heads, -1))[:2]


def _of_bias(bias: Any, sizes: Sequence[int]) -> list[Kernel]:
    tables = copy.deepcopy(bias).cpu()(*sizes).double()
    largest = tables.abs().amax(dim=(1, 2), keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
    return [scalar_kernel(table, sizes) for table in tables / largest]


def plain_kernels(layers: Sequence[Sequence[Kernel]]) -> dict[str, list[Any]]:
    """Convert kernels to values that JSON can represent: `heads` in each layer, and lists over the heads of all."""
    heads = [head for layer in layers for head in layer]
    values = {"mean": [head.mean.tolist() for head in heads], "absolute": [head.absolute.tolist() for head in heads]}
    return {**values, "share": [head.share for head in heads], "heads": [len(layer) for layer in layers]}


def measure(model: ViT | Swin, data: DataModule, run: Run) -> dict[str, Any]:
    """Measure a run at initialisation, and trained with and without its projections, on its training lattice."""
    start = untrained(run, data)
    assert isinstance(model, ViT)
    assert isinstance(start, ViT)
    lattice = model.embed.lattice(data.input_size)
    found = {START: kernels(start, lattice), END: kernels(model, lattice)}
    if rotates(model):
        found[PROJECTED] = kernels(model, lattice, projections=True)
    return {state: plain_kernels(layers) for state, layers in found.items()}


def commutes(encoding: str, num_axes: int, head_dim: int) -> bool | None:
    """Return whether scores of a rotary encoding must be relative; None if it has no rotary part."""
    choice = resolve_encoding(encoding)
    if not any(issubclass(part, Encoding) for part in choice.parts):
        return None
    return choice.rotary(num_axes=num_axes, num_heads=1, head_dim=head_dim).relative


def find(lab: Lab) -> Findings:
    """Measure kernels of the runs of the accuracy study, at initialisation and trained."""
    if lab.config.model.backbone != "vit":
        raise ValueError(f"kernel needs model.backbone vit, got {lab.config.model.backbone}")
    models = select_models(lab, lab.encodings)
    if not models.runs:
        raise ValueError(f"kernel needs an encoding that the model supports, got {', '.join(lab.encodings)}")
    measured = models.measure(lambda run: Measure(MEASURE, partial(measure, run=run)))
    views = [each.at(state) for each in measured for state in each.results[0]]
    model: Any = lab.blueprint(models.runs[0])
    relative = {each.name: commutes(each.name, len(lab.data.axes), model.encodings[0].head_dim) for each in measured}
    sizes = model.embed.lattice(lab.data.input_size)
    offsets = np.array(offsets_of(sizes))
    table = table_of(
        "Absolute part of the scores",
        _columns(relative, offsets),
        views,
        _NOTE,
        keys=lambda view: {"encoding": view.name, "state": view.part},
    )
    return Findings(
        answer=_answer(table.rows, relative, len(lab.seeds)),
        tables=[table],
        figures=[*_maps(views, lab.data.axes, sizes), _by_distance(views, offsets)],
        checks=_checks(views, relative),
        notes=[*models.notes, *_notes(relative)],
    )


def _columns(relative: Mapping[str, bool | None], offsets: np.ndarray) -> Columns:
    adjacent = np.abs(offsets).sum(axis=1) == 1
    share, adjacent_score = "Absolute part", "Score of adjacent tokens"
    return (
        (Column("name", "Encoding and state"), lambda view: f"{view.name}, {view.part}"),
        (Column("relative", "Commuting"), lambda view: {True: "yes", False: "no", None: "-"}[relative[view.name]]),
        mean_column("absolute", share, "%", 2, lambda view: 100 * view.pool("share")),
        (Column("most", "Largest of a head", "%", 2), lambda view: 100 * float(view.pool("share").max())),
        mean_column("neighbour", adjacent_score, "", 3, lambda view: view.pool("mean")[:, adjacent].mean(axis=1)),
        (Column("heads", "Heads", digits=0), lambda view: len(view.pool("share"))),
    )


_NOTE = (
    "The absolute part is the root mean square deviation of the scores of pairs with the same offset from "
    "their mean, over contents and pairs, relative to the scores. Intervals are over the heads of all layers and "
    "seeds, which are not independent if they were trained together. A token's score with itself is 1; mean "
    "scores are over isotropic contents, or over the layer's projections of them."
)


def _answer(rows: Sequence[Mapping[str, Any]], relative: Mapping[str, bool | None], seeds: int) -> str:
    commuting = [name for name, holds in relative.items() if holds and name != "none"]
    exact = f"Scores of {join_names(commuting)} depend only on the offset, up to rounding" if commuting else ""
    free = [row for row in rows if relative[row["encoding"]] is False]
    if not free:
        return f"{exact or 'No rotary encoding was measured'}.{one_seed(seeds)}"
    trained = [row for row in free if row["state"] == END] or free
    most = max(trained, key=lambda row: row["absolute"])
    part = percent(estimate_in(most, "absolute"))
    others = " of the others" if exact else ""
    largest = f"the largest absolute part{others} is {part}, of {most['name']}"
    return f"{exact}; {largest}.{one_seed(seeds)}" if exact else f"{largest[0].upper()}{largest[1:]}.{one_seed(seeds)}"


def _checks(views: Sequence[Measures], relative: Mapping[str, bool | None]) -> list[Check]:
    commuting = [view.pool("share").max() for view in views if relative[view.name]]
    free = [view.pool("share").min() for view in views if relative[view.name] is False]
    rotary = [view.pool("mean") for view in views if relative[view.name] is not None and view.part != PROJECTED]
    checks = []
    if commuting:
        rule = "Commuting encodings have no absolute part, in any head, before or after training"
        largest = f"largest {max(commuting):.1e} over {len(commuting)} measurements"
        checks.append(Check(rule, bool(max(commuting) < EXACT), largest))
    if free:
        rule = "Generators that do not commute have an absolute part, in every head"
        smallest = f"smallest {100 * min(free):.2f} % over {len(free)} measurements"
        checks.append(Check(rule, bool(min(free) > NOT_ROUNDING), smallest))
    if rotary:
        off = max(float(np.abs(scores[:, scores.shape[1] // 2] - 1).max()) for scores in rotary)  # offset 0
        checks.append(Check("A token's score with itself is 1 for every rotation", off < EXACT, f"off by {off:.1e}"))
    return checks


def _notes(relative: Mapping[str, bool | None]) -> list[str]:
    notes = ["Class and register tokens are left out."]
    if joined := [name for name in relative if "+" in name]:
        notes.append(f"Of {join_names(joined)} the rotary part is measured, or the bias without one.")
    if scalars := [name for name, holds in relative.items() if holds is None]:
        notes.append(
            f"{join_names(scalars)}: measured are scalar products of the added vectors, over their mean square, "
            "or the values of a bias over the largest; contents and projections are left out."
        )
    return notes


def _planes(axes: Sequence[str], sizes: Sequence[int]) -> dict[str, Any]:
    """Return the planes of offsets in a figure: all offsets of two axes; of more axes those at 0 and 1 along the first.

    Returns:
        Index of each plane in `(heads, *offsets)`, by the suffix of its panel's name.
    """
    heads, zero = slice(None), [size - 1 for size in sizes[:-2]]
    if not zero:
        return {"": heads}
    planes = {f", {axes[0]} 0": (heads, *zero)}
    return planes | ({f", {axes[0]} +1": (heads, sizes[0], *zero[1:])} if sizes[0] > 1 else {})


def _maps(views: Sequence[Measures], axes: Sequence[str], sizes: Sequence[int]) -> list[Figure]:
    if len(axes) < 2:
        return []
    means, heads, absolutes = {}, {}, {}
    shape = [2 * size - 1 for size in sizes]
    for view in views:
        if view.name == "none" or view.part == PROJECTED:
            continue
        for suffix, plane in _planes(axes, sizes).items():
            scores, absolute = (view.pool(key).reshape(-1, *shape)[plane] for key in ("mean", "absolute"))
            panel = f"{view.title}, {view.part}{suffix}"
            means[panel] = scores.mean(axis=0)
            if view.pool("share").max() > EXACT:
                absolutes[panel] = 100 * absolute.mean(axis=0)
            if view.part == END and not suffix.endswith("+1"):
                for head in range(min(HEADS_DRAWN, view.results[0]["heads"][0])):
                    heads[f"{view.title}, head {head + 1}{suffix}"] = scores[head]
    x, y = (Axis(key, f"Offset along {axis}", "tokens") for key, axis in zip("xy", (axes[-1], axes[-2]), strict=True))
    score, absolute_part = Axis("value", "Mean score"), Axis("value", "Absolute part", "%")
    figures = [
        ("kernel", "Score by offset", score, means, "Mean over heads and layers; 1 is that of a token with itself."),
        ("kernel-heads", "Score by offset, heads of the first layer", score, heads,
         "Heads of the first layer, trained, of the first seed."),
        ("kernel-absolute", "Absolute part by offset", absolute_part, absolutes,
         "Deviation of pairs with the same offset, relative to the scores; mean over heads and layers. Offsets of a "
         "single pair and encodings without absolute part are left out."),
    ]  # fmt: skip
    first = (1 - sizes[-2], 1 - sizes[-1])
    return [
        map_figure(x, y, colour, maps, first, name=name, title=title, caption=caption)
        for name, title, colour, maps, caption in figures
        if maps
    ]


def _by_distance(views: Sequence[Measures], offsets: np.ndarray) -> Figure:
    distance = np.sqrt((offsets**2).sum(axis=1)).round().astype(int)
    points: list[Point] = []
    for view in views:
        if view.name == "none":
            continue
        absolute = view.pool("absolute")
        known = ~np.isnan(absolute[0])
        for steps in np.unique(distance[known]):
            values = absolute[:, known & (distance == steps)].mean(axis=1)
            points.append((view.name, view.part, int(steps), drawn_mean(100 * values).interval()))
    return line_figure(
        Axis("distance", "Distance", "tokens"),
        Axis("absolute", "Absolute part", "%"),
        points,
        panel="panel",
        name="absolute-by-distance",
        title="Absolute part by distance",
        caption="Distances are rounded to whole tokens; bands are 95 % intervals over heads.",
    )
