"""Recipes: YAML files with settings of `torchrope compare` and `torchrope train`, one experiment each.

Those in this folder are small, one for each data set and named like it; those in `papers` are what papers trained.
"""

from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent


def names() -> list[str]:
    """All recipes, the data sets' first."""
    return [path.stem for path in _paths()]


def find(name: str) -> Path:
    """The file of a recipe.

    Raises:
        ValueError: there is none of that name.
    """
    for path in _paths():
        if path.stem == name:
            return path
    raise ValueError(f"recipes are {', '.join(names())}, got {name!r}")


def summary(name: str) -> str:
    """The first line of a recipe, which says what it is."""
    return find(name).read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")


def settings(name: str) -> dict[str, Any]:
    """What a recipe sets, as nested dicts."""
    import yaml

    return yaml.safe_load(find(name).read_text(encoding="utf-8"))


def _paths() -> list[Path]:
    return [*sorted(FOLDER.glob("*.yaml")), *sorted((FOLDER / "papers").glob("*.yaml"))]
