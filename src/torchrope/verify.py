"""`python -m torchrope verify`: check GPU kernels on this GPU against float64, and record the right specialisations.

`torchrope.backend("auto")` uses a GPU kernel only for the dtypes and sizes that are recorded. By default those of
common models are checked, in about a minute; one shape in seconds.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchrope.encodings import ComRoPELD, LieRE, MixedRoPE
from torchrope.files import write_whole
from torchrope.ops import record
from torchrope.ops.backends import asking, backend
from torchrope.ops.record import Specialisation
from torchrope.ops.skew_exp import skew_exp
from torchrope.rotating import rotate
from torchrope.rotations import from_angles

FACTOR, FLOOR_STEPS = 2.0, 8.0
"""A fast path may err `FACTOR` times what the reference errs in that dtype, and by `FLOOR_STEPS` of its steps."""
TRUNCATING = 4.0
"""The factor for exponentials of 64 rows: tensor cores truncate sums that other units round."""

Results = dict[str, Tensor]


class Step(NamedTuple):
    """A forward and a backward pass.

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
    """Vectors to rotate: a kernel must be right for few and for many that share a rotation, and loop over all of them.

    It is another binary where heads of q or of k share a rotation, as many as k has.

    Attributes:
        name: For messages.
        in_one_program: Whether one program takes all vectors that share a rotation; by default few are a program each.
        batches: Samples of q and of k.
        heads: Heads of q and of k.
        sets: Sets of positions, as a shape.
        layout: As `rotate`'s.
    """

    name: str
    in_one_program: bool
    batches: tuple[int, int]
    heads: tuple[int, int] = (4, 2)
    sets: tuple[int, ...] = ()
    layout: str = "bhtd"


CASES = (
    Case("few vectors", False, (3, 2), layout="bthd"),
    Case("few vectors in one program", True, (8, 16), (2, 2)),
    Case("positions of each sample", False, (3, 3), (2, 2), sets=(3,)),
    Case("many vectors in one program", True, (129, 257), (2, 1)),
)
LAYER = Case("a layer of a ViT-B", False, (32, 32), (12, 12))
"""Programs as in training; the interpreter is too slow for it."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def common_shapes() -> Iterator[Specialisation]:
    """Return what ViTs, video models and language models use, in training and for inference."""
    for dtype in ("float32", "bfloat16"):
        for channels, axes in ((64, 2), (64, 1), (64, 3), (72, 2), (80, 2), (128, 1)):
            for halves in (False, True):
                yield from _planar_shapes(dtype, channels, axes, halves, ("", "frequencies"))
        yield from _matrix_shapes(dtype, 64, 8, 2, ("", "positions+table"))


def all_shapes() -> Iterator[Specialisation]:
    """Return every head_dim, block size and number of axes that is not rare, and all gradients."""
    of_planar, of_matrices = ("", "positions", "frequencies", "positions+frequencies"), ("", "positions+table")
    for dtype in DTYPES:
        for channels in (32, 48, 64, 72, 80, 96, 128):
            for halves in (False, True):
                yield from _planar_shapes(dtype, channels, 0, halves, ("", "positions"))
                for axes in (1, 2, 3, 4):
                    yield from _planar_shapes(dtype, channels, axes, halves, of_planar)
            for b in (3, 4, 8, 16, 32, 64):
                for axes in (1, 2, 3) if channels % b == 0 else ():
                    yield from _matrix_shapes(dtype, channels, b, axes, of_matrices)
    yield from (Specialisation("skew_exp", b=b) for b in (2, 3, 4, 8, 16, 32, 64))


def _planar_shapes(
    dtype: str, channels: int, axes: int, halves: bool, wanted: Sequence[str]
) -> Iterator[Specialisation]:
    return (Specialisation("rotate_planar", dtype, channels, channels // 2, 2, axes, halves, x) for x in wanted)


def _matrix_shapes(dtype: str, channels: int, b: int, axes: int, wanted: Sequence[str]) -> Iterator[Specialisation]:
    for names in wanted:
        yield Specialisation("rotate_block", dtype, channels, channels // b, b, axes, False, names)
    if b % 2 == 0:
        for names in ("", "positions"):
            yield Specialisation("rotate_basis", dtype, channels, channels // b, b, axes, False, names)


def completed(shape: Specialisation) -> list[Specialisation]:
    """Return the rotations to check for a shape: all dtypes of q and k, and gradients, where it does not say them.

    Raises:
        ValueError: an unknown kernel or dtype.
    """
    if shape.kernel not in record.MODULES or shape.dtype not in ("", *DTYPES):
        rule = f"kernel must be among {', '.join(record.MODULES)}, and dtype among {', '.join(DTYPES)}"
        raise ValueError(f"{rule}, got {shape}")
    if shape.kernel == "skew_exp":
        return [shape]
    rotates = {"skew_eig": "rotate_basis", "exp_generators": "rotate_block"}.get(shape.kernel, shape.kernel)
    blocks = shape.blocks or max(64 // shape.b, 1)
    axes = shape.axes if rotates == "rotate_planar" else shape.axes or 2
    full = shape._replace(kernel=rotates, channels=shape.channels or blocks * shape.b, blocks=blocks, axes=axes)
    of_table = rotates == "rotate_block" and not shape.dtype
    wanted = ["", "positions+table"] if of_table else [shape.wanted]
    return [
        full._replace(dtype=dtype, wanted=x) for dtype in ([shape.dtype] if shape.dtype else DTYPES) for x in wanted
    ]


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
    shapes: Sequence[Specialisation] | None = None,
    report: Callable[[str], None] = print,
) -> bool:
    """Verify kernels on a device and record the right ones, in the place of earlier entries for its architecture.

    Args:
        device: A GPU; in Triton's interpreter a CPU.
        path: The record, written after each shape.
        shapes: What to verify; the common shapes by default.
        report: Called with a line for each shape.

    Returns:
        Whether all of these kernels are right.

    Raises:
        ValueError: the device has no GPU kernels, or an operator is unknown.
        OSError: the record cannot be written.
    """
    _require_triton(device)
    architecture, version = record.architecture(device), record.triton_version()
    right: set[Specialisation] = set()
    wrong = 0
    for shape in [shape for partial_shape in shapes or common_shapes() for shape in completed(partial_shape)]:
        with asking() as asked:
            results = [x for n, case in enumerate(_cases(device, shape)) for x in _judge(device, shape, case, n)]
        checked = {x for x in asked if x.dtype or not x.kernel.startswith("rotate")} or {shape}
        failures = [line for line, share in results if not share <= 1]
        entries = []
        if failures:
            wrong += 1
            report(f"{shape}: WRONG, not recorded; {len(failures)} results differ, the first: {failures[0]}")
        else:
            worst = max(share for _, share in results)
            report(f"{shape}: right, {worst:.0%} of the allowed error")
            entries = [
                record.Verified(str(x), architecture, version, record.digest(x.kernel), round(worst, 3))
                for x in checked
            ]
            right |= checked
        write_whole(path, merged(path, entries, checked if entries else checked - right, architecture))
    record.forget()
    report(f"recorded {len(right)} specialisations for {architecture} with Triton {version} in {path}")
    return not wrong


def merged(path: Path, entries: Iterable[record.Verified], compared: Iterable[Specialisation], name: str) -> str:
    """Return the text of a record with entries in the place of those compared, and without those of changed sources."""
    replaced = {(str(x), name, record.triton_version()) for x in compared}
    kept = [
        x
        for x in record.read(path)
        if x[:3] not in replaced and (record.is_current(x) or x.triton != record.triton_version())
    ]
    rows = [json.dumps(entry._asdict()) for entry in sorted([*kept, *entries])]
    return '{"kernels": [\n' + ",\n".join(rows) + "\n]}\n"


def _cases(device: torch.device, shape: Specialisation) -> tuple[Case, ...]:
    if device.type == "cuda":
        return (*CASES, LAYER)
    return CASES[:3] if shape.kernel == "rotate_planar" else CASES  # whose kernel is the same for few and many


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


def _judge(device: torch.device, shape: Specialisation, case: Case, seed: int) -> Iterator[tuple[str, float]]:
    """Describe every result of a case, with its error as a share of the allowed one."""
    from torchrope.ops.gpu.launch import in_one_program

    def run(dtype: torch.dtype) -> Results:
        step = _step(device, shape, case, dtype, seed)
        return step.run(step.forward)

    narrow = DTYPES[shape.dtype or "float32"]
    with backend("reference"):
        truth, plain = run(torch.float64), run(narrow)
    try:
        with backend("triton"), poisoned(), in_one_program() if case.in_one_program else nullcontext():
            fast = run(narrow)
    except Exception as error:  # a kernel that does not compile or launch is one of the results
        yield f"{case.name}: {type(error).__name__}: {' '.join(str(error).split())}", float("nan")
        return
    exponentials = shape.kernel in ("rotate_block", "skew_exp")
    factor = TRUNCATING if exponentials and shape.b == 64 else FACTOR
    for name, expected in truth.items():
        line, share = share_of_allowed_error(fast[name], plain[name], expected, factor)
        yield f"{case.name}: {name}: {line}", share


@contextmanager
def poisoned() -> Iterator[None]:
    """Fill memory that PyTorch does not initialise with NaN: elements that no kernel writes show."""

    def filled(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def allocated(*args: Any, **kwargs: Any) -> Tensor:
            x = allocate(*args, **kwargs)
            with torch.no_grad():
                return x.fill_(torch.nan) if x.is_floating_point() else x

        return allocated

    functions = [(torch, "empty"), (torch, "empty_like"), (Tensor, "new_empty")]
    originals = [getattr(owner, name) for owner, name in functions]
    try:
        for (owner, name), original in zip(functions, originals, strict=True):
            setattr(owner, name, filled(original))
        yield
    finally:
        for (owner, name), original in zip(functions, originals, strict=True):
            setattr(owner, name, original)


def _step(device: torch.device, shape: Specialisation, case: Case, dtype: torch.dtype, seed: int) -> Step:
    """Make the step of a case from inputs drawn with a seed, as for each dtype; matrices as at positions below 1."""
    if shape.kernel == "skew_exp":
        return _exponentials(device, shape.b, dtype, seed)
    random = torch.Generator().manual_seed(seed)
    wide = torch.promote_types(dtype, torch.float32)
    heads, layer = case.heads[1], case is LAYER
    tokens = 197 if layer else 35 if shape.kernel == "rotate_planar" else 3
    sizes: dict[str, Any] = dict(num_heads=heads, head_dim=shape.channels, rotary_dim=shape.blocks * shape.b)

    def draw(*sizes: int, dtype: torch.dtype = wide) -> Tensor:
        return torch.randn(sizes, generator=random).to(device, dtype)

    orders = [(tokens, h) if case.layout == "bthd" else (h, tokens) for h in case.heads]
    vectors = [(batch, *order, shape.channels) for batch, order in zip(case.batches, orders, strict=True)]
    q, k, *upstream = (draw(*size, dtype=dtype) for size in (*vectors, *vectors))
    leaves = {"q": q, "k": k}
    if shape.axes == 0:
        angles = draw(*case.sets, heads, tokens, shape.blocks)
        rotation_of = partial(from_angles, angles, head_dim=shape.channels)
        leaves |= {"angles": angles} if shape.wanted else {}
    else:
        positions = draw(*case.sets, tokens, shape.axes) * (1 if shape.kernel == "rotate_planar" else 0.25)
        build: Any = {"rotate_block": LieRE, "rotate_basis": ComRoPELD}.get(shape.kernel, MixedRoPE)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            of_block = {} if shape.kernel == "rotate_planar" else {"block_size": shape.b}
            encoding = build(num_axes=shape.axes, **sizes, **of_block).to(device, wide)
        rotation_of = partial(encoding, positions)
        if "positions" in shape.wanted:
            leaves["positions"] = positions
        if shape.kernel == "rotate_basis" or {"frequencies", "table"} & {*shape.wanted.split("+")}:
            leaves |= {f"encoding, {name}": x for name, x in encoding.named_parameters()}
        encoding.requires_grad_(False)

    def forward() -> Results:
        rotation = rotation_of()
        rotated = rotate(q, k, rotation.in_halves() if shape.halves else rotation, layout=case.layout)
        return dict(zip(("rotated q", "rotated k"), rotated, strict=True))

    for x in leaves.values():
        x.requires_grad_()
    return Step(forward, leaves, upstream)


def _exponentials(device: torch.device, b: int, dtype: torch.dtype, seed: int) -> Step:
    """Make a step of exponentials of skew matrices of several norms."""
    random, norms = torch.Generator().manual_seed(seed), (0.0, 1e-3, 0.3, 1.0, 3.0)
    raw, upstream = torch.randn(2, len(norms), b, b, generator=random)
    raw = (raw * torch.tensor(norms)[:, None, None] / b**0.5).to(device, dtype).requires_grad_()
    return Step(lambda: {"exponential": skew_exp(raw - raw.mT)}, {"skew": raw}, [upstream.to(device, dtype)])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command: 0 if all kernels are right, 1 if one is wrong, 2 if the device has none."""
    parser = argparse.ArgumentParser(prog="python -m torchrope verify", description=__doc__)
    parser.add_argument("--device", default="cuda", help="the GPU, such as cuda:1 (default: %(default)s)")
    users = record.user_record()
    parser.add_argument(
        "--record", type=Path, default=users, required=users is None, help="file to write (default: %(default)s)"
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--shape", action="append", help="verify this alone, as a warning names it; may be repeated")
    what.add_argument("--all", action="store_true", help="verify also what is less common, in half an hour")
    options = parser.parse_args(arguments)
    try:
        shapes = [Specialisation.parse(shape) for shape in options.shape or ()] or [*all_shapes()] * options.all
        return 0 if verify(_device(options.device), options.record, shapes) else 1
    except (ValueError, OSError) as error:
        print(f"torchrope verify: {error}", file=sys.stderr)
        return 2
