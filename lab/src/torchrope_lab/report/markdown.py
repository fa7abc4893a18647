"""Render a report as Markdown, with its tables and links to its figures."""

from collections.abc import Sequence
from typing import Any

from torchrope_lab.report.chapters import Chapter, Drawn, Part, title_of
from torchrope_lab.report.tables import Shown, escape_markdown, markdown_table


def render_markdown(chapters: Sequence[Chapter], advice: Sequence[dict[str, Any]]) -> str:
    """Render the report; figures are linked as `figures/<name>.svg`."""
    sections = [
        f"# {escape_markdown(title_of(chapters))}",
        *(["## Recommended encodings by case", _advice(advice)] if len(chapters) > 1 else []),
        *(section for chapter in chapters for section in _chapter(chapter)),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _advice(advice: Sequence[dict[str, Any]]) -> str:
    if not advice:
        return "None of these studies gives a recommendation."
    rows = [
        [
            row["case"],
            ", ".join(cell.text for cell in row["encodings"]),
            row["because"],
            ", ".join(filter(None, [row["chapter"].title, row["part"].data])),
        ]
        for row in advice
    ]
    return markdown_table(["Use case", "Encodings", "Reason", "Study"], rows, [False] * 4)


def _chapter(chapter: Chapter) -> list[str]:
    sources = f"Question from: {'; '.join(map(escape_markdown, chapter.sources))}." if chapter.sources else ""
    published = ["### Published results"] if chapter.published else []
    return [
        f"## {escape_markdown(chapter.title)}",
        f"*{escape_markdown(chapter.question)}*",
        sources,
        *(section for part in chapter.parts for section in _part(part)),
        *published,
        *(section for table in chapter.published for section in _table(table)),
    ]


def _part(part: Part) -> list[str]:
    findings = part.study["findings"]
    command = part.study["run"].get("command")
    return [
        f"### {escape_markdown(part.data)}" if part.data else "",
        escape_markdown(part.about),
        f"**{escape_markdown(findings['answer'])}**",
        *(section for table in part.tables[:1] for section in _table(table)),
        *(section for drawn in part.drawn for section in _drawing(drawn)),
        *(section for table in part.tables[1:] for section in _table(table)),
        *(section for shot in part.shots for section in _drawing(shot)),
        _unfinished(part.study["unfinished"]),
        *_checks(findings["checks"]),
        "\n".join(f"- {escape_markdown(note)}" for note in findings["notes"]),
        _code(command) if command else "",
        "\n".join(f"- {name}: {escape_markdown(fact)}" for name, fact in part.facts),
    ]


def _drawing(drawn: Drawn) -> list[str]:
    image = f"![{escape_markdown(drawn.figure['alt'])}](figures/{drawn.name}.svg)"
    return [f"#### {escape_markdown(drawn.figure['title'])}", image, escape_markdown(drawn.figure.get("caption") or "")]


def _table(table: Shown) -> list[str]:
    source = f"Source: {escape_markdown(table.source)}." if table.source else ""
    return [
        f"#### {escape_markdown(table.title)}",
        table.markdown(),
        source,
        escape_markdown(table.note),
    ]


def _checks(checks: Sequence[dict[str, Any]]) -> list[str]:
    if not checks:
        return []
    rows = [[check["rule"], "holds" if check["holds"] else "does not hold", check["measured"]] for check in checks]
    return ["#### Checks", markdown_table(["Rule", "", "Measured"], rows, [False] * 3)]


def _unfinished(missing: Sequence[str]) -> str:
    return f"Not finished yet: {escape_markdown(', '.join(missing))}." if missing else ""


def _code(command: str) -> str:
    fence = "`" * max(3, 1 + max((len(run) for run in command.split() if set(run) == {"`"}), default=0))
    return f"{fence}sh\n{' '.join(command.split())}\n{fence}"
