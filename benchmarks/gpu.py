"""Measure the Triton kernels on a CUDA or ROCm machine:  python benchmarks/gpu.py

Every kernel is first compared with float64; nothing is measured if one fails. Then other launches of the planar kernel
are compared with the one in use, and rows are measured, each with what it must reach: planar rotation, of neighbouring
pairs and of halves, with frequencies of each head and shared ones, as a share of the bandwidth of a copy, against
torch.compile of the same in plain PyTorch and against flash-attention's rotary, replayed from CUDA graphs, as small
kernels take less time than their launches from Python; rotation by matrices; skew_exp against torch.matrix_exp; and a
training step of ViT-B/16 with each encoding over none. Writes JSON with machine, versions and commit.
"""

import argparse
import json
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

ROOT = Path(__file__).resolve().parents[1]
# ViT-B/16 at 224 x 224 with a class token.
BATCH, HEADS, TOKENS, HEAD_DIM = 256, 12, 197, 64
# Reading and writing q, k and their gradients, and nothing else, takes 2.6% of the step on an H200.
OVERHEAD = {"axial": 1.035, "mixed": 1.04, "comrope-ap": 1.08, "comrope-ld": 1.08, "liere:8": 1.07, "liere:64": 1.25}
LAUNCHES = [  # tile, warps, stages, programs
    (512, 1, 4, 1056),
    (1024, 2, 3, 1056),
    (1024, 2, 3, 2112),
    (1024, 4, 3, 1056),
    (2048, 8, 4, 1056),
]


@dataclass(frozen=True)
class Row:
    """One measured number.

    Attributes:
        name: Name of the measurement.
        value: The number, in `unit`.
        unit: "x" and "share" are better when larger, "x time" when smaller, "ms" is for the record.
        target: Required value, or None.
    """

    name: str
    value: float
    unit: str
    target: float | None = None

    @property
    def verdict(self) -> str:
        if self.target is None:
            return ""
        reached = self.value <= self.target if self.unit == "x time" else self.value >= self.target
        return f"{'reached' if reached else 'NOT reached'} ({self.target:g})"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "gpu.json")
    parser.add_argument("--batch", type=int, default=BATCH, help="images of a training step")
    parser.add_argument("--rounds", type=int, default=3, help="times that each training step is measured, in turn")
    parser.add_argument("--compile", action="store_true", help="torch.compile the model of the training step")
    parser.add_argument("--skip-training", action="store_true", help="measure only the kernels")
    parser.add_argument("--commit", help="what is measured, in a copy without .git (default: git's HEAD)")
    chosen = parser.parse_args()
    if not torch.cuda.is_available():
        print("benchmarks/gpu.py needs a CUDA or ROCm device, got none")
        return 1
    measured = chosen.commit or commit()
    if not parity_holds():
        print("a kernel disagrees with float64: no numbers")
        return 1
    settings = {"launches": launches(), "batch": chosen.batch, "rounds": chosen.rounds, "compile": chosen.compile}
    rows: list[Row] = []
    steps = [] if chosen.skip_training else [partial(training_rows, chosen.batch, chosen.rounds, chosen.compile)]
    for measure in (planar_rows, matrix_rows, skew_exp_rows, *steps):
        rows += (new := measure())
        for row in new:
            print(f"{row.name:<70} {row.value:>10.3f} {row.unit:<7} {row.verdict}", flush=True)
        write(chosen.out, rows, settings, measured)
    return 0


def parity_holds() -> bool:
    """Run the tests of all kernels on this device."""
    tests = ROOT / "tests" / "ops" / "gpu_kernels.py"
    return subprocess.run([sys.executable, "-m", "pytest", "-q", str(tests)], cwd=ROOT, check=False).returncode == 0


def milliseconds(step: Callable[[], object]) -> float:
    """Median time of a step, with the cache flushed in between."""
    from triton.testing import do_bench

    return do_bench(step, warmup=100, rep=500, return_mode="median")


def replayed(step: Callable[[], object]) -> float:
    """Mean time in milliseconds of a step in a CUDA graph, without its launch from Python."""
    from triton.testing import do_bench_cudagraph

    return do_bench_cudagraph(step, rep=20)


def gigabytes_per_second(moved: int, step: Callable[[], object]) -> float:
    return moved / replayed(step) / 1e6


def size(*tensors: Tensor) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)


@dataclass(frozen=True)
class Planar:
    """Rotation of packed q and k, forward and backward with the gradient of the frequencies."""

    dtype: torch.dtype
    halves: bool = False
    shared: bool = False

    @property
    def name(self) -> str:
        pairs, heads = "halves" if self.halves else "neighbours", "shared" if self.shared else "each head's"
        return f"{str(self.dtype).removeprefix('torch.')}, {pairs}, {heads} frequencies"

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return q, k and their upstream gradients."""
        packed = torch.randn(BATCH, TOKENS, 3, HEADS, HEAD_DIM, device="cuda", dtype=self.dtype)
        q, k, _ = packed.permute(2, 0, 3, 1, 4)
        return q, k, torch.randn(q.shape, **_like(q)), torch.randn(k.shape, **_like(k))

    def angles(self) -> tuple[Tensor, Tensor]:
        """Return positions and frequencies."""
        heads = 1 if self.shared else HEADS
        return torch.rand(1, TOKENS, 2, device="cuda") * 14, torch.randn(2, heads, HEAD_DIM // 2, device="cuda")


def _like(x: Tensor) -> dict[str, Any]:
    return dict(device=x.device, dtype=x.dtype)


def launches() -> list[dict[str, Any]]:
    """Measure the planar kernel, forward and backward, in milliseconds, with other constants than those in use."""
    from torchrope.ops.gpu import planar

    names = "TILE", "WARPS", "STAGES", "PROGRAMS"
    used = tuple(getattr(planar, name) for name in names)
    found = []
    try:
        for launch in dict.fromkeys((used, *LAUNCHES)):
            for name, value in zip(names, launch, strict=True):
                setattr(planar, name, value)
            times = [[replayed(step) for step in steps_of(Planar(torch.bfloat16, halves))] for halves in (False, True)]
            found.append(dict(zip(names, launch, strict=True)) | {"neighbours": times[0], "halves": times[1]})
            print(f"launch {launch}: {sum(map(sum, times)):.3f} ms", flush=True)
    finally:
        for name, value in zip(names, used, strict=True):
            setattr(planar, name, value)
    return found


def steps_of(kind: Planar) -> tuple[Callable[[], object], Callable[[], object]]:
    """Return rotation of q and k, and its backward pass with the gradient of the frequencies."""
    from torchrope.ops import gpu

    q, k, *grads = kind.tensors()
    angles = *kind.angles(), None, not kind.halves
    return (
        lambda: gpu.rotate_planar(q, k, *angles),
        lambda: gpu.rotate_planar_backward(*grads, q, k, *angles, (False, True)),
    )


def planar_rows() -> list[Row]:
    """Every kind of planar rotation."""
    kinds = [Planar(torch.bfloat16), Planar(torch.bfloat16, halves=True), Planar(torch.bfloat16, shared=True)]
    return [row for kind in (*kinds, Planar(torch.float32)) for row in rows_of(kind)]


def rows_of(kind: Planar) -> list[Row]:
    q, k, *grads = kind.tensors()
    positions, frequencies = kind.angles()
    source = torch.randn(2, *q.shape, **_like(q))
    copy = gigabytes_per_second(2 * size(source), partial(torch.empty_like(source).copy_, source))
    forward, backward = steps_of(kind)
    ours = replayed(lambda: (forward(), backward()))
    rows = [
        Row(f"{kind.name}: copy, GB/s", copy, "GB/s"),
        Row(f"{kind.name}: rotate over copy", gigabytes_per_second(2 * size(q, k), forward) / copy, "share", 0.9),
        Row(
            f"{kind.name}: backward with frequencies over copy",
            gigabytes_per_second(3 * size(q, k), backward) / copy,
            "share",
            0.9,
        ),
        Row(
            f"{kind.name}: rotate + backward against torch.compile",
            replayed(compiled_step(kind, q, k, grads, positions, frequencies)) / ours,
            "x",
            1.0,
        ),
    ]
    theirs = None if kind.halves else flash_attention_rotary(q, k, grads)
    if theirs is not None:
        against = f"{kind.name}: rotate + backward with frequencies against flash-attention's rotary"
        rows.append(Row(against, replayed(theirs) / ours, "x", 1.0))
    return rows


def compiled_step(
    kind: Planar, q: Tensor, k: Tensor, grads: list[Tensor], positions: Tensor, frequencies: Tensor
) -> Callable[[], object]:
    """Return a step of the rotation in plain PyTorch under torch.compile."""
    inputs = [x.detach().requires_grad_() for x in (q, k, frequencies)]

    def turn(q: Tensor, k: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
        angles = torch.einsum("bta,ahp->bhtp", positions, frequencies)
        cos, sin = angles.cos(), angles.sin()
        return _turned(q, cos, sin, kind.halves), _turned(k, cos, sin, kind.halves)

    compiled = torch.compile(turn, fullgraph=True, dynamic=False)
    return lambda: torch.autograd.grad(compiled(*inputs), inputs, grads)


def _turned(x: Tensor, cos: Tensor, sin: Tensor, halves: bool) -> Tensor:
    first, second = x.float().chunk(2, -1) if halves else x.float().unflatten(-1, (-1, 2)).unbind(-1)
    turned = cos * first - sin * second, sin * first + cos * second
    return (torch.cat(turned, -1) if halves else torch.stack(turned, -1).flatten(-2)).to(x.dtype)


def flash_attention_rotary(q: Tensor, k: Tensor, grads: tuple[Tensor, Tensor]) -> Callable[[], object] | None:
    """Forward and backward of flash-attention's kernel on the same tensors, where it is installed."""
    try:
        from flash_attn.ops.triton.rotary import apply_rotary
    except ImportError:
        return None
    angles = torch.randn(TOKENS, HEAD_DIM // 2, device="cuda")
    cos, sin = angles.cos().to(q.dtype), angles.sin().to(q.dtype)

    def step() -> None:
        for x in (q, k):
            apply_rotary(x.transpose(1, 2), cos, sin, interleaved=True)
        for grad in grads:
            apply_rotary(grad.transpose(1, 2), cos, sin, interleaved=True, conjugate=True)

    return step


def matrix_rows() -> list[Row]:
    """Rotation by tables of matrices and in a learned basis, with what computes these, forward and backward."""
    from torchrope.ops import gpu

    kind, rows = Planar(torch.bfloat16), []
    q, k, *grads = kind.tensors()
    positions = torch.rand(TOKENS, 2, device="cuda") * 14
    for b in (8, 64):
        blocks = HEAD_DIM // b
        square = torch.randn(2, HEADS, blocks, b, b, device="cuda") * 0.3
        generators, factors = square - square.mT, torch.randn(2, HEADS, blocks, device="cuda")
        tangent = torch.randn(HEADS, TOKENS, blocks, b * (b - 1) // 2, device="cuda")
        table = gpu.exp_generators(positions, generators)
        planes = gpu.skew_eig(generators[0])
        in_basis = positions, factors, generators[0], *planes, False
        back_in_basis = positions, factors, *planes, False, (False, True, True)
        steps = {
            "exp_generators": partial(gpu.exp_generators, positions, generators),
            "exp_generators backward": partial(gpu.exp_generators_backward, positions, generators, tangent, False),
            "rotate_block": partial(gpu.rotate_block, q, k, table, table.new_empty(0)),
            "rotate_block backward": partial(gpu.rotate_block_backward, *grads, q, k, table, True),
            "skew_eig": partial(gpu.skew_eig, generators[0]),
            "rotate_basis": partial(gpu.rotate_basis, q, k, *in_basis),
            "rotate_basis backward": partial(gpu.rotate_basis_backward, *grads, q, k, *back_in_basis),
        }
        rows += [Row(f"{name} b={b}, bfloat16", replayed(step), "ms") for name, step in steps.items()]
    return rows


def skew_exp_rows() -> list[Row]:
    """Forward and backward of the exponentials of one layer: a matrix for each token, head and block."""
    from torchrope.ops import gpu

    rows = []
    for b in (4, 8, 16, 32, 64):
        matrices = TOKENS * HEADS * HEAD_DIM // b
        square = torch.randn(matrices, b, b, device="cuda")
        exponents = square - square.mT
        tangent = torch.randn(matrices, b * (b - 1) // 2, device="cuda")
        cotangent = torch.randn(matrices, b, b, device="cuda")
        batch = exponents.clone().requires_grad_()

        def ours(g: Tensor = exponents, t: Tensor = tangent) -> None:
            gpu.skew_exp(g)
            gpu.skew_exp_backward(g, t)

        def theirs(g: Tensor = batch, c: Tensor = cotangent) -> None:
            torch.autograd.grad(torch.linalg.matrix_exp(g), g, c)

        mine = milliseconds(ours)
        rows += [
            Row(f"skew_exp b={b}, {matrices} matrices, forward + backward", mine, "ms"),
            Row(f"skew_exp b={b} against torch.matrix_exp", milliseconds(theirs) / mine, "x", 10.0),
        ]
    return rows


def training_rows(batch: int, rounds: int, compiled: bool) -> list[Row]:
    """Measure interleaved training steps of ViT-B/16 in bfloat16 with each encoding, relative to none."""
    import torchrope

    kinds = [("none", "reference"), *((name, kernels) for name in OVERHEAD for kernels in ("triton", "reference"))]
    seconds: dict[tuple[str, str], list[float]] = {kind: [] for kind in kinds}
    for _ in range(rounds):
        for (name, kernels), times in seconds.items():
            with torchrope.backend(kernels):
                times.append(milliseconds(training_step(name, batch, compiled)))
            torch.cuda.empty_cache()
    none = seconds.pop(("none", "reference"))
    rows = [Row(f"training step of ViT-B/16, batch {batch}, bfloat16, no encoding", statistics.median(none), "ms")]
    for (name, kernels), times in seconds.items():
        over = statistics.median(own / base for own, base in zip(times, none, strict=True))
        fast = kernels == "triton"
        title = f"training step with {name}{'' if fast else ' in plain PyTorch'} over none"
        rows.append(Row(title, over, "x time", OVERHEAD[name] if fast else None))
    return rows


def training_step(encoding: str, batch: int, compiled: bool) -> Callable[[], object]:
    import torchrope
    from torchrope.models import SIZES

    torch.manual_seed(0)
    model = torchrope.ViT((224, 224), patch_size=16, encoding=encoding, **SIZES["base"]).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    images = torch.randn(batch, 3, 224, 224, device="cuda")
    labels = torch.randint(1000, (batch,), device="cuda")
    if compiled:
        torch._dynamo.reset()  # else the ninth model runs without compilation
    run = torch.compile(model) if compiled else model

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = functional.cross_entropy(run(images), labels)
        loss.backward()
        optimizer.step()

    return step


def commit() -> str:
    """Return git's HEAD, with "+changes" if files differ from it."""
    head, changes = (
        subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
        for words in (["rev-parse", "HEAD"], ["status", "--porcelain"])
    )
    return head + ("+changes" if changes else "")


def write(path: Path, rows: list[Row], settings: dict[str, object], commit: str) -> None:
    import triton

    from torchrope.files import write_whole
    from torchrope.ops import record

    device = torch.cuda.get_device_properties(0)
    report = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": commit,
        "kernels": {
            "source": {kernel: record.digest(kernel) for kernel in record.MODULES},
            "used by default": sorted(x.specialisation for x in record.read(record.COMMITTED) if record.is_current(x)),
        },
        "machine": {
            "device": device.name,
            "memory_bytes": device.total_memory,
            "multiprocessors": device.multi_processor_count,
            "host": platform.machine(),
        },
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "triton": triton.__version__,
            "cuda": torch.version.cuda or torch.version.hip,
        },
        "settings": settings,
        "rows": [asdict(row) for row in rows],
    }
    write_whole(path, json.dumps(report, indent=2) + "\n")
    print(f"written to {path}")


if __name__ == "__main__":
    sys.exit(main())
