"""Read the built-in rotations of timm's models from its rotary embedding modules."""

import math
from typing import Any

import torch
from timm.layers import RotaryEmbeddingCat, RotaryEmbeddingDinoV3, RotaryEmbeddingMixed, RotaryEmbeddingMRope
from torch import Tensor

from torchrope.integrations.own_rotation import OwnRotation, exact, halves, interleaved, with_exact_frequencies
from torchrope.lattice import Lattice

_GRIDS: dict[str, dict[str, Any]] = {
    "index": {},
    "pixel": {"spacing": 2.0, "origin": -1.0, "per": "steps"},
    "centered": {"spacing": 2.0, "origin": -1.0, "offset": 0.5},
}
_NORMALIZED = {"separate": "size", "max": "longest", "min": "shortest"}


def own_rotation(rope: Any, layer: Any, index: int, num_prefix: int) -> OwnRotation:
    """Return the built-in rotation of a layer of timm.

    Args:
        rope: The rotary embedding of the model.
        layer: The attention layer, which determines how channels are paired.
        index: Index of the layer; RoPE-Mixed has frequencies per layer.
        num_prefix: Leading tokens that are not rotated.

    Raises:
        ValueError: an unsupported rotary embedding, or one on the meta device.
    """
    if any(tensor.is_meta for tensor in (*rope.parameters(), *rope.buffers())):
        raise ValueError("init='model' reads the model's frequencies, got a model on the meta device")
    kind = type(rope)
    if issubclass(kind, RotaryEmbeddingMixed):
        frequencies = _in_order(exact(rope.freqs[:, index]), rope)  # (axes, heads, pairs)
    elif issubclass(kind, RotaryEmbeddingCat):
        frequencies = _in_order(_one_after_the_other(exact(rope.bands)), rope)
    elif issubclass(kind, RotaryEmbeddingDinoV3):
        frequencies = _in_order(_one_after_the_other(2 * math.pi / exact(rope.periods)), rope)
    elif issubclass(kind, RotaryEmbeddingMRope):  # axis 0 is time, where all tokens are at 0
        of_axis = torch.stack([rope.axis == 1, rope.axis == 2]).cpu()
        frequencies = (exact(rope.inv_freq) * of_axis).unsqueeze(1)
    else:
        supported = "RotaryEmbeddingCat, RotaryEmbeddingDinoV3, RotaryEmbeddingMixed or RotaryEmbeddingMRope"
        raise ValueError(f"init='model' reads timm's {supported}, got {kind.__name__}")
    paired = halves if getattr(layer, "rotate_half", False) else interleaved
    return OwnRotation(frequencies, paired(layer.head_dim), _lattice(rope), num_prefix)


def gemma_rotation(rope: Any, layer: Any) -> OwnRotation:
    """Return the rotation of a layer of Gemma 4: width first, pairs across halves of the channels of each axis."""
    rope = with_exact_frequencies(rope, lambda again: again.init_non_persistent_buffers())
    frequencies = _one_after_the_other(exact(rope.inv_freq)).flip(0)
    return OwnRotation(frequencies, halves(layer.head_dim, parts=2))


def _lattice(rope: Any) -> Lattice:
    """Return the token positions of a rotary embedding of timm."""
    dinov3 = isinstance(rope, RotaryEmbeddingDinoV3)
    kind = "centered" if dinov3 else getattr(rope, "grid_type", "index")
    settings = dict(_GRIDS[kind])
    if kind == "centered":
        settings["per"] = _NORMALIZED[rope.normalize_coords]
    if kind != "pixel":
        settings["offset"] = settings.get("offset", 0.0) + getattr(rope, "grid_offset", 0.0)
    reference = getattr(rope, "ref_feat_shape", None)
    if reference is not None:
        if kind != "index":
            raise ValueError(f"init='model' needs grid_type='index' with ref_feat_shape, got grid_type={kind!r}")
        settings |= {"spacing": tuple(map(float, reference)), "per": "size"}
    jitter = {"shift": rope.shift_coords, "stretch": rope.jitter_coords, "rescale": rope.rescale_coords}
    return Lattice(**settings, **{name: amount for name, amount in jitter.items() if amount is not None})


def _in_order(frequencies: Tensor, rope: Any) -> Tensor:
    """Return axes in the order (height, width); "xy" has them reversed."""
    return frequencies.flip(0) if rope.grid_indexing == "xy" else frequencies


def _one_after_the_other(bands: Tensor) -> Tensor:
    """Return frequencies `(2, 1, 2 bands)` of two axes with the same bands, all pairs of the first axis first."""
    return torch.block_diag(bands, bands).unsqueeze(1)
