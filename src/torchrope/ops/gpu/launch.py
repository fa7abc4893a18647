"""Shared code of the kernels: launches on q and k, sums over programs, and which rows a program computes.

Constants of a launch follow from the fields of a `torchrope.ops.record.Specialisation` and from whether few or many
vectors share a rotation: strides, addresses and dtypes that would change them are changed by a copy.
"""

# mypy: allow-untyped-defs

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from math import gcd
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchrope.ops.record import Specialisation
from torchrope.tensors import empty_rows

# Maximum number of programs: several per multiprocessor of large GPUs. Further work is a loop inside a program.
PROGRAMS = 4096
# Vectors that share a rotation are many from here on.
MANY = 17
_splits = True

# Arguments that differ between calls: Triton would compile anew for those equal to 1 or divisible by 16.
VARYING = ["tokens", "heads", "sets", "splits", "row_splits", "matrices", "blocks"]
VARYING += [f"{side}_{x}" for side in "qk" for x in ("samples", "group")]
VARYING += [
    f"{side}_{dim}" for x in ("q", "k") for side in (x, f"{x}_out", f"{x}_x") for dim in ("sample", "head", "token")
]
Sides = Sequence[Tensor]
"""q and k `(batch, heads, tokens, channels)`, or in a backward pass their gradients, q and k."""


def interprets_bfloat16() -> bool:
    """Return whether Triton's interpreter multiplies bfloat16 as numbers, which those of its releases do not."""
    from triton.runtime import interpreter

    unit = interpreter.TensorHandle(torch.full((1, 1), 0x3F80).short().numpy().view("uint16"), tl.bfloat16)
    zero = interpreter.TensorHandle(torch.zeros(1, 1).numpy(), tl.float32)
    return interpreter.interpreter_builder.create_dot(unit, unit, zero, None, 0).data.item() == 1.0


def launch(
    kernel: Any,
    of: Specialisation,
    sides: Sides,
    arguments: Sequence[Tensor],
    heads: int,
    sets: int,
    programs: int,
    splits: int,
    sizes: Sequence[int] = (),
    parts: Sequence[tuple[int, Sequence[int]]] = (),
    wanted: Sequence[bool] = (),
    **constants: Any,
) -> tuple[Tensor, ...]:
    """Run a kernel once for q and k; return what it writes, and the wanted gradients, sums of parts, else empty ones.

    It takes source, output and, for gradients, x of q and of k, arguments, parts (None if not wanted), strides, tokens,
    heads, sets, samples of a set and heads of a group that share a rotation for q and for k, splits, sizes and
    constants. Each of `programs` is split; parts are how many terms a gradient is the sum of, and its shape.
    """
    used = [_in_units(x) for x in (sides if any(wanted) else sides[:2])]
    outputs = [empty_rows(x) for x in used[:2]]
    for x, out in zip(used, outputs, strict=False):
        if (rotary_dim := of.blocks * of.b) < of.channels:
            out[..., rotary_dim:].copy_(x[..., rotary_dim:])
    is_empty = not any(x.numel() for x in outputs)
    allocate = torch.zeros if is_empty else torch.empty
    terms = [
        allocate((count, *shape), dtype=torch.float32, device=used[0].device) if needed else None
        for needed, (count, shape) in zip(wanted, parts, strict=True)
    ]
    if not is_empty:
        vectors = [x for n, out in enumerate(outputs) for x in (used[n], out, used[n + 2] if any(wanted) else None)]
        strides = [stride // _unit(sides[0]) for x in vectors for stride in _outer_strides(x)]
        of_q, of_k = ((x.shape[0] * bool(x.numel()) // sets, max(x.shape[1] // heads, 1)) for x in outputs)
        is_grouped = max(of_q[1], of_k[1]) > 1
        with on_device_of(used[0]):
            kernel[(programs * splits,)](
                *vectors, *map(plain, arguments), *terms, *strides, sides[0].shape[2], heads, sets, *of_q, *of_k,
                splits, *sizes, BACK=len(sides) == 4, UNIT=_unit(sides[0]), GROUPED=is_grouped, **constants,
            )  # fmt: skip
    sums = (x if x is None else x[0] if len(x) == 1 else x.sum(dim=0) for x in terms)
    return (*outputs, *(outputs[0].new_empty(0, dtype=torch.float32) if x is None else x for x in sums))


def on_device_of(x: Tensor) -> AbstractContextManager:
    """Make the tensor's device current, if it is not: Triton launches on the current device."""
    must_switch = x.is_cuda and x.device.index != torch.cuda.current_device()
    return torch.cuda.device(x.device) if must_switch else nullcontext()


def _unit(x: Tensor) -> int:
    """Return what strides of vectors are counted in: a kernel multiplies by it, so the compiler knows alignments."""
    return gcd(16, x.shape[-1])


def _outer_strides(x: Tensor | None) -> list[int]:
    """Return the strides of samples, heads and tokens, 0 where nothing depends on them."""
    if x is None:
        return [0, 0, 0]
    return [0 if size == 1 else stride for size, stride in zip(x.shape[:3], x.stride(), strict=False)]


def _in_units(x: Tensor) -> Tensor:
    """Return vectors whose strides are multiples of the unit, with adjacent channels; copied if they are not."""
    fits = x.stride(-1) == 1 and not any(stride % _unit(x) for stride in _outer_strides(x))
    return _aligned(x) if fits else x.clone(memory_format=torch.contiguous_format)


def _aligned(x: Tensor) -> Tensor:
    """Return x at an address that is a multiple of 16, as that of a new tensor: Triton compiles for either."""
    return x.clone(memory_format=torch.contiguous_format) if x.data_ptr() % 16 else x


def plain(x: Tensor) -> Tensor:
    """Return numbers as kernels read them: float32, contiguous and aligned."""
    return _aligned(x.to(torch.float32).contiguous())


def rows_of(sides: Sides, sets: int, heads: int) -> list[int]:
    """Return how many vectors of q and of k share a rotation of a token: samples of a set times heads of a group."""
    return [(x.shape[0] // sets) * (x.shape[1] // heads) for x in sides[:2]]


def splits_of(programs: int, rows: int, most: int = PROGRAMS) -> int:
    """Return into how many programs to split the `rows` of each of `programs` programs, for about `most` in all."""
    splits = max(1, min(rows, most // max(programs, 1))) if _splits else 1
    return triton.cdiv(rows, triton.cdiv(rows, splits)) if rows else 1  # none without rows


@contextmanager
def in_one_program() -> Iterator[None]:
    """Give all rows to one program, to verify its loop: by default few rows are a program each."""
    global _splits
    _splits = False
    try:
        yield
    finally:
        _splits = True


@triton.jit
def locate(inner, heads, tiles, sets):
    """Locate a program: inner tile, head, outer tile, set, share of rows; adjacent programs read adjacent memory."""
    program = tl.program_id(0)
    outer = program // inner // heads
    return (program % inner, program // inner % heads, outer % tiles, outer // tiles % sets, outer // tiles // sets)


@triton.jit
def share(split, splits, rows):
    """Compute the range of rows of a program."""
    each = tl.cdiv(rows, splits)
    return split * each, tl.minimum((split + 1) * each, rows)


@triton.jit
def offsets(
    row, token, channel, set_, samples, head, group, stride_sample, stride_head, stride_token,
    UNIT: tl.constexpr, GROUPED: tl.constexpr,
):  # fmt: skip
    """Compute offsets of channels of vectors: the row'th that share a rotation, over samples and heads of a group."""
    sample = set_ * samples + row
    head_of_x = head
    if GROUPED:  # a division
        sample = set_ * samples + row // group
        head_of_x = head * group + row % group
    sample = tl.cast(sample, tl.int64)
    head_of_x = tl.cast(head_of_x, tl.int64)
    vector = (sample * stride_sample + head_of_x * stride_head + tl.cast(token, tl.int64) * stride_token) * UNIT
    return vector[:, None] + channel


@triton.jit
def upper_index(row, column, BLOCK: tl.constexpr):
    """Index of an entry above the diagonal, row by row."""
    return row * (2 * BLOCK - row - 1) // 2 + column - row - 1
