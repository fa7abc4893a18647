"""Names of all studies, in the order of the report. Does not import torch."""

import ast
from pathlib import Path

from torchrope_lab.data.config import NAMES_DENSE, NAMES_WITHOUT_LATTICE
from torchrope_lab.results import STUDIES

NAMES = STUDIES

DENSE_STUDIES = ("dense",)
"""Studies on data for semantic segmentation or object detection."""


LATTICE_STUDIES = ("resolution", "pooling", "finetune", "attention", "kernel")
"""Studies that need patches on a lattice: `Study.needs_lattice`."""

TOKEN_STUDIES = ("linear-attention",)
"""Studies of the transformer for tokens at any positions."""


def suitable(data: str) -> list[str]:
    """Return the names of the studies for a data set."""
    without = LATTICE_STUDIES if data in NAMES_WITHOUT_LATTICE else TOKEN_STUDIES
    return [name for name in NAMES if (name in DENSE_STUDIES) == (data in NAMES_DENSE) and name not in without]


def file_of(name: str) -> Path:
    """Return the source file of a study."""
    return Path(__file__).parents[1] / f"{name.replace('-', '_')}.py"


def summary(name: str) -> str:
    """Return the first line of a study's module docstring, without importing the module."""
    return (ast.get_docstring(ast.parse(file_of(name).read_text(encoding="utf-8"))) or "").partition("\n")[0]
