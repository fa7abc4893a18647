"""Small transformers of diffusers with random weights, and inputs for them."""

from typing import Any

import diffusers
import torch
from diffusers.models.embeddings import get_3d_rotary_pos_embed
from torch import Tensor, nn

BATCH = 2
TEXT = 5

_SMALL = {"num_attention_heads": 4, "attention_head_dim": 32}
_SETTINGS: dict[str, dict[str, Any]] = {
    "CogVideoXTransformer3DModel": {
        **_SMALL,
        "in_channels": 4,
        "out_channels": 4,
        "time_embed_dim": 16,
        "text_embed_dim": 24,
        "num_layers": 2,
        "sample_width": 12,
        "sample_height": 8,
        "sample_frames": 9,
        "max_text_seq_length": TEXT,
        "use_rotary_positional_embeddings": True,
    },
    "CosmosTransformer3DModel": {
        **_SMALL,
        "in_channels": 4,
        "out_channels": 4,
        "num_layers": 2,
        "mlp_ratio": 2.0,
        "text_embed_dim": 24,
        "adaln_lora_dim": 8,
        "max_size": (4, 32, 32),
        "concat_padding_mask": False,
        "extra_pos_embed_type": None,
    },
    "Flux2Transformer2DModel": {
        **_SMALL,
        "in_channels": 4,
        "num_layers": 1,
        "num_single_layers": 2,
        "joint_attention_dim": 24,
        "timestep_guidance_channels": 16,
        "axes_dims_rope": (8, 8, 8, 8),
        "guidance_embeds": False,
    },
    "FluxTransformer2DModel": {
        **_SMALL,
        "in_channels": 4,
        "num_layers": 2,
        "num_single_layers": 1,
        "joint_attention_dim": 24,
        "pooled_projection_dim": 16,
        "axes_dims_rope": (8, 12, 12),
    },
    "HunyuanVideoTransformer3DModel": {
        **_SMALL,
        "in_channels": 4,
        "out_channels": 4,
        "num_layers": 1,
        "num_single_layers": 1,
        "num_refiner_layers": 1,
        "mlp_ratio": 2.0,
        "guidance_embeds": False,
        "text_embed_dim": 24,
        "pooled_projection_dim": 16,
        "rope_axes_dim": (8, 12, 12),
    },
    "LTX2VideoTransformer3DModel": {
        **_SMALL,
        "in_channels": 4,
        "out_channels": 4,
        "cross_attention_dim": 128,
        "audio_in_channels": 4,
        "audio_out_channels": 4,
        "audio_num_attention_heads": 2,
        "audio_attention_head_dim": 16,
        "audio_cross_attention_dim": 32,
        "num_layers": 2,
        "caption_channels": 24,
        "rope_type": "split",
    },
    "LTXVideoTransformer3DModel": {
        **_SMALL,
        "in_channels": 4,
        "out_channels": 4,
        "cross_attention_dim": 128,
        "num_layers": 2,
        "caption_channels": 24,
    },
    "Lumina2Transformer2DModel": {
        "hidden_size": 96,
        "in_channels": 4,
        "num_layers": 1,
        "num_refiner_layers": 1,
        "num_attention_heads": 4,
        "num_kv_heads": 2,
        "multiple_of": 8,
        "axes_dim_rope": (8, 8, 8),
        "axes_lens": (64, 64, 64),
        "cap_feat_dim": 24,
    },
    "QwenImageTransformer2DModel": {
        **_SMALL,
        "in_channels": 4,
        "out_channels": 4,
        "num_layers": 2,
        "joint_attention_dim": 24,
        "axes_dims_rope": (8, 12, 12),
        "patch_size": 1,
    },
    "WanTransformer3DModel": {
        **_SMALL,
        "in_channels": 4,
        "out_channels": 4,
        "text_dim": 24,
        "freq_dim": 16,
        "ffn_dim": 64,
        "num_layers": 2,
    },
}

FAMILIES = tuple(_SETTINGS)


def built(name: str, **settings: Any) -> Any:
    """A model in evaluation mode whose weights are all random: those which start at zero would hide its attention."""
    torch.manual_seed(0)
    model: nn.Module = getattr(diffusers, name)(**{**_SETTINGS[name], **settings})
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=parameter[0].numel() ** -0.5)
    return model.eval()


def inputs(name: str, scale: int = 1) -> dict[str, Any]:
    """Arguments of a call on 6 x 4 tokens of an image, or on frames of them; `scale` times as many along both."""
    torch.manual_seed(1)
    height, width = 6 * scale, 4 * scale
    video = {"hidden_states": torch.randn(BATCH, 4, 2, 2 * height, 2 * width), "timestep": torch.full((BATCH,), 500.0)}
    image = {"hidden_states": torch.randn(BATCH, height * width, 4), "timestep": torch.full((BATCH,), 0.5)}
    text: dict[str, Any] = {"encoder_hidden_states": torch.randn(BATCH, TEXT, 24)}
    mask = {"encoder_attention_mask": torch.ones(BATCH, TEXT)}
    made = {
        "CogVideoXTransformer3DModel": lambda: {
            **text,
            "hidden_states": torch.randn(BATCH, 2, 4, 2 * height, 2 * width),
            "timestep": torch.full((BATCH,), 500),
            "image_rotary_emb": get_3d_rotary_pos_embed(
                32, ((0, 0), (height, width)), (height, width), temporal_size=2
            ),
        },
        "CosmosTransformer3DModel": lambda: {**text, **video, "fps": 16},
        "Flux2Transformer2DModel": lambda: {**text, **image, "img_ids": _ids(height, width, 4), "txt_ids": _text_ids()},
        "FluxTransformer2DModel": lambda: {
            **text,
            **image,
            "pooled_projections": torch.randn(BATCH, 16),
            "img_ids": _ids(height, width, 3),
            "txt_ids": torch.zeros(TEXT, 3),
        },
        "HunyuanVideoTransformer3DModel": lambda: {
            **text,
            **video,
            **mask,
            "pooled_projections": torch.randn(BATCH, 16),
        },
        "LTX2VideoTransformer3DModel": lambda: {
            **text,
            "hidden_states": torch.randn(BATCH, 2 * height * width, 4),
            "audio_hidden_states": torch.randn(BATCH, 3, 4),
            "audio_encoder_hidden_states": torch.randn(BATCH, TEXT, 24),
            "timestep": torch.full((BATCH,), 500.0),
            **mask,
            "audio_encoder_attention_mask": torch.ones(BATCH, TEXT),
            "num_frames": 2,
            "height": height,
            "width": width,
            "audio_num_frames": 3,
        },
        "LTXVideoTransformer3DModel": lambda: {
            **text,
            **mask,
            "hidden_states": torch.randn(BATCH, 2 * height * width, 4),
            "timestep": torch.full((BATCH,), 500.0),
            "num_frames": 2,
            "height": height,
            "width": width,
            "rope_interpolation_scale": (8 / 25, 32, 32),
        },
        "Lumina2Transformer2DModel": lambda: {
            **text,
            "hidden_states": torch.randn(BATCH, 4, 2 * height, 2 * width),
            "timestep": torch.full((BATCH,), 0.5),
            "encoder_attention_mask": torch.tensor([[True] * TEXT, [True] * (TEXT - 2) + [False] * 2]),
        },
        "QwenImageTransformer2DModel": lambda: {
            **text,
            **image,
            "encoder_hidden_states_mask": torch.ones(BATCH, TEXT),
            "img_shapes": [[(1, height, width)]] * BATCH,
        },
        "WanTransformer3DModel": lambda: {**text, **video},
    }
    return made[name]()


def output(model: nn.Module, arguments: dict[str, Any]) -> Tensor:
    """What a model returns first: the image or the video."""
    result: Tensor = model(**arguments, return_dict=False)[0]
    return result


def _ids(height: int, width: int, axes: int) -> Tensor:
    """Flux's coordinates `(tokens, axes)`: rows and columns in the second and third."""
    ids = torch.zeros(height, width, axes)
    ids[..., 1] = torch.arange(height).unsqueeze(-1)
    ids[..., 2] = torch.arange(width)
    return ids.flatten(0, 1)


def _text_ids() -> Tensor:
    """Flux 2 counts the text along its last axis."""
    ids = torch.zeros(TEXT, 4)
    ids[:, 3] = torch.arange(TEXT)
    return ids
