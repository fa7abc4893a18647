"""Reconstruction of a point from an encoding's frequencies or blocks (RoPE-ViT figure 1)."""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchrope.encodings import Encoding, MixedRoPE, NoEncoding, planar
from torchrope.lattice import spaced
from torchrope.models import ViT
from torchrope.positions import PerAxis, grid
from torchrope_lab.conclusion import join_names
from torchrope_lab.encodings import resolve_encoding
from torchrope_lab.results import Axis, Check, Column, Figure, Findings, Row, Table
from torchrope_lab.studies.describe import label
from torchrope_lab.studies.engine.checkpoints import Checkpoint, read_checkpoints, warned
from torchrope_lab.studies.engine.estimates import cells, drawn_mean, percent, with_interval
from torchrope_lab.studies.engine.published import ROPE_VIT
from torchrope_lab.studies.engine.runs import untrained
from torchrope_lab.studies.engine.study import Lab, Study

LATTICE = (14, 14)
HEADS, HEAD_DIM = 12, 64
"""ViT-B at 224x224 pixels with patches of 16x16, as in the paper."""
RELATIVE_CUTOFF = 1e-6
"""Singular values below this share of the largest are dropped, because they would need huge weights."""
EXACT = 1e-9
FIT, TRANSFORM = "best fit", "transform and back"


@dataclass(frozen=True)
class Heads:
    """The heads of one layer with one encoding on one lattice.

    Attributes:
        encoding: Name of the encoding.
        state: "initialisation" or "trained", with the setting.
        sizes: Tokens along each axis.
        blocks: R `(heads, tokens, n, b, b)`, heads of all seeds, or one if they are equal. Unrotated channels are left
            out.
        head_dim: Channels of a head.
        one_axis: Whether each block depends on one axis only.
        per_seed: Heads of one seed.
        title: Title shown in the report; by default that of the encoding's name.
    """

    encoding: str
    state: str
    sizes: tuple[int, ...]
    blocks: Tensor
    head_dim: int
    one_axis: bool
    per_seed: int
    title: str = ""

    @property
    def functions(self) -> Tensor:
        """Matrix coefficients of R as functions of the token, `(heads, tokens, functions)`."""
        entries = self.blocks.flatten(2)
        rest = self.head_dim - self.blocks.shape[-3] * self.blocks.shape[-1]
        return torch.cat([entries, entries.new_ones(*entries.shape[:-1], 1)], -1) if rest else entries


def heads_of(
    encodings: Sequence[Encoding],
    sizes: Sequence[int],
    name: str,
    state: str,
    *,
    spacing: PerAxis | None = None,
    origin: PerAxis | None = None,
    title: str = "",
) -> Heads:
    """Compute the rotations of a lattice in float64.

    Args:
        encodings: Encodings of one layer, one per seed.
        sizes: Tokens along each axis.
        name: The encoding's.
        state: State shown in the report.
        spacing, origin: Spacing and origin of the lattice; by default as in the encoding's paper.
        title: Title shown in the report; by default that of the name.
    """
    found = []
    with torch.no_grad():
        for encoding in encodings:
            paper = encoding.lattice(*sizes)
            positions = grid(
                *sizes,
                spacing=paper["spacing"] if spacing is None else spacing,
                origin=paper["origin"] if origin is None else origin,
                dtype=torch.float64,
            )
            exact = copy.deepcopy(encoding).cpu().double()
            found.append(exact(positions).blocks().double())
            nonzero = exact.generators().abs().amax(dim=(-1, -2)) > 0  # (axes, heads, blocks)
    alike = bool((found[0].shape[0] == 1) and all(torch.equal(found[0], each) for each in found))
    blocks = found[0] if alike else torch.cat(found)
    one_axis = not isinstance(encodings[0], NoEncoding) and bool((nonzero.sum(dim=0) <= 1).all())
    return Heads(name, state, tuple(sizes), blocks, encodings[0].head_dim, one_axis, len(found[0]), title)


def best_fit(functions: Tensor) -> tuple[Tensor, int]:
    """Reconstruct every point of a lattice from functions, by least squares.

    Args:
        functions: `(tokens, functions)`.

    Returns:
        The orthogonal projector onto their span, `(tokens, tokens)`, whose rows are the reconstructions, and the span's
        dimension.
    """
    left, strength, _ = torch.linalg.svd(functions, full_matrices=False)
    basis = left[:, strength > RELATIVE_CUTOFF * strength[0]]
    return basis @ basis.mT, basis.shape[1]


def transform(blocks: Tensor, head_dim: int) -> Tensor:
    """Reconstruct every point by the transform with the encoding's frequencies and its inverse:  tr(R(p₀)^T R(p)) / d.

    For blocks of 2 this is the mean of cos θ·(p - p₀) over the frequencies θ: the discrete Fourier transform of a point
    and its inverse, with these frequencies only.

    Args:
        blocks: `(tokens, n, b, b)`.
        head_dim: d.

    Returns:
        `(points, tokens)`.
    """
    flat = blocks.flatten(1)
    unrotated = head_dim - blocks.shape[-3] * blocks.shape[-1]
    return (flat @ flat.mT + unrotated) / head_dim


def sharpness(reconstructions: Tensor, sizes: Sequence[int]) -> dict[str, float]:
    """Measure the sharpness of reconstructions of points, mean over the points.

    Args:
        reconstructions: One per point, `(points, tokens)`, points row-major as the tokens.
        sizes: Tokens along each axis.

    Returns:
        peak: value at the point, originally 1; outside: share of the energy, the sum of squares, outside the point;
        lines: share of that energy on lines along the axes through the point; width: root mean square distance
        from the point, in tokens, weighted by energy.
    """
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


def all_frequencies(sizes: Sequence[int]) -> Heads:
    """Build one head with every frequency of a lattice's discrete Fourier transform, 2π k / size along each axis."""
    count = math.prod(sizes)
    encoding = MixedRoPE(num_axes=len(sizes), num_heads=1, head_dim=2 * count).double()
    waves = grid(*sizes, dtype=torch.float64) * 2 * math.pi / torch.tensor(sizes, dtype=torch.float64)
    encoding.set_generators(planar(waves.mT.unsqueeze(1)))
    return heads_of([encoding], sizes, "all", "all frequencies")


def find(lab: Lab) -> Findings:
    """Reconstruct points from each encoding, at initialisation and from finished runs in the same folder."""
    rotary = [name for name in lab.encodings if issubclass(resolve_encoding(name).parts[-1], Encoding)]
    checkpoints = read_checkpoints(lab.checkpoints, lab.encodings)
    rotating = [each for each in checkpoints if each.sites]
    if not rotary and not rotating:
        names = [*lab.encodings, *(each.name for each in checkpoints)]
        raise ValueError(f"fourier needs rotary encodings, got {', '.join(names)}")
    notes = warned(checkpoints)
    notes += [f"{each.name} left out: it has no rotary encoding." for each in checkpoints if not each.sites]
    if left_out := [name for name in lab.encodings if name not in rotary]:
        notes.append(f"{join_names(left_out)} left out: not rotary.")
    measured = []
    for name in rotary:
        try:
            encodings = [_at_start(name, seed) for seed in lab.seeds]
        except ValueError as error:
            notes.append(f"{name} left out: {error}.")
            continue
        measured.append(heads_of(encodings, LATTICE, name, "ViT-B, initialisation"))
    for name in rotary:
        measured += _trained(lab, name)
    measured += [_of_checkpoint(each) for each in rotating]
    rows = [_row(heads) for heads in measured]
    return Findings(
        answer=_answer(rows),
        tables=[_table(rows)],
        figures=[_maps(measured), _bars(rows)],
        checks=_checks(measured),
        notes=[*notes, *_notes(measured)],
    )


def _at_start(name: str, seed: int) -> Encoding:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return resolve_encoding(name).rotary(num_axes=len(LATTICE), num_heads=HEADS, head_dim=HEAD_DIM)


def _trained(lab: Lab, name: str) -> list[Heads]:
    """Return the first layer of finished runs, trained and at initialisation."""
    if lab.config.model.backbone != "vit":
        return []
    runs = [lab.store.finished(lab.run(name, seed)) for seed in lab.seeds]
    starts, ends = [], []
    for run in runs:
        if run is None or run.val_loss is None:
            continue
        end, data = run.load()
        start = untrained(run.run, data)
        assert isinstance(start, ViT)
        assert isinstance(end, ViT)
        starts.append(start)
        ends.append(end)
    if not ends:
        return []
    sizes = ends[0].embed.lattice(data.input_size)
    at: dict[str, Any] = dict(spaced(ends[0].position_map, sizes))
    return [
        heads_of([_first(model) for model in models], sizes, name, f"{data.name}, {state}", **at)
        for models, state in ((starts, "initialisation"), (ends, "trained"))
    ]


def _of_checkpoint(checkpoint: Checkpoint) -> Heads:
    """Return the first layer of a checkpoint, on its training lattice."""
    first = checkpoint.sites[0]
    state = f"checkpoint, {'x'.join(map(str, first.sizes))} tokens"
    return heads_of(
        [first.encoding],
        first.sizes,
        checkpoint.name,
        state,
        spacing=first.spacing,
        origin=first.origin,
        title=f"{checkpoint.name} ({checkpoint.title})",
    )


def _first(model: ViT) -> Encoding:
    encoding = model.encodings[0]
    assert isinstance(encoding, Encoding)
    return encoding


def _row(heads: Heads) -> dict[str, Any]:
    fits = [best_fit(each) for each in heads.functions]
    fitted = [sharpness(projector, heads.sizes) for projector, _ in fits]
    back = [sharpness(transform(each, heads.head_dim), heads.sizes) for each in heads.blocks]
    all_heads = heads.functions[: heads.per_seed].transpose(0, 1).flatten(1)
    row: dict[str, Any] = {
        "name": f"{heads.title or heads.encoding}, {heads.state}",
        "encoding": heads.encoding,
        "state": heads.state,
        "tokens": math.prod(heads.sizes),
        "dimension": float(np.mean([dimension for _, dimension in fits])),
        "together": _dimension_of_many(all_heads),
        "heads": len(heads.blocks),
    }
    for prefix, values in (("fit", fitted), ("back", back)):
        for key in ("peak", "outside", "lines", "width"):
            numbers = np.array([[each[key] for each in values]]) * (1 if key == "width" else 100)
            row |= cells(f"{prefix}_{key}", drawn_mean(numbers).interval())
    return row


def _dimension_of_many(functions: Tensor) -> int:
    """Compute the dimension of the span of many functions from their Gram matrix over tokens."""
    strength = torch.linalg.eigvalsh(functions @ functions.mT)
    return int((strength > RELATIVE_CUTOFF**2 * strength[-1]).sum())


def _table(rows: Sequence[Row]) -> Table:
    return Table(
        "Reconstruction of a point",
        (
            Column("name", "Encoding"),
            with_interval("fit_outside", "Best fit: energy outside the point", "%", 1),
            with_interval("fit_lines", "Of it on lines along the axes", "%", 1),
            with_interval("fit_width", "Width", "tokens", 2),
            Column("dimension", "Dimensions, one head", digits=1),
            Column("together", "All heads", digits=0),
            Column("tokens", "Of", digits=0),
            with_interval("back_outside", "Transform and back: energy outside", "%", 1),
            with_interval("back_lines", "Of it on lines along the axes", "%", 1),
            with_interval("back_width", "Width", "tokens", 2),
            Column("heads", "Heads", digits=0),
        ),
        rows,
        note="A point is 1 at a token and 0 at all others; means over all tokens. The best fit is by least squares "
        "from the matrix coefficients of R(p), cosines and sines for blocks of 2, without directions weaker than "
        f"{RELATIVE_CUTOFF:g} of the strongest. Transform and back is the paper's: tr(R(p₀)ᵀR(p))/d. Energy is the sum "
        "of squares, width the root mean square distance from the point. Intervals are over the heads of one layer and "
        "all seeds; if all heads are equal, one is shown without interval.",
    )


def _percent(row: dict[str, Any]) -> str:
    """Format the energy outside the point, with an interval if there are several heads."""
    found = [row[f"fit_outside{end}"] for end in ("", "_low", "_high")]
    return f"{found[0]:.1f} %" if row["heads"] == 1 else percent(found)


def _answer(rows: Sequence[dict[str, Any]]) -> str:
    state = rows[-1]["state"]
    least, *_, most = (
        sorted((row for row in rows if row["state"] == state), key=lambda row: row["fit_outside"]) * 2
    )  # doubled: it unpacks for one row, too
    others = f", and most with {most['encoding']}, {_percent(most)}" if most is not least else ""
    return (
        f"By best fit one head has least energy outside a point with {least['encoding']}, {_percent(least)}{others} "
        f"({state})."
    )


def _checks(measured: Sequence[Heads]) -> list[Check]:
    off = 0.0
    for sizes in (LATTICE, (4, 3, 5)):
        heads = all_frequencies(sizes)
        identity = torch.eye(math.prod(sizes), dtype=torch.float64)
        fit, _ = best_fit(heads.functions[0])
        back = transform(heads.blocks[0], heads.head_dim)
        off = max(off, float((fit - identity).abs().max()), float((back - identity).abs().max()))
    checks = [
        Check(
            "With all frequencies of the lattice both reconstructions are exact, over two axes and over three",
            off < EXACT,
            f"off by {off:.1e} at most",
        )
    ]
    alone = [heads for heads in measured if heads.one_axis and min(heads.sizes) > 1]
    if alone:
        bend = max(_bend(best_fit(heads.functions[0])[0], heads.sizes) for heads in alone)
        checks.append(
            Check(
                "Blocks that depend on one axis each reconstruct sums of functions of one axis",
                bend < EXACT,
                f"largest mixed difference {bend:.1e}",
            )
        )
    return checks


def _bend(reconstructions: Tensor, sizes: Sequence[int]) -> float:
    """Return the largest mixed difference over the last two axes, which is 0 for sums of functions of one axis.

    The mixed difference is f(x, y) - f(x', y) - f(x, y') + f(x', y') for adjacent x, x' and y, y'.
    """
    lattice = reconstructions.unflatten(1, tuple(sizes))
    return float(lattice.diff(dim=-1).diff(dim=-2).abs().max())


def _notes(measured: Sequence[Heads]) -> list[str]:
    states = [heads.state for heads in measured]
    trained = any("trained" in state for state in states)
    source = "the first layers of runs in the same folder" if trained else "shown if the folder has runs"
    about_runs = (
        f"ViT-B here is at initialisation, 14x14 tokens, 12 heads of 64 channels; trained encodings are {source}."
    )
    about_checkpoints = (
        "Of checkpoints the first layer is shown, on their training lattice or window; shares of energy on lattices of "
        "different sizes cannot be compared."
    )
    return [
        "RoPE-ViT's figure prints no numbers; it shows axial frequencies, and those of RoPE-Mixed trained on ImageNet.",
        *([about_runs] if any("initialisation" in state for state in states) else []),
        *([about_checkpoints] if any(state.startswith("checkpoint") for state in states) else []),
        "For blocks larger than 2 the span of the coefficients is larger than what one query and one key can "
        "represent, which weight the b² coefficients by a product of their channels.",
    ]


def _maps(measured: Sequence[Heads]) -> Figure:
    """Build maps of the middle point's reconstruction by the first head; for more than two axes, a plane through it."""
    rows: list[dict[str, Any]] = []
    for heads in measured:
        middle = tuple(size // 2 for size in heads.sizes)
        point = int(np.ravel_multi_index(middle, heads.sizes))
        fit, _ = best_fit(heads.functions[0])
        back = transform(heads.blocks[0], heads.head_dim)
        for way, values in ((FIT, fit[point]), (TRANSFORM, back[point])):
            lattice = values.view(heads.sizes)[middle[:-2]]
            lattice = lattice.unsqueeze(0) if lattice.ndim == 1 else lattice
            panel = f"{heads.title or label(heads.encoding)}, {heads.state}, {way}"
            rows += [
                {"panel": panel, "x": x, "y": y, "value": round(float(lattice[y, x]), 6)}
                for y in range(lattice.shape[0])
                for x in range(lattice.shape[1])
            ]
    return Figure(
        name="reconstruction",
        kind="cells",
        title="A point, reconstructed",
        alt="Reconstruction of the point in the middle of the lattice by one head of each encoding, by best fit and by "
        "transform and back; axial encodings give a cross.",
        x=Axis("x", "Column", "tokens"),
        y=Axis("y", "Row", "tokens"),
        rows=rows,
        panel="panel",
        colour=Axis("value", "Reconstruction"),
        caption="The first head of the first layer. An exact reconstruction is 1 in the middle and 0 elsewhere.",
    )


def _bars(rows: Sequence[dict[str, Any]]) -> Figure:
    shown = [
        {
            "panel": f"{row['state']}, {way}",
            "name": row["encoding"],
            **cells("outside", [row[f"{key}_outside{end}"] for end in ("", "_low", "_high")]),
        }
        for row in rows
        for way, key in ((FIT, "fit"), (TRANSFORM, "back"))
    ]
    return Figure(
        name="outside",
        kind="points",
        title="Energy outside the point",
        alt="Energy outside the point in percent by encoding, by best fit and by transform and back.",
        x=Axis("outside", "Energy outside", "%"),
        y=Axis("name", "Encoding", scale="category"),
        rows=shown,
        series="name",
        panel="panel",
        low="outside_low",
        high="outside_high",
        caption="Lines are 95 % intervals over heads.",
    )


STUDY = Study(
    title="Locating a point",
    question="How sharply can a point be reconstructed from an encoding's frequencies or blocks?",
    sources=(f"{ROPE_VIT}, figure 1",),
    find=find,
    encodings=("axial", "mixed", "golden", "liere:8", "liere", "comrope-ap", "comrope-ld", "string"),
    needs_data=False,
    optional_settings=("checkpoint",),
)
