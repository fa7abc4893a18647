"""Tables of the pages from the laboratory's published.yaml: `python docs/tables.py` writes them.

They are the errata, and the recipes with their published results.
"""

import re
from collections.abc import Sequence
from pathlib import Path

from torchrope_lab import recipes
from torchrope_lab.engine.published import cite, claims, errata, results_of

DOCS = Path(__file__).parent
START = "<!-- python docs/tables.py writes the rest -->\n"
RECIPES = re.compile("(?<=<!-- recipes:begin -->\n).*?(?=<!-- recipes:end -->)", re.DOTALL)


def with_errata(page: str) -> str:
    """Return docs/errata.md with the tables of errata by paper, and of counted claims."""
    papers: dict[str, list[list[str]]] = {}
    for erratum in errata():
        paper, _, place = erratum["source"].partition(", ")
        papers.setdefault(paper, []).append([place, *(erratum[key] for key in ("what", "printed", "correct", "why"))])
    parts = [
        f"## {cite(paper)}\n\n{_table(['place', 'what', 'printed', 'correct', 'why'], rows)}"
        for paper, rows in papers.items()
    ]
    counted: dict[str, list[list[str]]] = {}
    for claim in claims():
        paper, _, place = claim["source"].partition(", ")
        counted.setdefault(paper, []).append([place, *(claim[key] for key in ("what", "printed", "counted", "why"))])
    parts.append("## Numbers that were counted")
    parts += [
        f"### {cite(paper)}\n\n{_table(['place', 'what', 'printed', 'counted', 'remark'], rows)}"
        for paper, rows in counted.items()
    ]
    return page.partition(START)[0] + START + "\n" + "\n\n".join(parts) + "\n"


def with_recipes(page: str) -> str:
    """Return docs/recipes.md with the table of the recipes of papers."""
    of_papers = [recipe for recipe in map(recipes.find, recipes.names()) if recipe.source]
    rows = [[f"`{recipe.name}`", recipe.summary, "; ".join(_published(recipe)) or "–"] for recipe in of_papers]
    return RECIPES.sub(lambda _: _table(["recipe", "trains", "published"], rows) + "\n", page)


def _published(recipe: recipes.Recipe) -> list[str]:
    """Write the published results of a recipe's encoding."""
    written = []
    for measure, values in results_of(recipe).items():
        _, _, *named = recipe.published[measure].split(" | ")
        encoding = named[0] if named else recipe.settings["encoding"]
        written.append(f"{measure} `{encoding}` {values[encoding]:.1f}")
    return written


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (titles, ["---"] * len(titles), *rows))


PAGES = {"errata.md": with_errata, "recipes.md": with_recipes}

if __name__ == "__main__":
    for name, write in PAGES.items():
        (DOCS / name).write_text(write((DOCS / name).read_text(encoding="utf-8")), encoding="utf-8")
