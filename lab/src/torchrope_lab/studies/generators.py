"""Elements of trained generators, and their distance from commuting (ComRoPE table 8, figure 8)."""

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchrope.encodings import Encoding, commutator_ratio, upper_triangle
from torchrope.positions import per_axis
from torchrope_lab.data.datamodule import DataModule
from torchrope_lab.engine.estimates import drawn_mean, simultaneous_intervals, verdict_of, weighted_mean
from torchrope_lab.engine.figures import Point, figure, line_figure
from torchrope_lab.engine.long_table import (
    VERDICT,
    Cell,
    Columns,
    Quantity,
    Statistic,
    change_sentence,
    name_columns,
    ranking,
    table_of,
    with_interval,
)
from torchrope_lab.engine.runs import Measure, Run, untrained
from torchrope_lab.engine.study import Lab
from torchrope_lab.engine.trained_models import Measures, Site, select_models, sites_of
from torchrope_lab.results import Axis, Column, Figure, Findings, Row
from torchrope_lab.training.models import Model

START, END = "start", "end"
MOVED = "generators-moved-with-zeros"
WHEN = {START: "At the start", END: "Trained"}
KEPT = 20_000  # elements of a run that are stored for its density
BINS = 60


def find(lab: Lab) -> Findings:
    """Summarise the generators of the runs of the accuracy study, of other block sizes, and of checkpoints."""
    models = select_models(lab, lab.encodings, lab.checkpoints).select(_learn, "it has no learned generators")
    measured = models.measure(
        movement,
        lambda file: {END: summarise(file.sites), "relative": all(site.encoding.relative for site in file.sites)},
    )
    if not measured:
        return Findings(models.unmeasured("None of the encodings has learned generators."))
    known = [each for each in measured if START in each.results[0]]
    by_cell = {each.at(): each for each in measured}
    sigma, distance = "σ trained", "Distance from commuting"

    def over_heads(shown: Column, *keys: str, of: Statistic = weighted_mean) -> Quantity:
        which = measured if keys[0] == END else known
        return Quantity({each.at(): each.pool(*keys)[None] for each in which}, shown, of)

    with_zeros = {cell: _with_zeros(each)[None] for cell, each in by_cell.items()}
    apart = over_heads(with_interval("apart", f"{distance}, trained", digits=3), END, "apart")
    changes = {each.at(): (each.pool(END, "apart") - each.pool(START, "apart"))[None] for each in known}
    change = Quantity(changes, with_interval("moved", "Change", digits=3))
    commuting = {cell for cell, each in by_cell.items() if each.results[0]["relative"]}
    several = {cell: each for cell, each in change.estimates.items() if each.examples > 1 and cell not in commuting}
    moved = simultaneous_intervals(several)

    def verdict(cell: Cell) -> str:
        if cell in commuting:
            return "commutes"
        if cell not in changes:
            return "start unknown"
        return verdict_of(moved[cell], "further", "nearer") if cell in moved else "one head"

    unit, shown = "rad per unit", with_interval
    columns: Columns = (
        *name_columns({each.name: each.title for each in measured}),
        (Column("block", "Block size", digits=0), lambda cell: by_cell[cell].results[0][END]["block"]),
        over_heads(shown("start", "σ at the start", unit, 3), START, "moments", of=deviation).column,
        over_heads(shown("end", sigma, unit, 3), END, "moments", of=deviation).column,
        Quantity(with_zeros, shown("with_zeros", f"{sigma}, zero blocks counted", unit, 3), deviation).column,
        over_heads(shown("patch", sigma, "rad per patch", 3), END, "patch_moments", of=deviation).column,
        over_heads(shown("apart_start", f"{distance}, at the start", digits=3), START, "apart").column,
        apart.column,
        (change.shown, lambda cell: moved.get(cell) or change.column[1](cell)),
        (VERDICT, verdict),
        over_heads(shown("path", "Change by training / initial norm", "%", 1), "path").column,
    )
    answer = "All generators commute by construction."
    if moved:
        answer = change_sentence("training", "the distance from commuting", moved, len(lab.seeds), "", 3)
    elif free := {cell: "" for cell in by_cell if cell not in commuting}:
        first = max(free, key=lambda cell: apart.estimates[cell].mean)
        answer = f"{ranking('The distance from commuting is largest', {first: ''}, apart.interval, '', 3)}."
    return Findings(
        answer=answer,
        tables=[table_of("Generators at the start and trained", columns, by_cell, _NOTE)],
        figures=[_by_layer(measured), *_densities(measured)],
    )


def movement(run: Run) -> Measure:
    """Return the measure of a run's generators at the start and trained, and of their change."""
    return Measure(MOVED, partial(_movement, run=run))


def _movement(model: Model, data: DataModule, run: Run) -> dict[str, Any]:
    before, after = sites_of(untrained(run, data)), sites_of(model)
    relative = all(site.encoding.relative for site in after)
    path = relative_change(before, after)
    return {START: summarise(before), END: summarise(after), "path": path, "relative": relative}


def summarise(sites: Sequence[Site]) -> dict[str, Any]:
    """Summarise the generators of a model: lists with one entry per layer and head, and some of the elements."""
    # `apart` is `commutator_ratio`. `moments` and `patch_moments` are number, sum and sum of squares of the elements
    # per unit of position and per patch, without zero blocks, whose elements `zeros` counts. `elements` are per patch,
    # at most KEPT; `block` is the block size.
    found: dict[str, Any] = {"layer": [], "apart": [], "moments": [], "patch_moments": [], "zeros": []}
    elements = []
    for layer, site in enumerate(sites, start=1):
        a = _generators(site)
        steps = torch.tensor(per_axis("spacing", site.spacing, len(a)), dtype=a.dtype).reshape(-1, 1, 1, 1, 1)
        for head in range(a.shape[1]):
            per_unit, per_patch = strict_upper(a[:, head]), strict_upper((a * steps)[:, head])
            found["layer"].append(layer)
            found["apart"].append(commutator_ratio(a[:, head]).mean().item())
            found["moments"].append(_moments(per_unit))
            found["patch_moments"].append(_moments(per_patch))
            found["zeros"].append(upper_triangle(a[:, head]).numel() - len(per_unit))
            elements.append(per_patch)
    all_elements = torch.cat(elements)
    kept = all_elements[:: max(1, -(-len(all_elements) // KEPT))].tolist()
    return {**found, "elements": kept, "block": sites[0].encoding.block_size}


def strict_upper(generators: Tensor) -> Tensor:
    """Return the elements above the diagonal of generators `(axes, blocks, b, b)`, flat, without zero blocks."""
    nonzero = generators.flatten(2).any(dim=-1)
    return upper_triangle(generators[nonzero]).flatten()


def _generators(site: Site) -> Tensor:
    """Return the generators in float64 on the CPU, `(axes, heads, blocks, b, b)`, heads as parameters have them."""
    encoding = copy.deepcopy(site.encoding).cpu().double()
    return encoding.generators().detach()[:, : encoding.parameter_heads]


def _learn(encodings: Sequence[Encoding]) -> bool:
    return any(parameter.requires_grad for each in encodings for parameter in each.parameters())


def relative_change(before: Sequence[Site], after: Sequence[Site]) -> list[float]:
    """Compute the change of generators by training,  ‖A' - A‖ / ‖A‖  over all axes, one number per layer and head."""
    shares = []
    for site, changed in zip(before, after, strict=True):
        for a, b in zip(*(_generators(each).flatten(2).unbind(1) for each in (site, changed)), strict=True):
            shares.append((b - a).norm().item() / (a.norm().item() or 1.0))
    return shares


def _with_zeros(found: Measures) -> np.ndarray:
    """Return the moments of trained generators with the elements of zero blocks counted, `(heads, 3)`."""
    return found.pool(END, "moments") + np.outer(found.pool(END, "zeros"), [1, 0, 0])


def _moments(elements: Tensor) -> list[float]:
    return [len(elements), elements.sum().item(), elements.square().sum().item()]


def deviation(moments: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Compute the standard deviation of the elements of all heads in draws of the heads, `(draws, heads)`."""
    # `moments` are number, sum and sum of squares of each head's elements, `(heads, 3)`.
    count, total, squares = np.moveaxis(weights @ moments, -1, 0)
    count = np.maximum(count, 1)  # generators that are zero have no elements
    return np.sqrt(np.maximum(squares / count - (total / count) ** 2, 0))


_NOTE = (
    "σ is the standard deviation of the elements above the diagonal. The distance from commuting is "
    "‖AB − BA‖ / (‖A‖ ‖B‖), the mean over pairs of axes, blocks, heads and layers: 0 if the generators commute, "
    "at most 1. The distance from the start is ‖A′ − A‖ / ‖A‖, A at the start and A′ trained. Intervals are over the "
    "heads of all layers; those of changes are simultaneous over families that need not commute."
)


def _by_layer(measured: Sequence[Measures]) -> Figure:
    points: list[Point] = []
    for found in measured:
        layers = found.pool(END, "layer")
        for when, title in WHEN.items():
            if when not in found.results[0]:
                continue
            apart = found.pool(when, "apart")
            points += [
                (found.name, title, int(layer), drawn_mean(apart[layers == layer]).interval())
                for layer in np.unique(layers)
            ]
    return line_figure(
        Axis("layer", "Layer"),
        Axis("apart", "‖AB − BA‖ / (‖A‖ ‖B‖)"),
        points,
        panel="when",
        name="from-commuting",
        title="Distance of generators from commuting",
        caption="0: the generators commute. Bands are 95 % intervals over heads.",
    )


def _densities(measured: Sequence[Measures]) -> list[Figure]:
    rows: list[Row] = []
    for found in measured:
        elements, block = found.pool(END, "elements"), f"Blocks of {found.results[0][END]['block']}"
        if len(elements):
            density, edges = np.histogram(elements, bins=BINS, density=True)
            middles = (edges[1:] + edges[:-1]) / 2
            for x, y in zip(middles.tolist(), density.tolist(), strict=True):
                rows.append({"name": found.name, "block": block, "value": x, "density": y})
    element = Axis("value", "Element", "rad per patch")
    return [
        figure("density", "Density of the elements", element, Axis("density", "Density"), rows, panel="block"),
        figure(
            "density-log",
            "Density of the elements, logarithmic",
            element,
            Axis("density", "Density", scale="log"),
            [row for row in rows if row["density"]],
            "Empty bins are left out.",
            panel="block",
        ),
    ]
