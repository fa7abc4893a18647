"""Tensor utilities: dtypes for angles, disabling autocast, and whether values can be read."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn


def wide_dtype(*tensors: Tensor) -> torch.dtype:
    """Return the promoted dtype of tensors, at least float32."""
    wide = torch.float32
    for tensor in tensors:
        if tensor.dtype != wide:
            wide = torch.promote_types(wide, tensor.dtype)
    return wide


def without_autocast(like: Tensor) -> AbstractContextManager:
    """Return a context manager that disables autocast on the device of a tensor; the meta device has none."""
    # Not torch.amp.is_autocast_available: torch 2.11 and older cannot compile it.
    return nullcontext() if like.is_meta else torch.autocast(like.device.type, enabled=False)


def can_read(x: Tensor) -> bool:
    """Whether Python may branch on the values of a tensor: a plain CPU tensor, neither traced nor transformed.

    Reading from a GPU would synchronise; tensors in a compiled graph or under `torch.vmap` have no values.
    """
    if torch.compiler.is_compiling() or x.device.type != "cpu" or type(x) not in (Tensor, nn.Parameter):
        return False
    return not torch._C._functorch.is_functorch_wrapped_tensor(x)


def empty_rows(like: Tensor) -> Tensor:
    """Allocate a tensor like another, in its memory order if its last stride is 1, else contiguous."""
    empty = torch.empty_like(like)
    return empty if empty.stride(-1) == 1 else like.new_empty(like.shape)


def with_batch_dim(x: Tensor, ndim: int) -> Tensor:
    """Add a batch dimension of 1 to a tensor that all samples share."""
    return x if x.ndim == ndim else x.unsqueeze(0)
