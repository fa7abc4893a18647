"""Render the results table and insert it between the markers of the README."""

from pathlib import Path
from typing import Any

from torchrope.files import write_whole
from torchrope.lab.report.chapters import data_sentence, run_facts
from torchrope.lab.report.tables import escape_markdown, show_table
from torchrope.lab.results import StudyResult

_SHOWN = {
    "compare": ("name", "top1", "spread", "verdict", "shuffled", "ratio"),
    "benchmark": ("name", "rank", "mean", "gain", "gap", "step"),
}
"""Columns by the name of the study."""


def main_table(results: Path) -> str:
    """Render the main table of a comparison or a benchmark in Markdown, with its answer and provenance.

    Raises:
        ValueError: the file is missing, damaged, or of another study.
    """
    study = StudyResult.read(results).plain()
    if study["study"] not in _SHOWN:
        rule = "the README shows the result of `torchrope compare` or `torchrope benchmark`"
        raise ValueError(f"{rule}, got {study['study']} in {results}")
    table = study["findings"]["tables"][0]
    columns = [each for each in table["columns"] if each["key"] in _SHOWN[study["study"]]]
    answer = escape_markdown(study["findings"]["answer"])
    source = escape_markdown(_source(study))
    return f"{show_table({**table, 'columns': columns}, {}).markdown()}\n\n{answer}\n\n{source}"


def _source(study: dict[str, Any]) -> str:
    """Describe the data, seeds, machine and date of a result."""
    facts = dict(run_facts(study["run"]))
    stated = [f"{name}: {facts[name]}." for name in ("Seeds", "Machine", "Date") if name in facts]
    return " ".join([*([data_sentence(study["data"])] if study["data"] else []), *stated])


def write_readme(path: Path, folder: Path) -> None:
    """Put the table of the comparison or benchmark in a folder between the markers of a Markdown file.

    Raises:
        ValueError: the file lacks the markers, or the results cannot be read.
    """
    benchmark = folder / "benchmark.json"
    block = main_table(benchmark if benchmark.exists() else folder / "results.json")
    write_whole(path, insert_between_markers(path.read_text(encoding="utf-8"), "results", block))


def insert_between_markers(text: str, name: str, block: str) -> str:
    """Replace the text between `<!-- name:begin -->` and `<!-- name:end -->` by `block`.

    Raises:
        ValueError: the text does not contain each marker once, begin before end.
    """
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        found = f"{text.count(begin)} begin and {text.count(end)} end"
        raise ValueError(f"the text must contain {begin} and then {end} once each, got {found}")
    before, after = text.split(begin)[0], text.split(end)[1]
    return f"{before}{begin}\n{block.strip()}\n{end}{after}"
