"""Small transformers models with rotary encodings, and their inputs."""

import inspect
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
import transformers
from torch import Tensor

WIDTHS: dict[str, Any] = dict(intermediate_size=48, num_hidden_layers=2, num_attention_heads=2)
DEPTHS: dict[str, Any] = dict(hidden_size=32, intermediate_size=48, num_heads=2, depth=2, in_channels=3)
LEARNED: dict[str, Any] = dict(num_position_embeddings=64, deepstack_visual_indexes=[0])
WINDOWS: dict[str, Any] = dict(fullatt_block_indexes=[1], window_size=16)
OUT: dict[str, Any] = dict(patch_size=4, temporal_patch_size=1, out_hidden_size=32)
IMAGES: dict[str, Any] = dict(hidden_size=32, **WIDTHS, image_size=32, patch_size=4)
TEXT: dict[str, Any] = dict(
    hidden_size=32,
    **WIDTHS,
    num_key_value_heads=1,
    vocab_size=50,
    max_position_embeddings=64,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)

# Towers with `apply_rotary_pos_emb_vision`, by their package: the class and what its configuration is told.
SHARED: dict[str, tuple[str, dict[str, Any]]] = {
    "cohere_compass": ("CohereCompassVisionModel", dict(**DEPTHS, **OUT, **LEARNED)),
    "dots3_note": (
        "Dots3NoteVisionModel",
        dict(IMAGES, num_channels=3, mlp_layer_types=["dense"] * 2, adapter_in_dim=32, adapter_out_dim=32),
    ),
    "ernie4_5_vl_moe": ("Ernie4_5_VLMoeVisionTransformerPretrainedModel", dict(**DEPTHS, patch_size=4)),
    "exaone4_5": ("Exaone4_5_VisionModel", dict(**DEPTHS, **OUT, **WINDOWS, num_key_value_heads=1)),
    "glm4v": ("Glm4vVisionModel", dict(**DEPTHS, **OUT, image_size=32)),
    "glm4v_moe": ("Glm4vMoeVisionModel", dict(**DEPTHS, **OUT, image_size=32)),
    "glm5_next": ("Glm5NextVisionModel", dict(**DEPTHS, **OUT)),
    "glm_ocr": ("GlmOcrVisionModel", dict(**DEPTHS, **OUT)),
    "inkling2": ("Inkling2VisionModel", dict(IMAGES, image_size=32)),
    "kimi_k25": ("Kimi_K25VisionModel", dict(hidden_size=32, **WIDTHS, patch_size=4)),
    "lfm3_vl": (
        "Lfm3VlVisionModel",
        dict(
            hidden_size=32,
            **WIDTHS,
            patch_size=4,
            temporal_patch_size=1,
            num_key_value_heads=1,
            layer_types=["full_attention"] * 2,
        ),
    ),
    "minimax_m3_vl": ("MiniMaxM3VLVisionModel", dict(IMAGES, temporal_patch_size=1)),
    "muse_glimmer": ("MuseGlimmerVisionModel", dict(hidden_size=32, **WIDTHS, patch_size=4, patch_temporal=1)),
    "muse_spark": ("MuseSparkVisionModel", dict(hidden_size=32, **WIDTHS, patch_size=4, patch_temporal=1)),
    "paddleocr_vl": ("PaddleOCRVisionModel", dict(IMAGES)),
    "qwen2_5_omni": ("Qwen2_5OmniVisionEncoder", dict(**DEPTHS, **OUT, **WINDOWS)),
    "qwen2_5_vl": ("Qwen2_5_VisionTransformerPretrainedModel", dict(**DEPTHS, **OUT, **WINDOWS)),
    "qwen2_vl": (
        "Qwen2VisionTransformerPretrainedModel",
        dict(embed_dim=32, hidden_size=32, num_heads=2, depth=2, patch_size=4, temporal_patch_size=1, mlp_ratio=2),
    ),
    "qwen3_5": ("Qwen3_5VisionModel", dict(**DEPTHS, **OUT, num_position_embeddings=64)),
    "qwen3_5_moe": ("Qwen3_5MoeVisionModel", dict(**DEPTHS, **OUT, num_position_embeddings=64)),
    "qwen3_omni_moe": ("Qwen3OmniMoeVisionEncoder", dict(**DEPTHS, **OUT, **LEARNED)),
    "qwen3_vl": ("Qwen3VLVisionModel", dict(**DEPTHS, **OUT, **LEARNED)),
    "qwen3_vl_moe": ("Qwen3VLMoeVisionModel", dict(**DEPTHS, **OUT, **LEARNED)),
    "qwen4_exp": ("Qwen4ExpVisionModel", dict(**DEPTHS, **OUT, num_position_embeddings=64)),
    "step3p7": ("Step3p7VisionModel", dict(IMAGES)),
    "video_llama_3": ("VideoLlama3VisionModel", dict(hidden_size=32, **WIDTHS, patch_size=4)),
}


def strong(model: Any) -> Any:
    """A model whose scores depend much on q and k, and whose outputs depend on its attention."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            spread = 2.0 if any(part in name for part in ("q_proj", "k_proj", "qkv")) else 1.2
            if parameter.ndim > 1 and parameter.numel() > 0:
                parameter.normal_(0, spread / parameter[0].numel() ** 0.5, generator=generator)
            if "layer_scale" in name:
                parameter.fill_(1.0)
    return model.eval()


def error(came: Tensor, expected: Tensor) -> float:
    """Largest difference, relative to the largest of what was expected."""
    return float((came - expected).detach().abs().max() / expected.detach().abs().max())


def outputs(model: Any, images: dict[str, Any]) -> Tensor:
    """The first of what a model gives."""
    output = model(**images)
    tensor: Tensor = output if isinstance(output, Tensor) else output[0]
    return tensor


def learned(model: Any) -> list[Tensor]:
    """The parameters of its encodings."""
    return [parameter for name, parameter in model.named_parameters() if ".encodings." in f".{name}"]


def shared(package: str) -> Any:
    """A tower of `SHARED`."""
    name, settings = SHARED[package]
    modeling = import_module(f"transformers.models.{package}.modeling_{package}")
    tower = getattr(modeling, name)
    return strong(tower(inspect.signature(tower.__init__).parameters["config"].annotation(**settings)))


def packed(package: str, *sizes: tuple[int, int, int]) -> dict[str, Any]:
    """Images `(frames, rows, columns)` of patches of a tower of `SHARED`, one behind the other."""
    frames = 1 if package in ("glm4v", "glm4v_moe", "kimi_k25") else 2  # these take pictures alone, or all of a length
    grid = torch.tensor(sizes or ((1, 4, 4), (frames, 8, 4)))
    patches = torch.randn(int(grid.prod(-1).sum()), 3 * 4 * 4)
    if package == "step3p7":
        return {"pixel_values": torch.randn(2, 3, 32, 48)}
    if package == "inkling2":  # two by two patches are one token
        return {"pixel_values": patches.view(-1, 8, 8, 3), "image_grid_thw": grid // torch.tensor([1, 2, 2])}
    if package == "video_llama_3":
        return {"pixel_values": patches, "grid_thw": grid, "merge_sizes": torch.tensor([1, 2])}
    if package == "kimi_k25":
        return {"pixel_values": patches.view(-1, 3, 4, 4), "grid_thw": grid}
    if package == "paddleocr_vl":
        return {"pixel_values": patches.view(1, -1, 3, 4, 4), "grid_thw": grid}
    by_name = package in ("dots3_note", "lfm3_vl", "minimax_m3_vl", "muse_glimmer", "muse_spark")
    return {"pixel_values" if by_name else "hidden_states": patches, "grid_thw": grid}


def pixtral() -> Any:
    return strong(transformers.PixtralVisionModel(transformers.PixtralVisionConfig(**IMAGES)))


def llama4() -> Any:
    config = transformers.Llama4VisionConfig(
        **{**IMAGES, "intermediate_size": 128},
        vision_output_dim=32,
        projector_input_dim=32,
        projector_output_dim=32,
        rope_parameters=dict(rope_type="default", rope_theta=100.0),
    )
    return strong(transformers.Llama4VisionModel(config))


def sam3() -> Any:
    backbone = dict(IMAGES, pretrain_image_size=32, window_size=3, global_attn_indexes=[1], model_type="sam3_vit_model")
    config = transformers.Sam3VisionConfig(
        backbone_config=backbone, fpn_hidden_size=16, backbone_feature_sizes=[[32, 32], [16, 16], [8, 8]]
    )
    return strong(transformers.Sam3VisionModel(config).backbone)


IMAGE_TOWERS: dict[str, tuple[Callable[[], Any], Callable[[], dict[str, Any]]]] = {
    "pixtral": (
        pixtral,
        lambda: {"pixel_values": torch.randn(2, 3, 32, 32), "image_sizes": torch.tensor([[16, 32], [32, 24]])},
    ),
    "llama4": (llama4, lambda: {"pixel_values": torch.randn(2, 3, 32, 32)}),
    "sam3": (sam3, lambda: {"pixel_values": torch.randn(2, 3, 32, 32)}),
}


def tower(name: str) -> tuple[Any, dict[str, Any]]:
    """A vision tower and images for it."""
    if name in SHARED:
        return shared(name), packed(name)
    build, images = IMAGE_TOWERS[name]
    return build(), images()


def text(name: str, **settings: Any) -> Any:
    """A language model."""
    model = getattr(transformers, name)
    return strong(model(model.config_class(**{**TEXT, **settings})))


def hunyuan_vl() -> Any:
    """A text model of four axes, in which the channels of a pair rotate by different ones."""
    sections = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 2, 2, 2]}
    sizes = {**TEXT, "num_attention_heads": 4, "head_dim": 16, "rope_parameters": sections}
    return strong(transformers.HunYuanVLTextModel(transformers.HunYuanVLTextModel.config_class(**sizes)))


def tokens(*shape: int) -> Tensor:
    """Words of a language model."""
    return torch.randint(3, 40, shape or (2, 9))


def qwen2_5_vl() -> tuple[Any, dict[str, Any]]:
    """Qwen2.5-VL whole, and an image with text."""
    config = transformers.Qwen2_5_VLConfig(
        vision_config=dict(**DEPTHS, **OUT, **WINDOWS),
        text_config={**TEXT, "rope_parameters": dict(rope_type="default", rope_theta=1e2, mrope_section=[2, 3, 3])},
        image_token_id=49,
        video_token_id=48,
        vision_start_token_id=47,
        vision_end_token_id=46,
    )
    words = torch.cat([torch.tensor([[47, *[49] * 8, 46]]), tokens(1, 5)], dim=1)
    images = {"pixel_values": torch.randn(32, 48), "image_grid_thw": torch.tensor([[1, 4, 8]])}
    model = strong(transformers.Qwen2_5_VLForConditionalGeneration(config))
    return model, {"input_ids": words, "mm_token_type_ids": (words == 49).int(), **images}


def llava() -> tuple[Any, dict[str, Any]]:
    """LLaVA with Pixtral and Mistral, and an image with text."""
    config = transformers.LlavaConfig(
        vision_config=transformers.PixtralVisionConfig(**IMAGES),
        text_config=transformers.MistralConfig(**TEXT),
        image_token_index=49,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
    )
    words = torch.cat([torch.full((1, 64), 49), tokens(1, 5)], dim=1)
    images = {"pixel_values": torch.randn(1, 3, 32, 32), "image_sizes": torch.tensor([[32, 32]])}
    return strong(transformers.LlavaForConditionalGeneration(config)), {"input_ids": words, **images}


LLAMA3 = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32)
DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}),
    "qwen3": ("Qwen3ForCausalLM", dict(head_dim=16)),
    "phi": ("PhiForCausalLM", {}),  # hands a part of the channels to its rotation
    "cohere": ("CohereForCausalLM", {}),  # pairs of neighbours
    "glm4": ("Glm4ForCausalLM", dict(head_dim=16)),  # neighbours, half of the channels
    "linear": ("LlamaForCausalLM", dict(rope_parameters=dict(rope_type="linear", factor=2.0, rope_theta=1e2))),
    "llama3": ("LlamaForCausalLM", dict(rope_parameters=dict(rope_type="llama3", rope_theta=1e2, **LLAMA3))),
    **{
        name: (f"{name}ForCausalLM", settings)
        for name, settings in (
            ("Falcon", {}),  # one head of keys for all
            ("Gemma", dict(head_dim=16)),
            ("Gemma3", dict(head_dim=16, num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"])),
            ("GPTNeoX", {}),  # hands all channels to its rotation, which turns a part
            ("Mistral", dict(head_dim=16)),
            ("Olmo2", {}),
            ("Olmo3", dict(layer_types=["sliding_attention", "full_attention"])),
            ("Phi3", {}),
            ("Qwen2", {}),
            ("SmolLM3", dict(num_hidden_layers=4)),  # its last layer does not rotate
            ("StableLm", {}),
        )
    },
}
"""Language models that rotate, each with what is particular to it."""


def decoder(name: str, **settings: Any) -> Any:
    """A language model of `DECODERS`."""
    model, own = DECODERS[name]
    return text(model, **{**own, **settings})


DINOV3 = dict(
    hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48, image_size=32, patch_size=8
)


def dinov3(name: str = "DINOv3ViTModel", **settings: Any) -> Any:
    """A model of the DINOv3 family."""
    return strong(getattr(transformers, name)(transformers.DINOv3ViTConfig(**{**DINOV3, **settings})))
