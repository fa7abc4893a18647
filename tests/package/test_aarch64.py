"""The CPU kernels, cross-compiled for AArch64 and run by an emulator."""

from pathlib import Path

import pytest
import torch
from building import COMPILER, KERNELS, compile_sources
from emulation import CROSS_COMPILER, EMULATOR, EmulatedLibrary, build_program
from parity import assert_same_bits, build, judge, make_inputs, outcome

from torchrope.ops import native

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CROSS_COMPILER is None, reason="aarch64-linux-gnu-gcc is not installed"),
    pytest.mark.skipif(native.LIBRARY is None, reason="no kernels were built for this machine"),
]
needs_emulator = pytest.mark.skipif(EMULATOR is None, reason="qemu-aarch64 is not installed")

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
CASES = [
    ("axial", 2, F32),
    ("mixed", 2, F16),
    ("halves", 2, BF16),
    ("ld", 8, F32),
    ("ap", 4, BF16),
    ("ap", 3, F16),
    ("liere", 4, F16),
    ("liere", 8, F32),
    ("liere", 16, BF16),
    ("liere", 32, F32),
]


@pytest.mark.parametrize("source", KERNELS, ids=lambda path: path.stem)
def test_sources_compile_without_warnings(source: Path, tmp_path: Path) -> None:
    assert CROSS_COMPILER is not None
    compile_sources(CROSS_COMPILER, [source], tmp_path / "one.o", "-O3", "-Wall", "-Wextra", "-Werror", "-c")


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> EmulatedLibrary:
    assert CROSS_COMPILER is not None
    assert EMULATOR is not None
    return EmulatedLibrary(
        EMULATOR, build_program(tmp_path_factory.mktemp("aarch64") / "kernels", CROSS_COMPILER, "-O3")
    )


@needs_emulator
@pytest.mark.parametrize(("family", "b", "dtype"), CASES)
def test_kernels_on_aarch64_are_as_accurate_as_the_reference(
    family: str, b: int, dtype: torch.dtype, emulated: EmulatedLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "LIBRARY", emulated)
    encoding = build(family, b, 2)
    before = len(emulated.calls)
    judge(encoding, make_inputs(encoding, 19, dtype))
    assert len(emulated.calls) > before


@pytest.fixture(scope="module")
def without_fusing(tmp_path_factory: pytest.TempPathFactory) -> tuple[EmulatedLibrary, EmulatedLibrary]:
    """Builds for this processor and for AArch64 that fuse no multiplication and addition, as generic x86-64 cannot."""
    assert COMPILER is not None
    assert CROSS_COMPILER is not None
    folder, flags = tmp_path_factory.mktemp("without_fusing"), ("-O3", "-ffp-contract=off")
    here = EmulatedLibrary(build_program(folder / "here", COMPILER, *flags))
    return here, EmulatedLibrary(EMULATOR, build_program(folder / "aarch64", CROSS_COMPILER, *flags))


@needs_emulator
@pytest.mark.skipif(COMPILER is None, reason="no compiler for this machine")
@pytest.mark.parametrize(("family", "b", "dtype"), CASES)
def test_processors_compute_the_same_bits_without_fused_operations(
    family: str,
    b: int,
    dtype: torch.dtype,
    without_fusing: tuple[EmulatedLibrary, EmulatedLibrary],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    encoding = build(family, b, 2)
    inputs = make_inputs(encoding, 19, dtype)
    results = []
    for library in without_fusing:
        monkeypatch.setattr(native, "LIBRARY", library)
        results.append(outcome(encoding, inputs))
    assert_same_bits(*results)
