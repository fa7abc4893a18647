"""Write the results table of the README, and put it between its markers."""

from pathlib import Path

from torchrope.files import write_whole
from torchrope.lab.report.load import Results, read_results
from torchrope.lab.report.notes import data_sentences, run_facts
from torchrope.lab.report.tables import (
    Column,
    escape_markdown,
    markdown_results,
    ratio_heading,
    result_rows,
)


def encodings_and_results(results: Results) -> str:
    """Write the ranked results as a short Markdown table with one line on where they come from."""
    columns = [
        Column("Rank", lambda row: row.rank),
        Column("Encoding", lambda row: row.label, numeric=False),
        Column("Name", lambda row: row.name, numeric=False),
        Column("Top-1 % [95 %]", lambda row: f"{row.top1} [{row.interval}]"),
        Column("± over seeds", lambda row: row.spread),
        Column("Shuffled %", lambda row: row.shuffled),
        Column("Encoding parameters", lambda row: row.encoding_parameters),
        Column(f"Step time {ratio_heading(results)}", lambda row: row.step_ratio),
        Column("Verdict", lambda row: row.verdict, numeric=False),
    ]
    return f"{markdown_results(columns, result_rows(results))}\n\n{_provenance(results)}"


def write_readme(path: Path, results: Path) -> None:
    """Put the table of a comparison's `results.json` between the markers of a Markdown file.

    Raises:
        ValueError: the file does not hold the markers, or the results cannot be read.
    """
    block = encodings_and_results(read_results(results))
    write_whole(path, insert_between_markers(path.read_text(encoding="utf-8"), "results", block))


def insert_between_markers(text: str, name: str, block: str) -> str:
    """Replace what stands between `<!-- name:begin -->` and `<!-- name:end -->` by `block`.

    Raises:
        ValueError: the text does not hold each marker once, begin before end.
    """
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        found = f"{text.count(begin)} begin and {text.count(end)} end"
        raise ValueError(f"the text must hold {begin} and then {end} once each, got {found}")
    before, after = text.split(begin)[0], text.split(end)[1]
    return f"{before}{begin}\n{block.strip()}\n{end}{after}"


def _provenance(results: Results) -> str:
    facts = dict(run_facts(results))
    told = [f"{name}: {facts[name]}." for name in ("Seeds", "Machine", "Date") if name in facts]
    return escape_markdown(" ".join([*data_sentences(results), *told]))
