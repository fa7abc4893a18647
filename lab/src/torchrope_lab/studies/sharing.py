"""Accuracy with encodings shared across heads, layers or both (LieRE's second version, table 2)."""

from typing import Any

from torchrope_lab.conclusion import join_names
from torchrope_lab.encodings import resolve_encoding
from torchrope_lab.results import Advice
from torchrope_lab.studies.engine.grid import AgainstLevel, Compared, Extra, Factor, Grid, Levels, OneFactor
from torchrope_lab.studies.engine.published import LIERE_2
from torchrope_lab.studies.engine.study import Lab, Study
from torchrope_lab.training.cost import count_encoding_parameters

LEVELS: dict[Any, Any] = {
    "nothing": {"model": {"share_heads": False, "share_layers": False}},
    "heads": {"model": {"share_heads": True, "share_layers": False}},
    "layers": {"model": {"share_heads": False, "share_layers": True}},
    "heads and layers": {"model": {"share_heads": True, "share_layers": True}},
}
DEFAULT = ("mixed", "liere:8", "liere")


def _levels(lab: Lab) -> Levels:
    """Return the levels; windows and heads of layers differ in a Swin."""
    return {name: LEVELS[name] for name in ("nothing", "heads")} if lab.config.model.backbone == "swin" else LEVELS


def _learning(lab: Lab) -> tuple[list[str], list[str]]:
    """Return the encodings whose rotary part learns, and notes on the others."""
    names = [name for name in lab.encodings if _count(lab, name) > _absolute(lab, name)]
    others = [name for name in lab.encodings if name not in names]
    notes = [f"Left out: {join_names(others)}, which have no learned parameters to share."] if others else []
    if lab.config.model.backbone == "swin":
        notes.append("Left out: sharing across layers, whose windows and heads differ in a Swin.")
    return names or list(DEFAULT), notes


def _count(lab: Lab, name: str) -> int:
    return count_encoding_parameters(lab.blueprint(lab.run(name)))


def _absolute(lab: Lab, name: str) -> int:
    """Count the parameters of the absolute part, which sharing does not change."""
    absolute = [part for part in name.split("+") if resolve_encoding(part).absolute is not None]
    return _count(lab, absolute[0]) if absolute else 0


def _advise(lab: Lab, grid: Grid, compared: Compared) -> Extra:
    worse = {name for (name, _), found in compared.changes.items() if found.high < 0}
    free = [name for name in grid if name not in worse]
    if not free:
        because = "each loses accuracy with some sharing"
        return Extra(advice=[Advice(f"Sharing an encoding on {lab.data.title}", list(grid), because)])
    because = "no sharing across heads, layers or both significantly costs accuracy"
    return Extra(advice=[Advice(f"Few parameters for the encoding on {lab.data.title}", free, because)])


STUDY = Study(
    title="Sharing",
    question="Does sharing an encoding across heads or layers change accuracy?",
    sources=(f"{LIERE_2}, table 2",),
    encodings=DEFAULT,
    optional_settings=("folds",),
    find=OneFactor(
        factor=Factor("shared", "Sharing", scale="category"),
        levels=_levels,
        compare=[AgainstLevel("Compared with no sharing", base="nothing")],
        claim="sharing an encoding across heads or layers",
        arms=_learning,
        parameters=True,
        extra=_advise,
    ),
)
