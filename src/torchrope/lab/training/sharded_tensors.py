"""Tensors of which every process holds a part, and the same ones whole."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor


def gather_full(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Make tensors whole, on the first process's CPU; others get empty ones. All processes must call it."""
    return {name: _gather(value) if isinstance(value, DTensor) else value for name, value in tensors.items()}


def local_shards(tensors: Mapping[str, Any], like: Mapping[str, Any]) -> dict[str, Any]:
    """Take this process's parts of whole tensors, cut as those of the same names are."""
    return {name: local_shard(value, like.get(name)) for name, value in tensors.items()}


def local_shard(value: Any, like: Any) -> Any:
    """This process's part of a tensor, cut as `like` is where both have one shape; anything else as it is."""
    if not isinstance(like, DTensor) or not isinstance(value, Tensor) or value.shape != like.shape:
        return value
    return value if isinstance(value, DTensor) else distribute_tensor(value, like.device_mesh, like.placements)


def _gather(value: DTensor) -> Tensor:
    whole = value.full_tensor()
    return whole.cpu() if torch.distributed.get_rank() == 0 else torch.empty(0)
