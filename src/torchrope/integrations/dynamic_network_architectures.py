"""Swap encodings into Primus, nnU-Net's transformer for volumes, of the package dynamic-network-architectures.

It is an EVA with three axes built from timm's blocks. Its package requires timm below 1.0.23, because later rotary
embeddings of timm reject three axes, so neither is imported here.
"""

from typing import Any

import torch
from torch import Tensor, nn

from torchrope.integrations.rotary import Adapter, Replaced
from torchrope.integrations.tables import Family, OfTables
from torchrope.lattice import Lattice
from torchrope.positions import prefix

_MODULE = "dynamic_network_architectures.building_blocks.eva"


def adapters(model: nn.Module) -> list[Adapter]:
    """Return an adapter for each EVA of a Primus inside a model."""
    return [OfPrimus(module, PRIMUS) for module in model.modules() if _is_eva(module) and module.rope is not None]


def refuse(model: nn.Module) -> None:
    """Raise an error for a Primus that cannot be swapped.

    Raises:
        ValueError: a Primus without rotary embeddings.
    """
    if any(map(_is_eva, model.modules())):
        rule = "a Primus must have rotary embeddings to be swapped"
        raise ValueError(f"{rule}, got {type(model).__name__} built with use_rot_pos_emb=False")


class OfPrimus(OfTables):
    """Adapter for the EVA of a Primus."""

    library = "dynamic-network-architectures"


def _is_eva(module: Any) -> bool:
    return any(base.__module__ == _MODULE and base.__name__ == "Eva" for base in type(module).__mro__)


def _heads(tower: Any) -> tuple[int, int]:
    layer = tower.blocks[0].attn
    return layer.num_heads, layer.proj.in_features // layer.num_heads


def _frequencies(tower: Any) -> Tensor:
    """temperature^(-j / n) with n = dim / 4 pairs for each axis, one axis after the other."""
    rope = tower.rope
    if rope.in_pixels or rope.grid_indexing != "ij":
        raise ValueError("swap needs a Primus with grid_indexing='ij' and in_pixels=False, got another")
    number = rope.dim // 4
    bands = 1.0 / rope.temperature ** (torch.arange(number, dtype=torch.float32, device="cpu") / number)
    return torch.block_diag(*[bands.unsqueeze(0)] * len(rope.feat_shape)).unsqueeze(1)


def _replace_tables(tower: Any) -> list[Replaced]:
    return [Replaced(tower.rope, "get_embed", Voxels(tower.rope).get_embed)]


class Voxels:
    """Replace the tables of a rotary embedding by positions of patches, in units of its reference lattice."""

    def __init__(self, rope: Any) -> None:
        self.rope = rope

    def get_embed(self, shape: Any = None) -> Tensor:
        """Return positions `(tokens, axes)` of a lattice (default: the model's), on the device of its tables."""
        rope = self.rope
        sizes = tuple(map(int, rope.feat_shape if shape is None else shape))
        reference = sizes if rope.ref_feat_shape is None else rope.ref_feat_shape
        lattice = Lattice(spacing=tuple(map(float, reference)), offset=rope.grid_offset, per="size")
        return lattice(*sizes, device=next(rope.buffers()).device)


def _tokens(received: Tensor, layer: Any, others: int) -> Tensor:
    return prefix(received, layer.num_prefix_tokens)


PRIMUS = Family(
    layers=(("blocks", "attn"),),
    heads=_heads,
    frequencies=_frequencies,
    replace_tables=_replace_tables,
    tokens=_tokens,
    argument=("rope", 1),
    norms=("q_norm", "k_norm"),
    heads_first=True,
    lattice=lambda tower: tuple(map(int, tower.rope.feat_shape)),
    tables=lambda tower: [] if tower.pos_embed is None else [tower.pos_embed],
)
"""Rotation of Primus; position tables and the rest of its forward pass are unchanged."""
