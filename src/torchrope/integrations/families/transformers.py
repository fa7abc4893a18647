"""Models of transformers that `swap` supports: encoders by class, models with RoPE by structure."""

import inspect
import math
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional

from torchrope.integrations import positions as sources
from torchrope.integrations.families import shared
from torchrope.integrations.families.shared import Sizes, head_dim, kind_of, on_map, shape_of
from torchrope.integrations.family import AttentionShape, BuiltInRotation, ModelFamily
from torchrope.integrations.layer import CustomForward, InAttentionInterface, InFunction, Sdpa, inputs_of, kind_of_layer
from torchrope.integrations.own_rotation import OwnRotation, axis_by_axis, exact, geometric, halves, interleaved
from torchrope.integrations.positions import FromArgument, FromLayer, FromPatches, OnLattice, argument
from torchrope.integrations.rebound import names_in, undecorated, with_globals
from torchrope.integrations.rotary import ATTRIBUTE, Replaced, Rotary
from torchrope.lattice import Lattice
from torchrope.positions import grid
from torchrope.rotating import rotate

_TABLES = (
    "pos_embed",
    "position_embedding",
    "position_embeddings",
    "positional_embedding",
    "positional_embedding_vlm",
    "relative_position_bias_table",
)
_POSITION_TABLES = [f"{before}{name}{after}" for name in _TABLES for before in ("", "*.") for after in ("", ".weight")]


def _saving(tower: Any, model: nn.Module, rotary: Rotary) -> list[Replaced]:
    """Save swapped models by `torchrope.save`."""
    from torchrope.integrations.transformers_saving import replace_saving

    rotary.received = _received_by.get(tower, {})
    return replace_saving(model, tower)


def _layers(kind: str, tower: Any) -> list[Any]:
    return [module for module in tower.modules() if kind_of(module) == kind]


def _size(tower: Any) -> tuple[int, ...]:
    """Return the patches along each axis: of the position table, of the configured image size, else 32."""
    config = tower.config
    image, patch = getattr(config, "image_size", None), getattr(config, "patch_size", None)
    count = getattr(config, "num_position_embeddings", None)
    count = count or (image is None and getattr(config, "num_patches", None))  # SigLIP 2
    if count:
        return (math.isqrt(count),) * 2
    return (32, 32) if image is None or patch is None else _lattice(tower, _pair(image))


def _lattice(tower: Any, size: tuple[int, ...]) -> tuple[int, ...]:
    """Return the patches along each axis of an image."""
    patch = _pair(tower.config.patch_size)
    return tuple(extent // step for extent, step in zip(size, patch, strict=True))


def _pair(size: Any) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else tuple(size)


def _num_prefix(special: int, tower: Any) -> int:
    """Return the number of prefix tokens: class tokens and registers."""
    return special + getattr(tower.config, "num_register_tokens", 0)


def _patches(tower: Any, args: tuple[Any, ...], kwargs: dict[str, Any], _: Any) -> OnLattice | None:
    pixels = argument("pixel_values", 0, args, kwargs)
    if pixels is None:  # the encoder raises its own error
        return None
    return pixels.device, _lattice(tower, pixels.shape[-2:])


def _siglip2_patches(tower: Any, args: tuple[Any, ...], kwargs: dict[str, Any], _: Any) -> OnLattice:
    pixels, shapes = argument("pixel_values", 0, args, kwargs), argument("spatial_shapes", 2, args, kwargs)
    rows, columns = shapes.to(pixels.device).unsqueeze(-1).unbind(1)
    number = torch.arange(pixels.shape[1], device=pixels.device)
    return torch.stack([number // columns, number % columns], dim=-1), (rows, columns)


def _kept_patches(tower: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> OnLattice:
    """Place the patches that a ViTMAE did not drop, from the tokens that it kept and the order that restores all."""
    tokens, _, restored = output
    sizes = _lattice(tower, argument("pixel_values", 0, args, kwargs).shape[-2:])
    kept = restored.argsort(dim=1)[:, : tokens.shape[1] - 1]
    return grid(*sizes, device=tokens.device)[kept], sizes


def _dinov3_rotations(tower: Any, layers: Sequence[Any]) -> list[OwnRotation]:
    """Return DINOv3's rotation:  frequencies 2 pi / theta^(4 j / head_dim),  positions of patch centres in [-1, 1]."""
    rope, config = tower.rope_embeddings, tower.config
    bands = 2 * math.pi * exact(shared.with_exact_frequencies(rope, tower._init_weights).inv_freq)
    moves = {"shift": config.pos_embed_shift, "stretch": config.pos_embed_jitter, "rescale": config.pos_embed_rescale}
    lattice = Lattice(2.0, -1.0, 0.5, per="size", **{name: amount for name, amount in moves.items() if amount})
    rotation = OwnRotation(axis_by_axis([bands, bands]), halves(4 * len(bands)), lattice, _num_prefix(1, tower))
    return [rotation] * len(layers)


def _without_tables(tower: Any, layers: Sequence[Any]) -> list[Any]:
    """Return tables of no tokens, with which DINOv3 rotates none and multiplies nothing."""
    return [Replaced(tower.rope_embeddings, "forward", partial(shared.unrotating_tables, (0, layers[0].head_dim)))]


def _encoder(name: str, layers: str = "", special: int = 1, **changed: Any) -> ModelFamily:
    """Return a family of vision encoders: their class, that or names of their attention, and number of class tokens."""
    layers = layers or re.sub("(Vision)?(Model|Backbone)$", "Attention", name)
    defaults: dict[str, Any] = dict(
        layers=layers if "*" in layers else partial(_layers, layers),
        shape=partial(shape_of, _size),
        positions=FromPatches(prefix=partial(_num_prefix, special), locate=_patches),
        intercept=InAttentionInterface(),
        position_tables=_POSITION_TABLES,
        attach=_saving,
    )
    return ModelFamily(f"transformers.*.{name}", **{**defaults, **changed})


_WITH_A_TABLE = (
    *("BeitModel", "Blip2VisionModel", "CLIPVisionModel", "Dinov2Backbone", "Dinov2Model", "InstructBlipVisionModel"),
    *("Dinov2WithRegistersBackbone", "Dinov2WithRegistersModel", "ViTModel"),
)
_LIKE_DINOV3 = ("DINOv3ViTBackbone", "DINOv3ViTModel", "Sapiens2Backbone", "Sapiens2Model")
_DINOV3 = BuiltInRotation(_dinov3_rotations, _without_tables)
_ENCODERS = (
    *map(_encoder, _WITH_A_TABLE),
    *(_encoder(name, rotation=_DINOV3) for name in _LIKE_DINOV3),
    _encoder("DPTModel", "DPTSelfAttention"),
    _encoder("DeiTModel", special=2),
    _encoder("IJepaModel", special=0),
    _encoder("Siglip2VisionModel", positions=FromPatches(locate=_siglip2_patches)),
    _encoder("SiglipVisionModel", special=0),
    _encoder("ViTMAEModel", positions=FromPatches("embeddings", prefix=1, locate=_kept_patches)),
)


def _videomae_size(tower: Any) -> tuple[int, ...]:
    return (tower.config.num_frames // tower.config.tubelet_size, *_size(tower))


def _visible_patches(tower: Any, args: tuple[Any, ...], kwargs: dict[str, Any], patches: Tensor) -> OnLattice:
    masked, sizes = argument("bool_masked_pos", 1, args, kwargs), _videomae_size(tower)
    indices = grid(*sizes, device=patches.device)
    if masked is not None:
        indices = indices.expand(len(patches), -1, -1)[~masked].reshape(len(patches), -1, len(sizes))
    return indices, sizes


def _without_table(tower: Any, model: nn.Module, rotary: Rotary) -> list[Any]:
    """Remove VideoMAE's position table, a tensor and no parameter, unless it is kept."""
    embeddings = tower.embeddings
    zeros = torch.zeros_like(embeddings.position_embeddings)
    removed = [] if rotary.keep_position_tables else [Replaced(embeddings, "position_embeddings", zeros)]
    return [*removed, *_saving(tower, model, rotary)]


def _vjepa2_size(tower: Any) -> tuple[int, ...]:
    config = tower.config
    side = config.crop_size // config.patch_size
    return (config.frames_per_clip // config.tubelet_size, side, side)


def _vjepa2_patches(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> OnLattice:
    tokens, masks = argument("hidden_states", 0, args, kwargs), argument("position_mask", 1, args, kwargs)
    return torch.stack(layer.get_position_ids(tokens, masks=masks), dim=-1), ()


def _vjepa2_rotations(tower: Any, layers: Sequence[Any]) -> list[OwnRotation]:
    rule = "init must not be 'model' for V-JEPA 2, which rotates the two channels of a pair by different angles"
    raise ValueError(f"{rule}; init='zeros' or 'paper' replaces its rotation, keep_rotation=True keeps it, got 'model'")


def _without_vjepa2(tower: Any, layers: Sequence[Any]) -> list[Any]:
    return [Replaced(layer, "apply_rotary_embeddings", _unchanged) for layer in layers]


def _unchanged(x: Tensor, positions: Any) -> Tensor:
    return x


_VIDEO_ENCODERS = (
    _encoder(
        "VideoMAEModel",
        "encoder.layer.*.attention.attention",
        shape=partial(shape_of, _videomae_size),
        positions=FromPatches("embeddings", locate=_visible_patches),
        attach=_without_table,
    ),
    _encoder(
        "VJEPA2Encoder",
        "layer.*.attention",
        shape=partial(shape_of, _vjepa2_size),
        positions=FromLayer(_vjepa2_patches),
        rotation=BuiltInRotation(_vjepa2_rotations, _without_vjepa2),
    ),
)


def _sam_attention(
    layer: Any, swapped: Callable[..., Any], hidden_states: Tensor, output_attentions: bool | None = None
) -> tuple[Tensor, Tensor]:
    """SAM's eager attention with rotated q and k; its bias is computed from q before the rotation."""
    sizes = tuple(hidden_states.shape[1:3])
    projected = layer.qkv(hidden_states).flatten(1, 2).unflatten(-1, (3, layer.num_attention_heads, -1))
    query, key, value = projected.permute(2, 0, 3, 1, 4).unbind(0)  # (batch, heads, tokens, head_dim)
    # Contiguous, as in SAM: matrix products of tensors with other strides round differently.
    rotated, key = swapped(query.contiguous(), key.contiguous())
    scores = (rotated * layer.scale) @ key.transpose(-2, -1)
    if layer.use_rel_pos:
        bias = layer.get_decomposed_rel_pos(query.flatten(0, 1), layer.rel_pos_h, layer.rel_pos_w, sizes, sizes)
        scores = scores + bias.reshape_as(scores)
    weights = scores.softmax(dim=-1, dtype=torch.float32).to(query.dtype)
    mixed = functional.dropout(weights, p=layer.dropout, training=layer.training) @ value
    return layer.proj(mixed.transpose(1, 2).flatten(2).unflatten(1, sizes)), weights.flatten(0, 1)


_SAM: Any = dict(
    shape=partial(shared.sam_shape, _size),
    positions=FromLayer(on_map),
    intercept=lambda layer: Sdpa() if "Sdpa" in kind_of(layer) else CustomForward(_sam_attention),
    position_tables=("pos_embed", "*.rel_pos_h", "*.rel_pos_w"),
)
_SAMS = [_encoder(name, "layers.*.attn", **_SAM) for name in ("SamVisionEncoder", "SamHQVisionEncoder")]

_WINDOWED = ("sliding_attention", "chunked_attention", "hybrid_sliding", "window_attention")
"""Types of layers that see a window of their input."""
# A tower with RoPE is the smallest PreTrainedModel whose attention layers call one of these functions of q, k, cos and
# sin and have a rotary embedding module, which computes cos and sin `(tokens, channels)` from positions.
_LAYOUTS = {
    "apply_rotary_pos_emb": "bhtd",
    "apply_rotary_pos_emb_2d": "bhtd",
    "apply_rotary_pos_emb_vision": "bthd",
    "vision_apply_rotary_emb": "bthd",
}


class _RotaryLayer(NamedTuple):
    """An attention layer, and the rotary embedding module that computes its cosines and sines."""

    layer: Any
    rope: Any
    layer_type: str | None  # if frequencies differ by type (Gemma 3, OLMo 3, ModernBERT)
    has_time: bool  # in a vision tower

    def attribute(self, name: str, *default: Any) -> Any:
        """Return an attribute of the rotary embedding for the layer's type."""
        return getattr(self.rope, name if self.layer_type is None else f"{self.layer_type}_{name}", *default)

    @property
    def family(self) -> str:
        """The family of the tower."""
        if hasattr(self.rope, "freqs_ci"):
            return "llama4"
        function = rotation_function(self.layer).name
        if function == "apply_rotary_pos_emb_2d" and hasattr(self.layer.config, "global_attn_indexes"):
            return "sam3"
        vision = hasattr(self.rope, "recomposition_frequencies") and not getattr(self.layer, "is_causal", False)
        return "vision" if vision else "text"

    @property
    def num_axes(self) -> int:
        """The number of axes of positions."""
        return _num_text_axes(self.rope) if self.family == "text" else 2 + self.has_time


def _pairs(tower: Any) -> list[_RotaryLayer]:
    """Return the attention layers that rotate, by tables that the tower passes to them, else by the nearest ones."""
    parts = _parts(tower)
    layers = {name: layer for name, layer in parts.items() if is_attention(layer)}
    ropes = {name: part for name, part in reversed(parts.items()) if _makes_tables(part)}
    nearest = {name.rpartition(".")[0]: name for name in ropes}
    received = _received(tower, layers, ropes) if layers and ropes else {}
    has_time, pairs = getattr(tower, "include_temporal", False), []
    for name, layer in layers.items():
        parents = [parent for parent in nearest if not parent or name.startswith(f"{parent}.")]
        if not parents:
            return []
        rope, layer_type = received.get(name, (nearest[max(parents, key=len)], None))
        if rope:
            if layer_type is None and not hasattr(ropes[rope], "inv_freq") and not hasattr(ropes[rope], "freqs_ci"):
                layer_type = getattr(layer, "layer_type", None) or layer.config.layer_types[layer.layer_idx]
            pairs.append(_RotaryLayer(layer, ropes[rope], layer_type, has_time))
    return pairs


_received_by: WeakKeyDictionary[Any, dict[str, Any]] = WeakKeyDictionary()


def _received(tower: Any, layers: dict[str, Any], ropes: dict[str, Any]) -> dict[str, Any]:
    """Return the rotary embedding and layer type whose tables each layer receives, "" for a layer that uses none."""
    if hasattr(tower, ATTRIBUTE):  # as found by `swap`
        return tower.rotary.received
    if tower not in _received_by:
        try:
            _received_by[tower] = _run_without_blocks(tower, layers, ropes)
        except Exception:  # of the tower's own code: it takes other inputs, or has no values on the meta device
            _received_by[tower] = {}
    return _received_by[tower]


@torch.no_grad()
def _run_without_blocks(tower: Any, layers: dict[str, Any], ropes: dict[str, Any]) -> dict[str, Any]:
    """Run a text model on three tokens and note the tables that each of its blocks receives, without running them."""
    made: list[Any] = []
    received: dict[str, Any] = {}
    rotates: dict[Any, bool] = {}

    def note(name: str, rope: Any, args: Any, kwargs: dict[str, Any], tables: Any) -> None:
        made.append((tables, name, argument("layer_type", 2, args, kwargs)))

    def skip(block: Any, *args: Any, **kwargs: Any) -> Tensor:
        tables = kwargs["position_embeddings"]
        source = next((source for values, *source in made if values is tables), None)
        tokens: Tensor = args[0] if args else kwargs["hidden_states"]
        for name, layer in layers.items():
            if layer in inside[block] and (source is not None or tables is None):
                kind = (kind_of_layer(layer), tables is None)
                if kind not in rotates:
                    rotates[kind] = tables is not None and _calls_rotation(layer, tokens)
                received[name] = tuple(source or ()) if rotates[kind] else ("", None)
        return tokens

    inside = {block: set(block.modules()) for block in sources.blocks_of(tower, list(layers.values()))}
    handles: list[Any] = [Replaced(block, "forward", partial(skip, block)) for block in inside]
    handles += [rope.register_forward_hook(partial(note, name), with_kwargs=True) for name, rope in ropes.items()]
    try:
        with warnings.catch_warnings(), torch.compiler.set_stance("force_eager"):
            warnings.simplefilter("ignore")
            tokens = torch.ones(1, 3, tower.config.hidden_size, dtype=tower.dtype, device=tower.device)
            mask = tokens.new_zeros(1, 1, 3, 3)  # so that none is made, for which values would be read
            type(tower).forward(tower, inputs_embeds=tokens, attention_mask=mask, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return received


def _calls_rotation(layer: Any, tokens: Tensor) -> bool:
    """Return whether the forward of a layer calls its rotation function; True if it cannot be run."""
    forward = with_globals(undecorated(layer), {rotation_function(layer).name: None})  # a call raises
    try:
        forward(layer, **inputs_of(layer, tokens))
    except Exception:
        return True
    return False


def _parts(tower: Any) -> dict[str, Any]:
    """Return the submodules of a tower by name, without those of other PreTrainedModels inside it."""
    from transformers import PreTrainedModel

    named = dict(tower.named_modules(remove_duplicate=False))
    inner = tuple(f"{name}." for name, part in named.items() if name and isinstance(part, PreTrainedModel))
    return {name: part for name, part in named.items() if not f"{name}.".startswith(inner)}


def is_attention(module: Any) -> bool:
    """Return whether a module is attention that rotates q and k by tables which it receives."""
    is_sized = hasattr(module, "head_dim") or hasattr(module, "head_size")
    if not is_sized or not getattr(module, "use_rope", True) or rotation_function(module) is None:
        return False
    arguments = inspect.signature(undecorated(module)).parameters
    return "position_embeddings" in arguments or "freqs_ci" in arguments


def rotation_function(layer: Any) -> Any:
    """Return the one function of `_LAYOUTS` that a layer calls, as an `InFunction`, or None."""
    called = [name for name in names_in(layer) if name in _LAYOUTS]
    if len(called) != 1 or "cos" in list(inspect.signature(undecorated(layer).__globals__[called[0]]).parameters)[:2]:
        return None  # a function of one tensor, (x, cos, sin), is not supported
    return InFunction(called[0], _LAYOUTS[called[0]])


def _makes_tables(module: nn.Module) -> bool:
    if not any(name.endswith("inv_freq") for name, _ in module.named_buffers(recurse=False)):
        return hasattr(module, "freqs_ci")
    arguments = list(inspect.signature(module.forward).parameters)
    return arguments in (["x", "position_ids"], ["x", "position_ids", "layer_type"])


def _layers_with_rope(family: str, tower: Any) -> list[Any]:
    pairs = _pairs(tower)
    if not pairs or pairs[0].family != family:
        return []
    if hasattr(tower, "class_pos_emb"):
        rule = "swap needs attention that rotates q and k by positions, but MLCD rotates a token by learned angles"
        raise ValueError(f"{rule}; {by_hand(kind_of(pairs[0].layer))}, got {kind_of(tower)}")
    return [pair.layer for pair in pairs]


def _vision_lattice(tower: Any) -> tuple[int, ...]:
    return (*[1] * getattr(tower, "include_temporal", False), *_size(tower))


def _text_lattice(tower: Any) -> tuple[int, ...]:
    """Called for each layer, so it looks for the rotary embedding alone."""
    rope = next(part for part in _parts(tower).values() if _makes_tables(part))
    return (tower.config.max_position_embeddings,) * _num_text_axes(rope)


def _shape(lattice: Sizes, tower: Any, layer: Any) -> AttentionShape:
    """Return the shape of an attention layer, whose lattice does not grow if it sees a window of it."""
    shape, index = shape_of(lattice, tower, layer), getattr(layer, "layer_idx", None)
    if index is None:  # of a vision tower
        name = next(name for name, part in tower.named_modules() if part is layer)
        index = next((int(part) for part in name.split(".") if part.isdecimal()), 0)
    config = vars(getattr(layer, "config", tower.config))
    kinds, full = config.get("layer_types"), getattr(tower, "fullatt_block_indexes", None)
    if full is not None:  # Qwen2.5-VL
        return replace(shape, grows=index in full)
    if kinds and kinds[index] not in _WINDOWED:
        return shape
    window = layer.sliding_window if hasattr(layer, "sliding_window") else config.get("sliding_window")
    return replace(shape, grows=not kinds if window is None else window > shape.lattice[0])


def _num_text_axes(rope: Any) -> int:
    if not hasattr(rope, "recomposition_frequencies"):
        return 1
    sections = getattr(rope, "mrope_section", None)
    return len(sections) if isinstance(sections, list | tuple) else 3  # M-RoPE: time, row, column; HunYuan-VL has 4


def _append_positions(tower: Any) -> list[Any]:
    pairs = _pairs(tower)
    num_axes = pairs[0].num_axes
    append = partial(_append, num_axes, pairs[0].family == "text" and num_axes > 1)
    return [rope.register_forward_hook(append, with_kwargs=True) for rope in dict.fromkeys(pair.rope for pair in pairs)]


def _append(
    num_axes: int, axes_first: bool, rope: Any, args: Any, kwargs: dict[str, Any], tables: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Forward hook of a rotary embedding: append positions to cos as channels, which the model reorders with it."""
    cos, sin = tables
    ids = argument("position_ids", 1, args, kwargs)
    ids = ids.movedim(0, -1) if axes_first else ids
    if num_axes > 1 and ids.shape[-1] != num_axes:
        shape = "(axes, batch, tokens)" if axes_first else "(tokens, axes)"
        rule = f"swap needs position_ids {shape} of {num_axes} axes"
        raise ValueError(f"{rule}, got {tuple(ids.shape)} in {kind_of(rope)}")
    ids = ids.reshape(*cos.shape[:-1], num_axes).to(cos.device, torch.float32)
    return sources.to_bits(torch.cat([cos, ids], dim=-1)), sin


def _appended(received: tuple[Tensor, Tensor], layer: Any, num_text: int) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Return the positions appended to cos, and cos and sin without them."""
    bits, sin = received
    cos, channels = sources.from_bits(bits), sin.shape[-1]
    return cos[..., channels:], (cos[..., :channels].to(sin.dtype), sin)


def _rotations(tower: Any, layers: Sequence[Any]) -> list[OwnRotation]:
    pairs = _pairs(tower)
    ropes = {pair.rope: shared.with_exact_frequencies(pair.rope, tower._init_weights) for pair in pairs}
    return [_rotation(tower, pair._replace(rope=ropes[pair.rope])) for pair in pairs]


def _rotation(tower: Any, pair: _RotaryLayer) -> OwnRotation:
    rope_type = getattr(pair.rope, "rope_type", "default")
    rope_type = rope_type if isinstance(rope_type, str) else rope_type[pair.layer_type]
    if rope_type in ("dynamic", "longrope"):
        rule = "init='model' needs frequencies that are the same at all lengths; init='zeros' replaces others"
        raise ValueError(f"{rule}, got {kind_of(tower)} with rope_type={rope_type!r}")
    scaling = float(pair.attribute("attention_scaling", 1.0))
    if scaling != 1:
        rule = f"init='model' needs rotations without scaling, but rope_type={rope_type!r} also scales q and k"
        hint = "load the model without it and apply YaRN by extend, or replace it by init='zeros'"
        raise ValueError(f"{rule}; {hint}, got {kind_of(tower)} with attention_scaling={scaling:.6g}")
    for rotation in _candidates(pair):
        if _matches(rotation, pair):
            return rotation
    rule = "init='model' reads rotations of pairs of channels by positions times frequencies"
    raise ValueError(f"{rule}, got another of {kind_of(tower)}; init='zeros' and init='paper' replace it")


def _candidates(pair: _RotaryLayer) -> Iterator[OwnRotation]:
    """Yield candidate rotations: one for each channel layout that the tables are consistent with."""
    channels, num_axes = head_dim(pair.layer), pair.num_axes
    if num_axes == 1:
        bands = exact(pair.attribute("inv_freq")).reshape(1, -1)
        table = torch.cat([bands, bands], dim=-1)
    else:  # the angle of each channel at one unit along each axis
        units = torch.eye(num_axes, dtype=torch.float64).unsqueeze(-1) * exact(pair.rope.inv_freq)
        recomposed = pair.rope.recomposition_frequencies(units.unsqueeze(1) if pair.family == "text" else units)
        table = recomposed.reshape(num_axes, -1)
    rotated = table.shape[-1]  # of (axes, rotated channels)
    if rotated > channels:
        return
    for paired in (halves(rotated), interleaved(rotated)):
        first, second = table[:, paired[0::2]], table[:, paired[1::2]]
        if num_axes == 1 or torch.equal(first, second):
            frequencies = bands if num_axes == 1 else first
            yield OwnRotation(frequencies.unsqueeze(1), (*paired, *range(rotated, channels)))


@torch.no_grad()
def _matches(rotation: OwnRotation, pair: _RotaryLayer) -> bool:
    """Return whether a candidate rotation gives the same scores as the layer's function, for random q and k."""
    positions = grid(*[4] * pair.num_axes)
    ids = positions.long()
    if pair.family == "text":
        ids = ids.mT if pair.num_axes == 1 else ids.mT.unsqueeze(1)  # (1, tokens) or (axes, 1, tokens)
    drawn = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, 1, 1, len(positions), head_dim(pair.layer), generator=drawn)
    intercept, device = rotation_function(pair.layer), pair.attribute("inv_freq").device
    function = undecorated(pair.layer).__globals__[intercept.name]
    layer_types = () if pair.layer_type is None else (pair.layer_type,)
    try:
        tables = [table.float().cpu() for table in pair.rope(query.to(device), ids.to(device), *layer_types)]
        if intercept.layout == "bthd":
            theirs = function(query[0].transpose(0, 1), key[0].transpose(0, 1), *tables)
        else:
            theirs = function(query, key, *(table.reshape(1, len(positions), -1) for table in tables))
    except (IndexError, RuntimeError):  # shapes that do not fit: another layout
        return False
    channels = list(rotation.channels)
    ours = rotate(query[..., channels].double(), key[..., channels].double(), rotation.at(positions.double()))
    scores, expected = (q.double().squeeze() @ k.double().squeeze().mT for q, k in (ours, theirs))
    return bool((scores - expected).abs().max() < 1e-4 * expected.abs().max())


def _llama4_rotations(tower: Any, layers: Sequence[Any]) -> list[OwnRotation]:
    pair = _pairs(tower)[0]
    theta, channels = tower.config.rope_parameters["rope_theta"], head_dim(pair.layer)
    frequencies = geometric([channels // 2] * 2, [theta] * 2).flip(0)  # width has the first pairs
    rotation = OwnRotation(frequencies, interleaved(channels), Lattice(origin=1.0))
    rows = shared.with_exact_frequencies(pair.rope, tower._init_weights).freqs_ci[:-1].squeeze(1)
    angles = rotation.lattice(*_size(tower), dtype=torch.float64) @ frequencies.squeeze(1)
    if rows.is_meta or not torch.allclose(rows.cpu(), torch.polar(torch.ones_like(angles), angles).to(rows), atol=1e-3):
        raise ValueError(f"init='model' reads the table that {kind_of(tower)} was built with, got another")
    return [rotation] * len(layers)


_VISION = ModelFamily(
    "transformers.*.PreTrainedModel",
    layers=partial(_layers_with_rope, "vision"),
    shape=partial(_shape, _vision_lattice),
    positions=FromArgument("position_embeddings", _append_positions, _appended, alike=True),
    intercept=rotation_function,
    rotation=BuiltInRotation(_rotations, remove=lambda tower, layers: []),
    position_tables=_POSITION_TABLES,
    attach=_saving,
)
FAMILIES = (
    *_ENCODERS,
    *_VIDEO_ENCODERS,
    *_SAMS,
    _VISION,
    replace(
        _VISION,
        layers=partial(_layers_with_rope, "text"),
        shape=partial(_shape, _text_lattice),
        of_text=True,
        grown=max,  # the three positions of a text token are equal
    ),
    # Positions are in units of a window at every image size.
    replace(
        _VISION,
        layers=partial(_layers_with_rope, "sam3"),
        shape=partial(shape_of, lambda tower: (tower.config.window_size,) * 2, grows=False),
    ),
    replace(  # a complex table of one image size, positions from 1, class token last
        _VISION,
        layers=partial(_layers_with_rope, "llama4"),
        shape=partial(shape_of, _vision_lattice, grows=False),
        positions=FromPatches(suffix=1, locate=_patches),
        rotation=BuiltInRotation(_llama4_rotations, remove=lambda tower, layers: []),
    ),
)


def by_hand(layer: str) -> str:
    """Return the hint how to rotate q and k in a custom attention layer."""
    return f"torchrope.rotate(q, k, rotation, key_rotation=...) in a {layer} of your own takes any positions"
