"""The code in docs/ runs as printed, links resolve, figures and numbers are those of the library."""

import re
import runpy
import sys
import textwrap
import types
import zlib
from pathlib import Path

import pytest

import torchrope as tr
from torchrope_lab.engine.registry import STUDIES
from torchrope_lab.results import StudyResult

DOCS = Path(__file__).parents[2] / "docs"
PAGES = sorted(page for page in DOCS.rglob("*.md") if "report" not in page.parts)
SLOW = ("own-encoding-0",)  # tests all properties, compiled too
BLOCKS = [
    pytest.param(
        page.name,
        textwrap.dedent(block),
        id=f"{page.stem}-{number}",
        marks=[pytest.mark.slow] if f"{page.stem}-{number}" in SLOW else [],
    )
    for page in PAGES
    if page.parent.name != "api"  # signatures
    for number, block in enumerate(re.findall(r"^ *```python\n(.*?)^ *```", page.read_text(), re.DOTALL | re.MULTILINE))
]


@pytest.mark.parametrize(("page", "block"), BLOCKS)
def test_block_of_code_runs_as_printed(page: str, block: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"page_{zlib.crc32(block.encode())}"  # pickle and torch.compile find classes and globals by their module
    module = types.ModuleType(name)
    monkeypatch.setitem(sys.modules, name, module)
    exec(compile(block, page, "exec"), module.__dict__)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_resolve(page: Path) -> None:
    for link in re.findall(r"\]\(([^)#:\s]+)(?:#[^)\s]*)?\)", page.read_text()):
        results, written, _ = link.partition("/report/")  # pages of results are written when the site is built
        assert any((page.parent / results).glob("**/*.json")) if written else (page.parent / link).exists(), link


def test_links_of_llms_txt_are_pages_of_the_site() -> None:
    links = re.findall(r"\]\(([^)]+)\)", (DOCS / "llms.txt").read_text())
    assert len(links) > 10
    navigation = (DOCS.parent / "mkdocs.yml").read_text()
    for link in links:
        page = Path(link).with_suffix(".md")
        assert (DOCS / page).exists(), link
        assert re.search(rf"[:-] {page}$", navigation, re.MULTILINE), link


@pytest.mark.parametrize("name", sorted(path.stem for path in (DOCS / "figures").glob("*.svg")))
def test_figure_is_what_the_library_draws(name: str, tmp_path: Path) -> None:
    drawn = runpy.run_path(str(DOCS / "figures.py"))["FIGURES"][name]()
    committed = (DOCS / "figures" / f"{name}.svg").read_text()
    number = re.compile(r"-?\d+(?:\.\d+)?")
    assert number.sub("", drawn) == number.sub("", committed)
    # Drawn to a tenth of a pixel: another processor may round to the next one.
    assert [float(found) for found in number.findall(drawn)] == pytest.approx(
        [float(found) for found in number.findall(committed)], abs=0.11
    )


@pytest.fixture(scope="module")
def signatures() -> types.ModuleType:
    pytest.importorskip("griffe")
    return types.SimpleNamespace(**runpy.run_path(str(DOCS / "signatures.py")))


def test_public_names_are_on_the_pages_of_the_api(signatures: types.ModuleType) -> None:
    named = [name for page in (DOCS / "api").glob("*.md") for name in signatures.names_of(page.read_text())]
    assert len(named) == len({*named})
    public = {name for name in tr.__all__ if not isinstance(getattr(tr, name), types.ModuleType)} - {"__version__"}
    assert public <= {*named}
    assert {f"{page.relative_to(DOCS)}" for page in (DOCS / "api").glob("*.md")} == {
        *re.findall(r"\((api/\w+\.md)\)", (DOCS / "api.md").read_text())
    }


def test_signatures_of_the_api_are_those_of_the_code(signatures: types.ModuleType) -> None:
    package = signatures.load()
    for path in (DOCS / "api").glob("*.md"):
        page = path.read_text()
        assert signatures.with_signatures(page, package) == page, "python docs/signatures.py"
    [block] = re.findall(r"^```python\n(.*?)^```$", (DOCS / "api/operations.md").read_text(), re.MULTILINE | re.DOTALL)
    assert block.startswith("rotate(q: Tensor, k: Tensor, rotation: ")


PUBLISHED = {"errata.md": "| 580,608 |", "recipes.md": "top-1 `liere:8` 70.3 |", "results/papers.md": "| 95.6 [93.4"}


@pytest.mark.parametrize(("page", "number"), PUBLISHED.items())
def test_tables_of_published_numbers_are_those_of_the_data(page: str, number: str) -> None:
    text = (DOCS / page).read_text()
    assert number in text
    assert runpy.run_path(str(DOCS / "tables.py"))["PAGES"][page](text) == text, "python docs/tables.py"


def test_studies_are_in_the_table_of_studies() -> None:
    assert set(STUDIES) <= set(re.findall(r"^\| `([\w-]+)` \|", (DOCS / "studies.md").read_text(), re.MULTILINE))


def test_numbers_on_the_page_of_results_are_those_of_the_answers_in_the_files() -> None:
    page, results = (DOCS / "results/README.md").read_text(), DOCS / "results"
    files = [file for file in results.glob("*/*.json") if file.parent.name != "finetune"]
    assert len(files) > 20
    for file in files:
        [row] = [line for line in page.splitlines() if f"]({file.relative_to(results).as_posix()})" in line]
        said, answered = (
            {number.replace("−", "-") for number in re.findall(r"(?<![\w:])[−-]?\d+\.\d+", text)}
            for text in (row.split(" | ")[2], StudyResult.read(file).findings.answer)
        )
        assert said <= answered, row


def test_accuracies_that_the_guide_names_are_committed_results() -> None:
    results = StudyResult.read(DOCS / "results/digits/results.json")
    [table] = [table for table in results.findings.tables if table.title == "Accuracy at other input sizes"]
    measured = {
        (row["name"], f"{row[column.key]:.1f} % [{row[column.low]:.1f}, {row[column.high]:.1f}]")
        for row in table.rows
        for column in table.columns[2:]
    }
    findings = (DOCS / "results/README.md").read_text().partition("**Resampled digits**")[2].partition("\n\n**")[0]
    named = re.findall(r"`([\w-]+)`[^`%]*?(\d+\.\d % \[\d+\.\d, \d+\.\d\])", findings)
    assert len(named) == 2
    assert set(named) <= measured
