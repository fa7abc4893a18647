"""Declare the CPU kernels: the same C sources, compiled once for each instruction set of the target processor.

Everything else is in pyproject.toml. `TORCHROPE_NO_KERNELS=1` leaves the kernels out, for the wheel of systems
that have none of their own; torchrope then computes with plain PyTorch.
"""

import os
import sysconfig
from pathlib import Path

from setuptools import Extension, setup

NATIVE = Path("src/torchrope/ops/native")
FLAGS = ["-O3", "-g0", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-fvisibility=hidden"]
QUIET = ["-Wno-psabi"]  # vectors are passed between functions of one build alone
X86_64 = {"_avx512": ["-march=x86-64-v4"], "_avx2": ["-march=x86-64-v3"], "_generic": []}
OTHERS = {"_generic": []}  # vectors of what the processor always has: NEON on AArch64


def kernels() -> list[Extension]:
    """Build instructions, one shared library an instruction set; a library that does not compile is left out."""
    if os.environ.get("TORCHROPE_NO_KERNELS"):
        return []
    is_x86_64 = sysconfig.get_platform().endswith(("x86_64", "amd64"))
    return [
        Extension(
            f"torchrope.ops.native.{name}",
            sources=sorted(map(str, NATIVE.glob("*.c"))),
            depends=sorted(map(str, NATIVE.glob("*.h"))),
            extra_compile_args=[*march, *FLAGS, *QUIET],
            optional=True,
            py_limited_api=True,
        )
        for name, march in (X86_64 if is_x86_64 else OTHERS).items()
    ]


if __name__ == "__main__":
    # No kernel uses Python's C API: one wheel serves Python 3.10 and all later ones.
    setup(ext_modules=kernels(), options={"bdist_wheel": {"py_limited_api": "cp310"}})
