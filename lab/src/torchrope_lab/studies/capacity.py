"""Accuracy by block size, 2 to 64, of families with blocks (LieRE figure 2a; second version, figure 4a)."""

from collections.abc import Mapping, Sequence
from typing import Any

from torchrope.encodings import Encoding
from torchrope.encodings.names import builders, takes
from torchrope_lab.conclusion import join_names
from torchrope_lab.encodings import resolve_encoding
from torchrope_lab.results import Advice, Axis, Figure, Table
from torchrope_lab.studies.engine.estimates import at_best, correct, top1
from torchrope_lab.studies.engine.grid import (
    AgainstLevel,
    Changes,
    Compared,
    Extra,
    Factor,
    Grid,
    Level,
    Levels,
    OneFactor,
    Slope,
    contrast_table,
    lead_figure,
    leads,
    parameter_table,
)
from torchrope_lab.studies.engine.published import LIERE_1, LIERE_2
from torchrope_lab.studies.engine.reference import described, reference_of
from torchrope_lab.studies.engine.runs import Run
from torchrope_lab.studies.engine.study import Lab, Study

BLOCKS = (2, 4, 8, 16, 32, 48, 64)
FACTOR = Factor("block_size", "Block size", scale="log")


def _families(lab: Lab) -> tuple[list[str], list[str]]:
    """Return the encodings with a choice of block size, and notes on the other encodings and sizes."""
    names = [name for name in lab.encodings if _has_sizes(name)] or ["liere"]
    return names, _left_out(lab, _head_dim(lab, names[0]))


def _sizes(lab: Lab) -> Levels:
    """Return the block sizes that divide a head."""
    head_dim = _head_dim(lab, _families(lab)[0][0])
    return {size: {} for size in sorted({*BLOCKS, head_dim}) if head_dim % size == 0}


def _runs(lab: Lab, name: str, size: Level, _: Mapping[str, Any]) -> Sequence[Run]:
    """Plan the runs of a block size; LieRE of a whole head is named without it, to share other studies' runs."""
    whole = name == "liere" and size == _head_dim(lab, name)
    return lab.runs([name if whole else f"{name}:{size}"])


def _extra(lab: Lab, grid: Grid, compared: Compared) -> Extra:
    parameters = parameter_table(lab, grid, FACTOR)
    reference = reference_of(lab) if lab.reference else None
    ahead = _beside(lab, grid, reference) if reference else {}
    return Extra(
        tables=[contrast_table(f"Ahead of {described(reference)}", ahead, FACTOR, "Ahead")] if reference else [],
        figures=[
            *([lead_figure(FACTOR, ahead, reference, "the same model")] if reference else []),
            _parameter_figure(grid, parameters),
        ],
        advice=[_advice(lab, name, levels) for name, levels in grid.items()],
    )


def _beside(lab: Lab, grid: Grid, reference: str) -> Changes:
    """Compare every block size with a reference encoding, leaving out the reference's own runs."""
    runs = lab.train(lab.runs([reference]))
    others: Grid = {
        name: {level: each for level, each in levels.items() if each[0].run.key != runs[0].run.key}
        for name, levels in grid.items()
    }
    key = f"reference {reference}"
    everywhere: Grid = {key: {level: runs for levels in others.values() for level in levels}}
    return leads({**others, **everywhere}, dict.fromkeys(others, key))


def _head_dim(lab: Lab, name: str) -> int:
    """Return head_dim; of a Swin that of the first stage."""
    return next(each.head_dim for each in lab.blueprint(lab.run(f"{name}:2")).modules() if isinstance(each, Encoding))


def _parameter_figure(grid: Grid, parameters: Table) -> Figure:
    return Figure(
        name="top1-by-parameters",
        kind="lines",
        title="Top-1 by parameters of the encodings",
        alt="Top-1 in percent over the parameters that all encodings of a model have, one line for each family.",
        x=Axis("parameters", "Parameters of the encodings", scale="log"),
        y=Axis("top1", "Top-1", "%"),
        rows=[{**row, **top1(correct(grid[str(row["name"])][row["block_size"]]))} for row in parameters.rows],  # type: ignore[index]
        series="name",
        low="low",
        high="high",
        caption="Each mark is a block size, the smallest on the left; intervals are 95 % over validation examples.",
    )


def _left_out(lab: Lab, head_dim: int) -> list[str]:
    small = [str(size) for size in BLOCKS if size < head_dim and head_dim % size]
    large = [str(size) for size in BLOCKS if size > head_dim]
    others = [name for name in lab.encodings if not _has_sizes(name)]
    notes = [f"head_dim is {head_dim}."]
    notes += [f"Left out: blocks of {join_names(small)}, which do not divide head_dim."] if small else []
    notes += [f"Left out: blocks of {join_names(large)}, which are larger than head_dim."] if large else []
    notes += [f"Left out: {join_names(others)}, which have no choice of block size."] if others else []
    return notes


def _advice(lab: Lab, name: str, levels: dict) -> Advice:
    equals, value = at_best({f"{name}:{size}": correct(runs) for size, runs in levels.items()})
    cheapest = min(equals, key=_size_of)
    names = [cheapest, *(each for each in equals if each != cheapest)]
    because = f"{equals[0]} reaches {value}; the smallest blocks of those tied cost least"
    return Advice(f"Block size of {name} on {lab.data.title}", names, because)


def _has_sizes(name: str) -> bool:
    """Return whether an encoding has a choice of block size."""
    build = resolve_encoding(name).rotary
    return name in builders() and takes(build, "block_size")


def _size_of(name: str) -> int:
    return int(name.rpartition(":")[2])


STUDY = Study(
    title="Capacity",
    question="Does accuracy improve with larger blocks, which represent more rotations?",
    sources=(f"{LIERE_1}, figure 2a", f"{LIERE_2}, figure 4a"),
    encodings=("liere", "comrope-ld"),
    optional_settings=("reference", "folds"),
    find=OneFactor(
        factor=FACTOR,
        levels=_sizes,
        compare=[
            Slope("Slope of top-1", "Per doubling of the block size"),
            AgainstLevel("Against the smallest blocks"),
        ],
        claim="doubling the block size",
        arms=_families,
        runs=_runs,
        parameters=True,
        extra=_extra,
    ),
)
