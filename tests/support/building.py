"""Builds of the kernels for CPUs that tests need beside the installed one: with sanitizers, or without memory."""

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

SOURCES = Path(__file__).parents[2] / "src" / "torchrope" / "ops" / "native"
COMPILER = shutil.which("gcc") or shutil.which("cc")

# As pyproject.toml has them.
_FLAGS = ("-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-fvisibility=hidden", "-Wno-psabi")


def build(library: Path, *flags: str, sources: Sequence[Path] = ()) -> Path:
    """Compile the kernels into a shared library.

    Args:
        library: The file to write.
        flags: For the compiler, beside those of the installed build.
        sources: C files beside the kernels' own.
    """
    assert COMPILER is not None
    files = [*sorted(SOURCES.glob("*.c")), *sources]
    command = [
        COMPILER,
        *_FLAGS,
        *flags,
        "-fPIC",
        "-shared",
        f"-I{SOURCES}",
        *map(str, files),
        "-o",
        str(library),
        "-lm",
    ]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return library
