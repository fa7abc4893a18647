"""Convert LieRE's checkpoints (Ostmeier et al.) with LieRE, RoPE-Mixed, VisionLLaMA's or an absolute encoding."""

import math
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from torchrope.checkpoints.published.key_map import UNBATCHED, Checkpoint, Extents, Row
from torchrope.encodings import Choice, LearnedAPE, LieRE, baselines
from torchrope.lattice import Lattice
from torchrope.models import ViT
from torchrope.positions import PerAxis

FAMILY = "LieRE"
_HEAD_DIM = 64  # of all models of LieRE's code
_PARAMETERS = "position_encoder.generator_raw_params"
_PATCHES = "to_patch_embedding.1.weight"
_VIDEO = ((8, 224, 224), (2, 16, 16))  # input and patch of LieRE's configuration for UCF101
_LAYER = "transformer.layers.{}."
MARKS = ((_PATCHES,), (_LAYER.format(0) + "0.fn.to_qkv.weight",))
_KEYS = (
    Row(_PATCHES, "embed.proj.weight"),
    Row("to_patch_embedding.1.bias", "embed.proj.bias"),
    Row("cls_token", "prefix_tokens", UNBATCHED),
    Row("pos_embedding", "absolute.table"),
    Row(_LAYER + "0.norm.{}", "layers.{}.norm1.{}"),
    Row(_LAYER + "0.fn.to_qkv.{}", "layers.{}.attention.qkv.{}"),
    Row(_LAYER + "0.fn.to_out.0.{}", "layers.{}.attention.proj.{}"),
    Row(_LAYER + "1.norm.{}", "layers.{}.norm2.{}"),
    Row(_LAYER + "1.fn.net.{}.{}", "layers.{}.mlp.{}.{}"),
    Row("mlp_head.0.{}", "norm.{}"),
    Row("mlp_head.1.{}", "head.{}"),
)


def convert(
    state: Mapping[str, Tensor],
    *,
    layers: str | None = None,
    input_size: Extents = None,
    patch_size: Extents = None,
    spacing: PerAxis | None = None,
) -> ViT:
    """Build a `ViT` with `LieRE` for generators, `LearnedAPE` for a table that is not zero, else VisionLLaMA's RoPE."""
    source = Checkpoint(FAMILY, state, _KEYS)
    dim, entries = source.shape(_PATCHES, 2)
    width = source.shape("transformer.layers.0.0.fn.to_qkv.weight", 2)[0] // 3
    rule = f"dim must equal the width of q and be divisible by {_HEAD_DIM}, got {dim} and {width}"
    source.require(width == dim and dim % _HEAD_DIM == 0, rule)
    input_axes = len(input_size) if isinstance(input_size, Sequence) else 2
    axes = source.shape(_PARAMETERS, 5)[0] if _PARAMETERS in source else input_axes
    patch = _patch(source, entries, axes, patch_size)
    if input_size is None and patch == _VIDEO[1]:
        input_size = _VIDEO[0]
    extents = source.training_size(patch, input_size, "pos_embedding", prefix_entries=(1,))
    lattice = [size // extent for size, extent in zip(extents, patch, strict=True)]
    channels_last = source.state[_PATCHES].reshape(dim, *patch, -1)
    source.state[_PATCHES] = channels_last.movedim(-1, 1).flatten(1)
    heads = dim // _HEAD_DIM
    sizes = source.sizes(extents, patch, entries // math.prod(patch), dim, heads)
    source.shape("mlp_head.1.weight", 2)
    learned = bool(source.state["pos_embedding"].any())
    if not learned:
        source.take("pos_embedding", (1, 1 + math.prod(lattice), dim))
    if _PARAMETERS in source:
        source.require(not learned, "pos_embedding must be zero in a file with generators, got other values")
        generators, encoding = _take_generators(source, sizes["depth"], heads, layers)
    else:
        source.require(layers is None, f"layers must be None for a file without generators, got {layers!r}")
        rotary_dim = _HEAD_DIM // (2 * axes) * 2 * axes
        visionllama = partial(baselines.visionllama, rotary_dim=rotary_dim)
        encoding = Choice(absolute=LearnedAPE) if learned else visionllama
        generators = [] if learned else [visionllama(num_axes=axes, num_heads=1, head_dim=_HEAD_DIM).generators()]
    positions = Lattice(tuple(1 / max(n - 1, 1) for n in lattice) if spacing is None else spacing, origin=0.0)
    sizes |= {"positions": positions, "share_layers": len(generators) < 2}
    return source.load(ViT, generators, encoding=encoding, qkv_bias=False, dropout=0.1, norm_eps=1e-5, **sizes)


def _patch(source: Checkpoint, entries: int, num_axes: int, patch_size: Extents) -> tuple[int, ...]:
    """Return the size of a patch: as given, as published for videos, or a square of three channels."""
    side = math.isqrt(entries // 3)
    if patch_size is None:
        fits = [size for size in (_VIDEO[1], (side, side)) if len(size) == num_axes and 3 * math.prod(size) == entries]
        source.require(fits, f"patch_size= is required: {entries} numbers per patch do not determine it")
        patch_size = fits[0]
    patch = (patch_size,) * num_axes if isinstance(patch_size, int) else tuple(patch_size)
    rule = f"patch_size must be {num_axes} numbers that divide {entries}, got {patch}"
    source.require(len(patch) == num_axes and entries % math.prod(patch) == 0, rule)
    return patch


def _take_generators(source: Checkpoint, depth: int, heads: int, layers: str | None) -> tuple[list[Tensor], Any]:
    """Return the generators of each encoding, of which there is one as published, and a function that builds it."""
    rule = f"layers must be 'as published' or 'per layer', got {layers!r}"
    source.require(layers in (None, "as published", "per layer"), rule)
    _, stored, count, b, columns = size = source.shape(_PARAMETERS, 5)
    blocks = _HEAD_DIM // b
    fits = columns == b >= 2 and blocks and stored in (1, depth) and count in (blocks, blocks * heads)
    rule = f"{_PARAMETERS} must be (axes, 1 or {depth}, blocks or blocks x {heads} heads, b, b), got {size}"
    source.require(fits, rule)
    upper = source.take(_PARAMETERS, size).float().triu(1)
    by_layer = (upper - upper.mT).unflatten(2, (-1, blocks)).unbind(1)  # heads before blocks
    if stored > 1 and layers is None:
        warnings.warn(
            f"the file has generators for {stored} layers, but LieRE's code uses those of layer 0 in all layers, as is "
            "done here; pass layers='as published' to silence this, layers='per layer' to use them all",
            stacklevel=5,
        )
    build = partial(LieRE, block_size=b, rotary_dim=blocks * b, shared_heads=count == blocks)
    return list(by_layer if layers == "per layer" else by_layer[:1]), build
