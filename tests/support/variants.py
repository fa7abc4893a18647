"""Small variants of the transformers in `diffusing`, which have no family of their own, with inputs."""

import inspect
from typing import Any

import diffusers
import torch
from diffusers.models.embeddings import get_3d_rotary_pos_embed
from diffusing import Inputs, drawn, strengthened

import torchrope as tr

_SIZE = {"num_attention_heads": 2, "attention_head_dim": 16}
_BLOCKS = {"num_layers": 1, "num_single_layers": 1}
_IMAGE = {**_SIZE, **_BLOCKS, "in_channels": 4, "joint_attention_dim": 8, "axes_dims_rope": [4, 4, 8]}
_LATENTS = {**_SIZE, "in_channels": 4, "out_channels": 4}
_WAN = {**_LATENTS, "text_dim": 8, "freq_dim": 16, "ffn_dim": 32, "num_layers": 2}
_HUNYUAN = {**_LATENTS, "num_refiner_layers": 1, "text_embed_dim": 8}
_CHANNELS = {str(size): 4 for size in (4, 8, 16, 32)}
_COGVIDEOX = {
    **_LATENTS,
    "time_embed_dim": 8,
    "text_embed_dim": 8,
    "num_layers": 2,
    "sample_width": 8,
    "sample_height": 6,
    "sample_frames": 9,
    "max_text_seq_length": 3,
    "use_rotary_positional_embeddings": True,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "ChromaTransformer2DModel": {
        **_IMAGE,
        "approximator_num_channels": 8,
        "approximator_hidden_dim": 8,
        "approximator_layers": 1,
    },
    "BriaTransformer2DModel": {**_IMAGE, "pooled_projection_dim": 8},
    "BriaFiboTransformer2DModel": {**_IMAGE, "text_encoder_dim": 8},
    "LongCatImageTransformer2DModel": {**_IMAGE, "pooled_projection_dim": 8},
    "OvisImageTransformer2DModel": {**_IMAGE, "out_channels": 4},
    "Flux3Transformer2DModel": {**_IMAGE, "cond_in_channels": 4, "timestep_channels": 16},
    "Krea2Transformer2DModel": {
        "in_channels": 4,
        "num_layers": 2,
        "attention_head_dim": 16,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 32,
        "timestep_embed_dim": 16,
        "text_hidden_dim": 8,
        "num_text_layers": 2,
        "text_num_attention_heads": 2,
        "text_num_key_value_heads": 2,
        "text_intermediate_size": 16,
        "num_layerwise_text_blocks": 1,
        "num_refiner_text_blocks": 1,
        "axes_dims_rope": (4, 4, 8),
    },
    "WanVACETransformer3DModel": {**_WAN, "vace_layers": [0, 1], "vace_in_channels": 4},
    "WanAnimateTransformer3DModel": {
        **_WAN,
        "in_channels": 12,
        "latent_channels": 4,
        "image_dim": None,
        "motion_encoder_channel_sizes": _CHANNELS,
        "motion_encoder_size": 16,
        "motion_style_dim": 8,
        "motion_dim": 4,
        "motion_encoder_dim": 8,
        "face_encoder_hidden_dim": 8,
        "face_encoder_num_heads": 2,
        "inject_face_latents_blocks": 1,
    },
    "SkyReelsV2Transformer3DModel": _WAN,
    "ChronoEditTransformer3DModel": {**_WAN, "attention_head_dim": 24},
    "HeliosTransformer3DModel": {**_WAN, "rope_dim": (4, 4, 8)},
    "AnyFlowTransformer3DModel": _WAN,
    "ConsisIDTransformer3DModel": _COGVIDEOX,
    "HunyuanVideo15Transformer3DModel": {
        **_HUNYUAN,
        "num_layers": 2,
        "text_embed_2_dim": 8,
        "image_embed_dim": 8,
        "rope_axes_dim": (4, 4, 8),
    },
    "HunyuanVideoFramepackTransformer3DModel": {
        **_HUNYUAN,
        **_BLOCKS,
        "guidance_embeds": False,
        "pooled_projection_dim": 8,
        "rope_axes_dim": (4, 4, 8),
        "has_image_proj": True,
        "image_proj_dim": 8,
        "has_clean_x_embedder": True,
    },
    "HunyuanImageTransformer2DModel": {**_HUNYUAN, **_BLOCKS, "rope_axes_dim": (8, 8)},
    "MotifVideoTransformer3DModel": {**_LATENTS, **_BLOCKS, "text_embed_dim": 8, "rope_axes_dim": (4, 4, 8)},
    "SanaVideoTransformer3DModel": {
        **_LATENTS,
        "num_layers": 2,
        "num_cross_attention_heads": 2,
        "cross_attention_head_dim": 16,
        "cross_attention_dim": 32,
        "caption_channels": 8,
    },
    "CogView4Transformer2DModel": {
        **_LATENTS,
        "num_layers": 2,
        "text_embed_dim": 8,
        "time_embed_dim": 8,
        "condition_dim": 8,
        "rope_axes_dim": (8, 8),
    },
    "EasyAnimateTransformer3DModel": {
        **_LATENTS,
        "patch_size": 2,
        "time_embed_dim": 8,
        "num_layers": 2,
        "mmdit_layers": 2,
        "text_embed_dim": 8,
        "add_norm_text_encoder": True,
    },
    "MochiTransformer3DModel": {
        **_LATENTS,
        "num_layers": 2,
        "pooled_projection_dim": 8,
        "text_embed_dim": 8,
        "time_embed_dim": 16,
    },
}
"""Arguments of classes of diffusers."""


def variant(name: str, seed: int = 0) -> Any:
    """A small model whose outputs depend on its rotation."""
    torch.manual_seed(seed)
    return strengthened(getattr(diffusers, name)(**SETTINGS[name]), seed)


def sample(name: str, *sizes: int) -> Inputs:
    """Keyword arguments of its forward, for a video or image of other sizes if asked for."""
    text, step = drawn(1, 3, 8, seed=1), torch.tensor([0.5])
    common = {"encoder_hidden_states": text, "timestep": step}
    if "img_ids" in _arguments(name) or "position_ids" in _arguments(name):
        return _of_image(name, common, *(sizes or (4, 5)))
    video = drawn(1, 4, *(sizes or (3, 6, 8)))
    masked = {"encoder_attention_mask": torch.tensor([[1, 1, 0]])}
    common["hidden_states"] = video
    match name.removesuffix("Transformer3DModel").removesuffix("Transformer2DModel"):
        case "WanVACE":
            return {**common, "control_hidden_states": drawn(*video.shape, seed=2)}
        case "WanAnimate":
            frames, *rest = video.shape[2:]
            pose, face = drawn(1, 4, frames - 1, *rest, seed=2), drawn(1, 3, 4 * (frames - 1) - 3, 16, 16, seed=3)
            latents = drawn(1, 12, frames, *rest)
            return {**common, "hidden_states": latents, "pose_hidden_states": pose, "face_pixel_values": face}
        case "AnyFlow":
            times = {
                "timestep": torch.full((1, video.shape[2]), 0.5),
                "r_timestep": torch.full((1, video.shape[2]), 0.25),
            }
            return {**common, **times, "hidden_states": video.transpose(1, 2)}
        case "ConsisID":
            frames, *rest = video.shape[2:]
            tables = get_3d_rotary_pos_embed(16, ((0, 1), (30.0, 45.0)), [size // 2 for size in rest], frames)
            return {**common, "hidden_states": video.transpose(1, 2), "image_rotary_emb": tables}
        case "HunyuanVideo15":
            others = {"encoder_hidden_states_2": drawn(1, 2, 8, seed=3), "image_embeds": drawn(1, 2, 8, seed=4)}
            return {**common, **masked, **others, "encoder_attention_mask_2": torch.tensor([[1, 0]])}
        case "HunyuanVideoFramepack":
            others = {"pooled_projections": drawn(1, 8, seed=2), "image_embeds": drawn(1, 2, 8, seed=4)}
            for name, frames in (("clean", 1), ("history_2x", 2), ("history_4x", 4)):
                others[f"latents_{name}"] = drawn(1, 4, frames, *video.shape[3:], seed=5)
                others[f"indices_latents_{name}"] = torch.arange(frames)
            return {**common, **masked, **others, "indices_latents": torch.arange(video.shape[2])}
        case "HunyuanImage":
            return {**common, **masked, "hidden_states": video[:, :, 0]}
        case "CogView4":
            size = torch.tensor([[6.0, 8.0]])
            crop = {"original_size": size, "target_size": size, "crop_coords": torch.zeros(1, 2)}
            return {**common, **crop, "hidden_states": video[:, :, 0]}
        case "Mochi":
            return {**common, "encoder_attention_mask": torch.ones(1, 3, dtype=torch.bool)}
        case "MotifVideo":
            return {**common, **masked}
    return common


def _arguments(name: str) -> tuple[str, ...]:
    return tuple(inspect.signature(inspect.unwrap(getattr(diffusers, name).forward)).parameters)


def _of_image(name: str, common: Inputs, rows: int, columns: int) -> Inputs:
    image = torch.nn.functional.pad(tr.grid(rows, columns), (1, 0))
    common["hidden_states"] = drawn(1, rows * columns, 4)
    if name.startswith("Krea2"):
        ids = torch.cat([torch.zeros(3, 3), image])
        return {**common, "encoder_hidden_states": drawn(1, 3, 2, 8, seed=1), "position_ids": ids}
    if name.startswith("Flux3"):
        cond = {"image_cond_hidden_states": drawn(1, 2, 4, seed=3), "image_cond_ids": tr.grid(1, 2, 1) + 1}
        return {**common, **cond, "img_ids": image, "txt_ids": torch.zeros(3, 3)}
    if name.startswith("BriaFibo"):
        common["text_encoder_layers"] = [drawn(1, 3, 8, seed=seed) for seed in (2, 3)]
    return {**common, "img_ids": image, "txt_ids": torch.zeros(3, 3)}
