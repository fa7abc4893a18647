"""Recipes: settings of `torchrope compare` and `torchrope train` by name, one experiment each, with their sources.

A file maps names to recipes. The settings and notes of a recipe are added to those of the recipe that its `recipe`
names; a name that begins with "_" is only for that. data_sets.yaml has a recipe for each data set, under its name, the
other files are of papers.
"""

import copy
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from torchrope_lab.mistakes import Mistake

FILES = ("data_sets", "liere", "comrope", "rope-vit", "dense")


@dataclass(frozen=True)
class Recipe:
    """Settings with their sources."""

    # `published` names a column, or a row whose columns are encodings, of a table in engine/published.yaml.
    # "TITLE | NAME | ENCODING" names the encoding to show first, by default the recipe's.

    name: str  # as in `--recipe NAME`
    settings: dict[str, Any]  # as a configuration file has them
    summary: str  # what it trains, in a line
    source: str = ""  # papers' keys of engine/published.yaml and places in them, "; " between; empty for own
    details: str = ""  # what the source states, and the code from which the rest is
    published: dict[str, str] | None = None  # by measure, such as {"top-1": "TITLE | NAME"}
    hardware: str = ""  # what it was trained on
    commands: Sequence[str] = ()  # that use it, without "torchrope"
    notes: Sequence[str] = ()  # differences from the paper, and choices that it leaves open

    def text(self, source: str = "", results: Sequence[str] = ()) -> str:
        """Return the recipe as YAML, below comments with its source and sentences on published results."""
        import yaml

        parts = [self.summary, f"{source}. {self.details}" if source else "", *results, self.hardware]
        lines = [line for part in parts if part for line in _wrapped(part)]
        lines += [f"  torchrope {command}" for command in self.commands]
        lines += _wrapped(f"Notes: {' '.join(self.notes)}") if self.notes else []
        settings = yaml.safe_dump(self.settings, sort_keys=False, default_flow_style=None, width=110)
        return "".join(f"# {line}\n" for line in lines) + settings


def names() -> list[str]:
    """List the names of all recipes, those of data sets first."""
    return [name for name in _read() if not name.startswith("_")]


def find(name: str) -> Recipe:
    """Return a recipe."""
    if name not in names():
        raise Mistake(f"recipe must be one of {', '.join(names())}, got {name!r}")
    settings = copy.deepcopy(_resolved(name))
    described = {key: settings.pop(key) for key in Recipe.__annotations__ if key in settings}
    return Recipe(name, settings, **{"commands": _commands(name, settings), **described})


def settings(name: str) -> dict[str, Any]:
    """Return the settings of a recipe as nested dicts."""
    return find(name).settings


@cache
def _read() -> dict[str, dict[str, Any]]:
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast, for every command
    recipes: dict[str, dict[str, Any]] = {}
    for file in FILES:
        text = resources.files(__name__).joinpath(f"{file}.yaml").read_text(encoding="utf-8")
        recipes |= yaml.load(text, loader)
    return recipes


def _resolved(name: str) -> dict[str, Any]:
    """Return a recipe merged onto the one that it names, without that one's commands."""
    own = {key: value for key, value in _read()[name].items() if key != "recipe"}
    if "recipe" not in _read()[name]:
        return own
    base = {key: value for key, value in _resolved(_read()[name]["recipe"]).items() if key != "commands"}
    return {**_merged(base, own), "notes": [*own.get("notes", []), *base.get("notes", [])]}


def _merged(base: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """Replace values of nested dicts."""
    nested = {key: _merged(base[key], value) for key, value in own.items() if isinstance(base.get(key), dict)}
    return {**base, **own, **nested}


def _commands(name: str, settings: dict[str, Any]) -> list[str]:
    """Return the commands of a recipe that states none: training, from another run if it starts from one."""
    start = f"--init {settings['init']} " if "init" in settings else ""
    which = f"--recipe {name}" if "name" in settings.get("data", {}) else f"--data {name}"
    train = f"train {which} --data.root DIR {start}--out runs/{name}"
    return [train] if start else [train, f"compare {which} --data.root DIR"]


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, 112, break_on_hyphens=False, break_long_words=False)
