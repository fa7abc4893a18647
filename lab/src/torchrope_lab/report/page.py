"""Write the report of the results in a folder: one self-contained HTML file, and Markdown."""

import hashlib
import json
from base64 import b64encode
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from markupsafe import Markup

from torchrope.files import write_whole
from torchrope_lab.report.chapters import MANY, Chapter, arrange, title_of
from torchrope_lab.report.looks import COLOURS, DARK_COLOURS, DARK_PLAIN, PLAIN, page_looks
from torchrope_lab.report.plots import GRID, INK, SOFT
from torchrope_lab.report.read import read_studies
from torchrope_lab.report.tables import size
from torchrope_lab.report.templates import fill, fill_markdown, shipped
from torchrope_lab.results import StudyResult
from torchrope_lab.settings.run_config import flat

PALETTE = {"plain": (PLAIN, DARK_PLAIN)} | {
    f"c{place}": colours for place, colours in enumerate(zip(COLOURS, DARK_COLOURS, strict=True))
}
PALETTE |= {"ink": (INK, "var(--ink)"), "soft": (SOFT, "var(--soft)"), "grid": (GRID, "var(--line)")}
"""Colours of encodings and figures in light and dark mode, by CSS class."""

MODEL_FACTS = {
    "Model: backbone": "model.backbone",
    "size": "model.size",
    "depth": "model.depth",
    "width": "model.dim",
    "heads": "model.num_heads",
    "patch": "model.patch_size",
    "epochs": "optim.epochs",
}
"""Settings of a model and its training that the page names."""


def write_report(out: Path, studies: Sequence[StudyResult] = ()) -> Path:
    """Write `out/report/index.html`, `report.md` and `figures/*.svg` from the results in `out`; return the page."""
    # Everything is rendered before anything is written, and every file is written atomically.
    studies = studies or read_studies(Path(out))
    looks = page_looks(studies)
    chapters = arrange(studies, looks)
    parts = [part for chapter in chapters for part in chapter.parts]
    drawings = [drawing for part in parts for drawing in (*part.figures, *part.pictures)]
    folder = Path(out) / "report"
    texts = {folder / "figures" / f"{drawing.name}.svg": drawing.svg + "\n" for drawing in drawings}
    texts |= {folder / "report.md": render_markdown(chapters), folder / "index.html": render_page(chapters)}
    for path, text in texts.items():
        write_whole(path, text)
    for left in set((folder / "figures").glob("*.svg")) - set(texts):
        left.unlink()
    return folder / "index.html"


def render_markdown(chapters: Sequence[Chapter]) -> str:
    """Render the report as Markdown; figures are linked as `figures/<name>.svg`."""
    return fill_markdown("page.md", title=title_of(chapters), chapters=chapters, code=_code, model=_model)


def render_page(chapters: Sequence[Chapter]) -> str:
    """Render the HTML page, with style, scripts and figures inline."""
    scripts = [_library(), shipped("page.js")]
    return fill(
        "page.html",
        style=Markup(shipped("page.css")),
        palette=PALETTE,
        scripts=[Markup(script) for script in scripts],
        policy=_policy(scripts),
        title=title_of(chapters),
        chapters=chapters,
        many=MANY,
        model=_model,
        indented=partial(json.dumps, indent=2, ensure_ascii=False),
    )


def _library() -> str:
    """Return Vega, Vega-Lite and vega-embed as one script that loads nothing from the network."""
    import vl_convert

    bundle = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")
    return bundle.replace("</script", "<\\/script").replace("<!--", "<\\!--")


def _policy(scripts: Sequence[str]) -> str:
    """Return the Content-Security-Policy: only the page's own scripts, by hash, and inline images."""
    hashes = (b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in hashes)
    rules = ("default-src 'none'", f"script-src {allowed}", "style-src 'unsafe-inline'", "img-src data: blob:")
    return "; ".join([*rules, "base-uri 'none'", "form-action 'none'"])


def _model(config: Mapping[str, Any] | None) -> str:
    """Describe the model that was trained and its training, by the settings of a result."""
    settings = flat(dict(config or {}))
    facts = {name: settings.get(setting) for name, setting in MODEL_FACTS.items()}
    return ", ".join(f"{name} {size(fact) if isinstance(fact, list) else fact}" for name, fact in facts.items() if fact)


def _code(command: str) -> Markup:
    """Return a command as a block of Markdown, whose fence is longer than any backticks in it."""
    fence = "`" * max(3, 1 + max((len(word) for word in command.split() if set(word) == {"`"}), default=0))
    return Markup(f"{fence}sh\n{' '.join(command.split())}\n{fence}")
