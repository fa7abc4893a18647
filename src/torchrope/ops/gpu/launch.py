"""What the kernels share: numbers of programs, warps, strides of tensors, and the rows of a program."""

# mypy: allow-untyped-defs

from contextlib import AbstractContextManager, nullcontext
from math import gcd

import torch
import triton
import triton.language as tl
from torch import Tensor

# Maximum number of programs: several per multiprocessor of large GPUs. Further work is a loop inside a program.
PROGRAMS = 4096
# Triton 3.2 aborts on products of 64 rows with 8 warps on Hopper; 3.6 and 3.8 compile them.
WIDE_WARPS = 8 if tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 6) else 4

# Sizes that differ between calls. Triton would compile anew for those equal to 1 or divisible by 16.
SIZES = ("tokens", "heads", "sets", "samples", "group", "splits", "matrices", "rows")
STRIDES = tuple(f"{x}_{dim}" for x in ("x", "out", "grad") for dim in ("sample", "head", "token"))
VARYING = [*SIZES, *STRIDES, "r_set", "r_head", "r_token"]
"""Arguments of kernels that Triton must not specialise on."""


def on_device_of(x: Tensor) -> AbstractContextManager:
    """Make the tensor's device current: Triton launches on the current device."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def outer_strides(*tensors: Tensor) -> tuple[list[int], int]:
    """Return the strides of samples, heads and tokens of each tensor in units, and the unit.

    The unit is the largest of 16, 8, 4, 2 and 1 that divides all of them. A kernel multiplies by it as a constant, so
    that the compiler knows the alignment of vectors whatever the number of tokens.
    """
    strides = [
        0 if size == 1 else stride for x in tensors for size, stride in zip(x.shape[:3], x.stride(), strict=False)
    ]
    unit = gcd(16, *strides)
    return [stride // unit for stride in strides], unit


def splits(programs: int, rows: int) -> int:
    """Return into how many programs to split the `rows` of each of `programs` programs, at most PROGRAMS in all."""
    return max(1, min(rows, PROGRAMS // max(programs, 1)))


def power_of_two(size: int) -> int:
    """Return the next power of two: Triton's tiles have no other sizes."""
    return triton.next_power_of_2(size)


@triton.jit
def share(split, splits, rows):
    """Compute the range of rows of a program."""
    each = tl.cdiv(rows, splits)
    return split * each, tl.minimum((split + 1) * each, rows)


@triton.jit
def offsets(row, token, place, samples, head, group, stride_sample, stride_head, stride_token, UNIT: tl.constexpr):
    """Compute the offset of vectors: the row'th of those that share a rotation, over samples and heads of a group."""
    sample = tl.cast(place * samples + row // group, tl.int64)
    head_of_x = tl.cast(head * group + row % group, tl.int64)
    return (sample * stride_sample + head_of_x * stride_head + tl.cast(token, tl.int64) * stride_token) * UNIT
