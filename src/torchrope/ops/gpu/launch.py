"""Shared code of the kernels: launches on q and k, sums over programs, and which rows a program computes.

Constants of a launch follow from the fields of a `torchrope.ops.record.Specialisation` and from whether few or many
vectors share a rotation: strides, addresses and dtypes that would change them are changed by a copy.
"""

# mypy: allow-untyped-defs

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from math import gcd
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchrope.tensors import empty_rows

# Maximum number of programs: several per multiprocessor of large GPUs. Further work is a loop inside a program.
PROGRAMS = 4096
# Vectors that share a rotation are many from here on.
MANY = 17
_splits = True

# Arguments that differ between calls: Triton would compile anew for those equal to 1 or divisible by 16.
VARYING = ["tokens", "heads", "sets", "samples", "splits", "row_splits", "matrices", "blocks"]
VARYING += [f"{x}_{dim}" for x in ("source", "out", "x") for dim in ("sample", "head", "token")]
RUNTIME = dict(do_not_specialize=VARYING, do_not_specialize_on_alignment=["group"])
"""Options of kernels of vectors: only a group of 1, whose division leaves the loop, is compiled anew."""
Vectors = tuple[Tensor, Tensor, Tensor | None]
"""What a kernel reads, `(batch, heads, tokens, channels)`, what it writes, and in a backward pass x if it is needed."""


def interprets_bfloat16() -> bool:
    """Return whether Triton's interpreter multiplies bfloat16 as numbers, which those of its releases do not."""
    from triton.runtime import interpreter

    unit = interpreter.TensorHandle(torch.full((1, 1), 0x3F80).short().numpy().view("uint16"), tl.bfloat16)
    zero = interpreter.TensorHandle(torch.zeros(1, 1).numpy(), tl.float32)
    return interpreter.interpreter_builder.create_dot(unit, unit, zero, None, 0).data.item() == 1.0


def on_sides(
    run: Callable[..., Sequence[Tensor | None]],
    sides: tuple[Tensor, Tensor],
    grads: tuple[Tensor, Tensor] | None = None,
    shapes: Iterable[Sequence[int]] = (),
    wanted: Sequence[bool] = (),
) -> tuple[Tensor, ...]:
    """Rotate q and k, or gradients back, by `run(vectors, out, x or None)`; sum its gradients to the parameters."""
    outputs, gradients = [], []
    for side, vectors in enumerate(sides):
        x = _in_units(vectors)
        outputs.append(out := empty_rows(x))
        if x.numel():
            gradients.append(run(x, out, None) if grads is None else run(_in_units(grads[side]), out, x))

    def total(index: int, shape: Sequence[int], needed: bool) -> Tensor:
        terms = [x for x in (gradient[index] for gradient in gradients) if needed and x is not None]
        if terms:
            return sum(terms[1:], start=terms[0]).view(shape)
        return sides[0].new_zeros(shape if needed else (0,), dtype=torch.float32)

    return (*outputs, *(total(index, *of_sum) for index, of_sum in enumerate(zip(shapes, wanted, strict=True))))


def launch(
    kernel: Any,
    vectors: Sequence[Tensor | None],
    arguments: Sequence[Tensor | None],
    heads: int,
    sets: int,
    programs: int,
    splits: int,
    sizes: Sequence[int],
    parts: Sequence[Sequence[int]] = (),
    wanted: Sequence[bool] = (),
    **constants: Any,
) -> list[Tensor | None]:
    """Run a kernel on vectors `(batch, heads, tokens, channels)`; return the sums of what its programs store.

    It takes vectors, arguments, parts (None if not wanted), strides, tokens, heads, sets, samples of a set, heads of a
    group that shares a rotation, splits, sizes and constants; each of `programs` is split, and sums are over splits.
    """
    source, *rest = vectors
    assert source is not None
    stored = [
        source.new_empty(shape, dtype=torch.float32) if needed else None
        for needed, shape in zip(wanted, parts, strict=True)
    ]
    unit = _unit(source)
    strides = [stride // unit for x in vectors for stride in _outer_strides(x)]
    parameters = [None if x is None else plain(x) for x in arguments]
    batch, heads_of_vectors, tokens, _ = source.shape
    shared = tokens, heads, sets, batch // sets, heads_of_vectors // heads, splits
    with on_device_of(source):
        kernel[(programs * splits,)](
            source, *rest, *parameters, *stored, *strides, *shared, *sizes, UNIT=unit, **constants
        )
    return [x if x is None else x[0] if len(x) == 1 else x.sum(dim=0) for x in stored]


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


def rows_of(x: Tensor, sets: int, heads: int) -> int:
    """Return how many vectors of a token share a rotation: samples of a set times heads of a group."""
    return (x.shape[0] // sets) * (x.shape[1] // heads)


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


def copy_rest(x: Tensor, out: Tensor, rotary_dim: int) -> None:
    """Copy the channels that are not rotated."""
    if rotary_dim < x.shape[-1]:
        out[..., rotary_dim:].copy_(x[..., rotary_dim:])


@triton.jit
def locate(inner, heads, tiles, sets):
    """Locate a program: inner tile, head, outer tile, set, share of rows; adjacent programs read adjacent memory."""
    program = tl.program_id(0)
    outer = program // inner // heads
    return (
        program % inner,
        program // inner % heads,
        outer % tiles,
        outer // tiles % sets,
        outer // tiles // sets,
    )


@triton.jit
def share(split, splits, rows):
    """Compute the range of rows of a program."""
    each = tl.cdiv(rows, splits)
    return split * each, tl.minimum((split + 1) * each, rows)


@triton.jit
def offsets(
    row, token, channel, set_, samples, head, group, stride_sample, stride_head, stride_token, UNIT: tl.constexpr
):  # fmt: skip
    """Compute offsets of channels of vectors: the row'th that share a rotation, over samples and heads of a group."""
    sample = tl.cast(set_ * samples + row // group, tl.int64)
    head_of_x = tl.cast(head * group + row % group, tl.int64)
    vector = (sample * stride_sample + head_of_x * stride_head + tl.cast(token, tl.int64) * stride_token) * UNIT
    return vector[:, None] + channel


@triton.jit
def upper_index(row, column, BLOCK: tl.constexpr):
    """Index of an entry above the diagonal, row by row."""
    return row * (2 * BLOCK - row - 1) // 2 + column - row - 1
