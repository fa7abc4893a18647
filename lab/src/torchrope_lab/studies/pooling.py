"""Accuracy with a class token or the mean over patches as input of the head (LieRE's second version, appendix B)."""

from torchrope_lab.studies.engine.grid import Accuracy, AgainstLevel, Factor, OneFactor
from torchrope_lab.studies.engine.published import LIERE_2

find = OneFactor(
    factor=Factor("pool", "Pooling", scale="category"),
    levels={"class token": {"model": {"pool": "cls"}}, "mean": {"model": {"pool": "mean"}}},
    sections=[
        AgainstLevel("Mean compared with class token", "class token"),
        Accuracy(),
    ],
    claim="mean pooling instead of a class token",
    backbones=("vit",),
    notes=[
        f"{LIERE_2}, appendix B, uses the class token and reports without numbers that the mean is substantially "
        "better with LieRE.",
        "The class token has position 0, where a rotary encoding is the identity: its scores depend on positions "
        "relative to that corner, or to the centre for encodings whose paper has the origin at the centre.",
    ],
)
