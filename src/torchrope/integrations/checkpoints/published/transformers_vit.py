"""Convert parameters of the ViT and DINOv2 of transformers to `ViT`, for `inflate`."""

import re
from collections.abc import Mapping, Sequence
from functools import partial

from torch import Tensor

from torchrope.encodings import NoEncoding
from torchrope.integrations.checkpoints.published import timm_vit
from torchrope.integrations.checkpoints.published.key_map import (
    Checkpoint,
    Row,
    flat_patches,
    patch_entries,
    separate_qkv,
    without_batch,
)
from torchrope.models import ViT

FAMILY = "transformers' ViT"


def convert(state: Mapping[str, Tensor], *, num_heads: int, input_size: int | Sequence[int]) -> ViT:
    """Build a `ViT` with `LearnedAPE`, whose table in transformers has one entry for prefix tokens, the class token's.

    Args:
        state: Parameters of the tower, and those of a classifier after "classifier.".
        num_heads: Attention heads.
        input_size: Training size.

    Raises:
        ValueError: a tensor that is missing, unused or of a wrong shape.
    """
    source = Checkpoint(FAMILY, state, _keys(state))
    source.drop(r"pooler\..*|embeddings\.mask_token")
    settings = timm_vit.arguments(source, num_heads=num_heads, input_size=input_size, prefix_entries=(1,))
    return source.load(partial(ViT, encoding=NoEncoding, share_layers=True, **settings))


def _keys(state: Mapping[str, Tensor]) -> list[Row]:
    layers = next((found[1] for found in map(re.compile(r"((?:encoder\.)?layers?\.)0\.").match, state) if found), "")
    layer = layers + "{}."
    norms = ("norm1", "norm2") if f"{layers}0.norm1.weight" in state else ("layernorm_before", "layernorm_after")
    return [
        Row("embeddings.patch_embeddings.projection.weight", "embed.proj.weight", flat_patches),
        Row("embeddings.patch_embeddings.projection.bias", "embed.proj.bias"),
        Row("embeddings.cls_token", "prefix_tokens", without_batch, part=lambda own: own[:1]),
        Row("embeddings.register_tokens", "prefix_tokens", without_batch, part=lambda own: own[1:]),
        Row("embeddings.position_embeddings", "absolute.table", patch_entries),
        Row(f"{layer}{norms[0]}.{{}}", "layers.{}.norm1.{}"),
        Row(f"{layer}{norms[1]}.{{}}", "layers.{}.norm2.{}"),
        *separate_qkv(layer + "attention.?_proj.{}"),
        Row(layer + "attention.o_proj.{}", "layers.{}.attention.proj.{}"),
        Row(layer + "layer_scale{}.lambda1", "layers.{}.scale{}.factor"),
        Row(layer + "mlp.fc1.{}", "layers.{}.mlp.0.{}"),
        Row(layer + "mlp.fc2.{}", "layers.{}.mlp.3.{}"),
        Row("layernorm.{}", "norm.{}"),
        Row("classifier.{}", "head.{}"),
    ]
