"""Write a report as Markdown: the same tables, the figures as files beside it."""

import json

from torchrope.lab.report.figures import Drawing
from torchrope.lab.report.load import Results
from torchrope.lab.report.notes import data_sentences, reading_notes, run_facts, title
from torchrope.lab.report.tables import (
    encoding_rows,
    escape_markdown,
    markdown_results,
    markdown_table,
    resolution_table,
    result_columns,
    result_rows,
)


def render_markdown(results: Results, drawings: list[Drawing]) -> str:
    """Write the whole report; figures are referred to as `figures/<name>.svg`."""
    sections = [
        f"# {escape_markdown(title(results))}",
        escape_markdown(" ".join(data_sentences(results))),
        f"**{escape_markdown(results['answer'])}**",
        "## Results",
        markdown_results(result_columns(results), result_rows(results)),
        *_resolutions(results),
        *_drawings(drawings),
        "## What each encoding is",
        _encodings(results),
        "## How to read this",
        "\n".join(f"- **{heading}.** {escape_markdown(note)}" for heading, note in reading_notes(results)),
        "## How to run it again",
        *_command(results),
        "\n".join(f"- {name}: {escape_markdown(fact)}" for name, fact in run_facts(results)),
        *_configuration(results),
        *_listed("Unfinished runs", results.get("unfinished")),
        *_listed("Skipped files", results["data"].get("skipped")),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _resolutions(results: Results) -> list[str]:
    table = resolution_table(results)
    if table is None:
        return []
    headings = [f"{size} (trained)" if index == table.trained else size for index, size in enumerate(table.sizes)]
    rows = [[name, *cells] for name, cells in table.rows]
    numeric = [False] + [True] * len(headings)
    return ["## Top-1 % at other input sizes", markdown_table(["Encoding", *headings], rows, numeric)]


def _drawings(drawings: list[Drawing]) -> list[str]:
    return [part for drawing in drawings for part in (f"### {drawing.title}", _image(drawing), drawing.caption)]


def _image(drawing: Drawing) -> str:
    return f"![{escape_markdown(drawing.alt)}](figures/{drawing.name}.svg)"


def _encodings(results: Results) -> str:
    headings = ["Encoding", "Name", "What it is", "Formula", "Source", "Kind"]
    rows = [[row.label, row.name, row.summary, row.formula, row.source, row.kind] for row in encoding_rows(results)]
    return markdown_table(headings, rows, [False] * len(headings))


def _command(results: Results) -> list[str]:
    command = results["run"].get("command")
    return [f"```sh\n{command}\n```"] if command else []


def _configuration(results: Results) -> list[str]:
    config = results["run"].get("config")
    if not config:
        return []
    return ["Configuration:", f"```json\n{json.dumps(config, indent=2, ensure_ascii=False)}\n```"]


def _listed(heading: str, items: list[object] | None) -> list[str]:
    if not items:
        return []
    return [f"## {heading}", "\n".join(f"- {escape_markdown(str(item))}" for item in items)]
