"""Conversion between sharded tensors (DTensor), of which each process holds a shard, and full tensors."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor


def gather_full(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Gather full tensors on the CPU of rank 0; other ranks get empty ones. All processes must call it."""
    return {name: _gather(value) if isinstance(value, DTensor) else value for name, value in tensors.items()}


def local_shards(tensors: Mapping[str, Any], like: Mapping[str, Any]) -> dict[str, Any]:
    """Shard full tensors like those of the same names in `like`, and return this process's shards."""
    return {name: local_shard(value, like.get(name)) for name, value in tensors.items()}


def local_shard(value: Any, like: Any) -> Any:
    """Return this process's shard of a tensor, sharded like `like`; the value itself if their shapes differ."""
    if not isinstance(like, DTensor) or not isinstance(value, Tensor) or value.shape != like.shape:
        return value
    return value if isinstance(value, DTensor) else distribute_tensor(value, like.device_mesh, like.placements)


def _gather(value: DTensor) -> Tensor:
    full = value.full_tensor()
    return full.cpu() if torch.distributed.get_rank() == 0 else torch.empty(0)
