"""Models of timm that `swap` supports."""

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from torchrope.integrations.families import shared
from torchrope.integrations.families.shared import kind_of, on_map, shape_of
from torchrope.integrations.family import AttentionShape, BuiltInRotation, ModelFamily, adapters
from torchrope.integrations.layer import AfterNorms, AfterSplit, Sdpa
from torchrope.integrations.own_rotation import OwnRotation, axis_by_axis, exact, halves, interleaved
from torchrope.integrations.positions import FromLayer, FromPatches, OnLattice
from torchrope.integrations.rotary import ATTRIBUTE, FrozenParameters, Replaced, Rotary
from torchrope.lattice import Lattice
from torchrope.models.layers import encoding_parameters

# Attention layers that apply q_norm, then k_norm, to (batch, heads, tokens, head_dim).
_NORMED = ("Attention", "AttentionRope", "EvaAttention", "Gemma4Attention", "ParallelScalingBlock")
_TOKENS_FIRST = ("Gemma4Attention", "ParallelScalingBlock")  # to (batch, tokens, heads, head_dim)
_PREFIX = "num_prefix_tokens"


def _normed_layers(tower: Any) -> list[Any]:
    layers = []
    for index, block in enumerate(tower.blocks):
        inside = [module for module in block.modules() if kind_of(module) in _NORMED]
        if not inside:
            rule = "swap needs attention with separate norms of q and k"
            raise ValueError(f"{rule}, got {kind_of(block)} as block {index}")
        layers.extend(inside)
    return layers


def _grid_size(tower: Any) -> tuple[int, ...]:
    return tuple(tower.patch_embed.grid_size)


def _patches(tower: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tokens: Tensor) -> OnLattice:
    return tokens.device, tower.patch_embed.dynamic_feat_size(tuple(args[0].shape[-2:]))


def _naflex_size(tower: Any) -> tuple[int, ...]:
    return tuple(tower.embeds.pos_embed_grid_size or (16, 16))  # timm's default


def _naflex_patches(tower: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: tuple[Tensor, Any]) -> OnLattice:
    tokens, sizes = output
    coordinates = kwargs.get("patch_coord")
    return (tokens.device, tuple(sizes)) if coordinates is None else _sized(coordinates)


def _gemma_size(tower: Any) -> tuple[int, ...]:
    size = (getattr(tower, "pretrained_cfg", None) or {}).get("input_size", (3, 768, 768))  # timm's default
    return tuple(extent // patch for extent, patch in zip(size[1:], tower.patch_size, strict=True))


def _gemma_patches(tower: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> OnLattice:
    return _sized(args[1].flip(-1))  # (x, y) in its rotary embedding


def _sized(coordinates: Tensor) -> OnLattice:
    """Return coordinates `(batch, tokens, axes)` with the lattice sizes `(batch, 1)` that they span."""
    return coordinates, [axis.amax(dim=-1, keepdim=True) + 1 for axis in coordinates.unbind(-1)]


_NORMALIZED: dict[str, Any] = {"separate": "size", "max": "longest", "min": "shortest"}


def _rotations(tower: Any, layers: Sequence[Any]) -> list[OwnRotation]:
    """Return the rotations by the rotary embedding of the model, or of each layer of a SAM."""
    prefix = getattr(tower, _PREFIX, 0)  # SAM has no class token
    ropes = [_recomputed(getattr(layer, "rope", None) or tower.rope) for layer in layers]
    return [_rotation(ropes[index], layer, index, prefix) for index, layer in enumerate(layers)]


def _recomputed(rope: Any) -> Any:
    """Return a rotary embedding of timm with exact buffers, if its class can compute them."""
    recompute = getattr(type(rope), "init_non_persistent_buffers", None)
    return rope if recompute is None else shared.with_exact_frequencies(rope, recompute)


def _gemma_rotations(tower: Any, layers: Sequence[Any]) -> list[OwnRotation]:
    """Width first, pairs across halves of the channels of each axis."""
    frequencies = axis_by_axis([exact(_recomputed(tower.rotary_emb).inv_freq)] * 2).flip(0)
    return [OwnRotation(frequencies, halves(layer.head_dim, parts=2)) for layer in layers]


def _rotation(rope: Any, layer: Any, index: int, num_prefix: int) -> OwnRotation:
    """Return the rotation of a layer by a rotary embedding of timm; ValueError for an unsupported one."""
    kinds = {base.__name__ for base in type(rope).__mro__}
    if "RotaryEmbeddingMixed" in kinds:  # frequencies of each layer
        frequencies = exact(rope.freqs[:, index])  # (axes, heads, pairs)
    elif "RotaryEmbeddingCat" in kinds:
        frequencies = axis_by_axis([exact(rope.bands)] * 2)
    elif "RotaryEmbeddingDinoV3" in kinds:
        frequencies = axis_by_axis([2 * math.pi / exact(rope.periods)] * 2)
    elif "RotaryEmbeddingMRope" in kinds:  # axis 0 is time, where all tokens are at 0
        bands, axis = exact(rope.inv_freq), rope.axis.cpu()
        frequencies = torch.stack([bands * (axis == 1), bands * (axis == 2)]).unsqueeze(1)
    else:
        supported = "RotaryEmbeddingCat, RotaryEmbeddingDinoV3, RotaryEmbeddingMixed or RotaryEmbeddingMRope"
        raise ValueError(f"init='model' reads timm's {supported}, got {kind_of(rope)}")
    if rope.grid_indexing == "xy":  # axes in reverse order
        frequencies = frequencies.flip(0)
    paired = halves if getattr(layer, "rotate_half", False) else interleaved
    return OwnRotation(frequencies, paired(layer.head_dim), _lattice(rope), num_prefix)


def _lattice(rope: Any) -> Lattice:
    """Return the token positions of a rotary embedding of timm."""
    kind = getattr(rope, "grid_type", "centered" if hasattr(rope, "normalize_coords") else "index")
    offset, reference = getattr(rope, "grid_offset", 0.0), getattr(rope, "ref_feat_shape", None)
    if reference is not None and kind != "index":
        raise ValueError(f"init='model' needs grid_type='index' with ref_feat_shape, got grid_type={kind!r}")
    if kind == "centered":
        lattice = Lattice(2.0, -1.0, 0.5 + offset, per=_NORMALIZED[rope.normalize_coords])
    elif kind == "pixel":
        lattice = Lattice(2.0, -1.0, per="steps")
    elif reference is not None:
        lattice = Lattice(tuple(map(float, reference)), offset=offset, per="size")
    else:
        lattice = Lattice(offset=offset)
    shift, stretch, rescale = (getattr(rope, f"{name}_coords", None) for name in ("shift", "jitter", "rescale"))
    return replace(lattice, shift=shift or 0.0, stretch=stretch or 1.0, rescale=rescale or 1.0)


def _without_rope(tower: Any, layers: Sequence[Any]) -> list[Any]:
    """Make a model compute no tables, and freeze the frequencies, which are then unused."""
    frozen = FrozenParameters(tower, list(tower.rope.parameters()))
    owners = {"get_embed": tower.rope, "_generate_rope_naflex": tower}
    return [frozen, *(Replaced(owner, name, _no_table) for name, owner in owners.items() if hasattr(owner, name))]


def _no_table(*args: Any, **kwargs: Any) -> None:
    return None


def _without_angles(tower: Any, layers: Sequence[Any]) -> list[Any]:
    return [Replaced(tower.rotary_emb, "forward", partial(shared.unrotating_tables, (1, 1, layers[0].head_dim)))]


def _has_rope(tower: Any) -> bool:
    return any(getattr(tower, name, None) is not None for name in ("rope", "rope_global"))


def _optimised(tower: Any, model: nn.Module, rotary: Rotary) -> list[Replaced]:
    """Extend `no_weight_decay` and `group_matcher`, which timm's optimisers call, to the encodings."""
    handles = [Replaced(tower, "no_weight_decay", partial(no_weight_decay, tower))]
    if hasattr(type(tower), "group_matcher"):
        handles.append(Replaced(tower, "group_matcher", partial(group_matcher, tower)))
    return handles


def no_weight_decay(tower: Any) -> set[str]:
    """Return the names without weight decay: those of the tower's class, if any, and parameters of encodings."""
    of_class = getattr(type(tower), "no_weight_decay", None)
    return {*(of_class(tower) if of_class is not None else ()), *encoding_parameters(tower)}


def group_matcher(tower: Any, coarse: bool = False) -> dict[str, Any]:
    """Return timm's regular expressions that group parameters by depth, each encoding in the group of its layer."""
    names = {module: name for name, module in tower.named_modules()}
    layers = [names[layer] for layer in adapters(tower)[0].layers][: len(tower.rotary.encodings)]
    groups: dict[str, Any] = {}
    for group, rules in type(tower).group_matcher(tower, coarse).items():
        groups[group] = [(rules, None)] if isinstance(rules, str) else list(rules or ())
        for index, layer in enumerate(layers):
            matches = ((re.match(rule, f"{layer}."), suffix) for rule, suffix in groups[group])
            depth = next(((*match.groups(), *(suffix or ())) for match, suffix in matches if match), None)
            if depth is not None:
                groups[group].append((rf"^{ATTRIBUTE}\.encodings\.{index}\.", tuple(map(int, depth))))
    return groups


_TOKENS = ModelFamily(
    "timm.*.VisionTransformer",
    layers=_normed_layers,
    shape=partial(shape_of, _grid_size),
    positions=FromPatches("patch_embed", prefix=_PREFIX, drop="patch_drop", locate=_patches),
    intercept=lambda layer: AfterNorms(layout="bthd" if kind_of(layer) in _TOKENS_FIRST else "bhtd"),
    rotation=BuiltInRotation(_rotations, _without_rope, _has_rope),
    position_tables=("pos_embed",),
    attach=_optimised,
)
_WINDOWS = replace(
    _TOKENS,
    layers="layers.*.blocks.*.attn",
    shape=lambda _, layer: AttentionShape(layer.num_heads, shared.head_dim(layer), tuple(layer.window_size)),
    positions=FromLayer(on_map),
    intercept=AfterSplit(),
    rotation=None,
)
FAMILIES = (
    _TOKENS,
    replace(_TOKENS, model="timm.*.Eva"),
    replace(
        _TOKENS,
        model="timm.*.Beit",
        layers="blocks.*.attn",
        intercept=AfterSplit(),
        rotation=None,
        position_tables=("pos_embed", "*relative_position_bias_table"),
    ),
    replace(_TOKENS, model="timm.*.Qwen3VitEncoder"),
    replace(_TOKENS, model="timm.*.DeepseekVitEncoder"),
    replace(
        _TOKENS,
        model="timm.*.Gemma4VitEncoder",
        shape=partial(shape_of, _gemma_size),
        positions=FromPatches("rotary_emb", prefix=_PREFIX, drop="patch_drop", locate=_gemma_patches),
        rotation=BuiltInRotation(_gemma_rotations, _without_angles),
        position_tables=("patch_embed.position_embedding_table",),
    ),
    replace(
        _TOKENS,
        model="timm.*.NaFlexVit",
        shape=partial(shape_of, _naflex_size),
        positions=FromPatches("embeds", prefix=_PREFIX, drop="patch_drop", locate=_naflex_patches),
        position_tables=("embeds.pos_embed", "embeds.pos_embed_y", "embeds.pos_embed_x"),
    ),
    replace(_WINDOWS, model="timm.*.SwinTransformer", position_tables=("*attn.relative_position_bias_table",)),
    # The bias of V2, whose last layer is zero, is constant.
    replace(_WINDOWS, model="timm.*.SwinTransformerV2", position_tables=("*attn.cpb_mlp.2.weight",)),
    replace(
        _TOKENS,
        model="timm.*.VisionTransformerSAM",
        layers="blocks.*.attn",
        shape=partial(shared.sam_shape, _grid_size),
        positions=FromLayer(on_map),
        intercept=Sdpa(),
        rotation=BuiltInRotation(
            _rotations, lambda tower, layers: [Replaced(layer, "rope", None) for layer in layers], _has_rope
        ),
        position_tables=("pos_embed", "*attn.rel_pos_h", "*attn.rel_pos_w"),
    ),
)
