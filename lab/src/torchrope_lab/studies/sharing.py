"""Accuracy with encodings shared across heads, layers or both (LieRE's second version, table 2)."""

from torchrope.encodings import NoEncoding
from torchrope_lab.conclusion import join_names
from torchrope_lab.encodings import resolve_encoding
from torchrope_lab.engine.grid import Accuracy, AgainstLevel, Factor, Levels, OneFactor, parameters
from torchrope_lab.engine.registry import STUDIES
from torchrope_lab.engine.study import Lab
from torchrope_lab.training.cost import count_encoding_parameters

LEVELS: Levels = {
    "nothing": {"model": {"share_heads": False, "share_layers": False}},
    "heads": {"model": {"share_heads": True, "share_layers": False}},
    "layers": {"model": {"share_heads": False, "share_layers": True}},
    "heads and layers": {"model": {"share_heads": True, "share_layers": True}},
}


def _levels(lab: Lab) -> Levels:
    """Return the levels; windows and heads of layers differ in a Swin."""
    return {name: LEVELS[name] for name in ("nothing", "heads")} if lab.config.model.backbone == "swin" else LEVELS


def _learning(lab: Lab) -> list[str]:
    """Return the encodings whose rotary part learns."""
    names = [name for name in lab.encodings if _count(lab, name) > _count_others(lab, name)]
    others = [name for name in lab.encodings if name not in names]
    if others:
        lab.leave_out(f"Left out: {join_names(others)}, which have no learned parameters to share.")
    if lab.config.model.backbone == "swin":
        lab.leave_out("Left out: sharing across layers, whose windows and heads differ in a Swin.")
    if names:
        return names
    lab.leave_out(f"Measured instead: {join_names(STUDIES['sharing'].encodings)}.")
    return [*STUDIES["sharing"].encodings]


def _count(lab: Lab, name: str) -> int:
    return count_encoding_parameters(lab.blueprint(lab.run(name)))


def _count_others(lab: Lab, name: str) -> int:
    """Count the parameters of the parts that are no rotation, which sharing over heads does not change."""
    others = "+".join(part for part in name.split("+") if resolve_encoding(part).rotary is NoEncoding)
    return _count(lab, others) if others else 0


find = OneFactor(
    factor=Factor("shared", "Sharing", scale="category"),
    levels=_levels,
    sections=[AgainstLevel("Compared with no sharing", "nothing"), Accuracy(), parameters],
    claim="sharing an encoding across heads or layers",
    arms=_learning,
)
