"""Every Triton kernel compiles ahead of time, specialised as at a launch, for the GPUs listed here without a device."""

import importlib
import itertools
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
if not hasattr(triton.JITFunction, "_pack_args"):
    pytest.skip("this Triton does not let a test specialise a kernel", allow_module_level=True)

TARGETS = {"sm_80": ("cuda", 80, 32), "sm_90": ("cuda", 90, 32), "gfx942": ("hip", "gfx942", 64)}
# KiB for a program: sm_80 has 163, but compute capabilities 8.6 and 8.9, whose code is much the same, have 99.
SHARED_MEMORY = {"sm_80": 99, "sm_90": 227, "gfx942": 64}


@dataclass(frozen=True)
class Launch:
    """A kernel and what it was launched with."""

    kernel: Any
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]

    @property
    def name(self) -> str:
        return f"{self.kernel.__module__.split('.')[-1]}.{self.kernel.__name__}"


def planar(x: Tensor, k: Tensor, halves: bool = False, group: int = 1, axes: int = 2) -> None:
    heads, tokens, pairs = x.shape[1] // group, x.shape[2], x.shape[3] // 2
    positions = torch.zeros(1, tokens, axes) if axes else torch.zeros(1, heads, tokens, pairs)
    angles = positions, torch.zeros(axes, heads, pairs), None, not halves
    gpu().rotate_planar(x, k, *angles)
    for needed in (True, False):
        gpu().rotate_planar_backward(x, k, x, k, *angles, [needed] * 2)


def block(x: Tensor, k: Tensor, b: int, group: int = 1) -> None:
    table = torch.zeros(x.shape[1] // group, x.shape[2], x.shape[3] // b, b, b).mT
    gpu().rotate_block(x, k, table, torch.zeros(0))
    for needed in (True, False):
        gpu().rotate_block_backward(x, k, x, k, table, needed)


def basis(x: Tensor, k: Tensor, b: int, group: int = 1) -> None:
    heads, blocks = x.shape[1] // group, x.shape[3] // b
    positions, factors, basis = (
        torch.zeros(x.shape[2], 2),
        torch.zeros(2, heads, blocks),
        torch.zeros(heads, blocks, b, b),
    )
    angular = torch.zeros(heads, blocks, b // 2)
    gpu().rotate_basis(x, k, positions, factors, basis, basis, angular, True)
    given = positions, factors, basis, angular, True
    gpu().rotate_basis_backward(x, k, x, k, *given, [True] * 3)


def skew_exp(b: int, tokens: int = 5, sets: int = 1) -> None:
    blocks = max(64 // b, 1)
    positions, generators = torch.zeros(sets, tokens, 2), torch.zeros(2, 2, blocks, b, b)
    gpu().exp_generators(positions, generators)
    gpu().exp_generators_backward(positions, generators, torch.zeros(sets, 2, tokens, blocks, b * (b - 1) // 2), True)


def planes(b: int) -> None:
    gpu().skew_eig(torch.zeros(3, b, b))


def gpu() -> Any:
    return importlib.import_module("torchrope.ops.gpu")


def vectors(
    dtype: Any = torch.bfloat16,
    batch: int = 32,
    tokens: int = 5,
    channels: int = 64,
    heads: int = 2,
    of: str = "packed",
) -> Tensor:
    """q, as a packed projection gives it, contiguous, at an odd address, or with odd strides."""
    if of == "packed":
        return torch.zeros(batch, tokens, 3, heads, channels, dtype=dtype).permute(2, 0, 3, 1, 4)[0]
    if of == "odd address":
        return torch.zeros(1 + batch * heads * tokens * channels, dtype=dtype)[1:].view(batch, heads, tokens, channels)
    width = channels + (1 if of == "odd strides" else 0)
    return torch.zeros(batch, heads, tokens, width, dtype=dtype)[..., :channels]


FAMILIES: dict[str, Callable[[], None]] = {
    "planes-b8": lambda: planes(8),
    "planes-b64": lambda: planes(64),
    "planar-bf16": lambda: planar(*[vectors()] * 2),
    "planar-bf16-angles": lambda: planar(*[vectors()] * 2, axes=0),
    "planar-bf16-halves": lambda: planar(*[vectors()] * 2, halves=True),
    "block-products-bf16-b8": lambda: block(*[vectors()] * 2, 8),
    "block-products-bf16-b64": lambda: block(*[vectors()] * 2, 64),
    "block-products-fp32-b64": lambda: block(*[vectors(torch.float32)] * 2, 64),
    "block-sums-fp32-b8": lambda: block(*[vectors(torch.float32, batch=2)] * 2, 8),
    "block-sums-fp32-b128": lambda: block(*[vectors(torch.float32, batch=2, channels=128)] * 2, 128),
    "basis-bf16-b8": lambda: basis(*[vectors()] * 2, 8),
    "basis-bf16-b64": lambda: basis(*[vectors()] * 2, 64),
    "basis-fp32-b64": lambda: basis(*[vectors(torch.float32)] * 2, 64),
    "skew-exp-b8": lambda: skew_exp(8),
    "skew-exp-b64": lambda: skew_exp(64),
}


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """Record what would be launched, instead of launching it."""
    seen: list[Launch] = []

    def record(kernel: Any, *args: Any, grid: Any, warmup: bool, **keywords: Any) -> None:
        seen.append(Launch(kernel, args, keywords))

    monkeypatch.setattr(triton.JITFunction, "run", record)
    return seen


ONE_TARGET = {"planes-b8": "sm_90", "planar-bf16": "gfx942", "block-products-bf16-b8": "sm_80"}
COMPILED = [
    pytest.param(name, target, marks=() if ONE_TARGET.get(name) == target else pytest.mark.slow)
    for name in FAMILIES
    for target in TARGETS
]


@pytest.mark.parametrize(("family", "target"), COMPILED)
def test_kernels_compile_and_fit_shared_memory(
    family: str, target: str, launches: list[Launch], monkeypatch: pytest.MonkeyPatch
) -> None:
    FAMILIES[family]()
    assert launches
    monkeypatch.undo()
    for launch in launches:
        binary = compiled(launch, target)
        code = "amdgcn" if target.startswith("gfx") else "ptx"
        assert binary.asm[code]
        assert not re.search("[tx]f32", binary.asm[code])  # TensorFloat-32, as NVIDIA and AMD name it
        assert "sin.approx" not in binary.asm[code]
        assert "cos.approx" not in binary.asm[code]
        assert binary.metadata.shared <= SHARED_MEMORY[target] * 1024, launch.name


def test_kernels_compiled_include_every_kernel(launches: list[Launch]) -> None:
    for launch_all in FAMILIES.values():
        launch_all()
    sources = Path(torchrope.ops.__file__).with_name("gpu").glob("*.py")
    written = {
        f"{source.stem}.{name}"
        for source in sources
        for name in re.findall(r"^def (\w+_kernel)\(", source.read_text(), re.MULTILINE)
    }
    assert {launch.name for launch in launches} == written


LAYOUTS = ["packed", "contiguous", "odd address", "odd strides"]
# Below, of each sample; from 17 on, of many that share a matrix.
BATCHES = {("few", 1): (1, 2, 16), ("many", 1): (17, 32, 33), ("few", 16): (1,), ("many", 16): (2, 32, 33)}


@pytest.mark.parametrize(("rows", "group"), BATCHES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("channels", [64, 72])
def test_verified_specialisation_has_one_binary(
    channels: int, dtype: torch.dtype, rows: str, group: int, launches: list[Launch]
) -> None:
    """What `verify` proves for few and many rows, split or not, is what every length, batch and layout runs."""
    b = channels // 8
    sizes = [(batch, tokens) for batch in BATCHES[rows, group] for tokens in (1, 2, 16, 33)]
    for n, ((batch, tokens), layout) in enumerate(itertools.product(sizes, LAYOUTS)):
        x = vectors(dtype, batch, tokens, channels, 2 * group, layout)
        k = x[: n % 3]  # absent in a third of the calls
        planar(x, k, False, group)
        planar(x, k, True, group, axes=0)
        block(x, k, b, group)
        if b % 2 == 0:
            basis(x, k, b, group)
        skew_exp(b, tokens=tokens, sets=1 + n)
    calls = len(launches) // (len(sizes) * len(LAYOUTS))
    variants: dict[str, set[str]] = {}
    for n, launch in enumerate(launches):
        _, signature, constants, attributes = specialised(launch, "sm_90")
        variants.setdefault(f"{n % calls}: {launch.name}", set()).add(str((signature, constants, attributes)))
    assert {call: len(binaries) for call, binaries in variants.items()} == dict.fromkeys(variants, 1)
    assert len(variants) == calls


def compiled(launch: Launch, target: str) -> Any:
    """Compile a launch for a target, specialised as Triton specialises it."""
    from triton.compiler import ASTSource

    options, *parts = specialised(launch, target)
    try:
        return triton.compile(ASTSource(launch.kernel, *parts), target=device(target), options=options.__dict__)
    except Exception as error:
        if "ld.lld not found" in str(error):
            pytest.skip(f"this Triton brings no linker for {target}")
        raise


def specialised(launch: Launch, target: str) -> tuple[Any, dict, dict, dict]:
    """Return what Triton derives from arguments: options, types, constants, attributes such as divisibility by 16."""
    from triton.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    backend = make_backend(device(target))
    bind = create_function_from_signature(launch.kernel.signature, launch.kernel.params, backend)
    bound, specialisation, options = bind(*launch.arguments, **launch.keywords)
    return launch.kernel._pack_args(backend, launch.keywords, bound, specialisation, options)


def device(target: str) -> Any:
    from triton.backends.compiler import GPUTarget

    return GPUTarget(*TARGETS[target])
