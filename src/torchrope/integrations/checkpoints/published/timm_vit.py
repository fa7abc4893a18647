"""Convert checkpoints with timm's ViT parameter names and a position table (ViT, DeiT, DINO, DINOv2) to `ViT`."""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from torchrope.encodings import LearnedAPE, NoEncoding
from torchrope.integrations.checkpoints.published.key_map import (
    Checkpoint,
    Row,
    flat_patches,
    patch_entries,
    pixels,
    without_batch,
)
from torchrope.models import ViT

FAMILY = "timm's ViT"

# Number of heads by dim, for published models whose heads are not 64 wide: timm's so400m, huge, giant and gigantic.
_HEADS = {1152: 16, 1280: 16, 1408: 16, 1664: 16}
_KEYS = (
    Row("patch_embed.proj.weight", "embed.proj.weight", flat_patches),
    Row("patch_embed.proj.bias", "embed.proj.bias"),
    Row("cls_token", "prefix_tokens", without_batch, part=lambda own: own[:1]),
    Row("reg_token", "prefix_tokens", without_batch, part=lambda own: own[1:]),
    Row("pos_embed", "absolute.table", patch_entries),
    Row("blocks.{}.norm{}.{}", "layers.{}.norm{}.{}"),
    Row("blocks.{}.attn.{}.{}", "layers.{}.attention.{}.{}"),
    Row("blocks.{}.mlp.fc1.{}", "layers.{}.mlp.0.{}"),
    Row("blocks.{}.mlp.fc2.{}", "layers.{}.mlp.3.{}"),
    Row("norm.{}", "norm.{}"),
    Row("head.{}", "head.{}"),
)


def recognises(state: Mapping[str, Tensor]) -> bool:
    """Return whether a state dict has a patch embedding, a learned position table and attention blocks."""
    return all(name in state for name in ("patch_embed.proj.weight", "pos_embed", "blocks.0.attn.qkv.weight"))


def convert(
    state: Mapping[str, Tensor],
    *,
    num_heads: int | None = None,
    input_size: int | Sequence[int] | None = None,
) -> ViT:
    """Build a `ViT` with `LearnedAPE`; the table's entry for the class token is added to that token.

    Args:
        state: The checkpoint.
        num_heads: Attention heads; as published by default, 64 channels each for most.
        input_size: Training size, if the patches of the position table are not a square.

    Raises:
        ValueError: a tensor that is missing, unused or of a wrong shape.
    """
    source = Checkpoint(FAMILY, state, keys(state))
    settings = arguments(source, num_heads=num_heads, input_size=input_size)
    return source.load(partial(ViT, encoding=NoEncoding, share_layers=True, **settings))


def keys(state: Mapping[str, Tensor]) -> list[Row]:
    """Return the key map of a state dict; DeiT III and rope-vit have other names of layer scales than timm."""
    scale = "gamma_{}" if "blocks.0.gamma_1" in state else "ls{}.gamma"
    return [*_KEYS, Row(f"blocks.{{}}.{scale}", "layers.{}.scale{}.factor")]


def arguments(
    source: Checkpoint,
    *,
    num_heads: int | None,
    input_size: int | Sequence[int] | None,
    prefix_entries: Sequence[int] | None = None,
) -> dict[str, Any]:
    """Infer the arguments of `ViT` from shapes; num_heads and input_size override the values of the published models.

    Args:
        source: The checkpoint.
        num_heads: Attention heads.
        input_size: Training size.
        prefix_entries: Numbers of entries for prefix tokens that the position table may have; by default none or all.

    Raises:
        ValueError: an unsupported shape, or a number that neither shapes nor options determine.
    """
    class_token, registers = source.names("prefix_tokens")
    dim, in_channels, *patch = source.shape(source.names("embed.proj.weight")[0], 4)
    if class_token not in source:
        rule = f"{class_token} must be present, because pooling cannot be inferred without it"
        raise source.error(f"{rule}, got none")
    if "dist_token" in source:
        raise source.error("dist_token must be absent, because models with two classifiers are not supported, got one")
    num_registers = source.shape(registers, 3)[1] if registers in source else 0
    (table,) = source.names("absolute.table")
    return {
        "input_size": _training_size(source, patch, prefix_entries or (0, 1 + num_registers), input_size),
        "patch_size": tuple(patch),
        "in_channels": in_channels,
        "dim": dim,
        "num_heads": heads_of(source, dim, num_heads),
        "num_registers": num_registers,
        "qkv_bias": source.names("layers.0.attention.qkv.bias")[0] in source,
        "layer_scale": 1.0 if source.names("layers.0.scale1.factor")[0] in source else None,
        "absolute": LearnedAPE if table in source else None,
        **source.depth_and_widths(),
    }


def heads_of(source: Checkpoint, dim: int, num_heads: int | None, *, stated: int | None = None, by: str = "") -> int:
    """Return the number of heads: as stated by a tensor, as given, or as published.

    Raises:
        ValueError: num_heads contradicts the tensor, or does not divide dim.
    """
    heads = stated or num_heads or _HEADS.get(dim)
    if heads is None:
        if dim % 64:
            raise source.error(f"num_heads must be given for {dim} channels, got None")
        heads = dim // 64
    if num_heads not in (None, heads):
        raise source.error(f"num_heads must be {heads}, as in {by}, got {num_heads}")
    if heads < 1 or dim % heads:
        raise source.error(f"num_heads must divide the {dim} channels of its tokens, got {heads}")
    return heads


def _training_size(
    source: Checkpoint, patch: Sequence[int], prefix_entries: Sequence[int], input_size: int | Sequence[int] | None
) -> tuple[int, int]:
    """Return the height and width that the position table or input_size determine, by default 224."""
    (table,) = source.names("absolute.table")
    entries = source.shape(table, 3)[1] if table in source else None
    if input_size is None and entries is None:
        return 224 // patch[0] * patch[0], 224 // patch[1] * patch[1]
    if input_size is None and entries is not None:
        sides = [math.isqrt(max(entries - extra, 0)) for extra in prefix_entries]
        squares = [
            side for side, extra in zip(sides, prefix_entries, strict=True) if side and side**2 + extra == entries
        ]
        if not squares:
            rule = f"input_size must be given, because the {entries} entries of {table} are not a square of patches"
            raise source.error(f"{rule}, got None")
        return squares[0] * patch[0], squares[0] * patch[1]
    assert input_size is not None
    height, width = pixels(source, input_size, patch)
    rows, columns = height // patch[0], width // patch[1]
    if entries is not None and entries - rows * columns not in prefix_entries:
        rule = f"input_size must give {entries} patches, or {entries - prefix_entries[-1]} without prefix tokens"
        raise source.error(f"{rule}, as in {table}, got {rows} x {columns}")
    return height, width
