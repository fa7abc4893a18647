"""Write the results table of the README, and put it between its markers."""

from pathlib import Path

from torchrope.files import write_whole
from torchrope.lab.report.chapters import data_sentence, run_facts
from torchrope.lab.report.tables import escape_markdown, show_table
from torchrope.lab.results import StudyResult

_SHOWN = ("name", "top1", "spread", "verdict", "shuffled", "ratio")


def encodings_and_results(results: Path) -> str:
    """Format the main table of a comparison in Markdown, with its answer and its provenance.

    Raises:
        ValueError: the file is missing, damaged, or not of a comparison.
    """
    study = StudyResult.read(results).plain()
    if study["study"] != "compare":
        raise ValueError(f"the README shows the results.json of `torchrope compare`, got {study['study']} in {results}")
    table = study["findings"]["tables"][0]
    shown = show_table({**table, "columns": [each for each in table["columns"] if each["key"] in _SHOWN]}, {})
    facts = dict(run_facts(study["run"]))
    provenance = [f"{name}: {facts[name]}." for name in ("Seeds", "Machine", "Date") if name in facts]
    sentences = escape_markdown(" ".join([data_sentence(study["data"]), *provenance]))
    answer = escape_markdown(study["findings"]["answer"])
    return f"{shown.markdown()}\n\n{answer}\n\n{sentences}"


def write_readme(path: Path, results: Path) -> None:
    """Put the table of a comparison's `results.json` between the markers of a Markdown file.

    Raises:
        ValueError: the file lacks the markers, or the results cannot be read.
    """
    block = encodings_and_results(results)
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
