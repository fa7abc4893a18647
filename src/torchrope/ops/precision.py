"""Angles are float32 or wider, whatever the model's dtype and whether or not autocast is on."""

from contextlib import AbstractContextManager, nullcontext
from functools import reduce

import torch
from torch import Tensor


def wide_dtype(*tensors: Tensor) -> torch.dtype:
    """The narrowest floating dtype that holds all of them, float32 at least."""
    return reduce(torch.promote_types, (t.dtype for t in tensors), torch.float32)


def without_autocast(like: Tensor) -> AbstractContextManager:
    """Switch autocast off on the device of a tensor; the meta device knows none."""
    # Not torch.amp.is_autocast_available: torch 2.11 and older cannot compile it.
    return nullcontext() if like.is_meta else torch.autocast(like.device.type, enabled=False)
