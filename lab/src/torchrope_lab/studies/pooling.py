"""Accuracy with a class token or the mean over patches as input of the head (LieRE's second version, appendix B)."""

from torchrope_lab.studies.engine.grid import AgainstLevel, Factor, OneFactor, advise_level
from torchrope_lab.studies.engine.published import LIERE_2
from torchrope_lab.studies.engine.study import Study

STUDY = Study(
    title="Pooling",
    question="Is a class token or the mean over all patches better for classification?",
    sources=(f"{LIERE_2}, appendix B",),
    needs_lattice=True,
    optional_settings=("folds",),
    find=OneFactor(
        factor=Factor("pool", "Pooling", scale="category"),
        levels={"class token": {"model": {"pool": "cls"}}, "mean": {"model": {"pool": "mean"}}},
        compare=[AgainstLevel("Mean compared with class token", base="class token")],
        claim="mean pooling instead of a class token",
        backbones=("vit",),
        extra=advise_level("Pooling", "class token", "mean"),
        notes=[
            f"{LIERE_2}, appendix B, uses the class token and reports without numbers that the mean is substantially "
            "better with LieRE.",
            "The class token has position 0, where a rotary encoding is the identity: its scores depend on positions "
            "relative to that corner, or to the centre for encodings whose paper has the origin at the centre.",
        ],
    ),
)
