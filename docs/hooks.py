"""What the site takes from outside docs/: whole files as pages, and sections of the README where a page links to them.

A line that is nothing but a link to a section, such as `[README](../README.md#start)`, is that section on the site. On
a forge it stays a link, and no text is written twice.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PAGES = {"contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}
"""Pages of the site that are files beside docs/."""

PATH_AS_NAME = re.compile(r"\[(docs/[\w-]+\.md)\]\(\1\)")
LONE_LINK = re.compile(r"^\[[^\]]*\]\(\.\./README\.md#([\w-]+)\)$", re.MULTILINE)
LINK = re.compile(r"\]\((?![a-z]+:|#)([^)\s]+)\)")
HEADING = re.compile(r"^(#+) (.*)$", re.MULTILINE)
FENCED = re.compile(r"^( *)```.*?^\1```$", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: Any, **_: Any) -> Files:
    """Add the pages that lie beside docs/."""
    for uri, source in PAGES.items():
        files.append(File.generated(config, uri, content=relocated((ROOT / source).read_text(encoding="utf-8"))))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Put sections of the README where a line is a link to one."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    return LONE_LINK.sub(lambda found: section(readme, found[1], page.file.src_uri), markdown)


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
    raise PluginError(f"{where} needs a heading of README.md for #{anchor}, got none")


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


def title(page: Path) -> str:
    """The first heading of a page."""
    return page.read_text(encoding="utf-8").split("\n", 1)[0].removeprefix("# ")
