"""Small vision towers of transformers without rotary encoding, their inputs, and the positions of their tokens."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import transformers
from rotating import TEXT, strong
from torch import Tensor

import torchrope as tr

WIDTHS: dict[str, Any] = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48)
IMAGES: dict[str, Any] = dict(**WIDTHS, image_size=32, patch_size=8)
CLIPS: dict[str, Any] = dict(**{**WIDTHS, "hidden_size": 48}, patch_size=8, tubelet_size=2)


class Tower(NamedTuple):
    """A tower, what it is given, the indices `([batch,] tokens, axes)` of its tokens, and how many come before them."""

    model: Any
    given: dict[str, Any]
    indices: Tensor
    prefix: int = 0


def pixels(*size: int) -> dict[str, Any]:
    return {"pixel_values": torch.randn(2, 3, *(size or (32, 32)))}


def image(name: str, prefix: int, **settings: Any) -> Tower:
    """A tower of pictures with some tokens in front."""
    model = getattr(transformers, name)
    return Tower(strong(model(model.config_class(**{**IMAGES, **settings}))), pixels(), tr.grid(4, 4), prefix)


def beit() -> Tower:
    tower = image("BeitModel", 1, use_relative_position_bias=True, use_absolute_position_embeddings=True)
    with torch.no_grad():
        for name, parameter in tower.model.named_parameters():
            if "lambda" in name:
                parameter.fill_(1.0)
    return tower


def vit_mae() -> Tower:
    tower = image("ViTMAEModel", 1, mask_ratio=0.5)
    noise = torch.rand(2, 16)
    kept = noise.argsort(dim=1)[:, :8]
    return tower._replace(given={**tower.given, "noise": noise}, indices=tr.grid(4, 4)[kept])


def blip2() -> Tower:
    return image("Blip2VisionModel", 1)


def siglip2() -> Tower:
    config = transformers.Siglip2VisionConfig(**WIDTHS, patch_size=8, num_patches=16)
    shapes, mask = torch.tensor([[4, 4], [2, 6]]), torch.ones(2, 16, dtype=torch.long)
    mask[1, 12:] = 0
    given = {"pixel_values": torch.randn(2, 16, 192), "pixel_attention_mask": mask, "spatial_shapes": shapes}
    number = torch.arange(16).expand(2, 16)
    indices = torch.stack([number // shapes[:, 1:], number % shapes[:, 1:]], dim=-1)
    return Tower(strong(transformers.Siglip2VisionModel(config)), given, indices.float())


def videomae() -> Tower:
    config = transformers.VideoMAEConfig(**CLIPS, image_size=16, num_frames=4)
    model = strong(transformers.VideoMAEModel(config))
    return Tower(model, {"pixel_values": torch.randn(2, 4, 3, 16, 16)}, tr.grid(2, 2, 2))


def videomae_masked() -> Tower:
    tower = videomae()
    masked = torch.tensor([[0, 1, 0, 0, 1, 1, 0, 1], [1, 0, 1, 0, 0, 1, 1, 0]]).bool()
    seen = tr.grid(2, 2, 2).expand(2, -1, -1)[~masked].reshape(2, 4, 3)
    return tower._replace(given={**tower.given, "bool_masked_pos": masked}, indices=seen)


def vjepa2() -> Tower:
    predictor = dict(pred_hidden_size=48, pred_num_attention_heads=2, pred_num_hidden_layers=1, num_pooler_layers=1)
    config = transformers.VJEPA2Config(**CLIPS, **predictor, crop_size=16, frames_per_clip=4)
    given = {"pixel_values_videos": torch.randn(2, 4, 3, 16, 16), "skip_predictor": True}
    return Tower(strong(transformers.VJEPA2Model(config)), given, tr.grid(2, 2, 2))


def sam(name: str = "Sam", **settings: Any) -> Tower:
    model, config = getattr(transformers, f"{name}VisionModel"), getattr(transformers, f"{name}VisionConfig")
    sizes = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, output_channels=8, mlp_dim=48)
    windows = dict(window_size=3, global_attn_indexes=[1], image_size=32, patch_size=8)
    return Tower(strong(model(config(**sizes, **windows, **settings))), pixels(), tr.grid(4, 4))


TOWERS: dict[str, Callable[[], Tower]] = {
    "beit": beit,
    "blip2": blip2,
    "deit": lambda: image("DeiTModel", 2),
    "dpt": lambda: image("DPTModel", 1, is_hybrid=False, backbone_out_indices=[0, 1]),
    "ijepa": lambda: image("IJepaModel", 0),
    "instructblip": lambda: image("InstructBlipVisionModel", 1),
    "sam": sam,
    "sam_hq": lambda: sam("SamHQ"),
    "siglip2": siglip2,
    "videomae": videomae,
    "videomae-masked": videomae_masked,
    "vit_mae": vit_mae,
    "vjepa2": vjepa2,
}


def depth_of_dinov2() -> tuple[Any, dict[str, Any]]:
    """DPT with DINOv2 as its backbone."""
    stages = dict(out_features=["stage1", "stage2"], reshape_hidden_states=False)
    backbone = transformers.Dinov2Config(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, mlp_ratio=2, image_size=32, patch_size=8, **stages
    )
    config = transformers.DPTConfig(
        backbone_config=backbone,
        hidden_size=32,
        neck_hidden_sizes=[8, 8],
        reassemble_factors=[2, 1],
        fusion_hidden_size=8,
        readout_type="project",
    )
    return strong(transformers.DPTForDepthEstimation(config)), pixels()


def blip2_whole() -> tuple[Any, dict[str, Any]]:
    """BLIP-2 with its vision tower, its queries and a decoder that rotates."""
    config = transformers.Blip2Config(
        vision_config=IMAGES,
        qformer_config=dict(**WIDTHS, vocab_size=20, encoder_hidden_size=32, max_position_embeddings=16),
        text_config=transformers.LlamaConfig(**TEXT),
        num_query_tokens=4,
        image_token_index=49,
    )
    words = torch.cat([torch.full((2, 4), 49), torch.randint(3, 40, (2, 5))], dim=1)
    return strong(transformers.Blip2ForConditionalGeneration(config)), {**pixels(), "input_ids": words}
