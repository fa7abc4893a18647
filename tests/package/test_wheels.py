"""The wheels: the library without a command, and the laboratory with it, of one version."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders with the contents of the wheels of `pip wheel . ./lab`."""
    pytest.importorskip("setuptools", reason="wheels are built without a network")
    folder, source = tmp_path_factory.mktemp("wheels"), tmp_path_factory.mktemp("source")
    left_out = shutil.ignore_patterns("build", "*.egg-info", "*.so", "__pycache__", "tests")
    for name in ("src", "lab"):
        shutil.copytree(ROOT / name, source / name, ignore=left_out)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    environment = {**os.environ, "TORCHROPE_NO_KERNELS": "1"}
    subprocess.run([*command, "--wheel-dir", folder, source, source / "lab"], check=True, env=environment)
    contents = {}
    for file in folder.glob("*.whl"):
        name = file.name.split("-")[0]
        contents[name] = folder / name
        with zipfile.ZipFile(file) as opened:
            opened.extractall(folder / name)
    return contents


def test_library_has_no_command_and_no_laboratory(wheels: dict[str, Path]) -> None:
    library = wheels["torchrope"]
    assert not list(library.glob("*.dist-info/entry_points.txt"))
    assert {path.name for path in library.iterdir() if path.suffix != ".dist-info"} == {"torchrope"}
    run = subprocess.run(
        [sys.executable, "-m", "torchrope", "compare"],
        env={**os.environ, "PYTHONPATH": str(library)},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 1
    assert "pip install . ./lab" in run.stderr


def test_laboratory_has_the_command_and_its_files(wheels: dict[str, Path]) -> None:
    laboratory = wheels["torchrope_lab"]
    assert "torchrope = torchrope_lab.cli:main" in next(laboratory.glob("*.dist-info/entry_points.txt")).read_text()
    source = ROOT / "lab/src/torchrope_lab"
    files = {path.relative_to(source.parent) for path in source.rglob("*") if path.is_file() and path.suffix != ".pyc"}
    assert files <= {path.relative_to(laboratory) for path in laboratory.rglob("*")}


def test_both_have_one_version_and_the_laboratory_requires_it(wheels: dict[str, Path]) -> None:
    library, laboratory = (next(wheels[name].glob("*.dist-info/METADATA")).read_text() for name in sorted(wheels))
    version = next(line for line in library.splitlines() if line.startswith("Version: "))
    assert version in laboratory.splitlines()
    assert f"Requires-Dist: torchrope=={version.removeprefix('Version: ')}" in laboratory.splitlines()


def test_former_place_names_the_new_one() -> None:
    with pytest.raises(ImportError, match="torchrope_lab"):
        __import__("torchrope.lab.cli")
