"""Write the tables of docs/speed.md, its figures and the table of docs/data.md from benchmarks/results/*.json."""

from dataclasses import asdict
from pathlib import Path

from torchrope.files import write_whole
from torchrope.lab.bench.results import DataSuite, Suite, read_results
from torchrope.lab.report.speed import render_data_docs, render_docs
from torchrope.lab.report.speed_figures import draw, growth, step_times

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "cpu.json"
DOCS = ROOT / "docs"


def render(results: Path, docs: Path) -> None:
    page = docs / "speed.md"
    suite = asdict(read_results(results, Suite)) if results.exists() else None
    write_whole(page, render_docs(page.read_text(encoding="utf-8"), suite))
    if suite is None:
        return
    for figure in (step_times(suite["bench"]), growth(suite, "tokens"), growth(suite, "batch")):
        if figure is not None:
            write_whole(docs / "speed" / f"{figure.name}.svg", draw(figure) + "\n")


def render_data(results: Path, docs: Path) -> None:
    page = docs / "data.md"
    suite = asdict(read_results(results, DataSuite)) if results.exists() else None
    write_whole(page, render_data_docs(page.read_text(encoding="utf-8"), suite))


if __name__ == "__main__":
    render(RESULTS, DOCS)
    render_data(RESULTS.with_name("data.json"), DOCS)
