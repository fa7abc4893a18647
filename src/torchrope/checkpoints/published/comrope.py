"""Convert ComRoPE's checkpoints (Yu et al.), CLIP vision towers with commuting generators, to `ViT`."""

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from torchrope.checkpoints.published.key_map import Checkpoint, Extents, rows_of_clip
from torchrope.encodings import Choice, ComRoPEAP, ComRoPELD, Encoding, LearnedAPE
from torchrope.lattice import Lattice
from torchrope.models import ACTIVATIONS, ViT
from torchrope.positions import grid, prefix

FAMILY = "ComRoPE"
_TABLE = "vision_model.embeddings.position_embedding"
# Of the class token along every axis in ComRoPE's code, here at the origin: all positions are shifted by it, which does
# not change scores, because the generators commute.
_CENTRE = 0.5
_POSITIONS = ("spacing", "range")
_ATTENTION = "vision_model.encoder.layers.{}.self_attn."
_FREQS, _MULTIPLIER = _ATTENTION + "freqs", _ATTENTION + "multiplier"
MARKS = ((_FREQS.format(0), _TABLE), ("vision_model.embeddings.class_embedding",))
_KEYS = rows_of_clip("vision_model.", "embeddings.position_embedding", "classification_head")


def convert(
    state: Mapping[str, Tensor],
    *,
    num_axes: int | None = None,
    input_size: Extents = None,
    activation: str = "quick_gelu",
    positions: str = "spacing",
) -> ViT:
    """Build a `ViT` with `ComRoPELD` if the file has multipliers, with `ComRoPEAP` otherwise."""
    source = Checkpoint(FAMILY, state, _KEYS)
    source.require(activation in ACTIVATIONS, f"activation must be {' or '.join(ACTIVATIONS)}, got {activation!r}")
    source.require(positions in _POSITIONS, f"positions must be {' or '.join(_POSITIONS)}, got {positions!r}")
    freqs = _FREQS.format(0)
    rule = f"{freqs} must be present; files of ComRoPE's raw, none and vanilla-rope lack it and cannot be loaded"
    source.require(freqs in source, rule)
    dim, in_channels, patch, _ = source.shape("vision_model.embeddings.patch_embedding.weight", 4)
    heads = source.shape(freqs, 5)[0]
    source.require(dim % heads == 0, f"its {dim} channels must be divisible by the heads of {freqs}, got {heads}")
    lattice = _lattice(source, patch, num_axes, input_size)
    extents = (1,) * (len(lattice) - 2) + (patch, patch)
    sizes = source.sizes(map(operator.mul, lattice, extents), extents, in_channels, dim, heads)
    encoding, generators = _take_generators(source, len(lattice), dim // heads, sizes["depth"])
    side = lattice[-1]  # the unit of all axes, frames included
    spacing, origin = 1 / side, 0.5 / side - _CENTRE
    if _TABLE in source:
        points = grid(*lattice, spacing=spacing, origin=origin, dtype=torch.float64)
        source.state[_TABLE] = _looked_up(source, points, dim).unsqueeze(0)
    ranged: dict[str, Any] = {"per": -1, "train_sizes": lattice} if positions == "range" else {}
    sizes["positions"] = Lattice(spacing, origin, **ranged)
    encodings = Choice(encoding, LearnedAPE if _TABLE in source else None)
    clip = {"activation": ACTIVATIONS[activation], "norm_eps": 1e-5, "embedding_norm": True}
    return source.load(ViT, generators, encoding=encodings, **clip, **sizes)


def _lattice(source: Checkpoint, patch: int, num_axes: int | None, input_size: Extents) -> tuple[int, ...]:
    """Return the patches along each axis at the training size; an image is square, since all axes share its unit."""
    frames, height, width, _ = source.shape(_TABLE, 4) if _TABLE in source else (1, 1, 1, 1)
    input_axes = len(input_size) if isinstance(input_size, Sequence) else 3 if frames > 1 else 2
    multiplier = _MULTIPLIER.format(0)
    stated = source.shape(multiplier, 5)[1] if multiplier in source else None
    axes = stated or num_axes or input_axes
    fits = axes in (2, 3) and num_axes in (None, axes)
    source.require(fits, f"num_axes must be {stated or '2 or 3'}, got {num_axes or axes}")
    if _TABLE in source:
        source.require(height == width, f"{_TABLE} must be square, got {height} x {width}")
        source.require(input_size is None, f"input_size must be None, because {_TABLE} determines it, got {input_size}")
        source.require(frames == 1 or axes == 3, f"it must have no frames on 2 axes, got {frames}")
        return (frames, height, width)[3 - axes :]
    source.require(input_size is not None, "input_size= is required: the file has no position table")
    rule = "input_size must be (frames, height, width), because the file does not determine the frames"
    source.require(axes == 2 or input_axes == 3, f"{rule}, got {input_size}")
    extents = (1,) * (axes - 2) + (patch, patch)
    sizes = source.training_size(extents, input_size)
    source.require(sizes[-2] == sizes[-1], f"input_size must be square, after frames if any, got {sizes}")
    return tuple(map(operator.floordiv, sizes, extents))


def _take_generators(
    source: Checkpoint, axes: int, head_dim: int, depth: int
) -> tuple[Callable[..., Encoding], list[Tensor]]:
    """Return a function that builds an encoding, and the generators `(axes, heads, blocks, b, b)` of each layer."""
    freqs = _FREQS.format(0)
    heads, per_axis, blocks, b, _ = source.shape(freqs, 5)
    linear = _MULTIPLIER.format(0) in source
    source.require(per_axis == 1, f"its freqs are LieRE's, of {per_axis} axes: their scale_factor is not in the file")
    rule = f"{freqs} must fill heads of {head_dim} channels, got {blocks} blocks of {b}"
    source.require(blocks * b == head_dim, rule)
    rule = f"ComRoPE-AP shares {blocks} blocks among {axes} axes evenly; give num_axes="
    source.require(linear or blocks % axes == 0, rule)
    factors = (torch.arange(blocks) % axes == torch.arange(axes).unsqueeze(1)).double()  # of AP: one axis per block
    factors = factors.reshape(1, axes, blocks, 1, 1)
    generators = []
    for layer in range(depth):
        free = source.take(_FREQS.format(layer), (heads, 1, blocks, b, b)).double()
        if linear:
            factors = source.take(_MULTIPLIER.format(layer), (1, axes, blocks, 1, 1)).double()
        generators.append((factors * (free - free.mT)).movedim(0, 1))
    return partial(ComRoPELD if linear else ComRoPEAP, block_size=b), generators


def _looked_up(source: Checkpoint, points: Tensor, dim: int) -> Tensor:
    """Look up class token and patches `(1 + patches, dim)` as published: a table of two axes at its middle column."""
    # ComRoPE's code passes (0, row, column) to grid_sample, which expects the last axis first.
    table = source.take(_TABLE, (*source.shape(_TABLE, 4)[:3], dim)).double()
    coordinates = 2 * prefix(points, 1)  # the image spans [-1, 1]
    coordinates = functional.pad(coordinates, (3 - coordinates.shape[1], 0))
    volume = table.movedim(-1, 0).unsqueeze(0)  # (1, dim, frames, side, side)
    points = coordinates.reshape(1, 1, 1, -1, 3)
    sampled = functional.grid_sample(volume, points, align_corners=True, padding_mode="border")
    return sampled.reshape(dim, -1).T.float()
