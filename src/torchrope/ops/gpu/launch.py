"""Launch parameters shared by the kernels: numbers of programs, warps, and strides of tensors."""

from contextlib import AbstractContextManager, nullcontext

import torch
import triton
from torch import Tensor

# Maximum number of programs: several per multiprocessor of large GPUs. Further work is a loop inside a program.
PROGRAMS = 4096
# Triton 3.2 aborts on products of 64 rows with 8 warps on Hopper; 3.6 and 3.8 compile them.
WIDE_WARPS = 8 if tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 6) else 4


def contiguous_channels(x: Tensor) -> Tensor:
    """Return x with channels contiguous in memory, copied only if they are not."""
    return x if x.stride(-1) == 1 else x.contiguous()


def on_device_of(x: Tensor) -> AbstractContextManager:
    """Make the tensor's device current: Triton launches on the current device."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def outer_strides(x: Tensor) -> tuple[int, int, int]:
    """Return the strides of batch, heads and tokens of `(batch, heads, tokens, channels)`."""
    return x.stride(0), x.stride(1), x.stride(2)


def splits(programs: int, rows: int) -> int:
    """Return into how many programs to split the `rows` of each of `programs` programs, at most PROGRAMS in all."""
    return max(1, min(rows, PROGRAMS // max(programs, 1)))


def power_of_two(size: int) -> int:
    """Return the next power of two: Triton's tiles have no other sizes."""
    return triton.next_power_of_2(size)
