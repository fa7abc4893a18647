"""Attention scores by offset of two tokens, and their dependence on absolute position (in none of the papers)."""

import copy
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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
from torchrope_lab.results import Axis, Check, Column, Figure, Findings, Row, Table
from torchrope_lab.studies.describe import label
from torchrope_lab.studies.engine.estimates import by_encoding, cells, drawn_mean, percent, with_interval
from torchrope_lab.studies.engine.feasible import feasible
from torchrope_lab.studies.engine.runs import untrained
from torchrope_lab.studies.engine.study import Lab, Study

EXACT = 1e-9
"""Absolute parts below this are rounding errors of float64."""
NOT_ROUNDING = 1e-3
"""Absolute parts above this are not rounding errors."""
HEADS_DRAWN = 4
STATES = ("initialisation", "trained", "trained, with its projections")
MEASURE = "kernel-1"


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


def pair_indices(sizes: Sequence[int]) -> Iterator[tuple[tuple[int, ...], Tensor, Tensor]]:
    """Yield the pairs of queries and keys for every offset of a lattice.

    Args:
        sizes: Tokens along each axis.

    Yields:
        The offset in tokens, indices of the queries, and of the keys, row-major like `torchrope.grid`.
    """
    index = torch.arange(int(np.prod(sizes))).view(*sizes)
    for offset in itertools.product(*(range(1 - size, size) for size in sizes)):
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
        if model.absolute is not None:
            vectors = model.absolute.cpu()(*sizes).double()
            return [[scalar_kernel(vectors @ vectors.mT / vectors.square().sum(dim=1).mean(), sizes)]]
        return [[scalar_kernel(torch.ones(int(np.prod(sizes)), int(np.prod(sizes)), dtype=torch.float64), sizes)]]


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
    tables = bias.cpu()(*sizes).double()
    largest = tables.abs().amax(dim=(1, 2), keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
    return [scalar_kernel(table, sizes) for table in tables / largest]


def plain_kernels(layers: Sequence[Sequence[Kernel]]) -> dict[str, Any]:
    """Convert kernels to values that JSON can represent: offsets once, then nested lists of layers and heads."""
    return {
        "offsets": layers[0][0].offsets.tolist(),
        "mean": [[head.mean.tolist() for head in layer] for layer in layers],
        "absolute": [[[_or_none(x) for x in head.absolute.tolist()] for head in layer] for layer in layers],
        "share": [[head.share for head in layer] for layer in layers],
    }


def _or_none(value: float) -> float | None:
    return value if value == value else None


def measure(model: ViT | Swin, data: DataModule) -> dict[str, Any]:
    """Measure a trained model with and without its projections, on its training lattice."""
    assert isinstance(model, ViT)
    lattice = model.embed.lattice(data.input_size)
    views = {"trained": plain_kernels(kernels(model, lattice))}
    if rotates(model):
        views["trained, with its projections"] = plain_kernels(kernels(model, lattice, projections=True))
    return views


@dataclass
class View:
    """The kernels of one encoding in one state, over seeds.

    Attributes:
        encoding: Name of the encoding.
        state: One of `STATES`.
        runs: Results of `plain_kernels`, one per seed.
    """

    encoding: str
    state: str
    runs: list[dict[str, Any]]

    @property
    def offsets(self) -> np.ndarray:
        """`(offsets, axes)`."""
        return np.array(self.runs[0]["offsets"])

    @property
    def heads(self) -> np.ndarray:
        """Scores `(seeds · layers · heads, offsets)`."""
        return self._all("mean")

    @property
    def absolute(self) -> np.ndarray:
        """Absolute parts `(seeds · layers · heads, offsets)`, NaN if only one pair has the offset."""
        return self._all("absolute")

    @property
    def shares(self) -> np.ndarray:
        """Absolute part of every head, `(seeds · layers · heads,)`."""
        return self._all("share")

    def _all(self, key: str) -> np.ndarray:
        return np.array([head for run in self.runs for layer in run[key] for head in layer], dtype=float)


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
    runs, notes = feasible(lab, lab.runs(lab.encodings))
    if not runs:
        raise ValueError(f"kernel needs an encoding that the model supports, got {', '.join(lab.encodings)}")
    trained = by_encoding(lab.train(runs))
    views: list[View] = []
    for name, of_name in trained.items():
        views.append(View(name, "initialisation", [_at_start(lab, name, seed) for seed in lab.seeds]))
        finite = [run for run in of_name if run.val_loss is not None and np.isfinite(run.val_loss)]
        if len(finite) < len(of_name):
            notes.append(f"{name}: {len(of_name) - len(finite)} of {len(of_name)} runs diverged and are left out.")
        measured = [run.measure(MEASURE, measure) for run in finite]
        states = [state for state in STATES[1:] if measured and state in measured[0]]
        views += [View(name, state, [each[state] for each in measured]) for state in states]
    model: Any = lab.blueprint(runs[0])
    relative = {name: commutes(name, len(lab.data.axes), model.encodings[0].head_dim) for name in trained}
    rows = [_row(view, relative[view.encoding]) for view in views]
    return Findings(
        answer=_answer(rows, relative, len(lab.seeds)),
        tables=[_table(rows)],
        figures=[*_maps(views, lab.data.axes), _by_distance(views)],
        checks=_checks(views, relative),
        notes=[*notes, *_notes(relative)],
    )


def _at_start(lab: Lab, name: str, seed: int) -> dict[str, Any]:
    model = untrained(lab.run(name, seed), lab.data)
    assert isinstance(model, ViT)
    return plain_kernels(kernels(model, model.embed.lattice(lab.data.input_size)))


def _row(view: View, relative: bool | None) -> dict[str, Any]:
    nearest = np.abs(view.offsets).sum(axis=1) == 1
    return {
        "name": f"{view.encoding}, {view.state}",
        "encoding": view.encoding,
        "state": view.state,
        "relative": {True: "yes", False: "no", None: "-"}[relative],
        **cells("absolute", drawn_mean(100 * view.shares[None]).interval()),
        "most": 100 * float(view.shares.max()),
        **cells("neighbour", drawn_mean(view.heads[None, :, nearest].mean(axis=2)).interval()),
        "heads": len(view.shares),
    }


def _table(rows: Sequence[Row]) -> Table:
    return Table(
        "Absolute part of the scores",
        (
            Column("name", "Encoding and state"),
            Column("relative", "Commuting"),
            with_interval("absolute", "Absolute part", "%", 2),
            Column("most", "Largest of a head", "%", 2),
            with_interval("neighbour", "Score of adjacent tokens", "", 3),
            Column("heads", "Heads", digits=0),
        ),
        rows,
        note="The absolute part is the root mean square deviation of the scores of pairs with the same offset from "
        "their mean, over contents and pairs, relative to the scores. Intervals are over the heads of all layers and "
        "seeds, which are not independent if they were trained together. A token's score with itself is 1; mean "
        "scores are over isotropic contents, or over the layer's projections of them.",
    )


def _answer(rows: Sequence[dict[str, Any]], relative: Mapping[str, bool | None], seeds: int) -> str:
    commuting = [name for name, holds in relative.items() if holds and name != "none"]
    exact = f"Scores of {join_names(commuting)} depend only on the offset, up to rounding" if commuting else ""
    free = [row for row in rows if relative[row["encoding"]] is False]
    if not free:
        return f"{exact or 'No rotary encoding was measured'}.{one_seed(seeds)}"
    trained = [row for row in free if row["state"] == "trained"] or free
    most = max(trained, key=lambda row: row["absolute"])
    part = percent([most[key] for key in ("absolute", "absolute_low", "absolute_high")])
    largest = f"the largest absolute part of the others is {part}, of {most['name']}"
    return f"{exact}; {largest}.{one_seed(seeds)}" if exact else f"{largest[0].upper()}{largest[1:]}.{one_seed(seeds)}"


def _checks(views: Sequence[View], relative: Mapping[str, bool | None]) -> list[Check]:
    commuting = [float(view.shares.max()) for view in views if relative[view.encoding]]
    free = [(view, float(view.shares.min())) for view in views if relative[view.encoding] is False]
    rotary = [view for view in views if relative[view.encoding] is not None and view.state != STATES[2]]
    checks = []
    if commuting:
        checks.append(
            Check(
                "Commuting encodings have no absolute part, in any head, before or after training",
                max(commuting) < EXACT,
                f"largest {max(commuting):.1e} over {len(commuting)} measurements",
            )
        )
    if free:
        least = min(share for _, share in free)
        checks.append(
            Check(
                "Generators that do not commute have an absolute part, in every head",
                least > NOT_ROUNDING,
                f"smallest {100 * least:.2f} % over {len(free)} measurements",
            )
        )
    if rotary:
        off = max(float(np.abs(view.heads[:, (view.offsets == 0).all(axis=1)] - 1).max()) for view in rotary)
        checks.append(Check("A token's score with itself is 1 for every rotation", off < EXACT, f"off by {off:.1e}"))
    return checks


def _notes(relative: Mapping[str, bool | None]) -> list[str]:
    joined = [name for name in relative if "+" in name]
    scalars = [name for name, holds in relative.items() if holds is None]
    return [
        "Class and register tokens are left out.",
        *([f"Of {join_names(joined)} the rotary part is measured, or the bias without one."] if joined else []),
        *(
            [
                f"{join_names(scalars)}: measured are scalar products of the added vectors, over their mean square, "
                "or the values of a bias over the largest; contents and projections are left out."
            ]
            if scalars
            else []
        ),
    ]


def _slices(axes: Sequence[str], offsets: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the planes of offsets in a figure: all offsets of two axes; of more axes those at 0 and 1 along the first.

    Yields:
        Suffix of the panel's name, and a mask of its offsets.
    """
    outer = offsets[:, :-2]
    if not outer.shape[1]:
        yield "", np.ones(len(offsets), dtype=bool)
        return
    yield f", {axes[0]} 0", (outer == 0).all(axis=1)
    if (outer[:, 0] == 1).any():
        yield f", {axes[0]} +1", (outer[:, 0] == 1) & (outer[:, 1:] == 0).all(axis=1)


def _maps(views: Sequence[View], axes: Sequence[str]) -> list[Figure]:
    means: list[Row] = []
    absolutes: list[Row] = []
    heads: list[Row] = []
    if len(axes) < 2:
        return []
    with np.errstate(invalid="ignore"):
        for view in views:
            if view.encoding == "none" or view.state == STATES[2]:
                continue
            for part, inside in _slices(axes, view.offsets):
                panel = f"{label(view.encoding)}, {view.state}{part}"
                means += _cells(panel, view, view.heads.mean(axis=0), inside)
                if view.shares.max() > EXACT:
                    absolutes += _cells(panel, view, 100 * view.absolute.mean(axis=0), inside)
                if view.state == "trained" and not part.endswith("+1"):
                    for head in range(min(HEADS_DRAWN, len(view.runs[0]["mean"][0]))):
                        score = np.array(view.runs[0]["mean"][0][head])
                        heads += _cells(f"{label(view.encoding)}, head {head + 1}{part}", view, score, inside)
    x, y = (Axis(key, f"Offset along {axis}", "tokens") for key, axis in zip("xy", (axes[-1], axes[-2]), strict=True))
    figures = [
        ("kernel", "Score by offset", "Mean score", "", means, "Mean over heads and layers; 1 is that of a token with "
         "itself.", "highest at offset 0"),
        ("kernel-heads", "Score by offset, heads of the first layer", "Mean score", "", heads,
         "Heads of the first layer, trained, of the first seed.", "heads differ in direction and reach"),
        ("kernel-absolute", "Absolute part by offset", "Absolute part", "%", absolutes,
         "Deviation of pairs with the same offset, relative to the scores; mean over heads and layers. Offsets of a "
         "single pair and encodings without absolute part are left out.", "zero for all others, up to rounding"),
    ]  # fmt: skip
    return [
        Figure(
            name=name,
            kind="cells",
            title=title,
            alt=f"{title} along the last two axes, one small picture for each encoding and state: {shows}.",
            x=x,
            y=y,
            rows=rows,
            panel="panel",
            colour=Axis("value", meaning, unit),
            caption=caption,
        )
        for name, title, meaning, unit, rows, caption, shows in figures
        if rows
    ]


def _cells(panel: str, view: View, values: np.ndarray, inside: np.ndarray) -> list[dict[str, Any]]:
    return [
        {"panel": panel, "x": int(offset[-1]), "y": int(offset[-2]), "value": round(float(value), 6)}
        for offset, value in zip(view.offsets[inside], values[inside], strict=True)
        if value == value
    ]


def _by_distance(views: Sequence[View]) -> Figure:
    rows: list[dict[str, Any]] = []
    for view in views:
        if view.encoding == "none":
            continue
        distance = np.sqrt((view.offsets**2).sum(axis=1)).round().astype(int)
        absolute = view.absolute
        known = ~np.isnan(absolute[0])
        for steps in np.unique(distance[known]):
            values = absolute[:, known & (distance == steps)].mean(axis=1)
            found = cells("absolute", drawn_mean(100 * values[None]).interval())
            rows.append({"panel": view.state, "name": view.encoding, "distance": int(steps), **found})
    return Figure(
        name="absolute-by-distance",
        kind="lines",
        title="Absolute part by distance",
        alt="Absolute part of the scores in percent by distance in tokens, one line for each encoding.",
        x=Axis("distance", "Distance", "tokens"),
        y=Axis("absolute", "Absolute part", "%"),
        rows=rows,
        series="name",
        panel="panel",
        low="absolute_low",
        high="absolute_high",
        caption="Distances are rounded to whole tokens; bands are 95 % intervals over heads.",
    )


STUDY = Study(
    title="Score by offset",
    question="How do attention scores depend on the offset of two tokens, and how much on absolute position?",
    sources=("In none of the papers: the effect of LieRE's generators that do not commute",),
    find=find,
    needs_lattice=True,
    encodings=("none", "learned", "axial", "mixed", "liere:8", "liere", "comrope-ld"),
)
