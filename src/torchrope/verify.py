"""`python -m torchrope verify`: check every GPU kernel on this GPU against float64, time it, and record the right ones.

`torchrope.backend("auto")` uses a GPU kernel only if it is recorded.
"""

import argparse
import copy
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchrope.encodings import ComRoPELD, Encoding, LieRE, MixedRoPE
from torchrope.files import write_whole
from torchrope.ops import record
from torchrope.ops.backends import backend
from torchrope.ops.skew_exp import skew_exp
from torchrope.rotating import rotate, rotate_one

FACTOR, FLOOR_STEPS = 2.0, 8.0
"""A fast path may err `FACTOR` times what the reference errs in that dtype, and by `FLOOR_STEPS` of its steps."""

Results = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """One computation that a kernel must do right, values and gradients.

    Attributes:
        name: For messages.
        run: Computes results by name from inputs of a dtype; float64 inputs give the truth.
        dtype: dtype of the inputs.
    """

    name: str
    run: Callable[[torch.dtype], Results]
    dtype: torch.dtype


@dataclass(frozen=True)
class Kernel:
    """An operator with the cases that prove it and one that times it.

    Attributes:
        operators: Names in the record.
        cases: Computations to compare.
        step: Makes a step to time.
    """

    operators: tuple[str, ...]
    cases: tuple[Case, ...]
    step: "Callable[[], Step]"


def share_of_allowed_error(fast: Tensor, plain: Tensor, truth: Tensor) -> tuple[str, float]:
    """Compare a result with the truth; return a line, and the error as a share of the allowed one.

    Args:
        fast: Result of the kernel.
        plain: Result of the reference in the same dtype.
        truth: Result of the reference in float64.

    Returns:
        Both; the share is NaN if shapes or dtypes differ.
    """
    if fast.shape != truth.shape or fast.dtype != plain.dtype:
        line = f"{fast.dtype} {tuple(fast.shape)} instead of {plain.dtype} {tuple(truth.shape)}"
        return line, float("nan")
    error, reference_error = _largest(fast.double() - truth), _largest(plain.double() - truth)
    allowed = FACTOR * reference_error + FLOOR_STEPS * torch.finfo(plain.dtype).eps * (_largest(truth) or 1.0)
    line = f"error {error:.3g} exceeds {allowed:.3g}, twice the reference's {reference_error:.3g} in {plain.dtype}"
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
        gain = None if device.type == "cpu" else speedup(kernel.step())
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
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("verify needs a GPU that PyTorch can use, got a PyTorch without one")
    if device.type == "cpu" and not triton.knobs.runtime.interpret:
        raise ValueError("verify needs a GPU; on a CPU set TRITON_INTERPRET=1 to run the kernels in the interpreter")


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
        line, share = share_of_allowed_error(fast[name], plain[name], expected)
        yield f"{name}: {line}", share


DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _kernels(device: torch.device) -> Iterator[Kernel]:
    """Build the cases of all kernels: dtypes, layouts, grouped heads, unequal batches, one tensor alone, norms.

    The interpreter takes seconds for a large block, so it gets few tokens and small blocks.
    """
    tokens, large = (197, (16, 64)) if device.type == "cuda" else (5, ())
    mixed = partial(MixedRoPE, num_axes=2, head_dim=16)
    sample = partial(_sample, device, tokens)
    yield Kernel(
        ("rotate_planar",),
        (
            *(sample(f"{dtype}", mixed, dtype=dtype) for dtype in DTYPES),
            sample("pairs in halves", mixed, halves=True),
            sample("part of a head", partial(mixed, rotary_dim=12)),
            *_shapes(sample, mixed),
        ),
        partial(_layer, device, partial(MixedRoPE, num_axes=2)),
    )
    norms = (partial(nn.RMSNorm, eps=1e-6), partial(nn.LayerNorm, eps=1e-5))
    yield Kernel(
        ("rotate_planar_normed",),
        (
            *(sample(f"RMS norm, {dtype}", mixed, dtype=dtype, norms=(norms[0], norms[0])) for dtype in DTYPES),
            sample("layer norm", mixed, norms=(norms[1], norms[1])),
            sample("norm of q alone", mixed, norms=(norms[0], None)),
            sample("pairs in halves", mixed, norms=(norms[0], norms[1]), halves=True),
        ),
        partial(_layer, device, partial(MixedRoPE, num_axes=2), norm=True),
    )
    commuting = partial(ComRoPELD, num_axes=2, head_dim=16, block_size=8)
    yield Kernel(
        ("skew_eig", "rotate_basis"),
        (
            *(sample(f"{dtype}", commuting, dtype=dtype) for dtype in DTYPES),
            *(sample(f"blocks of {b}", partial(ComRoPELD, num_axes=2, head_dim=64, block_size=b)) for b in (4, *large)),
            *_shapes(sample, commuting),
        ),
        partial(_layer, device, partial(ComRoPELD, num_axes=2, block_size=8)),
    )
    lie = partial(LieRE, num_axes=2, head_dim=16, block_size=8)
    yield Kernel(
        ("exp_generators", "rotate_block"),
        (
            *(sample(f"{dtype}", lie, dtype=dtype) for dtype in DTYPES),
            *(
                sample(f"blocks of {b}", partial(LieRE, num_axes=2, head_dim=max(b, 12), block_size=b))
                for b in (3, 4, *large)
            ),
            *_shapes(sample, lie),
        ),
        partial(_layer, device, partial(LieRE, num_axes=2, block_size=8)),
    )
    yield Kernel(
        ("skew_exp",),
        tuple(Case(f"blocks of {b}", partial(_exponentials, device, b), torch.float32) for b in (2, 3, 8, *large)),
        partial(_exponential, device),
    )


def _shapes(sample: Callable[..., Case], build: Callable[..., Encoding]) -> tuple[Case, ...]:
    return (
        sample("tokens before heads", build, layout="bthd"),
        sample("grouped heads", build, heads=(4, 2)),
        sample("positions per sample", build, sets=2),
        sample("one sample of k", build, batches=(2, 1)),
        sample("more samples of k", build, batches=(2, 3)),
        sample("one tensor", build, alone=True),
        sample("other positions of k", build, key_tokens=3),
    )


def _sample(
    device: torch.device,
    tokens: int,
    name: str,
    build: Callable[..., Encoding],
    *,
    dtype: torch.dtype = torch.float32,
    heads: tuple[int, int] = (2, 2),
    batches: tuple[int, int] = (2, 2),
    sets: int | None = None,
    layout: str = "bhtd",
    halves: bool = False,
    alone: bool = False,
    key_tokens: int | None = None,
    norms: tuple[Callable[[int], nn.Module] | None, Callable[[int], nn.Module] | None] | None = None,
) -> Case:
    """Draw the inputs of a case of `rotate`, or of `rotate_one` if `alone`, with a fixed seed."""
    random = torch.Generator().manual_seed(0)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        encoding = build(num_heads=heads[1]).to(device)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random).to(device)

    def vectors(batch: int, count: int, length: int) -> Tensor:
        order = (length, count) if layout == "bthd" else (count, length)
        return draw(batch, *order, encoding.head_dim)

    lengths = tokens, key_tokens or tokens
    q, k, grad_q, grad_k = (vectors(batches[side], heads[side], lengths[side]) for _ in range(2) for side in range(2))
    places = [draw(*([] if sets is None else [sets]), length, 2) for length in lengths]
    modules = [None if norm is None else norm(encoding.head_dim).to(device) for norm in norms or (None, None)]

    def run(of: torch.dtype) -> Results:
        wide = torch.float64 if of == torch.float64 else torch.float32
        inputs = {"q": q.to(of), "k": k.to(of), "positions": places[0].to(wide), "key positions": places[1].to(wide)}
        unused = [name for name, used in (("k", not alone), ("key positions", key_tokens)) if not used]
        leaves = {name: x.detach().clone().requires_grad_() for name, x in inputs.items() if name not in unused}
        cast, q_norm, k_norm = (None if x is None else copy.deepcopy(x).to(wide) for x in (encoding, *modules))
        assert cast is not None
        for title, module in (("encoding", cast), ("norm of q", q_norm), ("norm of k", k_norm)):
            leaves |= {} if module is None else {f"{title}, {name}": x for name, x in module.named_parameters()}
        rotation = cast(leaves["positions"])
        rotation = rotation.in_halves() if halves else rotation
        if alone:
            rotated: tuple[Tensor, ...] = (rotate_one(leaves["q"], rotation, layout=layout),)
        else:
            key_rotation = cast(leaves["key positions"]) if key_tokens else None
            norm = None if norms is None else (q_norm, k_norm)
            rotated = rotate(leaves["q"], leaves["k"], rotation, key_rotation=key_rotation, norm=norm, layout=layout)
        upstream = [grad.to(of) for grad, _ in zip((grad_q, grad_k), rotated, strict=False)]
        gradients = torch.autograd.grad(rotated, list(leaves.values()), upstream)
        results = {f"rotated {name}": x for name, x in zip("qk", rotated, strict=False)}
        return results | {f"gradient of {name}": g for name, g in zip(leaves, gradients, strict=True)}

    return Case(name, run, dtype)


def _exponentials(device: torch.device, b: int, dtype: torch.dtype) -> Results:
    """Exponentiate skew matrices of several norms, with gradients."""
    random = torch.Generator().manual_seed(b)
    raw = torch.randn(6, b, b, generator=random).to(device)
    scale = torch.tensor([0.0, 1e-3, 0.3, 1.0, 3.0, 10.0], device=device)[:, None, None]
    raw = (scale * raw / b**0.5).to(dtype).requires_grad_()
    upstream = torch.randn(6, b, b, generator=random).to(device, dtype)
    exponential = skew_exp(raw - raw.mT)
    return {"exponential": exponential, "gradient": torch.autograd.grad(exponential, raw, upstream)[0]}


class Step(NamedTuple):
    """A forward and a backward pass to time.

    Attributes:
        forward: Computes tensors from `inputs`.
        inputs: Arguments of `forward`.
        leaves: Tensors that get a gradient.
        upstream: Gradients of what `forward` returns.
    """

    forward: Callable[..., Any]
    inputs: tuple[Tensor, ...]
    leaves: list[Tensor]
    upstream: Any

    def run(self, forward: Callable[..., Any]) -> None:
        """Run both passes, the forward pass by another function that computes the same."""
        torch.autograd.grad(forward(*self.inputs), self.leaves, self.upstream)


def _layer(
    device: torch.device,
    build: Callable[..., Encoding],
    norm: bool = False,
    shape: tuple[int, ...] = (32, 12, 197, 64),
) -> Step:
    """Make a step of the rotation in a layer: by default of a ViT-B at 224 pixels, batch 32, bfloat16."""
    _, heads, tokens, head_dim = shape
    encoding = build(num_heads=heads, head_dim=head_dim).to(device)
    q, k, *upstream = torch.randn(4, *shape, device=device, dtype=torch.bfloat16)
    inputs = q.requires_grad_(), k.requires_grad_()
    positions = torch.randn(tokens, 2, device=device)
    module = nn.RMSNorm(head_dim, device=device) if norm else None
    leaves = [*inputs, *encoding.parameters(), *([] if module is None else module.parameters())]

    def forward(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return rotate(q, k, encoding(positions), norm=None if module is None else (module, module))

    return Step(forward, inputs, leaves, upstream)


def _exponential(device: torch.device) -> Step:
    raw = torch.randn(2364, 64, 64, device=device)
    generator = ((raw - raw.mT) / 8).requires_grad_()
    return Step(skew_exp, (generator,), [generator], torch.randn_like(raw))


def speedup(step: Step, fast: str = "triton", repetitions: int = 33) -> float:
    """Time a backend and the compiled reference in turns; return the ratio of median times, without three warm-ups."""
    compiled = torch.compile(step.forward)
    times: dict[str, list[float]] = {"reference": [], fast: []}
    device = step.leaves[0].device
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
    parser.add_argument("--record", type=Path, default=record.USERS, help="file to write (default: %(default)s)")
    parser.add_argument("--kernels", help="verify these alone, comma-separated (default: all)")
    given = parser.parse_args(arguments)
    names = None if given.kernels is None else given.kernels.split(",")
    try:
        return 0 if verify(torch.device(given.device), given.record, names) else 1
    except (ValueError, OSError) as error:
        print(f"torchrope verify: {error}", file=sys.stderr)
        return 2
