"""The README's code runs as printed, its table is the one that `make readme` writes, and it installs what exists."""

import re
import textwrap
from pathlib import Path

import pytest
from readme import write_table

README = (Path(__file__).parents[2] / "README.md").read_text()
EXAMPLES = [
    textwrap.dedent(block) for block in re.findall(r"^ *```python\n(.*?)^ *```", README, re.DOTALL | re.MULTILINE)
]


def test_library_example_runs_as_printed(capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(EXAMPLES[0], "README.md", "exec"), {})
    assert capsys.readouterr().out == "torch.Size([8, 12, 197, 64]) torch.Size([1, 5])\n"
    assert len([line for line in EXAMPLES[0].splitlines() if line]) <= 12


def test_readme_examples_run_as_printed() -> None:
    for example in EXAMPLES[1:]:
        exec(compile(example, "README.md", "exec"), {})


def test_files_that_the_readme_names_exist() -> None:
    root = Path(__file__).parents[2]
    for link in re.findall(r"\]\(([^)]+)\)", README):
        assert link.startswith("https://") or (root / link).exists(), link


@pytest.mark.parametrize("page", ["README.md", "docs/results/README.md"])
def test_table_is_that_of_the_committed_leaderboard(page: str, tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / page).read_text(encoding="utf-8")
    copy = tmp_path / "page.md"
    copy.write_text(text, encoding="utf-8")
    write_table(copy)
    assert copy.read_text(encoding="utf-8") == text
    block = text.partition("<!-- results:begin -->")[2].partition("<!-- results:end -->")[0]
    assert 2 < len(re.findall(r"^\| `", block, re.MULTILINE)) <= 10


def test_nothing_is_installed_from_an_index_before_a_release() -> None:
    root = Path(__file__).parents[2]
    folders = ("src", "lab", "docs", "examples")
    files = [
        path for folder in folders for path in (root / folder).rglob("*") if path.suffix in (".py", ".md", ".ipynb")
    ]
    for path in [*root.glob("*.md"), *files]:
        found = re.findall(r"pip install (?:-q )?[\\\"']*torchrope.*", path.read_text(encoding="utf-8"))
        assert not found, f"{path}: {found}"
