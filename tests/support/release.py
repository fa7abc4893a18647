"""Build what a release publishes, check it, and use it in fresh environments.

    python tests/support/release.py DIST [PYTHON ...]

Both distributions are built into DIST as sdists, and as wheels from these, and checked by twine and
check-wheel-contents. Each PYTHON that is on PATH then gets an environment of its own, in which the wheels are installed
from DIST and used: the library with torch alone, then the laboratory. What they require comes from the package index,
in the versions of `constraints/PYTHON-*.txt`, or of `constraints.txt`. The status is 1 if a PYTHON is missing.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE", "src", "lab")
SMALL = ("--model.dim=16", "--model.depth=1", "--model.num_heads=1", "--data.train_size=60", "--data.val_size=40")


def main(dist: str, *pythons: str) -> int:
    folder = Path(dist).resolve()
    if folder.exists() and any(folder.iterdir()):
        print(f"DIST must be empty or new, got {folder}", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as created:
        work = Path(created)
        tools = environment(sys.executable, work / "tools", "--group", f"{ROOT / 'pyproject.toml'}:release")
        build(folder, python=tools)
        files = sorted(folder.iterdir())
        run(tools, "-m", "twine", "check", "--strict", *files)
        run(tools, "-m", "check_wheel_contents", *(file for file in files if file.suffix == ".whl"))
        missing = [python for python in pythons if not works(python)]
        for python in pythons:
            if python not in missing:
                use(python, folder, work / python)
                shutil.rmtree(work / python)
    for python in missing:
        print(f"{python} is not on PATH: not checked", file=sys.stderr)
    return 1 if missing else 0


def build(folder: Path, *flags: str, python: str | Path = sys.executable) -> None:
    """Write the sdists of both distributions, and the wheels made of these, from copied sources, by python -m build."""
    left_out = shutil.ignore_patterns("build", "*.egg-info", "*.so", "__pycache__", "tests")
    with tempfile.TemporaryDirectory() as created:
        for name in SOURCES:
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            copy(ROOT / name, Path(created) / name, **({"ignore": left_out} if copy is shutil.copytree else {}))
        for source in (Path(created), Path(created) / "lab"):
            run(python, "-m", "build", *flags, "--outdir", folder, source)


def environment(python: str, folder: Path, *requirements: str, constraints: str = "constraints.txt") -> Path:
    """Make a virtual environment with `requirements` and return its interpreter."""
    run(python, "-m", "venv", folder)
    interpreter = folder / "bin" / "python"
    # pip installs groups since 25.1.
    for needed in filter(None, (["pip"], requirements)):
        run(interpreter, "-m", "pip", "install", "--quiet", "-c", ROOT / constraints, *needed)
    return interpreter


def works(python: str) -> bool:
    """Whether the interpreter is on PATH, and is more than a shim that starts none."""
    return shutil.which(python) is not None and not subprocess.run([python, "--version"], check=False).returncode


def use(python: str, dist: Path, folder: Path) -> None:
    """Install the wheels of `dist` for `python`, one after the other, and run what each is for."""
    own = next((ROOT / "constraints").glob(f"{Path(python).name}-*.txt"), ROOT / "constraints.txt")
    interpreter = environment(python, folder, constraints=str(own.relative_to(ROOT)))

    def install(name: str) -> None:
        # Never from the index, where the name may be a stranger's.
        run(interpreter, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--find-links", dist, name)
        run(interpreter, "-m", "pip", "install", "--quiet", "-c", own, name)
        run(interpreter, "-m", "pip", "check")

    install("torchrope")
    kernels = [] if os.environ.get("TORCHROPE_NO_KERNELS") else ["--kernels"]
    run(interpreter, ROOT / "tests" / "package" / "smoke.py", *kernels, cwd=folder)
    install("torchrope-lab")
    compare = ("compare", "--data=digits", "--encodings=none,mixed", "--seeds=1", "--epochs=1", "--out=out", *SMALL)
    run(folder / "bin" / "torchrope", *compare, cwd=folder)
    conclusion = json.loads((folder / "out" / "results.json").read_text(encoding="utf-8"))["conclusion"]
    print(f"{python}: installed and used; the comparison concludes {conclusion['kind']!r}", flush=True)


def run(*command: str | Path, cwd: Path | None = None) -> None:
    """Run a command that must succeed, without the paths to modules of the caller."""
    settings = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run([str(part) for part in command], check=True, cwd=cwd, env=settings)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
