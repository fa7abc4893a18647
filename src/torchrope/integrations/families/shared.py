"""What model families of several libraries have in common: shapes of attention layers, positions in windows."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from torchrope.integrations.family import AttentionShape
from torchrope.integrations.sources import Placed
from torchrope.positions import grid

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


def on_map(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Placed:
    """Place the tokens of a window, or of a map `(batch, rows, columns, channels)`."""
    tokens = args[0] if args else kwargs["hidden_states"]
    sizes = tuple(layer.window_size if hasattr(layer, "window_size") else tokens.shape[1:3])
    return grid(*sizes, device=tokens.device), sizes


def unrotating_tables(shape: tuple[int, ...], x: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    """Return cos = 1 and sin = 0."""
    return x.new_ones(shape), x.new_zeros(shape)
