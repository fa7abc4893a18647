"""Adapters of `swap` for transformers' vision encoders that call attention through AttentionInterface.

Rotations are passed as a keyword argument from the encoder to the attention of each layer, so that layers recomputed by
gradient checkpointing use those of their own forward pass.
"""

import math
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.modeling_outputs import BaseModelOutput
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from torchrope.integrations.own_rotation import OwnRotation, exact, halves, with_exact_frequencies
from torchrope.integrations.rotary import ATTRIBUTE, Adapter, OrderedRotation, Replaced, Rotary, Site
from torchrope.integrations.transformers_saving import own_saving
from torchrope.lattice import Lattice
from torchrope.positions import grid

# Each vision tower and its attention layers, by the names of their classes: importing them all takes seconds.
_ATTENTION = {
    "BeitModel": "BeitAttention",
    "Blip2VisionModel": "Blip2Attention",
    "CLIPVisionModel": "CLIPAttention",
    "DPTModel": "DPTSelfAttention",
    "DeiTModel": "DeiTAttention",
    "DINOv3ViTBackbone": "DINOv3ViTAttention",
    "DINOv3ViTModel": "DINOv3ViTAttention",
    "Dinov2Backbone": "Dinov2Attention",
    "Dinov2Model": "Dinov2Attention",
    "Dinov2WithRegistersBackbone": "Dinov2WithRegistersAttention",
    "Dinov2WithRegistersModel": "Dinov2WithRegistersAttention",
    "IJepaModel": "IJepaAttention",
    "InstructBlipVisionModel": "InstructBlipAttention",
    "Siglip2VisionModel": "Siglip2Attention",
    "SiglipVisionModel": "SiglipAttention",
    "ViTMAEModel": "ViTMAEAttention",
    "ViTModel": "ViTAttention",
}
# Number of prefix tokens besides registers, if it is not 1 (a class token).
_NUM_PREFIX = {"DeiTAttention": 2, "IJepaAttention": 0, "Siglip2Attention": 0, "SiglipAttention": 0}
_WITHOUT_ARGUMENTS = ("Siglip2Attention", "SiglipAttention")  # do not pass further arguments to the attention function
_TABLES = ("position_embedding", "position_embeddings", "relative_position_bias_table")

NAME = "torchrope"
"""Name under which `attend` is registered with AttentionInterface."""

_ARGUMENT = "torchrope_rotations"


def towers(model: nn.Module) -> list[Adapter]:
    """Return an adapter for each vision encoder of `_ATTENTION` inside a model."""
    return [OfTower(module, model) for module in model.modules() if _attention_class(module) is not None]


class OfTower(Adapter):
    """Adapter for a vision encoder: rotations are passed as an argument to the attention of each layer."""

    def __init__(self, tower: nn.Module, model: nn.Module) -> None:
        super().__init__(tower)
        self.model = model

    def sites(self) -> list[Site]:
        config = self.tower.config
        head_dim, lattice = config.hidden_size // config.num_attention_heads, _lattice_built_for(self.tower)
        return [Site(config.num_attention_heads, head_dim, lattice) for _ in self.attention_layers()]

    def tables(self) -> list[nn.Parameter]:
        named = self.tower.named_parameters()
        return [table for name, table in named if name.removesuffix(".weight").rpartition(".")[2] in _TABLES]

    def rotates(self) -> bool:
        return hasattr(self.tower, "rope_embeddings")

    def own_rotations(self) -> list[OwnRotation]:
        rotation = dinov3_rotation(self.tower)
        return [rotation for _ in self.attention_layers()]

    def attach(self, rotary: Rotary) -> None:
        handles: list[Any] = rotary.handles
        handles.append(self.tower.register_forward_pre_hook(add_rotations, with_kwargs=True))
        for index, layer in enumerate(self.attention_layers()):
            handles.append(Replaced(layer, "config", RotatedConfig(layer, rotary.of_layer(index))))
            if _attention_class(self.tower) in _WITHOUT_ARGUMENTS:
                handles.append(layer.register_forward_pre_hook(pack_rotations, with_kwargs=True))
        if _attention_class(self.tower) == "DPTSelfAttention":
            handles.append(Replaced(self.tower.encoder, "forward", partial(run_layers, self.tower.encoder)))
        if self.rotates() and not rotary.keep_rotation:
            handles.append(self.tower.rope_embeddings.register_forward_hook(empty_tables))
        handles += own_saving(self.model, self.tower)

    def attention_layers(self) -> list[Any]:
        kind = _attention_class(self.tower)
        return [module for module in self.tower.modules() if type(module).__name__ == kind]


class RotatedConfig:
    """Configuration of a layer that selects `attend` as its attention; all other settings are those of the model.

    Attributes:
        plain: The model's configuration, which names the attention used for the rotated q and k.
        eager: The model's eager attention function.
        index: Index of the layer's encoding.
    """

    _attn_implementation = NAME

    def __init__(self, layer: Any, index: int) -> None:
        self.plain = layer.config
        self.eager = import_module(type(layer).__module__).eager_attention_forward
        self.index = index

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copy and pickle look up special methods before __init__ has run
            raise AttributeError(name)
        return getattr(self.plain, name)


class PlainLayer:
    """Proxy of a layer with the model's configuration, from which FlashAttention reads the implementation's name."""

    def __init__(self, layer: Any) -> None:
        self.layer = layer
        self.config = layer.config.plain

    def __getattr__(self, name: str) -> Any:
        return getattr(self.layer, name)


class MaskAndRotations(NamedTuple):
    """Mask and rotations packed as one argument, for layers that pass only the mask on."""

    mask: Tensor | None
    rotations: list[OrderedRotation]


def add_rotations(tower: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Forward pre-hook of the encoder: compute the rotations of the image's tokens and add them to the arguments."""
    pixels = args[0] if args else kwargs.get("pixel_values")
    if pixels is None:  # the encoder raises its own error
        return args, kwargs
    if _attention_class(tower) == "ViTMAEAttention":
        args, kwargs = _with_noise(tower, args, kwargs)
    rotary: Rotary = getattr(tower, ATTRIBUTE)
    indices, sizes = _tokens(tower, pixels, args, kwargs)
    positions = rotary.positions_at(indices, sizes, _num_prefix(tower))
    return args, {**kwargs, _ARGUMENT: [rotary.ordered_rotation(index, where) for index, where in enumerate(positions)]}


def run_layers(
    encoder: Any, hidden_states: Tensor, output_hidden_states: bool = False, **kwargs: Any
) -> BaseModelOutput:
    """Replacement for the forward of DPT's encoder that passes further arguments to its layers."""
    for layer in encoder.layer:
        hidden_states = layer(hidden_states, **kwargs)
    return BaseModelOutput(last_hidden_state=hidden_states)


def pack_rotations(
    layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Forward pre-hook of SigLIP's attention: pack the rotations into the mask argument, the only one passed on."""
    rotations = kwargs.pop(_ARGUMENT, None)
    if rotations is None:
        return args, kwargs
    return args, {**kwargs, "attention_mask": MaskAndRotations(kwargs.get("attention_mask"), rotations)}


def empty_tables(rope: nn.Module, args: tuple[Any, ...], cos_sin: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Forward hook of DINOv3's RoPE: return empty tables, with which it rotates no token and multiplies nothing."""
    cos, sin = cos_sin
    return cos[:0], sin[:0]


def attend(layer: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any) -> Any:
    """Rotate q and k `(batch, heads, tokens, head_dim)`, then call the attention function of the model's configuration.

    Raises:
        ValueError: the layer was called without the encoder.
    """
    rotations = kwargs.pop(_ARGUMENT, None)
    if isinstance(attention_mask, MaskAndRotations):
        attention_mask, rotations = attention_mask
    if rotations is None:
        rule = "layers of a swapped model must be called through its vision encoder"
        raise ValueError(f"{rule}, got a {type(layer).__name__} called alone")
    config: RotatedConfig = layer.config
    query, key = rotations[config.index](query, key)
    plain: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS.get_interface(config.plain._attn_implementation, config.eager)
    return plain(PlainLayer(layer), query, key, value, attention_mask, **kwargs)


def _attention_class(module: nn.Module) -> str | None:
    """Return the class name of the attention layers of a supported vision encoder, or None for other modules."""
    names = [base.__name__ for base in type(module).__mro__ if base.__module__.startswith("transformers.")]
    return next((_ATTENTION[name] for name in names if name in _ATTENTION), None)


def dinov3_rotation(tower: Any) -> OwnRotation:
    """Return DINOv3's rotation:  frequencies 2 pi / theta^(4 j / head_dim),  positions of patch centres in [-1, 1].

    Raises:
        ValueError: a tower on the meta device.
    """
    rope, config = tower.rope_embeddings, tower.config
    bands = 2 * math.pi * exact(with_exact_frequencies(rope, tower._init_weights).inv_freq)
    frequencies = torch.block_diag(bands, bands).unsqueeze(1)  # (axes, 1, pairs), height before width
    moved = {"shift": config.pos_embed_shift, "stretch": config.pos_embed_jitter, "rescale": config.pos_embed_rescale}
    at_random = {name: amount for name, amount in moved.items() if amount is not None}
    lattice = Lattice(spacing=2.0, origin=-1.0, offset=0.5, per="size", **at_random)
    return OwnRotation(frequencies, halves(2 * frequencies.shape[-1]), lattice, _num_prefix(tower))


def _tokens(
    tower: Any, pixels: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Tensor, tuple[int | Tensor, ...]]:
    """Return the lattice indices of tokens `([batch,] tokens, 2)`, and the lattice sizes."""
    if _attention_class(tower) == "Siglip2Attention":
        rows, columns = _given(args, kwargs, 2, "spatial_shapes").to(pixels.device).unsqueeze(-1).unbind(1)
        number = torch.arange(pixels.shape[1], device=pixels.device)
        return torch.stack([number // columns, number % columns], dim=-1), (rows, columns)
    sizes = _lattice(tower, pixels.shape[-2:])
    indices = grid(*sizes, device=pixels.device)
    if _attention_class(tower) == "ViTMAEAttention":
        kept = int(len(indices) * (1 - tower.config.mask_ratio))
        indices = indices[_given(args, kwargs, 1, "noise").argsort(dim=1)[:, :kept]]
    return indices, sizes


def _with_noise(tower: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a ViTMAE with `noise` drawn as in its code, so that the dropped patches are known."""
    if _given(args, kwargs, 1, "noise") is not None:
        return args, kwargs
    pixels = _given(args, kwargs, 0, "pixel_values")
    noise = torch.rand(len(pixels), math.prod(_lattice(tower, pixels.shape[-2:])), device=pixels.device)
    if len(args) > 1:
        return (args[0], noise, *args[2:]), kwargs
    return args, {**kwargs, "noise": noise}


def _given(args: tuple[Any, ...], kwargs: dict[str, Any], index: int, name: str) -> Any:
    return args[index] if len(args) > index else kwargs.get(name)


def _num_prefix(tower: Any) -> int:
    """Return the number of prefix tokens: a class token, registers."""
    return _NUM_PREFIX.get(str(_attention_class(tower)), 1) + getattr(tower.config, "num_register_tokens", 0)


def _lattice_built_for(tower: Any) -> tuple[int, ...]:
    if _attention_class(tower) == "Siglip2Attention":
        return (math.isqrt(tower.config.num_patches),) * 2
    return _lattice(tower, _pair(tower.config.image_size))


def _lattice(tower: Any, size: tuple[int, ...]) -> tuple[int, ...]:
    """Return the patches along each axis of an image."""
    patch = _pair(tower.config.patch_size)
    return tuple(extent // step for extent, step in zip(size, patch, strict=True))


def _pair(size: Any) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else tuple(size)


# At import, so that unpickled models find the registered function as well.
AttentionInterface.register(NAME, attend)
