"""Elements of trained generators, and their distance from commuting (ComRoPE table 8, figure 8)."""

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchrope.encodings import Encoding, commutator_ratio, upper_triangle
from torchrope.positions import per_axis
from torchrope_lab.conclusion import Interval
from torchrope_lab.data.datamodule import DataModule
from torchrope_lab.engine.estimates import (
    VERDICT,
    Columns,
    change_sentence,
    drawn_mean,
    estimate_in,
    format_interval,
    simultaneous_intervals,
    table_of,
    verdict_of,
    with_interval,
)
from torchrope_lab.engine.figures import Point, figure, line_figure
from torchrope_lab.engine.runs import Measure, Run, untrained
from torchrope_lab.engine.study import Lab
from torchrope_lab.engine.trained_models import NAME_COLUMNS, Measures, Site, select_models, sites_of
from torchrope_lab.results import Axis, Column, Figure, Findings, Row
from torchrope_lab.statistics import BootstrapEstimate, draw
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
    free = {each.name: _change(each) for each in measured if START in each.results[0] and not _commutes(each)}
    moved = simultaneous_intervals({name: change for name, change in free.items() if change.examples > 1})
    table = table_of("Generators at the start and trained", _columns(moved), measured, _NOTE)
    return Findings(
        answer=_answer(table.rows, moved, len(lab.seeds)),
        tables=[table],
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


def with_zeros(summary: Measures) -> np.ndarray:
    """Return the moments of trained generators with the elements of zero blocks counted, `(heads, 3)`."""
    return summary.pool(END, "moments") + np.outer(summary.pool(END, "zeros"), [1, 0, 0])


def _moments(elements: Tensor) -> list[float]:
    return [len(elements), elements.sum().item(), elements.square().sum().item()]


def deviation(moments: np.ndarray) -> BootstrapEstimate:
    """Compute the standard deviation of all elements, also for bootstrap draws of the heads."""
    # `moments` are number, sum and sum of squares of each head's elements, `(heads, 3)`.

    def of(moments: np.ndarray, weights: np.ndarray) -> np.ndarray:
        count, total, squares = np.moveaxis(weights @ moments, -1, 0)
        count = np.maximum(count, 1)  # generators that are zero have no elements
        return np.sqrt(np.maximum(squares / count - (total / count) ** 2, 0))

    return draw([partial(of, moments)], len(moments))


def _or_mean(found: BootstrapEstimate) -> tuple[float, float | None, float | None]:
    """Return the mean with its interval, or without if there is one head."""
    return found.interval() if found.examples > 1 else (found.mean, None, None)


def _commutes(found: Measures) -> bool:
    return bool(found.results[0]["relative"])


def _change(found: Measures) -> BootstrapEstimate:
    """Compute the change of the distance from commuting by training."""
    return drawn_mean(found.pool(END, "apart") - found.pool(START, "apart"))


def _columns(moved: Mapping[str, Interval]) -> Columns:
    def if_known(value: Callable[[Measures], Any]) -> Callable[[Measures], Any]:
        return lambda found: value(found) if START in found.results[0] else None

    def verdict(found: Measures) -> str:
        if _commutes(found):
            return "commutes"
        if START not in found.results[0]:
            return "start unknown"
        return verdict_of(moved[found.name], "further", "nearer") if found.name in moved else "one head"

    def deviation_of(when: str, key: str) -> Callable[[Measures], Any]:
        return lambda found: _or_mean(deviation(found.pool(when, key)))

    start = if_known(lambda found: deviation(found.pool(START, "moments")).mean)
    apart_start = if_known(lambda found: drawn_mean(found.pool(START, "apart")).mean)
    change = if_known(lambda found: moved.get(found.name) or _or_mean(_change(found)))
    path = if_known(lambda found: _or_mean(drawn_mean(100 * found.pool("path"))))
    return (
        *NAME_COLUMNS,
        (Column("block", "Block size", digits=0), lambda found: found.results[0][END]["block"]),
        (Column("start", "σ at the start", "rad per unit", 3), start),
        (with_interval("end", "σ trained", "rad per unit", 3), deviation_of(END, "moments")),
        (
            with_interval("with_zeros", "σ trained, zero blocks counted", "rad per unit", 3),
            lambda found: _or_mean(deviation(with_zeros(found))),
        ),
        (with_interval("patch", "σ trained", "rad per patch", 3), deviation_of(END, "patch_moments")),
        (Column("apart_start", "Distance from commuting, at the start", digits=3), apart_start),
        (
            with_interval("apart", "Distance from commuting, trained", digits=3),
            lambda found: _or_mean(drawn_mean(found.pool(END, "apart"))),
        ),
        (with_interval("moved", "Change", digits=3), change),
        (VERDICT, verdict),
        (with_interval("path", "Change by training / initial norm", "%", 1), path),
    )


_NOTE = (
    "σ is the standard deviation of the elements above the diagonal. The distance from commuting is "
    "‖AB − BA‖ / (‖A‖ ‖B‖), the mean over pairs of axes, blocks, heads and layers: 0 if the generators commute, "
    "at most 1. The distance from the start is ‖A′ − A‖ / ‖A‖, A at the start and A′ trained. Intervals are over the "
    "heads of all layers; those of changes are simultaneous over families that need not commute."
)


def _answer(rows: Sequence[Mapping[str, Any]], moved: Mapping[str, Interval], seeds: int) -> str:
    if moved:
        return change_sentence("training", "the distance from commuting", moved, seeds, "", 3)
    free = [row for row in rows if row["verdict"] != "commutes"]
    if not free:
        before = "" if all(row["start"] is None for row in rows) else ", before and after training"
        return f"All generators commute by construction{before}."
    furthest = max(free, key=lambda row: row["apart"])
    found = estimate_in(furthest, "apart")
    value = f"{found[0]:.3f}" if found[1] is None else format_interval(found, digits=3)
    return f"The generators of {furthest['name']} are furthest from commuting, {value} of at most 1."


def _known(found: Measures) -> dict[str, str]:
    """Return the times at which generators are known: for a checkpoint only the end."""
    return {when: title for when, title in WHEN.items() if when in found.results[0]}


def _by_layer(measured: Sequence[Measures]) -> Figure:
    points: list[Point] = []
    for found in measured:
        layers = found.pool(END, "layer")
        for when, title in _known(found).items():
            apart = found.pool(when, "apart")
            points += [
                (found.name, title, int(layer), _or_mean(drawn_mean(apart[layers == layer])))
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
