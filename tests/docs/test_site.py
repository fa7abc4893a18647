"""`make docs`: the site builds without a warning, is complete, and loads nothing from the network."""

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from chromium import BINARY, Chromium

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(
    any(
        importlib.util.find_spec(name) is None
        for name in ("mkdocs", "material", "mkdocstrings", "mkdocstrings_handlers")
    ),
    reason="the site is built with mkdocs, material and mkdocstrings: pip install --group docs",
)
ELSEWHERE = re.compile(r"^\s*(?:https?:)?//", re.IGNORECASE)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


@pytest.fixture(scope="module")
def hooks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("hooks", ROOT / "docs/hooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Requested(HTMLParser):
    """Collect what a browser fetches by itself for a page; links that a reader may follow are none of it."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        told = {name: value or "" for name, value in attrs}
        fetched = [told.get("src", ""), told.get("srcset", ""), told.get("poster", ""), told.get("data", "")]
        if tag in ("link", "use", "image"):
            fetched += [told.get("href", ""), told.get("xlink:href", "")]
        fetched += re.findall(r"url\(['\"]?([^'\")]+)", told.get("style", ""))
        self.addresses += [address for address in fetched if address]


def pages_of(nav: Any) -> Iterator[str]:
    """Every page that a navigation names."""
    if isinstance(nav, str):
        yield nav
    elif isinstance(nav, dict):
        for part in nav.values():
            yield from pages_of(part)
    else:
        for part in nav:
            yield from pages_of(part)


@pytest.mark.slow
def test_pages_of_the_navigation_are_built(site: Path) -> None:
    pages = list(pages_of(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]))
    assert len(pages) > 15
    for page in pages:
        assert (site / page).with_suffix(".html").stat().st_size > 1000, page


@pytest.mark.slow
def test_pages_make_no_network_requests(site: Path) -> None:
    for page in site.rglob("*.html"):
        requested = Requested()
        text = page.read_text()
        requested.feed(text)
        assert requested.addresses, page
        assert not [address for address in requested.addresses if ELSEWHERE.match(address)], page
        assert 'class="mermaid"' not in text, f"{page}: the theme fetches mermaid from a CDN"
    for sheet in site.rglob("*.css"):
        addresses = re.findall(r"(?:@import\s+url\(|@import\s+|url\()\s*['\"]?([^'\")\s]+)", sheet.read_text())
        assert not [address for address in addresses if ELSEWHERE.match(address)], sheet


@pytest.mark.slow
@pytest.mark.skipif(BINARY is None, reason="chromium is not installed")
def test_search_works_from_a_disk(site: Path) -> None:
    command = [str(BINARY), "--headless", "--no-sandbox", "--virtual-time-budget=8000", "--dump-dom"]
    page = subprocess.run([*command, f"file://{site}/index.html?q=golden"], capture_output=True, text=True, check=True)
    assert re.search(r'md-search-result__meta">\d+ matching documents', page.stdout)
    assert "points.html" in page.stdout.partition("md-search-result__list")[2]


@pytest.mark.slow
def test_sections_of_the_readme_stand_where_pages_link_to_them(site: Path) -> None:
    own = (site / "own-encoding.html").read_text()
    assert "Isotropic" in own
    assert "README" not in own
    choose = (site / "choose.html").read_text()
    assert 'href="conventions.html">Conventions</a>' in choose
    assert 'href="results/digits/report/report.html"' in choose


@pytest.mark.slow
def test_api_page_has_formulas_sources_and_examples(site: Path) -> None:
    text = (site / "api/encodings.html").read_text()
    assert 'id="torchrope.LieRE"' in text
    assert "<code>R(p) = exp(sum_a p_a A_a),  A_a block diagonal, skew, learned</code>" in text
    assert "<code>R(p) = I,  A_a = 0</code>.  Without another encoding outputs of tokens" in text
    assert "<em>Source:</em> LieRE" in text
    assert "&gt;&gt;&gt; " in text
    assert "References:" not in text


@pytest.mark.slow
def test_pages_of_the_api_have_docstrings_in_place_of_signatures(site: Path) -> None:
    text = (site / "api/operations.html").read_text()
    assert 'id="torchrope.rotating.rotate"' in text
    assert text.count("rotation: <") <= 3
    assert (site / "api/operations.html").stat().st_size < 300_000


CUT_OFF = """
[...document.querySelectorAll('.md-content *')].filter(element => {
  const box = element.getBoundingClientRect();
  if (!box.width || box.right <= innerWidth + 1) return false;
  for (let above = element; above; above = above.parentElement)
    if (['auto', 'scroll'].includes(getComputedStyle(above).overflowX)) return false;
  return true;
}).map(element => element.outerHTML.slice(0, 120))
"""
"""What is beyond the right edge and cannot be scrolled to."""


@pytest.mark.slow
@pytest.mark.skipif(BINARY is None, reason="chromium is not installed")
def test_nothing_is_cut_off(site: Path) -> None:
    browser = Chromium()
    try:
        for page in pages_of(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]):
            for width in (1280, 400):
                browser.open((site / page).with_suffix(".html"), width=width)
                assert browser.run("document.documentElement.scrollWidth") <= width, (page, width)
                assert browser.run(CUT_OFF) == [], (page, width)
                code = "[...document.querySelectorAll('pre > code')]"
                assert browser.run(f"{code}.every(each => each.scrollWidth <= each.clientWidth + 1)"), (page, width)
    finally:
        browser.close()


@pytest.mark.slow
def test_formulas_are_mathml(site: Path) -> None:
    text = (site / "mathematics.html").read_text()
    assert text.count("<math ") > 10
    assert 'class="arithmatex"' not in text
    assert "katex-error" not in text


def test_formula_that_katex_does_not_know_is_refused(hooks: ModuleType) -> None:
    from mkdocs.exceptions import PluginError

    class Page:
        class file:
            src_uri = "a.md"

    drawn = hooks.on_page_content('<p><span class="arithmatex">\\(x^2 &lt; 1\\)</span></p>', Page)
    assert "<math " in drawn
    assert "arithmatex" not in drawn
    with pytest.raises(PluginError, match=r"^a.md: formulas must be LaTeX that KaTeX knows, got \\nothing: "):
        hooks.on_page_content('<div class="arithmatex">\\[\\nothing\\]</div>', Page)


def test_section_ends_at_the_next_heading_and_code_has_no_headings(hooks: ModuleType) -> None:
    readme = "# Title\nintro\n## Start here, now\n```\n# no heading\n```\nsee [docs/speed.md](docs/speed.md)\n## Next\n"
    found = hooks.section(readme, "start-here-now", "index.md")
    assert found == "```\n# no heading\n```\nsee [Speed](speed.md)"
    assert hooks.section(readme, "title", "index.md") == "intro"


def test_links_to_numbers_of_results_are_links_to_their_pages_on_the_site(hooks: ModuleType) -> None:
    linked = (
        "[a](results/studies/resolution-digits.json) [b](results/README.md#digits) [c](results/digits/results.json)"
    )
    assert hooks.with_pages_of_results(linked, "choose.md") == (
        "[a](results/studies/report/report.md#input-size) [b](results/digits/report/report.md) "
        "[c](results/digits/report/report.md)"
    )
    table = "[a](kanji/results.json) [b](other/results.json) [c](benchmark/entry/entry.json) [d](../choose.md)"
    assert hooks.with_pages_of_results(table, "results/README.md") == table.replace(
        "kanji/results.json", "kanji/report/report.md"
    )


def test_section_that_is_not_there_is_refused(hooks: ModuleType) -> None:
    from mkdocs.exceptions import PluginError

    with pytest.raises(PluginError, match=r"index.md links to #gone, but README.md has no such heading"):
        hooks.section("# Title\n", "gone", "index.md")
