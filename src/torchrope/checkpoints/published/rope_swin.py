"""Convert Swin checkpoints (Liu et al.) of Microsoft, timm and rope-vit, the latter with frequencies, to `Swin`."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from torchrope.checkpoints.published.key_map import FLAT_PATCHES, MAX_LAYERS, Checkpoint, Extents, Row
from torchrope.encodings import AxialRoPE, Choice, MixedRoPE, NoEncoding, RelativePositionBias
from torchrope.encodings.base import planar
from torchrope.models import Swin

FAMILY = "Swin"
_FIRST = "layers.0.blocks.0"
MARKS = (("patch_embed.proj.weight",), (f"{_FIRST}.attn.qkv.weight",))
_HEAD_DIM = 32  # of every published Swin
_MAX_STAGES = 16
_BUFFERS = r"layers\.\d+\.blocks\.\d+\.(attn_mask|attn\.(relative_position_index|rope_t_[xy]))"  # computed from sizes
_KEYS = (
    Row("patch_embed.proj.weight", "embed.proj.weight", FLAT_PATCHES),
    Row("patch_embed.proj.bias", "embed.proj.bias"),
    Row("patch_embed.norm.{}", "embed_norm.{}"),
    Row("layers.{}.blocks.{}.norm{}.{}", "stages.{}.layers.{}.norm{}.{}"),
    Row("layers.{}.blocks.{}.attn.{}.{}", "stages.{}.layers.{}.attention.{}.{}"),
    Row("layers.{}.blocks.{}.attn.relative_position_bias_table", "stages.{}.biases.{}.table"),
    Row("layers.{}.blocks.{}.mlp.fc1.{}", "stages.{}.layers.{}.mlp.0.{}"),
    Row("layers.{}.blocks.{}.mlp.fc2.{}", "stages.{}.layers.{}.mlp.3.{}"),
    Row("norm.{}", "norm.{}"),
)


def convert(state: Mapping[str, Tensor], *, window_size: int | None = None, input_size: Extents = None) -> Swin:
    """Build a `Swin`: with `RelativePositionBias` for bias tables, with `MixedRoPE` or `AxialRoPE` for frequencies."""
    source = checkpoint(state)
    dim, in_channels, *patch = source.shape("patch_embed.proj.weight", 4)
    stages = range(source.count("layers.", _MAX_STAGES))
    depths = tuple(source.count(f"layers.{stage}.blocks.", MAX_LAYERS // len(stages)) for stage in stages)
    num_heads = tuple(_heads(source, stage, dim * 2**stage) for stage in stages)
    window = _window(source, state.get(f"{_FIRST}.attn.rope_t_x"), window_size)
    if input_size is None:
        last = window * 2 ** (len(stages) - 1)
        input_size = (last * patch[0], last * patch[1])
    frequencies = _take_frequencies(source, dim, depths, num_heads)
    axial = all(map(_is_axial, frequencies))  # those of RoPE-Axial, which rope-vit stores but does not train
    (head,) = source.names("head.weight")
    size, outputs = source.training_size(patch, input_size), source.shape(head, 2)[0] if head in source else 0
    rotary = (AxialRoPE if axial else MixedRoPE) if frequencies else NoEncoding
    has_bias = any(name.endswith(".relative_position_bias_table") for name in state)
    sizes: dict[str, Any] = {"patch_size": tuple(patch), "in_channels": in_channels, "num_outputs": outputs, "dim": dim}
    sizes |= {"depths": depths, "num_heads": num_heads, "window_size": window, "input_size": size}
    sizes["mlp_ratio"] = source.shape(f"{_FIRST}.mlp.fc1.weight", 2)[0] / dim
    encoding = Choice(rotary, bias=RelativePositionBias if has_bias else None)
    sizes["qkv_bias"] = f"{_FIRST}.attn.qkv.bias" in source
    return source.load(Swin, list(map(planar, frequencies)), encoding=encoding, **sizes)


def checkpoint(state: Mapping[str, Tensor]) -> Checkpoint:
    """Return the tensors of a Swin without buffers; Microsoft's merges are at the end of a stage, timm's first."""
    behind = any(name.startswith("layers.0.downsample.") for name in state)
    merging = [
        Row(f"layers.{stage - behind}.downsample.{theirs}.{{}}", f"stages.{stage}.merge.{ours}.{{}}")
        for stage in range(1, _MAX_STAGES)
        for theirs, ours in (("norm", "norm"), ("reduction", "proj"))
    ]
    head = "head.fc" if "head.fc.weight" in state else "head"
    source = Checkpoint(FAMILY, state, [*_KEYS, *merging, Row(head + ".{}", "head.{}")])
    source.drop(_BUFFERS)
    return source


def _heads(source: Checkpoint, stage: int, dim: int) -> int:
    """Return the number of heads of a stage, from its bias table or frequencies, else one per 32 channels."""
    for name, num_dimensions in (("relative_position_bias_table", 2), ("rope_freqs", 3)):
        if f"layers.{stage}.blocks.0.attn.{name}" in source:
            return source.shape(f"layers.{stage}.blocks.0.attn.{name}", num_dimensions)[1]
    return max(dim // _HEAD_DIM, 1)


def _window(source: Checkpoint, columns: Tensor | None, window_size: int | None) -> int:
    """Return the window size w of the first stage, from its bias table of (2 w - 1)^2 entries or its w^2 positions."""
    stated = None if columns is None else math.isqrt(columns.numel())
    if f"{_FIRST}.attn.relative_position_bias_table" in source:
        stated = (math.isqrt(source.shape(f"{_FIRST}.attn.relative_position_bias_table", 2)[0]) + 1) // 2
    rule = f"window_size must be {stated}, as in its tables, got {window_size}"
    source.require(not stated or window_size in (None, stated), rule)
    return stated or window_size or 7


def _take_frequencies(source: Checkpoint, dim: int, depths: Sequence[int], num_heads: Sequence[int]) -> list[Tensor]:
    """Return the frequencies `(2, heads, pairs)` of (height, width) of each layer, empty if there are none."""
    if not any(name.endswith(".rope_freqs") for name in source.state):
        return []
    frequencies = []
    for stage, (depth, heads) in enumerate(zip(depths, num_heads, strict=True)):
        for name in (f"layers.{stage}.blocks.{layer}.attn.rope_freqs" for layer in range(depth)):
            source.shape(name, 3)
            values = source.take(name, (2, heads, dim * 2**stage // heads // 2))
            frequencies.append(values.float().flip(0))  # in the file width is first
    return frequencies


def _is_axial(frequencies: Tensor) -> bool:
    """Return whether all heads have equal frequencies and each pair one axis, up to 1e-6: zeros are cos(π / 2)."""
    shared = bool((frequencies - frequencies[:, :1]).abs().max() < 1e-6)
    return shared and bool((frequencies.abs().min(dim=0).values < 1e-6).all()) and frequencies.shape[2] % 2 == 0
