"""Run the tests of the kernels for CPUs under AddressSanitizer and UndefinedBehaviorSanitizer.

    python tests/support/sanitize.py

The kernels are compiled once for each instruction set that this processor runs, by GCC, and tested in a process into
which the sanitizers are loaded first. What they find ends that process, and the status is 1.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from building import COMPILER, build

ROOT = Path(__file__).parents[1]
TESTS = (
    "ops/test_kernels.py",
    "ops/test_skew_exp.py",
    "core/test_accuracy.py",
    "core/test_hostile_values.py",
    "core/test_fuzz.py",
    "ops/test_operator_arguments.py",
    "core/test_shapes.py",
    "ops/test_repeated_calls.py",
)
FLAGS = ("-O1", "-g", "-fno-omit-frame-pointer", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
SETS = {"AVX512": ("x86-64-v4", "x86-64-v3", "x86-64"), "AVX2": ("x86-64-v3", "x86-64")}
OVERRUN = "int overrun(int i) { int local[4] = {0}; local[i] = 1; return local[3 - i % 4]; }\n"


def main() -> int:
    if COMPILER is None or not _preloaded():
        print("sanitizers need GCC and its libasan", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as folder:
        if not _notices(Path(folder)):
            print("the sanitizers let an overrun pass: nothing they say counts", file=sys.stderr)
            return 1
        for name in SETS.get(torch.backends.cpu.get_cpu_capability(), ("native",)):
            library = build(Path(folder) / f"{name}.so", f"-march={name}", *FLAGS)
            print(f"{name}:", flush=True)
            command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow"]
            if _run([*command, f"--kernels={library}", *(str(ROOT / test) for test in TESTS)]):
                return 1
    return 0


def _preloaded() -> str:
    """The libraries that must come first; the one of C++ so that the sanitizer finds what torch throws with."""
    found = [
        subprocess.run([str(COMPILER), f"-print-file-name={name}"], capture_output=True, text=True, check=True)
        for name in ("libasan.so", "libstdc++.so")
    ]
    paths = [one.stdout.strip() for one in found]
    return " ".join(paths) if all(Path(path).is_absolute() for path in paths) else ""


def _run(command: list[str], **settings: bool) -> int:
    # torch keeps memory until the process ends, which is no leak of ours.
    options = {"LD_PRELOAD": _preloaded(), "ASAN_OPTIONS": "detect_leaks=0", "OMP_NUM_THREADS": "2"}
    return subprocess.run(command, env={**os.environ, **options}, check=False, **settings).returncode


def _notices(folder: Path) -> bool:
    """Whether an overrun that was put there is found."""
    source = folder / "overrun.c"
    source.write_text(OVERRUN)
    library = build(folder / "overrun.so", *FLAGS, "-fvisibility=default", sources=[source])
    call = f"import ctypes; ctypes.CDLL({str(library)!r}).overrun(4)"
    return _run([sys.executable, "-c", call], capture_output=True) != 0


if __name__ == "__main__":
    sys.exit(main())
