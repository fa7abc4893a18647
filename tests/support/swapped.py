"""Small models of timm to put encodings into."""

from collections.abc import Callable
from functools import partial
from typing import Any

import timm
import torch
from timm.models.vision_transformer import ParallelScalingBlock
from torch import Tensor

SMALL: dict[str, Any] = dict(img_size=64, embed_dim=32, depth=2, num_heads=2, num_classes=5)
SWIN: dict[str, Any] = dict(img_size=56, embed_dim=32, depths=(2, 2), num_heads=(1, 2), num_classes=5)
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
    "swin": partial(timm.create_model, "swin_tiny_patch4_window7_224", **SWIN),
}


def made(name: str, **settings: Any) -> Any:
    """A model none of whose parameters is still at a start that hides something."""
    model = MODELS[name](**settings)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    return model


def images(model: Any, batch: int = 2, *, by: tuple[float, float] = (1, 1)) -> Tensor:
    height, width = model.patch_embed.img_size
    return torch.randn(batch, 3, int(height * by[0]), int(width * by[1]))


def awake(model: Any) -> Any:
    """Generators that do something."""
    with torch.no_grad():
        for parameter in model.rotary.encodings.parameters():
            parameter.normal_(0, 2)
    return model


def drawn(model: Any, x: Tensor) -> Tensor:
    torch.manual_seed(3)
    return model(x)
