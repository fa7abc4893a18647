"""Write a report: one HTML page that opens offline, and its Markdown twin."""

import json
import re
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup, escape

from torchrope.files import write_whole
from torchrope.lab.report.figures import NAMES, Drawing, all_drawings, looks
from torchrope.lab.report.load import Results, read_results
from torchrope.lab.report.markdown import render_markdown
from torchrope.lab.report.notes import data_sentences, reading_notes, run_facts, title
from torchrope.lab.report.tables import MISSING, encoding_rows, ratio_heading, resolution_table, result_rows

SIGNS = {"sum": "Σ", "theta": "θ", "omega": "ω", "phi": "φ", "lambda": "λ", "pi": "π", "cdot": "·"}


def write_report(out: Path) -> Path:
    """Write `out/report/index.html`, `report.md` and `figures/*.svg` from `out/results.json`.

    Everything is rendered before anything is written, and every file is written whole or not at all.

    Args:
        out: The folder that `torchrope compare` filled.

    Returns:
        The path of the page.

    Raises:
        ValueError: `results.json` is missing, is no JSON, or is not what this report reads.
    """
    results = read_results(Path(out) / "results.json")
    drawings = all_drawings(results)
    folder = Path(out) / "report"
    texts = {
        **{folder / "figures" / f"{drawing.name}.svg": drawing.svg for drawing in drawings},
        folder / "report.md": render_markdown(results, drawings),
        folder / "index.html": render_page(results, drawings),
    }
    for path, text in texts.items():
        write_whole(path, text)
    _forget_other_figures(folder / "figures", set(texts))
    return folder / "index.html"


def render_page(results: Results, drawings: list[Drawing]) -> str:
    """Render the HTML page, style and figures inside it."""
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    environment.filters["formula"] = formula_html
    template = environment.from_string(_shipped("template.html"))
    rows = result_rows(results)
    return template.render(
        style=Markup(_shipped("style.css")),
        title=title(results),
        sentences=data_sentences(results),
        answer=results["answer"],
        rows=rows,
        several_seeds=any(row.spread != MISSING for row in rows),
        colours={name: look["color"] for name, look in looks(results).items()},
        ratio=ratio_heading(results),
        resolutions=resolution_table(results),
        drawings=[(drawing, Markup(drawing.svg)) for drawing in drawings],
        encodings=encoding_rows(results),
        notes=reading_notes(results),
        facts=run_facts(results),
        command=results["run"].get("command"),
        config=_indented(results["run"].get("config")),
        skipped=results["data"].get("skipped") or [],
        unfinished=results.get("unfinished") or [],
    )


def formula_html(text: str) -> Markup:
    """Set a plain-text formula: `sum_a p_a A_a` gets its sign and its indices."""
    signs = "|".join(SIGNS)
    raised = re.sub(r"\^\{([^}]+)\}|\^(-?\w+)", r"<sup>\1\2</sup>", str(escape(text)))
    lowered = re.sub(r"_\{([^}]+)\}|_([A-Za-z0-9]+)", r"<sub>\1\2</sub>", raised)
    return Markup(re.sub(rf"(?<![A-Za-z])({signs})(?![A-Za-z])", lambda found: SIGNS[found[0]], lowered))


def _forget_other_figures(folder: Path, kept: set[Path]) -> None:
    for name in NAMES:
        if folder / f"{name}.svg" not in kept:
            (folder / f"{name}.svg").unlink(missing_ok=True)


def _shipped(name: str) -> str:
    return (files("torchrope.lab.report") / name).read_text(encoding="utf-8")


def _indented(config: dict[str, Any] | None) -> str | None:
    return json.dumps(config, indent=2, ensure_ascii=False) if config else None
