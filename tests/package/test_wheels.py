"""The wheels: the library without a command, and the laboratory with it, of one version."""

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import release

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that a release publishes, but without kernels and built without a network."""
    folder = tmp_path_factory.mktemp("dist")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHROPE_NO_KERNELS", "1")
        release.build(folder, "--no-isolation")
    return folder


@pytest.fixture(scope="module")
def wheels(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders with the contents of the wheels."""
    contents = {}
    for file in dist.glob("*.whl"):
        name = file.name.split("-")[0]
        contents[name] = tmp_path_factory.mktemp(name)
        with zipfile.ZipFile(file) as opened:
            opened.extractall(contents[name])
    return contents


@pytest.mark.parametrize("source", [ROOT / "src/torchrope", ROOT / "lab/src/torchrope_lab"], ids=lambda path: path.name)
def test_sdist_has_the_sources_and_nothing_of_the_machine(dist: Path, source: Path) -> None:
    with tarfile.open(next(dist.glob(f"{source.name}-[0-9]*.tar.gz"))) as opened:
        files = {
            Path(*Path(member.name).parts[1:]): opened.extractfile(member).read()
            for member in opened.getmembers()
            if member.isfile()
        }
    assert {Path("LICENSE"), Path("README.md"), Path("pyproject.toml")} <= {*files}
    built = {".so", ".pyc"}
    expected = {Path("src", path.relative_to(source.parent)) for path in source.rglob("*") if path.is_file()}
    assert {path for path in expected if path.suffix not in built} <= {*files}
    assert not {path.suffix for path in files} & built
    assert not [path for path, content in files.items() if str(ROOT).encode() in content]


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
