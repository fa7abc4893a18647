"""Accuracy of each encoding with linear instead of softmax attention (RoFormer, section 3.3)."""

from torchrope_lab.studies.engine.grid import Accuracy, AgainstLevel, Factor, OneFactor, advise_level

find = OneFactor(
    factor=Factor("attention", "Attention", scale="category"),
    levels={kind: {"model": {"attention": kind}} for kind in ("softmax", "linear")},
    sections=[
        AgainstLevel("Linear attention against softmax", "softmax", advise_level("Attention", "softmax", "linear")),
        Accuracy(),
    ],
    claim="linear attention in place of softmax",
    backbones=("transformer",),
    notes=[
        "Linear attention rotates positive features of queries and keys only in the numerator, so that weights "
        "may be negative and need not sum to 1. Terms added to scores (pape, pape-ri) do not exist in it.",
    ],
)
