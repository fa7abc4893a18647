"""Accuracy by block size, 2 to 64, of families with blocks (LieRE figure 2a; second version, figure 4a)."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from torchrope.encodings import Encoding, builders, takes
from torchrope_lab.conclusion import join_names
from torchrope_lab.encodings import resolve_encoding
from torchrope_lab.engine.estimates import correct
from torchrope_lab.engine.figures import TOP1_AXIS, figure, marks
from torchrope_lab.engine.grid import (
    ABOUT_TOP1,
    Accuracy,
    AgainstLevel,
    Factor,
    Levels,
    OneFactor,
    Results,
    Section,
    Slope,
    encoding_parameters,
    lead_section,
    parameters,
)
from torchrope_lab.engine.long_table import Cell, Columns, Level, RightOrWrong
from torchrope_lab.engine.runs import Run
from torchrope_lab.engine.study import Lab
from torchrope_lab.results import Axis, Column

BLOCKS = (2, 4, 8, 16, 32, 48, 64)
PART = 48
"""Block size for which LieRE's code rotates only as many of 64 channels; others must divide a head."""


def _families(lab: Lab) -> list[str]:
    """Return the encodings with a choice of block size."""
    asked = [name for name in lab.encodings if _has_sizes(name)]
    names = asked or ["liere"]
    head_dim = _head_dim(lab, names[0])
    small = [str(size) for size in BLOCKS if size < head_dim and head_dim % size and size != PART]
    large = [str(size) for size in BLOCKS if size > head_dim]
    others = [name for name in lab.encodings if not _has_sizes(name)]
    if small:
        lab.leave_out(f"Left out: blocks of {join_names(small)}, which do not divide head_dim = {head_dim}.")
    if large:
        lab.leave_out(f"Left out: blocks of {join_names(large)}, which are larger than head_dim = {head_dim}.")
    if others:
        lab.leave_out(f"Left out: {join_names(others)}, which have no choice of block size.")
    if not asked:
        lab.leave_out("Measured instead: liere.")
    return names


def _has_sizes(name: str) -> bool:
    """Return whether an encoding has a choice of block size."""
    build = resolve_encoding(name).rotary
    return name in builders() and takes(build, "block_size")


def _head_dim(lab: Lab, name: str) -> int:
    """Return head_dim; of a Swin that of the first stage."""
    return next(each.head_dim for each in lab.blueprint(lab.run(f"{name}:2")).modules() if isinstance(each, Encoding))


def _sizes(lab: Lab) -> Levels:
    """Return the block sizes that divide a head, and `PART` if it is smaller than a head."""
    head_dim = _head_dim(lab, _families(lab)[0])
    levels: dict[Level, Mapping[str, Any]] = {}
    for size in sorted({*BLOCKS, head_dim}):
        if head_dim % size == 0:
            levels[size] = {}
        elif size == PART < head_dim:
            levels[size] = {"model": {"rotary_dim": PART}}
    return levels


def _runs(lab: Lab, name: str, size: Level, settings: Mapping[str, Any]) -> Sequence[Run]:
    """Plan the runs of a block size; LieRE of a whole head is named without it, to share other studies' runs."""
    whole = name == "liere" and size == _head_dim(lab, name)
    return lab.runs([name if whole else f"{name}:{size}"], **settings)


def _beside_reference(results: Results) -> Section:
    """Compare every block size with --reference, which has none."""
    reference, lab = Cell(results.reference), results.lab
    if not reference.arm:
        return Section()
    trained = lab.train(lab.runs([reference.arm]))
    top1 = RightOrWrong({**results.top1.values, reference: correct(trained)})
    others = [cell for cell, runs in results.runs.items() if runs[0].run.key != trained[0].run.key]
    return lead_section(results, top1.changes(dict.fromkeys(others, reference)), "the same model")


def _by_parameters(results: Results) -> Section:
    """Show top-1 over the number of parameters."""
    x = Axis("parameters", "Parameters of the encodings", scale="log")
    columns: Columns = ((Column(x.key, x.title), partial(encoding_parameters, results)), *results.top1.columns)
    by_parameters = figure(
        "top1-by-parameters",
        "Top-1 by parameters of the encodings",
        x,
        TOP1_AXIS,
        marks(results.runs, columns, results.factor.key),
        f"Each mark is a block size, the smallest on the left. {ABOUT_TOP1}",
    )
    return Section(tables=parameters(results).tables, figures=[by_parameters])


find = OneFactor(
    factor=Factor("block_size", "Block size", scale="log"),
    levels=_sizes,
    sections=[
        Slope("Slope of top-1", "Per doubling of the block size"),
        _beside_reference,
        AgainstLevel("Against the smallest blocks"),
        Accuracy(),
        _by_parameters,
    ],
    claim="doubling the block size",
    arms=_families,
    runs=_runs,
    further=lambda lab: bool(lab.reference),
)
