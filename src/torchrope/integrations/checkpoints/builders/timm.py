"""Recipes from which `load` rebuilds timm's models."""

from typing import Any

import timm
import torch
from timm.models import get_model_args, is_model, model_entrypoint
from torch import nn

from torchrope.integrations.checkpoints import settings as kinds
from torchrope.integrations.checkpoints.settings import Limits, UnknownModel, by_name, check, shown

# Arguments of any timm model that a file may set: none names weights, files, caches or a hub.
_OF_ANY = {
    kinds.WIDTH: "num_classes in_chans",
    kinds.WORD: "global_pool act_layer norm_layer",
    kinds.EXTENTS: "img_size",
    kinds.FLAG: "features_only",
    kinds.INTEGER | kinds.each(kinds.INTEGER, most=64): "out_indices",
    kinds.one_of(8, 16, 32): "output_stride",
    kinds.SHARE: "drop_rate drop_path_rate pos_drop_rate patch_drop_rate proj_drop_rate attn_drop_rate",
}
# Those of the models that swap supports. Other timm models may loop over such sizes.
_OF_TRANSFORMERS = {
    kinds.FLAG: """
        always_partition attn_gated attn_only_layer_scale class_token dynamic_img_pad dynamic_img_size
        enable_patch_interpolator fc_norm final_norm fix_init keep_bias no_embed_class patchify_channels_last
        pool_include_prefix pos_embed_align_corners pos_embed_antialias pos_embed_ar_preserving
        pos_embed_use_grid_sample pre_norm proj_bias qk_norm qkv_bias qkv_fused rope_rotate_half
        scale_attn_inner scale_attn_inner_norm scale_attn_norm scale_mlp scale_mlp_norm standardize
        strict_img_size swiglu_mlp use_abs_pos use_abs_pos_emb use_clipped_linears use_fc_norm
        use_key_only_attn_mask use_post_norm use_post_transformer_norm use_pre_transformer_norm use_rel_pos
        use_rel_pos_bias use_rope use_rot_pos_emb use_shared_rel_pos_bias
    """,
    kinds.WORD: """
        attn_layer attn_type embed_norm_layer embed_proj_type encoder_pool init input_norm_layer pos_embed
        pos_embed_interp_mode rope_grid_indexing rope_type weight_init
    """,
    kinds.NUMBER: """
        attn_pool_mlp_ratio head_init_scale init_values norm_eps rope_grid_offset rope_jitter_coords
        rope_rescale_coords rope_shift_coords rope_temperature rope_theta
    """,
    kinds.WIDTH: """
        attn_pool_num_heads block_size downsample_ratio head_hidden_size intermediate_size merge_size neck_chans
        num_reg_tokens out_features pooling_kernel_size position_embedding_size reg_tokens swiglu_align_to
    """,
    kinds.LAYERS: "depth",
    kinds.DEPTHS: "depths",
    kinds.WIDTH | kinds.each(kinds.WIDTH): "embed_dim",
    kinds.ENCODING: "encoding",
    kinds.each(kinds.INTEGER, most=1024): "global_attn_indexes",
    kinds.WIDTH | kinds.each(kinds.WIDTH | kinds.NOTHING): "head_dim",
    kinds.NUMBER | kinds.each(kinds.NUMBER): "mlp_ratio",
    kinds.WIDTH | kinds.each(kinds.WIDTH, most=1024): "num_heads",
    kinds.WIDTH | kinds.each(kinds.WIDTH | kinds.NOTHING, most=1024): "num_kv_heads",
    kinds.EXTENTS: "patch_size pos_embed_grid_size rope_ref_feat_shape",
    kinds.each(kinds.WIDTH | kinds.each(kinds.WIDTH)): "pretrained_window_sizes",
    kinds.EXTENTS | kinds.each(kinds.EXTENTS, most=2): "ref_feat_shape",
    kinds.each(kinds.WIDTH, most=3): "rope_mrope_section",
    kinds.EXTENTS | kinds.each(kinds.EXTENTS): "window_size",
}
_MODULES = (
    *("beit", "deepseek_vit", "deit", "eva", "gemma4_vit", "naflexvit", "qwen3_vit", "swin_transformer"),
    *("swin_transformer_v2", "vision_transformer", "vision_transformer_hybrid", "vision_transformer_sam"),
)


def recipe(model: Any) -> dict[str, Any]:
    """Return the architecture and arguments from which timm.create_model rebuilds a model."""
    architecture = (getattr(model, "pretrained_cfg", None) or {}).get("architecture")
    if architecture is None or not hasattr(model, "_model_args"):
        raise UnknownModel(f"model must be built by timm.create_model, got {type(model).__name__} built otherwise")
    # timm omits these because inference does not need them; resuming training does.
    dropped = {name: value for name, value in model._model_args.items() if "drop" in name}
    headless = {"num_classes": None, "global_pool": None} if model._model_args.get("features_only") else {}
    return {"architecture": architecture, "arguments": {**get_model_args(model, dropped), **headless}}


def check_recipe(recipe: Any, limits: Limits) -> None:
    """Raise ValueError for the first setting of a recipe that is no architecture of timm or no valid argument."""
    check("its recipe", recipe, {"architecture": kinds.WORD, "arguments": kinds.MAPPING}, limits)
    architecture = recipe["architecture"]
    if not is_model(architecture):
        raise ValueError(f"architecture of its recipe must be registered in timm, got {shown(architecture)}")
    module = model_entrypoint(architecture).__module__
    transformer = not module.startswith("timm.") or module.rpartition(".")[2] in _MODULES
    allowed = by_name(_OF_ANY) | (by_name(_OF_TRANSFORMERS) if transformer else {})
    check(f"the arguments of {architecture}", recipe["arguments"], allowed, limits, partly=True)


def rebuild(recipe: dict[str, Any], device: str) -> nn.Module:
    """Build the model of a recipe with randomly initialised weights."""
    with torch.device(device):  # timm computes some of its buffers on the default device first
        return timm.create_model(recipe["architecture"], pretrained=False, **recipe["arguments"], device=device)
