"""Recipes from which `load` rebuilds timm's models."""

from typing import Any

import timm
import torch
from timm.models import get_model_args, is_model, model_entrypoint
from torch import nn

from torchrope.integrations import timm_models as timm_models
from torchrope.integrations.checkpoints.settings import (
    DEPTHS,
    ENCODING,
    EXTENTS,
    FLAG,
    LAYER,
    LAYERS,
    MAPPING,
    NOTHING,
    NUMBER,
    NUMBERS,
    SHARE,
    WIDTH,
    WIDTHS,
    WORD,
    Kind,
    Limits,
    UnknownModel,
    check,
    each,
    one_of,
    shown,
)

# Arguments of any timm model that a file may set: none names weights, files, caches or a hub.
_OF_ANY: dict[str, Kind] = {
    "num_classes": WIDTH,
    "in_chans": WIDTH,
    "global_pool": WORD,
    "img_size": EXTENTS,
    "features_only": FLAG,
    "out_indices": LAYER | each(LAYER, most=64),
    "output_stride": one_of(8, 16, 32),
    "act_layer": WORD,
    "norm_layer": WORD,
    "drop_rate": SHARE,
    "drop_path_rate": SHARE,
    "pos_drop_rate": SHARE,
    "patch_drop_rate": SHARE,
    "proj_drop_rate": SHARE,
    "attn_drop_rate": SHARE,
}
# Arguments of the models that swap supports. Other timm models may loop over such sizes.
_OF_TRANSFORMERS: dict[str, Kind] = _OF_ANY | {
    "always_partition": FLAG,
    "attn_gated": FLAG,
    "attn_layer": WORD,
    "attn_only_layer_scale": FLAG,
    "attn_pool_mlp_ratio": NUMBER,
    "attn_pool_num_heads": WIDTH,
    "attn_type": WORD,
    "block_size": WIDTH,
    "class_token": FLAG,
    "depth": LAYERS,
    "depths": DEPTHS,
    "downsample_ratio": WIDTH,
    "dynamic_img_pad": FLAG,
    "dynamic_img_size": FLAG,
    "embed_dim": WIDTH | each(WIDTH),
    "embed_norm_layer": WORD,
    "embed_proj_type": WORD,
    "enable_patch_interpolator": FLAG,
    "encoder_pool": WORD,
    "encoding": ENCODING,
    "fc_norm": FLAG,
    "final_norm": FLAG,
    "fix_init": FLAG,
    "global_attn_indexes": each(LAYER, most=1024),
    "head_dim": WIDTH | each(WIDTH | NOTHING),
    "head_init_scale": NUMBER,
    "head_hidden_size": WIDTH,
    "init": WORD,
    "init_values": NUMBER,
    "input_norm_layer": WORD,
    "intermediate_size": WIDTH,
    "keep_bias": FLAG,
    "merge_size": WIDTH,
    "mlp_ratio": NUMBERS,
    "neck_chans": WIDTH,
    "no_embed_class": FLAG,
    "norm_eps": NUMBER,
    "num_heads": WIDTHS,
    "num_kv_heads": WIDTH | each(WIDTH | NOTHING, most=1024),
    "num_reg_tokens": WIDTH,
    "out_features": WIDTH,
    "patchify_channels_last": FLAG,
    "patch_size": EXTENTS,
    "pool_include_prefix": FLAG,
    "pooling_kernel_size": WIDTH,
    "pos_embed": WORD,
    "pos_embed_align_corners": FLAG,
    "pos_embed_antialias": FLAG,
    "pos_embed_ar_preserving": FLAG,
    "pos_embed_grid_size": EXTENTS,
    "pos_embed_interp_mode": WORD,
    "pos_embed_use_grid_sample": FLAG,
    "position_embedding_size": WIDTH,
    "pre_norm": FLAG,
    "pretrained_window_sizes": each(WIDTH | each(WIDTH)),
    "proj_bias": FLAG,
    "qk_norm": FLAG,
    "qkv_bias": FLAG,
    "qkv_fused": FLAG,
    "ref_feat_shape": EXTENTS | each(EXTENTS, most=2),
    "reg_tokens": WIDTH,
    "rope_grid_indexing": WORD,
    "rope_grid_offset": NUMBER,
    "rope_jitter_coords": NUMBER,
    "rope_mrope_section": each(WIDTH, most=3),
    "rope_ref_feat_shape": EXTENTS,
    "rope_rescale_coords": NUMBER,
    "rope_rotate_half": FLAG,
    "rope_shift_coords": NUMBER,
    "rope_temperature": NUMBER,
    "rope_theta": NUMBER,
    "rope_type": WORD,
    "scale_attn_inner": FLAG,
    "scale_attn_inner_norm": FLAG,
    "scale_attn_norm": FLAG,
    "scale_mlp": FLAG,
    "scale_mlp_norm": FLAG,
    "standardize": FLAG,
    "strict_img_size": FLAG,
    "swiglu_align_to": WIDTH,
    "swiglu_mlp": FLAG,
    "use_abs_pos": FLAG,
    "use_abs_pos_emb": FLAG,
    "use_clipped_linears": FLAG,
    "use_fc_norm": FLAG,
    "use_key_only_attn_mask": FLAG,
    "use_post_norm": FLAG,
    "use_post_transformer_norm": FLAG,
    "use_pre_transformer_norm": FLAG,
    "use_rel_pos": FLAG,
    "use_rel_pos_bias": FLAG,
    "use_rope": FLAG,
    "use_rot_pos_emb": FLAG,
    "use_shared_rel_pos_bias": FLAG,
    "weight_init": WORD,
    "window_size": EXTENTS | each(EXTENTS),
}
_MODULES = (
    "beit",
    "deepseek_vit",
    "deit",
    "eva",
    "gemma4_vit",
    "naflexvit",
    "qwen3_vit",
    "swin_transformer",
    "swin_transformer_v2",
    "vision_transformer",
    "vision_transformer_hybrid",
    "vision_transformer_sam",
)


def recipe(model: Any) -> dict[str, Any]:
    """Return the architecture and arguments from which timm.create_model rebuilds a model."""
    architecture = (getattr(model, "pretrained_cfg", None) or {}).get("architecture")
    if architecture is None or not hasattr(model, "_model_args"):
        raise UnknownModel(f"model must be built by timm.create_model, got {type(model).__name__} built otherwise")
    # timm omits these because inference does not need them; resuming training does.
    dropped = {name: value for name, value in model._model_args.items() if "drop" in name}
    arguments = get_model_args(model, dropped)
    return {"architecture": architecture, "arguments": {**arguments, **_of_features(model)}}


def check_recipe(recipe: Any, limits: Limits) -> None:
    """Check that a recipe of a file holds only an architecture of timm and valid arguments.

    Raises:
        ValueError: the first invalid setting.
    """
    check("its recipe", recipe, {"architecture": WORD, "arguments": MAPPING}, limits)
    architecture = recipe["architecture"]
    if not is_model(architecture):
        raise ValueError(f"architecture of its recipe must be registered in timm, got {shown(architecture)}")
    module = model_entrypoint(architecture).__module__
    transformer = not module.startswith("timm.") or module.rpartition(".")[2] in _MODULES
    kinds = {name: kind | NOTHING for name, kind in (_OF_TRANSFORMERS if transformer else _OF_ANY).items()}
    check(f"the arguments of {architecture}", recipe["arguments"], kinds, limits, partly=True)


def rebuild(recipe: dict[str, Any], device: str) -> nn.Module:
    """Build the model of a recipe with randomly initialised weights."""
    with torch.device(device):  # timm computes some of its buffers on the default device first
        model: nn.Module = timm.create_model(
            recipe["architecture"], pretrained=False, **recipe["arguments"], device=device
        )
    return model


def _of_features(model: Any) -> dict[str, Any]:
    """Return arguments without a classifier for a model built with features_only."""
    return {"num_classes": None, "global_pool": None} if model._model_args.get("features_only") else {}
