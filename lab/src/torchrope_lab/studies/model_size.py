"""Accuracy by width of the model (LieRE's second version, table 4 and figure 3a)."""

from typing import Any

from torchrope.models import SIZES, SWIN_SIZES
from torchrope_lab.engine.grid import (
    Accuracy,
    AgainstMixed,
    AgainstReference,
    Factor,
    Levels,
    OneFactor,
    Results,
    Section,
    Slope,
)
from torchrope_lab.engine.long_table import table_of
from torchrope_lab.engine.reference import described
from torchrope_lab.engine.study import Lab
from torchrope_lab.results import Column

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


def _models(results: Results) -> Section:
    """Show the models."""
    lab, reference = results.lab, results.reference
    built = {cell.level: lab.blueprint(runs[0].run) for cell, runs in results.runs.items() if cell.arm == reference}
    columns = (
        (Column("width", "Width of the model", "channels", 0), lambda width: width),
        (Column("heads", "Heads"), lambda width: _written(built[width].arguments, "num_heads")),
        (Column("depth", "Layers"), lambda width: _written(built[width].arguments, "depth", "depths")),
        (Column("parameters", "Parameters", digits=0), lambda width: sum(p.numel() for p in built[width].parameters())),
    )
    return Section(tables=[table_of(f"The models, with {described(reference)}", columns, built)])


def _written(arguments: dict[str, Any], *names: str) -> str:
    """Write the first of some arguments that a model has, for a Swin by stage."""
    value = next(arguments[name] for name in names if name in arguments)
    return str(value) if isinstance(value, int) else ", ".join(map(str, value))


find = OneFactor(
    factor=Factor("width", "Width of the model", "channels", "log"),
    levels=_sizes,
    sections=[
        Slope("Slope of the lead over the width", "Lead gained per doubling of the width", of_lead=True),
        AgainstReference("the same model"),
        AgainstMixed(),
        Accuracy(),
        _models,
    ],
    claim="doubling the width",
    measure="the lead over {reference}",
    reference=True,
)
