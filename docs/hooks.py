"""What the site has beyond the Markdown files in docs/: notebooks, results, files beside docs/, docstrings, formulas.

A line that is nothing but a link to a section, such as `[README](../README.md#start)`, is that section on the site. On
a forge it stays a link, and no text is written twice.

A link to the numbers of a result, such as `results/studies/shuffle-digits.json`, or to a section of results/README.md,
is a link to the page of these results on the site. Pages of results are not committed, so a forge has the files alone.

Pages of the API get docstrings in place of the signatures that a forge shows. Formulas, `$...$`, become MathML by
KaTeX, which a browser draws without scripts and fonts.
"""

import html
import json
import posixpath
import re
import runpy
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pykatex
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from nbconvert import MarkdownExporter

from torchrope_lab.report.page import write_report

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs/results"
SIGNATURES = SimpleNamespace(**runpy.run_path(str(ROOT / "docs/signatures.py")))
WITH_PAGE = ("studies", "kanji", "digits", "demo")
"""Folders of results that have a page on the site."""
PAGES = {"contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}
"""Pages of the site that are files beside docs/."""

PATH_AS_NAME = re.compile(r"\[(docs/[\w-]+\.md)\]\(\1\)")
NOTEBOOK_LINK = re.compile(r"\]\(([\w-]+)\.ipynb\)(?!\{)")
LONE_LINK = re.compile(r"^\[[^\]]*\]\(\.\./README\.md#([\w-]+)\)$", re.MULTILINE)
LINK = re.compile(r"\]\((?![a-z]+:|#)([^)\s]+)\)")
RESULT = re.compile(rf"results/(?:({'|'.join(WITH_PAGE)})/[\w-]+\.json|README\.md#({'|'.join(WITH_PAGE)}))")
ANSI = re.compile(r"\x1b\[[0-9;]*m")
HEADING = re.compile(r"^(#+) (.*)$", re.MULTILINE)
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[\(\[](.*?)\\[\)\]]</\1>', re.DOTALL)
FENCED = re.compile(r"^( *)```.*?^\1```$", re.MULTILINE | re.DOTALL)


def on_pre_build(config: Any, **_: Any) -> None:
    """Write the pages and figures of the committed results that are missing, or older than their numbers."""
    for folder in (RESULTS / name for name in WITH_PAGE):
        numbers = list(folder.glob("*.json"))
        if numbers and _is_older(folder / "report/report.md", numbers):
            write_report(folder)


def _is_older(written: Path, sources: Sequence[Path]) -> bool:
    return not written.exists() or written.stat().st_mtime < max(source.stat().st_mtime for source in sources)


def on_files(files: Files, config: Any, **_: Any) -> Files:
    """Add the pages whose files are beside docs/, and notebooks with the outputs that are saved in them."""
    for uri, source in PAGES.items():
        files.append(File.generated(config, uri, content=relocated((ROOT / source).read_text(encoding="utf-8"))))
    for notebook in (ROOT / "docs").glob("*.ipynb"):
        text, resources = MarkdownExporter().from_filename(str(notebook))
        note = f"[Download this page as a notebook]({notebook.name}){{ download }}\n"
        files.append(File.generated(config, f"{notebook.stem}.md", content=ANSI.sub("", text) + "\n" + note))
        for name, content in resources["outputs"].items():
            files.append(File.generated(config, name, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Put sections of the README where a line is a link to one, and link to pages of notebooks and results."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    text = LONE_LINK.sub(lambda found: section(readme, found[1], page.file.src_uri), markdown)
    if page.file.src_uri.startswith("api/"):
        text = with_docstrings(text)
    return with_pages_of_results(NOTEBOOK_LINK.sub(r"](\1.md)", text), page.file.src_uri)


def on_page_content(content: str, page: Any, **_: Any) -> str:
    """Draw formulas."""

    def drawn(found: re.Match[str]) -> str:
        formula, displayed = html.unescape(found[2]), found[1] == "div"
        try:
            text = pykatex.renderToString(formula, displayMode=displayed, output=pykatex.OUTPUT_MATHML)
        except pykatex.ParseError as error:
            raise PluginError(
                f"{page.file.src_uri}: formulas must be LaTeX that KaTeX knows, got {formula}: {error}"
            ) from None
        return f'<div class="formula">{text}</div>' if displayed else text

    return FORMULA.sub(drawn, content)


def with_docstrings(page: str) -> str:
    """A page of the API with the docstrings of its names in place of their signatures."""
    named = "\n\n".join(f"::: torchrope.{SIGNATURES.path_of(name)}" for name in SIGNATURES.names_of(page))
    return SIGNATURES.BLOCK.sub("", page, count=1) + f"\n{named}\n"


def section(readme: str, anchor: str, where: str) -> str:
    """Text below the README's heading with this anchor, down to the next heading, for a page of the site.

    Raises:
        PluginError: no heading has the anchor.
    """
    found = headings(readme)
    ends = [heading.start() for heading in found[1:]] + [len(readme)]
    for heading, end in zip(found, ends, strict=True):
        if slug(heading[2]) == anchor:
            return relocated(readme[heading.end() : end].strip())
    raise PluginError(f"{where} links to #{anchor}, but README.md has no such heading")


def headings(text: str) -> list[re.Match[str]]:
    """The headings of a text: lines that begin with # outside of code."""
    code = [block.span() for block in FENCED.finditer(text)]
    return [found for found in HEADING.finditer(text) if not any(a <= found.start() < b for a, b in code)]


def slug(title: str) -> str:
    """The anchor that forges give to a heading."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def relocated(text: str) -> str:
    """Text of a file beside docs/ as a page in it: links to docs/ are links here, and paths in them are titles."""
    pages = {source: uri for uri, source in PAGES.items()} | {"README.md": "index.md"}

    def moved(link: re.Match[str]) -> str:
        path = posixpath.normpath(link[1])
        return f"]({pages.get(path, path.removeprefix('docs/'))})"

    return LINK.sub(moved, PATH_AS_NAME.sub(lambda link: f"[{title(ROOT / link[1])}]({link[1]})", text))


def with_pages_of_results(text: str, uri: str) -> str:
    """Text of the page `uri`, whose links to results with a page are links to it, of studies to their chapter."""

    def paged(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(uri), link[1]))
        found = RESULT.fullmatch(path)
        if found is None:
            return link[0]
        chapter = ""
        if found[1] == "studies":
            chapter = f"#{slug(json.loads((ROOT / 'docs' / path).read_text(encoding='utf-8'))['title'])}"
        page = f"results/{found[1] or found[2]}/report/report.md"
        return f"]({posixpath.relpath(page, posixpath.dirname(uri) or '.')}{chapter})"

    return LINK.sub(paged, text)


def title(page: Path) -> str:
    """The first heading of a page."""
    return page.read_text(encoding="utf-8").split("\n", 1)[0].removeprefix("# ")
