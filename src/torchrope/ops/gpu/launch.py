"""Launch parameters that the kernels share: grids of programs, and strides of tensors."""

from contextlib import AbstractContextManager, nullcontext

import torch
import triton
from torch import Tensor

# Several programs for every place on the largest GPUs; beyond it a program rather does more work on what it has loaded.
PROGRAMS = 4096
# Triton 3.2 aborts on products of 64 rows by 8 warps for Hopper; 3.6 and 3.8 were seen to compile them.
WIDE_WARPS = 8 if tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 6) else 4


def contiguous_channels(x: Tensor) -> Tensor:
    """The same vectors with neighbouring channels side by side; other strides are left as they are."""
    return x if x.stride(-1) == 1 else x.contiguous()


def on_device_of(x: Tensor) -> AbstractContextManager:
    """Launch where the tensor is; Triton itself launches on the current device."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def outer_strides(x: Tensor) -> tuple[int, int, int]:
    """Strides of batch, heads and tokens of `(batch, heads, tokens, channels)`."""
    return x.stride(0), x.stride(1), x.stride(2)


def splits(programs: int, rows: int) -> int:
    """Into how many programs to cut `rows` equal pieces of work, where `programs` stand already."""
    return max(1, min(rows, PROGRAMS // max(programs, 1)))


def power_of_two(size: int) -> int:
    """The next power of two: Triton's tiles have no other sizes."""
    return triton.next_power_of_2(size)
