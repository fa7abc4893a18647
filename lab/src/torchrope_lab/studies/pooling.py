"""Accuracy with a class token or the mean over patches as input of the head (LieRE's second version, appendix B)."""

from torchrope_lab.engine.grid import Accuracy, AgainstLevel, Factor, OneFactor

find = OneFactor(
    factor=Factor("pool", "Pooling", scale="category"),
    levels={"class token": {"model": {"pool": "cls"}}, "mean": {"model": {"pool": "mean"}}},
    sections=[
        AgainstLevel("Mean compared with class token", "class token"),
        Accuracy("The mean is over the patches of a model without class token; LieRE's code averages that token too."),
    ],
    claim="mean pooling instead of a class token",
    backbones=("vit",),
)
