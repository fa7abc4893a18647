"""Every Triton kernel compiles ahead of time for the GPUs listed here, without a device."""

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import torchrope.ops

triton = pytest.importorskip("triton")

TARGETS = {"sm_80": ("cuda", 80, 32), "sm_90": ("cuda", 90, 32), "gfx942": ("hip", "gfx942", 64)}
TYPES = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True)
class Launch:
    """A kernel and what it was launched with."""

    kernel: Any
    arguments: dict[str, Any]
    options: dict[str, int]


def planar(dtype: torch.dtype, axes: int) -> None:
    from torchrope.ops.gpu import planar

    q, k = vectors(dtype)
    positions, frequencies = torch.zeros(1, 5, axes), torch.zeros(axes, 2, 32)
    planar.rotate(q, positions, frequencies)
    planar.rotate_backward(k, q, positions, frequencies, False, (True, True))


def normed(dtype: torch.dtype, axes: int) -> None:
    from torchrope.ops.gpu import normed

    q, k = vectors(dtype)
    given = (torch.zeros(1, 5, axes), torch.zeros(axes, 2, 32), True, torch.ones(64), torch.ones(64), 2, 1e-6)
    normed.rotate(q, *given)
    normed.rotate_backward(k, q, *given, [True] * 4)


def block(dtype: torch.dtype, batch: int, b: int) -> None:
    from torchrope.ops.gpu import block

    q, k = vectors(dtype, batch, max(64, b))
    table = torch.zeros(1, 2, 5, max(64 // b, 1), b, b)
    block.rotate(q, table)
    block.rotate_backward(k, q, table)


def skew_exp(b: int) -> None:
    from torchrope.ops.gpu import exponential

    positions, generators = torch.zeros(1, 5, 2), torch.zeros(2, 2, max(64 // b, 1), b, b)
    tangent = torch.zeros(1, 2, 5, max(64 // b, 1), b * (b - 1) // 2)
    exponential.exp(positions, generators)
    exponential.exp_backward(positions, generators, tangent, True)


def basis(dtype: torch.dtype, b: int) -> None:
    from torchrope.ops.gpu import basis

    q, k = vectors(dtype, 64)
    blocks = 64 // b
    given = (
        torch.zeros(1, 5, 2),
        torch.zeros(2, 2, blocks),
        torch.zeros(2, blocks, b, b),
        torch.zeros(2, blocks, b // 2),
    )
    basis.rotate(q, *given)
    basis.rotate_backward(k, q, *given, True)


def planes(b: int) -> None:
    from torchrope.ops.gpu import planes

    planes.decompose(torch.zeros(3, b, b))


FAMILIES: dict[str, Callable[[], None]] = {
    "planes-b8": lambda: planes(8),
    "planes-b64": lambda: planes(64),
    "planar-bf16": lambda: planar(torch.bfloat16, 2),
    "normed-bf16": lambda: normed(torch.bfloat16, 2),
    "block-products-bf16-b8": lambda: block(torch.bfloat16, 16, 8),
    "block-products-bf16-b64": lambda: block(torch.bfloat16, 16, 64),
    "block-sums-fp32-b8": lambda: block(torch.float32, 2, 8),
    "basis-bf16-b8": lambda: basis(torch.bfloat16, 8),
    "skew-exp-b8": lambda: skew_exp(8),
    "skew-exp-b32": lambda: skew_exp(32),
}


def vectors(dtype: torch.dtype, batch: int = 2, channels: int = 64) -> tuple[Tensor, Tensor]:
    q, k, _ = torch.zeros(batch, 5, 3, 2, channels, dtype=dtype).permute(2, 0, 3, 1, 4)
    return q, k


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """Record what would be launched, instead of launching it."""
    seen: list[Launch] = []

    def record(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        names = [parameter.name for parameter in kernel.params]
        arguments = dict(zip(names, args, strict=False)) | {name: kwargs.pop(name) for name in names if name in kwargs}
        seen.append(Launch(kernel, arguments, kwargs))

    monkeypatch.setattr(triton.JITFunction, "run", record)
    return seen


ONE_TARGET = {"planes-b8": "sm_90", "planar-bf16": "gfx942", "normed-bf16": "gfx942"} | dict.fromkeys(
    ("block-products-bf16-b8", "block-sums-fp32-b8", "basis-bf16-b8", "skew-exp-b8"), "sm_80"
)
COMPILED = [
    pytest.param(name, target, marks=() if ONE_TARGET.get(name) == target else pytest.mark.slow)
    for name in FAMILIES
    for target in TARGETS
]


@pytest.mark.parametrize(("family", "target"), COMPILED)
def test_kernels_compile(family: str, target: str, launches: list[Launch], monkeypatch: pytest.MonkeyPatch) -> None:
    FAMILIES[family]()
    assert launches
    monkeypatch.undo()
    for launch in launches:
        binary = compiled(launch, target)
        code = "amdgcn" if target.startswith("gfx") else "ptx"
        assert binary.asm[code]
        assert "tf32" not in binary.asm[code]
        assert "sin.approx" not in binary.asm[code]
        assert "cos.approx" not in binary.asm[code]


def test_kernels_compiled_include_every_kernel(launches: list[Launch]) -> None:
    for launch_all in FAMILIES.values():
        launch_all()
    sources = Path(torchrope.ops.__file__).with_name("gpu").glob("*.py")
    written = {
        name for source in sources for name in re.findall(r"^def (\w+_kernel)\(", source.read_text(), re.MULTILINE)
    }
    assert {launch.kernel.__name__ for launch in launches} == written


def compiled(launch: Launch, target: str) -> Any:
    """Compile a launch, whichever names this Triton gives to the parts of a source."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {name: kind(launch, name, value) for name, value in launch.arguments.items()}
    constants = {name: value for name, value in launch.arguments.items() if signature[name] == "constexpr"}
    if "constexprs" in inspect.signature(ASTSource).parameters:
        source = ASTSource(launch.kernel, signature, constexprs=constants)
    else:
        source = ASTSource(launch.kernel, signature, constants=constants)
    try:
        return triton.compile(source, target=GPUTarget(*TARGETS[target]), options=launch.options)
    except Exception as error:
        if "ld.lld not found" in str(error):
            pytest.skip(f"this Triton brings no linker for {target}")
        raise


def kind(launch: Launch, name: str, value: Any) -> str:
    """The type of an argument in Triton's words."""
    if next(p for p in launch.kernel.params if p.name == name).is_constexpr:
        return "constexpr"
    if isinstance(value, Tensor):
        return "*" + TYPES[value.dtype]
    return "i32"
