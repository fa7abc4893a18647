"""Write the report of the results in a folder: one self-contained HTML file, and Markdown."""

import hashlib
import json
from base64 import b64encode
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from torchrope.files import write_whole
from torchrope_lab.report.chapters import MANY, Chapter, advice_table, all_drawn, arrange, title_of
from torchrope_lab.report.looks import COLOURS, DARK_COLOURS, DARK_PLAIN, PLAIN, Look, colour_class, page_looks
from torchrope_lab.report.markdown import render_markdown
from torchrope_lab.report.plots import GRID, INK, PAPER, SOFT
from torchrope_lab.report.read import read_studies


def write_report(out: Path) -> Path:
    """Write `out/report/index.html`, `report.md` and `figures/*.svg` from the results in `out`.

    Everything is rendered before anything is written, and every file is written atomically.

    Args:
        out: Output folder of `torchrope compare`, `study`, `leaderboard` or `speed`.

    Returns:
        The path of the page.

    Raises:
        ValueError: there is no study, or one is damaged.
        ImportError: vl-convert-python is not installed.
    """
    studies = read_studies(Path(out))
    looks = page_looks(studies)
    chapters = arrange(studies, looks)
    folder = Path(out) / "report"
    texts = {
        **{folder / "figures" / f"{drawn.name}.svg": drawn.svg + "\n" for drawn in all_drawn(chapters)},
        folder / "report.md": render_markdown(chapters, advice_table(chapters, {})),
        folder / "index.html": render_page(chapters, looks),
    }
    for path, text in texts.items():
        write_whole(path, text)
    for left in set((folder / "figures").glob("*.svg")) - set(texts):
        left.unlink()
    return folder / "index.html"


def render_page(chapters: Sequence[Chapter], looks: dict[str, Look]) -> str:
    """Render the HTML page, with style, scripts and figures inline."""
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    template = environment.from_string(_shipped("page.html"))
    scripts = [_library(), _shipped("page.js")]
    parts = [part for chapter in chapters for part in chapter.parts]
    return template.render(
        style=Markup(_shipped("page.css") + _colours()),
        scripts=[Markup(script) for script in scripts],
        policy=_policy(scripts),
        title=title_of(chapters),
        chapters=chapters,
        advice=advice_table(chapters, looks),
        broken=[(part, check) for part in parts for check in part.study["findings"]["checks"] if not check["holds"]],
        parts=parts,
        many=MANY,
        config=_indented,
    )


def _library() -> str:
    """Return Vega, Vega-Lite and vega-embed as one script that loads nothing from the network."""
    import vl_convert

    bundle = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")
    return bundle.replace("</script", "<\\/script").replace("<!--", "<\\!--")


def _policy(scripts: Sequence[str]) -> str:
    """Return the Content-Security-Policy: only the page's own scripts, by hash, and inline images."""
    hashes = (b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{each}'" for each in hashes)
    rules = ("default-src 'none'", f"script-src {allowed}", "style-src 'unsafe-inline'", "img-src data: blob:")
    return "; ".join([*rules, "base-uri 'none'", "form-action 'none'"])


def _colours() -> str:
    """Return CSS rules for the colours of encodings and for figures in dark mode, where drawings are recoloured."""
    pairs = {PLAIN: DARK_PLAIN, **dict(zip(COLOURS, DARK_COLOURS, strict=True))}
    dots = [f".dot.{colour_class(place)} {{ background: {colour}; }}" for place, colour in enumerate(pairs, start=-1)]
    drawn = {**pairs, PAPER: "none", INK: "var(--ink)", SOFT: "var(--soft)", GRID: "var(--line)"}
    rules = [
        f'  .drawing [{part}="{light}" i] {{ {part}: {dark}; }}'
        for light, dark in drawn.items()
        for part in ("fill", "stroke")
    ]
    rules += [
        f"  .dot.{colour_class(place)} {{ background: {colour}; }}"
        for place, colour in enumerate(pairs.values(), start=-1)
    ]
    return "\n".join(
        [
            *dots,
            f'.drawing [fill="{PAPER}" i] {{ fill: none; }}',
            "@media screen and (prefers-color-scheme: dark) {",
            *rules,
            "}",
            "",
        ]
    )


def _shipped(name: str) -> str:
    return (files("torchrope_lab.report") / name).read_text(encoding="utf-8")


def _indented(config: dict[str, Any] | None) -> str | None:
    return json.dumps(config, indent=2, ensure_ascii=False) if config else None
