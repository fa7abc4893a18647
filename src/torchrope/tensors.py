"""Tensor utilities: dtypes for angles, modules that keep them, disabling autocast, and whether values can be read."""

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch
from torch import Tensor, nn


def wide_dtype(*tensors: Tensor) -> torch.dtype:
    """Return the promoted dtype of tensors, at least float32."""
    wide = torch.float32
    for tensor in tensors:
        if tensor.dtype != wide:
            wide = torch.promote_types(wide, tensor.dtype)
    return wide


@cache
def warn_once(message: str) -> None:
    """Warn, once per process for each message."""
    warnings.warn(message, stacklevel=3)


def is_narrow(tensor: Tensor) -> bool:
    """Whether a tensor is floating point with less precision than float32."""
    return tensor.is_floating_point() and tensor.dtype.itemsize < 4


class Float32Module(nn.Module):
    """Module whose parameters and buffers stay float32 or float64: casts to less precision change their device only.

    At position 4,000 a frequency of 1 rounded to bfloat16 gives an angle that is wrong by up to 8 radians. Empty
    buffers are cast as usual.
    """

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        def convert(tensor: Tensor) -> Tensor:
            converted = fn(tensor)
            return tensor.to(converted.device) if _loses_precision(tensor, converted) else converted

        return super()._apply(convert, recurse)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Register a parameter, converted to float32 if it has less precision, as by a default dtype of bfloat16."""
        if param is not None and is_narrow(param):
            param = nn.Parameter(param.detach().float(), requires_grad=param.requires_grad)
        super().register_parameter(name, param)


def _loses_precision(tensor: Tensor, converted: Tensor) -> bool:
    return bool(tensor.numel()) and is_narrow(converted) and tensor.is_floating_point() and not is_narrow(tensor)


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
