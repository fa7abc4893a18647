"""Convert ViT, DeiT, DINO, DINOv2 and CLIP with timm's parameter names, or those of transformers, to `ViT`."""

import re
from typing import Any

from torchrope.checkpoints.published import key_map
from torchrope.checkpoints.published.key_map import FLAT_PATCHES, UNBATCHED, Checkpoint, Extents, Row, State
from torchrope.encodings import Choice, LearnedAPE
from torchrope.models import ACTIVATIONS, ViT

FAMILY = "timm's ViT"
MARKS = (("patch_embed.proj.weight",), ("pos_embed",), ("blocks.0.attn.qkv.weight",))

# Number of heads by dim, for published models whose heads are not 64 wide: timm's so400m, huge, giant and gigantic.
_HEADS = {1152: 16, 1280: 16, 1408: 16, 1664: 16}
_KEYS = (
    Row("patch_embed.proj.weight", "embed.proj.weight", FLAT_PATCHES),
    Row("patch_embed.proj.bias", "embed.proj.bias"),
    Row("cls_token", "prefix_tokens", UNBATCHED, split=(1,), part=0),
    Row("reg_token", "prefix_tokens", UNBATCHED, split=(1,), part=1),
    Row("norm_pre.{}", "embedding_norm.{}"),
    Row("pos_embed", "absolute.table"),
    Row("blocks.{}.norm{}.{}", "layers.{}.norm{}.{}"),
    Row("blocks.{}.attn.{}.{}", "layers.{}.attention.{}.{}"),
    Row("blocks.{}.mlp.fc1.{}", "layers.{}.mlp.0.{}"),
    Row("blocks.{}.mlp.fc2.{}", "layers.{}.mlp.3.{}"),
    Row("norm.{}", "norm.{}"),
    Row("head.{}", "head.{}"),
)
CLIP_TABLE = "embeddings.position_embedding.weight"


def convert(
    state: State, *, num_heads: int | None = None, input_size: Extents = None, activation: str | None = None
) -> ViT:
    """Build a `ViT` with `LearnedAPE`; options and errors as of `load_published`, also from names of transformers."""
    if CLIP_TABLE in state:
        state = {name: value for name, value in state.items() if name != "embeddings.position_ids"}
        state[CLIP_TABLE] = state[CLIP_TABLE].unsqueeze(0)
    source = Checkpoint(FAMILY, state, keys(state))
    is_clip = "norm_pre.weight" in source or CLIP_TABLE in source
    activation = activation or ("quick_gelu" if CLIP_TABLE in source else "gelu")
    source.require(activation in ACTIVATIONS, f"activation must be {' or '.join(ACTIVATIONS)}, got {activation!r}")
    settings, absolute = arguments(source, num_heads=num_heads, input_size=input_size)
    if is_clip:
        settings |= {"embedding_norm": True, "norm_eps": 1e-5}
    settings["activation"] = ACTIVATIONS[activation]
    return source.load(ViT, encoding=Choice(absolute=absolute), share_layers=True, **settings)


def keys(state: State) -> list[Row]:
    """Return the key map of a state dict; DeiT III and rope-vit have other names of layer scales than timm."""
    if CLIP_TABLE in state:
        return key_map.rows_of_clip("", CLIP_TABLE, "classifier")
    if "embeddings.cls_token" in state:
        return _transformers_keys(state)
    scale = "gamma_{}" if "blocks.0.gamma_1" in state else "ls{}.gamma"
    bias = [] if "patch_embed.proj.bias" in state else [Row("", "embed.proj.bias")]  # CLIP has none
    kept = [row for row in _KEYS if not bias or row.ours != bias[0].ours]
    return [*kept, *bias, Row(f"blocks.{{}}.{scale}", "layers.{}.scale{}.factor")]


def _transformers_keys(state: State) -> list[Row]:
    matches = map(re.compile(r"((?:encoder\.)?layers?\.)0\.").match, state)
    layer = next((match[1] for match in matches if match), "") + "{}."
    norms = ("norm1", "norm2") if layer.format(0) + "norm1.weight" in state else ("layernorm_before", "layernorm_after")
    return [
        Row("embeddings.patch_embeddings.projection.weight", "embed.proj.weight", FLAT_PATCHES),
        Row("embeddings.patch_embeddings.projection.bias", "embed.proj.bias"),
        Row("embeddings.cls_token", "prefix_tokens", UNBATCHED, split=(1,), part=0),
        Row("embeddings.register_tokens", "prefix_tokens", UNBATCHED, split=(1,), part=1),
        Row("embeddings.position_embeddings", "absolute.table"),
        *(Row(f"{layer}{norm}.{{}}", f"layers.{{}}.norm{index}.{{}}") for index, norm in enumerate(norms, 1)),
        *key_map.rows_of_layers(layer, "attention", "o_proj"),
        Row("layernorm.{}", "norm.{}"),
        Row("classifier.{}", "head.{}"),
    ]


def arguments(source: Checkpoint, *, num_heads: int | None, input_size: Extents) -> tuple[dict[str, Any], Any]:
    """Infer the arguments of `ViT` from shapes, unless given, and the absolute encoding, None without a table."""
    class_token, registers = source.names("prefix_tokens")
    dim, in_channels, *patch = source.shape(source.names("embed.proj.weight")[0], 4)
    rule = f"{class_token} must be present, because pooling cannot be inferred without it"
    source.require(class_token in source, rule)
    rule = "dist_token must be absent, because models with two classifiers are not supported, got one"
    source.require("dist_token" not in source, rule)
    num_registers = source.shape(registers, 3)[1] if registers in source else 0
    (table,) = source.names("absolute.table")
    # For all prefix tokens or none; in transformers for the class token alone.
    prefix_entries = (1,) if table.startswith("embeddings.") else (0, 1 + num_registers)
    if input_size is None and table not in source:
        input_size = [224 // extent * extent for extent in patch]
    if num_heads is None:
        source.require(dim in _HEADS or dim % 64 == 0, f"num_heads= is required for {dim} channels")
        num_heads = _HEADS.get(dim, dim // 64)
    rule = f"num_heads must divide the {dim} channels of its tokens, got {num_heads}"
    source.require(num_heads >= 1 and dim % num_heads == 0, rule)
    (bias, *_), (scale,) = source.names("layers.0.attention.qkv.bias"), source.names("layers.0.scale1.factor")
    optional = {"qkv_bias": bias in source, "layer_scale": 1.0 if scale in source else None}
    extents = source.training_size(patch, input_size, table, prefix_entries)
    sizes = source.sizes(extents, patch, in_channels, dim, num_heads)
    return {**sizes, **optional, "num_registers": num_registers}, LearnedAPE if table in source else None
