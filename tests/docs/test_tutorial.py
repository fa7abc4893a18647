"""The tutorial is a notebook that runs, with the outputs of one run saved in it."""

import os
import sys
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat", reason="the site needs nbconvert: pip install --group docs")

NOTEBOOK = Path(__file__).parents[2] / "docs/tutorial.ipynb"


def test_notebook_is_saved_with_the_outputs_of_one_run_without_errors() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert {output.output_type for output in outputs} == {"stream", "execute_result"}
    assert not [output for output in outputs if output.get("name") == "stderr"]
    assert str(Path.home()) not in NOTEBOOK.read_text()
    assert NOTEBOOK.stat().st_size < 100_000


@pytest.mark.slow
def test_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("PATH", os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    for cell in notebook.cells:
        cell.source = cell.source.replace("--seeds 2", "--seeds 1 --epochs 1 --optim.warmup_epochs 0")
    client.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert (tmp_path / "comparison/report/index.html").exists()
