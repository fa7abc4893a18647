"""The tables of docs/errata.md, from the errata of the laboratory's published.yaml: `python docs/errata.py`."""

from collections.abc import Sequence
from pathlib import Path

from torchrope_lab.studies.engine.published import cite, claims, errata

PAGE = Path(__file__).with_name("errata.md")
START = "<!-- python docs/errata.py writes the rest -->\n"


def with_tables(page: str) -> str:
    """Return the page with the tables of errata by paper, and of counted claims."""
    papers: dict[str, list[list[str]]] = {}
    for erratum in errata():
        paper, _, place = erratum["source"].partition(", ")
        papers.setdefault(paper, []).append([place, *(erratum[key] for key in ("what", "printed", "correct", "why"))])
    parts = [
        f"## {cite(paper)}\n\n{_table(['place', 'what', 'printed', 'correct', 'why'], rows)}"
        for paper, rows in papers.items()
    ]
    counted = [
        [cite(claim["source"]), *(claim[key] for key in ("what", "printed", "counted", "why"))] for claim in claims()
    ]
    parts.append(
        f"## Numbers that were counted\n\n{_table(['source', 'what', 'printed', 'counted', 'remark'], counted)}"
    )
    return page.partition(START)[0] + START + "\n" + "\n\n".join(parts) + "\n"


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (titles, ["---"] * len(titles), *rows))


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
