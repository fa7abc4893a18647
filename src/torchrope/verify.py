"""`python -m torchrope verify`: check every GPU kernel on this GPU against float64, time it, and record the right ones.

`torchrope.backend("auto")` uses a GPU kernel only if it is recorded.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchrope.encodings import ComRoPELD, Encoding, LieRE, MixedRoPE
from torchrope.files import write_whole
from torchrope.ops import record
from torchrope.ops.backends import backend
from torchrope.ops.skew_exp import skew_exp
from torchrope.rotating import apply, rotate

FACTOR, FLOOR_STEPS = 2.0, 8.0
"""A fast path may err `FACTOR` times what the reference errs in that dtype, and by `FLOOR_STEPS` of its steps."""
TRUNCATING = 4.0
"""The factor for exponentials of 64 rows: tensor cores truncate sums that other units round."""

Results = dict[str, Tensor]


class Step(NamedTuple):
    """A forward and a backward pass, to compare and to time.

    Attributes:
        forward: Computes results by name.
        leaves: Tensors that get a gradient, by name.
        upstream: Gradient of each result.
    """

    forward: Callable[[], Results]
    leaves: Results
    upstream: Sequence[Tensor]

    def run(self, forward: Callable[[], Results]) -> Results:
        """Run both passes, the forward pass by a function that computes the same; return results and gradients."""
        results = forward()
        gradients = torch.autograd.grad(tuple(results.values()), tuple(self.leaves.values()), self.upstream)
        return results | {f"gradient of {name}": x for name, x in zip(self.leaves, gradients, strict=True)}


class Case(NamedTuple):
    """One computation that a kernel must do right, values and gradients.

    Attributes:
        name: For messages.
        make: Makes the step for inputs of a dtype; float64 inputs give the truth.
        dtype: dtype of the inputs.
        factor: How often it may err what the reference errs.
    """

    name: str
    make: Callable[[torch.dtype], Step]
    dtype: torch.dtype = torch.float32
    factor: float = FACTOR

    def run(self, dtype: torch.dtype) -> Results:
        """Compute results and gradients from inputs of a dtype."""
        step = self.make(dtype)
        return step.run(step.forward)


class Kernel(NamedTuple):
    """Operators with the cases that prove them, and one to time, which is not compared.

    Attributes:
        operators: Names in the record.
        cases: Computations to compare.
        timed: Computation to time.
    """

    operators: tuple[str, ...]
    cases: tuple[Case, ...]
    timed: Case


def share_of_allowed_error(fast: Tensor, plain: Tensor, truth: Tensor, factor: float = FACTOR) -> tuple[str, float]:
    """Compare a result with the truth; return a line, and the error as a share of the allowed, NaN if shapes differ."""
    if fast.shape != truth.shape or fast.dtype != plain.dtype:
        line = f"{fast.dtype} {tuple(fast.shape)} instead of {plain.dtype} {tuple(truth.shape)}"
        return line, float("nan")
    error, reference_error = _largest(fast.double() - truth), _largest(plain.double() - truth)
    allowed = factor * reference_error + FLOOR_STEPS * torch.finfo(plain.dtype).eps * (_largest(truth) or 1.0)
    rule = f"{factor:g} times the reference's {reference_error:.3g} in {plain.dtype}"
    line = f"error {error:.3g} exceeds {allowed:.3g}, {rule}"
    return line, error / allowed


def _largest(x: Tensor) -> float:
    return x.abs().max().item() if x.numel() else 0.0


def verify(
    device: torch.device,
    path: Path,
    names: Sequence[str] | None = None,
    report: Callable[[str], None] = print,
) -> bool:
    """Verify kernels on a device and record the right ones, in the place of earlier entries for its architecture.

    Args:
        device: A GPU; in Triton's interpreter a CPU.
        path: The record.
        names: Operators to verify; all by default.
        report: Called with a line for each kernel.

    Returns:
        Whether all of these kernels are right.

    Raises:
        ValueError: the device has no GPU kernels, or an operator is unknown.
        OSError: the record cannot be written.
    """
    _require_triton(device)
    kernels = list(_kernels(device))
    known = [operator for kernel in kernels for operator in kernel.operators]
    if unknown := set(names or ()) - set(known):
        raise ValueError(f"kernels must be among {', '.join(known)}, got {', '.join(sorted(unknown))}")
    architecture = record.architecture(device)
    entries: list[record.Verified] = []
    compared: list[str] = []
    wrong = 0
    for kernel in kernels:
        if names is not None and not set(names) & set(kernel.operators):
            continue
        compared += kernel.operators
        worst, failures = 0.0, []
        for case in kernel.cases:
            for line, share in _judge(case):
                if share <= 1:
                    worst = max(worst, share)
                else:
                    failures.append(f"{case.name}: {line}")
        title = " and ".join(kernel.operators)
        if failures:
            wrong += 1
            report(f"{title}: WRONG, not recorded; {len(failures)} results differ, the first: {failures[0]}")
            continue
        gain = None if device.type == "cpu" else speedup(kernel.timed.make(kernel.timed.dtype))
        timed = "" if gain is None else f", {gain:.2f} times as fast as the compiled reference"
        report(f"{title}: right in {len(kernel.cases)} cases, {worst:.0%} of the allowed error{timed}")
        details = (architecture, record.triton_version(), record.source_digest(), worst, gain)
        entries += [record.Verified(operator, *details) for operator in kernel.operators]
    write_whole(path, record.merged(path, entries, compared, architecture))
    record.forget()
    report(f"recorded {len(entries)} kernels for {architecture} with Triton {record.triton_version()} in {path}")
    return not wrong


def _require_triton(device: torch.device) -> None:
    try:
        import triton
    except ImportError:
        raise ValueError("verify needs the package triton: pip install triton") from None
    if device.type not in ("cuda", "cpu"):
        raise ValueError(f"verify requires a GPU of NVIDIA or AMD, named cuda, got {device}")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("verify requires a GPU that PyTorch can use: torch.cuda.is_available() is False")
    if device.type == "cpu" and not triton.knobs.runtime.interpret:
        raise ValueError("verify requires a GPU; on a CPU set TRITON_INTERPRET=1 to run the kernels in the interpreter")


def _device(name: str) -> torch.device:
    try:
        return torch.device(name)
    except RuntimeError:
        raise ValueError(f"device must be a GPU, such as cuda or cuda:1, got {name!r}") from None


def _judge(case: Case) -> Iterator[tuple[str, float]]:
    """Describe every result of a case, with its error as a share of the allowed one."""
    with backend("reference"):
        truth, plain = case.run(torch.float64), case.run(case.dtype)
    try:
        with backend("triton"):
            fast = case.run(case.dtype)
    except Exception as error:  # a kernel that does not compile or launch is one of the results
        yield f"{type(error).__name__}: {' '.join(str(error).split())}", float("nan")
        return
    for name, expected in truth.items():
        line, share = share_of_allowed_error(fast[name], plain[name], expected, case.factor)
        yield f"{name}: {line}", share


DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _kernels(device: torch.device) -> Iterator[Kernel]:
    """Build the cases of all kernels; the interpreter, slow for large blocks, gets few tokens and small blocks."""
    tokens, large = (197, (16, 64)) if device.type == "cuda" else (5, ())

    def case(
        name: str,
        build: Callable[..., Encoding],
        dtype: torch.dtype = torch.float32,
        factor: float = FACTOR,
        **settings: Any,
    ) -> Case:
        return Case(name, partial(_rotation, device, tokens, build, **settings), dtype, factor)

    def dtypes(build: Callable[..., Encoding], **settings: Any) -> Iterator[Case]:
        return (case(f"{dtype}", build, dtype, **settings) for dtype in DTYPES)

    def shapes(build: Callable[..., Encoding]) -> Iterator[Case]:
        yield case("tokens before heads", build, layout="bthd")
        yield case("grouped heads", build, heads=(4, 2))
        yield case("positions per sample", build, sets=(2,))
        yield case("one sample of k", build, batches=(2, 1))
        yield case("more samples of k", build, batches=(2, 3))
        yield case("one tensor", build, alone=True)
        yield case("other positions of k", build, key_tokens=3)

    def many(build: Callable[..., Encoding]) -> Iterator[Case]:
        """Vectors of many samples, which share matrices."""
        return (case(f"many samples, {dtype}", build, dtype, batches=(32, 17)) for dtype in DTYPES)

    def factor_of(b: int) -> float:
        return TRUNCATING if b == 64 else FACTOR

    def layer(build: Callable[..., Encoding], **settings: Any) -> Case:
        """Return the rotation in a layer of a ViT-B at 224 pixels, with positions that need no gradient."""
        sizes: dict[str, Any] = dict(heads=(12, 12), batches=(32, 32), fixed=True)
        make = partial(_rotation, device, 197, partial(build, head_dim=64), **sizes, **settings)
        return Case("a layer", make, torch.bfloat16)

    mixed = partial(MixedRoPE, num_axes=2, head_dim=16)
    yield Kernel(
        ("rotate_planar",),
        (
            *dtypes(mixed),
            case("pairs in halves", mixed, halves=True),
            case("part of a head", partial(mixed, rotary_dim=12)),
            *shapes(mixed),
        ),
        layer(mixed),
    )
    commuting = partial(ComRoPELD, num_axes=2, head_dim=16, block_size=8)
    yield Kernel(
        ("skew_eig", "rotate_basis"),
        (
            *dtypes(commuting),
            *(case(f"blocks of {b}", partial(ComRoPELD, num_axes=2, head_dim=64, block_size=b)) for b in (4, *large)),
            *shapes(commuting),
            *many(commuting),
            *(x for b in large for x in many(partial(ComRoPELD, num_axes=2, head_dim=64, block_size=b))),
        ),
        layer(commuting),
    )
    lie = partial(LieRE, num_axes=2, head_dim=16, block_size=8)
    yield Kernel(
        ("exp_generators", "rotate_block"),
        (
            *dtypes(lie),
            *(
                case(f"blocks of {b}", partial(lie, head_dim=max(b, 12), block_size=b), factor=factor_of(b))
                for b in (3, 4, *large)
            ),
            *shapes(lie),
            *many(lie),
            *(x._replace(factor=factor_of(b)) for b in large for x in many(partial(lie, head_dim=b, block_size=b))),
        ),
        layer(lie),
    )
    yield Kernel(
        ("skew_exp",),
        tuple(
            Case(f"blocks of {b}", partial(_exponentials, device, b), factor=factor_of(b)) for b in (2, 3, 8, *large)
        ),
        Case("blocks of 64", partial(_exponentials, device, 64, norms=(1.0,) * 2364)),
    )


def _rotation(
    device: torch.device,
    tokens: int,
    build: Callable[..., Encoding],
    dtype: torch.dtype,
    *,
    heads: tuple[int, int] = (2, 2),
    batches: tuple[int, int] = (2, 2),
    sets: tuple[int, ...] = (),
    layout: str = "bhtd",
    halves: bool = False,
    alone: bool = False,
    key_tokens: int | None = None,
    fixed: bool = False,
) -> Step:
    """Make a step of `rotate`, or of `apply` if `alone`, from inputs drawn with a fixed seed."""
    random = torch.Generator().manual_seed(0)
    wide = torch.promote_types(dtype, torch.float32)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        encoding = build(num_heads=heads[1]).to(device, wide)

    def draw(*shape: int, dtype: torch.dtype = wide) -> Tensor:
        return torch.randn(shape, generator=random).to(device, dtype)

    lengths = tokens, key_tokens or tokens
    orders = [(n, h) if layout == "bthd" else (h, n) for n, h in zip(lengths, heads, strict=True)]
    shapes = [(batch, *order, encoding.head_dim) for batch, order in zip(batches, orders, strict=True)]
    q, k, *upstream = (draw(*shape, dtype=dtype) for shape in (*shapes, *shapes))
    positions, key_positions = (draw(*sets, length, 2) for length in lengths)

    def forward() -> Results:
        rotation = encoding(positions)
        rotation = rotation.in_halves() if halves else rotation
        if alone:
            return {"rotated q": apply(q, rotation, layout=layout)}
        key_rotation = encoding(key_positions) if key_tokens else None
        rotated = rotate(q, k, rotation, key_rotation=key_rotation, layout=layout)
        return dict(zip(("rotated q", "rotated k"), rotated, strict=True))

    leaves = {"q": q} if alone else {"q": q, "k": k}
    leaves |= {} if fixed else {"positions": positions}
    leaves |= {"key positions": key_positions} if key_tokens else {}
    leaves |= {f"encoding, {name}": x for name, x in encoding.named_parameters()}
    for x in leaves.values():
        x.requires_grad_()
    return Step(forward, leaves, upstream[:1] if alone else upstream)


def _exponentials(
    device: torch.device, b: int, dtype: torch.dtype, *, norms: Sequence[float] = (0.0, 1e-3, 0.3, 1.0, 3.0, 10.0)
) -> Step:
    """Make a step of exponentials of skew matrices of several norms."""
    random = torch.Generator().manual_seed(b)
    raw, upstream = torch.randn(2, len(norms), b, b, generator=random)
    raw = (raw * torch.tensor(norms)[:, None, None] / b**0.5).to(device, dtype).requires_grad_()
    return Step(lambda: {"exponential": skew_exp(raw - raw.mT)}, {"skew": raw}, [upstream.to(device, dtype)])


def speedup(step: Step, fast: str = "triton", repetitions: int = 33) -> float:
    """Time a backend and the compiled reference in turns; return the ratio of median times, without three warm-ups."""
    compiled = torch.compile(step.forward)
    times: dict[str, list[float]] = {"reference": [], fast: []}
    device = step.upstream[0].device
    for repetition in range(repetitions):
        for name, forward in (("reference", compiled), (fast, step.forward)):
            with backend(name):
                start = _now(device)
                step.run(forward)
                taken = _now(device) - start
            if repetition >= 3:
                times[name].append(taken)
    return median(times["reference"]) / median(times[fast])


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return perf_counter()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command: 0 if all kernels are right, 1 if one is wrong, 2 if the device has none."""
    parser = argparse.ArgumentParser(prog="python -m torchrope verify", description=__doc__)
    parser.add_argument("--device", default="cuda", help="the GPU, such as cuda:1 (default: %(default)s)")
    users = record.users()
    parser.add_argument(
        "--record", type=Path, default=users, required=users is None, help="file to write (default: %(default)s)"
    )
    parser.add_argument("--kernels", help="verify these alone, comma-separated (default: all)")
    options = parser.parse_args(arguments)
    names = None if options.kernels is None else options.kernels.split(",")
    try:
        return 0 if verify(_device(options.device), options.record, names) else 1
    except (ValueError, OSError) as error:
        print(f"torchrope verify: {error}", file=sys.stderr)
        return 2
