"""Recipes from which `load` rebuilds transformers' models."""

import json
from importlib import import_module
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import PreTrainedConfig

from torchrope.integrations.checkpoints import settings as kinds
from torchrope.integrations.checkpoints.settings import Limits, UnknownModel, by_name, check, one_line, shown
from torchrope.integrations.rotary import ATTRIBUTE

# Packages of transformers whose models `rebuild` supports.
_PACKAGES = ("clip", "dinov2", "dinov2_with_registers", "dinov3_vit", "siglip", "vit")
# Attention implementations that a file may select; others may download kernels.
_ATTENTION_OF_FILES = ("eager", "sdpa", "flex_attention")
_DTYPES = {str(dtype): dtype for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)}
_ACTIVATIONS = """
    gelu gelu_10 gelu_accurate gelu_fast gelu_new gelu_python gelu_python_tanh gelu_pytorch_tanh hardswish laplace
    leaky_relu linear mish quick_gelu relu relu2 relu6 sigmoid silu swish tanh
"""
# Settings of configurations that a file may set. All others are dropped: they name code, weights, files or versions, or
# have no effect on these models.
_SETTINGS = {
    kinds.FLAG: """
        apply_layernorm is_encoder_decoder key_bias mlp_bias output_attentions output_hidden_states proj_bias
        qkv_bias query_bias reshape_hidden_states return_dict use_gated_mlp use_mask_token use_swiglu_ffn
        value_bias vision_use_head
    """,
    kinds.SHARE: "attention_dropout attention_probs_dropout_prob drop_path_rate hidden_dropout_prob",
    kinds.TOKEN: "bos_token_id pad_token_id",
    kinds.one_of(0): "chunk_size_feed_forward",
    kinds.one_of("float16", "bfloat16", "float32", "float64"): "dtype",
    kinds.WIDTH: """
        encoder_stride hidden_size intermediate_size max_position_embeddings num_attention_heads num_channels
        num_register_tokens pooler_output_size projection_dim projection_size vocab_size
    """,
    kinds.TOKEN | kinds.each(kinds.TOKEN): "eos_token_id",
    kinds.one_of(*_ACTIVATIONS.split()): "hidden_act pooler_act",
    kinds.named(kinds.matching(r"\d{1,9}", "a number"), kinds.LABEL): "id2label",
    kinds.EXTENTS: "image_size patch_size",
    kinds.NUMBER: """
        initializer_factor initializer_range layer_norm_eps layerscale_value logit_scale_init_value mlp_ratio
        pos_embed_jitter pos_embed_rescale pos_embed_shift rope_theta
    """,
    kinds.named(kinds.LABEL, kinds.TOKEN | kinds.LABEL): "label2id",
    kinds.LAYERS: "num_hidden_layers",
    kinds.each(kinds.WORD, most=1024): "out_features",
    kinds.each(kinds.INTEGER, most=1024): "out_indices",
    kinds.one_of("regression", "single_label_classification", "multi_label_classification"): "problem_type",
}
_CONFIG = by_name(_SETTINGS)
_PARTS = ("text_config", "vision_config")  # configurations within one
_RECIPE = {
    "class": kinds.WORD,
    "config": kinds.MAPPING,
    "arguments": kinds.MAPPING,
    "attention": kinds.LABEL | kinds.NOTHING,
    "dtype": kinds.one_of(*_DTYPES),
    "other_dtypes": kinds.named(kinds.LABEL, kinds.one_of(*_DTYPES)),
}
_ARGUMENTS = {"add_pooling_layer": kinds.FLAG, "use_mask_token": kinds.FLAG}
# Settings that may differ without changing the model.
_OF_NO_MODEL = {"_name_or_path", "architectures", "model_type", "stage_names", "transformers_version"}


def recipe(model: Any) -> dict[str, Any]:
    """Return the class, configuration and tensor dtypes from which `rebuild` builds a model."""
    _class_named(type(model).__name__)
    config = _known(json.loads(model.config.to_json_string(use_diff=False)))
    _check_nothing_is_lost(model.config, config)
    dtypes = {name: str(tensor.dtype) for name, tensor in _floating(model) if ATTRIBUTE not in name.split(".")}
    arguments = {}
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
    """Raise ValueError for a class that is not supported or the first invalid setting of a recipe."""
    check("its recipe", recipe, _RECIPE, limits)
    _class_named(recipe["class"])
    check(f"the arguments of {recipe['class']}", recipe["arguments"], _ARGUMENTS, limits, partly=True)
    parts = {name: recipe["config"].get(name) for name in _PARTS}
    check("its recipe", parts, dict.fromkeys(_PARTS, kinds.MAPPING | kinds.NOTHING), limits)
    for name, config in {"config": recipe["config"], **parts}.items():
        known = {key: value for key, value in (config or {}).items() if key in _CONFIG}
        check(f"the {name} of {recipe['class']}", known, _CONFIG, limits, partly=True)


def rebuild(recipe: dict[str, Any], device: str) -> nn.Module:
    """Build the model of a recipe with randomly initialised weights; ValueError if transformers rejects it."""
    built = _class_named(recipe["class"])
    try:
        config = built.config_class.from_dict(_known(json.loads(json.dumps(recipe["config"]))))
    except StrictDataclassError as error:
        raise ValueError(one_line(error)) from None
    if recipe["attention"] in _ATTENTION_OF_FILES:
        config._attn_implementation = recipe["attention"]
    with torch.device(device):
        model = built(config, **recipe["arguments"])
    for name, tensor in _floating(model):  # not model.to: DINOv3's frequencies may have stayed float32
        tensor.data = tensor.data.to(_DTYPES[recipe["other_dtypes"].get(name, recipe["dtype"])])
    return model


def _known(config: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of `_CONFIG` of a configuration and of the configurations inside it."""
    own = {name: value for name, value in config.items() if name in _CONFIG}
    return own | {part: _known(config[part]) for part in _PARTS if isinstance(config.get(part), dict)}


def _check_nothing_is_lost(config: PreTrainedConfig, written: dict[str, Any]) -> None:
    """Raise ValueError if a configuration rebuilt from the written settings differs from the original."""
    again = json.loads(type(config).from_dict(json.loads(json.dumps(written))).to_json_string(use_diff=False))
    before = json.loads(config.to_json_string(use_diff=False))
    for part in ("", *_PARTS):
        new, old = (settings.get(part) or {} if part else settings for settings in (again, before))
        for name in new.keys() - _OF_NO_MODEL - set(_PARTS):
            if new[name] != old.get(name):
                rule = "save supports a fixed list of settings"
                raise ValueError(f"{rule}, got a {type(config).__name__} with {name} = {shown(old.get(name))}")


def _floating(model: nn.Module) -> list[tuple[str, Tensor]]:
    tensors = (*model.named_parameters(), *model.named_buffers())
    return [(name, tensor) for name, tensor in tensors if tensor.is_floating_point()]


def _class_named(name: str) -> Any:
    """Return a class of the supported packages by its name."""
    for package in _PACKAGES:
        modeling = import_module(f"transformers.models.{package}.modeling_{package}")
        if name in modeling.__all__:
            return getattr(modeling, name)
    raise UnknownModel(f"save and load support transformers' models of {', '.join(_PACKAGES)}, got {name}")
