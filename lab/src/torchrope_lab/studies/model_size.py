"""Accuracy by width of the model (LieRE's second version, table 4 and figure 3a)."""

from typing import Any

from torchrope.models import SIZES, SWIN_SIZES
from torchrope_lab.conclusion import join_names
from torchrope_lab.results import Column, Table
from torchrope_lab.studies.engine.grid import (
    AgainstMixed,
    AgainstReference,
    Compared,
    Extra,
    Factor,
    Grid,
    Levels,
    OneFactor,
    Slope,
    advise_at,
)
from torchrope_lab.studies.engine.published import LIERE_2
from torchrope_lab.studies.engine.reference import described, reference_of
from torchrope_lab.studies.engine.study import Lab, Study

FACTOR = Factor("width", "Width of the model", "channels", "log")
BY_NAME = ("tiny", "base", "large")


def _sizes(lab: Lab) -> Levels:
    """Return model settings by width: named sizes if the model has one, otherwise with fewer or more heads."""
    model = lab.config.model
    if model.size is not None:
        table = SWIN_SIZES if model.backbone == "swin" else SIZES
        unset = dict.fromkeys(("dim", "depth", "num_heads", "mlp_dim", "depths", "stage_heads"))
        return {table[size]["dim"]: {"model": {**unset, "size": size}} for size in BY_NAME}
    built = lab.blueprint(lab.run("none")).arguments
    configured = _heads(built)
    return {built["dim"] * heads // configured: {"model": _scaled(built, heads)} for heads in _three(configured)}


def _heads(built: dict[str, Any]) -> int:
    """Return the number of heads, of a Swin in its first stage."""
    heads = built["num_heads"]
    return heads if isinstance(heads, int) else heads[0]


def _three(heads: int) -> list[int]:
    """Return a quarter, half and all of the heads; for fewer than 3 heads once, twice and four times as many."""
    if heads < 3:
        return [heads, 2 * heads, 4 * heads]
    return [max(1, heads // 4), max(2, heads // 2), heads]


def _scaled(built: dict[str, Any], heads: int) -> dict[str, Any]:
    """Scale width and MLP with the number of heads, so that head_dim is constant; empty if nothing changes."""
    configured = _heads(built)
    if heads == configured:
        return {}
    dim = built["dim"] * heads // configured
    if "depths" in built:
        return {"dim": dim, "stage_heads": [each * heads // configured for each in built["num_heads"]]}
    mlp_dim = built["mlp_dim"] or 4 * built["dim"]
    return {"dim": dim, "num_heads": heads, "mlp_dim": mlp_dim * heads // configured}


def _size_table(lab: Lab, grid: Grid, reference: str) -> Table:
    columns = (
        FACTOR.column,
        Column("heads", "Heads"),
        Column("depth", "Layers"),
        Column("parameters", "Parameters", digits=0),
    )
    rows = []
    for width, runs in grid[reference].items():
        model = lab.blueprint(runs[0].run)
        heads, depth = model.arguments["num_heads"], model.arguments.get("depth", model.arguments.get("depths"))
        rows.append(
            {
                "width": width,
                "heads": _written(heads),
                "depth": _written(depth),
                "parameters": sum(parameter.numel() for parameter in model.parameters()),
            }
        )
    return Table(f"The models, with {described(reference)}", columns, rows)


def _written(value: Any) -> str:
    return str(value) if isinstance(value, int) else ", ".join(map(str, value))


def _extra(lab: Lab, grid: Grid, compared: Compared) -> Extra:
    reference = reference_of(lab)
    note = "Sizes differ in width, with head_dim as configured and the MLP in proportion; depth is the same."
    if lab.config.model.size is not None:
        note = f"Sizes are {join_names(BY_NAME)}; they differ in width, and large also in depth."
    widths = {"small": min(grid[reference], key=float), "large": max(grid[reference], key=float)}
    return Extra(
        tables=[_size_table(lab, grid, reference)],
        notes=[note],
        advice=[
            advise_at(f"A {size} model ({width:,} channels) on {lab.data.title}", grid, width)
            for size, width in widths.items()
        ],
    )


STUDY = Study(
    title="Model size",
    question="Does the lead of an encoding depend on the size of the model?",
    sources=(f"{LIERE_2}, table 4 and figure 3a",),
    encodings=("learned", "axial", "mixed", "liere:8", "liere"),
    optional_settings=("reference", "folds"),
    find=OneFactor(
        factor=FACTOR,
        levels=_sizes,
        compare=[
            Slope("Slope of the lead over the width", "Lead gained per doubling of the width", of_lead=True),
            AgainstReference("the same model"),
            AgainstMixed(),
        ],
        claim="doubling the width",
        measure="the lead over {reference}",
        reference=True,
        extra=_extra,
    ),
)
