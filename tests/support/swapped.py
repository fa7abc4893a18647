"""Small timm models whose encodings tests replace, and the contents of their files."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import timm
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from timm.models.vision_transformer import ParallelScalingBlock
from torch import Tensor

SMALL: dict[str, Any] = dict(img_size=64, embed_dim=32, depth=2, num_heads=2, num_classes=5)
SWIN: dict[str, Any] = dict(img_size=56, embed_dim=32, depths=(2, 2), num_heads=(1, 2), num_classes=5)
TOWER: dict[str, Any] = dict(embed_dim=32, depth=2, num_heads=2, num_classes=5)
SAM: dict[str, Any] = dict(**SMALL, window_size=3, global_attn_indexes=(1,), neck_chans=8)
MODELS: dict[str, Callable[..., Any]] = {
    "vit": partial(timm.create_model, "vit_tiny_patch16_224", **SMALL),
    "vit_qk_norm": partial(timm.create_model, "vit_tiny_patch16_224", qk_norm=True, **SMALL),
    "vit_avg": partial(timm.create_model, "vit_tiny_patch16_224", global_pool="avg", class_token=False, **SMALL),
    "vit_parallel": partial(timm.create_model, "vit_tiny_patch16_224", block_fn=ParallelScalingBlock, **SMALL),
    "deit_distilled": partial(timm.create_model, "deit_tiny_distilled_patch16_224", **SMALL),
    "dinov2_registers": partial(timm.create_model, "vit_small_patch14_reg4_dinov2", **{**SMALL, "img_size": 56}),
    "siglip": partial(timm.create_model, "vit_base_patch16_siglip_224", **SMALL),
    "eva02": partial(timm.create_model, "eva02_tiny_patch14_224", **{**SMALL, "img_size": 56}),
    "rope_axial": partial(timm.create_model, "vit_small_patch16_rope_224", **SMALL),
    "rope_mixed_ape": partial(timm.create_model, "vit_small_patch16_rope_mixed_ape_224", **SMALL),
    "dinov3": partial(timm.create_model, "vit_small_patch16_dinov3", **SMALL),
    "pe": partial(timm.create_model, "vit_pe_core_tiny_patch16_384", **SMALL),
    "naflex": partial(timm.create_model, "naflexvit_base_patch16_gap", **TOWER),
    "naflex_axial": partial(timm.create_model, "naflexvit_base_patch16_gap", rope_type="axial", **TOWER),
    "naflex_mixed": partial(timm.create_model, "naflexvit_base_patch16_gap", rope_type="mixed", **TOWER),
    "naflex_dinov3": partial(
        timm.create_model, "naflexvit_base_patch16_gap", rope_type="dinov3", rope_rotate_half=True, **TOWER
    ),
    "naflex_mrope": partial(
        timm.create_model, "naflexvit_base_patch16_gap", rope_type="mrope", rope_mrope_section=(2, 3, 3), **TOWER
    ),
    "qwen3": partial(timm.create_model, "qwen3_vit_88m", img_size=64, **TOWER),
    "deepseek": partial(timm.create_model, "deepseek_vit_412m", img_size=56, **TOWER),
    "gemma4": partial(
        timm.create_model,
        "gemma4_vit_167m",
        **TOWER,
        img_size=64,
        head_dim=16,
        intermediate_size=48,
        position_embedding_size=32,
    ),
    "beit": partial(timm.create_model, "beit_base_patch16_224", **SMALL),
    "beit3": partial(timm.create_model, "beit3_base_patch16_224", **SMALL),
    "swin": partial(timm.create_model, "swin_tiny_patch4_window7_224", **SWIN),
    "swin_v2": partial(timm.create_model, "swinv2_tiny_window8_256", **{**SWIN, "img_size": 64}, window_size=8),
    "sam": partial(timm.create_model, "samvit_base_patch16_224", **SAM),
    "sam_rope": partial(timm.create_model, "samvit_base_patch16_224", use_rel_pos=False, use_rope=True, **SAM),
}

NAFLEX_ROPE = ["naflex_axial", "naflex_mixed", "naflex_dinov3", "naflex_mrope"]
ENCODERS = ["qwen3", "deepseek", "gemma4"]
ROTATING = ["eva02", "rope_axial", "rope_mixed_ape", "dinov3", "pe", *NAFLEX_ROPE, *ENCODERS, "sam_rope"]


def made(name: str, **settings: Any) -> Any:
    """A model none of whose parameters is still at a start that hides something."""
    model = MODELS[name](**settings)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    return model


def strong(name: str, **settings: Any) -> Any:
    """A model whose scores depend much on q and k, and whose outputs depend on its attention."""
    model = made(name, **settings).eval()
    with torch.no_grad():
        for part, parameter in model.named_parameters():
            if parameter.ndim > 1 and not part.endswith("freqs"):
                parameter.normal_(0, 1.5 / parameter[0].numel() ** 0.5)
            if part.endswith((".gamma", "gamma_1", "gamma_2")):
                parameter.fill_(1.0)
            if any(word in part for word in ("qkv.weight", "q_proj", "k_proj")):
                parameter.mul_(3)
    return model


def tower(model: Any) -> Any:
    """The part of a model that holds the attention layers, and once it is swapped its encodings."""
    return model if hasattr(model, "rotary") else getattr(model, "encoder", model)


def images(model: Any, batch: int = 2, *, by: tuple[float, float] = (1, 1)) -> Tensor:
    model = getattr(model, "encoder", model)
    height, width = getattr(getattr(model, "patch_embed", None), "img_size", (64, 64))
    return torch.randn(batch, 3, int(height * by[0]), int(width * by[1]))


def awake(model: Any) -> Any:
    """Generators that do something."""
    with torch.no_grad():
        for parameter in tower(model).rotary.encodings.parameters():
            parameter.normal_(0, 2)
    return model


def drawn(model: Any, x: Tensor) -> Tensor:
    torch.manual_seed(3)
    return model(x)


def stored(file: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The settings and the tensors in a file of `tr.save`."""
    with safe_open(file, framework="pt") as opened:
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118, not a dict
        return json.loads(opened.metadata()["torchrope"]), tensors


def rewrite(file: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Change the settings in a file."""
    header, tensors = stored(file)
    change(header)
    save_file(tensors, file, metadata={"torchrope": json.dumps(header)})
