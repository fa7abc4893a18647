"""Accuracy with learned generators and with frozen ones (reviews of LieRE)."""

from torchrope.encodings import Encoding
from torchrope_lab.conclusion import join_names
from torchrope_lab.engine.grid import Accuracy, AgainstLevel, Factor, OneFactor
from torchrope_lab.engine.study import Lab

FROZEN, LEARNED = "frozen", "learned"


def learning_encodings(lab: Lab) -> list[str]:
    """Return the encodings with learned generators."""
    names = [name for name in lab.encodings if _learns(lab, name)]
    if fixed := [name for name in lab.encodings if name not in names]:
        lab.leave_out(f"Left out: {join_names(fixed)}, whose generators are not learned.")
    return names


def _learns(lab: Lab, name: str) -> bool:
    """Return whether a model's rotary encodings have learned parameters."""
    modules = lab.blueprint(lab.run(name)).modules()
    return any(True for module in modules if isinstance(module, Encoding) for _ in module.parameters())


find = OneFactor(
    factor=Factor("generators", "Generators", scale="category"),
    levels={FROZEN: {"optim": {"encoding_lr": 0.0}}, LEARNED: {}},
    sections=[AgainstLevel("Learned against frozen generators", FROZEN), Accuracy()],
    claim="learning the generators",
    arms=learning_encodings,
)
