"""What model families of several libraries have in common: shapes of attention layers, positions, lost buffers."""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from torchrope.integrations.family import AttentionShape
from torchrope.integrations.positions import OnLattice
from torchrope.tensors import is_narrow

Sizes = Callable[[Any], tuple[int, ...]]
"""Function of a model that returns the tokens along each axis at the size it was built for."""


def kind_of(module: Any) -> str:
    """Return the name of a module's class."""
    return type(module).__name__


def shape_of(lattice: Sizes, tower: Any, layer: Any, *, grows: bool = True) -> AttentionShape:
    """Return the shape of an attention layer in a model with a lattice."""
    return AttentionShape(num_heads(layer), head_dim(layer), lattice(tower), grows)


def sam_shape(lattice: Sizes, tower: Any, layer: Any) -> AttentionShape:
    """Return the shape of an attention layer of a SAM: of a window, if its block has one."""
    blocks = tower.blocks if hasattr(tower, "blocks") else tower.layers
    window = next(block.window_size for block in blocks if block.attn is layer)
    shape = shape_of(lattice, tower, layer)
    return replace(shape, lattice=(window, window), grows=False) if window else shape


def num_heads(layer: Any) -> int:
    """Return the number of key heads of a layer."""
    if hasattr(layer, "num_kv_heads"):  # Falcon repeats them in one of its forms
        return int(layer.num_heads if getattr(layer, "new_decoder_architecture", False) else layer.num_kv_heads)
    if hasattr(layer, "num_key_value_heads"):  # JetMoE repeats them in another way than by groups
        return int(layer.num_key_value_heads)
    heads = next((getattr(layer, name) for name in ("num_heads", "num_attention_heads") if hasattr(layer, name)), None)
    return int((heads or layer.config.num_attention_heads) // getattr(layer, "num_key_value_groups", 1))


def head_dim(layer: Any) -> int:
    """Return the channels of a head that are passed to the rotation; Phi passes the rotated ones only."""
    names = ("head_size", "rotary_ndims", "attention_head_size", "head_dim")
    dim = next((getattr(layer, name) for name in names if hasattr(layer, name)), None)
    return int(layer.qkv.out_features // (3 * num_heads(layer)) if dim is None else dim)


def on_map(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> OnLattice:
    """Place the tokens of a window, or of a map `(batch, rows, columns, channels)`."""
    tokens = args[0] if args else kwargs["hidden_states"]
    return tokens.device, tuple(layer.window_size if hasattr(layer, "window_size") else tokens.shape[1:3])


def unrotating_tables(shape: tuple[int, ...], x: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    """Return cos = 1 and sin = 0."""
    return x.new_ones(shape), x.new_zeros(shape)


def with_exact_frequencies(rope: Any, recompute: Callable[[Any], object]) -> Any:
    """Return a rotary embedding, or a float32 copy with buffers as at construction if they were rounded or are meta."""
    buffers = dict(rope.named_buffers(recurse=False))
    lost = {name: buffer for name, buffer in buffers.items() if is_narrow(buffer) or buffer.is_meta}
    if not lost or any(parameter.is_meta for parameter in rope.parameters()):
        return rope
    again = copy.deepcopy(rope)
    again = (again.to_empty(device="cpu") if any(buffer.is_meta for buffer in lost.values()) else again).float()
    with torch.no_grad():
        for name, buffer in lost.items():
            has_nan = buffer.is_floating_point() or buffer.is_complex()
            again.get_buffer(name).fill_(torch.nan if has_nan else 0)
        recompute(again)
    same = all(
        again.get_buffer(name).isfinite().all() if buffer.is_meta else again.get_buffer(name).to(buffer).equal(buffer)
        for name, buffer in lost.items()
    )
    return again if same else rope  # not those of the configuration: changed since, or of a class without base
