"""Builds of the kernels for CPUs that tests need beside the installed one: with sanitizers, or without memory."""

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

SOURCES = Path(__file__).parents[2] / "src" / "torchrope" / "ops" / "native"
KERNELS = tuple(sorted(SOURCES.glob("*.c")))
COMPILER = shutil.which("gcc") or shutil.which("cc")

# As setup.py has them.
_FLAGS = ("-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-fvisibility=hidden", "-Wno-psabi")


def build(library: Path, *flags: str, sources: Sequence[Path] = ()) -> Path:
    """Compile the kernels, and further C files, into a library; flags are added to those of the installed build."""
    assert COMPILER is not None
    return compile_sources(COMPILER, [*KERNELS, *sources], library, "-fPIC", "-shared", *flags)


def compile_sources(compiler: str, sources: Sequence[Path], target: Path, *flags: str) -> Path:
    """Compile C files that may include the kernels' headers, by any compiler that takes GCC's options."""
    command = [compiler, *_FLAGS, *flags, f"-I{SOURCES}", *map(str, sources), "-o", str(target), "-lm"]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return target
