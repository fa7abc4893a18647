"""Primus, nnU-Net's transformer for volumes: an EVA with three axes, of blocks of timm below 1.0.23."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchrope.integrations.family import AttentionShape, BuiltInRotation, ModelFamily
from torchrope.integrations.layer import AfterNorms
from torchrope.integrations.own_rotation import OwnRotation, exact, geometric, interleaved
from torchrope.integrations.positions import FromArgument, to_bits
from torchrope.integrations.rotary import Replaced
from torchrope.lattice import Lattice
from torchrope.positions import prefix


def _head_dim(layer: Any) -> int:
    return int(layer.proj.in_features // layer.num_heads)


def _replace_tables(tower: Any) -> list[Replaced]:
    return [Replaced(tower.rope, "get_embed", partial(_positions, tower.rope))]


def _positions(rope: Any, shape: Any = None) -> Tensor:
    """Return positions of patches `(tokens, axes)` of a lattice, by default the model's, in units of its reference."""
    sizes = tuple(map(int, rope.feat_shape if shape is None else shape))
    reference = sizes if rope.ref_feat_shape is None else rope.ref_feat_shape
    lattice = Lattice(spacing=tuple(map(float, reference)), offset=rope.grid_offset, per="size")
    return to_bits(lattice(*sizes, device=next(rope.buffers()).device))


def _tokens(received: Tensor, layer: Any, num_text: int) -> tuple[Tensor, None]:
    return prefix(received, layer.num_prefix_tokens), None


def _layers(tower: Any) -> list[Any]:
    if tower.rope is None:
        rule = "a Primus must have rotary embeddings to be swapped"
        raise ValueError(f"{rule}, got {type(tower).__name__} built with use_rot_pos_emb=False")
    return [block.attn for block in tower.blocks]


def _shape(tower: Any, layer: Any) -> AttentionShape:
    return AttentionShape(layer.num_heads, _head_dim(layer), tuple(map(int, tower.rope.feat_shape)))


def _rotations(tower: Any, layers: Sequence[Any]) -> list[OwnRotation]:
    """Frequencies temperature^(-j / n) with n = dim / 4 pairs for each axis, one axis after the other."""
    rope = tower.rope
    if rope.in_pixels or rope.grid_indexing != "ij":
        raise ValueError("swap needs a Primus with grid_indexing='ij' and in_pixels=False, got another")
    axes = len(rope.feat_shape)
    frequencies = geometric([rope.dim // 4 * 2] * axes, [rope.temperature] * axes, torch.float32)
    return [OwnRotation(exact(frequencies), interleaved(_head_dim(layers[0])))] * len(layers)


FAMILIES = (
    ModelFamily(
        "dynamic_network_architectures.building_blocks.eva.Eva",
        layers=_layers,
        shape=_shape,
        positions=FromArgument("rope", _replace_tables, _tokens),
        intercept=AfterNorms(),
        rotation=BuiltInRotation(_rotations),
        position_tables=("pos_embed",),
    ),
)
