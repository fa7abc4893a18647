"""`swap` for the vision models of transformers."""

import json
import math
from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from torchrope.integrations.own_rotation import Lattice, OwnRotation, exact, halves
from torchrope.integrations.rotary import ATTRIBUTE, Adapter, Replaced, Rotary, Site, Turn
from torchrope.integrations.settings import (
    EXTENTS,
    FLAG,
    LABEL,
    LAYER,
    LAYERS,
    MAPPING,
    NOTHING,
    NUMBER,
    SHARE,
    TOKEN,
    WIDTH,
    WORD,
    Kind,
    Limits,
    check,
    each,
    matching,
    named,
    one_line,
    one_of,
    shown,
)
from torchrope.integrations.transformers_rotating import rotating
from torchrope.integrations.transformers_saving import own_saving

# Each vision tower and its attention layers, by the names of their classes: importing them all takes seconds.
_ATTENTION = {
    "CLIPVisionModel": "CLIPAttention",
    "DINOv3ViTBackbone": "DINOv3ViTAttention",
    "DINOv3ViTModel": "DINOv3ViTAttention",
    "Dinov2Backbone": "Dinov2Attention",
    "Dinov2Model": "Dinov2Attention",
    "Dinov2WithRegistersBackbone": "Dinov2WithRegistersAttention",
    "Dinov2WithRegistersModel": "Dinov2WithRegistersAttention",
    "SiglipVisionModel": "SiglipAttention",
    "ViTModel": "ViTAttention",
}

# Where their classes are, and those of the models around them: all that `rebuild` builds.
_PACKAGES = ("clip", "dinov2", "dinov2_with_registers", "dinov3_vit", "siglip", "vit")
# Served without a download; another attention is the reader's choice.
_ATTENTION_OF_FILES = ("eager", "sdpa", "flex_attention")
_DTYPES = {str(dtype): dtype for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)}
_ACTIVATION = one_of(
    "gelu",
    "gelu_10",
    "gelu_accurate",
    "gelu_fast",
    "gelu_new",
    "gelu_python",
    "gelu_python_tanh",
    "gelu_pytorch_tanh",
    "hardswish",
    "laplace",
    "leaky_relu",
    "linear",
    "mish",
    "quick_gelu",
    "relu",
    "relu2",
    "relu6",
    "sigmoid",
    "silu",
    "swish",
    "tanh",
)
# What a file may say to the configurations of these models. All else that transformers writes is left out: it names
# code, weights, files and versions, or nothing that these models read.
_CONFIG: dict[str, Kind] = {
    "apply_layernorm": FLAG,
    "attention_dropout": SHARE | NOTHING,
    "attention_probs_dropout_prob": SHARE,
    "bos_token_id": TOKEN | NOTHING,
    "chunk_size_feed_forward": one_of(0),
    "drop_path_rate": SHARE,
    "dtype": one_of("float16", "bfloat16", "float32", "float64") | NOTHING,
    "encoder_stride": WIDTH,
    "eos_token_id": TOKEN | each(TOKEN) | NOTHING,
    "hidden_act": _ACTIVATION,
    "hidden_dropout_prob": SHARE,
    "hidden_size": WIDTH,
    "id2label": named(matching(r"\d{1,9}", "a number"), LABEL) | NOTHING,
    "image_size": EXTENTS | NOTHING,
    "initializer_factor": NUMBER | NOTHING,
    "initializer_range": NUMBER,
    "intermediate_size": WIDTH,
    "is_encoder_decoder": FLAG,
    "key_bias": FLAG,
    "label2id": named(LABEL, TOKEN | LABEL) | NOTHING,
    "layer_norm_eps": NUMBER | NOTHING,
    "layerscale_value": NUMBER,
    "logit_scale_init_value": NUMBER | NOTHING,
    "max_position_embeddings": WIDTH,
    "mlp_bias": FLAG,
    "mlp_ratio": NUMBER,
    "num_attention_heads": WIDTH,
    "num_channels": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_register_tokens": WIDTH,
    "out_features": each(WORD, most=1024) | NOTHING,
    "out_indices": each(LAYER, most=1024) | NOTHING,
    "output_attentions": FLAG | NOTHING,
    "output_hidden_states": FLAG | NOTHING,
    "pad_token_id": TOKEN | NOTHING,
    "patch_size": EXTENTS | NOTHING,
    "pooler_act": _ACTIVATION,
    "pooler_output_size": WIDTH | NOTHING,
    "pos_embed_jitter": NUMBER | NOTHING,
    "pos_embed_rescale": NUMBER | NOTHING,
    "pos_embed_shift": NUMBER | NOTHING,
    "problem_type": one_of("regression", "single_label_classification", "multi_label_classification") | NOTHING,
    "proj_bias": FLAG,
    "projection_dim": WIDTH | NOTHING,
    "projection_size": WIDTH | NOTHING,
    "qkv_bias": FLAG,
    "query_bias": FLAG,
    "reshape_hidden_states": FLAG,
    "return_dict": FLAG | NOTHING,
    "rope_theta": NUMBER,
    "use_gated_mlp": FLAG,
    "use_mask_token": FLAG,
    "use_swiglu_ffn": FLAG,
    "value_bias": FLAG,
    "vision_use_head": FLAG,
    "vocab_size": WIDTH,
}
_PARTS = ("text_config", "vision_config")  # configurations within one
_RECIPE: dict[str, Kind] = {
    "class": WORD,
    "config": MAPPING,
    "arguments": MAPPING,
    "attention": LABEL | NOTHING,
    "dtype": one_of(*_DTYPES),
    "other_dtypes": named(LABEL, one_of(*_DTYPES)),
}
_ARGUMENTS: dict[str, Kind] = {"add_pooling_layer": FLAG, "use_mask_token": FLAG}
# What a configuration may say beside, without a model that differs.
_OF_NO_MODEL = {"_name_or_path", "architectures", "model_type", "stage_names", "transformers_version"}

NAME = "torchrope"
"""The attention that swapped layers ask the registry for."""

_ARGUMENT = "torchrope_rotations"


def adapters(model: nn.Module) -> list[Adapter]:
    """What swap needs for each vision tower of transformers inside a model."""
    towers = [OfTower(module, model) for module in model.modules() if _kind(module) is not None]
    return [*towers, *rotating(model)]


def recipe(model: Any) -> dict[str, Any]:
    """What builds a model of transformers again: its class, its configuration and the dtypes of its tensors."""
    _class_named(type(model).__name__)
    config = _known(json.loads(model.config.to_json_string(use_diff=False)))
    _check_nothing_is_lost(model.config, config)
    arguments = {}
    dtypes = {name: str(tensor.dtype) for name, tensor in _floating(model) if ATTRIBUTE not in name.split(".")}
    if type(model).__name__ == "ViTModel":
        with_mask = model.embeddings.mask_token is not None
        arguments = {"add_pooling_layer": model.pooler is not None, "use_mask_token": with_mask}
    return {
        "class": type(model).__name__,
        "config": config,
        "arguments": arguments,
        "attention": model.config._attn_implementation,
        "dtype": str(model.dtype),
        "other_dtypes": {name: dtype for name, dtype in dtypes.items() if dtype != str(model.dtype)},
    }


def check_recipe(recipe: Any, limits: Limits) -> None:
    """Refuse a recipe of a file that names more than a class of these models and the data which builds it.

    Raises:
        ValueError: the first setting that is wrong.
    """
    check("its recipe", recipe, _RECIPE, limits)
    _class_named(recipe["class"])
    check(f"the arguments of {recipe['class']}", recipe["arguments"], _ARGUMENTS, limits, partly=True)
    configs = {"config": recipe["config"]} | {name: recipe["config"].get(name) for name in _PARTS}
    for name, config in configs.items():
        if config is not None and not isinstance(config, dict):
            raise ValueError(f"{name} of its recipe must be settings by name, got {shown(config)}")
        known = {key: value for key, value in (config or {}).items() if key in _CONFIG}
        check(f"the {name} of {recipe['class']}", known, _CONFIG, limits, partly=True)


def rebuild(recipe: dict[str, Any], device: str) -> nn.Module:
    """The model of a recipe, its weights initialised at random."""
    built = _class_named(recipe["class"])
    try:
        config = built.config_class.from_dict(_known(json.loads(json.dumps(recipe["config"]))))
    except StrictDataclassError as error:
        raise ValueError(one_line(error)) from None
    if recipe["attention"] in _ATTENTION_OF_FILES:
        config._attn_implementation = recipe["attention"]
    with torch.device(device):
        model: nn.Module = built(config, **recipe["arguments"])
    for name, tensor in _floating(model):  # not model.to: DINOv3's frequencies may have stayed float32
        tensor.data = tensor.data.to(_DTYPES[recipe["other_dtypes"].get(name, recipe["dtype"])])
    return model


def _known(config: dict[str, Any]) -> dict[str, Any]:
    """What a configuration says of its model, and those within it of theirs."""
    own = {name: value for name, value in config.items() if name in _CONFIG}
    return own | {part: _known(config[part]) for part in _PARTS if isinstance(config.get(part), dict)}


def _check_nothing_is_lost(config: PreTrainedConfig, written: dict[str, Any]) -> None:
    """Refuse a configuration that comes back with another value of what its class knows."""
    again = json.loads(type(config).from_dict(json.loads(json.dumps(written))).to_json_string(use_diff=False))
    before = json.loads(config.to_json_string(use_diff=False))
    for part in ("", *_PARTS):
        came, was = (one.get(part) or {} if part else one for one in (again, before))
        for name in came.keys() - _OF_NO_MODEL - set(_PARTS):
            if came[name] != was.get(name):
                rule = "save knows the settings of these models, by their names in transformers"
                raise ValueError(f"{rule}, got a {type(config).__name__} with {name} = {shown(was.get(name))}")


def _floating(model: nn.Module) -> list[tuple[str, Tensor]]:
    tensors = (*model.named_parameters(), *model.named_buffers())
    return [(name, tensor) for name, tensor in tensors if tensor.is_floating_point()]


def _class_named(name: str) -> Any:
    """A class of the supported models, by its name."""
    for package in _PACKAGES:
        modeling = import_module(f"transformers.models.{package}.modeling_{package}")
        if name in modeling.__all__:
            return getattr(modeling, name)
    raise ValueError(f"save and load know transformers' models of {', '.join(_PACKAGES)}, got {name}")


class OfTower(Adapter):
    """A vision tower: its rotations travel as an argument, from the tower's call to the attention of each layer."""

    def __init__(self, tower: nn.Module, model: nn.Module) -> None:
        super().__init__(tower)
        self.model = model

    def sites(self) -> list[Site]:
        config = self.tower.config
        lattice = _lattice(self.tower, _pair(config.image_size))
        return [Site(config.num_attention_heads, layer.head_dim, lattice) for layer in self._layers()]

    def tables(self) -> list[nn.Parameter]:
        names = ("position_embeddings", "position_embedding.weight")
        return [table for name, table in self.tower.embeddings.named_parameters() if name in names]

    def rotates(self) -> bool:
        return hasattr(self.tower, "rope_embeddings")

    def own_rotations(self) -> list[OwnRotation]:
        rotation = dinov3_rotation(self.tower)
        return [rotation for _ in self._layers()]

    def attach(self, rotary: Rotary) -> None:
        handles: list[Any] = rotary.handles
        handles.append(self.tower.register_forward_pre_hook(hand_down, with_kwargs=True))
        for index, layer in enumerate(self._layers()):
            handles.append(Replaced(layer, "config", Rotated(layer, rotary.of_layer(index))))
            if _kind(self.tower) == "SiglipAttention":
                handles.append(layer.register_forward_pre_hook(carry, with_kwargs=True))
        if self.rotates() and not rotary.keep_rotation:
            handles.append(self.tower.rope_embeddings.register_forward_hook(stand_still))
        handles += own_saving(self.model, self.tower)

    def _layers(self) -> list[Any]:
        kind = _kind(self.tower)
        return [module for module in self.tower.modules() if type(module).__name__ == kind]


class Rotated:
    """A layer's configuration that asks the registry for attention with rotations, and is the model's own otherwise.

    Attributes:
        plain: The model's own, which says what attention the rotated q and k are for.
        eager: The attention of that name, a function beside each model.
        index: Which rotation is the layer's.
    """

    _attn_implementation = NAME

    def __init__(self, layer: Any, index: int) -> None:
        self.plain = layer.config
        self.eager = import_module(type(layer).__module__).eager_attention_forward
        self.index = index

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copies and pickles ask before anything is there
            raise AttributeError(name)
        return getattr(self.plain, name)


class Plain:
    """A layer as its attention knew it, with the model's own configuration: FlashAttention reads its name there."""

    def __init__(self, layer: Any) -> None:
        self.layer = layer
        self.config = layer.config.plain

    def __getattr__(self, name: str) -> Any:
        return getattr(self.layer, name)


class Carried(NamedTuple):
    """Rotations beside a mask, through a layer that hands on its mask and nothing else."""

    mask: Tensor | None
    turns: list[Turn]


def hand_down(tower: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Before a tower: rotations of the lattice of its image, among the arguments that reach every layer."""
    pixels = args[0] if args else kwargs.get("pixel_values")
    if pixels is None:  # the tower says so itself
        return args, kwargs
    rotary: Rotary = getattr(tower, ATTRIBUTE)
    sizes = _lattice(tower, pixels.shape[-2:])
    positions = rotary.positions(sizes, _num_prefix(tower), device=pixels.device)
    return args, {**kwargs, _ARGUMENT: [rotary.turn(index, where) for index, where in enumerate(positions)]}


def carry(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Before the attention of SigLIP, which keeps further arguments to itself."""
    turns = kwargs.pop(_ARGUMENT, None)
    if turns is None:
        return args, kwargs
    return args, {**kwargs, "attention_mask": Carried(kwargs.get("attention_mask"), turns)}


def stand_still(rope: nn.Module, args: tuple[Any, ...], cos_sin: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Behind DINOv3's own rotation: none of the tokens turns, without a product with ones."""
    cos, sin = cos_sin
    return cos[:0], sin[:0]


def attend(layer: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any) -> Any:
    """Rotate q and k `(batch, heads, tokens, head_dim)` of a layer and hand on to the attention that it had."""
    turns = kwargs.pop(_ARGUMENT, None)
    if isinstance(attention_mask, Carried):
        attention_mask, turns = attention_mask
    if turns is None:
        raise ValueError(f"rotations come with the call of a swapped tower, got a {type(layer).__name__} called alone")
    config: Rotated = layer.config
    query, key = turns[config.index](query, key)
    plain: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS.get_interface(config.plain._attn_implementation, config.eager)
    return plain(Plain(layer), query, key, value, attention_mask, **kwargs)


def _kind(module: nn.Module) -> str | None:
    """The attention layers of a tower, or None where a module is no tower that is known."""
    names = [base.__name__ for base in type(module).__mro__ if base.__module__.startswith("transformers.")]
    return next((_ATTENTION[name] for name in names if name in _ATTENTION), None)


def dinov3_rotation(tower: Any) -> OwnRotation:
    """What the layers of DINOv3 turn q and k by:  2 pi / theta^(4 j / head_dim)  at centres of patches in [-1, 1].

    Raises:
        ValueError: a tower on the meta device.
    """
    rope, config = tower.rope_embeddings, tower.config
    bands = 2 * math.pi * exact(rope.inv_freq)
    frequencies = torch.block_diag(bands, bands).unsqueeze(1)  # (axes, 1, pairs), height before width
    moved = {"shift": config.pos_embed_shift, "stretch": config.pos_embed_jitter, "rescale": config.pos_embed_rescale}
    at_random = {name: amount for name, amount in moved.items() if amount is not None}
    lattice = Lattice(spacing=2.0, origin=-1.0, offset=0.5, per="size", **at_random)
    return OwnRotation(frequencies, halves(2 * frequencies.shape[-1]), lattice, _num_prefix(tower))


def _num_prefix(tower: Any) -> int:
    """Tokens before those of the image: a class token, registers; none in SigLIP."""
    if _kind(tower) == "SiglipAttention":
        return 0
    return 1 + getattr(tower.config, "num_register_tokens", 0)


def _lattice(tower: Any, size: tuple[int, ...]) -> tuple[int, ...]:
    """Patches along each axis of an image."""
    patch = _pair(tower.config.patch_size)
    return tuple(extent // step for extent, step in zip(size, patch, strict=True))


def _pair(size: Any) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else tuple(size)


# Here and not in attach: a model that was pickled finds it too.
AttentionInterface.register(NAME, attend)
