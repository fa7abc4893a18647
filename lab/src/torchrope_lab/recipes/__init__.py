"""Recipes: YAML files with settings of `torchrope compare` and `torchrope train`, one experiment each.

Recipes in this folder are small, one per data set and with its name; those in `papers` are the settings of papers.
"""

from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent


def names() -> list[str]:
    """List the names of all recipes, those of data sets first."""
    return [path.stem for path in _paths()]


def find(name: str) -> Path:
    """Return the file of a recipe.

    Raises:
        ValueError: no recipe has that name.
    """
    for path in _paths():
        if path.stem == name:
            return path
    raise ValueError(f"recipe must be one of {', '.join(names())}, got {name!r}")


def summary(name: str) -> str:
    """Return the first line of a recipe, which describes it."""
    return find(name).read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")


def settings(name: str) -> dict[str, Any]:
    """Read the settings of a recipe as nested dicts."""
    import yaml

    return yaml.safe_load(find(name).read_text(encoding="utf-8"))


def _paths() -> list[Path]:
    return [*sorted(FOLDER.glob("*.yaml")), *sorted((FOLDER / "papers").glob("*.yaml"))]
