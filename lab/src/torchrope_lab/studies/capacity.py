"""Accuracy by block size, 2 to 64, of families with blocks (LieRE figure 2a; second version, figure 4a)."""

from collections.abc import Sequence

from torchrope.encodings import Encoding
from torchrope.encodings.names import builders, takes
from torchrope_lab.conclusion import join_names
from torchrope_lab.encodings import resolve_encoding
from torchrope_lab.results import Advice, Axis, Figure, Findings, Table
from torchrope_lab.studies.engine.estimates import (
    about_intervals,
    at_best,
    change_sentence,
    correct,
    top1,
)
from torchrope_lab.studies.engine.grid import (
    Changes,
    Factor,
    Grid,
    Plan,
    changes,
    contrast_table,
    lead_figure,
    leads,
    parameter_table,
    top1_figure,
    top1_table,
    train_grid,
    trend_table,
    trends,
)
from torchrope_lab.studies.engine.published import LIERE_1, LIERE_2, published
from torchrope_lab.studies.engine.reference import described, reference_of
from torchrope_lab.studies.engine.runs import Run
from torchrope_lab.studies.engine.study import Lab, Study

BLOCKS = (2, 4, 8, 16, 32, 48, 64)
FACTOR = Factor("block_size", "Block size", scale="log")

PUBLISHED = (
    published(
        "Top-1 by block size, ViT-B; the figures print no numbers, these are from other tables",
        f"{LIERE_2}, tables 1 and 2",
        """
        mixed, blocks of 2 | 68.8 | 46.3
        liere:8 | 70.3 | 47.0
        liere, blocks of 64 | 70.0 | 44.7
        """,
        ("Encoding", "CIFAR-100", "UCF101"),
        note="A block size of 48 does not divide the head_dim of 64: the authors' code then rotates 48 of 64 channels "
        "without a warning. RoPE-Mixed and LieRE with blocks of 2 are the same function with other initial "
        "distributions. In the first version top-1 grows up to the largest size, in the second 8 is best.",
    ),
)


def find(lab: Lab) -> Findings:
    """Train families with blocks at every block size that divides a head."""
    families = [name for name in lab.encodings if _has_sizes(name)] or ["liere"]
    head_dim = _head_dim(lab, families[0])
    sizes = [size for size in BLOCKS if head_dim % size == 0]
    if head_dim not in sizes:
        sizes.append(head_dim)
    reference = reference_of(lab) if lab.reference else None
    plan: Plan = {name: {size: _runs(lab, name, size, head_dim) for size in sizes} for name in families}
    grid, notes = train_grid(lab, plan)
    slopes = trends(grid)
    parameters = parameter_table(lab, grid, FACTOR)
    moved = changes(grid, lambda name: min(grid[name], key=float))
    beside = _beside(lab, grid, reference) if reference else {}
    seeds = len(lab.seeds)
    return Findings(
        answer=change_sentence("doubling the block size", "accuracy", slopes, seeds),
        tables=[
            top1_table("Top-1 by block size", grid, FACTOR, about_intervals(seeds)),
            trend_table("Slope of top-1", slopes, "Per doubling of the block size"),
            contrast_table("Against the smallest blocks", moved, FACTOR, "Better by"),
            *([contrast_table(f"Ahead of {described(reference)}", beside, FACTOR, "Ahead")] if reference else []),
            parameters,
        ],
        figures=[
            top1_figure(grid, FACTOR, _alt(grid)),
            *([lead_figure(FACTOR, beside, reference, "the same model")] if reference else []),
            _parameter_figure(grid, parameters),
        ],
        published=PUBLISHED,
        notes=[*_left_out(lab, head_dim), *notes],
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


def _runs(lab: Lab, name: str, size: int, head_dim: int) -> Sequence[Run]:
    """Return the runs of a block size; LieRE of size head_dim is named without a size, to share other studies' runs."""
    default_size = name == "liere" and size == head_dim
    return lab.runs([name if default_size else f"{name}:{size}"])


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


def _alt(grid: Grid) -> str:
    sizes = sorted({int(size) for levels in grid.values() for size in levels})
    return (
        f"Top-1 in percent over block sizes {sizes[0]} to {sizes[-1]}, one line for each of {join_names(list(grid))}."
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
    find=find,
    encodings=("liere", "comrope-ld"),
    optional_settings=("reference",),
)
