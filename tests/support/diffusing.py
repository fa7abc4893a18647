"""Small transformers of diffusers with random weights, whose outputs depend on their rotation, and their inputs."""

from collections.abc import Callable
from typing import Any

import torch
from diffusers import models
from diffusers.models.embeddings import get_3d_rotary_pos_embed
from torch import Tensor

import torchrope as tr

Inputs = dict[str, Any]
_SMALL = {"in_channels": 4, "out_channels": 4, "num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 2}
_FLUX = {**_SMALL, "num_layers": 1, "num_single_layers": 1, "joint_attention_dim": 8}


def drawn(*shape: int, seed: int = 0) -> Tensor:
    """Normal numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _step() -> Tensor:
    return torch.tensor([0.5])


def _flux(**settings: Any) -> Any:
    return models.FluxTransformer2DModel(
        **{
            **_FLUX,
            "pooled_projection_dim": 8,
            "axes_dims_rope": (4, 4, 8),
            **settings,
        }
    )


def _flux_inputs(rows: int = 4, columns: int = 5) -> Inputs:
    image = tr.grid(rows, columns)
    return {
        "hidden_states": drawn(1, rows * columns, 4),
        "encoder_hidden_states": drawn(1, 3, 8, seed=1),
        "pooled_projections": drawn(1, 8, seed=2),
        "timestep": _step(),
        "img_ids": torch.cat([torch.zeros(len(image), 1), image], dim=-1),
        "txt_ids": torch.zeros(3, 3),
    }


def _flux2(**settings: Any) -> Any:
    return models.Flux2Transformer2DModel(
        **{
            **_FLUX,
            "timestep_guidance_channels": 16,
            "axes_dims_rope": (4, 4, 4, 4),
            **settings,
        }
    )


def _flux2_inputs(rows: int = 4, columns: int = 5) -> Inputs:
    image, text = tr.grid(rows, columns), torch.arange(3.0)
    return {
        "hidden_states": drawn(1, rows * columns, 4),
        "encoder_hidden_states": drawn(1, 3, 8, seed=1),
        "timestep": _step(),
        "guidance": torch.ones(1),
        "img_ids": torch.nn.functional.pad(image, (1, 1)),
        "txt_ids": torch.nn.functional.pad(text.unsqueeze(-1), (3, 0)),
    }


def _qwen(**settings: Any) -> Any:
    return models.QwenImageTransformer2DModel(
        **{
            **_SMALL,
            "joint_attention_dim": 8,
            "axes_dims_rope": (4, 4, 8),
            **settings,
        }
    )


def _qwen_inputs(rows: int = 4, columns: int = 5) -> Inputs:
    return {
        "hidden_states": drawn(1, rows * columns + 6, 4),
        "encoder_hidden_states": drawn(1, 3, 8, seed=1),
        "timestep": _step(),
        "img_shapes": [[(1, rows, columns), (1, 2, 3)]],  # the picture, and one that is edited
    }


def _video(frames: int = 3, rows: int = 6, columns: int = 8) -> Tensor:
    return drawn(1, 4, frames, rows, columns)


def _wan(**settings: Any) -> Any:
    return models.WanTransformer3DModel(
        **{
            **_SMALL,
            "text_dim": 8,
            "freq_dim": 16,
            "ffn_dim": 32,
            **settings,
        }
    )


def _wan_inputs(*sizes: int) -> Inputs:
    return {"hidden_states": _video(*sizes), "timestep": _step(), "encoder_hidden_states": drawn(1, 3, 8, seed=1)}


def _hunyuan(**settings: Any) -> Any:
    return models.HunyuanVideoTransformer3DModel(
        **{
            **_SMALL,
            "num_layers": 1,
            "num_single_layers": 1,
            "num_refiner_layers": 1,
            "guidance_embeds": False,
            "text_embed_dim": 8,
            "pooled_projection_dim": 8,
            "rope_axes_dim": (4, 4, 8),
            **settings,
        }
    )


def _hunyuan_inputs(*sizes: int) -> Inputs:
    return {
        **_wan_inputs(*sizes),
        "encoder_attention_mask": torch.tensor([[1, 1, 0]]),
        "pooled_projections": drawn(1, 8, seed=2),
    }


def _cogvideox(**settings: Any) -> Any:
    return models.CogVideoXTransformer3DModel(
        **{
            **_SMALL,
            "time_embed_dim": 8,
            "text_embed_dim": 8,
            "sample_width": 8,
            "sample_height": 6,
            "sample_frames": 9,
            "max_text_seq_length": 3,
            "use_rotary_positional_embeddings": True,
            **settings,
        }
    )


def _cogvideox_inputs(frames: int = 3, rows: int = 6, columns: int = 8) -> Inputs:
    sizes = (rows // 2, columns // 2)
    return {
        "hidden_states": _video(frames, rows, columns).transpose(1, 2),
        "encoder_hidden_states": drawn(1, 3, 8, seed=1),
        "timestep": torch.tensor([500]),
        "image_rotary_emb": get_3d_rotary_pos_embed(16, ((0, 1), (30.0, 45.0)), sizes, frames),
    }


def _ltx(**settings: Any) -> Any:
    return models.LTXVideoTransformer3DModel(
        **{
            **_SMALL,
            "cross_attention_dim": 32,
            "caption_channels": 8,
            **settings,
        }
    )


def _ltx_coordinates(frames: int, rows: int, columns: int) -> Tensor:
    """Frames and pixels `(1, 3, tokens)` that become multiples of 1/2 in [-1, 1].

    Angles reach 15,708 radians, which LTX's tables round to float32, by up to 5e-4; these products are exact.
    """
    return (tr.grid(frames, rows, columns) / 4 * torch.tensor([20, 2048, 2048])).T.unsqueeze(0)


def _ltx_inputs(frames: int = 2, rows: int = 3, columns: int = 4) -> Inputs:
    return {
        "hidden_states": drawn(1, frames * rows * columns, 4),
        "encoder_hidden_states": drawn(1, 3, 8, seed=1),
        "timestep": torch.tensor([500]),
        "encoder_attention_mask": torch.ones(1, 3, dtype=torch.bool),
        "num_frames": frames,
        "height": rows,
        "width": columns,
        "video_coords": _ltx_coordinates(frames, rows, columns),
    }


def _ltx2(**settings: Any) -> Any:
    return models.LTX2VideoTransformer3DModel(
        **{
            **_SMALL,
            "cross_attention_dim": 32,
            "audio_in_channels": 4,
            "audio_out_channels": 4,
            "audio_num_attention_heads": 2,
            "audio_attention_head_dim": 8,
            "audio_cross_attention_dim": 16,
            "caption_channels": 8,
            **settings,
        }
    )


def _ltx2_inputs(frames: int = 2, rows: int = 3, columns: int = 4) -> Inputs:
    return {
        **_ltx_inputs(frames, rows, columns),
        "audio_hidden_states": drawn(1, 5, 4, seed=3),
        "audio_encoder_hidden_states": drawn(1, 3, 8, seed=4),
        "audio_encoder_attention_mask": torch.ones(1, 3, dtype=torch.bool),
        "audio_num_frames": 5,
        "video_coords": _ltx_coordinates(frames, rows, columns).unsqueeze(-1).expand(-1, -1, -1, 2),
    }


def _lumina2(**settings: Any) -> Any:
    return models.Lumina2Transformer2DModel(
        **{
            "sample_size": 8,
            "in_channels": 4,
            "hidden_size": 48,
            "num_layers": 1,
            "num_refiner_layers": 1,
            "num_attention_heads": 4,
            "num_kv_heads": 2,
            "multiple_of": 8,
            "axes_dim_rope": (4, 4, 4),
            "axes_lens": (30, 32, 32),
            "cap_feat_dim": 8,
            **settings,
        }
    )


def _lumina2_inputs(rows: int = 6, columns: int = 8) -> Inputs:
    return {
        "hidden_states": drawn(2, 4, rows, columns),
        "timestep": torch.tensor([0.5, 0.2]),
        "encoder_hidden_states": drawn(2, 4, 8, seed=1),
        "encoder_attention_mask": torch.tensor([[True] * 4, [True, True, False, False]]),
    }


def _cosmos(**settings: Any) -> Any:
    return models.CosmosTransformer3DModel(
        **{
            **_SMALL,
            "mlp_ratio": 2,
            "text_embed_dim": 8,
            "adaln_lora_dim": 4,
            "max_size": (8, 32, 32),
            "rope_scale": (2.0, 1.0, 1.5),
            **settings,
        }
    )


def _cosmos_inputs(*sizes: int) -> Inputs:
    video = _video(*sizes)
    return {**_wan_inputs(*sizes), "fps": 30, "padding_mask": torch.zeros(1, 1, *video.shape[3:])}


CASES: dict[str, tuple[Callable[..., Any], Callable[..., Inputs]]] = {
    "flux": (_flux, _flux_inputs),
    "flux2": (_flux2, _flux2_inputs),
    "qwen": (_qwen, _qwen_inputs),
    "wan": (_wan, _wan_inputs),
    "hunyuan": (_hunyuan, _hunyuan_inputs),
    "cogvideox": (_cogvideox, _cogvideox_inputs),
    "ltx": (_ltx, _ltx_inputs),
    "ltx2": (_ltx2, _ltx2_inputs),
    "lumina2": (_lumina2, _lumina2_inputs),
    "cosmos": (_cosmos, _cosmos_inputs),
}


def built(name: str, **settings: Any) -> Any:
    """A model whose scores depend much on q and k, and whose outputs depend on its attention."""
    torch.manual_seed(0)
    model = CASES[name][0](**settings)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 1.0 / parameter[0].numel() ** 0.5, generator=generator)
        for path, parameter in model.named_parameters():
            if any(f".{norm}" in path for norm in ("norm_q", "norm_k", "norm_added")):
                parameter.fill_(1.5)
    return model.eval()


def inputs(name: str, *sizes: int) -> Inputs:
    """What to call it with, at another size if asked for."""
    return CASES[name][1](*sizes)


def output(model: Any, given: Inputs) -> Tensor:
    """Its prediction."""
    predicted: Tensor = model(**given, return_dict=False)[0]
    return predicted
