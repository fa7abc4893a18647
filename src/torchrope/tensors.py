"""Tensor utilities: the dtype to compute angles in, autocast switched off, whether values can be read."""

from contextlib import AbstractContextManager, nullcontext
from functools import reduce

import torch
from torch import Tensor, nn


def wide_dtype(*tensors: Tensor) -> torch.dtype:
    """The narrowest floating dtype that holds all of them, float32 at least."""
    return reduce(torch.promote_types, (t.dtype for t in tensors), torch.float32)


def without_autocast(like: Tensor) -> AbstractContextManager:
    """Switch autocast off on the device of a tensor; the meta device has none."""
    # Not torch.amp.is_autocast_available: torch 2.11 and older cannot compile it.
    return nullcontext() if like.is_meta else torch.autocast(like.device.type, enabled=False)


def can_read(x: Tensor) -> bool:
    """Whether Python may branch on the values of a tensor: a plain one on a CPU, neither traced nor transformed.

    A GPU would have to be waited for; a graph and a function under `torch.vmap` have no values yet.
    """
    if torch.compiler.is_compiling() or x.device.type != "cpu" or type(x) not in (Tensor, nn.Parameter):
        return False
    return not torch._C._functorch.is_functorch_wrapped_tensor(x)


def empty_rows(like: Tensor) -> Tensor:
    """Memory for a result of the same shape and dtype, in the memory order of `like`, channels side by side."""
    empty = torch.empty_like(like)
    return empty if empty.stride(-1) == 1 else like.new_empty(like.shape)


def with_batch_dim(x: Tensor, ndim: int) -> Tensor:
    """Give what all samples share a leading dimension of 1."""
    return x if x.ndim == ndim else x.unsqueeze(0)
