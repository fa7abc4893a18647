"""Verify and measure the Triton kernels on a CUDA or ROCm machine, within 25 minutes:

    python benchmarks/gpu.py lease OUT     # again until it says that all is done: each call takes at most 9 minutes
    python benchmarks/gpu.py render OUT    # writes benchmarks/results/gpu.json and the table of docs/speed.md

The pieces of a lease are files of OUT: parity of every kernel with float64, rows of a token split among programs and
all in one; `verify`, whose record is OUT/verified_kernels.json; the bandwidth of planar rotation over that of a copy,
and against torch.compile, Liger and flash-attention where they are installed; rotation by matrices; alternatives that
are undecided; a video of 30,000 tokens; training steps of ViT-S and ViT-B, and their memory. Kernels are replayed from
CUDA graphs, as small ones take less time than their launches from Python. Nothing is measured if a kernel is wrong.
With --dry-run, all runs in Triton's interpreter (TRITON_INTERPRET=1) on tiny shapes, and its times mean nothing.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional

import torchrope as tr
from torchrope.files import write_whole
from torchrope.models import SIZES
from torchrope.ops import record
from torchrope.ops.record import Specialisation
from torchrope.verify import verify

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
GIT = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
# Reading and writing q, k and their gradients, and nothing else, takes 2.6% of the step of a ViT-B on an H200.
OVERHEAD = {"axial": 1.035, "mixed": 1.04, "comrope-ap": 1.08, "comrope-ld": 1.08, "liere:8": 1.07, "liere:64": 1.25}
LAUNCHES = [(512, 1, 4, 1056), (1024, 2, 3, 2112), (1024, 4, 3, 1056), (2048, 4, 3, 1056)]
"""Tile, warps, stages and programs of the planar kernel."""


@dataclass(frozen=True)
class Setting:
    """What is measured: by default the attention of ViT-B/16 at 224 pixels with a class token."""

    device: str = "cuda"
    batch: int = 256
    heads: int = 12
    tokens: int = 197
    head_dim: int = 64
    video: int = 30_000
    rounds: int = 3
    encodings: tuple[str, ...] = tuple(OVERHEAD)

    @property
    def tiny(self) -> bool:
        return self.device == "cpu"


TINY = Setting("cpu", 2, 1, 3, 8, 5, 1, ("mixed", "liere:8"))


@dataclass(frozen=True)
class Row:
    """One measured number; of those with a target "x" and "share" are better when larger, "x time" when smaller."""

    name: str
    value: float
    unit: str
    target: float | None = None

    def __str__(self) -> str:
        verdict = ""
        if self.target is not None:
            reached = self.value <= self.target if self.unit == "x time" else self.value >= self.target
            verdict = f"{'reached' if reached else 'NOT reached'} ({self.target:g})"
        return f"{self.name:<78} {self.value:>9.3f} {self.unit:<7} {verdict}".rstrip()


def parity(name: str, marked: str, setting: Setting, out: Path) -> Iterator[Row]:
    """Run the tests of a file on this device."""
    tests, chosen = str(ROOT / "tests" / "ops" / name), ["-k", "test_planar and one-token"] if setting.tiny else []
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", marked, *chosen, tests]
    ran = subprocess.run(command, cwd=ROOT, check=False).returncode
    yield Row(f"{name}, {marked}", float(ran in ((0, 5) if setting.tiny else (0,))), "right", 1)


def verification(setting: Setting, out: Path) -> Iterator[Row]:
    """Write the record of the common specialisations."""
    shapes = [Specialisation("rotate_planar", "float32", 4, 2, 2, 1)] if setting.tiny else None
    path = out / "verified_kernels.json"
    right = verify(torch.device(setting.device), path, shapes)
    yield Row(f"{len(record.read(path))} specialisations recorded, none wrong", float(right), "right", 1)


def timed(step: Callable[[], object], replayed: bool = True) -> float:
    """Milliseconds of a step, in a CUDA graph without its launches from Python; else with them, from a cold cache."""
    if torch.cuda.is_available():
        from triton.testing import do_bench, do_bench_cudagraph

        return do_bench_cudagraph(step, rep=20) if replayed else do_bench(step, 100, 400, return_mode="median")
    start = time.perf_counter()
    step()
    return (time.perf_counter() - start) * 1e3


@dataclass(frozen=True)
class Planar:
    """Rotation of packed q and k, forward and backward with the gradient of the frequencies."""

    setting: Setting
    dtype: torch.dtype = torch.bfloat16
    halves: bool = False
    shared: bool = False
    sets: int = 1

    @property
    def name(self) -> str:
        pairs, heads = "halves" if self.halves else "neighbours", "shared" if self.shared else "each head's"
        positions = "" if self.sets == 1 else ", positions of each sample"
        return f"{str(self.dtype).removeprefix('torch.')}, {pairs}, {heads} frequencies{positions}"

    def vectors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return q, k and their upstream gradients."""
        of, options = self.setting, dict(device=self.setting.device, dtype=self.dtype)
        q, k, _ = torch.randn(of.batch, of.tokens, 3, of.heads, of.head_dim, **options).permute(2, 0, 3, 1, 4)
        return q, k, torch.randn(q.shape, **options), torch.randn(k.shape, **options)

    def angles(self) -> tuple[Tensor, Tensor]:
        """Return positions and frequencies."""
        heads, device = 1 if self.shared else self.setting.heads, self.setting.device
        positions = torch.rand(self.sets, self.setting.tokens, 2, device=device) * 14
        return positions, torch.randn(2, heads, self.setting.head_dim // 2, device=device)

    def steps(self, *vectors: Tensor) -> tuple[Callable[[], object], Callable[[], object]]:
        """Return rotation of q and k, and its backward pass with the gradient of the frequencies."""
        from torchrope.ops import gpu

        q, k, *grads = vectors or self.vectors()
        angles = *self.angles(), None, not self.halves
        return (
            lambda: gpu.rotate_planar(q, k, *angles),
            lambda: gpu.rotate_planar_backward(*grads, q, k, *angles, (False, True)),
        )


def bandwidth(setting: Setting, out: Path) -> Iterator[Row]:
    """Planar rotation over a copy, and against others."""
    kinds = [Planar(setting), Planar(setting, halves=True), Planar(setting, shared=True)]
    kinds += [Planar(setting, torch.float32), Planar(setting, sets=setting.batch)]
    kinds += [Planar(replace(setting, batch=min(batch, setting.batch))) for batch in (8, 1)]
    for kind in kinds:
        yield from over_copy(kind, f"{kind.name}, batch {kind.setting.batch}", 0.85 if kind in kinds[:4] else None)
    for kind in kinds[:2]:
        vectors, (forward, backward) = kind.vectors(), kind.steps()
        ours = timed(forward) + timed(backward)
        compiled = ("torch.compile with frequencies", compiled_step(kind, *vectors))
        for name, step in (compiled, *others(kind, *vectors)):
            yield Row(f"{kind.name}, with their gradient: against {name}", timed(step) / ours, "x", 1.0)


def over_copy(kind: Planar, name: str, target: float | None) -> Iterator[Row]:
    vectors = kind.vectors()
    source = torch.empty(2, *vectors[0].shape, device=kind.setting.device, dtype=kind.dtype).normal_()
    copy = 2 * source.nbytes / timed(partial(torch.empty_like(source).copy_, source)) / 1e6
    forward, backward = (timed(step) for step in kind.steps(*vectors))
    yield Row(f"{name}: copy", copy, "GB/s")
    yield Row(f"{name}: rotate / copy", 2 * source.nbytes / forward / 1e6 / copy, "share", target)
    yield Row(f"{name}: backward / copy", 3 * source.nbytes / backward / 1e6 / copy, "share", target)


def compiled_step(kind: Planar, q: Tensor, k: Tensor, *grads: Tensor) -> Callable[[], object]:
    """Return a step of the rotation in plain PyTorch under torch.compile."""
    positions, frequencies = kind.angles()
    inputs = [x.detach().requires_grad_() for x in (q, k, frequencies)]

    def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        first, second = x.float().chunk(2, -1) if kind.halves else x.float().unflatten(-1, (-1, 2)).unbind(-1)
        pair = cos * first - sin * second, sin * first + cos * second
        return (torch.cat(pair, -1) if kind.halves else torch.stack(pair, -1).flatten(-2)).to(x.dtype)

    def turn(q: Tensor, k: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
        angles = torch.einsum("bta,ahp->bhtp", positions, frequencies)
        cos, sin = angles.cos(), angles.sin()
        return turned(q, cos, sin), turned(k, cos, sin)

    compiler = "eager" if kind.setting.tiny else "inductor"
    compiled = torch.compile(turn, fullgraph=True, dynamic=False, backend=compiler)
    return lambda: torch.autograd.grad(compiled(*inputs), inputs, grads)


def others(kind: Planar, q: Tensor, k: Tensor, *grads: Tensor) -> Iterator[tuple[str, Callable[[], object]]]:
    """Forward and backward of others' kernels where they are installed: they have no gradient of frequencies."""
    angles = torch.randn(1, kind.setting.tokens, kind.setting.head_dim, device=q.device)
    cos, sin = angles.cos().to(q.dtype), angles.sin().to(q.dtype)
    halved = [x[0, :, : kind.setting.head_dim // 2].contiguous() for x in (cos, sin)]
    tokens_first = [x.transpose(1, 2).contiguous() for x in (q, k, *grads)]
    with suppress(ImportError):
        from flash_attn.ops.triton.rotary import apply_rotary

        def turn(x: Tensor, back: bool) -> None:
            apply_rotary(x, *halved, interleaved=not kind.halves, conjugate=back)

        yield "flash-attention", lambda: [turn(x, back=n > 1) for n, x in enumerate(tokens_first)]
    with suppress(ImportError):
        from liger_kernel.ops.rope import rope_backward, rope_forward

        q, k, *grads = (x.transpose(1, 2) for x in tokens_first)
        if kind.halves:  # the only layout that it has; it writes in place
            yield "Liger", lambda: (rope_forward(q, k, cos, sin), rope_backward(*grads, cos, sin))


def matrix_steps(setting: Setting, b: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, Callable[[], object]]:
    """Return rotation by tables and in a learned basis, with what computes these, forward and backward, of a layer."""
    from torchrope.ops import gpu

    q, k, *grads = Planar(setting, dtype).vectors()
    heads, device, blocks = setting.heads, setting.device, setting.head_dim // b
    positions = torch.rand(setting.tokens, 2, device=device) * 14
    square = torch.randn(2, heads, blocks, b, b, device=device) * 0.3
    generators, factors = square - square.mT, torch.randn(2, heads, blocks, device=device)
    tangent = torch.randn(heads, setting.tokens, blocks, b * (b - 1) // 2, device=device)
    table, planes = gpu.exp_generators(positions, generators), gpu.skew_eig(generators[0])
    in_basis = positions, factors, generators[0], *planes, False
    back_in_basis = positions, factors, *planes, False, (False, True, True)
    return {
        "exp_generators": partial(gpu.exp_generators, positions, generators),
        "exp_generators backward": partial(gpu.exp_generators_backward, positions, generators, tangent, False),
        "rotate_block": partial(gpu.rotate_block, q, k, table, table.new_empty(0)),
        "rotate_block backward": partial(gpu.rotate_block_backward, *grads, q, k, table, True),
        "skew_eig": partial(gpu.skew_eig, generators[0]),
        "rotate_basis": partial(gpu.rotate_basis, q, k, *in_basis),
        "rotate_basis backward": partial(gpu.rotate_basis_backward, *grads, q, k, *back_in_basis),
    }


def matrices(setting: Setting, out: Path) -> Iterator[Row]:
    for b in (8,) if setting.tiny else (8, 64):
        times = {name: timed(step) for name, step in matrix_steps(setting, b).items()}
        yield from (Row(f"{name} b={b}, bfloat16", taken, "ms") for name, taken in times.items())
        by_table = sum(taken for name, taken in times.items() if name.startswith(("exp_", "rotate_block")))
        yield Row(f"ComRoPE b={b} by tables / in its basis", by_table / (sum(times.values()) - by_table), "x time")


def choices(setting: Setting, out: Path) -> Iterator[Row]:
    """Alternatives to what is in use, as time over it: below 1 the alternative is faster."""
    from torchrope.ops.gpu import basis, block, launch, planar

    kinds = [Planar(setting, halves=halves) for halves in (False, True)]
    steps = [step for kind in kinds for step in kind.steps()]
    used = sum(map(timed, steps))
    for tile, warps, stages, programs in LAUNCHES[:1] if setting.tiny else LAUNCHES:
        with patch.multiple(planar, TILE=tile, WARPS=warps, STAGES=stages, PROGRAMS=programs):
            name = f"planar: tile {tile}, {warps} warps, {stages} stages, {programs} programs"
            yield Row(name, sum(map(timed, steps)) / used, "x time")
    of_float32 = matrix_steps(setting, 8, torch.float32)
    for name in ("rotate_block", "rotate_block backward"):
        used = timed(of_float32[name])
        with patch.multiple(block, MANY=sys.maxsize):
            yield Row(f"{name} b=8, float32: sums for products", timed(of_float32[name]) / used, "x time")
    if not setting.tiny:
        step = matrix_steps(setting, 64)["rotate_basis backward"]
        used = timed(step)
        with patch.multiple(basis, splits_of=partial(launch.splits_of, most=132)):
            yield Row("rotate_basis backward b=64: 11 splits", timed(step) / used, "x time")


def video(setting: Setting, out: Path) -> Iterator[Row]:
    """A batch of 2 videos, and positions of each."""
    longer = replace(setting, batch=2, tokens=setting.video)
    for kind in (Planar(longer), Planar(longer, shared=True), Planar(longer, sets=2)):
        yield from over_copy(kind, f"video, {kind.name}", None)
    by_matrices = matrix_steps(longer, 8)
    for name in ("exp_generators", "rotate_block", "rotate_basis"):
        yield Row(f"video, {name} b=8", timed(by_matrices[name]), "ms")


def training(model: str, setting: Setting, out: Path) -> Iterator[Row]:
    """Measure interleaved training steps in bfloat16 with each encoding, relative to none, and their peak memory."""
    kinds = [("none", "reference"), *((name, used) for name in setting.encodings for used in ("triton", "reference"))]
    times: dict[tuple[str, str], list[float]] = {kind: [] for kind in kinds}
    peaks: dict[tuple[str, str], float] = {}
    for _ in range(setting.rounds):
        for name, kernels in kinds:
            if not setting.tiny:
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            with tr.backend(kernels):
                times[name, kernels].append(timed(training_step(model, name, setting), replayed=False))
            peaks[name, kernels] = 0.0 if setting.tiny else torch.cuda.max_memory_allocated() / 1e6
    step_of, none = f"training step of ViT-{model[0].upper()}/16", times.pop(kinds[0])
    yield Row(f"{step_of}, batch {setting.batch}, bfloat16, no encoding", statistics.median(none), "ms")
    for (name, kernels), own in times.items():
        title = f"{step_of} with {name}" + (" in plain PyTorch" if kernels == "reference" else "")
        target = OVERHEAD[name] if kernels == "triton" and model == "base" else None
        over = statistics.median(x / y for x, y in zip(own, none, strict=True))
        yield Row(f"{title} over none", over, "x time", target)
        yield Row(f"memory of a {title} beyond none", peaks[name, kernels] - peaks[kinds[0]], "MB")


def training_step(model: str, encoding: str, setting: Setting) -> Callable[[], object]:
    torch.manual_seed(0)
    pixels = 32 if setting.tiny else 224
    sizes = dict(dim=16, depth=1, num_heads=1, mlp_dim=16) if setting.tiny else SIZES[model]
    vit = tr.ViT((pixels, pixels), patch_size=16, encoding=encoding, **sizes).to(setting.device)
    optimizer = torch.optim.AdamW(vit.parameters(), fused=True)
    images = torch.randn(setting.batch, 3, pixels, pixels, device=setting.device)
    labels = torch.randint(1000, (setting.batch,), device=setting.device)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(setting.device, dtype=torch.bfloat16):
            loss = functional.cross_entropy(vit(images), labels)
        loss.backward()
        optimizer.step()

    return step


Piece = Callable[[Setting, Path], Iterator[Row]]
PIECES: dict[str, tuple[float, Piece]] = {
    "parity": (5, partial(parity, "gpu_kernels.py", "not slow")),
    "parity of large blocks": (5, partial(parity, "gpu_kernels.py", "slow")),
    "verify": (3, verification),
    "on a GPU": (3, partial(parity, "test_on_gpu.py", "gpu")),
    "bandwidth": (2, bandwidth),
    "choices": (2, choices),
    "matrices": (1, matrices),
    "video": (1, video),
    "base": (4, partial(training, "base")),
    "small": (3, partial(training, "small")),
}
"""Each with the minutes that it may need: none starts that would end after the ninth of a call."""


def lease(out: Path, setting: Setting, commit: str, minutes: float = 9) -> int:
    """Run the pieces that have no file; return 0 if all are done, 1 if a kernel is wrong, 2 if one failed, 3 if not."""
    out.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    for name, (needed, piece) in PIECES.items():
        path = out / f"{name}.json"
        if path.exists():
            continue
        if (time.perf_counter() - start) / 60 + needed > minutes:
            print(f"{name} and what follows remain: run the same command again")
            return 3
        rows, began, error = [], time.perf_counter(), None
        write_whole(path, json.dumps({"rows": [], "error": "did not end"}))  # a piece that hangs is not tried again
        try:
            for row in piece(setting, out):
                print(row, flush=True)
                rows.append(asdict(row))
        except Exception as failed:  # the other pieces are measured all the same
            error = f"{type(failed).__name__}: {' '.join(str(failed).split())}"
        if any(row["unit"] == "right" and not row["value"] for row in rows):
            path.unlink()
            print(f"{name}: a kernel is wrong, no numbers")
            return 1
        seconds = round(time.perf_counter() - began, 1)
        write_whole(path, json.dumps({"seconds": seconds, "rows": rows, "error": error}, indent=2) + "\n")
    measured = report(out, setting, commit)
    write_whole(out / "gpu.json", json.dumps(measured, indent=2) + "\n")
    every = [Row(**row) for row in measured["rows"]]
    targets, choice = [x for x in every if x.target is not None], [x for x in every if x.unit == "x time"][:12]
    print(*targets, *choice, *(f"{name}: {error}" for name, error in measured["errors"].items()), sep="\n")
    print(f"all is done, {len(every)} rows in {out / 'gpu.json'}, the record in {out / 'verified_kernels.json'}")
    return 2 if measured["errors"] else 0


def report(out: Path, setting: Setting, commit: str) -> dict[str, Any]:
    """Join the pieces with the machine, the versions and the commit."""
    pieces = {name: json.loads((out / f"{name}.json").read_text(encoding="utf-8")) for name in PIECES}
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": commit,
        "kernels": {kernel: record.digest(kernel) for kernel in record.MODULES},
        "machine": {"device": "interpreter" if setting.tiny else torch.cuda.get_device_name()},
        "versions": {name: version(name) for name in ("torch", "triton")},
        "settings": asdict(setting),
        "errors": {name: piece["error"] for name, piece in pieces.items() if piece["error"]},
        "rows": [row for piece in pieces.values() for row in piece["rows"]],
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["lease", "render"])
    parser.add_argument("out", type=Path)
    parser.add_argument("--dry-run", action="store_true", help="run all with tiny shapes in Triton's interpreter")
    parser.add_argument("--commit", help="what is measured, in a copy without .git (default: git's HEAD)")
    chosen = parser.parse_args(arguments)
    if chosen.command == "render":
        from render import render_gpu

        write_whole(RESULTS / "gpu.json", (chosen.out / "gpu.json").read_text(encoding="utf-8"))
        render_gpu(RESULTS / "gpu.json", ROOT / "docs")
        return 0
    if not (chosen.dry_run or torch.cuda.is_available()):
        print("benchmarks/gpu.py needs a CUDA or ROCm device, got none; try TRITON_INTERPRET=1 and --dry-run")
        return 1
    head = subprocess.run(GIT, cwd=ROOT, capture_output=True, text=True, check=False).stdout
    return lease(chosen.out, TINY if chosen.dry_run else Setting(), chosen.commit or head.strip())


if __name__ == "__main__":
    sys.exit(main())
