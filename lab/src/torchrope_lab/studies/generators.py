"""Elements of trained generators, and their distance from commuting (ComRoPE table 8, figure 8)."""

import copy
import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchrope.encodings import Encoding
from torchrope.encodings.base import upper_triangle
from torchrope.models import Swin
from torchrope.positions import PerAxis, per_axis
from torchrope_lab.conclusion import Interval
from torchrope_lab.data.datamodule import DataModule
from torchrope_lab.results import Axis, Check, Column, Figure, Findings, Table
from torchrope_lab.statistics import BootstrapEstimate, draw
from torchrope_lab.studies.engine.checkpoints import Checkpoint, read_checkpoints, warned
from torchrope_lab.studies.engine.estimates import (
    NAMES,
    RESAMPLES,
    VERDICT,
    by_encoding,
    cells,
    change_sentence,
    format_interval,
    named,
    named_holm_intervals,
    verdict_of,
    weighted_mean,
    with_interval,
)
from torchrope_lab.studies.engine.feasible import feasible
from torchrope_lab.studies.engine.published import COMROPE, published
from torchrope_lab.studies.engine.runs import Run, untrained
from torchrope_lab.studies.engine.study import Lab, Study
from torchrope_lab.training.models import Model

START, END = "start", "end"
WHEN = {START: "At the start", END: "Trained"}
KEPT = 20_000  # elements of a run that are stored for its density
BINS = 60
COMMUTATOR_TOLERANCE = 1e-9

COLUMNS = (
    *NAMES,
    Column("block", "Block size", digits=0),
    Column("start", "σ at the start", "rad per unit", 3),
    with_interval("end", "σ trained", "rad per unit", 3),
    with_interval("patch", "σ trained", "rad per patch", 3),
    Column("apart_start", "Distance from commuting, at the start", digits=3),
    with_interval("apart", "Distance from commuting, trained", digits=3),
    with_interval("moved", "Change", digits=3),
    VERDICT,
    with_interval("path", "Change by training / initial norm", "%", 1),
)

PUBLISHED = (
    published(
        "Standard deviation of the elements of trained angle matrices, images at 224",
        f"{COMROPE}, table 8",
        """
        liere | 0.326 | 0.246 | 0.195
        comrope-ap | 0.271 | 0.208 | 0.171
        comrope-ld | 0.384 | 0.278 | 0.238
        """,
        ("Encoding", "Blocks of 2", "Blocks of 4", "Blocks of 8"),
        unit="rad per unit",
        digits=3,
        note="Without intervals; figure 8 prints no numbers. The text says variance, the table standard deviation. The "
        "supplement does not give the unit of position; in the published code an image has length 1.",
    ),
)


def find(lab: Lab) -> Findings:
    """Summarise the generators of the runs of the accuracy study, of other block sizes, and of checkpoints."""
    checkpoints = read_checkpoints(lab.checkpoints, lab.encodings)
    possible, notes = feasible(lab, lab.runs(lab.encodings))
    runs = [run for run in possible if any(_learn(lab.blueprint(run)))]
    fixed = dict.fromkeys(run.encoding for run in possible if run not in runs)
    notes += [f"{name} is left out: it has no learned generators." for name in fixed]
    learned = [each for each in checkpoints if any(_learns(site.encoding) for site in each.sites)]
    none = [each.name for each in checkpoints if each not in learned]
    notes += [f"{name} is left out: it has no learned generators." for name in none]
    notes += warned(checkpoints)
    if not runs and not learned:
        return Findings("None of the encodings has learned generators.", notes=notes)
    trained = lab.train(runs) if runs else []
    found = {each.run.key: each.measure("generators-moved", _measure(each.run)) for each in trained}
    groups = {name: [found[each.run.key] for each in of_one] for name, of_one in by_encoding(trained).items()}
    relative = {each.encoding: found[each.run.key]["relative"] for each in trained}
    moved = _moved({name: results for name, results in groups.items() if not relative[name]})
    rows = [_row(name, results, moved.get(name)) for name, results in groups.items()]
    groups |= {each.name: [_of_checkpoint(each)] for each in learned}
    relative |= {each.name: all(site.encoding.relative for site in each.sites) for each in learned}
    rows += [_row_of_checkpoint(each, groups[each.name], relative[each.name]) for each in learned]
    return Findings(
        answer=_answer(moved, len(lab.seeds)) if moved or not learned else _answer_of_checkpoints(rows),
        tables=[Table("Generators at the start and trained", COLUMNS, rows, note=_NOTE)],
        figures=[_by_layer(groups), *_densities(groups)],
        published=PUBLISHED,
        checks=_checks(groups, relative),
        notes=[*notes, *_UNITS, *([_ENDS_ALONE] if learned else [])],
    )


def summarise(encodings: Sequence[tuple[Encoding, PerAxis]]) -> dict[str, Any]:
    """Summarise the generators of a model.

    Args:
        encodings: Encodings of each layer, with the spacing of its patches.

    Returns:
        Lists with one entry per layer and head: `layer`, `apart` as `commutator_ratio`, and number, sum and sum of
        squares of the elements per unit of position (`moments`) and per patch (`patch_moments`); `elements` per patch,
        at most KEPT of them; `block`, the block size.
    """
    found: dict[str, Any] = {"layer": [], "apart": [], "moments": [], "patch_moments": []}
    elements = []
    for layer, (encoding, spacing) in enumerate(encodings, start=1):
        a = copy.deepcopy(encoding).double().generators().detach()
        steps = torch.tensor(per_axis("spacing", spacing, len(a)), dtype=a.dtype).reshape(-1, 1, 1, 1, 1)
        for head in range(encoding.parameter_heads):
            per_unit, per_patch = strict_upper(a[:, head]), strict_upper((a * steps)[:, head])
            found["layer"].append(layer)
            found["apart"].append(commutator_ratio(a[:, head]).mean().item())
            found["moments"].append(_moments(per_unit))
            found["patch_moments"].append(_moments(per_patch))
            elements.append(per_patch)
    all_elements = torch.cat(elements)
    first = encodings[0][0]
    return {
        **found,
        "elements": all_elements[:: max(1, -(-len(all_elements) // KEPT))].tolist(),
        "block": first.block_size,
    }


def commutator_ratio(generators: Tensor) -> Tensor:
    """Compute the distance of generators from commuting:  ‖A B - B A‖ / (‖A‖ ‖B‖), Frobenius norms; 0 if A or B is 0.

    Args:
        generators: `(axes, blocks, b, b)`.

    Returns:
        One number per pair of axes and block, `(axes (axes - 1) / 2, blocks)`; 0 to 1 for skew matrices.

    References:
        Bloch and Iserles, Commutators of skew-symmetric matrices, 2005: the bound.
    """
    ratios = []
    for a, b in itertools.combinations(generators, 2):
        norms = torch.linalg.matrix_norm(a) * torch.linalg.matrix_norm(b)
        ratios.append(torch.linalg.matrix_norm(a @ b - b @ a) / torch.where(norms > 0, norms, 1.0))
    return torch.stack(ratios) if ratios else generators.new_zeros(1, generators.shape[1])


def strict_upper(generators: Tensor) -> Tensor:
    """Return the elements above the diagonal of generators `(axes, blocks, b, b)`, flat, without zero blocks."""
    nonzero = generators.flatten(2).any(dim=-1)
    return upper_triangle(generators[nonzero]).flatten()


def _measure(run: Run) -> Any:
    def measure(model: Model, data: DataModule) -> dict[str, Any]:
        before, after = encodings_of(untrained(run, data)), encodings_of(model)
        found = {START: summarise(before), END: summarise(after)}
        return {**found, "path": relative_change(before, after), "relative": all(each.relative for each, _ in after)}

    return measure


def encodings_of(model: Model) -> list[tuple[Encoding, PerAxis]]:
    """Return the encodings of all layers on the CPU, with the spacing of patches, in a Swin of a stage's tokens."""
    parts: list[Any] = list(model.stages) if isinstance(model, Swin) else [model]
    return [(copy.deepcopy(each).cpu(), part.position_map.spacing) for part in parts for each in part.encodings]


def _of_checkpoint(checkpoint: Checkpoint) -> dict[str, Any]:
    """Summarise a checkpoint, whose initialisation is unknown."""
    return {END: summarise([(site.encoding, site.spacing) for site in checkpoint.sites])}


def _learn(model: Model) -> list[bool]:
    return [_learns(each) for each in model.modules() if isinstance(each, Encoding)]


def _learns(encoding: Encoding) -> bool:
    return any(parameter.requires_grad for parameter in encoding.parameters())


def relative_change(
    before: Sequence[tuple[Encoding, PerAxis]], after: Sequence[tuple[Encoding, PerAxis]]
) -> list[float]:
    """Compute the change of generators by training,  ‖A' - A‖ / ‖A‖  over all axes, one number per layer and head."""
    shares = []
    for (one, _), (other, _) in zip(before, after, strict=True):
        a, b = (copy.deepcopy(each).double().generators().detach().flatten(2) for each in (one, other))
        for head in range(one.parameter_heads):
            length = a[:, head].norm().item()
            shares.append((b[:, head] - a[:, head]).norm().item() / (length or 1.0))
    return shares


def _moments(elements: Tensor) -> list[float]:
    return [len(elements), elements.sum().item(), elements.square().sum().item()]


def _pooled(results: Sequence[dict[str, Any]], when: str, key: str) -> np.ndarray:
    """Stack the entries of all seeds, layers and heads."""
    return np.array([entry for each in results for entry in each[when][key]], dtype=float)


def deviation(moments: np.ndarray) -> BootstrapEstimate:
    """Compute the standard deviation of all elements, also for bootstrap draws of the heads.

    Args:
        moments: Number, sum and sum of squares of each head's elements, `(heads, 3)`.
    """

    def of(moments: np.ndarray, weights: np.ndarray) -> np.ndarray:
        count, total, squares = np.moveaxis(weights @ moments, -1, 0)
        count = np.maximum(count, 1)  # generators that are zero have no elements
        return np.sqrt(np.maximum(squares / count - (total / count) ** 2, 0))

    return draw([partial(of, moments)], len(moments), draws=RESAMPLES)


def mean(values: np.ndarray) -> BootstrapEstimate:
    """Compute the mean over heads of values `(heads,)`, also for bootstrap draws of the heads."""
    return draw([partial(weighted_mean, values)], len(values), draws=RESAMPLES)


def _cells(key: str, found: BootstrapEstimate) -> dict[str, float | None]:
    """Return cells with an interval if there are several heads."""
    return cells(key, found.interval() if found.examples > 1 else (found.mean, None, None))


def _moved(groups: dict[str, list[dict[str, Any]]]) -> dict[str, Interval]:
    """Compute the change of the distance from commuting by training, at 5 % over all families (Holm)."""
    apart = {name: _pooled(of, END, "apart") - _pooled(of, START, "apart") for name, of in groups.items()}
    return named_holm_intervals({name: mean(values).interval for name, values in apart.items() if len(values) > 1})


def _row(name: str, results: list[dict[str, Any]], moved: Interval | None) -> dict[str, Any]:
    before = _pooled(results, START, "apart")
    change = _pooled(results, END, "apart") - before
    return {
        **named(name),
        **_end(results),
        "start": deviation(_pooled(results, START, "moments")).mean,
        "apart_start": mean(before).mean,
        **(_cells("moved", mean(change)) if moved is None else cells("moved", moved)),
        "verdict": "commutes" if moved is None else verdict_of(moved, "further", "nearer", "not significant"),
        **_cells("path", mean(100 * np.array([share for each in results for share in each["path"]]))),
    }


def _row_of_checkpoint(checkpoint: Checkpoint, results: Sequence[dict[str, Any]], relative: bool) -> dict[str, Any]:
    """Build the row of a checkpoint, whose initialisation is unknown."""
    return {
        "encoding": checkpoint.title,
        "name": checkpoint.name,
        **_end(results),
        "start": None,
        "apart_start": None,
        **cells("moved", None),
        "verdict": "commutes" if relative else "start unknown",
        **cells("path", None),
    }


def _end(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Build the cells of trained generators."""
    return {
        "block": results[0][END]["block"],
        **_cells("end", deviation(_pooled(results, END, "moments"))),
        **_cells("patch", deviation(_pooled(results, END, "patch_moments"))),
        **_cells("apart", mean(_pooled(results, END, "apart"))),
    }


_NOTE = (
    "σ is the standard deviation of the elements above the diagonal. The distance from commuting is "
    "‖AB − BA‖ / (‖A‖ ‖B‖), the mean over pairs of axes, blocks, heads and layers: 0 if the generators commute, "
    "at most 1. The distance from the start is ‖A′ − A‖ / ‖A‖, A at the start and A′ trained. Intervals are over the "
    "heads of all layers; verdicts on families that need not commute are at 5 % over all of them (Holm)."
)
_UNITS = (
    "The unit of position is the patch for RoPE-Mixed and STRING and the size of the training image for LieRE and "
    "ComRoPE, as in their papers; rad per patch is comparable for all.",
    "Blocks that do not depend on an axis, as in ComRoPE-AP, are not counted among its elements.",
)
_ENDS_ALONE = "Checkpoints do not contain their initialisation: columns that need it are empty for them."


def _answer(moved: dict[str, Interval], seeds: int) -> str:
    if not moved:
        return "All generators commute by construction, before and after training."
    return change_sentence("training", "the distance from commuting", moved, seeds, "", 3)


def _answer_of_checkpoints(rows: Sequence[dict[str, Any]]) -> str:
    free = [row for row in rows if row["verdict"] != "commutes"]
    if not free:
        return "All generators commute by construction."
    furthest = max(free, key=lambda row: row["apart"])
    low, high = furthest["apart_low"], furthest["apart_high"]
    value = f"{furthest['apart']:.3f}" if low is None else format_interval([furthest["apart"], low, high], digits=3)
    return f"The generators of {furthest['name']} are furthest from commuting, {value} of at most 1."


def _by_layer(groups: dict[str, list[dict[str, Any]]]) -> Figure:
    rows = []
    for name, results in groups.items():
        layers = _pooled(results, END, "layer")
        for when, title in _known(results).items():
            values = _pooled(results, when, "apart")
            for layer in np.unique(layers):
                ends = _cells("apart", mean(values[layers == layer]))
                rows.append({"name": name, "when": title, "layer": int(layer), **ends})
    return Figure(
        name="from-commuting",
        kind="lines",
        title="Distance of generators from commuting",
        alt=f"‖AB − BA‖ / (‖A‖ ‖B‖) by layer, at the start and trained, one line for each of {len(groups)} encodings.",
        x=Axis("layer", "Layer"),
        y=Axis("apart", "‖AB − BA‖ / (‖A‖ ‖B‖)"),
        rows=rows,
        series="name",
        panel="when",
        low="apart_low",
        high="apart_high",
        caption="0: the generators commute. Bands are 95 % intervals over heads.",
    )


def _known(results: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Return the times at which generators are known: for a checkpoint only the end."""
    return {when: title for when, title in WHEN.items() if when in results[0]}


def _densities(groups: dict[str, list[dict[str, Any]]]) -> list[Figure]:
    rows: list[dict[str, Any]] = []
    for name, results in groups.items():
        for value, density in _density(_pooled(results, END, "elements")):
            rows.append(
                {"name": name, "block": f"Blocks of {results[0][END]['block']}", "value": value, "density": density}
            )
    x = Axis("value", "Element", "rad per patch")
    settings: dict[str, Any] = dict(kind="lines", x=x, series="name", panel="block")
    alt = f"Density of the elements above the diagonal of the trained generators of {len(groups)} encodings"
    return [
        Figure(
            name="density",
            title="Density of the elements",
            alt=f"{alt}, by block size.",
            y=Axis("density", "Density"),
            rows=rows,
            **settings,
        ),
        Figure(
            name="density-log",
            title="Density of the elements, logarithmic",
            alt=f"{alt}, on a logarithmic scale that shows the tails.",
            y=Axis("density", "Density", scale="log"),
            rows=[row for row in rows if row["density"] > 0],
            caption="Empty bins are left out.",
            **settings,
        ),
    ]


def _density(elements: np.ndarray) -> list[tuple[float, float]]:
    """Compute the centres of histogram bins and their densities."""
    if not len(elements):
        return []
    density, edges = np.histogram(elements, bins=BINS, density=True)
    return list(zip(((edges[1:] + edges[:-1]) / 2).tolist(), density.tolist(), strict=True))


def _checks(groups: dict[str, list[dict[str, Any]]], relative: dict[str, bool]) -> list[Check]:
    largest = {
        name: max(float(_pooled(results, when, "apart").max()) for when in _known(results))
        for name, results in groups.items()
    }
    checks = [
        Check(
            "The norm of a commutator of skew matrices is at most the product of their norms",
            max(largest.values()) <= 1 + COMMUTATOR_TOLERANCE,
            f"at most {max(largest.values()):.3f} of it",
        )
    ]
    commuting = [value for name, value in largest.items() if relative[name]]
    if commuting:
        rule = "Families that commute by construction do so before and after training"
        checks.insert(0, Check(rule, max(commuting) <= COMMUTATOR_TOLERANCE, f"at most {max(commuting):.1g} apart"))
    return checks


STUDY = Study(
    title="Learned generators",
    question="How are trained generators distributed, and do unconstrained ones become closer to commuting?",
    sources=(f"{COMROPE}, table 8 and figure 8",),
    find=find,
    encodings=(
        "mixed",
        "liere:2",
        "comrope-ap:2",
        "comrope-ld:2",
        "liere:4",
        "comrope-ap:4",
        "comrope-ld:4",
        "liere:8",
        "comrope-ap",
        "comrope-ld",
        "liere",
    ),
    optional_settings=("checkpoint",),
)
